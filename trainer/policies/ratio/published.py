"""Ratio policies as published: warm-up, Accordion, ScaDLES' threshold, GraVAC and AR-Topk's choice.

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
minority or a tie decide; here a majority is more than half. The gain is of gradient and residual, which is what is
sent; the paper mixes the two.

**GraVAC** (arXiv 2305.12201) searches the compression factor while training. Factors are 1 / ratio here, as in the
paper: 10 sends a tenth. There is a floor factor, and a candidate above it.

*Payload.* In every step, before anything is sent: the candidate if it keeps eps of the gradient's energy, else the
floor if that does, else everything (`hetopt.trainer.comm.topk`).

*Next candidate.* Once a window of steps the policy raises the candidate: exponentially (floor x 2, 4, 16, 256: 10, 20,
40, 160, 1000) or geometrically (10, 20, 40, ..., 1280, 2000), up to the largest factor.

*Floor.* If ``|d_min - d_c| <= omega d_min``, nothing is lost by the candidate, which becomes the floor.

*End.* What a factor is worth is ``T = throughput x gain``. If the two largest T differ by no more than omega of the
larger, the search ends with the *smaller* factor of the two: as the text has it, where the pseudo-code takes the factor
of the second largest. (T of 1029.9 at 1280x and of 1035.4 at 2000x, omega 1 %: 1280x.) A search that has tried the
largest factor ends with the best T seen, about which the paper says nothing.

Departure: throughput is judged a control period at a time, and counts for the payload that the period's mean gains
call for.

**Scan**: AR-Topk's multi-objective choice (arXiv 2312.02493) of time against gain, made exact. The paper searches one
number with a genetic algorithm over curves fitted to a few measurements. One gain curve and a priced network say what
every candidate takes and keeps, so a scan of 5 to 20 of them finds the same optimum exactly:

1. drop the candidates that another beats or equals in both time (compressing and exchanging) and 1 / gain;
2. scale both objectives to [0, 1] between the best and the worst of those left;
3. take the smallest of ``max(w_time * time, w_gain * inverse gain)`` (achievement scalarising function, Wierzbicki
   1980; weights 0.6 and 0.4 in the released code).

It chooses again when the gain of what is in use has changed by a tenth (as in the paper), or its time has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.options import Option
from hetopt.core.run_spec import AccordionSettings, GravacSettings, ScanSettings, Share, ThresholdSettings
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.policy import NothingToRemember
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRatio:
    """Ratio policy of a schedule, one ratio for each of the first epochs, then a fixed ratio.

    Args:
        ratio: fraction of the elements that is sent after the schedule; 1: dense.
        schedule: ratios of the first epochs, one each; empty: nothing changes, whatever is measured.
    """

    ratio: float = 1.0
    schedule: tuple[float, ...] = ()

    initial: ClassVar[type[NothingToRemember]] = NothingToRemember
    """The epoch says it all."""

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for the ratio of the first epoch.

        Args:
            network: not used.
        """
        return RatioDecision(ratio=self.at(0.0))

    def decide(
        self, state: NothingToRemember, observation: RatioObservation
    ) -> tuple[NothingToRemember, RatioDecision]:
        """Return the state unchanged, and the ratio of the epoch that has begun."""
        ratio = self.at(observation.epoch)
        if ratio == observation.ratio or not self.schedule:
            return state, RatioDecision(ratio=ratio)
        return state, RatioDecision(ratio=ratio, reason=f"warm-up: {percent(ratio)} from epoch {observation.epoch:.3g}")

    def at(self, epoch: float) -> float:
        """Return the ratio once ``epoch`` epochs are done, never below the fixed one."""
        done = int(epoch)
        return max(self.ratio, self.schedule[done]) if done < len(self.schedule) else self.ratio


class AccordionState(Record):
    """State of `Accordion`: the smoothed gradient norm now and at the last look, and when the next look is due.

    Attributes:
        norm: smoothed norm of the gradient; None: not seen yet.
        norm_at_look: smoothed norm at the last look; None: no look yet.
        learning_rate: learning rate of the last period in which it was known; None: in none.
        next_look_epoch: epoch from which the next look is due.
        gentle: whether the gentle ratio is in use.
    """

    norm: NonNegativeFloat | None = None
    norm_at_look: NonNegativeFloat | None = None
    learning_rate: NonNegativeFloat | None = None
    next_look_epoch: NonNegativeFloat = 0.0
    gentle: bool = True


class Accordion(AccordionSettings):
    """Ratio policy: ``gentle`` where the gradient's norm changed or, with ``decay``, the rate fell; else ``strong``.

    Attributes:
        gentle: fraction of the elements that is sent in critical regimes.
        strong: fraction that is sent elsewhere; whoever makes the policy sees that it is no more.
    """

    gentle: Share = 0.01
    strong: Share = 0.001

    initial: ClassVar[type[AccordionState]] = AccordionState
    """Nothing was seen; training begins in a critical regime."""

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for the larger ratio, as gradients change most at first.

        Args:
            network: not used.
        """
        return RatioDecision(ratio=self.gentle)

    def decide(self, state: AccordionState, observation: RatioObservation) -> tuple[AccordionState, RatioDecision]:
        """Return the next state, and the larger ratio if the norm changed fast by the last look, else the smaller."""
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
    """Ratio policy of one ratio or dense exchange, by the workers' votes on the energy that the ratio would lose.

    A ``delta`` of 0 compresses where nothing is lost, one of 1 always.

    Attributes:
        ratio: fraction of the elements that is sent when the workers compress.
    """

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.1

    initial: ClassVar[type[NothingToRemember]] = NothingToRemember
    """The state before the first step: nothing was sent."""

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for dense exchange, and for a look at gains: no worker has voted yet."""
        return RatioDecision(ratio=DENSE, measure_gain=True)

    def decide(
        self, state: NothingToRemember, observation: RatioObservation
    ) -> tuple[NothingToRemember, RatioDecision]:
        """Return the ratio if the workers' gains allow it, else dense exchange; unchanged without a measured gain.

        The state stays as it is; a reason is given with a change alone.
        """
        gains = None if observation.gain_curve is None else observation.gain_curve.gains(self.ratio)
        if gains is None:
            return state, RatioDecision(ratio=observation.ratio, measure_gain=True)
        votes = [gain >= 1 - self.delta - _ROUNDING for gain in gains]
        ratio = self.ratio if 2 * sum(votes) > len(votes) else DENSE
        if ratio == observation.ratio:
            return state, RatioDecision(ratio=ratio, measure_gain=True)
        loss = 1 - sum(gains) / len(gains)
        allowed = f"up to {100 * self.delta:.1f} % is allowed"
        reason = f"{percent(self.ratio)} would lose {100 * loss:.1f} % of the gradient's energy, {allowed}"
        return state, RatioDecision(ratio=ratio, reason=reason, measure_gain=True)


class GravacState(Record):
    """State of GraVAC's search for a compression factor (1 / ratio).

    Attributes:
        floor: factor that a step sends where the candidate keeps too little energy; it grows while the search goes on.
        candidate: factor that is tried, or was found.
        raised: number of times that the candidate was raised.
        window_steps: number of steps in the present window.
        worth: smoothed throughput (batches a second) times gain, of every factor that was sent.
        done: whether the search is over, and the candidate is what it found.
    """

    floor: PositiveFloat
    candidate: PositiveFloat
    raised: NonNegativeInt = 0
    window_steps: NonNegativeInt = 0
    worth: dict[float, PositiveFloat] = Field(default_factory=dict)
    done: bool = False


class Gravac(GravacSettings):
    """Ratio policy that searches for the best compression factor (1 / ratio) while training (GraVAC).

    With ``eps`` above 1 everything is sent always.

    Attributes:
        largest: factor beyond which nothing is tried; no less than the floor.
    """

    largest: PositiveFloat = 1000.0

    def initial(self) -> GravacState:
        """Return the state before the first step: candidate and floor are the first factor of the settings."""
        return GravacState(floor=self.floor, candidate=self.floor)

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for the floor's ratio, sent in the steps where it keeps enough energy."""
        return self.payload(self.initial())

    def decide(self, state: GravacState, observation: RatioObservation) -> tuple[GravacState, RatioDecision]:
        """Return the state of the search after this period, and what each step of the next may send."""
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
        """Return the decision by which each step sends the candidate, the floor or everything, by the energy kept.

        Args:
            state: state of the search.
            reason: words on what changed; None: nothing did.
        """
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
        """Return the state with a period's throughput times gain added to the factor that most of its steps sent."""
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
        """Return the state with the next candidate; or with the best factor, and the search done.

        The floor rises to the candidate where that keeps about as much (``omega``); without both ``gains`` (None) it
        stays.
        """
        state = state.model_copy(update={"window_steps": 0})
        if gains is not None and gains[1] - gains[0] <= self.omega * gains[1]:
            state = state.model_copy(update={"floor": state.candidate})
        ideal = ideal_factor(state.worth, self.omega)
        if ideal is None and state.candidate >= self.largest:
            ideal = max(sorted(state.worth), key=state.worth.__getitem__)
        if ideal is not None:
            factor = min(max(ideal, 1.0), self.largest)
            return state.model_copy(update={"candidate": factor, "floor": min(state.floor, factor), "done": True})
        raised = state.raised + 1
        # 2, 4, 16, 256, ... or 2, 4, 8, 16, ...
        multiple = 2.0 ** min(2 ** (raised - 1) if self.raises == "exponential" else raised, 64)
        candidate = min(self.largest, self.floor * multiple)
        return state.model_copy(update={"candidate": candidate, "raised": raised})


def ideal_factor(worth: Mapping[float, float], tolerance: float) -> float | None:
    """Return the smaller of the two factors of most worth, if the worths are equal within ``tolerance``.

    None: they differ, or fewer than two factors were sent.

    Args:
        worth: throughput times gain, by factor.
        tolerance: relative difference up to which two worths count as equal.
    """
    if len(worth) < 2:
        return None
    first, second = sorted(worth, key=lambda factor: (-worth[factor], factor))[:2]
    if worth[first] - worth[second] > tolerance * worth[first]:
        return None
    return min(first, second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """Predicted seconds of one exchange by a candidate, and the fraction of the gradient's energy that it keeps."""

    time_s: float
    gain: float


class ScanState(Record):
    """State of `ScanRatio`: gain and exchange seconds of the choice when it was made; None before the first."""

    gain: PositiveFloat | None = None
    time_s: PositiveFloat | None = None


class ScanRatio(ScanSettings):
    """Ratio policy that scans exchange options for the best of exchange time and energy kept (AR-Topk's choice).

    Without ``least_gain``, of which the paper knows nothing, the choice went to 0.3 % after one step over quick links,
    whose gain fell to 4 %, and little was learned.

    Attributes:
        options: candidates, several ratios of one or more exchanges.
    """

    options: Annotated[tuple[Option, ...], Field(min_length=1)]

    initial: ClassVar[type[ScanState]] = ScanState
    """The state before the first scan: no ratio was chosen."""

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for the option of largest ratio, from which the gain of all others can be read.

        ``network`` is not used.
        """
        largest = max(self.options, key=lambda option: option.ratio)
        return RatioDecision(ratio=largest.ratio, option=largest.key, measure_gain=True)

    def decide(self, state: ScanState, observation: RatioObservation) -> tuple[ScanState, RatioDecision]:
        """Return the next state and choice; unchanged without gain curve or network, or while gain and time hold."""
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
        places = [place for place, prospect in enumerate(prospects) if prospect.gain >= self.least_gain]
        if not places:
            places = [max(range(len(prospects)), key=lambda place: prospects[place].gain)]
        chosen = places[scan([prospects[place] for place in places], time_weight=self.time, gain_weight=self.gain)]
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
        """Return an option's time of compression and exchange, and its gain; 1 where none is known or measured."""
        curve = observation.gain_curve
        gain = option.gain if option.gain is not None or curve is None else curve.gain(option.ratio)
        return Prospect(
            time_s=option.compress_s + network.exchange_s(option), gain=max(1e-9, 1.0 if gain is None else gain)
        )


def scan(prospects: Sequence[Prospect], *, time_weight: float, gain_weight: float) -> int:
    """Return the index of the prospect of least weighted maximum of scaled time and 1 / gain; of equals the first.

    Args:
        prospects: candidates, at least one.
        time_weight: weight of the seconds.
        gain_weight: weight of 1 / gain.
    """
    front = pareto(prospects)
    times = _scaled([prospects[i].time_s for i in front])
    losses = _scaled([1 / prospects[i].gain for i in front])
    worst = [max(time_weight * time, gain_weight * loss) for time, loss in zip(times, losses, strict=True)]
    return front[worst.index(min(worst))]


def pareto(prospects: Sequence[Prospect]) -> list[int]:
    """Return ascending indices of the prospects that no other beats or equals in time and gain; of equals the first."""
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
