"""What earlier runs, of whatever jobs, found in devices and in the links between machines: how many times as long each
took as was foreseen.

    d_j = u + e_j ,   u ~ N(0, rho v) ,   e_j ~ N(0, (1 - rho) v)

``d_j`` is the log of (measured / foreseen) computation of job j on a machine type, ``v`` the variance that a plan
foresees for a type that was not measured, and ``rho`` the part of it that is the type's and not the job's. After runs
of J jobs whose mean is m, ``u`` is normal around ``J rho / (1 + (J - 1) rho) m``, and what remains of v is
``v (1 - J rho^2 / (1 + (J - 1) rho))`` (one-way random effects; Searle et al. 1992). Runs of one job count as one.
The job's own profile learns its steps from a run as they were; this is what other jobs gain from it. Machines of runs
at home are kept beside the rented types, see `host_level`.

Computation is the device's: its GPU, or its family of processors, of whatever size and place of machine. What a byte
takes between machines is the cluster's, and told of machines of one family. The same law holds for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hetopt.core.artifact import Artifact, Record, changed
from hetopt.core.profile import Job
from hetopt.core.run_folder import home
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import Earlier

OF_THE_TYPE = 0.3
"""rho over public jobs (`benchmarks.transfer`): 0.23 to 0.35 of GPUs that are not among the public measurements, and
nothing of those that are. With a half the next job's error would be larger in both."""


class RunOnType(Record):
    """What one run found in one machine type that was not measured before."""

    run: str = Field(min_length=1)
    job: str = Field(min_length=1, description="task and parameters: runs of one job count as one")
    instance_type: str = Field(min_length=1)
    device: str | None = Field(
        default=None, min_length=1, description="its GPU, or its family of processors; absent in files of before"
    )
    log_factor: float | None = Field(
        default=None,
        ge=-5,
        le=5,
        description="log of measured over foreseen computation of a worker, earlier runs left out of it; absent where "
        "steps of the type had been measured",
    )
    link_log_factor: float | None = Field(
        default=None,
        ge=-5,
        le=5,
        description="the same of a byte between two machines; absent where there was one, or unlike ones",
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

    def told(self, instance_type: str, log_sd: float, device: str | None = None) -> Earlier | None:
        """What they say of a type of which a plan foresees computation with a deviation of ``log_sd``; None: nothing.

        Args:
            instance_type: the type.
            log_sd: of the log of its computation, as a plan foresees it.
            device: of the type, which tells as much on machines of other types.
        """
        return _told(
            [
                (one, one.log_factor)
                for one in self.adding(()).runs
                if one.instance_type == instance_type or (device is not None and one.device == device)
            ],
            log_sd,
        )

    def told_of_links(self, instance_type: str, log_sd: float) -> Earlier | None:
        """What they say of a byte between machines of the family, foreseen with a deviation of ``log_sd``."""
        family = instance_type.partition(".")[0]
        return _told(
            [
                (one, one.link_log_factor)
                for one in self.adding(()).runs
                if one.instance_type.partition(".")[0] == family
            ],
            log_sd,
        )


def _told(said: Iterable[tuple[RunOnType, float | None]], log_sd: float) -> Earlier | None:
    """The law above; runs that contradict each other by more than ``log_sd`` widen it."""
    found = [(one, factor) for one, factor in said if factor is not None]
    if not found or log_sd <= 0:
        return None
    jobs: dict[str, list[float]] = {}
    for one, factor in found:
        jobs.setdefault(one.job, []).append(factor)
    means = [statistics.fmean(factors) for factors in jobs.values()]
    count, rho = len(means), OF_THE_TYPE
    variance = max(log_sd**2, statistics.variance(means) / (1 - rho) if count > 1 else 0.0)
    weight = count * rho / (1 + (count - 1) * rho)
    return Earlier(
        runs=len({one.run for one, _ in found}),
        jobs=count,
        log_factor=weight * statistics.fmean(means),
        log_sd=math.sqrt(variance * (1 - rho * weight)),
        until=max(one.day for one, _ in found),
    )


def job_named(job: Job) -> str:
    """A job as its runs are kept: those of one count as one."""
    return f"{job.task}, {job.parameters} parameters"


def device_of(instance: InstanceType) -> str:
    """What computes in a machine: its GPU, or its family of processors."""
    gpu = instance.accelerator
    return device_named(instance.name, None if gpu is None else gpu.name)


def device_named(instance_type: str, gpu: str | None) -> str:
    """The same by the names of type and GPU."""
    return gpu or instance_type.partition(".")[0]


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
    """Add runs to the file, which need not exist (see `changed` for errors)."""
    return changed(EarlierRuns, path, lambda known: (known or EarlierRuns()).adding(seen))
