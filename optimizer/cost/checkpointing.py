"""When to save: the interval between checkpoints, and the time that losses, restarts and checkpoints add to a job.

With work t between checkpoints, C to write one, R to restart and Theta between losses, losses during restarts included,

    E[T] = (W / t) Theta e^(R / Theta) (e^((t + C) / Theta) - 1)                                  (Daly 2006)

which is least where 1 - t / Theta = e^(-(t + C) / Theta); Young's sqrt(2 C Theta) (1974) is its first term.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.core.budget_law import SECONDS_PER_HOUR

Array = NDArray[np.float64]


CHECKPOINT_INTERVAL_S = (60.0, 1800.0)
"""Bounds of what a run is told: one that had to save more often would be hopeless, and half an hour is much to lose by
an error that no hazard counts."""
_LARGEST_EXPONENT = 50.0
_HALVINGS, _NEWTON_STEPS = 3, 1


def daly_interval_s(mean_time_between_losses_s: ArrayLike, checkpoint_s: float) -> Array:
    """Return the interval with the least expected time (Daly 2006), seconds: Young's sqrt(2 C Theta), refined."""
    theta = np.asarray(mean_time_between_losses_s, dtype=np.float64)
    ratio = np.minimum(checkpoint_s / (2 * theta), 1.0)
    refined = np.sqrt(2 * checkpoint_s * theta) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    return np.where(checkpoint_s < 2 * theta, np.maximum(refined, 1e-9), theta)


def factor_at(
    work_s: ArrayLike,
    losses_per_hour: ArrayLike,
    interval_s: ArrayLike,
    checkpoint_s: ArrayLike,
    restart_s: ArrayLike,
) -> Array:
    """Return expected time over work with a checkpoint every ``interval_s`` of work; all arguments broadcast.

    A job shorter than the interval writes no checkpoint. 1 (and the checkpoints) where nothing is ever lost.
    """
    work, hazard = np.asarray(work_s, dtype=np.float64), np.asarray(losses_per_hour, dtype=np.float64)
    interval, checkpoint = np.asarray(interval_s, dtype=np.float64), np.asarray(checkpoint_s, dtype=np.float64)
    single = work <= interval
    interval = np.where(single, np.maximum(work, 1e-9), interval)
    saved = np.where(single, 0.0, checkpoint)
    rate = np.maximum(hazard, 1e-12) / SECONDS_PER_HOUR
    restart = np.exp(np.minimum(np.asarray(restart_s, dtype=np.float64) * rate, _LARGEST_EXPONENT))
    stretched = restart * np.expm1(np.minimum((interval + saved) * rate, _LARGEST_EXPONENT)) / (interval * rate)
    return np.where(hazard > 0, stretched, (interval + saved) / interval)


def interval_under_belief_s(
    losses_per_hour: ArrayLike, weights: ArrayLike, checkpoint_s: float, restart_s: float | Array
) -> Array:
    """Return the checkpoint interval with the least expected time under a belief about the hazard, seconds.

    It solves sum of w e^(R / Theta) (e^((t + C) / Theta) (t / Theta - 1) + 1) Theta = 0 over the nodes of the belief,
    between the intervals of the worst and of the mean hazard: halvings of that range, then Newton's method.

    Args:
        losses_per_hour: hazards of the whole cluster, shape (rows, nodes).
        weights: probability of each, of the same shape or (nodes,).
        checkpoint_s: time to write a checkpoint.
        restart_s: from a loss to training again, one or of shape (rows, 1).

    Returns:
        Seconds of work between checkpoints, shape (rows,).
    """
    hazards = np.maximum(np.asarray(losses_per_hour, dtype=np.float64), 1e-9)
    weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), hazards.shape)
    mean = (weight * hazards).sum(axis=1)
    rate = hazards / SECONDS_PER_HOUR
    least, most = (
        daly_interval_s(SECONDS_PER_HOUR / edge, checkpoint_s) for edge in (hazards.max(axis=1), np.maximum(mean, 1e-9))
    )
    pressure = weight * np.exp(np.minimum(restart_s * rate, _LARGEST_EXPONENT)) / rate
    least = np.minimum(least, most)
    interval = np.sqrt(least * most)
    for step in range(_HALVINGS + _NEWTON_STEPS):
        t = interval[:, None]
        growth = np.exp(np.minimum((t + checkpoint_s) * rate, _LARGEST_EXPONENT))
        value = (pressure * (growth * (t * rate - 1) + 1)).sum(axis=1)
        least, most = np.where(value < 0, interval, least), np.where(value < 0, most, interval)
        if step < _HALVINGS:
            interval = np.sqrt(least * most)
        else:
            slope = (pressure * growth * t * rate**2).sum(axis=1)
            interval = np.clip(interval - value / slope, least, most)
    return np.asarray(interval, dtype=np.float64)
