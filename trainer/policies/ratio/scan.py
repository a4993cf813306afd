"""Weighs time against gain over a handful of ratios: AR-Topk's multi-objective choice (arXiv 2312.02493), made exact.

The paper searches one number with a genetic algorithm over curves fitted to a few measurements. One gain curve and a
priced network say what every candidate takes and keeps, so a scan of 5 to 20 of them finds the same optimum exactly:

1. drop the candidates that another beats or equals in both time (compressing and exchanging) and 1 / gain;
2. scale both objectives to [0, 1] between the best and the worst of those left;
3. take the smallest of ``max(w_time * time, w_gain * inverse gain)`` (achievement scalarising function, Wierzbicki
   1980; weights 0.6 and 0.4 in the released code).

It chooses again when the gain of what is in use has changed by a tenth (as in the paper), or its time has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.options import Option
from hetopt.core.run_spec import ScanSettings
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation, percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """Time and retained energy of one candidate ratio."""

    time_s: float
    gain: float


class ScanState(Record):
    """Gain and time of the choice when it was made; absent before the first."""

    gain: PositiveFloat | None = None
    time_s: PositiveFloat | None = None


class ScanRatio(ScanSettings):
    """Scans its options.

    Without ``least_gain``, of which the paper knows nothing, the choice went to 0.3 % after one step over quick links,
    whose gain fell to 4 %, and little was learned.

    Attributes:
        options: candidates, several ratios of one or more exchanges.
    """

    options: Annotated[tuple[Option, ...], Field(min_length=1)]

    def initial(self) -> ScanState:
        """The state before the first scan: no ratio was chosen."""
        return ScanState()

    def first(self, network: Network | None) -> RatioDecision:
        """The largest ratio, from which the gain of all others can be read."""
        largest = max(self.options, key=lambda option: option.ratio)
        return RatioDecision(ratio=largest.ratio, option=largest.key, measure_gain=True)

    def decide(self, state: ScanState, observation: RatioObservation) -> tuple[ScanState, RatioDecision]:
        """The next choice. Without a gain curve or a network nothing changes."""
        keep = RatioDecision(ratio=observation.ratio, option=observation.option, measure_gain=True)
        used = next((option for option in self.options if option.key == observation.option), None)
        network = observation.network
        if network is None or observation.gain_curve is None:
            return state, keep
        prospects = [self._prospect(option, observation, network) for option in self.options]
        if used is not None and state.gain is not None and state.time_s is not None:
            now = prospects[self.options.index(used)]
            moved = max(abs(now.gain / state.gain - 1), abs(now.time_s / state.time_s - 1))
            if moved < self.sensitivity:
                return state, keep
        places = [place for place, one in enumerate(prospects) if one.gain >= self.least_gain]
        if not places:
            places = [max(range(len(prospects)), key=lambda place: prospects[place].gain)]
        chosen = places[scan([prospects[one] for one in places], time_weight=self.time, gain_weight=self.gain)]
        option, prospect = self.options[chosen], prospects[chosen]
        state = ScanState(gain=prospect.gain, time_s=max(prospect.time_s, 1e-12))
        if option.key == observation.option:
            return state, keep
        reason = (
            f"{percent(option.ratio)} by {option.collective}: {1e3 * prospect.time_s:.3g} ms to exchange, "
            f"{100 * prospect.gain:.1f} % of the gradient's energy kept"
        )
        return state, RatioDecision(ratio=option.ratio, option=option.key, reason=reason, measure_gain=True)

    def _prospect(self, option: Option, observation: RatioObservation, network: Network) -> Prospect:
        curve = observation.gain_curve
        gain = option.gain if option.gain is not None or curve is None else curve.gain(option.ratio)
        return Prospect(
            time_s=option.compress_s + network.exchange_s(option), gain=max(1e-9, 1.0 if gain is None else gain)
        )


def scan(prospects: Sequence[Prospect], *, time_weight: float, gain_weight: float) -> int:
    """Index of the best; the first of equals.

    Raises:
        ValueError: nothing to choose from.
    """
    front = pareto(prospects)
    if not front:
        raise ValueError("a scan needs prospects")
    times = _scaled([prospects[i].time_s for i in front])
    losses = _scaled([1 / prospects[i].gain for i in front])
    worst = [max(time_weight * time, gain_weight * loss) for time, loss in zip(times, losses, strict=True)]
    return front[worst.index(min(worst))]


def pareto(prospects: Sequence[Prospect]) -> list[int]:
    """Indices of the prospects that no other beats or equals in both respects; of equal ones the first."""
    order = sorted(range(len(prospects)), key=lambda i: (prospects[i].time_s, -prospects[i].gain, i))
    front: list[int] = []
    best = -math.inf
    for i in order:
        if prospects[i].gain > best:
            front.append(i)
            best = prospects[i].gain
    return sorted(front)


def _scaled(values: Sequence[float]) -> list[float]:
    low, width = min(values), max(values) - min(values)
    return [(value - low) / width if width > 0 else 0.0 for value in values]
