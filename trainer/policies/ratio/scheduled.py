"""Ratios that are known beforehand: the same from first to last, or less and less over the first epochs.

The latter is Deep Gradient Compression's warm-up (Lin et al. 2018). Early gradients are large and change quickly, and
what is held back of them arrives late. From 75 % sparsity on, the fraction that is sent shrinks fourfold an epoch: 25
%, 6.25 %, 1.56 %, 0.4 %, and after four epochs it is the run's own ratio (0.1 % in the paper). A ratio of the schedule
that is below the run's own is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.policy import NothingToRemember
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation, percent

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRatio:
    """The schedule, then the ratio.

    Args:
        ratio: fraction of the elements that is sent after the schedule; 1: dense.
        schedule: ratios of the first epochs, one each; empty: nothing changes, whatever is measured.
    """

    ratio: float = 1.0
    schedule: tuple[float, ...] = ()

    def initial(self) -> NothingToRemember:
        """The epoch says it all."""
        return NothingToRemember()

    def first(self, network: Network | None) -> RatioDecision:
        """The ratio of the first epoch."""
        return RatioDecision(ratio=self.at(0.0))

    def decide(
        self, state: NothingToRemember, observation: RatioObservation
    ) -> tuple[NothingToRemember, RatioDecision]:
        """The ratio of the epoch that has begun."""
        ratio = self.at(observation.epoch)
        if ratio == observation.ratio or not self.schedule:
            return state, RatioDecision(ratio=ratio)
        return state, RatioDecision(ratio=ratio, reason=f"warm-up: {percent(ratio)} from epoch {observation.epoch:.3g}")

    def at(self, epoch: float) -> float:
        """The ratio after so many epochs."""
        done = int(epoch)
        return max(self.ratio, self.schedule[done]) if done < len(self.schedule) else self.ratio
