"""A run's log as columns, one row a ``step`` event, in order; and long columns in few points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunHistory, matrix
from hetopt.core.events.parts import SyncTold
from hetopt.core.events.records import Evaluated

Column: TypeAlias = npt.NDArray[np.float64]
"""[rows], or [rows, workers]."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics at a moment; seconds since training began."""

    time_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSeries:
    """Attributes of rows are means of a step over the steps of the row; NaN: not known.

    Attributes:
        hosts: of all workers that ever trained, which are the columns.
        end_s: [rows], seconds since training began, ascending.
        step: [rows], steps done.
        steps: [rows], of the row.
        loss: [rows].
        step_time_s: [rows].
        shares: [rows, workers], samples.
        compute_s: [rows, workers].
        wait_s: [rows, workers], for the slowest.
        sync_s: [rows], of the exchange that was not hidden.
        ratio: [rows], fraction of the elements that was sent.
        gain: [rows], part of the gradient's energy that this kept.
        sent_bytes: [rows], by one worker in a step.
        dense_bytes: [rows], where everything is sent in fp32.
        averaged: [rows], part of the steps that ended in an average of models that workers trained for themselves.
        divergence: [rows], how far those had come apart by then, relative to their norm.
        averages_bytes: [rows], that one worker sent for them in a step.
        ways: of each row; empty: nothing was exchanged.
        evaluations: in order.
    """

    hosts: tuple[str, ...]
    end_s: Column
    step: Column
    steps: Column
    loss: Column
    step_time_s: Column
    shares: Column
    compute_s: Column
    wait_s: Column
    sync_s: Column
    ratio: Column
    gain: Column
    sent_bytes: Column
    dense_bytes: Column
    averaged: Column
    divergence: Column
    averages_bytes: Column
    ways: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def duration_s(self) -> float:
        """Of training, as far as it is logged."""
        return float(self.end_s[-1])


def series(history: RunHistory) -> RunSeries:
    """The columns of one run; time in which nothing of it ran is left out.

    Raises:
        BadInput: the log has no step.
    """
    roster, rows, places = history.run.roster, history.steps.events, history.steps.places
    if not rows:
        raise BadInput("The run has not logged a step yet.", hint="look at it with `hetopt status`")

    exchanges = [row.exchange for row in rows]
    brought = [row.sync for row in rows]
    nothing = np.full(len(rows), np.nan)

    def column(name: str) -> Column:
        return np.fromiter(map(attrgetter(name), rows), dtype=np.float64, count=len(rows))

    def by_worker(name: str) -> Column:
        """[rows, workers]; NaN where a worker had not come yet, or was gone."""
        width, values = len(roster.workers), list(map(attrgetter(name), rows))
        if places[0] == tuple(range(width)) and places.count(places[0]) == len(places):
            return matrix(values)
        found = np.full((len(rows), width), np.nan)
        for number, (row, at) in enumerate(zip(values, places, strict=True)):
            found[number, list(at)] = row
        return found

    def exchanged(name: str) -> Column:
        if not any(exchanges):
            return nothing
        get = attrgetter(name)
        return np.array([np.nan if told is None else get(told) for told in exchanges], dtype=np.float64)

    def together(of: Callable[[SyncTold], float | None]) -> Column:
        """Of models; NaN where none were brought together, or nobody looked."""
        if not any(brought):
            return nothing
        return np.array([None if told is None else of(told) for told in brought], dtype=np.float64)

    def a_step(told: SyncTold) -> int:
        return max(1, told.synchronised + told.local)

    return RunSeries(
        hosts=roster.hosts,
        end_s=np.array(history.steps.end_s, dtype=np.float64),
        step=column("step"),
        steps=column("steps"),
        loss=column("loss"),
        step_time_s=column("step_time_s"),
        shares=by_worker("local_batch_sizes"),
        compute_s=by_worker("compute_s"),
        wait_s=by_worker("wait_s"),
        sync_s=np.array([row.sync_s[0] for row in rows], dtype=np.float64),
        ratio=exchanged("ratio"),
        gain=exchanged("gain"),
        sent_bytes=exchanged("sent_bytes"),
        dense_bytes=exchanged("dense_bytes"),
        averaged=together(lambda told: told.synchronised / a_step(told)),
        divergence=together(lambda told: told.divergence),
        averages_bytes=together(lambda told: told.sent_bytes / a_step(told)),
        ways=tuple("" if told is None else told.way for told in exchanges),
        evaluations=tuple(
            Evaluation(time_s=one.at_s, metrics=one.event.metrics)
            for one in history.others
            if isinstance(one.event, Evaluated) and one.at_s is not None
        ),
    )


MOST_POINTS = 300
"""Stretches of time; about two pixels each on a wide screen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """Which rows of a run belong together: equal stretches of time, those without a row left out.

    Attributes:
        first: row of each stretch.
        end_s: of each stretch, that of its last row.
    """

    first: npt.NDArray[np.intp]
    end_s: Column

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class Envelope:
    """A long series drawn honestly in few points: the least, the median and the largest of every stretch of time.

    A plain thinning of points hides spikes, and means flatten them. Here the band between least and largest holds every
    value that was logged. [stretches] each, or [stretches, workers]; NaN where nothing is known.
    """

    low: Column
    middle: Column
    high: Column


def stretches(end_s: Column, *, most: int = MOST_POINTS) -> Stretches:
    """No more than ``most`` stretches of rows that ended at ``end_s`` [rows], ascending."""
    if len(end_s) <= most:
        return Stretches(first=np.arange(len(end_s)), end_s=end_s)
    edges = np.linspace(0.0, float(end_s[-1]), most + 1)[:-1]
    first = np.unique(np.searchsorted(end_s, edges, side="right"))
    first = np.unique(np.concatenate([[0], first[first < len(end_s)]]))
    last = np.append(first[1:], len(end_s)) - 1
    return Stretches(first=first, end_s=end_s[last])


def envelope(values: Column, over: Stretches) -> Envelope:
    """The envelope of ``values`` [rows, ...] over stretches of rows."""
    if len(over) == len(values):
        return Envelope(low=values, middle=values, high=values)
    parts = np.split(values, over.first[1:])
    if not np.isnan(values).any():
        return Envelope(
            low=np.minimum.reduceat(values, over.first, axis=0),
            middle=np.array([np.median(part, axis=0) for part in parts]),
            high=np.maximum.reduceat(values, over.first, axis=0),
        )
    return Envelope(
        low=np.array([_known(np.nanmin, part) for part in parts]),
        middle=np.array([_known(np.nanmedian, part) for part in parts]),
        high=np.array([_known(np.nanmax, part) for part in parts]),
    )


def _known(reduce: Callable[..., Any], part: Column) -> Column:
    """Of the values that are known, over rows; NaN where none is."""
    none = np.isnan(part).all(axis=0)
    result: Column = reduce(np.where(none, 0.0, part), axis=0)
    return np.where(none, np.nan, result)
