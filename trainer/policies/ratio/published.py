"""Ratio policies as published: known beforehand, by the gradient's change, by votes, by search, by time against gain.

**Warm-up.** Deep Gradient Compression (Lin et al. 2018): early gradients are large and change quickly, and what is held
back of them arrives late. From 75 % sparsity on, the fraction that is sent shrinks fourfold an epoch: 25 %, 6.25 %,
1.56 %, 0.4 %, and after four epochs it is the run's own ratio (0.1 % in the paper). A ratio of the schedule that is
below the run's own is left out.

**Accordion** (Agarwal et al., MLSys 2021) sends much while the gradient changes and little while it does not. Where the
relative change of the gradient's norm since the last look reaches a threshold, training is in a critical regime, and
the gentle ratio is used; elsewhere the strong one. Two forms are in use, and both are here:

- `original`: looks every ten epochs, threshold 0.5, and a learning rate that falls begins a critical regime too;
- `released`: the script beside AR-Topk looks in every step at a smoothed norm, threshold 0.2, ratios 1 % and 0.1 %.

Departures: norms are of the whole gradient, not layer by layer, and a look comes at the end of a control period.

**Threshold** (ScaDLES, arXiv 2301.08897) compresses only while little is lost, by vote. A worker votes to compress if
``(|g|^2 - |top-k(g)|^2) / |g|^2 <= delta``, that is, if its gain is at least 1 - delta. The released code lets a
minority or a tie decide; here a majority is more than half, and other ways to combine votes have names. The gain is of
gradient and residual, which is what is sent; the paper mixes the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from hetopt.core.artifact import Record
from hetopt.core.run_spec import AccordionSettings, Share, ThresholdSettings
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.policy import NothingToRemember
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent

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


class AccordionState(Record):
    """The smoothed norm, what it and the learning rate were at the last look, and when the next look is due."""

    norm: NonNegativeFloat | None = None
    norm_at_look: NonNegativeFloat | None = None
    learning_rate: NonNegativeFloat | None = None
    next_look_epoch: NonNegativeFloat = 0.0
    gentle: bool = True


class Accordion(AccordionSettings):
    """Two ratios by the change of the gradient's norm.

    Attributes:
        gentle: fraction that is sent in critical regimes.
        strong: elsewhere; no more than that.
    """

    gentle: Share = 0.01
    strong: Share = 0.001

    def initial(self) -> AccordionState:
        """Nothing was seen; training begins in a critical regime."""
        return AccordionState()

    def first(self, network: Network | None) -> RatioDecision:
        """Begin with the larger ratio, as gradients change most at first."""
        return RatioDecision(ratio=self.gentle)

    def decide(self, state: AccordionState, observation: RatioObservation) -> tuple[AccordionState, RatioDecision]:
        """The larger ratio where the gradient's norm changes fast (a critical regime), else the smaller one."""
        fresh, before = observation.gradient_norm, state.norm
        norm = fresh if before is None else self.smoothing * fresh + (1 - self.smoothing) * before
        change = 0.0
        gentle, looked_at, next_look = state.gentle, state.norm_at_look, state.next_look_epoch
        rate = observation.learning_rate
        if looked_at is None:
            looked_at, next_look = norm, observation.epoch + self.epochs
        elif observation.epoch >= next_look:
            change = abs(norm - looked_at) / looked_at if looked_at > 0 else math.inf if norm > 0 else 0.0
            gentle = change >= self.threshold
            looked_at, next_look = norm, observation.epoch + self.epochs
        decayed = rate is not None and state.learning_rate is not None and rate < state.learning_rate
        if self.decay and decayed:
            gentle = True
        state = AccordionState(
            norm=norm,
            norm_at_look=looked_at,
            learning_rate=state.learning_rate if rate is None else rate,
            next_look_epoch=next_look,
            gentle=gentle,
        )
        ratio = self.gentle if gentle else self.strong
        if ratio == observation.ratio:
            return state, RatioDecision(ratio=ratio)
        cause = (
            "the learning rate has fallen"
            if gentle and decayed
            else f"the gradient's norm changed by {100 * change:.0f} %"
        )
        return state, RatioDecision(ratio=ratio, reason=f"{cause}: {percent(ratio)}")


_ROUNDING = 1e-9  # 1 - 0.9 is a little less than 0.1


class ThresholdRatio(ThresholdSettings):
    """One ratio or everything.

    A ``delta`` of 0 is dense, of 1 always compressed. Votes that are combined by ``mean`` judge the workers' mean loss.

    Attributes:
        ratio: fraction that is sent when the workers compress.
    """

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def initial(self) -> NothingToRemember:
        """The state before the first step: nothing was sent."""
        return NothingToRemember()

    def first(self, network: Network | None) -> RatioDecision:
        """Everything: nobody has voted yet."""
        return RatioDecision(ratio=DENSE, measure_gain=True)

    def decide(
        self, state: NothingToRemember, observation: RatioObservation
    ) -> tuple[NothingToRemember, RatioDecision]:
        """What the votes say; without a look at the gain nothing changes."""
        gains = observation.gains_at(self.ratio)
        if gains is None:
            return state, RatioDecision(ratio=observation.ratio, measure_gain=True)
        ratio = self.ratio if self._compresses(gains) else DENSE
        if ratio == observation.ratio:
            return state, RatioDecision(ratio=ratio, measure_gain=True)
        loss = 1 - sum(gains) / len(gains)
        allowed = f"up to {100 * self.delta:.1f} % is allowed"
        reason = f"{percent(self.ratio)} would lose {100 * loss:.1f} % of the gradient's energy, {allowed}"
        return state, RatioDecision(ratio=ratio, reason=reason, measure_gain=True)

    def _compresses(self, gains: tuple[float, ...]) -> bool:
        if self.delta == 0:
            return False
        least = 1 - self.delta - _ROUNDING
        votes = sum(gain >= least for gain in gains)
        match self.combine:
            case "majority":
                return 2 * votes > len(gains)
            case "any":
                return votes > 0
            case "all":
                return votes == len(gains)
            case "mean":
                return sum(gains) / len(gains) >= least
