"""Whether a run had better average parameters now and then than sum gradients in every step: what sync ``auto`` asks.

The best of what `auto` may exchange is weighed against workers that train for themselves and average every five
steps, by the same measured computation, compressor and network. Averages cost more steps, whatever they are like: with
a quarter more, and a schedule stretched by as much, runs ended as well as with every gradient summed
(docs/decisions/0039). A step of theirs needs a fifth of the bytes of an exchange, which can be rounded to a quarter. So
where links are slow, and thin gradients do harm, nothing else is as quick.

It is asked once the ratio policy has seen what it has to choose from, twins included, and there is no way back: who has
averaged holds a schedule that is stretched.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.trainer.control.ratio.auto import AutoRatio
from hetopt.trainer.control.ratio.auto_state import AutoState
from hetopt.trainer.control.ratio.outlook import Judged, Outlook
from hetopt.trainer.exchange.network_state import NetworkState
from hetopt.trainer.exchange.planner import Option

EVERY_STEPS = 5
"""From one average to the next, until the learning rate falls; the less it is, the rarer they become."""

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
        compressor: that they are rounded by.
        step_s: mean over steps with and without one.
        saving: part of the time to the target that they save.
        instead: the exchange that they would replace.
    """

    compressor: str
    step_s: float
    saving: float
    instead: Judged

    @property
    def reason(self) -> str:
        """In words, for people."""
        return (
            f"{1e3 * self.step_s:.3g} ms a step, {STRETCH:g} times as many of them, instead of "
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
    outlook = policy.outlook(state, network)
    best = min(policy.usable(state, outlook), key=lambda judged: judged.per_progress_s)
    rounded = [option for option in policy.options if option.compressor in ROUNDED and option.buckets == 1]
    if not rounded:
        return None
    chosen = min(rounded, key=outlook.predicted_s)
    step_s = _step_s(chosen, outlook)
    saving = 1 - STRETCH * step_s / best.per_progress_s
    if saving < LEAST_SAVING:
        return None
    return Promise(compressor=chosen.compressor, step_s=step_s, saving=saving, instead=best)


def _step_s(option: Option, outlook: Outlook) -> float:
    """Mean over steps: what an average takes is what an exchange of everything does."""
    return outlook.compute_s + (outlook.predicted_s(option) - outlook.compute_s) / EVERY_STEPS


def _waits_for_twins(policy: AutoRatio, state: AutoState) -> bool:
    """Whether twins may yet show that thin gradients do no harm, where that would matter."""
    if not policy.tries_twins:
        return False
    if state.verdict is None:
        return False
    return state.verdict.says == "undecided" and state.trials < WORTH_WAITING_FOR
