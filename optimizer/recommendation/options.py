"""What narrows a search, as a person asks for it: what may be rented, how large, and what is wanted of the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import IDENTITY, NONE
from hetopt.core.errors import BadInput, setting
from hetopt.core.memory import Precision
from hetopt.core.plain_text import known
from hetopt.core.profile import Profile
from hetopt.core.synchronization import Synchronization
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.cost.observed_preemptions import ObservedPreemptions
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_filter import AnyMarket
from hetopt.optimizer.market.instance_type import Architecture
from hetopt.optimizer.market.offer_filter import Wishes
from hetopt.optimizer.market.quota import Bucket
from hetopt.optimizer.plan import Goal, Objective, ScalingRule
from hetopt.optimizer.search.objective import BALANCED, FASTEST
from hetopt.optimizer.search.open_hours import OpenHours
from hetopt.optimizer.search.search import Effort, Limits
from hetopt.optimizer.search.search_space import MAX_TYPES

if TYPE_CHECKING:
    import optuna

TIME_WEIGHTS: Mapping[Objective, float] = MappingProxyType(
    {"balanced": BALANCED, "fastest": FASTEST, "cheapest": 1 - FASTEST}
)

MAX_WORKERS = 4096
"""The models were held against 16; docs/models.md says what they leave out of larger clusters."""


LARGEST_DISK_GB = 16_384
"""Of a gp3 volume, by the EBS user guide of 2025; larger ones are new and not in every region."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What narrows the search.

    Attributes:
        market: which prices to use: spot, on-demand or any.
        max_machines: machines in a cluster; absent: as many as workers.
        max_workers: workers in a cluster.
        batch_size: fixes the global batch size.
        minimum_gain: gradient energy that compression must retain; absent: see `recommend.minimum_gain`.
        startup_s: from the request to the first step on rented machines; absent: by what each machine has to fetch.
        disk_gb: of each machine; absent: what is needed.
        data_bytes: of the data set, which each machine reads before it trains; 0: not counted.
        data_region: where it is; absent: where the machines are.
        trials: of other samplers of Optuna, beside the exact search.
        mixed_types: instance types in one cluster at most.
        only_types: names or patterns of instance types to choose from; empty for all.
        exclude_types: names or patterns of those to leave out.
        gpus, architecture, network_min_gbps, network_max_gbps, zone: see `Wishes`.
        max_hourly_usd: of the machines of a cluster together.
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
        ratios: parts of the gradient that methods send which send a part; empty: those that pilots looked at.
    """

    market: AnyMarket = "any"
    max_machines: int | None = None
    max_workers: int = 64
    batch_size: int | None = None
    minimum_gain: float | None = None
    startup_s: float | None = None
    disk_gb: int | None = None
    data_bytes: float = 0.0
    data_region: str | None = None
    trials: int = 0
    mixed_types: int = MAX_TYPES
    only_types: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    architecture: Architecture | None = None
    network_min_gbps: float | None = None
    network_max_gbps: float | None = None
    zone: str | None = None
    max_hourly_usd: float | None = None
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
        """Refuse what cannot be searched."""
        known(self.market, get_args(AnyMarket), "market")
        known(self.objective, get_args(Objective), "objective")
        for name, count in (("max_machines", self.max_machines), ("max_workers", self.max_workers)):
            if count is not None and not 1 <= count <= MAX_WORKERS:
                raise BadInput(f"`{name}` must be 1 to {MAX_WORKERS}, got {count}.", hint=f"for example `{name}=16`")
        if self.batch_size is not None and self.batch_size < 1:
            raise BadInput(
                f"`batch_size` must be at least 1, got {self.batch_size}.", hint="leave it out to have it chosen"
            )
        if self.minimum_gain is not None and not 0 < self.minimum_gain <= 1:
            raise BadInput(
                f"`minimum_gain` must be above 0 and at most 1, got {self.minimum_gain}.",
                hint="it is the share of gradient energy that compression retains",
            )
        if self.startup_s is not None and not 0 <= self.startup_s < math.inf:
            raise BadInput(
                f"`provisioning` must be at least 0 and finite, got {self.startup_s}.",
                hint="it is the time from the request for machines to the first step, such as 4m",
            )
        if self.disk_gb is not None and not 1 <= self.disk_gb <= LARGEST_DISK_GB:
            raise BadInput(
                f"`disk_gb` must be 1 to {LARGEST_DISK_GB:,} GB, got {self.disk_gb}.",
                hint="leave it out for what is needed",
            )
        if not 0 <= self.data_bytes <= LARGEST_DISK_GB * 1e9:
            raise BadInput(
                f"`data` must be 0 to {LARGEST_DISK_GB:,} GB, which a disk holds, got {self.data_bytes / 1e9:g} GB.",
                hint=f"for example {setting('data', '150GB')}",
            )
        if self.ratios and self.compression and not any(METHODS[name].by_ratio for name in self.compression):
            asked = setting("compression", self.compression_in_words)
            raise BadInput(
                f"{asked} sends something of every element, and `ratio` is the part of them that is sent.",
                hint=f"keep one of them, or name a method that sends a part, such as {setting('compression', 'topk')}",
            )
        if self.time_weight is not None:
            if not 0 <= self.time_weight <= 1:
                raise BadInput(
                    f"`time_weight` must be 0 to 1, got {self.time_weight}.",
                    hint="it is the part of time where time and cost are weighed: 0.67 for twice the weight of cost",
                )
            if self.objective != "balanced":
                asked = setting("objective", self.objective)
                raise BadInput(f"{asked} and `time_weight` exclude each other.", hint="keep one of them")
        if self.confidence is not None and not 0 < self.confidence < 1:
            meant = self.confidence / 100 if 1 < self.confidence < 100 else 0.9
            raise BadInput(
                f"`confidence` must be above 0 and below 1, got {self.confidence:g}.",
                hint=f"for example `confidence={meant:g}`",
            )
        _ = self.effort

    @property
    def compression_in_words(self) -> str:
        """The methods as people write them."""
        return ",".join(NONE if name == IDENTITY else name for name in self.compression)

    @property
    def wishes(self) -> Wishes:
        """The options that narrow what may be rented."""
        return Wishes(
            types=self.only_types,
            exclude=self.exclude_types,
            gpus=self.gpus,
            architecture=self.architecture,
            network_min_gbps=self.network_min_gbps,
            network_max_gbps=self.network_max_gbps,
            market=self.market,
            max_hourly_usd=self.max_hourly_usd,
            zone=self.zone,
        )

    @property
    def effort(self) -> Effort:
        """The options that say how much is searched."""
        return Effort(types=self.mixed_types, trials=self.trials, study=self.study)

    def limits(self, goal: Goal) -> Limits:
        """What the plan must keep, and what is wanted of it."""
        return Limits(
            budget_usd=goal.budget_usd,
            deadline_s=goal.deadline_s,
            time_weight=TIME_WEIGHTS[self.objective] if self.time_weight is None else self.time_weight,
        )


@dataclass(frozen=True)
class PlanRequest:
    """What to plan, and from what.

    Attributes:
        profile: what was measured of the job.
        catalog: what can be rented.
        goal: what the run is for, and its limits.
        options: what narrows the search.
        billing: the prices beside the machines' own; absent: those of the catalogue's folder.
        open_hours: when machines may be used; absent: always.
    """

    profile: Profile
    catalog: Catalog
    goal: Goal
    options: Options
    _: KW_ONLY
    billing: Billing | None = None
    open_hours: OpenHours | None = None

    @property
    def limits(self) -> Limits:
        """What the plan must keep, and what is wanted of it."""
        return self.options.limits(self.goal)

    @property
    def without_quotas(self) -> PlanRequest:
        """The same, as if any number of vCPUs might run at once."""
        return replace(self, options=replace(self.options, quotas={}))
