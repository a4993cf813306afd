"""Compresses only while little is lost, by vote: the rule of ScaDLES (arXiv 2301.08897).

A worker votes to compress if ``(|g|^2 - |top-k(g)|^2) / |g|^2 <= delta``, that is, if its gain is at least 1 - delta.
The released code lets a minority or a tie decide; here a majority is more than half, and other ways to combine votes
have names. The gain is of gradient and residual, which is what is sent; the paper mixes the two.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetopt.core.run_spec import ThresholdSettings
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.policy import NothingToRemember
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent

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
