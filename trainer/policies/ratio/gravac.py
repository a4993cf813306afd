"""Searches the compression factor while training: GraVAC (arXiv 2305.12201).

Factors are 1 / ratio here, as in the paper: 10 sends a tenth. There is a floor factor, and a candidate above it.

**Payload.** With smoothed gains d_c of the candidate and d_min of the floor, the candidate is sent if ``d_c >= eps``,
else the floor if ``d_min >= eps``, else everything. Once a window of steps:

**Next candidate.** The policy raises the candidate: exponentially (floor x 2, 4, 16, 256: 10, 20, 40, 160, 1000) or
geometrically (10, 20, 40, ..., 1280, 2000), up to the largest factor.

**Floor.** If ``|d_min - d_c| <= omega d_min``, nothing is lost by the candidate, which becomes the floor.

**End.** What a factor is worth is ``T = throughput x gain``. If the two largest T differ by no more than omega of the
larger, the search ends with the *smaller* factor of the two: as the text has it, where the pseudo-code takes the factor
of the second largest. (T of 1029.9 at 1280x and of 1035.4 at 2000x, omega 1 %: 1280x.) A search that has tried the
largest factor ends with the best T seen, about which the paper says nothing.

Departures: payloads are chosen at the end of a control period from gathered gains, where the paper (and its released
code, rank by rank) chooses in every step; with `every` of 1 so does this, for the step that follows. The gains of floor
and candidate come from one curve, which is what compressing the compressed amounts to for Top-k; a dense step's time
does not contain a compression that nobody used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.network_state import NetworkState
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent

Raise = Literal["exponential", "geometric"]


class GravacState(Record):
    """Where the search is.

    Attributes:
        floor: the factor below which nothing but dense is sent; grows.
        candidate: the factor that is tried.
        raised: how often the candidate was raised.
        window_steps: steps in the present window.
        floor_gain, candidate_gain: smoothed; absent before a look.
        worth: smoothed throughput (batches a second) x gain of every factor that was sent.
        done: the search is over, and the candidate is what it found.
    """

    floor: PositiveFloat
    candidate: PositiveFloat
    raised: NonNegativeInt = 0
    window_steps: NonNegativeInt = 0
    floor_gain: NonNegativeFloat | None = None
    candidate_gain: NonNegativeFloat | None = None
    worth: dict[float, PositiveFloat] = Field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Gravac:
    """The search.

    Args:
        floor: first factor.
        largest: factor beyond which nothing is tried.
        window_steps: steps between candidates.
        least_gain: eps; above 1 everything is sent always.
        tolerance: omega.
        policy: how the candidate is raised.
        smoothing: weight of the newest gain and throughput, in (0, 1].
        every: steps between decisions; absent: the control period.
    """

    floor: float = 10.0
    largest: float = 1000.0
    window_steps: int = 500
    least_gain: float = 0.7
    tolerance: float = 0.01
    policy: Raise = "exponential"
    smoothing: float = 0.3
    every: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.floor <= self.largest < math.inf:
            raise ValueError(f"factors run from 1 or more upwards, not from {self.floor} to {self.largest}")
        if self.window_steps < 1 or not 0 < self.least_gain < math.inf:
            raise ValueError(f"impossible window {self.window_steps} or least gain {self.least_gain}")
        if not (0 <= self.tolerance < 1 and 0 < self.smoothing <= 1):
            raise ValueError(f"impossible tolerance {self.tolerance} or smoothing {self.smoothing}")

    def initial(self) -> GravacState:
        """The state before the first step: the least compression allowed."""
        return GravacState(floor=self.floor, candidate=self.floor)

    def first(self, network: NetworkState | None) -> RatioDecision:
        """The floor, which is where gains of all candidates can be read."""
        ratio = DENSE if self.least_gain > 1 else 1 / self.floor
        return RatioDecision(ratio=ratio, measure_gain=True, look_after_steps=self.every)

    def decide(self, state: GravacState, observation: RatioObservation) -> tuple[GravacState, RatioDecision]:
        """The state after this period, and the payload of the next."""
        state = self._measured(state, observation)
        before = state.candidate
        if state.window_steps >= self.window_steps and not state.done:
            state = self._next_window(state)
            fresh = observation.gain_at(1 / state.candidate)
            state = state.model_copy(update={"candidate_gain": fresh})
        ratio = self._payload(state)
        if ratio == observation.ratio:
            return state, RatioDecision(ratio=ratio, measure_gain=True, look_after_steps=self.every)
        gain = state.floor_gain if state.candidate_gain is None else state.candidate_gain
        kept = "" if gain is None else f", which keeps {gain:.1%} of the gradient's energy"
        search = f"{'found' if state.done else 'tries'} {state.candidate:.4g}x{kept}"
        moved = "" if before == state.candidate else f" instead of {before:.4g}x"
        reason = f"search {search}{moved}; sends {percent(ratio)}"
        return state, RatioDecision(ratio=ratio, reason=reason, measure_gain=True, look_after_steps=self.every)

    def _measured(self, state: GravacState, observation: RatioObservation) -> GravacState:
        worth = dict(state.worth)
        factor = 1 / observation.ratio
        known = min(worth, key=lambda other: abs(math.log(other / factor)), default=factor)
        factor = known if abs(math.log(known / factor)) < 1e-9 else factor  # 1 / (1 / 49) is not 49
        fresh = max(observation.gain, 1e-12) / observation.step_time_s
        worth[factor] = self._mix(worth.get(factor), fresh)
        floor_gain = observation.gain_at(1 / state.floor)
        gain = observation.gain_at(1 / state.candidate)
        return state.model_copy(
            update={
                "worth": worth,
                "window_steps": state.window_steps + observation.steps,
                "floor_gain": state.floor_gain if floor_gain is None else self._mix(state.floor_gain, floor_gain),
                "candidate_gain": state.candidate_gain if gain is None else self._mix(state.candidate_gain, gain),
            }
        )

    def _next_window(self, state: GravacState) -> GravacState:
        state = state.model_copy(update={"window_steps": 0})
        low, high = state.floor_gain, state.candidate_gain
        if low is not None and high is not None and abs(low - high) <= self.tolerance * low:
            state = state.model_copy(update={"floor": state.candidate, "floor_gain": high})
        found = ideal_factor(state.worth, self.tolerance)
        if found is None and state.candidate >= self.largest:
            found = max(sorted(state.worth), key=state.worth.__getitem__)
        if found is not None:
            factor = min(max(found, 1.0), self.largest)
            changes = {"candidate": factor, "floor": min(state.floor, factor), "done": True}
            return state.model_copy(update=changes)
        raised = state.raised + 1
        candidate = min(self.largest, self.floor * self._raise(raised))
        return state.model_copy(update={"candidate": candidate, "raised": raised})

    def _raise(self, raised: int) -> float:
        """What the first floor is multiplied by: 2, 4, 16, 256, ... or 2, 4, 8, 16, ..."""
        exponent = 2 ** (raised - 1) if self.policy == "exponential" else raised
        return 2.0 ** min(exponent, 64)

    def _payload(self, state: GravacState) -> float:
        if state.candidate_gain is None and state.floor_gain is not None and state.floor_gain >= self.least_gain:
            # The candidate is new: it has to be sent to be seen where no curve reaches down to it.
            return 1 / state.candidate
        if state.candidate_gain is not None and state.candidate_gain >= self.least_gain:
            return 1 / state.candidate
        if state.floor_gain is not None and state.floor_gain >= self.least_gain:
            return 1 / state.floor
        return DENSE

    def _mix(self, before: float | None, fresh: float) -> float:
        return fresh if before is None else self.smoothing * fresh + (1 - self.smoothing) * before


def ideal_factor(worth: Mapping[float, float], tolerance: float) -> float | None:
    """The factor that ends the search: the smaller of the two whose worth is largest, if their worth hardly differs."""
    if len(worth) < 2:
        return None
    first, second = sorted(worth, key=lambda factor: (-worth[factor], factor))[:2]
    if worth[first] - worth[second] > tolerance * worth[first]:
        return None
    return min(first, second)
