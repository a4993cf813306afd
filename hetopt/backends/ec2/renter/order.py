"""The order: everything that must be known to rent the cluster of a plan, and to find it again. A file in the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.backends.ec2.protocol import spec_digest
from hetopt.backends.ec2.renter.budget import outside_end_s
from hetopt.backends.ec2.renter.tags import RunTags
from hetopt.core.artifact import Artifact, HostName, Record, RunName
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.paths import BUCKET_PATTERN, PROXY_PATTERN, REGION_PATTERN
from hetopt.core.run_spec import RunSpec
from hetopt.core.secret import SECRET_PATTERN
from hetopt.optimizer.plan import Market

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


class WayOut(Record):
    """A NAT gateway, by which machines of an organisation's subnet reach the internet; its traffic is paid for."""

    s3_by_endpoint: bool = Field(description="whether S3 is reached past it, by a gateway endpoint, which is free")


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
    way_out: WayOut | None = Field(default=None, description="absent: an address of their own")
    traffic_usd: NonNegativeFloat = Field(default=0.0, description="of the way out; in what is fixed")
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    group_secret: str = Field(
        default="", pattern=rf"^({SECRET_PATTERN})?$", description="by which the machines of the run know each other"
    )
    spec_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="of the run that machines may take part in"
    )
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
    def tags(self) -> RunTags:
        """The tags on everything that is made for the run."""
        return RunTags(
            run_id=self.run_id,
            owner=self.owner,
            launched_by=self.launched_by,
            bucket=self.bucket,
            created_s=self.created_s,
            expires_at_s=self.created_s + self.lifetime_s,
            version=self.hetopt_version,
        )

    @property
    def prefix(self) -> str:
        """Where the run's objects are in the bucket."""
        return f"runs/{self.run_id}"

    @property
    def bundle_key(self) -> str:
        """Where the code is: by its content, so that runs share it."""
        return f"code/{self.bundle_sha256}.tar.gz"

    def new_hosts(self, count: int) -> tuple[str, ...]:
        """Names that no host of the run has."""
        taken = {host for role in self.roles for host in role.hosts}
        free = (name for number in range(len(taken) + count) if (name := f"h{number}") not in taken)
        return tuple(islice(free, count))

    def with_hosts(self, hosts: Sequence[str], *, like: str) -> Self:
        """With more machines in the role of one of its hosts."""
        roles = (
            role.model_copy(update={"hosts": (*role.hosts, *hosts)}) if like in role.hosts else role
            for role in self.roles
        )
        return self.model_copy(update={"roles": tuple(roles)})

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
        """The order for this run: what its machines take part in, and in nothing else."""
        return self.model_copy(update={"spec_sha256": spec_digest(spec)})


def usd_per_hour(roles: Sequence[Role], zone: Zone) -> float:
    """What roles cost an hour in a zone now, with the types that were planned."""
    return sum(role.machines * zone.usd_per_hour(role.instance_types[0], role.market) for role in roles)


def worst_usd_per_hour(roles: tuple[Role, ...], zones: tuple[Zone, ...]) -> float:
    """The most that roles can cost an hour: every machine the most expensive of its substitutes, in such a zone."""
    return max(
        sum(role.machines * max(zone.rates[name].worst_usd_per_hour for name in role.instance_types) for role in roles)
        for zone in zones
    )
