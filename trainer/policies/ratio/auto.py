"""hetopt's own policy: tries what promises most for a few whole steps, commits to the best, looks anew after changes.

What an option (compressor, collective, ratio; dense among them) is worth is J, the time of one dense step's progress:

    J = step_time / (1 / slowdown(gain) - what is held back more at the end / steps left)

- `step_time` is that of whole steps, as they were timed while the option was in use. Before that it is what its parts
  are timed to take (`Option.step_s`), the exchange as much longer as others by the same collective turned out to be.
- `gain` is what was kept while it was in use. Before that it is read off the gain curve that one Top-k yields, less
  what thicker options turned out to keep less than that.
- `slowdown` is the law of `hetopt.core.compression_slowdown`.

**Explore.** Of the options that keep enough, that one is tried next whose J would be least if what it takes beyond its
computation were as much less as a prediction may be wrong (`UNTRIED`): optimism in the face of uncertainty (Lai and
Robbins 1985). A trial is a period of `TRIAL_STEPS`, and no look rules out for good (`FORGOTTEN`). What trials take
longer than the best would have taken for the same progress is booked, and those that may cost more than is left of
`TRIAL_STEPS x J` wait. Dense training is tried once, whatever is thought of it: never to lose to it by more than that
is a promise.

**Commit** to the least J. It is left for what saves `LEAST_SAVING` of it.

**Anew.** When a step takes another time than it did (`hetopt.trainer.comm.network_tracker`), what was timed before is
forgotten.

**Guard.** Only options count that keep `least_gain`, and that by the law cost at most `most_lost` more steps. What
turns out to keep less is left at once. Where thin exchanges would save more than it takes to find out, twins are
trained for some steps (`hetopt.trainer.policies.ratio.paired_trial`): if the thin one keeps up, lateness costs nothing
from then on, down to the ratio that was tried. Where the loss rises far above the least it was while something is held
back, everything is sent until the run is twice as long: error feedback bears smaller learning rates than dense training
does.

What each rule and constant is worth is measured on simulated runs (`benchmarks.auto`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.planner import Option
from hetopt.core.comm.way_text import way_in_words
from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT, LEAST_GAIN, backlog_after, distance
from hetopt.trainer.policies.ratio.gain_curve import interpolated
from hetopt.trainer.policies.ratio.paired_trial import Verdict, most_cost_s
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent

TRIAL_STEPS = 4
"""Of the first period of every option. The row tells of three of them: the median leaves the first, slower one out."""

UNTRIED = 0.25
"""Part of what a step takes beyond its computation that a prediction of it may be too much by."""

LEAST_SAVING = 0.02
"""Of J, that is worth a change."""

FORGOTTEN = 4
"""Times the steps that a run had when an option was last in use, after which that is forgotten: one look may have been
disturbed, and must rule nothing out for good."""

LOOK_EVERY_STEPS = 50
"""From one gain curve to the next, for looking takes as long as a selection."""

TWINS_AFTER, TWINS_LATER = 50, 4
"""Steps after which twins that did not keep up are tried again, and how many times as many after each trial."""

RISEN, FULL_FOR = 1.5, 2
"""Times the least loss of a period, above which everything is sent, and times the run's steps by then until which."""

ODDS = 0.5
"""That twins which fell behind keep up the next time, after each trial."""

_LEAST_DELIVERY = 0.02  # of a step, in dense steps: less is not told apart


class Seen(Record):
    """What an option was like while it was in use.

    Attributes:
        step_s: mean of its step, by periods.
        steps: that say so, forgotten ones left out; the more, the surer.
        longer: what compressing and exchanging took, over what they were predicted to take; absent where backward hides
            them.
        at: step of the run when it was last in use.
    """

    step_s: PositiveFloat
    steps: NonNegativeFloat
    at: NonNegativeInt = 0
    longer: PositiveFloat | None = None


class AutoState(Record):
    """What was learned, and the account of trials.

    Attributes:
        option: in use.
        seen: options since the last change of the network, by key.
        kept: gain over what the curve said of it, of options that were ever in use.
        points: the newest gain curve; empty before the first look.
        gain: of what is in use.
        changes: that the watch of the network had counted.
        dense_tried: whether dense training ever was.
        best_s: the least J there was when the present option's trial began; absent while none is on trial.
        spent_s: booked for trials.
        compute_s, backward_s: means since that change, the part of it that makes gradients beside it.
        computed: steps that say so.
        least_loss: of a period; absent before the first.
        full_until: step before which everything is sent, for the loss had risen.
        steps, steps_left: of the run, done and to do, as far as that is known.
        looked: step of the newest look.
        backlog: steps' worth of gradient that is held back.
        verdict, trials: the last of twins, and how many there were.
    """

    option: str | None = None
    seen: dict[str, Seen] = Field(default_factory=dict)
    kept: dict[str, PositiveFloat] = Field(default_factory=dict)
    points: tuple[tuple[float, float], ...] = ()
    gain: PositiveFloat = 1.0
    changes: NonNegativeInt = 0
    dense_tried: bool = False
    best_s: PositiveFloat | None = None
    spent_s: NonNegativeFloat = 0.0
    compute_s: NonNegativeFloat = 0.0
    backward_s: NonNegativeFloat = 0.0
    computed: NonNegativeFloat = 0.0
    least_loss: float | None = None
    full_until: NonNegativeInt = 0
    periods: NonNegativeInt = 0
    steps: NonNegativeInt = 0
    steps_left: PositiveFloat | None = None
    looked: NonNegativeInt | None = None
    backlog: NonNegativeFloat = 0.0
    verdict: Verdict | None = None
    trials: NonNegativeInt = 0

    @property
    def harmless_from(self) -> float:
        """The ratio that may be sent, and all above, however little of the gradient that keeps; infinite: no trial has
        shown so."""
        return self.verdict.ratio if self.verdict is not None and self.verdict.says == "harmless" else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """An option as it looks now: ``per_progress_s`` is J, ``hoped_s`` what that may be at best."""

    option: Option
    gain: float
    step_s: float
    per_progress_s: float
    hoped_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoRatio:
    """Chooses the option that promises the least time to the target.

    Args:
        options: what there is to choose from; dense exchange among them.
        coefficient: of the law of slowdown, as far as it is known.
        least_gain: options that keep less are not used, unless a trial says that they may be.
        most_lost: more steps than dense training that are borne; infinite: only time counts.
        tries_twins: whether trials can be made; if not, the law stands.

    Raises:
        ValueError: no dense option, two options of one key, or an impossible number.
    """

    options: tuple[Option, ...]
    coefficient: float = CAUTIOUS_COEFFICIENT
    least_gain: float = LEAST_GAIN
    most_lost: float = math.inf
    tries_twins: bool = False

    def __post_init__(self) -> None:
        if not any(map(is_dense, self.options)):
            raise ValueError("a dense option (ratio 1, gain 1) has to be among the options")
        if len({option.key for option in self.options}) != len(self.options):
            raise ValueError("two options have the same compressor, collective and ratio")
        if not (0 <= self.coefficient < math.inf and 0 < self.least_gain <= 1 and self.most_lost > 0):
            raise ValueError("least_gain is in (0, 1], most_lost above 0, and the coefficient is not negative")

    def initial(self) -> AutoState:
        """The state before the first step: no option was measured."""
        return AutoState()

    def first(self, network: NetworkState | None) -> RatioDecision:
        """Dense, or the largest ratio with a curve if that exchanges sooner: from there all other gains can be read."""
        starts = [self._dense]
        if looking := [option for option in self.options if option.gain is None]:
            largest = max(option.ratio for option in looking)
            starts += [option for option in looking if option.ratio == largest]
        chosen = starts[0]
        if network is not None:
            chosen = min(starts, key=lambda option: option.compress_s + option.exchange_s(network))
        return RatioDecision(ratio=chosen.ratio, option=chosen.key, measure_gain=True, look_after_steps=TRIAL_STEPS)

    def decide(self, state: AutoState, observation: RatioObservation) -> tuple[AutoState, RatioDecision]:
        """The state after this period, and what to exchange from now on.

        Raises:
            ValueError: the observation names no option of this policy, or no network.
        """
        used = next((option for option in self.options if option.key == observation.option), None)
        network = observation.network
        if used is None or network is None:
            raise ValueError(f"auto needs a network and one of its own options, not {observation.option!r}")
        if (
            observation.is_suspect
        ):  # a disturbance, or a change: the next few steps tell, and nothing is learned of these
            return state, replace(self._kept(state, used), look_after_steps=TRIAL_STEPS)
        state = self._learned(state, used, observation, network)
        outlook = Outlook(self, state, network)
        now = outlook.judged(used)
        assert now is not None
        state = _booked(state, now, observation)
        if used.gain is None and _has_risen(state, observation.loss):
            state = state.model_copy(update={"full_until": FULL_FOR * state.steps})
            return self._changed(state, now, self._dense, "the loss has risen far above the least it was")
        usable = outlook.usable()
        if not outlook.keeps_enough(used, now.gain):
            told = f"{100 * now.gain:.0f} % of the energy is less than what must be kept"
            return self._changed(state, now, min(usable, key=lambda one: one.per_progress_s).option, told)
        best = min((one for one in usable if outlook.timed(one.option)), key=lambda one: one.per_progress_s)
        if (ratio := outlook.worth_trying(best)) is not None:
            return state, replace(self._kept(state, used), try_ratio=ratio, look_after_steps=1)
        if chosen := self._trial(state, best, [one for one in usable if one.option.key != used.key]):
            state = state.model_copy(update={"best_s": best.per_progress_s})
            return self._changed(state, now, chosen.option, _told(now, chosen, "tried out, it may be the best"))
        saving = 1 - best.per_progress_s / now.per_progress_s
        if saving >= LEAST_SAVING:
            return self._changed(
                state, now, best.option, _told(now, best, f"{100 * saving:.0f} % less time to the target")
            )
        return state, self._kept(state, used)

    def _trial(self, state: AutoState, best: Judged, others: Sequence[Judged]) -> Judged | None:
        """What to try next; nothing that may cost more than is left, or cannot be better by what a change is worth."""
        left_s = TRIAL_STEPS * best.per_progress_s - state.spent_s
        hopeful = [
            one
            for one in others
            if TRIAL_STEPS * (one.per_progress_s - best.per_progress_s) <= left_s
            and (
                one.hoped_s <= (1 - LEAST_SAVING) * best.per_progress_s
                or (is_dense(one.option) and not state.dense_tried)
            )
        ]
        return min(hopeful, key=lambda one: one.hoped_s, default=None)

    def _changed(self, state: AutoState, now: Judged, option: Option, told: str) -> tuple[AutoState, RatioDecision]:
        if option.key == now.option.key:
            return state, self._kept(state, option)
        return state, RatioDecision(
            ratio=option.ratio,
            option=option.key,
            reason=f"{way_in_words(option.key)} instead of {way_in_words(now.option.key)}: {told}",
            look_after_steps=TRIAL_STEPS,
        )

    def _kept(self, state: AutoState, used: Option) -> RatioDecision:
        return RatioDecision(ratio=used.ratio, option=used.key, measure_gain=_is_look_due(state))

    @property
    def _dense(self) -> Option:
        return next(filter(is_dense, self.options))

    def _learned(
        self, state: AutoState, used: Option, observation: RatioObservation, network: NetworkState
    ) -> AutoState:
        """The state after a period of an option."""
        anew = observation.changes != state.changes or not state.periods
        seen = {} if anew else state.seen
        computed = (0.0 if anew else state.computed) + observation.steps
        weight = observation.steps / computed
        compute_s = state.compute_s + weight * (observation.compute_s - state.compute_s)
        backward_s = state.backward_s + weight * (observation.backward_s - state.backward_s)
        before = seen.get(used.key, Seen(step_s=observation.step_time_s, steps=0))
        steps = before.steps + observation.steps
        step_s = before.step_s + observation.steps / steps * (observation.step_time_s - before.step_s)
        longer = _longer(used, network, step_s, compute_s, backward_s)
        verdict = observation.verdict
        curve = observation.gain_curve
        changes: dict[str, object] = {
            "option": used.key,
            "seen": {
                **seen,
                used.key: Seen(step_s=step_s, steps=steps, longer=longer, at=observation.step),
            },
            "changes": observation.changes,
            "gain": used.gain if used.gain is not None else max(1e-6, observation.gain),
            "dense_tried": state.dense_tried or is_dense(used),
            "compute_s": compute_s,
            "backward_s": backward_s,
            "computed": computed,
            "least_loss": min((x for x in (state.least_loss, observation.loss) if x is not None), default=None),
            "periods": state.periods + 1,
            "steps": observation.step,
            "steps_left": observation.steps_left,
        }
        if curve is not None:
            changes |= {"points": curve.points(), "looked": observation.step}
        if verdict is not None:
            changes |= {"verdict": verdict, "trials": state.trials + 1}
        state = state.model_copy(update=changes)
        if used.gain is not None:
            return state.model_copy(update={"backlog": backlog_after(state.backlog, used.gain, observation.steps)})
        backlog = backlog_after(state.backlog, state.gain, observation.steps)
        kept = state.kept
        if (expected := _on_curve(state, used.ratio)) is not None:
            kept = {**kept, used.key: max(1e-6, state.gain / expected)}
        return state.model_copy(update={"kept": kept, "backlog": backlog})


@dataclass(frozen=True)
class Outlook:
    """What every option is judged by: the policy, what it knows, and the network as measured."""

    policy: AutoRatio
    state: AutoState
    network: NetworkState

    @property
    def coefficient(self) -> float:
        """Of the law of slowdown, as it stands after trials."""
        match self.state.verdict and self.state.verdict.says:
            case "harmless":
                return 0.0
            case "harmful":
                return max(self.policy.coefficient, CAUTIOUS_COEFFICIENT)
            case _:
                return self.policy.coefficient

    def usable(self) -> list[Judged]:
        """The options that keep enough, as far as is known; dense training is always one of them."""
        judged = [self.judged(option) for option in self.policy.options if not self._is_barred(option)]
        return [one for one in judged if one is not None and self.keeps_enough(one.option, one.gain)]

    def _is_barred(self, option: Option) -> bool:
        return option.gain is None and self.state.steps < self.state.full_until

    def keeps_enough(self, option: Option, gain: float) -> bool:
        """Whether so much is learned as it has to be; lateness alone is weighed, not forbidden."""
        if option.ratio >= self.state.harmless_from:
            return True
        lost = self.coefficient * distance(gain)
        return gain >= self.policy.least_gain and lost <= self.policy.most_lost

    def judged(self, option: Option, *, late_is_harmless: bool = False) -> Judged | None:
        """The option as it looks now; None where nothing is known of its gain."""
        gain = self.gain(option)
        if gain is None:
            return None
        step_s, compute_s = self.step_s(option), self.state.compute_s
        at_best_s = step_s - UNTRIED * max(0.0, step_s - compute_s)
        if self.timed(option) is not None:
            at_best_s = step_s
        slower = self._steps_per_progress(gain, late_is_harmless=late_is_harmless)
        return Judged(
            option=option, gain=gain, step_s=step_s, per_progress_s=slower * step_s, hoped_s=slower * at_best_s
        )

    def gain(self, option: Option) -> float | None:
        """That the option settles to; None where nothing is known of it."""
        state = self.state
        if option.gain is not None:
            return option.gain
        if option.key == state.option:
            return state.gain
        expected = _on_curve(state, option.ratio)
        if expected is None:
            return None
        # What kept less than its curve said tells of everything thinner.
        kept = [share for ratio, share in self._kept if ratio >= option.ratio and share < 1]
        kept += [state.kept.get(option.key, 1.0)]
        return max(1e-6, min(1.0, expected * min(kept)))

    def timed(self, option: Option) -> Seen | None:
        """What it was like in use; None: it never was, or that is forgotten."""
        seen = self.state.seen.get(option.key)
        return seen if seen is not None and self.state.steps < FORGOTTEN * seen.at else None

    @functools.cached_property
    def _kept(self) -> list[tuple[float, float]]:
        """Ratios of options that were in use, and gain over what the curve said of it."""
        kept = self.state.kept
        return [(option.ratio, kept[option.key]) for option in self.policy.options if option.key in kept]

    def step_s(self, option: Option) -> float:
        """Of a step: as timed, or else as predicted."""
        state = self.state
        if (seen := self.timed(option)) is not None:
            return seen.step_s
        return _predicted_s(option, self.network, state.compute_s, state.backward_s, longer=self._longer(option))

    def _longer(self, option: Option) -> float:
        """Than predicted, that exchanges by the same collective take; by any, where none of them was seen."""
        own = self._logs.get(option.collective)
        logs = own or [log for each in self._logs.values() for log in each]
        return math.exp(sum(logs) / (len(logs) + (own is None))) if logs else 1.0

    @functools.cached_property
    def _logs(self) -> dict[str, list[float]]:
        """Logarithms of how much longer exchanges took than predicted, by collective."""
        found: dict[str, list[float]] = {}
        for option in self.policy.options:
            seen = self.state.seen.get(option.key)
            if seen is not None and seen.longer is not None:
                found.setdefault(option.collective, []).append(math.log(seen.longer))
        return found

    def _steps_per_progress(self, gain: float, *, late_is_harmless: bool = False) -> float:
        """Steps for one dense step's progress over the steps that are left: what is held back at the end was none."""
        state = self.state
        delivered = 1.0 if late_is_harmless else 1 / (1 + self.coefficient * distance(gain))
        if state.steps_left is not None:
            delivered -= (backlog_after(state.backlog, gain, state.steps_left) - state.backlog) / state.steps_left
        return 1 / max(_LEAST_DELIVERY, delivered)

    def worth_trying(self, best: Judged) -> float | None:
        """The ratio of what would be best if late gradients did no harm, where that would pay for finding out."""
        state, policy = self.state, self.policy
        due = TWINS_AFTER * TWINS_LATER ** (state.trials - 1) if state.trials else 0
        if not math.isinf(state.harmless_from) or not policy.tries_twins or state.steps < due:
            return None
        judged = [self.judged(option, late_is_harmless=True) for option in policy.options]
        thin = [one for one in judged if one is not None and one.gain >= policy.least_gain]
        chosen = min(thin, key=lambda one: one.per_progress_s)
        if chosen.option.gain is not None:
            return None
        saving_s = best.per_progress_s - chosen.per_progress_s
        # A run of unknown length is taken to last as long again as it has, and for one more trial.
        steps_left = max(TWINS_AFTER, state.steps) if state.steps_left is None else state.steps_left
        odds = ODDS**state.trials if state.verdict is not None and state.verdict.says == "harmful" else 1.0
        pays = odds * saving_s * steps_left >= most_cost_s(state.compute_s)
        return chosen.option.ratio if pays and saving_s >= LEAST_SAVING * best.per_progress_s else None


def is_dense(option: Option) -> bool:
    """Whether it sends everything, and loses nothing to speak of."""
    return option.ratio >= DENSE and option.gain == 1


def _predicted_s(option: Option, network: NetworkState, compute_s: float, backward_s: float, *, longer: float) -> float:
    return option.step_s(
        compute_s=compute_s,
        backward_s=backward_s,
        compress_s=longer * option.compress_s,
        exchange_s=longer * option.exchange_s(network),
    )


def _longer(option: Option, network: NetworkState, step_s: float, compute_s: float, backward_s: float) -> float | None:
    """How many times as long as predicted compressing and exchanging took; None where backward hides them."""
    own_s = option.compress_s + option.exchange_s(network)
    took_s = max(step_s - compute_s, 0.01 * step_s)
    if option.buckets > 1:  # the inverse of `hetopt.core.comm.cost.pipelined_s`
        produce_s = backward_s + option.compress_s
        took_s += backward_s - produce_s / option.buckets
        if took_s <= produce_s:
            return None
    return took_s / own_s if own_s > 0 else None


def _on_curve(state: AutoState, ratio: float) -> float | None:
    """The gain that a ratio would settle to by the newest curve."""
    if not state.points:
        return None
    ratios, gains = zip(*state.points, strict=True)
    return float(max(1e-6, interpolated(ratios, gains, ratio)))


def _is_look_due(state: AutoState) -> bool:
    return state.looked is None or state.steps - state.looked >= LOOK_EVERY_STEPS


def _has_risen(state: AutoState, loss: float | None) -> bool:
    """Whether the loss of a period is far above the least there was; losses below zero are compared with none."""
    return loss is not None and state.least_loss is not None and 0 < RISEN * state.least_loss < loss


def _booked(state: AutoState, now: Judged, observation: RatioObservation) -> AutoState:
    """The account after a period: a trial costs what its steps took beyond what the best takes for their progress."""
    if state.best_s is None:
        return state
    over_s = now.step_s * (1 - state.best_s / now.per_progress_s)
    return state.model_copy(update={"best_s": None, "spent_s": state.spent_s + observation.steps * max(0.0, over_s)})


def _told(now: Judged, chosen: Judged, why: str) -> str:
    return (
        f"{percent(chosen.option.ratio)} sent, about {100 * chosen.gain:.0f} % of the energy kept, "
        f"{1e3 * chosen.step_s:.3g} instead of {1e3 * now.step_s:.3g} ms a step; {why}"
    )
