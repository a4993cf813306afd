"""Searches the compression factor while training: GraVAC (arXiv 2305.12201).

Factors are 1 / ratio here, as in the paper: 10 sends a tenth. There is a floor factor, and a candidate above it.

**Payload.** In every step, before anything is sent: the candidate if it keeps eps of the gradient's energy, else the
floor if that does, else everything (`hetopt.trainer.comm.topk`). Once a window of steps:

**Next candidate.** The policy raises the candidate: exponentially (floor x 2, 4, 16, 256: 10, 20, 40, 160, 1000) or
geometrically (10, 20, 40, ..., 1280, 2000), up to the largest factor.

**Floor.** If ``|d_min - d_c| <= omega d_min``, nothing is lost by the candidate, which becomes the floor.

**End.** What a factor is worth is ``T = throughput x gain``. If the two largest T differ by no more than omega of the
larger, the search ends with the *smaller* factor of the two: as the text has it, where the pseudo-code takes the factor
of the second largest. (T of 1029.9 at 1280x and of 1035.4 at 2000x, omega 1 %: 1280x.) A search that has tried the
largest factor ends with the best T seen, about which the paper says nothing.

Departure: throughput is judged a control period at a time, and counts for the payload that the period's mean gains
call for.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.run_spec import GravacSettings
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent


class GravacState(Record):
    """Where the search is.

    Attributes:
        floor: the factor below which nothing but dense is sent; grows.
        candidate: the factor that is tried.
        raised: how often the candidate was raised.
        window_steps: steps in the present window.
        worth: smoothed throughput (batches a second) x gain of every factor that was sent.
        done: the search is over, and the candidate is what it found.
    """

    floor: PositiveFloat
    candidate: PositiveFloat
    raised: NonNegativeInt = 0
    window_steps: NonNegativeInt = 0
    worth: dict[float, PositiveFloat] = Field(default_factory=dict)
    done: bool = False


class Gravac(GravacSettings):
    """The search. With ``eps`` above 1 everything is sent always.

    Attributes:
        largest: factor beyond which nothing is tried; no less than the floor.
    """

    largest: PositiveFloat = 1000.0

    def initial(self) -> GravacState:
        """The state before the first step: the least compression allowed."""
        return GravacState(floor=self.floor, candidate=self.floor)

    def first(self, network: Network | None) -> RatioDecision:
        """The floor, where it keeps enough."""
        return self.payload(self.initial())

    def decide(self, state: GravacState, observation: RatioObservation) -> tuple[GravacState, RatioDecision]:
        """The state after this period, and the payloads of the next."""
        state, before = self._measured(state, observation), state
        if state.window_steps >= self.window and not state.done:
            state = self._next_window(state, observation.level_gains)
        if self.eps > 1 or (state.floor, state.candidate) == (before.floor, before.candidate):
            return state, self.payload(state)
        verb = "found" if state.done else "tries"
        reason = f"search {verb} {state.candidate:.4g}x instead of {before.candidate:.4g}x"
        if state.candidate > 1:
            reason += (
                f"; steps send {percent(1 / state.candidate)} where that keeps {100 * self.eps:.0f} % of the "
                f"gradient's "
                f"energy, else {percent(1 / state.floor)}, else everything"
            )
        return state, self.payload(state, reason)

    def payload(self, state: GravacState, reason: str | None = None) -> RatioDecision:
        """What each step chooses from until the window ends."""
        if self.eps > 1 or state.candidate == 1:
            return RatioDecision(ratio=DENSE, reason=reason)
        return RatioDecision(
            ratio=1 / state.candidate,
            floor_ratio=1 / state.floor,
            least_gain=self.eps,
            reason=reason,
            look_after_steps=None if state.done else max(1, self.window - state.window_steps),
        )

    def _measured(self, state: GravacState, observation: RatioObservation) -> GravacState:
        worth = dict(state.worth)
        sent = DENSE
        if observation.level_gains is not None:
            kept = zip((state.candidate, state.floor), observation.level_gains, strict=True)
            sent = next((factor for factor, gain in kept if gain >= self.eps), DENSE)
        fresh = max(observation.gain, 1e-12) / observation.step_s
        before = worth.get(sent)
        worth[sent] = fresh if before is None else self.smoothing * fresh + (1 - self.smoothing) * before
        return state.model_copy(update={"worth": worth, "window_steps": state.window_steps + observation.steps})

    def _next_window(self, state: GravacState, gains: tuple[float, float] | None) -> GravacState:
        state = state.model_copy(update={"window_steps": 0})
        if gains is not None and gains[1] - gains[0] <= self.omega * gains[1]:
            state = state.model_copy(update={"floor": state.candidate})
        found = ideal_factor(state.worth, self.omega)
        if found is None and state.candidate >= self.largest:
            found = max(sorted(state.worth), key=state.worth.__getitem__)
        if found is not None:
            factor = min(max(found, 1.0), self.largest)
            return state.model_copy(update={"candidate": factor, "floor": min(state.floor, factor), "done": True})
        raised = state.raised + 1
        candidate = min(self.largest, self.floor * self._raise(raised))
        return state.model_copy(update={"candidate": candidate, "raised": raised})

    def _raise(self, raised: int) -> float:
        """What the first floor is multiplied by: 2, 4, 16, 256, ... or 2, 4, 8, 16, ..."""
        exponent = 2 ** (raised - 1) if self.raises == "exponential" else raised
        return 2.0 ** min(exponent, 64)


def ideal_factor(worth: Mapping[float, float], tolerance: float) -> float | None:
    """The factor that ends the search: the smaller of the two whose worth is largest, if their worth hardly differs."""
    if len(worth) < 2:
        return None
    first, second = sorted(worth, key=lambda factor: (-worth[factor], factor))[:2]
    if worth[first] - worth[second] > tolerance * worth[first]:
        return None
    return min(first, second)
