"""Expected time that losses of machines, restarts and checkpoints add to a job, and the best checkpoint interval.

With work t between checkpoints, C to write one, R to restart and Theta between losses, losses during restarts included,

    E[T] = (W / t) Theta e^(R / Theta) (e^((t + C) / Theta) - 1)                                  (Daly 2006)

which is least where 1 - t / Theta = e^(-(t + C) / Theta); Young's sqrt(2 C Theta) (1974) is its first term.

Training pauses for a copy in memory (C), which is written while it goes on. What is lost before the copy is on disk is
done again, so that the time of writing belongs to R, and no checkpoint begins before the last one is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.optimizer.cost.bill import Array, Numbers, Usage

CHECKPOINT_INTERVAL_S = (60.0, 1800.0)
"""Bounds of planned intervals: a run that had to save more often would be hopeless, and half an hour is much to lose by
an error that no hazard counts. A checkpoint that takes longer to write has that time between two."""
_LARGEST_EXPONENT = 50.0
_HALVINGS, _NEWTON_STEPS = 3, 1


def daly_interval_s(mean_time_between_losses_s: ArrayLike, checkpoint_s: float) -> Array:
    """Return the seconds of work between checkpoints with the least expected time of a run (Daly 2006).

    Theta itself, the mean time between losses, if a checkpoint takes twice that or longer.
    """
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
    """Return a job's time with losses, and checkpoints every ``interval_s``, over its time without; arrays broadcast.

    A job that is no longer than the interval writes no checkpoint.

    Args:
        work_s: seconds of the job without losses and checkpoints.
        losses_per_hour: losses of machines of the whole cluster.
        interval_s: seconds of work between checkpoints.
        checkpoint_s: seconds for which training pauses at each.
        restart_s: seconds from a loss to training again, without the work that is done again.
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
    """Return the seconds of work between checkpoints with the least expected time, for uncertain loss rates, [rows].

    The interval solves sum of w e^(R / Theta) (e^((t + C) / Theta) (t / Theta - 1) + 1) Theta = 0 over the nodes of the
    belief, by halvings between the intervals of the worst and of the mean hazard, then Newton's method.

    Args:
        losses_per_hour: possible loss rates of the whole cluster, shape (rows, nodes).
        weights: probability of each rate, of the same shape or (nodes,).
        checkpoint_s: seconds for which training pauses at a checkpoint.
        restart_s: seconds from a loss to training again, one or of shape (rows, 1).
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


STARTUP_LOG_SD = 0.5
"""Provisioning of 180 s (see `provisioning`) is 80 to 410 s with 90 % probability."""

DETECTION_S = 30.0
"""From the loss of a machine until the job notices and asks for another."""

CHECKPOINT_BYTES_PER_S = 100e6
"""Writing a checkpoint to a gp3 volume, whose baseline is 125 MB/s."""

COPIED_BYTES_PER_S = 2e9
"""Copying it to the host's memory before; assumed. From 1 to 4 GB/s a run on spot takes 3 % more to 2 % less time with
7 B parameters, and 0.1 % with 110 M."""

CHECKPOINT_COPIES = 4
"""Parameters, two moments of the optimizer and the compressor's residual, each as large as the gradient."""

# Gauss-Laguerre rule: means over the exponential distribution that Gamma(1, r) is.
_NODES, _NODE_WEIGHTS = np.polynomial.laguerre.laggauss(4)


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Expected slowdown of a job by losses of machines and checkpoints, its spread, and the checkpoint interval.

    Attributes:
        expected_factor: expected time of the job, checkpoints included, over its time without losses and checkpoints.
        log_sd: standard deviation of the log of that factor over calm and scarce pools.
        interval_s: seconds of work between checkpoints, as given or planned; infinite where nothing is ever lost.
    """

    expected_factor: Array
    log_sd: Array
    interval_s: Array


def interruptions(
    work_s: ArrayLike,
    *,
    calm_per_hour: ArrayLike,
    scarce_per_hour: ArrayLike,
    scarce_chance: ArrayLike,
    checkpoint_s: float,
    written_s: float = 0.0,
    restart_s: ArrayLike,
    interval_s: ArrayLike | None = None,
) -> Interruptions:
    """Return a job's expected slowdown by machine losses and checkpoints, over a calm and a scarce state of its pools.

    Any loss stops the whole job until the machine is replaced. The loss rate of scarce pools has an exponential
    distribution around its mean. One checkpoint interval serves calm and scarce pools.

    Args:
        work_s: seconds of the job without losses and checkpoints.
        calm_per_hour: losses of the whole cluster an hour when no pool is scarce.
        scarce_per_hour: mean losses an hour given that some pool is scarce.
        scarce_chance: probability that some pool is scarce.
        checkpoint_s: seconds for which training pauses to copy a checkpoint.
        written_s: seconds from then until the checkpoint is on disk.
        restart_s: seconds from a loss to training again, without the work that is done again.
        interval_s: seconds of work between checkpoints; None: `planned_interval_s`, which takes most of the time.
    """
    if interval_s is None:
        interval_s = planned_interval_s(
            calm_per_hour=calm_per_hour,
            scarce_per_hour=scarce_per_hour,
            scarce_chance=scarce_chance,
            checkpoint_s=checkpoint_s,
            written_s=written_s,
            restart_s=restart_s,
        )
    work, chance, calm, scarce, interval, restart = np.broadcast_arrays(
        *(
            np.asarray(x, dtype=np.float64)
            for x in (work_s, scarce_chance, calm_per_hour, scarce_per_hour, interval_s, restart_s)
        )
    )
    restart = restart + written_s
    rates, weights = _nodes(calm, scarce, chance)
    factors = factor_at(work.reshape(-1, 1), rates, interval.reshape(-1, 1), checkpoint_s, restart.reshape(-1, 1))
    expected = (weights * factors).sum(axis=1)
    variance = (weights * np.log(factors / expected[:, None]) ** 2).sum(axis=1)
    return Interruptions(
        expected_factor=expected.reshape(work.shape),
        log_sd=np.sqrt(variance).reshape(work.shape),
        interval_s=np.array(interval),
    )


def planned_interval_s(
    *,
    calm_per_hour: ArrayLike,
    scarce_per_hour: ArrayLike,
    scarce_chance: ArrayLike,
    checkpoint_s: float,
    written_s: float = 0.0,
    restart_s: ArrayLike,
) -> Array:
    """Return the best seconds of work between checkpoints for uncertain loss rates; infinite without losses.

    Clipped to 1 to 30 minutes, and at least ``written_s``. Arguments are as of `interruptions`.
    """
    chance, calm, scarce, restart = np.broadcast_arrays(
        *(np.asarray(part, dtype=np.float64) for part in (scarce_chance, calm_per_hour, scarce_per_hour, restart_s))
    )
    rates, weights = _nodes(calm, scarce, chance)
    best = interval_under_belief_s(rates, weights, checkpoint_s, restart.reshape(-1, 1) + written_s)
    interval = np.maximum(np.clip(best, *CHECKPOINT_INTERVAL_S), written_s)
    return np.where((weights * rates).sum(axis=1) > 0, interval, np.inf).reshape(chance.shape)


def _nodes(calm: Array, scarce: Array, chance: Array) -> tuple[Array, Array]:
    """Return possible loss rates of the cluster an hour, and their probabilities, (rows, nodes) each, calm first."""
    return (
        np.concatenate([calm.reshape(-1, 1), scarce.reshape(-1, 1) * _NODES], axis=1),
        np.concatenate([1 - chance.reshape(-1, 1), chance.reshape(-1, 1) * _NODE_WEIGHTS], axis=1),
    )


UNAVAILABLE_SPREAD = 1.1
"""Of the log-logistic time without machines of a scarce pool: as wide as the logs of its rate and of its outages, whose
priors have variances of 1.6 and 2.3. Of shown 90 % intervals, 89 % hold with 0.9, 93 with 1.1 and 95 with 1.3 where two
days of the pool were seen (``benchmarks.spot_waiting``)."""


def unavailable_s(training_s: Array, missing: Array, scarce_chance: Array) -> tuple[Array, Array]:
    """Return the expected seconds without spot machines, and the upper end of their 90 % interval, [rows] each.

    None in a calm pool. In a scarce one, with the chance c, the seconds U are log-logistic around u, the expected
    seconds over c:

        P(U > x) = c / (1 + (x / u)^(1 / spread)) = 0.05    =>    x = u (c / 0.05 - 1)^spread

    The second array is x, but no less than the first.

    Args:
        training_s: seconds of the job, losses included.
        missing: expected hours without a machine for each hour with it.
        scarce_chance: probability that a pool is scarce.
    """
    expected = missing * training_s
    usual = np.divide(expected, scarce_chance, out=np.zeros_like(expected), where=scarce_chance > 0)
    most = usual * np.maximum(scarce_chance / 0.05 - 1, 0.0) ** UNAVAILABLE_SPREAD
    return expected, np.maximum(expected, most)


def checkpoint_bytes(gradient_bytes: int) -> int:
    """Return the size of a checkpoint that a run can resume from, in bytes: four times the gradient."""
    return gradient_bytes * CHECKPOINT_COPIES


def checkpoint_time_s(gradient_bytes: int) -> float:
    """Return the seconds to write a checkpoint to disk, for a gradient of ``gradient_bytes`` bytes."""
    return checkpoint_bytes(gradient_bytes) / CHECKPOINT_BYTES_PER_S


def checkpoint_pause_s(gradient_bytes: int) -> float:
    """Return the seconds that training pauses to copy a checkpoint to host memory; writing it then goes on beside."""
    return checkpoint_bytes(gradient_bytes) / COPIED_BYTES_PER_S


def planned_usage(
    *,
    start_up_s: Numbers,
    work_s: Numbers,
    interruption_s: Numbers,
    machines: Numbers,
    stops_per_hour: Numbers = 0.0,
    interval_s: Numbers = np.inf,
    checkpoint_bytes: float = 0.0,
) -> Usage:
    """Return the billed seconds and checkpoints of a planned run; scalars for one cluster, arrays for many.

    Args:
        start_up_s: seconds from the request to the first step.
        work_s: training, evaluations included.
        interruption_s: expected restarts, repeated work and checkpoints.
        machines: number in the cluster; after a loss each reads the checkpoint.
        stops_per_hour: expected losses of the cluster.
        interval_s: work between checkpoints (`Interruptions.interval_s`).
        checkpoint_bytes: size of a checkpoint in the bucket; 0: no bucket is used.
    """
    work = np.asarray(work_s, dtype=np.float64)
    hours = (work + interruption_s) / SECONDS_PER_HOUR
    return Usage(
        start_up_s=start_up_s,
        work_s=work,
        interruption_s=interruption_s,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=np.floor(work / interval_s) + 1.0 if checkpoint_bytes else 0.0,
        restores=stops_per_hour * hours * machines if checkpoint_bytes else 0.0,
    )
