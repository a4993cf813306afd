"""Exact local batch sizes of many clusters at once: `hetopt.core.batch_partition.solve_shares` on arrays.

Rows are clusters, columns their groups of identical workers; a group may be empty. `earliest_finish` bounds the compute
time of all clusters of a box of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Base of records whose fields are arrays of equal length, with one entry or row per item.

    Each column of an array lies together in memory: sums over the few columns of many rows are ten times as fast.
    """

    def __post_init__(self) -> None:
        """Lay arrays of several columns out by columns."""
        for field in fields(self):
            object.__setattr__(self, field.name, np.asfortranarray(getattr(self, field.name)))

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: Integers | NDArray[np.bool_] | slice) -> Self:
        """Return a table of the rows with these indices, in their order, or of the rows where a mask is true.

        The result may be a view.
        """
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return one table with the rows of all ``parts``, one after the other; at least one part."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Lines(Table):
    """Compute time of a worker of each group of b samples: ``max(floor_s, fixed_s + per_sample_s b)``; (rows, groups).

    The line holds for up to ``together`` samples; see `time_s` for more.

    Attributes:
        fixed_s: seconds of a step or micro-batch whatever its samples.
        per_sample_s: seconds a sample.
        floor_s: seconds that a step or micro-batch takes at least.
        most: samples that a worker can hold, infinite where nothing limits them. The least is one.
        together: samples that a worker computes together at most; more are cut into micro-batches (see `WorkerTime`).
        once_s: seconds of the fixed part that a step takes once, however many micro-batches it has.
    """

    fixed_s: Array
    per_sample_s: Array
    floor_s: Array
    most: Array
    together: Array
    once_s: Array

    def time_s(self, samples: Array) -> Array:
        """Return the seconds that a worker of each group takes for ``samples``, in micro-batches; [rows, groups]."""
        parts = np.maximum(np.ceil(samples / self.together), 1.0)
        whole = np.maximum(parts * self.floor_s, parts * self.fixed_s + self.per_sample_s * samples)
        return np.asarray(whole - (parts - 1) * self.once_s)

    def most_over_line_s(self, samples: Array) -> Array:
        """Return the most seconds that micro-batches add to the line for up to ``samples`` samples; [rows, groups]."""
        parts = np.maximum(np.ceil(samples / self.together), 1.0)
        return np.asarray((parts - 1) * (np.maximum(self.floor_s, self.fixed_s) - self.once_s))


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Local batch sizes: ``raised[:, j]`` workers of group j get ``base[:, j] + 1`` samples, others ``base[:, j]``.

    Attributes:
        base: samples of a worker, (rows, groups); 0 in an empty group.
        raised: workers of the group that get one sample more, (rows, groups).
        compute_s: seconds in which the slowest worker computes, (rows,).
    """

    base: Integers
    raised: Integers
    compute_s: Array


def feasible(lines: Lines, workers: Integers, batch: Integers) -> NDArray[np.bool_]:
    """Return the mask [rows] of clusters whose ``batch`` gives each worker a sample and fits into their memory.

    Args:
        lines: compute time of a worker of each group, [rows, groups].
        workers: workers of each group, [rows, groups]; 0: the group is empty.
        batch: samples of a step, [rows].
    """
    most = np.where(workers > 0, workers * np.minimum(lines.most, batch[:, None]), 0.0).sum(axis=1)
    return np.asarray((workers.sum(axis=1) <= batch) & (most >= batch))


def share(lines: Lines, workers: Integers, batch: Integers) -> SharedRows:
    """Return the integer local batch sizes with which each row's slowest worker ends earliest; rows must be `feasible`.

    Round the water level down, then hand the rest to the group that would finish one more sample first (see
    `hetopt.core.batch_partition` for why that is exact). A round gives one sample to every worker of one group, so few
    rounds serve all rows. Arguments are as of `feasible`.
    """
    present = workers > 0
    level = water_level(lines, workers, batch)[:, None]
    rate = 1.0 / lines.per_sample_s
    wanted = (level - lines.fixed_s) * rate
    slack = 1e-9 * (1.0 + np.abs(wanted)) + 1e-13 * (level * rate + batch[:, None])
    high = np.minimum(lines.most, batch[:, None])
    base = np.where(present, np.clip(np.floor(wanted - slack), 1.0, high), 0.0)
    raised = np.zeros_like(workers)
    left = batch - (workers * base).sum(axis=1).astype(np.intp)
    rows = np.flatnonzero(left > 0)
    while rows.size:
        room = present[rows] & (base[rows] < high[rows])
        following = np.where(room, lines.fixed_s[rows] + lines.per_sample_s[rows] * (base[rows] + 1), np.inf)
        group = following.argmin(axis=1)
        count = workers[rows, group]
        given = np.minimum(left[rows], count)
        left[rows] -= given
        whole = given == count
        base[rows[whole], group[whole]] += 1
        raised[rows[~whole], group[~whole]] = given[~whole]
        rows = rows[left[rows] > 0]
    slowest = np.where(present, lines.time_s(base + (raised > 0)), 0.0).max(axis=1)
    return SharedRows(base=base.astype(np.intp), raised=raised, compute_s=slowest)


def water_level(lines: Lines, workers: Integers, batch: Integers) -> Array:
    """Return the seconds, [rows], in which workers would compute the batch if samples could be divided.

    Every worker takes one sample at least, and no more than its memory holds; floors and micro-batches do not count.

    Arguments are as of `feasible`.
    """
    rate = np.where(workers > 0, workers / lines.per_sample_s, 0.0)
    level = (batch + (rate * lines.fixed_s).sum(axis=1)) / rate.sum(axis=1)
    share_of = (level[:, None] - lines.fixed_s) / lines.per_sample_s
    high = np.minimum(lines.most, batch[:, None])
    clipped = ((workers > 0) & ((share_of < 1) | (share_of > high))).any(axis=1)
    rows = np.flatnonzero(clipped)
    if rows.size:
        level[rows] = _clipped_level(lines.take(rows), np.asfortranarray(workers[rows]), batch[rows])
    return np.asarray(level)


def _clipped_level(lines: Lines, workers: Integers, batch: Integers) -> Array:
    """Return the water level where some group is at its least or most: linear between neighbouring breakpoints.

    Each row must be `feasible`; arguments are as there.
    """
    high = np.minimum(lines.most, batch[:, None])
    present = workers > 0
    ends = np.concatenate([lines.fixed_s + lines.per_sample_s, lines.fixed_s + lines.per_sample_s * high], axis=1)
    ends = np.sort(np.where(np.concatenate([present, present], axis=1), ends, np.inf), axis=1)

    def filled(level: Array) -> Array:
        samples = np.clip((level[:, None] - lines.fixed_s) / lines.per_sample_s, 1.0, high)
        return np.asarray((workers * samples).sum(axis=1))

    last = 2 * present.sum(axis=1) - 1
    below, above = ends[:, 0].copy(), ends[np.arange(len(batch)), last]
    held = filled(below)
    for place in range(1, ends.shape[1]):
        here = ends[:, place]
        known = place <= last
        fits = known & (filled(np.where(known, here, 0.0)) <= batch)
        below = np.where(fits, here, below)
        held = np.where(fits, filled(below), held)
        above = np.where(known & ~fits, np.minimum(above, here), above)
    middle = 0.5 * (below + above)[:, None]
    inside = (
        present & (lines.fixed_s + lines.per_sample_s <= middle) & (middle <= lines.fixed_s + lines.per_sample_s * high)
    )
    slope = np.where(inside, workers / lines.per_sample_s, 0.0).sum(axis=1)
    missing = np.maximum(batch - held, 0.0)
    return np.asarray(below + np.divide(missing, slope, out=np.zeros_like(missing), where=slope > 0))


def earliest_finish(lines: Lines, most_workers: Integers, batch: Integers) -> Array:
    """Return a lower bound on a step's compute time, s, [rows], with 1 to ``most_workers`` workers of each group.

    The bound is the first time from the water level on at which one of the groups ends a whole number of samples.

    Args:
        lines: compute time of a worker of each group, [rows, groups].
        most_workers: most workers of each group, [rows, groups]; 0: the group is empty.
        batch: samples of a step, [rows].
    """
    present = most_workers > 0
    level = water_level(lines, np.maximum(most_workers, 0), batch)
    wanted = (level[:, None] - lines.fixed_s) / lines.per_sample_s
    whole = np.maximum(np.ceil(wanted - 1e-6 * (1 + np.abs(wanted))), 1.0)
    reached = np.where(present, lines.fixed_s + lines.per_sample_s * whole, np.inf).min(axis=1)
    least = np.where(present, lines.time_s(np.ones_like(lines.fixed_s)), 0.0).max(axis=1)
    return np.asarray(np.maximum(np.maximum(reached, level * (1 - 1e-9)), least))
