"""Stretches of a run as a chart draws them: each worker's share and times, and what all of them exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record, Told
from hetopt.core.events.parts import ExchangeTold
from hetopt.core.events.records import StepsLogged
from hetopt.reports.columns import matrix

MOST_MOMENTS = 400
"""More than a chart of any width shows; longer runs are kept in coarser steps of time."""


class Exchanged(Record):
    """The exchanges of gradients in a stretch of the run: means of one exchange, where not said otherwise."""

    way: Told = Field(description="compressor, ratio and collective; the last, where they changed")
    ratio: float = Field(gt=0, le=1, description="fraction of the elements that was sent")
    gain: NonNegativeFloat = Field(description="gradient energy that this retained")
    sent_bytes: NonNegativeFloat = Field(description="contributed by one worker")
    dense_bytes: PositiveFloat = Field(description="what it contributes where everything is sent in fp32")
    compress_s: NonNegativeFloat = Field(description="of the slowest worker")
    sync_s: NonNegativeFloat = Field(description="of the worker that waited least")

    @property
    def time_s(self) -> float:
        """Seconds of communication in a step: compression and the collective."""
        return self.compress_s + self.sync_s

    @property
    def sent_share(self) -> float:
        """Bytes sent, as a share of those of the dense fp32 gradient."""
        return self.sent_bytes / self.dense_bytes


_FIGURE_NAMES = tuple(name for name in Exchanged.model_fields if name != "way")
_FIGURES = attrgetter(*_FIGURE_NAMES)


class Moment(Record):
    """A stretch of the run over one set of shares (in long runs: over a few).

    Lists have one figure for each worker that ever trained, in the order of the report's workers; none for those that
    took no part in it.
    """

    step: NonNegativeInt = Field(description="the last step of it")
    steps: PositiveInt
    begin_s: float = Field(description="seconds since training began, without those in which nothing of the run ran")
    end_s: float
    local_batch_sizes: tuple[NonNegativeInt | None, ...] = Field(
        description="samples of a step; the last, where they changed"
    )
    compute_s: tuple[NonNegativeFloat | None, ...] = Field(description="mean of a step")
    wait_s: tuple[NonNegativeFloat | None, ...] = Field(description="for the slowest worker, mean of a step")
    exchange: Exchanged | None = Field(default=None, description="absent for a single worker, and in old logs")


@dataclass(kw_only=True)
class PlacedSteps:
    """Steps in order, at their times (seconds since training began), and the places of their workers in the roster."""

    events: list[StepsLogged] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)

    def part(self, start: int, end: int) -> PlacedSteps:
        """The steps from index ``start`` to before ``end``."""
        return PlacedSteps(events=self.events[start:end], end_s=self.end_s[start:end], places=self.places[start:end])

    def alike(self) -> Iterator[tuple[tuple[int, ...], list[StepsLogged]]]:
        """Successive steps of the same workers together."""
        if self.places.count(self.places[0]) == len(self.places):
            yield self.places[0], self.events
            return
        for places, group in groupby(zip(self.places, self.events, strict=True), key=lambda pair: pair[0]):
            yield places, [event for _, event in group]


def coarser(steps: PlacedSteps, most: int, workers: int) -> list[Moment]:
    """No more than ``most`` moments: as many ``step`` events as that takes become one."""
    count = len(steps.events)
    together = -(-count // most)
    return [_moment(steps.part(start, start + together), workers) for start in range(0, count, max(1, together))]


def _moment(steps: PlacedSteps, workers: int) -> Moment:
    """Several steps together: of each worker, means over those in which it took part."""
    first, last = steps.events[0], steps.events[-1]
    shares: list[int | None] = [None] * workers
    compute_s: list[float | None] = [None] * workers
    wait_s: list[float | None] = [None] * workers
    totals = [0.0] * workers
    for places, events in steps.alike():
        counts = np.array([event.steps for event in events], dtype=np.float64)
        total = float(counts.sum())
        for told, rows in (
            (compute_s, [event.compute_s for event in events]),
            (wait_s, [event.wait_s for event in events]),
        ):
            means = rows[0] if len(rows) == 1 else (counts @ matrix(rows) / total).tolist()
            for place, mean in zip(places, means, strict=True):
                before = told[place]
                weighted = mean if before is None else (before * totals[place] + mean * total) / (totals[place] + total)
                told[place] = round(weighted, 7)
        for place, share in zip(places, events[-1].local_batch_sizes, strict=True):
            shares[place] = share
            totals[place] += total
    end_s = round(steps.end_s[-1], 3)
    begin_s = steps.end_s[0] - first.steps * first.step_time_s
    return Moment(
        step=last.step,
        steps=sum(event.steps for event in steps.events),
        begin_s=min(round(max(0.0, begin_s), 3), end_s),
        end_s=end_s,
        local_batch_sizes=tuple(shares),
        compute_s=tuple(compute_s),
        wait_s=tuple(wait_s),
        exchange=_one_exchange(steps.events),
    )


def exchanged(told: ExchangeTold) -> Exchanged:
    """What the exchanges of logged steps were like."""
    return Exchanged(**{name: getattr(told, name) for name in Exchanged.model_fields})


def _one_exchange(events: Sequence[StepsLogged]) -> Exchanged | None:
    """The exchanges of several ``step`` events: means over their steps, the last way."""
    known = [(event.steps, event.exchange) for event in events if event.exchange is not None]
    if not known:
        return None
    last = known[-1][1]
    if len(known) == 1:
        return exchanged(last)
    counts = np.array([count for count, _ in known], dtype=np.float64)
    rows = matrix([_FIGURES(one) for _, one in known])
    means = dict(zip(_FIGURE_NAMES, (counts @ rows / counts.sum()).tolist(), strict=True))
    return Exchanged(way=last.way, **{**means, "ratio": min(1.0, means["ratio"])})
