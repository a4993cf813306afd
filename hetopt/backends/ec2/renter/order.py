"""Describes what is rented: the order, its tags, and its money as time. An order is a file in the run's folder.

Everything of a run carries the order's tags, by which it is found again, in every region, by whoever looks. Worst-case
prices bound the lifetime of machines, and their end comes before the budget: the law is `hetopt.core.budget_law`. While
somebody follows the run, what was really spent replaces the worst case, and the same inequality grants more time
(`Guard`). While nobody does, machines reckon by it themselves (`hetopt.backends.host.renewal`).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.backends.ec2 import facts
from hetopt.backends.host.protocol import Place, spec_digest
from hetopt.core import budget_law
from hetopt.core.artifact import Artifact, HostName, Record, RunName
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BudgetStop
from hetopt.core.formatting import usd
from hetopt.core.listening import SECRET_PATTERN
from hetopt.core.paths import BUCKET_PATTERN, PROXY_PATTERN, REGION_PATTERN
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.optimizer.cost.least_budget import LEAST_LIFETIME_S, least_budget_usd
from hetopt.optimizer.plan import Market

RUN_ID = "hetopt:run-id"
OWNER = "hetopt:owner"
LAUNCHED_BY = "hetopt:launched-by"
BUCKET = "hetopt:bucket"
CREATED = "hetopt:created"
EXPIRES_AT = "hetopt:expires-at"
VERSION = "hetopt:version"

AwsTags = list[dict[str, str]]


def filters(run_id: str | None) -> list[dict[str, object]]:
    """What selects the things of one run, or of any."""
    if run_id is None:
        return [{"Name": "tag-key", "Values": [RUN_ID]}]
    return [{"Name": f"tag:{RUN_ID}", "Values": [run_id]}]


def iso(seconds: float) -> str:
    """A moment as it stands in a tag."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


UNPLACED_S = 1500.0
"""A machine that has no place by then ends: it boots for ten minutes at most, and its agent waits for `PLACE_WITHIN_S`.
The account ends one that cannot do so itself; where all machines are relieved, both clusters are paid for so long."""

OVERRUN = 0.25
"""Of the budget, what machines that hang may cost beyond it at most: so much later than the lease the account ends
them."""


def lifetime_s(budget_usd: float, *, fixed_usd: float, worst_usd_per_hour: float) -> float:
    """When a cluster is shut down at the latest, from the moment it is asked for, whatever prices do.

    Raises:
        BudgetStop: hardly long enough to boot.
    """
    left_s = budget_law.lasts_s(budget_usd - fixed_usd, worst_usd_per_hour)
    # By a hair, as a budget may be the least of all: see `least_budget`.
    if left_s < LEAST_LIFETIME_S * (1 - 1e-9):
        least_usd = least_budget_usd(worst_usd_per_hour, fixed_usd)
        raise BudgetStop(
            f"{usd(budget_usd)} pays for only {max(left_s, 0) / 60:.0f} minutes of this cluster at its on-demand price "
            f"of {usd(worst_usd_per_hour)} an hour, which spot prices can rise to.",
            hint=f"raise the budget to `budget_usd={math.ceil(least_usd * 100) / 100:.2f}`, or plan a smaller cluster",
        )
    return left_s - budget_law.SHUTDOWN_S


def outside_end_s(lease_end_s: float, budget_usd: float, worst_usd_per_hour: float) -> float:
    """When the account ends machines that nothing else has ended, in seconds since the epoch.

    The budget B pays until the lease's end and the shutdown after it, at the worst price w. Machines that all hang from
    the moment at which the lease was written cost w until then, so that B (1 + overrun) pays until

        outside = lease end + shutdown + overrun B / w - late          late: of the scheduler itself         [s]

    Args:
        lease_end_s: when machines are shut down, by the budget (`Guard.end_s`).
        budget_usd: of the run.
        worst_usd_per_hour: of all machines that the budget was reckoned for.
    """
    late_s: float = budget_law.lasts_s(OVERRUN * budget_usd, worst_usd_per_hour) - facts.SCHEDULE_LATE_S
    return lease_end_s + budget_law.SHUTDOWN_S + late_s


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Says how long a run may go on.

    Attributes:
        checkpoint_s: to write and upload the last checkpoint.
        heartbeat_s: how often somebody looks, at most; what is decided now must hold until then.
    """

    budget_usd: float
    fixed_usd: float
    worst_usd_per_hour: float
    checkpoint_s: float
    heartbeat_s: float

    def left_usd(self, spent: float) -> float:
        """What of the budget may be spent on machines yet, where so much of it was."""
        return self.budget_usd - self.fixed_usd - spent

    def end_s(self, spent: float, now_s: float) -> float:
        """When machines are shut down, so that the budget pays until they are off, were all prices at their worst."""
        return budget_law.end_s(now_s, self.left_usd(spent), self.worst_usd_per_hour)

    def stop_training_s(self, end_s: float) -> float:
        """When training must end, so that the last checkpoint is safe before the end."""
        return end_s - self.checkpoint_s

    def decide(self, spent: float, now_s: float) -> Literal["go on", "stop"]:
        """Whether the run may go on until somebody looks again."""
        return "go on" if now_s + self.heartbeat_s < self.stop_training_s(self.end_s(spent, now_s)) else "stop"


ORDER_FILE = "order.json"
_LEAST_SPENT = 0.25


class Rate(Record):
    """What one machine of a type costs an hour: now, and at most. Volume and address are in both."""

    usd_per_hour: PositiveFloat
    worst_usd_per_hour: PositiveFloat


class Zone(Record):
    """An availability zone that has what is needed. Names differ between accounts, ids do not."""

    name: str
    zone_id: str
    subnet_id: str
    vpc_id: str
    gives_address: bool = Field(default=True, description="whether machines there get a public one, if they may")
    rates: dict[str, Rate] = Field(description="by instance type")

    def usd_per_hour(self, instance_type: str, market: Market) -> float:
        """What a machine costs now; of one on demand that is what spot can rise to."""
        rate = self.rates[instance_type]
        return rate.usd_per_hour if market == "spot" else rate.worst_usd_per_hour


class Role(Record):
    """Machines that do the same in the run: one fleet."""

    name: str
    instance_types: tuple[str, ...] = Field(min_length=1, description="as planned, then substitutes")
    hosts: tuple[HostName, ...] = Field(min_length=1, description="their names in the run")
    workers_per_machine: PositiveInt
    market: Market
    image_kind: str

    @property
    def machines(self) -> int:
        """Number of machines of this role."""
        return len(self.hosts)


class BootImage(Record):
    """The image of one kind of machine."""

    ami: str
    root_device: str


class Network(Record):
    """Where an organisation wants the machines; what is not said is as hetopt makes it."""

    subnets: tuple[str, ...] = Field(default=(), description="that machines may be in; empty: the default ones")
    security_group: str | None = Field(
        default=None, pattern=r"^sg-[0-9a-z]{1,32}$", description="instead of one that is made for the run"
    )
    public_address: bool = Field(default=True, description="as the subnet gives it; else none, whatever it gives")
    proxy: str | None = Field(
        default=None, pattern=PROXY_PATTERN, description="by which machines reach S3 and packages"
    )


class Order(Artifact):
    """What to rent, where, for how long, and under which names."""

    KIND: ClassVar[str] = "order"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN --on ec2"

    run_id: RunName
    life: NonNegativeInt = Field(default=0, description="how often it was resumed; what is asked for is new each time")
    hetopt_version: str
    region: str = Field(pattern=REGION_PATTERN)
    account_id: str = Field(pattern=r"^\d{12}$")
    owner: str = Field(description="the id of the caller or of the caller's role, as policies can compare it")
    launched_by: str = Field(default="", description="the caller's name, for people")
    bucket: str = Field(pattern=BUCKET_PATTERN)
    instance_profile: str = Field(pattern=r"^[\w+=,.@-]{1,128}$")
    end_role: str | None = Field(
        default=None, description="in which machines are ended from outside; absent: they are not"
    )
    volume_gb: PositiveInt
    extras_usd_per_hour: NonNegativeFloat = Field(
        description="of a machine's volume, address and requests; in all rates"
    )
    zones: tuple[Zone, ...] = Field(min_length=1, description="to be tried in this order")
    roles: tuple[Role, ...] = Field(min_length=1)
    images: dict[str, BootImage]
    network: Network = Field(default=Network(), description="as it was chosen at launch")
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    group_secret: str = Field(
        default="", pattern=rf"^({SECRET_PATTERN})?$", description="by which the machines of the run know each other"
    )
    spec_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="of the run that machines may take part in"
    )
    workers: tuple[WorkerSpec, ...] = Field(default=(), description="that the run begins with, and is to have again")
    created_s: NonNegativeFloat
    budget_usd: PositiveFloat
    fixed_usd: NonNegativeFloat = Field(description="storage and requests, whatever the machines do")
    move_usd: NonNegativeFloat = Field(
        default=0.0, description="kept back for a move to on-demand machines, while both are paid; 0: it does not move"
    )
    checkpoint_s: NonNegativeFloat
    lifetime_s: PositiveFloat

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for role in self.roles:
            if role.image_kind not in self.images:
                raise ValueError(f"{role.name} has no image")
            for zone in self.zones:
                if missing := [name for name in role.instance_types if name not in zone.rates]:
                    raise ValueError(f"{missing[0]} has no price in {zone.name}")
        hosts = [host for role in self.roles for host in role.hosts]
        if len(set(hosts)) != len(hosts):
            raise ValueError("every machine needs a name of its own")
        return self

    @property
    def tags(self) -> AwsTags:
        """The tags on everything that is made for the run, as AWS takes them; moments are ISO 8601 in UTC."""
        values = {
            RUN_ID: self.run_id,
            OWNER: self.owner,
            LAUNCHED_BY: self.launched_by,
            BUCKET: self.bucket,
            CREATED: iso(self.created_s),
            EXPIRES_AT: iso(self.created_s + self.lifetime_s),
            VERSION: self.hetopt_version,
        }
        return [{"Key": key, "Value": value} for key, value in values.items() if value]

    def tagged(self, *kinds: str) -> list[dict[str, object]]:
        """TagSpecifications of a call that makes things of these kinds."""
        return [{"ResourceType": kind, "Tags": self.tags} for kind in kinds]

    @property
    def prefix(self) -> str:
        """Where the run's objects are in the bucket."""
        return f"runs/{self.run_id}"

    @property
    def bundle_key(self) -> str:
        """Where the code is: by its content, so that runs share it."""
        return f"code/{self.bundle_sha256}.tar.gz"

    def zone(self, name: str) -> Zone:
        """The zone of that name; the first, where none has it."""
        return next((zone for zone in self.zones if zone.name == name), self.zones[0])

    def market_of(self, host: str) -> Market:
        """How a host's machine is rented, until the run moves."""
        return next(role.market for role in self.roles if host in role.hosts)

    @property
    def has_spot(self) -> bool:
        """Whether any of it can be taken back."""
        return any(role.market == "spot" for role in self.roles)

    @property
    def machines(self) -> int:
        """Number of machines of all roles."""
        return sum(role.machines for role in self.roles)

    def usd_per_hour(self, zone: Zone) -> float:
        """What the cluster as planned costs in a zone now."""
        return usd_per_hour(self.roles, zone)

    def worst_usd_per_hour(self) -> float:
        """What any cluster that may come of this order can cost at most."""
        return worst_usd_per_hour(self.roles, self.zones)

    def outside_end_s(self, lease_end_s: float | None = None) -> float:
        """When the account ends machines that nothing else has ended, seconds since the epoch.

        Args:
            lease_end_s: of the lease; absent: of the first.
        """
        ends_s = self.created_s + self.lifetime_s if lease_end_s is None else lease_end_s
        return outside_end_s(ends_s, self.budget_usd, self.worst_usd_per_hour())

    @property
    def latest_end_s(self) -> float:
        """What no lease extends the machines' lives beyond, seconds since the epoch: machines are told it as they boot.

        A lease grows while less is spent than was feared. Less than a quarter of what the cluster costs now is not
        spent: spot prices do not fall so far within a run, and a run on fewer machines than that asks for new ones.
        """
        least = _LEAST_SPENT * min(self.usd_per_hour(zone) for zone in self.zones)
        longest_s = (self.budget_usd - self.fixed_usd) / least * SECONDS_PER_HOUR
        return self.created_s + max(self.lifetime_s, longest_s)

    def of_run(self, spec: RunSpec) -> Self:
        """Return the order for this run: what its machines take part in, and in nothing else."""
        return self.model_copy(update={"spec_sha256": spec_digest(spec), "workers": spec.workers})


def usd_per_hour(roles: Sequence[Role], zone: Zone) -> float:
    """What roles cost an hour in a zone now, with the types that were planned."""
    return sum(role.machines * zone.usd_per_hour(role.instance_types[0], role.market) for role in roles)


def worst_usd_per_hour(roles: tuple[Role, ...], zones: tuple[Zone, ...]) -> float:
    """The most that roles can cost an hour: every machine the most expensive of its substitutes, in such a zone."""
    return max(
        sum(role.machines * max(zone.rates[name].worst_usd_per_hour for name in role.instance_types) for role in roles)
        for zone in zones
    )


def places_of(assigned: Mapping[str, Mapping[str, Any]]) -> dict[str, Place]:
    """Return the places of machines in the run, by their ids.

    Args:
        assigned: what EC2 says of each machine, by its host.
    """
    return {one["InstanceId"]: Place(host=host, address=one["PrivateIpAddress"]) for host, one in assigned.items()}
