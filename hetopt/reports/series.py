"""The curves of a run in few points: one value a stretch of time, and how far the log went around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hetopt.core.artifact import CleanText, Record
from hetopt.core.comm.compression_text import way_in_words
from hetopt.core.events.fold import RunHistory
from hetopt.core.events.records import Evaluated, SyncFigures
from hetopt.core.training_laws import Moments, noise_scale, smoothed

Column: TypeAlias = npt.NDArray[np.float64]
"""Array of float64, [rows] or [rows, workers]; NaN: not known."""

Rows: TypeAlias = npt.NDArray[np.intp]

Unit: TypeAlias = Literal["s", "share", "bytes", "number"]

MOST_POINTS = 300
"""Most stretches of time of a curve; about two pixels each on a wide screen."""

MOST_METRICS = 6

_DIGITS = 5

_SEEN = 1e-3
"""Difference of two shares that a person would see."""

_WIDE = 10
"""Ratio of the largest to the least value that is drawn on a logarithmic scale."""


class Series(Record):
    """One curve of a run; those of one title are compared.

    ``key`` names it for programs, ``label`` tells it from others of its title (empty: there is one).
    """

    key: str
    title: CleanText
    label: CleanText
    unit: Unit
    is_logarithmic: bool = False
    values: tuple[float | None, ...] = Field(description="median of each stretch; absent where nothing is known")
    low: tuple[float | None, ...] = Field(default=(), description="least of each stretch; none: as the median")
    high: tuple[float | None, ...] = Field(default=(), description="largest of each stretch; none: as the median")


class OverTime(Record):
    """The curves of a run over equal stretches of time, those without a step left out.

    ``end_s`` is the end of each stretch, in seconds since training began. Empty: no step was logged.
    """

    begin_s: tuple[float, ...] = Field(default=(), description="of each stretch, seconds since training began")
    end_s: tuple[float, ...] = ()
    step: tuple[int, ...] = Field(default=(), description="the last of each stretch")
    ways: tuple[CleanText, ...] = Field(default=(), description="to exchange gradients")
    way: tuple[int, ...] = Field(default=(), description="of each stretch, from 1; 0: nothing was exchanged")
    series: tuple[Series, ...] = ()


def as_column(values: tuple[float | None, ...]) -> Column:
    """Return values as a float array, [values], with NaN for None."""
    return np.array(values, dtype=np.float64)


def over_time(history: RunHistory) -> OverTime:
    """Return a run's curves over up to 300 equal stretches of the time in which it ran; empty: no step was logged."""
    rows = history.steps
    if not rows:
        return OverTime()
    end_s = np.array(history.end_s, dtype=np.float64)
    first = stretches(end_s)
    last = np.append(first[1:], len(rows)) - 1
    names = [row.exchange.way if row.exchange is not None else "" for row in rows]
    ways = list(dict.fromkeys(filter(None, names)))
    begin_s = [max(0.0, float(end_s[row]) - rows[row].steps * rows[row].step_time_s) for row in first]
    return OverTime(
        begin_s=tuple(
            min(round(begin, 3), round(float(end), 3)) for begin, end in zip(begin_s, end_s[last], strict=True)
        ),
        end_s=tuple(round(float(time_s), 3) for time_s in end_s[last]),
        step=tuple(rows[row].step for row in last),
        ways=tuple(map(way_in_words, ways)),
        way=tuple(ways.index(names[row]) + 1 if names[row] else 0 for row in last),
        series=tuple(_series(history, first, last)),
    )


def _series(history: RunHistory, first: Rows, last: Rows) -> Iterator[Series]:
    """Yield a run's curves: loss, metrics, batch, step time, workers, communication, compression, noise, averaging.

    Left out are curves of what the run does not have: the batch that never follows the noise, ratio and energy where
    everything is sent, noise and averages that were not logged. Of several metrics the first `MOST_METRICS` are drawn.
    """
    rows = history.steps
    steps = np.array([row.steps for row in rows], dtype=np.float64)

    def of(get: Callable[[Any], float | None], part: str = "") -> Column:
        """Return a column of the log's rows, or of one part of them; NaN where that is not there."""
        parts = rows if not part else [getattr(row, part) for row in rows]
        return np.array([np.nan if record is None else get(record) for record in parts], dtype=np.float64)

    def curve(key: str, title: str, unit: Unit, values: Column, label: str = "", *, wide: bool = False) -> Series:
        """Return a series of medians, with a band where least and largest values differ; ``wide``: on a log scale."""
        low, middle, high = envelope(values, first)
        has_band = not np.array_equal(low, high, equal_nan=True)
        return Series(
            key=key,
            title=title,
            label=label,
            unit=unit,
            is_logarithmic=wide,
            values=_rounded(middle),
            low=_rounded(low) if has_band else (),
            high=_rounded(high) if has_band else (),
        )

    def sent(key: str, label: str, bytes_: Column) -> Series:
        so_far = _rounded(np.cumsum(np.nan_to_num(bytes_) * steps)[last])
        return Series(key=key, title="bytes sent by one worker so far", label=label, unit="bytes", values=so_far)

    loss = of(attrgetter("loss"))
    yield curve("loss", "training loss", "number", loss, wide=bool(0 < loss.min() < loss.max() / _WIDE))
    evaluated = [(placed.row - 1, placed.event) for placed in history.others if isinstance(placed.event, Evaluated)]
    for number, name in enumerate(list(dict.fromkeys(name for _, event in evaluated for name in event.metrics))):
        metric = np.full(len(rows), np.nan)
        for row, event in evaluated:
            metric[max(row, 0)] = event.metrics.get(name, np.nan)
        if number < MOST_METRICS and np.isfinite(metric).any():
            values = _rounded(_held(metric)[last])
            yield Series(key=f"metric{number}", title=name, label="", unit="number", values=values)
    if rows[-1].planned_step is not None:
        planned = np.full(len(rows), float(history.run.global_batch_size))
        trained = of(lambda row: sum(row.local_batch_sizes))
        yield curve("batch", "global batch (samples)", "number", trained, "trained")
        yield curve("planned", "global batch (samples)", "number", planned, "planned")
    yield curve("step_time", "step time", "s", of(attrgetter("step_time_s")))
    yield from _of_workers(history, first, last)
    yield curve("sync", "communication", "s", of(lambda row: row.sync_s[0]))
    ratio, gain = of(attrgetter("ratio"), "exchange"), of(attrgetter("gain"), "exchange")
    compressed = bool(np.any((ratio < 1) | (np.abs(gain - 1) > _SEEN)))
    if compressed:
        yield curve("ratio", "elements sent and energy kept", "share", ratio, "elements sent", wide=True)
        yield curve("gain", "elements sent and energy kept", "share", gain, "energy kept", wide=True)
    if any(row.exchange is not None for row in rows):
        yield sent("sent", "gradients", of(attrgetter("sent_bytes"), "exchange"))
    if compressed:
        yield sent("dense", "in fp32", of(attrgetter("dense_bytes"), "exchange"))
    noisy = [(place, row.noise) for place, row in enumerate(rows) if row.noise is not None]
    if noisy:
        scales = np.full(len(rows), np.nan)
        averages = smoothed(Moments(**asdict(noise)) for _, noise in noisy)
        scales[[place for place, _ in noisy]] = [noise_scale(average) or np.nan for average in averages]
        yield curve("noise", "gradient noise scale (samples)", "number", _held(scales), wide=True)
    if any(row.sync is not None for row in rows):

        def a_step(sync: SyncFigures) -> int:
            return max(1, sync.synchronised + sync.local)

        yield curve(
            "averaged",
            "steps averaged",
            "share",
            of(lambda sync: sync.synchronised / a_step(sync), "sync"),
        )
        divergence = of(attrgetter("divergence"), "sync")
        if np.isfinite(divergence).any():
            yield curve("divergence", "workers apart", "share", _held(divergence))
        yield sent("averages", "models", of(lambda sync: sync.sent_bytes / a_step(sync), "sync"))


def _of_workers(history: RunHistory, first: Rows, last: Rows) -> Iterator[Series]:
    """Yield batch size, computing and waiting of every worker that ever trained.

    ``first`` and ``last``: the steps that the points of a curve stand for.
    """
    roster, places = history.run.roster, history.places
    width = len(roster.workers)

    def by_worker(name: str) -> Column:
        """Return [rows, workers]; NaN where a worker had not come yet, or was gone."""
        values = list(map(attrgetter(name), history.steps))
        if places[0] == tuple(range(width)) and places.count(places[0]) == len(places):
            return np.array(values, dtype=np.float64)
        known = np.full((len(values), width), np.nan)
        for number, (row, at) in enumerate(zip(values, places, strict=True)):
            known[number, list(at)] = row
        return known

    hosts = [worker.host for worker in roster.workers]
    labels = [
        f"{host}/{hosts[:place].count(host)}" if hosts.count(host) > 1 else host for place, host in enumerate(hosts)
    ]
    curves: tuple[tuple[str, str, Unit, Column], ...] = (
        ("share", "local batch size (samples)", "number", by_worker("local_batch_sizes")[last]),
        ("compute", "computing (in a step)", "s", envelope(by_worker("compute_s"), first)[1]),
        ("wait", "straggler wait (in a step)", "s", envelope(by_worker("wait_s"), first)[1]),
    )
    for name, title, unit, values in curves:
        for place, label in enumerate(labels):
            yield Series(key=f"{name}{place}", title=title, label=label, unit=unit, values=_rounded(values[:, place]))


def _rounded(values: Column) -> tuple[float | None, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist())


def _held(values: Column) -> Column:
    """Return each value until the next that is known; NaN before the first."""
    known = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))
    return np.asarray(values[known], dtype=np.float64)


def stretches(end_s: Column, *, most: int = MOST_POINTS) -> Rows:
    """Return the first row of each of at most ``most`` equal stretches of time; stretches without a row are left out.

    Args:
        end_s: seconds at which each row ended, [rows], ascending.
        most: number of stretches; with as few rows, each row is one.
    """
    if len(end_s) <= most:
        return np.arange(len(end_s))
    edges = np.linspace(0.0, float(end_s[-1]), most + 1)[:-1]
    first = np.unique(np.searchsorted(end_s, edges, side="right"))
    return np.unique(np.concatenate([[0], first[first < len(end_s)]]))


def envelope(values: Column, first: Rows) -> tuple[Column, Column, Column]:
    """Return the least, the median and the largest of ``values`` [rows, ...] over stretches that begin with these rows.

    A plain thinning of points hides spikes, and means flatten them. Here the band between least and largest holds every
    value that was logged. [stretches, ...] each; NaN where nothing is known.

    Args:
        values: [rows, ...]; NaN: not known.
        first: first row of each stretch, ascending, from 0.

    Returns:
        Least, median and largest, each [stretches, ...]; NaN: not known in that stretch.
    """
    if len(first) == len(values):
        return values, values, values
    middle = np.array([_median(part) for part in np.split(values, first[1:])])
    return np.fmin.reduceat(values, first, axis=0), middle, np.fmax.reduceat(values, first, axis=0)


def _median(part: Column) -> Column:
    """Return the median of the known values of each column over its rows; NaN where none is known."""
    if not np.isnan(part).any():
        return np.asarray(np.median(part, axis=0))  # in a tenth of the time
    is_unknown = np.isnan(part).all(axis=0)
    return np.where(is_unknown, np.nan, np.nanmedian(np.where(is_unknown, 0.0, part), axis=0))
