"""Whether a run had better average parameters now and then than sum gradients in every step: what sync ``auto`` asks.

The best of what `auto` may exchange for certain is weighed against workers that train for themselves and average every
few steps, by the same measured computation, compressor and network. Averages cost more steps: with a quarter more, and
a schedule stretched by as much, runs ended as well as with every gradient summed, or better (docs/decisions/0039). A
step of theirs needs a fraction of the bytes of an exchange, which can be rounded to a quarter. So where links are slow,
nothing else is as quick and ends as well.

How rarely workers may meet is what twins tell: a task that does not mind gradients that come late does not mind workers
that drift either. But thin gradients themselves count as the law has them, whatever twins said of them: eight steps
tell how much is lost in the next ones, and not in all of the run.

It is asked once the ratio policy has seen what it has to choose from, twins included, and there is no way back: who has
averaged holds a schedule that is stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.trainer.control.ratio.auto import AutoRatio
from hetopt.trainer.control.ratio.auto_state import AutoState
from hetopt.trainer.control.ratio.outlook import Judged
from hetopt.trainer.exchange.network_state import NetworkState
from hetopt.trainer.exchange.planner import Option

EVERY_STEPS = 5
"""From one average to the next, until the learning rate falls; the less it is, the rarer they become."""

HARMLESS_EVERY_STEPS = 20
"""The most of them, for a task that twins have shown not to mind late gradients, while averages take long."""

LITTLE = 0.25
"""Part of its computation that averages may add to a step before they are made rarer."""

HARMLESS_STEPS = 1.0
"""Steps with averages over steps with every gradient, to the same quality, of such a task: a small LSTM took 0.75 to
0.85 of them."""

STRETCH = 1.25
"""Steps with averages over steps with every gradient, to the same quality."""

ROUNDED = ("identity", "bf16", "int8")
"""What averages may be rounded by. In int4 they cost two points of accuracy, whatever is remembered of them."""

LEAST_SAVING = 0.15
"""Of the time to the target: the choice is for good, and ``STRETCH`` is a measured mean."""

LEAST_PERIODS = 2
"""The first has steps in it that are slower than all that follow."""

WORTH_WAITING_FOR = 2
"""Trials of twins that may leave open whether thin gradients do harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What averages promise.

    Attributes:
        rounding: an exchange of everything, rounded as averages will be.
        every_steps: from one to the next.
        step_s: mean over steps with and without one.
        saving: part of the time to the target that they save.
        instead: the exchange that they would replace.
    """

    rounding: Option
    every_steps: int
    step_s: float
    saving: float
    instead: Judged

    @property
    def reason(self) -> str:
        """In words, for people."""
        return (
            f"{1e3 * self.step_s:.3g} ms a step with an average every {self.every_steps}, instead of "
            f"{1e3 * self.instead.step_s:.3g} ms with {self.instead.option.key}: {self.saving:.0%} less time to the "
            "target"
        )


def promised(policy: AutoRatio, state: AutoState, network: NetworkState) -> Promise | None:
    """What averages promise to a run; None: less than `LEAST_SAVING`, or it is too early to tell.

    Args:
        policy: that steers the exchange.
        state: after its newest decision.
        network: as tracked.
    """
    if state.periods < LEAST_PERIODS or _waits_for_twins(policy, state):
        return None
    certain = state if math.isinf(state.harmless_from) else state.model_copy(update={"verdict": None})
    outlook = policy.outlook(certain, network)
    best = min(policy.usable(certain, outlook), key=lambda judged: judged.per_progress_s)
    rounded = [option for option in policy.options if option.compressor in ROUNDED and option.buckets == 1]
    if not rounded:
        return None
    chosen = min(rounded, key=outlook.predicted_s)
    harmless = certain is not state
    average_s = outlook.predicted_s(chosen) - outlook.compute_s
    every_steps = _every_steps(average_s, outlook.compute_s, most=HARMLESS_EVERY_STEPS if harmless else EVERY_STEPS)
    step_s = outlook.compute_s + average_s / every_steps
    saving = 1 - (HARMLESS_STEPS if harmless else STRETCH) * step_s / best.per_progress_s
    if saving < LEAST_SAVING:
        return None
    return Promise(rounding=chosen, every_steps=every_steps, step_s=step_s, saving=saving, instead=best)


def _every_steps(average_s: float, compute_s: float, *, most: int) -> int:
    """How rare averages have to be to add little to a step; what one takes is what an exchange of everything does."""
    if average_s <= EVERY_STEPS * LITTLE * compute_s:
        return EVERY_STEPS
    return most if compute_s <= 0 else min(most, math.ceil(average_s / (LITTLE * compute_s)))


def _waits_for_twins(policy: AutoRatio, state: AutoState) -> bool:
    """Whether twins may yet show that thin gradients do no harm, where that would matter."""
    if not policy.tries_twins:
        return False
    if state.verdict is None:
        return False
    return state.verdict.says == "undecided" and state.trials < WORTH_WAITING_FOR
