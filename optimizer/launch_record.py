"""The `Launch` record: a plan that was started, its backend and workers, and the prediction for that backend."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from pydantic import Field

from hetopt.core.artifact import Artifact
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.calibration_benchmark import MachineReading
from hetopt.core.run_spec import OWN_NAME, RunSpec
from hetopt.optimizer.plan import Plan, Prediction

LAUNCH_FILE = "launch.json"

Place: TypeAlias = str
"""Where a plan can run: the name of a backend."""
OWN_PLACES = ("ssh", "slurm")
"""Backends of machines that are not rented: an inventory states their cost."""


class Launch(Artifact):
    """Record of a launch, kept in its run's folder: plan, place, workers, and the prediction for that place.

    With the event log, it is all that `status` and `report` need.
    """

    KIND: ClassVar[str] = "launch"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN"

    created: str
    started_s: float = Field(description="seconds since the epoch when the processes were asked for")
    resumed_s: tuple[float, ...] = Field(default=(), description="the same for each time that the run went on")
    run_id: str
    on: Place = Field(
        description="the backend, such as local", pattern=OWN_NAME, examples=["local", "rehearsal", "ec2"]
    )
    plan: Plan
    spec: RunSpec = Field(description="the plan's run as it was mapped onto this place's workers")
    prediction: Prediction = Field(description="for this place, not for the rented cluster")
    machine: MachineReading | None = Field(default=None, description="contention of this machine just before")
    notes: tuple[str, ...] = Field(default=(), description="what to know of this place to read its numbers")

    @property
    def starts(self) -> tuple[float, ...]:
        """Times at which each of the run's sessions was requested, seconds since the epoch, the first launch first."""
        return (self.started_s, *self.resumed_s)

    @property
    def running_usd_per_hour(self) -> float:
        """The hourly cost of this run while it trains, USD: the plan's on machines that are rented or rehearsed.

        On the user's own machines it is the predicted cost over the predicted working time, which on this machine is 0.
        """
        if self.on not in ("local", *OWN_PLACES):
            return self.plan.chosen.usd_per_hour
        prediction = self.prediction
        working_s = prediction.total_s.value - prediction.closed_s - prediction.unavailable_s
        return prediction.cost_usd.value / working_s * SECONDS_PER_HOUR if working_s > 0 else 0.0

    @property
    def speeds(self) -> dict[str, float]:
        """Relative speed of each host of a rehearsal, by name; empty elsewhere."""
        miniature = self.spec.miniature
        return {host.name: host.speed for host in miniature.hosts} if miniature is not None else {}

    @property
    def time_factor(self) -> float:
        """Seconds on this machine for one second of the planned cluster; 1 outside of rehearsals."""
        return 1.0 if self.spec.miniature is None else self.spec.miniature.time_factor
