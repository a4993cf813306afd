"""What earlier runs, of whatever jobs, found in machine types: how many times as long they computed as was foreseen.

    d_j = u + e_j ,   u ~ N(0, rho v) ,   e_j ~ N(0, (1 - rho) v)

``d_j`` is the log of (measured / foreseen) computation of job j on a machine type, ``v`` the variance that a plan
foresees for a type that was not measured, and ``rho`` the part of it that is the type's and not the job's. After runs
of J jobs whose mean is m, ``u`` is normal around ``J rho / (1 + (J - 1) rho) m``, and what remains of v is
``v (1 - J rho^2 / (1 + (J - 1) rho))`` (one-way random effects; Searle et al. 1992). Runs of one job count as one.
The job's own profile learns its steps from a run as they were; this is what other jobs gain from it.
"""

from __future__ import annotations

import fcntl
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hetopt.core.artifact import Artifact, Record
from hetopt.core.runs import home
from hetopt.optimizer.plan import Earlier

OF_THE_TYPE = 0.3
"""rho over public jobs (`benchmarks.transfer`): 0.23 to 0.35 of GPUs that are not among the public measurements, and
nothing of those that are. With a half the next job's error would be larger in both."""


class RunOnType(Record):
    """One run on one machine type whose steps were not measured before."""

    run: str = Field(min_length=1)
    job: str = Field(min_length=1, description="task and parameters: runs of one job count as one")
    instance_type: str = Field(min_length=1)
    log_factor: float = Field(
        ge=-5, le=5, description="log of measured over foreseen computation of a worker, earlier runs left out of it"
    )
    day: str = Field(min_length=10, max_length=10, description="when it was learned, ISO 8601")


class EarlierRuns(Artifact):
    """All that runs told, one entry a run and type: files of several machines are merged by joining their lists."""

    KIND: ClassVar[str] = "earlier-runs"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt report --learn PROFILE"

    runs: tuple[RunOnType, ...] = ()

    def adding(self, seen: Iterable[RunOnType]) -> EarlierRuns:
        """The same with more runs; what one run says of one type counts once, as it was told last."""
        told = {(one.run, one.instance_type): one for one in (*self.runs, *seen)}
        return EarlierRuns(runs=tuple(told[key] for key in sorted(told)))

    def told(self, instance_type: str, log_sd: float) -> Earlier | None:
        """What they say of a type of which a plan foresees computation with a deviation of ``log_sd``; None: nothing.

        Runs that contradict each other by more than that widen it.
        """
        found = [one for one in self.adding(()).runs if one.instance_type == instance_type]
        if not found or log_sd <= 0:
            return None
        jobs: dict[str, list[float]] = {}
        for one in found:
            jobs.setdefault(one.job, []).append(one.log_factor)
        means = [statistics.fmean(factors) for factors in jobs.values()]
        count, rho = len(means), OF_THE_TYPE
        variance = max(log_sd**2, statistics.variance(means) / (1 - rho) if count > 1 else 0.0)
        weight = count * rho / (1 + (count - 1) * rho)
        return Earlier(
            runs=len(found),
            jobs=count,
            log_factor=weight * statistics.fmean(means),
            log_sd=math.sqrt(variance * (1 - rho * weight)),
            until=max(one.day for one in found),
        )


def earlier_runs_file() -> Path:
    """Where it is kept: ``$HETOPT_HOME/earlier-runs.json`` (``~/.hetopt``)."""
    return home() / "earlier-runs.json"


def kept() -> EarlierRuns | None:
    """What is kept there; None: nothing.

    Raises:
        BadInput: the file cannot be read, or holds something else.
    """
    path = earlier_runs_file()
    return EarlierRuns.load(path) if path.exists() else None


def keep(path: Path, seen: Iterable[RunOnType]) -> EarlierRuns:
    """Add runs to the file, which need not exist; commands that end at once wait for each other.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = (EarlierRuns.load(path) if path.exists() else EarlierRuns()).adding(seen)
        known.save(path)
    return known
