"""What `auto` may try again, and when; and what it must not use for a while."""

from __future__ import annotations

import math

from hetopt.core.comm.planner import Option
from hetopt.trainer.policies.ratio.auto_state import AutoState, TooThin

RISEN, RISEN_OF_FIRST = 1.5, 0.05
"""Times the least loss of a period, and part of the first loss above it, that call for sending everything."""

_RETRIED_AFTER = 4  # periods


def may_hope(state: AutoState, key: str) -> bool:
    """Whether a trial on nothing but hope is due: the first at once, each further one after twice as long."""
    before = state.tried.get(key)
    return before is None or state.periods >= before.period + _RETRIED_AFTER * 2**before.times


def may_be_seen(state: AutoState, key: str) -> bool:
    """Whether a trial is due of what was seen for so few periods, so noisy, that it may be better than that."""
    before = state.tried.get(key)
    return before is not None and state.periods >= before.period + _RETRIED_AFTER * (1 + before.times)


def has_risen(state: AutoState, loss: float | None) -> bool:
    """Whether the loss of a period is far above the least there was; losses below zero are compared with none."""
    if loss is None or state.least_loss is None or state.first_loss is None or state.least_loss <= 0:
        return False
    return loss > max(RISEN * state.least_loss, state.least_loss + RISEN_OF_FIRST * state.first_loss)


def proved(state: AutoState, ratio: float) -> tuple[TooThin, ...]:
    """What is too thin once this ratio was: for a while that doubles with every time it turns out so."""
    before = next((one for one in state.too_thin if one.ratio == ratio), None)
    times = 1 if before is None else before.times + 1
    proved = TooThin(ratio=ratio, times=times, until=state.periods + _RETRIED_AFTER * 2**times)
    return (*(one for one in state.too_thin if one.ratio != ratio), proved)


def is_barred(state: AutoState, option: Option) -> bool:
    """Whether as much or more has proved to be too little, not long ago: no estimate of a gain is better than that."""
    if option.gain is not None:
        return False
    if option.ratio < state.harmless_from < math.inf:
        return True
    return any(option.ratio <= one.ratio and state.periods < one.until for one in state.too_thin)
