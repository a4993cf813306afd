"""The `Launch` record: which plan was started where, with which workers, and what was predicted for that place."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hetopt.optimizer.plan import Plan, Prediction
from hetopt.profiler.artifact import Artifact
from hetopt.trainer.spec import RunSpec

LAUNCH_FILE = "launch.json"


class Launch(Artifact):
    """Kept in the run's folder, so that `status` and `report` need nothing else but the event log."""

    KIND: ClassVar[str] = "launch"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN"

    created: str
    started_s: float = Field(description="seconds since the epoch when the processes were asked for")
    run_id: str
    on: Literal["local"]
    plan: Plan
    spec: RunSpec = Field(description="the plan's run as it was mapped onto this place's workers")
    prediction: Prediction = Field(description="for this place, not for the rented cluster")

    @property
    def hourly_usd(self) -> float:
        """What the plan's machines cost an hour, at the plan's prices."""
        return sum(group.machines * group.price_usd_per_hour for group in self.plan.chosen.groups)
