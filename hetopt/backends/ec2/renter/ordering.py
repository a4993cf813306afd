"""From a plan to an order: which machines in which roles, for how much time at most, at the prices of this moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetopt.backends.ec2.renter import account, scheduled_ends
from hetopt.backends.ec2.renter.account import image_kind
from hetopt.backends.ec2.renter.budget import UNPLACED_S, lifetime_s
from hetopt.backends.ec2.renter.order import Network, Order, Role, worst_usd_per_hour
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.ways_out import traffic_usd, way_out
from hetopt.core.errors import BadInput, BudgetStop
from hetopt.core.formatting import usd
from hetopt.core.secret import new_secret
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.cost.cost import checkpoint_bytes, checkpoint_time_s
from hetopt.optimizer.cost.least_budget import extras_usd_per_hour, fixed_usd, least_budget_usd
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan

PROFILE_NAME = "hetopt-node"
"""The instance profile where none is named; see `hetopt setup`."""

_PRICE_INCREASE = 1.02


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a person may choose at launch.

    Attributes:
        budget_usd: instead of the plan's.
        images: by kind, such as {'x86_64-cpu': 'ami-…'}.
        zone: only this one.
        substitutes: types to take in place of a group's own, by its type.
        network: where machines are to be.
    """

    budget_usd: float | None = None
    bucket: str | None = None
    instance_profile: str = PROFILE_NAME
    images: Mapping[str, str] | None = None
    zone: str | None = None
    substitutes: Mapping[str, Sequence[str]] | None = None
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A price that is not what the plan was made with."""

    instance_type: str
    planned_usd_per_hour: float
    usd_per_hour: float
    price_date: str

    @property
    def is_price_increase(self) -> bool:
        """Whether it went up by more than prices always do."""
        return self.usd_per_hour > _PRICE_INCREASE * self.planned_usd_per_hour


def region_of(plan: Plan) -> str:
    """The region that a plan rents in.

    Raises:
        BadInput: it names several.
    """
    regions = {group.region for group in plan.chosen.groups}
    if any(group.is_own for group in plan.chosen.groups):
        raise BadInput(
            "the plan is for machines of your own, of which nothing is rented.",
            hint='choose `on="ssh"` with their `inventory`, or plan without it',
        )
    if len(regions) > 1:
        raise BadInput(
            f"the plan has machines in {' and '.join(sorted(regions))}, and a cluster lives in one region.",
            hint=f"make it again with `{Plan.MADE_BY}`",
        )
    return regions.pop()


def roles_of(plan: Plan, catalog: Catalog, substitutes: Mapping[str, Sequence[str]] | None = None) -> tuple[Role, ...]:
    """The plan's groups as fleets to ask for, with the run's hosts that each stands for.

    Raises:
        BadInput: the run's workers are not those of the groups, or a substitute boots another image than its group.
    """
    hosts = list(dict.fromkeys(worker.host for worker in plan.run.workers))
    if len(hosts) != sum(group.machines for group in plan.chosen.groups):
        raise BadInput(
            f"the plan rents {sum(group.machines for group in plan.chosen.groups)} machines for {len(hosts)} hosts.",
            hint=f"it was edited; make it again with `{Plan.MADE_BY}`",
        )
    roles = []
    for number, group in enumerate(plan.chosen.groups):
        mine, hosts = hosts[: group.machines], hosts[group.machines :]
        others = tuple((substitutes or {}).get(group.instance_type, ()))
        kinds = {image_kind(catalog.instance_type(name)) for name in (group.instance_type, *others)}
        if len(kinds) > 1:
            raise BadInput(
                f"{', '.join(others)} cannot stand in for {group.instance_type}: they boot different images.",
                hint="name substitutes of the same architecture, all with a GPU or all without",
            )
        roles.append(
            Role(
                name=f"{number}-{group.instance_type.replace('.', '-')}",
                instance_types=(group.instance_type, *others),
                hosts=tuple(mine),
                workers_per_machine=group.workers_per_machine,
                market=group.market,
                image_kind=kinds.pop(),
            )
        )
    return tuple(roles)


def budget_of(plan: Plan, wished_usd: float | None) -> float:
    """What the run may cost in all: how likely it stays within what it was planned for, the plan says (`Plan.risk`).

    Raises:
        BadInput: nobody said.
        BudgetStop: less is wished than the plan was made for, and than it may cost.
    """
    planned, high = plan.goal.budget_usd, plan.chosen.prediction.cost_usd.high
    budget = wished_usd if wished_usd is not None else planned
    if budget is None:
        raise BadInput(
            "the plan has no budget, and nothing is rented without one.",
            hint=f"say how much it may cost: `budget_usd={max(1, math.ceil(high))}`",
        )
    says_how_likely = plan.insight is not None and plan.insight.chance is not None
    if not (says_how_likely and planned is not None and budget >= planned) and high > budget * 1.001:
        raise BudgetStop(
            f"the plan may cost up to {usd(high)}, and the budget is {usd(budget)}.",
            hint="plan again with `hetopt recommend PROFILE --budget USD`, or raise `budget_usd`",
        )
    return budget


@dataclass(frozen=True, kw_only=True)
class Job:
    """What machines are rented for.

    Attributes:
        budget_usd: for everything, earlier lives included.
        gradient_bytes: of the model, which checkpoints are a multiple of.
        disk_gb: of each machine.
        deadline_s: from the order on; absent: as long as the budget lasts.
        spent_usd: what earlier lives have cost.
        may_cost_usd: by the prediction, at most; absent: nothing was predicted.
    """

    roles: tuple[Role, ...]
    budget_usd: float
    gradient_bytes: int
    disk_gb: int
    deadline_s: float | None = None
    spent_usd: float = 0.0
    may_cost_usd: float | None = None

    def move_usd(self, worst_usd_per_hour: float, *, fixed_usd: float = 0.0) -> float:
        """To be kept back, so that the run can move to on-demand machines before its deadline passes.

        0 where there is no deadline, where all machines are on demand, or where the budget pays for nothing beside what
        was planned, or would then not last until the cluster has booted.
        """
        moves = self.deadline_s is not None and any(role.market == "spot" for role in self.roles)
        if not moves or self.may_cost_usd is None:
            return 0.0
        usd = worst_usd_per_hour * UNPLACED_S / 3600
        needed = max(self.may_cost_usd, least_budget_usd(worst_usd_per_hour, fixed_usd))
        return 0.0 if self.spent_usd + needed + usd > self.budget_usd else usd


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Writes orders, of what must be asked for them.

    Attributes:
        edge: carries out calls.
        catalog: of the region.
        billing: prices beside the machines' own.
        wishes: what was chosen at launch.
        version: of hetopt.
    """

    edge: Edge
    catalog: Catalog
    billing: Billing
    wishes: Wishes
    version: str

    def of_plan(
        self, plan: Plan, *, run_id: str, bundle_sha256: str, now_s: float, life: int = 0, spent_usd: float = 0.0
    ) -> Order:
        """The order of a plan.

        Args:
            plan: what to run.
            run_id: the run's name.
            bundle_sha256: of the code.
            now_s: seconds since the epoch.
            life: how often the run was resumed.
            spent_usd: what its earlier lives have cost.

        Raises:
            CloudRefused: the account, a zone, an image or the bucket is not there.
            BudgetStop: the budget does not last until the cluster has booted.
            BadInput: the plan cannot be rented as it is.
        """
        # Who brings the data set to the region has paid for that out of the same budget.
        before_usd = plan.chosen.prediction.data_transfer_usd
        job = Job(
            roles=roles_of(plan, self.catalog, self.wishes.substitutes),
            budget_usd=budget_of(plan, self.wishes.budget_usd),
            gradient_bytes=plan.profile.job.gradient_bytes,
            deadline_s=plan.goal.deadline_s,
            spent_usd=spent_usd + before_usd,
            disk_gb=plan.chosen.disk_gb,
            may_cost_usd=plan.chosen.prediction.cost_usd.high - before_usd,
        )
        order = self.of_job(job, run_id=run_id, bundle_sha256=bundle_sha256, now_s=now_s, life=life)
        return order.of_run(plan.run)

    def of_job(self, job: Job, *, run_id: str, bundle_sha256: str, now_s: float, life: int = 0) -> Order:
        """The order of a job; arguments and errors as in `of_plan`."""
        roles, budget = job.roles, job.budget_usd
        who = account.identity(self.edge)
        bucket = self.wishes.bucket or account.default_bucket(who.account_id, self.catalog.region)
        account.check_bucket(self.edge, bucket, who.account_id, self.catalog.region)
        extras = extras_usd_per_hour(self.billing, job.disk_gb)
        if not self.wishes.network.public_address:
            extras -= self.billing.public_ipv4_usd_per_hour.value
        zones = account.zones_for(self.edge, roles, self.catalog, extras, now_s, self.wishes.network.subnets)
        if self.wishes.network.security_group is not None:
            account.check_group(self.edge, self.wishes.network.security_group, zones[0].vpc_id)
        if self.wishes.zone is not None:
            zones = tuple(zone for zone in zones if self.wishes.zone in (zone.name, zone.zone_id))
            if not zones:
                raise BadInput(
                    f"the zone {self.wishes.zone} does not have all types of the plan in this account.",
                    hint="leave `zone` out; zone names differ between accounts, ids such as use1-az4 do not",
                )
        own_network = self.wishes.network != Network()
        way = way_out(self.edge, zones[0]) if own_network else None
        traffic = traffic_usd(way, roles, self.billing)
        fixed = fixed_usd(checkpoint_bytes(job.gradient_bytes), self.billing) + traffic
        worst = worst_usd_per_hour(roles, zones)
        move = job.move_usd(worst, fixed_usd=fixed)
        longest_s = lifetime_s(budget, fixed_usd=fixed + move + job.spent_usd, worst_usd_per_hour=worst)
        return Order(
            run_id=run_id,
            life=life,
            hetopt_version=self.version,
            region=self.catalog.region,
            account_id=who.account_id,
            owner=who.owner,
            launched_by=who.arn,
            bucket=bucket,
            instance_profile=self.wishes.instance_profile,
            end_role=scheduled_ends.end_role(self.edge),
            volume_gb=job.disk_gb,
            extras_usd_per_hour=extras,
            zones=zones,
            roles=roles,
            images=account.boot_images(
                self.edge, (role.image_kind for role in roles), self.wishes.images, volume_gb=job.disk_gb
            ),
            network=self.wishes.network,
            way_out=way,
            traffic_usd=traffic,
            bundle_sha256=bundle_sha256,
            group_secret=new_secret(),
            created_s=now_s,
            budget_usd=budget,
            fixed_usd=fixed,
            move_usd=move,
            checkpoint_s=_checkpoint_s(job.gradient_bytes, roles, self.catalog),
            lifetime_s=min(longest_s, job.deadline_s or longest_s),
        )


def moved_prices(plan: Plan, order: Order) -> list[Moved]:
    """What the plan's machines cost now, in the zone that is asked first, beside what was planned."""
    zone = order.zones[0]
    return [
        Moved(
            instance_type=group.instance_type,
            planned_usd_per_hour=group.price_usd_per_hour,
            usd_per_hour=zone.rates[group.instance_type].usd_per_hour - order.extras_usd_per_hour,
            price_date=group.price_date,
        )
        for group in plan.chosen.groups
    ]


def expected_usd(plan: Plan, order: Order) -> tuple[float, float]:
    """What the plan costs at the prices of now: as predicted, and at the upper end of its time."""
    hourly, total = order.usd_per_hour(order.zones[0]), plan.chosen.prediction.total_s
    return (order.fixed_usd + hourly * total.value / 3600, order.fixed_usd + hourly * total.high / 3600)


def check_prices(plan: Plan, order: Order) -> None:
    """Refuse a plan that prices have carried beyond the budget.

    At the prices that it was planned with the plan itself says how likely it stays within.

    Raises:
        BudgetStop: at the prices of now it may cost more.
    """
    high = expected_usd(plan, order)[1]
    increases = [moved for moved in moved_prices(plan, order) if moved.is_price_increase]
    if increases and high > order.budget_usd * 1.001:
        why = "; ".join(
            f"{one.instance_type} was planned at ${one.planned_usd_per_hour:.4g} an hour, "
            f"and costs ${one.usd_per_hour:.4g}"
            for one in increases
        )
        raise BudgetStop(
            f"at the prices of now the plan may cost {usd(high)}, and the budget is {usd(order.budget_usd)} ({why}).",
            hint="plan again, or raise `budget_usd`",
        )


def _checkpoint_s(gradient_bytes: int, roles: Sequence[Role], catalog: Catalog) -> float:
    """Writing a checkpoint, and uploading it over the slowest sustained network there may be."""
    slowest = min(catalog.instance_type(name).network_bytes_per_s for role in roles for name in role.instance_types)
    return checkpoint_time_s(gradient_bytes) + checkpoint_bytes(gradient_bytes) / slowest
