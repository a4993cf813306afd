"""Settings of a plan, as a person asks for them: what may be rented, how large, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import IDENTITY, NONE
from hetopt.core.errors import BadInput, setting
from hetopt.core.memory import Precision
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Synchronization
from hetopt.optimizer.cost.preemption_rate import ObservedPreemptions
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.offer_filter import Wishes
from hetopt.optimizer.market.quota import Bucket
from hetopt.optimizer.plan import Goal, Objective, ScalingRule
from hetopt.optimizer.search.objective import BALANCED, FASTEST
from hetopt.optimizer.search.open_hours import OpenHours
from hetopt.optimizer.search.search import Limits
from hetopt.optimizer.search.search_space import MAX_TYPES

if TYPE_CHECKING:
    import optuna

ADAPTIVE_BATCH: Literal["adaptive"] = "adaptive"
"""Stands for a global batch that begins where that surely pays at equal progress, and then follows the noise."""

TIME_WEIGHTS: Mapping[Objective, float] = MappingProxyType(
    {"balanced": BALANCED, "fastest": FASTEST, "cheapest": 1 - FASTEST}
)


@dataclass(frozen=True, kw_only=True)
class Options(Wishes):
    """Settings of a plan's search: machines, batch size, quotas, objective, confidence, compression, precision.

    Attributes:
        max_machines: machines in a cluster; absent: as many as workers.
        max_workers: workers in a cluster.
        batch_size: fixes the global batch size; "auto": search it, at equal progress; `ADAPTIVE_BATCH`: where it
            begins. Absent: the job's own, or, where the goal is a target, search it.
        startup_s: from the request to the first step on rented machines; absent: by what each machine has to fetch.
        disk_gb: of each machine; absent: what is needed.
        data_bytes: of the data set, which each machine reads before it trains; 0: not counted.
        data_region: where it is; absent: where the machines are.
        trials: that an Optuna sampler proposes beside the exact search, whose best are a study's first trials; absent:
            no study, whose import takes as long as the search of a first answer.
        mixed_types: instance types in one cluster at most.
        quotas: vCPUs that may run at once.
        objective: what is wanted within the limits.
        time_weight: the part of time where time and cost are weighed; absent: they are not.
        confidence: probability with which budget and deadline are kept; absent: 0.9.
        accept_risk: whether a plan will do that keeps its limits with less than that probability.
        study: that has the trials, or the file that keeps it; absent: one in memory.
        observed: what was seen of spot pools, which moves the prior of their hazard; absent: the prior alone.
        learning_rate_rule: how the learning rate follows the batch size; absent: as the task has it.
        sync: how workers put together what they learn, measured or not; absent: the best of what was measured.
        precision: that workers compute in; absent: the best of what was measured.
        compression: names of the methods that gradients may travel by; empty: all whose price is known.
        ratios: shares of the gradient's elements that sparsifying methods send; empty: the ratios that pilots measured.
    """

    max_machines: int | None = None
    max_workers: int = 64
    batch_size: int | Literal["auto", "adaptive"] | None = None
    startup_s: float | None = None
    disk_gb: int | None = None
    data_bytes: float = 0.0
    data_region: str | None = None
    trials: int | None = 0
    mixed_types: int = MAX_TYPES
    quotas: Mapping[Bucket, int] = field(default_factory=lambda: MappingProxyType({}))
    objective: Objective = "balanced"
    time_weight: float | None = None
    confidence: float | None = None
    accept_risk: bool = False
    study: Path | optuna.Study | None = None
    observed: ObservedPreemptions | None = None
    learning_rate_rule: ScalingRule | None = None
    sync: Synchronization | None = None
    precision: Precision | None = None
    compression: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.ratios and self.compression and not any(METHODS[name].by_ratio for name in self.compression):
            asked = setting("compression", self.compression_in_words)
            raise BadInput(
                f"{asked} sends something of every element, and `ratio` is the part of them that is sent.",
                hint=f"keep one of them, or name a method that sends a part, such as {setting('compression', 'topk')}",
            )
        if self.time_weight is not None and self.objective != "balanced":
            asked = setting("objective", self.objective)
            raise BadInput(f"{asked} and `time_weight` exclude each other.", hint="keep one of them")

    @property
    def compression_in_words(self) -> str:
        """The compression methods as people write them, with commas between."""
        return ",".join(NONE if name == IDENTITY else name for name in self.compression)

    def limits(self, goal: Goal) -> Limits:
        """Return ``goal``'s budget and deadline, and the weight of time in the score by the objective."""
        return Limits(
            budget_usd=goal.budget_usd,
            deadline_s=goal.deadline_s,
            time_weight=TIME_WEIGHTS[self.objective] if self.time_weight is None else self.time_weight,
        )


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of one plan: the job's profile, the catalogue, the goal, the options, hours of the user's machines.

    Attributes:
        profile: what was measured of the job.
        catalog: what can be rented.
        goal: what the run is for, and its limits.
        options: what narrows the search.
        open_hours: when the user's own machines may be used; absent: always.
    """

    profile: Profile
    catalog: Catalog
    goal: Goal
    options: Options
    _: KW_ONLY
    open_hours: OpenHours | None = None

    @property
    def limits(self) -> Limits:
        """The limits that the plan must keep, and the weight of time in its score."""
        return self.options.limits(self.goal)
