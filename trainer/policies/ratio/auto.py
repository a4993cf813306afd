"""hetopt's own ratio policy: tries the most promising exchanges for a few steps each, and commits to the best.

An arm is an option (compressor, collective, ratio; dense among them, and averages of parameters every so many steps
where the run may make them). What an arm is worth is J, the time of one dense step's progress:

    J = step_time / (1 / slowdown(gain) - what is held back more at the end / steps left)

- `step_time` is as timed in training (`StepTimes`), or as predicted and corrected by what was timed:
  computation, and what backward does not hide of (longer x own work, longer x exchange). ``longer`` is by how much
  others by the same collective took longer than predicted. Two cumulative sums (Page 1954) of how far steps are from
  what they took, in units of how far they usually are, tell noise from a change: then what was timed is forgotten.
- `gain` is what was kept while the option was in use. Before that it is read off the gain curve that one Top-k yields,
  less what thicker options turned out to keep less than that.
- `slowdown` is the law of `hetopt.core.training_laws`. How much a task minds what comes late is not known: its
  coefficient is taken to be large until twins (`PairedTrial`) have shown that it is not. Of averages it is one over
  what local steps are worth, which is measured while they are made (`hetopt.trainer.sync.synchroniser`); before, it is
  the published mean, `LOCAL`.

**Explore.** Of the options that keep enough, that one is tried next whose J would be least if what it takes beyond its
computation were as much less as a prediction may be wrong (`UNTRIED`): optimism in the face of uncertainty (Lai and
Robbins 1985). A trial is a period of `TRIAL_STEPS`. Those that would take twice as long as the best wait. Dense
training is tried once, whatever is thought of it: never to lose to it by more than a trial is a promise. Averages are
tried for two rounds, where the rest of the run would save more by them than those two take, should they be for nothing.

**Commit** to the least J; it is left for what saves `LEAST_SAVING` of it. Only options count that keep `least_gain`,
and that by the law cost at most `most_lost` more steps. Where the loss rises far above what it was in the periods
before, twice in a row, while something is held back, everything is sent from then on: error feedback bears smaller
learning rates than dense training does.

"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.core.artifact import Record
from hetopt.core.comm.compression_text import way_in_words
from hetopt.core.comm.options import Option
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT, LEAST_GAIN, MOST_LOST, backlog_after, distance
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.policy import DENSE, RatioDecision, RatioObservation, Verdict, interpolated, percent

TRIAL_STEPS = 4
"""Steps of the first period of every option. The row tells of three of them: the median leaves the first, slower one
out."""

UNTRIED = 0.25
"""Part of what a step takes beyond its computation that a prediction of it may be too much by."""

LEAST_SAVING = 0.02
"""Least part of J that a change has to save."""

TWINS_AGAIN_AFTER = 50
"""Steps after which twins are trained again where nothing could be said; a run of unknown length is taken to last as
long more."""

RISEN, FOLLOWS = 1.5, 0.5
"""Factor over the mean loss of the periods before at which a loss has risen, and weight of the newest in it."""

CHUNK_STEPS, MOST_STEPS = 4, 40
"""Steps of a twin before the other's turn, and before both losses are compared; and steps after which a task that has
learned nothing yet cannot be told."""

PART = 2
"""Divisor of a worker's samples for twins: they train on one in so many, which is enough to tell and takes half the
time."""

LEAST_DROP = 0.05
"""Least part of the first loss by which it must have fallen before something can be said of how fast it does."""

HARMFUL = 3 * MOST_LOST
"""Part of what was learned, or of `LEAST_DROP`, by which a twin is behind that will not catch up."""

LOCAL = 0.25
"""Cost of averages that were not measured yet, over the root of the local steps between two: the mean of ten published
runs (2307.07950, table I; `hetopt.optimizer.convergence.compression_penalty`)."""

_LEAST_DELIVERY = 0.02  # of a step, in dense steps: less is not told apart


@dataclass(kw_only=True)
class PairedTrial:
    """Mean losses of two copies of a model, trained densely and sparsified to ``ratio``, by chunks of steps.

    No look at gradients tells: neither the energy that is kept, nor the delay says how much a task minds that most of
    its gradient comes late (an LSTM learns as fast at 0.1 % as with everything, a small ResNet stays where it began).
    Every worker trains its twins for itself, on the same samples, without exchanging anything. What is held back is
    larger, in steps, than among all workers, so the trial is on the safe side.

    Attributes:
        ratio: fraction of the elements that the sparsified copy applies.
        whole: mean losses of the dense copy, by chunk.
        thin: mean losses of the sparsified copy, by chunk.
    """

    ratio: float
    whole: list[float] = field(default_factory=list)
    thin: list[float] = field(default_factory=list)

    def after(self, rows: Sequence[Sequence[float]]) -> Verdict | None:
        """Add the losses of a chunk of steps, and return the verdict; None: more chunks are needed.

        A loss that is not finite gives ``harmful``.

        Args:
            rows: mean loss of the dense copy, that of the sparsified copy, and samples a step, of each worker.
        """
        samples = sum(row[2] for row in rows)
        self.whole.append(sum(row[0] * row[2] for row in rows) / samples)
        self.thin.append(sum(row[1] * row[2] for row in rows) / samples)
        if len(self.whole) < 2:
            return None
        behind, drop = self.thin[-1] - self.whole[-1], self.whole[0] - self.whole[-1]
        least = LEAST_DROP * abs(self.whole[0])
        if not behind < HARMFUL * max(drop, least):  # so is a loss that is not finite
            return Verdict(ratio=self.ratio, says="harmful")
        if drop >= least and behind <= MOST_LOST * drop:
            return Verdict(ratio=self.ratio, says="harmless")
        is_last = len(self.whole) * CHUNK_STEPS >= MOST_STEPS
        return Verdict(ratio=self.ratio, says="undecided") if is_last else None


BACKWARD = 2 / 3
"""Part of a step's computation that makes gradients: backward computes two products for each one forwards."""

NOISE, NEWEST = 0.05, 0.1
"""Least standard deviation of the log of a period's step time, and the weight of a new period in its variance."""

MOST_ERROR, SLACK, ALARM = 4.0, 1.0, 5.5
"""Limits in standard deviations: what a period counts for at most, what each is allowed, and the sum that shows a
change. One period alone never does, two far off do, and noise does once in a thousand."""


class Timing(Record):
    """Mean seconds of an option's steps, and measured over predicted exchange seconds (None: hidden by backward).

    ``steps`` is the number of steps that the mean is over, ``collective`` what the option's messages travel by.
    """

    collective: str
    step_s: PositiveFloat
    steps: NonNegativeFloat
    longer: PositiveFloat | None


class StepTimes(Record):
    """Measured step seconds of exchange options, by key, since speeds last changed, and signs of another change.

    Attributes:
        timings: measured steps of each option that was used, by the option's key.
        compute_s: mean seconds of a step's computation, over all options.
        steps: number of steps that this mean is over.
        variance: variance of the log of a period's step time about its option's.
        slower, quicker: cumulative sums of periods that took longer, and shorter, than their options' usual time.
    """

    timings: dict[str, Timing] = Field(default_factory=dict)
    compute_s: NonNegativeFloat = 0.0
    steps: NonNegativeFloat = 0.0
    variance: PositiveFloat = NOISE**2
    slower: NonNegativeFloat = 0.0
    quicker: NonNegativeFloat = 0.0

    @property
    def is_suspect(self) -> bool:
        """True where the last periods took another time than usual, and only the next will tell whether that stays."""
        return max(self.slower, self.quicker) > ALARM / 2

    def after(self, option: Option, network: Network, *, step_s: float, compute_s: float, steps: int) -> StepTimes:
        """Return the times with a period's median added; where speeds have changed it replaces them all.

        Args:
            option: exchange that was in use.
            network: measured network, by which its exchange was predicted.
            step_s: median seconds of a step.
            compute_s: median seconds of a step's computation.
            steps: number of steps of the period.
        """
        before, noise = self.timings.get(option.key), {"variance": self.variance}
        known_s, known = (before.step_s, before.steps) if before is not None else (step_s, 0.0)
        if known > 1:  # the first step of a way is slower than those that follow, and tells nothing alone
            error = math.log(step_s / known_s) / math.sqrt(self.variance)
            error = max(-MOST_ERROR, min(MOST_ERROR, error))
            noise["variance"] = max(NOISE**2, self.variance * (1 + NEWEST * (error * error - 1)))
            noise["slower"] = max(0.0, self.slower + error - SLACK)
            noise["quicker"] = max(0.0, self.quicker - error - SLACK)
            if max(noise["slower"], noise["quicker"]) > ALARM:
                return StepTimes(variance=noise["variance"]).after(
                    option, network, step_s=step_s, compute_s=compute_s, steps=steps
                )
            step_s = known_s * math.exp(error * math.sqrt(self.variance))
        step_s = known_s + steps / (known + steps) * (step_s - known_s)
        compute_s = self.compute_s + steps / (self.steps + steps) * (compute_s - self.compute_s)
        longer = _longer(option, network.exchange_s(option), step_s, compute_s)
        timing = Timing(collective=option.collective, step_s=step_s, steps=known + steps, longer=longer)
        timings = {**self.timings, option.key: timing}
        return self.model_copy(
            update={**noise, "timings": timings, "compute_s": compute_s, "steps": self.steps + steps}
        )

    def step_s(self, option: Option, network: Network) -> float:
        """Return the seconds of a step with an option: as measured, or as predicted if it was not tried."""
        timing = self.timings.get(option.key)
        if timing is not None:
            return timing.step_s
        # The geometric mean of measured over predicted exchange time of the collective's options. An untried collective
        # has that of all options, drawn towards 1; without any measurement, 1.
        known = [(timing.collective, math.log(timing.longer)) for timing in self.timings.values() if timing.longer]
        matching = [log for name, log in known if name == option.collective]
        logs = matching or [log for _, log in known]
        longer = math.exp(sum(logs) / (len(logs) + (not matching))) if logs else 1.0
        return option.step_s(
            compute_s=self.compute_s,
            backward_s=BACKWARD * self.compute_s,
            compress_s=longer * option.compress_s,
            exchange_s=longer * network.exchange_s(option),
        )


def _longer(option: Option, exchange_s: float, step_s: float, compute_s: float) -> float | None:
    """Return measured over predicted seconds of an option's compression and exchange, by a step's median times.

    None: backward hides them, or the prediction is 0.
    """
    predicted_s = option.compress_s + exchange_s
    took_s = max(step_s - compute_s, 0.01 * step_s) * option.every_steps
    if option.buckets > 1:  # the inverse of `hetopt.core.comm.cost.pipelined_s`
        backward_s = BACKWARD * compute_s
        produce_s = backward_s + option.compress_s
        took_s += backward_s - produce_s / option.buckets
        if took_s <= produce_s:
            return None
    return took_s / predicted_s if predicted_s > 0 else None


class AutoState(Record):
    """State of `AutoRatio`: step times, gains, and the account of paired trials.

    Attributes:
        option: key of the option in use; None: before the first period.
        times: step seconds, by option.
        points: newest gain curve, (ratio, fraction of the energy kept); empty: no look yet.
        gain: fraction of the energy that the option in use keeps.
        local: cost of averages: more steps that they take, over the root of the local steps between two; None: not
            measured.
        kept: gain over what the curve said of it, for each ratio that was ever in use.
        backlog: gradient that is held back, in steps.
        loss: mean loss of the periods before, the newer the more; None: none is known.
        rises: number of periods in a row whose loss was far above that.
        step: number of steps done in the run.
        steps_left: steps of the run to do; None: not known.
        verdict, trials: the last of twins, and how many there were.
    """

    option: str | None = None
    times: StepTimes = StepTimes()
    points: tuple[tuple[float, float], ...] = ()
    gain: PositiveFloat = 1.0
    local: NonNegativeFloat | None = None
    kept: dict[float, PositiveFloat] = Field(default_factory=dict)
    backlog: NonNegativeFloat = 0.0
    loss: float | None = None
    rises: NonNegativeInt = 0
    step: NonNegativeInt = 0
    steps_left: PositiveFloat | None = None
    verdict: Verdict | None = None
    trials: NonNegativeInt = 0

    @property
    def sends_all(self) -> bool:
        """True where nothing may be held back any more, for the loss had risen."""
        return self.rises > 1

    def expected_gain(self, ratio: float) -> float | None:
        """Return the fraction of energy that a ratio should keep by the newest gain curve; None: no curve yet."""
        if not self.points:
            return None
        ratios, gains = zip(*self.points, strict=True)
        return float(max(1e-6, interpolated(ratios, gains, ratio)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedOption:
    """An exchange option with its gain, step seconds, and expected and hoped-for seconds per dense step's progress.

    Attributes:
        option: the exchange.
        gain: fraction of the gradient's energy that it keeps.
        step_s: seconds of a step.
        per_progress_s: seconds for the progress of one dense step.
        hoped_s: the same where what was not tried is as much quicker as a prediction may be wrong.
    """

    option: Option
    gain: float
    step_s: float
    per_progress_s: float
    hoped_s: float


_per_progress_s = attrgetter("per_progress_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoRatio:
    """Ratio policy that chooses the exchange option of least expected time to the target.

    Args:
        options: exchanges to choose from, each of another key; dense exchange among them.
        coefficient: coefficient of the law of slowdown, as far as it is known.
        least_gain: fraction of the energy that an option must keep, unless a trial says that it need not.
        most_lost: more steps than dense training that are borne, as a fraction; infinite: only time counts.
        tries_twins: whether trials can be made; if not, the law stands.
    """

    options: tuple[Option, ...]
    coefficient: float = CAUTIOUS_COEFFICIENT
    least_gain: float = LEAST_GAIN
    most_lost: float = math.inf
    tries_twins: bool = False

    initial: ClassVar[type[AutoState]] = AutoState
    """The state before the first step: no option was measured."""

    def first(self, network: Network | None) -> RatioDecision:
        """Return a decision for dense exchange, or for the largest ratio with a gain curve if that is faster.

        Args:
            network: measured network; it must be there.
        """
        assert network is not None  # whoever asks has measured it
        thin = [option for option in self.options if is_thin(option)]
        largest = max((option.ratio for option in thin), default=DENSE)
        starts = (self.dense, *(option for option in thin if option.ratio == largest))
        chosen = min(starts, key=lambda option: option.compress_s + network.exchange_s(option))
        return RatioDecision(ratio=chosen.ratio, option=chosen.key, measure_gain=True, look_after_steps=TRIAL_STEPS)

    @property
    def dense(self) -> Option:
        """The option that sends everything as it is."""
        return next(filter(is_dense, self.options))

    def decide(self, state: AutoState, observation: RatioObservation) -> tuple[AutoState, RatioDecision]:
        """Return the state after this period, and the exchange to use, or the ratio to test in a paired trial.

        Args:
            state: state after the period before.
            observation: measurements of the period; its option and network must be there.
        """
        used = next((option for option in self.options if option.key == observation.option), None)
        network = observation.network
        assert used is not None and network is not None  # noqa: PT018  # whoever asks has both
        state = _learned(state, used, observation, network)
        keep = RatioDecision(ratio=used.ratio, option=used.key, measure_gain=not state.points)
        begins = state.times.timings[used.key].steps <= 1  # the first step of a way is slower than the others
        if begins or state.times.is_suspect or state.rises == 1:  # disturbed, or changed: the next few steps tell
            return state, replace(keep, look_after_steps=TRIAL_STEPS)
        outlook = Outlook(self, state, network)
        now, usable = outlook.judged(used), outlook.usable()
        assert now is not None
        best = min(
            (candidate for candidate in usable if outlook.is_tried(candidate.option)), key=_per_progress_s, default=None
        )
        if best is None or not outlook.keeps_enough(used, now.gain):
            too_little = f"{100 * now.gain:.0f} % of the energy is less than what must be kept"
            why = "the loss has risen far above what it was" if state.sends_all else too_little
            return state, _changed(keep, now, min(usable, key=_per_progress_s), why)
        if (ratio := outlook.ratio_to_test()) is not None:
            return state, replace(keep, try_ratio=ratio, look_after_steps=1)
        if chosen := outlook.trial(best):
            return state, _changed(keep, now, chosen, _reason(now, chosen, "tried out, it may be the best"))
        saving = 1 - best.per_progress_s / now.per_progress_s
        if saving < LEAST_SAVING or not outlook.pays_to_try(best, now.per_progress_s - best.per_progress_s):
            return state, keep
        return state, _changed(keep, now, best, _reason(now, best, f"{100 * saving:.0f} % less time to the target"))


@dataclass(frozen=True)
class Outlook:
    """Estimates of time to the target for exchange options, by a ratio policy, its state and the measured network.

    Attributes:
        policy: the policy.
        state: its state after the newest period.
        network: measured network.
    """

    policy: AutoRatio
    state: AutoState
    network: Network

    @property
    def coefficient(self) -> float:
        """Coefficient of the law of slowdown, as it stands after trials; 0: a trial found thin exchanges harmless."""
        known, verdict = self.policy.coefficient, self.state.verdict
        if verdict is None or verdict.says == "undecided":
            return known
        return 0.0 if verdict.says == "harmless" else max(known, CAUTIOUS_COEFFICIENT)

    def usable(self) -> list[RatedOption]:
        """Return the options known to keep enough of the gradient's energy, judged; dense is always one of them."""
        judged = [self.judged(option) for option in self.policy.options]
        return [
            candidate
            for candidate in judged
            if candidate is not None and self.keeps_enough(candidate.option, candidate.gain)
        ]

    def keeps_enough(self, option: Option, gain: float) -> bool:
        """Return whether an option that keeps the fraction ``gain`` of the gradient's energy may be used.

        No thinned option may once everything is to be sent; else averages may, and a ratio that a trial showed to be
        harmless.
        """
        state = self.state
        if option.gain is None and state.sends_all:
            return False
        if option.averages:
            return True
        verdict = state.verdict
        if verdict is not None and verdict.says == "harmless" and option.ratio >= verdict.ratio:
            return True
        return gain >= self.policy.least_gain and self.coefficient * distance(gain) <= self.policy.most_lost

    def judged(self, option: Option, *, coefficient: float | None = None) -> RatedOption | None:
        """Return an option with its gain, the seconds of a step, and the seconds per progress of a dense step.

        Both are given twice: as expected, and as hoped for where the option was never timed.

        Args:
            option: option to judge.
            coefficient: coefficient of the law by which lost energy costs steps; None: as trials left it. Not used for
                options that average, whose gain is the progress of a local step.

        Returns:
            The rated option; None: its gain is not known.
        """
        gain = self.gain(option)
        if gain is None:
            return None
        step_s = at_best_s = self.state.times.step_s(option, self.network)
        if not self.is_tried(option):
            at_best_s -= UNTRIED * max(0.0, step_s - self.state.times.compute_s)
        steps = hoped = self._steps_per_progress(gain, self.coefficient if coefficient is None else coefficient)
        if option.averages:
            soonest = all(option.every_steps <= other.every_steps for other in self.policy.options if other.averages)
            steps, hoped = 1 / gain, 1.0 if self.state.local is None and soonest else 1 / gain
        return RatedOption(
            option=option, gain=gain, step_s=step_s, per_progress_s=steps * step_s, hoped_s=hoped * at_best_s
        )

    def is_tried(self, option: Option) -> bool:
        """Return whether steps with an option were timed since speeds last changed."""
        return option.key in self.state.times.timings

    def gain(self, option: Option) -> float | None:
        """Return the fraction of gradient energy that an option keeps, or the progress of a local step if it averages.

        None: it is not known.
        """
        state = self.state
        if option.averages:
            known = LOCAL * (1 - 1 / option.operations[0].members) if state.local is None else state.local
            return 1 / (1 + known * math.sqrt(option.every_steps - 1))
        if option.gain is not None or option.key == state.option:
            return state.gain if option.gain is None else option.gain
        expected = state.expected_gain(option.ratio)
        if expected is None or self._averages:  # nobody sees what gradients are like meanwhile
            return None
        # What kept less than its curve said tells of everything thinner.
        return max(1e-6, min(1.0, expected, *(expected * s for r, s in state.kept.items() if r >= option.ratio)))

    @property
    def _averages(self) -> bool:
        return any(option.key == self.state.option for option in self.policy.options if option.averages)

    @property
    def steps_left(self) -> float:
        """Steps to the end; a run of unknown length is taken to last as long again as it has, and 50 steps at least."""
        known = self.state.steps_left
        return max(TWINS_AGAIN_AFTER, self.state.step) if known is None else known

    def ratio_to_test(self) -> float | None:
        """Return the ratio to test in a paired trial; None: no trial is possible now, or could save what it takes."""
        state, policy = self.state, self.policy
        is_told = state.verdict is not None and state.verdict.says != "undecided"
        if not policy.tries_twins or is_told or state.sends_all or state.step < TWINS_AGAIN_AFTER * state.trials:
            return None
        best = min(self.usable(), key=_per_progress_s)
        judged = [self.judged(option, coefficient=0.0) for option in policy.options]
        chosen = min(
            (candidate for candidate in judged if candidate and candidate.gain >= policy.least_gain),
            key=_per_progress_s,
        )
        saving_s = best.per_progress_s - chosen.per_progress_s
        pays = saving_s * self.steps_left >= 2 * MOST_STEPS * state.times.compute_s / PART
        worth = pays and saving_s >= LEAST_SAVING * best.per_progress_s and is_thin(chosen.option)
        return chosen.option.ratio if worth else None

    def trial(self, best: RatedOption) -> RatedOption | None:
        """Return the untried option of least hoped-for seconds per progress, at most twice those of ``best``.

        None: no option could save what a change costs.

        Args:
            best: best option of those that were tried.
        """
        hopeful = [
            candidate
            for candidate in self.usable()
            if not self.is_tried(candidate.option)
            and self.pays_to_try(candidate, best.per_progress_s - candidate.hoped_s)
            and candidate.per_progress_s <= 2 * best.per_progress_s
            and (is_dense(candidate.option) or candidate.hoped_s <= (1 - LEAST_SAVING) * best.per_progress_s)
        ]
        return min(hopeful, key=lambda candidate: candidate.hoped_s, default=None)

    def pays_to_try(self, candidate: RatedOption, saving_s: float) -> bool:
        """Return whether what an option would save in the steps left is at least what it costs to try it in vain.

        Averages that were never measured cost two rounds. An exchange tried in place of averages costs three dense
        ones, which end the averages and send what was held back. Other trials cost nothing.

        Args:
            candidate: option that is weighed.
            saving_s: seconds that it would save of each dense step's progress.
        """
        averages = candidate.option.averages
        price_s = 2 * candidate.option.every_steps * candidate.step_s if averages and self.state.local is None else 0.0
        if not averages and self._averages:
            price_s = 3 * self.network.exchange_s(self.policy.dense)
        return price_s == 0 or saving_s * self.steps_left >= price_s

    def _steps_per_progress(self, gain: float, coefficient: float) -> float:
        """Return the steps for one dense step's progress, over the steps left: residuals at the end are lost."""
        state, delivered = self.state, 1 / (1 + coefficient * distance(gain))
        if state.steps_left is not None:
            delivered -= (backlog_after(state.backlog, gain, state.steps_left) - state.backlog) / state.steps_left
        return 1 / max(_LEAST_DELIVERY, delivered)


def is_dense(option: Option) -> bool:
    """Return whether an option sends every element and loses next to no energy."""
    return option.ratio >= DENSE and option.gain == 1


def is_thin(option: Option) -> bool:
    """Return whether an option holds gradients back, so that what it keeps is read off the gain curve."""
    return option.gain is None and not option.averages


def _learned(state: AutoState, used: Option, observation: RatioObservation, network: Network) -> AutoState:
    """Return the state after a period of an option; where it may have been disturbed, with step times alone updated."""
    changes: dict[str, object] = {"step": observation.step, "steps_left": observation.steps_left}
    if observation.verdict is not None:
        changes |= {"verdict": observation.verdict, "trials": state.trials + 1}
    changes["times"] = times = state.times.after(
        used, network, step_s=observation.step_s, compute_s=observation.compute_s, steps=observation.steps
    )
    loss, mean = observation.loss, state.loss
    if not state.sends_all and loss is not None:
        has_risen = used.gain is None and mean is not None and 0 < RISEN * mean < loss
        changes["rises"] = state.rises + 1 if has_risen else 0
        if not has_risen:
            changes["loss"] = loss if mean is None else mean + FOLLOWS * (loss - mean)
    if times.is_suspect:
        return state.model_copy(update=changes)
    gain = max(1e-6, observation.gain) if is_thin(used) else used.gain or 1.0
    if used.averages:
        changes["local"] = (1 / max(1e-6, observation.gain) - 1) / math.sqrt(used.every_steps - 1)
    backlog = backlog_after(state.backlog, gain, observation.steps)
    changes |= {"option": used.key, "gain": gain, "backlog": backlog}
    if observation.gain_curve is not None:
        changes["points"] = observation.gain_curve.points()
    state = state.model_copy(update=changes)
    expected = state.expected_gain(used.ratio) if is_thin(used) else None
    if expected is None:
        return state
    return state.model_copy(update={"kept": {**state.kept, used.ratio: max(1e-6, gain / expected)}})


def _changed(keep: RatioDecision, now: RatedOption, chosen: RatedOption, why: str) -> RatioDecision:
    """Return the decision to use ``chosen`` instead of ``now``, with a reason; ``keep`` if both are the same option."""
    if chosen.option.key == now.option.key:
        return keep
    reason = f"{way_in_words(chosen.option.key)} instead of {way_in_words(now.option.key)}: {why}"
    name, ratio = chosen.option.key, chosen.option.ratio
    looks_after = 2 * chosen.option.every_steps if chosen.option.averages else TRIAL_STEPS
    return RatioDecision(ratio=ratio, option=name, reason=reason, look_after_steps=looks_after)


def _reason(now: RatedOption, chosen: RatedOption, why: str) -> str:
    """Return a sentence on a choice: what it keeps or progresses, its step time beside the present one, ``why``."""
    if chosen.option.averages:
        return (
            f"a local step makes about {100 * chosen.gain:.0f} % of the progress, "
            f"{1e3 * chosen.step_s:.3g} instead of {1e3 * now.step_s:.3g} ms a step; {why}"
        )
    return (
        f"{percent(chosen.option.ratio)} sent, about {100 * chosen.gain:.0f} % of the energy kept, "
        f"{1e3 * chosen.step_s:.3g} instead of {1e3 * now.step_s:.3g} ms a step; {why}"
    )
