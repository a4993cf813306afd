"""What `auto` learns from a control period: times, gains, and what is held back."""

from __future__ import annotations

from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.planner import Option
from hetopt.core.compression_slowdown import backlog_after
from hetopt.trainer.policies.ratio.auto_state import AutoState, Tried
from hetopt.trainer.policies.ratio.policy import DENSE, RatioObservation

_WEIGHT = 0.5  # of the newest times
_REST_WEIGHT = 0.2  # of the newest, whichever way it was
_VARIANCE_WEIGHT = 0.2  # of the newest square
_MOST_DEVIATION = 0.1  # relative, of a period from what was before: more is no noise
_ANOTHER = 0.25  # the same, that makes what was before another time

_STEP_WEIGHT = 0.2  # of the newest time of a step of the same option, where many were seen

MOST_SEEN = 2 / _STEP_WEIGHT - 1
"""Periods whose mean is as sure as what is remembered of ever so many."""


def learned(state: AutoState, used: Option, observation: RatioObservation, network: NetworkState) -> AutoState:
    """The state after a period.

    Args:
        state: before.
        used: in the period.
        observation: of it.
        network: as tracked, the period included.
    """
    factors = dict(state.compress_factors)
    if used.compress_s > 0 and observation.compress_s > 0:
        fresh = observation.compress_s / used.compress_s
        before = factors.get(used.compressor, fresh)
        factors[used.compressor] = before + _WEIGHT * (fresh - before)
    jumped = network.jumps != state.jumps
    tried, excess = ({}, {}) if jumped else (state.tried, state.excess)
    before_that = tried.get(used.key, Tried())
    again = state.trial_after is not None or before_that.times == 0
    tried = {**tried, used.key: Tried(times=before_that.times + again, period=state.periods + 1)}
    compute_s, backward_s = observation.compute_s, observation.backward_s
    if state.compute_s is not None:
        compute_s = state.compute_s + _WEIGHT * (compute_s - state.compute_s)
        backward_s = state.backward_s + _WEIGHT * (backward_s - state.backward_s)
    step_s, step_variance = observation.step_time_s, state.step_variance
    if state.option == used.key and not jumped and state.is_warm:
        square = min(abs(step_s / state.step_s - 1), _MOST_DEVIATION) ** 2
        step_variance = square if step_variance is None else step_variance + _VARIANCE_WEIGHT * (square - step_variance)
        step_s = state.step_s + _step_weight(state.seen(used.key)) * (step_s - state.step_s)
    # The first step of a way makes its buffers, and finds nothing in the cache.
    is_warm = state.option == used.key or observation.steps > 1
    rest_s = state.rest_s
    if is_warm:
        rest_s += _REST_WEIGHT * (max(0.0, observation.step_time_s - observation.parts_s) - rest_s)
    gain = used.gain if used.gain is not None else observation.gain
    backlog = backlog_after(state.backlog, gain, observation.steps)
    verdict = observation.verdict
    return state.model_copy(
        update={
            "option": used.key,
            "step_s": step_s,
            "is_warm": is_warm,
            "step_variance": step_variance,
            "belief": state.belief.seen(used, observation.gain, observation.gain_curve),
            "verdict": verdict or state.verdict,
            "trials": state.trials + (verdict is not None),
            "too_thin": () if verdict is not None and verdict.says == "harmless" else state.too_thin,
            "backlog": backlog,
            "first_loss": observation.loss if state.first_loss is None else state.first_loss,
            "least_loss": _least(state.least_loss, observation.loss),
            "steps": observation.step,
            "steps_left": observation.steps_left,
            "since_curve": 0 if observation.gain_curve is not None else state.since_curve + observation.steps,
            "compute_s": compute_s,
            "beside_s": observation.beside_s,
            "rest_s": rest_s,
            "backward_s": min(backward_s, compute_s),
            "compress_factors": factors,
            "tried": tried,
            "excess": excess,
            "dense_tried": state.dense_tried or is_dense(used),
            "jumps": network.jumps,
            "periods": state.periods + 1,
            "last_curve": state.last_curve if observation.gain_curve is None else state.periods + 1,
        }
    )


def reminded(state: AutoState, used: Option) -> AutoState:
    """With what a step of an option that is in use again took before as well: one period alone may be disturbed.

    What it takes now may have nothing to do with that: then it is forgotten.
    """
    before = state.excess.get(used.key)
    if before is None:
        return state
    if abs(state.step_s / before.whole_s - 1) > _ANOTHER:
        excess = {key: seen for key, seen in state.excess.items() if key != used.key}
        return state.model_copy(update={"excess": excess})
    weight = _step_weight(state.seen(used.key))
    return state.model_copy(update={"step_s": before.whole_s + weight * (state.step_s - before.whole_s)})


def _step_weight(seen: float) -> float:
    """Of the newest time of a step of an option that was seen for so many periods before."""
    return max(_STEP_WEIGHT, 1 / (seen + 1))


def _least(before: float | None, fresh: float | None) -> float | None:
    return min((loss for loss in (before, fresh) if loss is not None), default=None)


def is_dense(option: Option) -> bool:
    """Whether it sends everything, and loses nothing to speak of."""
    return option.ratio >= DENSE and option.gain == 1
