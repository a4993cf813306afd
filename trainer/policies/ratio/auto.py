"""hetopt's own policy: exchanges gradients so that the predicted time to the target is least.

Every option (compressor, collective, ratio; dense among them) is judged by J, the time of one dense step's progress
(`hetopt.trainer.policies.ratio.time_to_target`): the step time from the measured computation, the measured cost of
compressing and the tracked network, times the slowdown of training (`hetopt.core.compression_slowdown`) at the gain
that is measured or read off the curve (`hetopt.trainer.policies.ratio.gain_estimate`). Published searches try
candidates one window after the other; here one look prices all, and only what promises most is ever tried.

**What thin exchanges cost** differs between tasks by more than any gain tells. So where they would save more than it
takes to find out, twins are trained for some steps (`hetopt.trainer.policies.ratio.paired_trial`). If the thin one
keeps up, little more than lateness counts from then on, down to the ratio that was tried. Until then, and if it falls
behind, the law stands as it is, and only options count that by it cost at most ``most_lost`` more steps.

**When to change.** The saving must exceed ``least_saving`` of J, and its own uncertainty: errors of the network that
both options share cancel. A saving that is not sure yet is tried out if the price of finding out is affordable; so is,
now and then, an option that would save enough if it were better by its standard deviation (of the network's part, twice
that: exchanges show what they take, not what a much larger one would take). A network that has become quicker shows in
large exchanges alone, and some larger one is tried now and then for that.

What turns out to keep less than ``least_gain`` is left at once, and as much or less is not used again for a while that
doubles with every time: what a curve promises of a ratio that is not in use is only an estimate.

Error feedback bears smaller learning rates than dense training does. So where the loss rises far above the least it was
while something is held back, everything is sent from then on, and as little as was sent then is not used for a while.

What a step of an option took beyond what was predicted of it, because of cores that workers share or whatever else no
timing tells, is remembered for a while, and so is what it kept: otherwise it would be changed to and left again and
again.

What the first step of a way took is not held against it: until there was another one, it is what it was expected to be.
What was seen for a few periods, each as noisy as periods of one option are, may be better than that: it is tried again
sooner, counts together with what was seen before, and a single look is forgotten twice as quickly.

**The price of finding out** is bounded. The first period after every change is a trial, kept short. What it takes
longer than the option before would have taken for the same progress is booked (`AutoState.spent_s`); a trial that might
cost, twice its standard deviation considered, more than is left of

    allowance = trial_steps x J + exploration x time so far

is not made, and when everything is spent only options that were tried before, or are sure, are changed to. Dense
training is an option like the others, whose gain is known, and it is tried once whatever is thought of it: so auto
loses to it by no more than the least saving, the allowance and a trial, from when that trial can be paid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetopt.core.comm.cost import TRAINER
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.planner import Option
from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT
from hetopt.trainer.policies.ratio.auto_again import has_risen, is_barred, may_be_seen, may_hope, proved
from hetopt.trainer.policies.ratio.auto_learning import MOST_SEEN, is_dense, learned, reminded
from hetopt.trainer.policies.ratio.auto_state import LOOK_AGAIN_AFTER, AutoState, Excess
from hetopt.trainer.policies.ratio.paired_trial import most_cost_s
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, percent
from hetopt.trainer.policies.ratio.time_to_target import Judged, TimeToTarget, Weighed

SURE = 1.5
"""Standard errors that make a saving sure."""

SCOUTED = 4.0
"""Times the bytes of what is in use that tell more of the bandwidth."""

HARMLESS_COEFFICIENT = 0.02
"""Of the law of slowdown for tasks that thin exchanges do not hold back: of two that take as long, what keeps more."""

ALARM_FACTOR = 2.5
"""An exchange that takes so many times as long as expected calls for a look before the period is over."""

_PART_FOR_ONE = 0.25  # of what is left, for a trial of more than one step
_SCOUTED_AFTER = 10  # periods
_LEARNT_AFTER = 15  # periods, in all of which something is new
_LOOK_WHEN_SETTLED_EVERY = 3  # periods, for a look takes longer than the selection that is sent
_LOOK_AT_GAIN_EVERY = 5  # periods of dense training, in which a gain curve costs a selection that nobody sends
_TRIED_AGAIN_AT, _TRIED_LATER_BY = 50, 4  # steps, for twins that did not keep up, and how many times as many then
_ODDS_AFTER_HARM = 0.5  # for each trial, that the next one shows something else


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoRatio:
    """Chooses the option that promises the least time to the target.

    Args:
        options: what there is to choose from; dense exchange among them.
        coefficient: of the law of slowdown, as far as it is known.
        least_gain: options that keep less are not used, unless a trial says that they may be.
        least_saving: part of J that is worth a change.
        trial_steps: length of the first period after a change, and of the run.
        exploration: part of the run's time that trials may cost.
        most_lost: more steps than dense training that are borne; infinite: only time counts.
        tries_twins: whether trials can be made; if not, the law stands.

    Raises:
        ValueError: no dense option, two options of one key, or an impossible number.
    """

    options: tuple[Option, ...]
    coefficient: float = CAUTIOUS_COEFFICIENT
    least_gain: float = 0.05
    least_saving: float = 0.02
    trial_steps: int = 5
    exploration: float = 0.01
    most_lost: float = math.inf
    tries_twins: bool = False

    def __post_init__(self) -> None:
        if not any(is_dense(option) for option in self.options):
            raise ValueError("a dense option (ratio 1, gain 1) has to be among the options")
        if len({option.key for option in self.options}) != len(self.options):
            raise ValueError("two options have the same compressor, collective and ratio")
        if not (0 <= self.coefficient < math.inf and 0 < self.least_gain <= 1 and 0 <= self.least_saving < 1):
            raise ValueError("least_gain and least_saving are parts of 1, and the coefficient is not negative")
        if not self.most_lost > 0:
            raise ValueError(f"what may be lost is above zero, not {self.most_lost}")
        if self.trial_steps < 1 or not 0 <= self.exploration < 1:
            raise ValueError(f"impossible trial of {self.trial_steps} steps or exploration {self.exploration}")

    def initial(self) -> AutoState:
        """The state before the first step: no option was measured."""
        return AutoState()

    def first(self, network: NetworkState | None) -> RatioDecision:
        """Dense, or the largest ratio with a curve if that exchanges sooner: from there all other gains can be read."""
        looking = [option for option in self.options if option.gain is None]
        largest = max((option.ratio for option in looking), default=DENSE)
        starts = [option for option in looking if option.ratio == largest]
        starts += [option for option in self.options if is_dense(option)]
        chosen = starts[-1]
        if network is not None:
            chosen = min(starts, key=lambda option: option.compress_s + option.exchange_s(network))
        return RatioDecision(
            ratio=chosen.ratio, option=chosen.key, measure_gain=True, look_after_steps=self.trial_steps
        )

    def decide(self, state: AutoState, observation: RatioObservation) -> tuple[AutoState, RatioDecision]:
        """The state after this period, and what to exchange from now on.

        Raises:
            ValueError: the observation names no option of this policy, or no network.
        """
        used = next((option for option in self.options if option.key == observation.option), None)
        network = observation.network
        if used is None or network is None:
            raise ValueError(f"auto needs a network and one of its own options, not {observation.option!r}")
        is_new = state.option != used.key or not state.is_warm
        state = learned(state, used, observation, network)
        outlook = self.outlook(state, network)
        if is_new:
            state = reminded(state, used)
        now = outlook.judge(used, step_s=state.step_s if state.is_warm else None)
        if now is None:
            raise ValueError(f"the gain of {used.key} was not measured although it was in use")
        state = self._booked(state, now, outlook, observation)
        expected = state.belief.expected(used) if used.gain is None else None
        kept = 1.0 if expected is None else now.gain / expected
        if state.is_warm:
            seen = min(MOST_SEEN, 1 + state.seen(used.key))
            excess = Excess(
                step_s=now.step_s - outlook.parts_s(used),
                whole_s=now.step_s,
                kept=kept,
                period=state.periods,
                seen=seen,
            )
            state = state.model_copy(update={"excess": {**state.excess, used.key: excess}})
        if used.gain is None and has_risen(state, observation.loss):
            return self._safe(state, used, network, outlook)
        worth_trying = self._worth_trying(state, outlook)
        if worth_trying is not None:
            waiting = self._keep(state, now, network, outlook)
            return state, replace(waiting, try_ratio=worth_trying, look_after_steps=1)
        chosen = self._choice(state, now, outlook)
        if chosen is None:
            keep = self._keep(state, now, network, outlook)
            return state, keep if state.is_warm else replace(keep, look_after_steps=1)
        # Leaving what keeps too little is no trial: it costs what it costs.
        trial_after = used.key if self._keeps_enough(state, now, outlook) else None
        look = state.since_curve >= LOOK_AGAIN_AFTER or not state.belief.points
        state = state.model_copy(
            update={"trial_after": trial_after, "last_curve": state.periods if look else state.last_curve}
        )
        if used.gain is None and not self._keeps_enough(state, now, outlook):
            state = state.model_copy(update={"too_thin": proved(state, used.ratio)})
        return state, RatioDecision(
            ratio=chosen.judged.option.ratio,
            option=chosen.judged.option.key,
            reason=self._reason(state, now, chosen, outlook),
            measure_gain=look,
            look_after_steps=self._trial_length(state, now, chosen),
            alarm_s=_alarm_s(chosen.judged.option, network, outlook),
        )

    def _safe(
        self, state: AutoState, used: Option, network: NetworkState, outlook: TimeToTarget
    ) -> tuple[AutoState, RatioDecision]:
        """Everything is sent: training may be about to diverge."""
        dense = next(option for option in self.options if is_dense(option))
        state = state.model_copy(update={"trial_after": None, "too_thin": proved(state, used.ratio)})
        return state, RatioDecision(
            ratio=dense.ratio,
            option=dense.key,
            reason=f"{dense.key} instead of {used.key}: the loss has risen far above the least it was",
            alarm_s=_alarm_s(dense, network, outlook),
        )

    def _keeps_enough(self, state: AutoState, judged: Judged, outlook: TimeToTarget) -> bool:
        return self._is_enough(state, judged.option, judged.gain, outlook)

    def _is_enough(self, state: AutoState, option: Option, gain: float, outlook: TimeToTarget) -> bool:
        """Whether so much is learned as it has to be; lateness alone is weighed, not forbidden."""
        if option.ratio >= state.harmless_from:
            return True
        return gain >= self.least_gain and outlook.slowdown(gain) <= 1 + self.most_lost

    def _reason(self, state: AutoState, now: Judged, chosen: Weighed, outlook: TimeToTarget) -> str:
        other, saving = chosen.judged, chosen.saving_s / now.per_progress_s
        told = (
            f"{other.option.key} instead of {now.option.key}: {percent(other.option.ratio)} sent, about "
            f"{other.gain:.0%} of the energy kept, {1e3 * other.step_s:.3g} instead of {1e3 * now.step_s:.3g} ms a step"
        )
        if now.gain < self.least_gain:
            return f"{told}; {now.gain:.0%} is less than the {self.least_gain:.0%} that must be kept"
        if not self._keeps_enough(state, now, outlook):
            return f"{told}; less would be learned in a step than may be lost"
        if saving < self.least_saving:
            return f"{told}; tried out, it may be better than it looks"
        return f"{told}: {saving:.0%} less time to the target"

    def _worth_trying(self, state: AutoState, outlook: TimeToTarget) -> float | None:
        """The ratio of what would be best if late gradients did no harm, where that would pay for finding out.

        Whatever is thought of its gain: what is best where nothing is held back to speak of does no harm for certain.
        """
        due = _TRIED_AGAIN_AT * _TRIED_LATER_BY ** (state.trials - 1) if state.trials else 0
        if not math.isinf(state.harmless_from) or not self.tries_twins or state.steps < due:
            return None
        keeping = [option for option in self.options if (outlook.gain(option) or 0.0) >= self.least_gain]
        judged = [outlook.judge(one, late_is_harmless=True) for one in keeping if not is_barred(state, one)]
        best = min((one for one in judged if one is not None), key=lambda one: one.per_progress_s)
        if best.option.gain is not None:
            return None
        certain = [outlook.judge(option) for option in self.options if option.gain is not None]
        safe_s = min(judged.per_progress_s for judged in certain if judged is not None)
        saving_s = safe_s - best.per_progress_s
        is_harmful = state.verdict is not None and state.verdict.says == "harmful"
        odds = _ODDS_AFTER_HARM**state.trials if is_harmful else 1.0
        pays = odds * saving_s * outlook.steps_left >= most_cost_s(outlook.compute_s)
        if saving_s < self.least_saving * safe_s or not pays:
            return None
        return best.option.ratio

    def _keep(self, state: AutoState, now: Judged, network: NetworkState, outlook: TimeToTarget) -> RatioDecision:
        if not self._keeps_enough(state, now, outlook):
            return RatioDecision(
                ratio=now.option.ratio,
                option=now.option.key,
                measure_gain=True,
                look_after_steps=self.trial_steps,
                alarm_s=_alarm_s(now.option, network, outlook),
            )
        every = _LOOK_AT_GAIN_EVERY
        if now.option.gain is None:
            every = 1 if state.belief.changed is not None or state.periods < _LEARNT_AFTER else _LOOK_WHEN_SETTLED_EVERY
        return RatioDecision(
            ratio=now.option.ratio,
            option=now.option.key,
            measure_gain=(state.periods - state.last_curve >= every and state.since_curve >= LOOK_AGAIN_AFTER)
            or not state.belief.points,
            alarm_s=_alarm_s(now.option, network, outlook),
        )

    def slowdown_coefficient(self, state: AutoState) -> float:
        """Of the law of slowdown, as it stands after trials."""
        match state.verdict and state.verdict.says:
            case "harmless":
                return min(self.coefficient, HARMLESS_COEFFICIENT)
            case "harmful":
                return max(self.coefficient, CAUTIOUS_COEFFICIENT)
            case _:
                return self.coefficient

    def _booked(self, state: AutoState, now: Judged, outlook: TimeToTarget, observation: RatioObservation) -> AutoState:
        """The account after this period: a trial costs what it took beyond what its progress takes without it."""
        took_s = observation.steps * observation.step_time_s
        spent_s = state.spent_s
        before = next((outlook.judge(option) for option in self.options if option.key == state.trial_after), None)
        if before is not None:
            progress = observation.steps / outlook.steps_per_progress(now.gain)
            spent_s += max(0.0, took_s - progress * before.per_progress_s)
        return state.model_copy(update={"trial_after": None, "spent_s": spent_s, "elapsed_s": state.elapsed_s + took_s})

    def outlook(self, state: AutoState, network: NetworkState) -> TimeToTarget:
        """What every option is judged by."""
        of_any_s = state.beside_s + state.rest_s
        left = {key: state.left(seen) for key, seen in state.excess.items()}
        sd = math.sqrt(state.step_variance or 0.0)
        return TimeToTarget(
            network=network,
            belief=state.belief,
            coefficient=self.slowdown_coefficient(state),
            compute_s=state.compute_s or 0.0,
            backward_s=state.backward_s,
            beside_s=state.beside_s,
            rest_s=state.rest_s,
            compress_factors=state.compress_factors,
            excess_s={key: (seen.step_s - of_any_s) * left[key] for key, seen in state.excess.items()},
            kept={key: seen.kept ** left[key] for key, seen in state.excess.items()},
            noise={key: sd / math.sqrt(seen.seen) for key, seen in state.excess.items()},
            backlog=state.backlog,
            steps_left=math.inf if state.steps_left is None else state.steps_left,
        )

    def usable(self, state: AutoState, outlook: TimeToTarget) -> list[Judged]:
        """The options that keep enough, as far as is known; dense training is always one of them."""
        # Most keep too little, which is found sooner than what they take.
        enough = [
            option
            for option in self.options
            if (gain := outlook.gain(option)) is not None and self._is_enough(state, option, gain, outlook)
        ]
        judged = [outlook.judge(option) for option in enough if not is_barred(state, option)]
        return [one for one in judged if one is not None]

    def _choice(self, state: AutoState, now: Judged, outlook: TimeToTarget) -> Weighed | None:
        """The option to change to, if any."""
        others = [outlook.weigh(now, j) for j in self.usable(state, outlook) if j.option.key != now.option.key]
        if not self._keeps_enough(state, now, outlook):
            return max(others, key=lambda other: other.saving_s)
        needed_s, left_s = self.least_saving * now.per_progress_s, self._left_s(state, now)
        better = [
            other
            for other in others
            if other.saving_s >= needed_s
            and (
                other.saving_s >= SURE * other.sd_s or other.risk_s <= left_s or other.judged.option.key in state.tried
            )
        ]
        if better:
            return max(better, key=lambda other: other.saving_s)
        affordable = [other for other in others if other.risk_s <= left_s]
        hopeful = [
            other
            for other in affordable
            if (other.saving_s + other.hope_s >= needed_s and may_hope(state, other.judged.option.key))
            or (other.saving_s + other.seen_sd_s >= needed_s and may_be_seen(state, other.judged.option.key))
        ]
        if hopeful:
            return max(hopeful, key=lambda other: other.saving_s + other.hope_s)
        # Whatever is thought of it, dense training is tried once: never to lose to it is a promise.
        dense = [
            other
            for other in others
            if is_dense(other.judged.option) and other.risk_s <= left_s and not state.dense_tried
        ]
        if dense:
            return max(dense, key=lambda other: other.saving_s)
        cheap = [other for other in others if other.risk_s <= _PART_FOR_ONE * left_s]
        telling = self._telling(state, now) if cheap else frozenset()
        scouts = [other for other in cheap if other.judged.option.key in telling]
        return min(scouts, key=lambda other: other.risk_s, default=None)

    def _telling(self, state: AutoState, now: Judged) -> frozenset[str]:
        """Options that would tell of a bandwidth which few bytes do not feel; none where one did so not long ago."""
        much = SCOUTED * _traffic_bytes(now.option)
        telling = frozenset(option.key for option in self.options if _traffic_bytes(option) >= much)
        last = max((state.tried[key].period for key in telling if key in state.tried), default=0)
        return telling if state.periods >= last + _SCOUTED_AFTER else frozenset()

    def _left_s(self, state: AutoState, now: Judged) -> float:
        return self.trial_steps * now.per_progress_s + self.exploration * state.elapsed_s - state.spent_s

    def _trial_length(self, state: AutoState, now: Judged, chosen: Weighed) -> int:
        """As many steps as a trial has, fewer where they might cost more than a part of what is left."""
        if chosen.risk_s <= 0:
            return self.trial_steps
        affordable = _PART_FOR_ONE * max(0.0, self._left_s(state, now)) / chosen.risk_s
        return max(1, min(self.trial_steps, int(affordable)))


def _traffic_bytes(option: Option) -> float:
    return option.buckets * sum(operation.terms(TRAINER).traffic_bytes for operation in option.operations)


def _alarm_s(option: Option, network: NetworkState, outlook: TimeToTarget) -> float | None:
    expected_s = option.exchange_s(network) + outlook.beside_s + max(0.0, outlook.excess_s.get(option.key, 0.0))
    return ALARM_FACTOR * expected_s if expected_s > 0 else None
