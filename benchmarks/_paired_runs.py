"""Runs of several methods with the same seeds: the quality that all are to reach, and how much sooner each one does."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks._composed import SMOOTHED_OVER, reached_s
from benchmarks._contenders import Model
from benchmarks._priced_steps import PricedRun

ALLOWED = 0.5
"""Points below the base, at least."""


@dataclass(kw_only=True)
class PairedRuns:
    """Of one model.

    Attributes:
        model: that is trained.
        base: the method that says what is to be reached.
        runs: by method, one a seed.
    """

    model: Model
    base: str
    runs: dict[str, list[PricedRun]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How far apart runs of the base end that differ in their seed alone."""
        ends = [end(run) for run in self.runs[self.base]]
        return max(ends) - min(ends)

    @property
    def still_gains(self) -> float:
        """What the last evaluation of the base is better than the one before, in the mean of the seeds."""
        return statistics.fmean(run.evaluations[-1][1] - run.evaluations[-2:][0][1] for run in self.runs[self.base])

    @property
    def tolerance(self) -> float:
        """Half a point, or as much as seeds differ: nothing smaller can be told apart."""
        return max(ALLOWED * self.model.job.points, self.spread)

    def target(self, over: str | None = None) -> float:
        """A little less than the base ends with, or its rival where that is less; larger is better."""
        return min(self.ends_with(self.base), self.ends_with(over or self.base)) - self.tolerance

    def ends_with(self, name: str) -> float:
        """Quality at the end, in the mean of the seeds; larger is better."""
        return statistics.fmean(end(run) for run in self.runs[name])

    def reached(self, name: str, rate: float, over: str | None = None) -> list[float | None]:
        """Of each seed, the time to the target in steps' computations; None: never."""
        return [reached_s(run.over(rate), self.target(over)) for run in self.runs[name]]

    def speed_ups(self, name: str, over: str, rate: float) -> list[float]:
        """To the target beside a rival, of the seeds that both have; empty where one of them misses it with a seed."""
        pairs = list(zip(self.reached(name, rate, over), self.reached(over, rate, over), strict=False))
        found = [base / own for own, base in pairs if own is not None and base is not None]
        return found if len(found) == len(pairs) else []

    def of_equal_steps(self, name: str, over: str, rate: float) -> list[float]:
        """The rival's time for all its steps over this one's, whatever either has learned by then."""
        pairs = zip(self.runs[name], self.runs[over], strict=False)
        return [other.over(rate)[-1][0] / own.over(rate)[-1][0] for own, other in pairs]

    def sent(self, name: str) -> float:
        """Bytes over those of dense steps."""
        return statistics.fmean(run.sent_share for run in self.runs[name])

    def told(self, name: str, rate: float) -> str:
        """One cell of a table: speed-up over the base, of the lowest and of the highest seed."""
        ups = self.speed_ups(name, self.base, rate)
        if not ups:
            there = sum(each is not None for each in self.reached(name, rate))
            return f"{there} of {len(self.runs[name])} get there"
        return f"{statistics.median(ups):.2f} ({min(ups):.2f}, {max(ups):.2f})"


def end(run: PricedRun) -> float:
    """Quality at the end, in the mean over the last evaluations; larger is better."""
    return statistics.fmean(quality for _, quality in run.evaluations[-SMOOTHED_OVER:])


def note_pairs(place: dict[str, float], name: str, ups: Sequence[float]) -> None:
    """The median of the seeds, the lowest and the highest; nothing where some seed does not get there."""
    if ups:
        place[name] = round(statistics.median(ups), 3)
        place[f"{name}_lowest"], place[f"{name}_highest"] = round(min(ups), 3), round(max(ups), 3)
