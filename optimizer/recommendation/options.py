"""Settings of a plan as a person asks for them, and the request that joins them with profile, catalogue and goal."""

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
"""Value of a batch size that stands for a global batch that begins where that surely pays, and follows the noise."""

TIME_WEIGHTS: Mapping[Objective, float] = MappingProxyType(
    {"balanced": BALANCED, "fastest": FASTEST, "cheapest": 1 - FASTEST}
)


@dataclass(frozen=True, kw_only=True)
class Options(Wishes):
    """Settings of a plan's search: machines, batch size, quotas, objective, confidence, compression, precision.

    Attributes:
        max_machines: most machines in a cluster; None: as many as workers.
        max_workers: most workers in a cluster.
        batch_size: fixes the global batch size, samples; "auto": search it, at equal progress; `ADAPTIVE_BATCH`: where
            the batch begins. None: the job's own, or, where the goal is a target, search it.
        startup_s: seconds from the request to the first step on rented machines; None: by what each machine has to
            fetch.
        disk_gb: disk of each machine; None: what is needed.
        data_bytes: bytes of the data set, which each machine reads before it trains; 0: not counted.
        data_region: region where the data set is; None: where the machines are.
        trials: number of clusters that an Optuna sampler proposes beside the exact search, whose best are a study's
            first trials; None: no study, whose import takes as long as the search of a first answer.
        mixed_types: instance types in one cluster at most.
        quotas: vCPUs that may run at once, by bucket; a bucket that is missing has no limit.
        objective: what is wanted within the limits.
        time_weight: weight of time against cost, 0 to 1, in place of an objective; None: by the objective.
        confidence: probability with which budget and deadline are kept; None: 0.9.
        accept_risk: whether a plan will do that keeps its limits with less than that probability.
        study: Optuna study that has the trials, or the file that keeps it; None: one in memory.
        observed: what was seen of spot pools, which moves the prior of their preemption rate; None: the prior alone.
        learning_rate_rule: how the learning rate follows the batch size; None: as the task has it.
        sync: how workers put together what they learn, measured or not; None: the best of what was measured.
        precision: precision that workers compute in; None: the best of what was measured.
        compression: names of the methods that gradients may travel by; empty: all whose price is known.
        ratios: shares of the gradient's elements that sparsifying methods send; empty: the ratios that pilots measured.

    Raises:
        BadInput: ratios beside methods that send something of every element, or ``time_weight`` beside an objective.
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
        """Check that no two options exclude each other.

        Raises:
            BadInput: ratios are given for compressors that send all elements, or a weight of time beside an objective.
        """
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
        """The compression methods as people write them, with commas between; empty without any."""
        return ",".join(NONE if name == IDENTITY else name for name in self.compression)

    def limits(self, goal: Goal) -> Limits:
        """Return ``goal``'s budget and deadline, and the weight of time in the score, as given or by the objective."""
        return Limits(
            budget_usd=goal.budget_usd,
            deadline_s=goal.deadline_s,
            time_weight=TIME_WEIGHTS[self.objective] if self.time_weight is None else self.time_weight,
        )


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of one plan: the job's profile, the catalogue, the goal, the options, hours of the user's machines.

    Attributes:
        profile: measurements of the job.
        catalog: machines and prices to choose from.
        goal: end of the run, and its limits.
        options: settings of the search.
        open_hours: hours in which the user's own machines may be used; None: always.
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
