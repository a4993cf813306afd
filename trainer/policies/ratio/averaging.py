"""Whether a run had better average parameters now and then than sum gradients in every step: what sync ``auto`` asks.

The best of what `auto` may exchange for certain is weighed against workers that train for themselves and average every
few steps, by the same measured computation, compressor and network. Averages cost more steps, and the more the rarer
they are: with a tenth more for every step between them, and a schedule stretched by as much, runs end about as well as
with every gradient summed (seen of a ResNet, a VGG and an LSTM). A step of theirs needs a fraction of an exchange's
bytes, which can be rounded to a quarter and travel under the step that follows (`hetopt.trainer.sync.streaming_sync`).
So where links are slow, nothing else is as quick and ends as well. The model is averaged in as many fragments as there
are steps between averages: one leaves in every step, and there are as many as it takes for a fragment to arrive in
time.

A task that twins have shown not to mind gradients that come late does not mind workers that drift either: they may meet
more rarely still. But thin gradients themselves count as the law has them, whatever twins said of them: eight steps
tell how much is lost in the next ones, and not in all of the run.

It is asked once the ratio policy has seen what it has to choose from, twins included, and there is no way back: who has
averaged holds a schedule that is stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetopt.core.comm.options import AVERAGED
from hetopt.core.comm.planner import Option
from hetopt.trainer.policies.ratio.auto import AutoRatio, AutoState, Judged, Outlook

EVERY_STEPS, MOST_EVERY_STEPS = 5, 8
"""From one average to the next, at least and at most, until the learning rate falls; the less it is, the rarer they
become. Runs with 20 end four points lower than with every gradient, in spite of half as many steps more."""

MORE_STEPS = 0.1
"""Of all steps, that a run takes more for each step between averages, to the same quality: half as many more with 5. A
small ResNet ends better than with every gradient after a quarter more; a small VGG ends a point lower then, and about
as high after 0.4 more."""

HARMLESS_EVERY_STEPS = 20
"""The most of them, for a task that twins have shown not to mind late gradients, while averages take long."""

HARMLESS_STRETCH = 1.25
"""How much longer its runs are made, because they end better for it. To the quality of every gradient they are not
taken to need more steps: a small LSTM needed 0.75 to 0.85 of them."""

LEAST_SAVING = 0.15
"""Of the time to the target: the choice is for good, and how many steps it costs is a measured mean."""

LEAST_PERIODS = 2
"""The first has steps in it that are slower than all that follow."""

WORTH_WAITING_FOR = 2
"""Trials of twins that may leave open whether thin gradients do harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What averages promise.

    Attributes:
        rounding: an exchange of everything, rounded as averages will be.
        every_steps: from one to the next, and fragments of which one leaves in every step.
        stretch: steps that are taken for one of what is left to do, and epochs of the schedule likewise.
        step_s: of a step.
        saving: part of the time to the target that they save.
        instead: the exchange that they would replace.
    """

    rounding: Option
    every_steps: int
    stretch: float
    step_s: float
    saving: float
    instead: Judged

    @property
    def reason(self) -> str:
        """Why averaging is faster, as a phrase."""
        return (
            f"{1e3 * self.step_s:.3g} ms a step with an average every {self.every_steps} under it, instead of "
            f"{1e3 * self.instead.step_s:.3g} ms with {self.instead.option.key}: {100 * self.saving:.0f} % less time "
            f"to the "
            "target"
        )


def promised(outlook: Outlook) -> Promise | None:
    """What averages promise to a run; None: less than `LEAST_SAVING`, or it is too early to tell.

    Args:
        outlook: of the policy that steers the exchange, after its newest decision.
    """
    policy, state = outlook.policy, outlook.state
    if state.periods < LEAST_PERIODS or _waits_for_twins(policy, state):
        return None
    is_harmless = not math.isinf(state.harmless_from)
    certain = replace(outlook, state=state.model_copy(update={"verdict": None})) if is_harmless else outlook
    best = min(certain.usable(), key=lambda judged: judged.per_progress_s)
    rounded = [option for option in policy.options if option.compressor in AVERAGED and option.buckets == 1]
    if not rounded:
        return None
    chosen = min(rounded, key=certain.step_s)
    average_s = max(0.0, certain.step_s(chosen) - state.compute_s)
    every_steps = steps_between(
        average_s, state.compute_s, most=HARMLESS_EVERY_STEPS if is_harmless else MOST_EVERY_STEPS
    )
    stretch = more = 1 + MORE_STEPS * every_steps
    if is_harmless:
        stretch, more = HARMLESS_STRETCH, 1.0
    step_s = max(state.compute_s, average_s / every_steps)
    saving = 1 - more * step_s / best.per_progress_s
    if saving < LEAST_SAVING:
        return None
    return Promise(
        rounding=chosen, every_steps=every_steps, stretch=stretch, step_s=step_s, saving=saving, instead=best
    )


def steps_between(average_s: float, compute_s: float, *, most: int) -> int:
    """The gap between averages that promises the target soonest: the least at which fragments arrive in time.

    Every further step between averages takes more off a step than it adds to their number as long as a step waits for
    its fragment, and nothing after that.

    Args:
        average_s: seconds of an average of the whole model.
        compute_s: of a step's computation.
        most: that the task bears.
    """
    if average_s >= most * compute_s:
        return most
    return max(EVERY_STEPS, math.ceil(average_s / compute_s))


def _waits_for_twins(policy: AutoRatio, state: AutoState) -> bool:
    """Whether twins may yet show that thin gradients do no harm, where that would matter."""
    if not policy.tries_twins:
        return False
    if state.verdict is None:
        return False
    return state.verdict.says == "undecided" and state.trials < WORTH_WAITING_FOR
