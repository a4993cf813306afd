"""The order of machines and the cluster state last seen: the two records of a run on EC2, each a file in its folder.

Everything of a run carries the order's tags, by which anybody finds it again, in every region. The highest price of
each machine bounds their lifetime, so that their end comes before the budget's (`hetopt.core.budget_law`); while
somebody follows the run, the same law grants more time by what was really spent (`reconcile.lease_end_s`).

A machine whose boot fails leaves its log in the bucket and shuts down. Another is asked for in its place, as for one
that ends before a step was done, until the host is given up (`hetopt.backends.backend`): each try costs minutes of a
machine. Prices of spot pools are believed up to the worst price, and billed from when they were asked for. What a run
has seen of its pools is kept for the next plan once the run is over.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.backends.backend import is_given_up
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.request import Answer, Request, read
from hetopt.backends.host.protocol import spec_digest
from hetopt.core import budget_law
from hetopt.core.artifact import Artifact, CleanText, HostName, Record, RunName
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BudgetStop
from hetopt.core.events.records import LogEvent, StepsLogged, TrainingFinished
from hetopt.core.formatting import usd
from hetopt.core.listening import SECRET_PATTERN
from hetopt.core.paths import BUCKET_PATTERN, PROXY_PATTERN, REGION_PATTERN
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.core.run_status import RunState, RunStatus, failure_reason, judge, last_events, last_log_line, read_tail
from hetopt.optimizer.cost.bill import LEAST_LIFETIME_S, least_budget_usd
from hetopt.optimizer.cost.preemption_rate import ObservedPool, keep, observed_file
from hetopt.optimizer.plan import Group, Market, Plan

RUN_ID = "hetopt:run-id"
OWNER = "hetopt:owner"
LAUNCHED_BY = "hetopt:launched-by"
BUCKET = "hetopt:bucket"
CREATED = "hetopt:created"
EXPIRES_AT = "hetopt:expires-at"
VERSION = "hetopt:version"


def filters(run_id: str | None) -> list[dict[str, object]]:
    """Return the EC2 filters by tag that select the resources of a run, or (None) of any run of hetopt."""
    if run_id is None:
        return [{"Name": "tag-key", "Values": [RUN_ID]}]
    return [{"Name": f"tag:{RUN_ID}", "Values": [run_id]}]


def iso(seconds: float) -> str:
    """Return seconds since the epoch as text in UTC (ISO 8601), as tags hold it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


UNPLACED_S = 1500.0
"""Seconds after which a machine that has no place ends: it boots for ten minutes at most, and its agent waits for
`PLACE_WITHIN_S`. The account ends one that cannot do so itself; where all machines are relieved, both clusters are
paid for so long."""

OVERRUN = 0.25
"""Part of the budget that machines that hang may cost beyond it at most: so much later than the lease the account ends
them."""


def lifetime_s(budget_usd: float, *, fixed_usd: float, worst_usd_per_hour: float) -> float:
    """Return the seconds of cluster at its worst price that a budget pays after ``fixed_usd``, less the shutdown.

    Args:
        budget_usd: budget for everything.
        fixed_usd: costs whatever the machines do.
        worst_usd_per_hour: highest price of all machines together.

    Raises:
        BudgetStop: that is hardly long enough to boot; the hint names a budget that is enough.
    """
    left_s = budget_law.lasts_s(budget_usd - fixed_usd, worst_usd_per_hour)
    # By a hair, as a budget may be the least of all: see `least_budget`.
    if left_s < LEAST_LIFETIME_S * (1 - 1e-9):
        least_usd = least_budget_usd(worst_usd_per_hour, fixed_usd)
        raise BudgetStop(
            f"{usd(budget_usd)} pays for only {max(left_s, 0) / 60:.0f} minutes of this cluster at its highest price, "
            f"{usd(worst_usd_per_hour)} an hour.",
            hint=f"raise the budget to `budget_usd={math.ceil(least_usd * 100) / 100:.2f}`, or plan a smaller cluster",
        )
    return left_s - budget_law.SHUTDOWN_S


ORDER_FILE = "order.json"
_LEAST_SPENT = 0.25
_PRICE_INCREASE = 1.02


class Rate(Record):
    """The price of a machine of a type in a zone, volume and address included.

    Attributes:
        usd_per_hour: USD an hour when the machine is ordered.
        worst_usd_per_hour: most USD an hour; on spot, the highest price at which the machine is kept.
        on_demand_usd_per_hour: USD an hour on demand.
    """

    usd_per_hour: PositiveFloat
    worst_usd_per_hour: PositiveFloat
    on_demand_usd_per_hour: PositiveFloat


class Zone(Record):
    """An availability zone that has a type of each role of an order, with a subnet and the prices of these types.

    Accounts' names of zones differ, ids do not.

    Attributes:
        name: name of the zone in this account.
        zone_id: its id, the same in all accounts.
        subnet_id: subnet that machines get.
        vpc_id: network of the subnet.
        gives_address: whether machines there get a public address, if they may.
        rates: prices by instance type that the zone has.
    """

    name: str
    zone_id: str
    subnet_id: str
    vpc_id: str
    gives_address: bool = True
    rates: dict[str, Rate]

    def types(self, role: Role) -> list[str]:
        """Return the instance types of a role that the zone has, the planned one first if it has that."""
        return [name for name in role.instance_types if name in self.rates]

    def usd_per_hour(self, instance_type: str, market: Market) -> float:
        """Return the USD an hour of a machine, volume and address included, at the prices of the order.

        Args:
            instance_type: instance type that the zone has.
            market: spot or on-demand.

        Raises:
            KeyError: the zone does not have the type.
        """
        rate = self.rates[instance_type]
        return rate.usd_per_hour if market == "spot" else rate.on_demand_usd_per_hour

    def worst_usd_per_hour(self, instance_type: str, market: Market) -> float:
        """Return the most USD an hour that a machine can come to cost, volume and address included.

        Args:
            instance_type: instance type that the zone has.
            market: spot or on-demand.

        Raises:
            KeyError: the zone does not have the type.
        """
        rate = self.rates[instance_type]
        return rate.worst_usd_per_hour if market == "spot" else rate.on_demand_usd_per_hour


class Role(Record):
    """The machines of a run that one EC2 fleet request rents.

    Attributes:
        name: name of the role, unique in its order.
        instance_types: the planned type, then those that may stand in.
        hosts: names of the machines in the run.
        market: spot or on-demand.
        image_kind: kind of boot image, such as ``x86_64-gpu``.
    """

    name: str
    instance_types: tuple[str, ...] = Field(min_length=1)
    hosts: tuple[HostName, ...] = Field(min_length=1)
    market: Market
    image_kind: str

    @property
    def machines(self) -> int:
        """Number of machines of this role."""
        return len(self.hosts)


class BootImage(Record):
    """The image that a kind of machine boots.

    Attributes:
        ami: id of the image (AMI).
        root_device: name of its root device, such as ``/dev/xvda``.
    """

    ami: str
    root_device: str


class Network(Record):
    """The network settings of machines that an organisation wants; defaults are as hetopt makes it.

    Attributes:
        subnets: ids of the subnets that machines may be in; empty: the default ones.
        security_group: id of the machines' group; None: one is made for the run.
        public_address: True: machines get a public address as the subnet gives it; False: none, whatever it gives.
        proxy: address of the proxy by which machines reach S3 and packages; None: directly.
    """

    subnets: tuple[str, ...] = ()
    security_group: str | None = None
    public_address: bool = True
    proxy: str | None = Field(default=None, pattern=PROXY_PATTERN)


class Order(Artifact):
    """An order of machines for a run on EC2: types, zones, prices and budget in USD, lifetime, and names.

    Attributes:
        run_id: name of the run.
        life: how often the run was resumed; what is asked for is new each time.
        hetopt_version: version of hetopt that made the order.
        region: AWS region.
        account_id: number of the AWS account.
        owner: id of the caller or of the caller's role, as policies can compare it.
        launched_by: the caller's name, for people.
        bucket: S3 bucket of the run.
        instance_profile: role of the machines.
        end_role: role in which machines are ended from outside; None: they are not.
        volume_gb: size of each machine's volume.
        extras_usd_per_hour: cost of a machine's volume, address and requests; part of all rates.
        zones: zones to be tried in this order.
        roles: fleets to ask for.
        images: boot images by kind.
        network: network settings that were chosen at launch.
        bundle_sha256: hash and name of the code.
        group_secret: secret by which the machines of the run know each other.
        spec_sha256: digest of the run that machines may take part in; None: not set yet.
        workers: workers that the run begins with, and is to have again.
        created_s: when the order was made, seconds since the epoch.
        budget_usd: hard cap on the whole bill.
        fixed_usd: storage and requests, whatever the machines do.
        move_usd: kept back for a move to on-demand machines, while both are paid; 0: the run does not move.
        checkpoint_s: seconds that a last checkpoint may take.
        lifetime_s: seconds after ``created_s`` at which the first lease ends.
    """

    KIND: ClassVar[str] = "order"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN --on ec2"

    run_id: RunName
    life: NonNegativeInt = 0
    hetopt_version: str
    region: str = Field(pattern=REGION_PATTERN)
    account_id: str = Field(pattern=r"^\d{12}$")
    owner: str
    launched_by: str = ""
    bucket: str = Field(pattern=BUCKET_PATTERN)
    instance_profile: str = Field(pattern=r"^[\w+=,.@-]{1,128}$")
    end_role: str | None = None
    volume_gb: PositiveInt
    extras_usd_per_hour: NonNegativeFloat
    zones: tuple[Zone, ...] = Field(min_length=1)
    roles: tuple[Role, ...] = Field(min_length=1)
    images: dict[str, BootImage]
    network: Network = Network()
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    group_secret: str = Field(default="", pattern=rf"^({SECRET_PATTERN})?$")
    spec_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    workers: tuple[WorkerSpec, ...] = ()
    created_s: NonNegativeFloat
    budget_usd: PositiveFloat
    fixed_usd: NonNegativeFloat
    move_usd: NonNegativeFloat = 0.0
    checkpoint_s: NonNegativeFloat
    lifetime_s: PositiveFloat

    @property
    def tags(self) -> list[dict[str, str]]:
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
        """Return the EC2 parameter TagSpecifications by which new resources of these kinds get the order's tags."""
        return [{"ResourceType": kind, "Tags": self.tags} for kind in kinds]

    @property
    def prefix(self) -> str:
        """The prefix of the run's objects in the bucket, ``runs/RUN``."""
        return f"runs/{self.run_id}"

    def zone(self, name: str) -> Zone:
        """Return the order's zone with a name, or its first zone if none has that name."""
        return next((zone for zone in self.zones if zone.name == name), self.zones[0])

    @property
    def has_spot(self) -> bool:
        """True if any machine of the order can be preempted."""
        return any(role.market == "spot" for role in self.roles)

    @property
    def machines(self) -> int:
        """Number of machines of all roles."""
        return sum(role.machines for role in self.roles)

    def machine_usd_per_hour(self, planned: str) -> float:
        """Return the USD an hour of a machine of a ``planned`` type, or what stands in for it in the first zone, alone.

        Volume and address are left out.

        Raises:
            StopIteration: no role was planned with that type.
        """
        [name, *_] = next(self.zones[0].types(role) for role in self.roles if role.instance_types[0] == planned)
        return self.zones[0].rates[name].usd_per_hour - self.extras_usd_per_hour

    def dearer(self, plan: Plan) -> list[Group]:
        """Return the groups of a plan whose machines cost over 2 % more in the order than in the plan."""
        return [
            group
            for group in plan.chosen.groups
            if self.machine_usd_per_hour(group.instance_type) > _PRICE_INCREASE * group.price_usd_per_hour
        ]

    def expected_usd(self, plan: Plan) -> tuple[float, float]:
        """Return the USD of a plan's run in the order's first zone, storage included: expected, and the 90 % high."""
        hourly, total = usd_per_hour(self.roles, self.zones[0]), plan.chosen.prediction.total_s
        return self.fixed_usd + hourly * total.value / 3600, self.fixed_usd + hourly * total.high / 3600

    def outside_end_s(self, lease_end_s: float | None = None) -> float:
        """Return when AWS's scheduler ends machines that nothing else has ended, in seconds since the epoch.

        The budget B pays until the lease's end and the shutdown after it, at the worst price. Machines that all hang
        from the moment at which the lease was written cost at most w, their price on demand, so that B (1 + overrun)
        pays until

            outside = lease end + shutdown + overrun B / w - late          late: of the scheduler itself         [s]

        Args:
            lease_end_s: when the lease ends, in seconds since the epoch; None: the first lease.
        """
        ends_s = self.created_s + self.lifetime_s if lease_end_s is None else lease_end_s
        late_s = budget_law.lasts_s(
            OVERRUN * self.budget_usd, worst_usd_per_hour(self.roles, self.zones, on_demand=True)
        )
        outside_s: float = ends_s + budget_law.SHUTDOWN_S + late_s - facts.SCHEDULE_LATE_S
        return outside_s

    @property
    def latest_end_s(self) -> float:
        """The moment that no lease extends machines' lives beyond, seconds since the epoch: they know it from boot.

        A lease grows while less is spent than was feared. Less than a quarter of what the cluster costs now is not
        spent: spot prices do not fall so far within a run, and a run on fewer machines than that asks for new ones.
        """
        least = _LEAST_SPENT * min(usd_per_hour(self.roles, zone) for zone in self.zones)
        longest_s = (self.budget_usd - self.fixed_usd) / least * SECONDS_PER_HOUR
        return self.created_s + max(self.lifetime_s, longest_s)

    def on_its_devices(self, spec: RunSpec) -> RunSpec:
        """Return the run with the CPU as the device of the workers on machines that have no GPU."""
        with_gpu = {host for role in self.roles if role.image_kind.endswith("-gpu") for host in role.hosts}
        workers = (
            worker if worker.host in with_gpu else worker.model_copy(update={"device": "cpu"})
            for worker in spec.workers
        )
        return spec.model_copy(update={"workers": tuple(workers)})

    def of_run(self, spec: RunSpec) -> Self:
        """Return the order with a run's digest and workers, so that its machines refuse any other run."""
        return self.model_copy(update={"spec_sha256": spec_digest(spec), "workers": spec.workers})


def usd_per_hour(roles: Sequence[Role], zone: Zone) -> float:
    """Return the USD an hour of roles in a zone, each with its first type there, at the zone's prices of the order."""
    return sum(role.machines * zone.usd_per_hour(zone.types(role)[0], role.market) for role in roles)


def worst_usd_per_hour(roles: Sequence[Role], zones: Sequence[Zone], *, on_demand: bool = False) -> float:
    """Return the most USD an hour of roles: each machine its dearest type at the worst price, in the worst zone.

    Args:
        roles: roles of the cluster.
        zones: zones that it may be in, at least one.
        on_demand: whether its spot machines may come to be replaced by machines on demand.
    """

    def most(zone: Zone, role: Role) -> float:
        market: Market = "on-demand" if on_demand else role.market
        return role.machines * max(zone.worst_usd_per_hour(name, market) for name in zone.types(role))

    return max(sum(most(zone, role) for role in roles) for zone in zones)


LEAST_ROOM = 1.2
"""Least factor of a highest price on the price of today: with less, a small change would end the run. The prices of GPU
types moved by a log standard deviation of 0.33 in fourteen months (`docs/catalogue.md`): by some 0.03 in three days."""


def with_highest_prices(zone: Zone, roles: Sequence[Role], affordable_usd_per_hour: float) -> Zone:
    """Return the zone with highest prices for spot machines, at which all together cost what the budget affords.

    EC2 takes a machine back when its pool's price passes that, and never bills more. All prices may rise by the same
    factor, at least by `LEAST_ROOM`, and to the price on demand at most.

    Args:
        zone: zone with present prices.
        roles: roles of the cluster.
        affordable_usd_per_hour: what the budget pays for all machines until the run should have ended.
    """
    room = max(LEAST_ROOM, affordable_usd_per_hour / usd_per_hour(roles, zone))
    rates = {
        name: rate.model_copy(update={"worst_usd_per_hour": min(rate.worst_usd_per_hour, room * rate.usd_per_hour)})
        for name, rate in zone.rates.items()
    }
    return zone.model_copy(update={"rates": rates})


SEEN_FILE = "seen.json"

Ending = Literal["finished", "stopped by us", "interrupted", "unknown"]

Duty = Literal["serves", "waits", "relieved"]
"""Part of a machine in its run: ``serves``: it is a host of the run; ``waits``: it is to be one, and is not placed yet;
``relieved``: it has no place any more, as another machine has it."""


class MachineState(Record):
    """A rented machine by EC2's description, with its time on the bill and its part in the run.

    Attributes:
        since_s: when its time on the bill began, seconds since the epoch.
        until_s: when that ended; None: it runs.
        usd_per_hour: all that is paid for it now, volume and address included; of one that has ended, at last.
        paid_usd: what it had cost when its price last changed.
        priced_s: since when it costs what it does now; None: since the beginning.
        id: instance id.
        host: name of the host that it is or is to be.
        address: IP address among the others; empty: not known.
        instance_type: its type.
        state: as EC2 calls it (pending, running, shutting-down, terminated), or 'unseen' (granted, not listed yet), or
            'gone' (listed no more).
        reason: EC2's sentence on why it ended; None: not told.
        ending: cause of its end; None: it runs.
        zone: availability zone; empty: the cluster state's.
        extras_usd_per_hour: the part of the price that is paid even for what EC2 took back.
        heartbeat_s: when it last said that it lives; None: never.
        has_stepped: whether a step was done while it had its place.
        on_demand: whether it is on demand, so that nobody takes it back.
        duty: its part in the run.
        end_asked_s: when it was ended because it has no place any more; None: it was not.
        ends_outside_s: when the account ends it, as far as is known here; None: not scheduled.
        life: how often the run had been resumed when it was rented.
    """

    since_s: NonNegativeFloat
    until_s: NonNegativeFloat | None = None
    usd_per_hour: NonNegativeFloat
    paid_usd: NonNegativeFloat = 0.0
    priced_s: NonNegativeFloat | None = None
    id: str
    host: HostName
    address: str = ""
    instance_type: str
    state: CleanText
    reason: CleanText | None = None
    ending: Ending | None = None
    zone: str = ""
    extras_usd_per_hour: NonNegativeFloat
    heartbeat_s: NonNegativeFloat | None = None
    has_stepped: bool = False
    on_demand: bool = False
    duty: Duty = "serves"
    end_asked_s: NonNegativeFloat | None = None
    ends_outside_s: NonNegativeFloat | None = None
    life: NonNegativeInt = 0

    @property
    def has_failed(self) -> bool:
        """True if the machine ended by itself before it did a step.

        Not if EC2 has forgotten it, as it may have done some; nor if it had lived and waited for its place.
        """
        by_itself = self.ending in ("finished", "unknown") and self.state != "gone"
        was_awaited = self.heartbeat_s is None or self.duty == "serves"
        return not self.alive and not self.has_stepped and was_awaited and by_itself

    @property
    def alive(self) -> bool:
        """True if the machine is on the bill."""
        return self.until_s is None

    def usd(self, now_s: float) -> float:
        """Return the USD spent until ``now_s``, epoch seconds; what EC2 took within an hour costs disk and address."""
        end_s: float = max(now_s if self.until_s is None else self.until_s, self.since_s + facts.MINIMUM_BILLED_S)
        if self.ending == "interrupted" and end_s - self.since_s < facts.FREE_IF_TAKEN_WITHIN_S:
            return self.extras_usd_per_hour * (end_s - self.since_s) / SECONDS_PER_HOUR
        from_s = self.since_s if self.priced_s is None else self.priced_s
        return self.paid_usd + self.usd_per_hour * max(end_s - from_s, 0.0) / SECONDS_PER_HOUR

    def repriced(self, usd_per_hour: float, now_s: float) -> Self:
        """Return the machine at another USD an hour from ``now_s`` on; unchanged on demand, once ended, or unseen."""
        had_ended = self.until_s is not None and self.until_s <= now_s
        if self.on_demand or had_ended or self.state == "unseen" or usd_per_hour == self.usd_per_hour:
            return self
        from_s = max(now_s, self.since_s + facts.MINIMUM_BILLED_S, self.priced_s or 0.0)
        paid_usd = self.model_copy(update={"until_s": None}).usd(now_s)
        return self.model_copy(update={"usd_per_hour": usd_per_hour, "paid_usd": paid_usd, "priced_s": from_s})


class ClusterState(Artifact):
    """The machines of a run on EC2 as they were last seen, their prices, and what was decided about them.

    Attributes:
        time_s: when it was last looked at, seconds since the epoch; 0: never.
        zone: availability zone of the machines; empty: not known.
        generation: how often machines were replaced.
        machines: all that the run ever had, ended ones included.
        lease_end_s: until when the machines may live, seconds since the epoch; None: not known.
        lease_tag: ETag of that lease in the bucket; None: not known.
        stop_wished_s: when a person or the budget asked the run to end; None: nobody did.
        stop_reason: sentence on why; None: not told.
        given_up: hosts that no machine is rented for again.
        asks: how often lost machines were asked for.
        asked_s: when they were asked for last; None: they may be asked for at once.
        on_demand: whether the run moves to on-demand machines, or has moved.
        spot_usd_per_hour: spot prices seen last, by zone and type, volume and address included; absent: as ordered.
        prices_seen_s: when they were seen; None: never.
        placed_s: when this generation began; 0: with the run.
        resume_from: name of the checkpoint that this generation went on from; None: from the start.
        paused_s: when the generation was told to wait for new machines; None: it was not.
        missed: hosts of this generation that were lost, without whom the others go on from memory.
        missed_s: when the last of them was lost; 0: none was.
        cleared: whether no machine lives, and groups and templates are gone, too.
    """

    KIND: ClassVar[str] = "seen"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt status"

    time_s: NonNegativeFloat
    zone: str = ""
    generation: NonNegativeInt = 0
    machines: tuple[MachineState, ...] = ()
    lease_end_s: NonNegativeFloat | None = None
    lease_tag: str | None = None
    stop_wished_s: NonNegativeFloat | None = None
    stop_reason: CleanText | None = None
    given_up: tuple[str, ...] = ()
    asks: NonNegativeInt = 0
    asked_s: NonNegativeFloat | None = None
    on_demand: bool = False
    spot_usd_per_hour: dict[str, dict[str, PositiveFloat]] = Field(default_factory=dict)
    prices_seen_s: NonNegativeFloat | None = None
    placed_s: NonNegativeFloat = 0.0
    resume_from: str | None = None
    paused_s: NonNegativeFloat | None = None
    missed: tuple[str, ...] = ()
    missed_s: NonNegativeFloat = 0.0
    cleared: bool = False

    @property
    def alive(self) -> list[MachineState]:
        """The machines on the bill."""
        return [machine for machine in self.machines if machine.alive]

    @property
    def serving(self) -> list[MachineState]:
        """The machines alive that are hosts of the run: one for each host."""
        return [machine for machine in self.alive if machine.duty == "serves"]

    @property
    def waiting(self) -> list[MachineState]:
        """The machines alive that have no place yet."""
        return [machine for machine in self.alive if machine.duty == "waits"]

    @property
    def has_moved(self) -> bool:
        """True if a run that was to move has moved: no machine serves it on spot any more, or waits for a place."""
        return self.on_demand and not self.waiting and all(machine.on_demand for machine in self.serving)

    def usd_per_hour(self, zone: Zone, instance_type: str, market: Market) -> float:
        """Return the USD an hour of a machine: on spot at the prices seen last, else at the zone's ordered prices.

        Args:
            zone: zone of the order.
            instance_type: instance type that the zone has.
            market: spot or on-demand.
        """
        ordered = zone.usd_per_hour(instance_type, market)
        return (
            ordered if market == "on-demand" else self.spot_usd_per_hour.get(zone.name, {}).get(instance_type, ordered)
        )

    def with_machines(self, ids: Collection[str], **changes: Any) -> Self:
        """Return a copy with some fields changed in the records of the machines ``ids``; other machines stay.

        Args:
            ids: instance ids.
            changes: new values of fields of `MachineState`.
        """
        machines = (machine.model_copy(update=changes) if machine.id in ids else machine for machine in self.machines)
        return self.model_copy(update={"machines": tuple(machines)})

    @property
    def is_estimate(self) -> bool:
        """True if the cost is an estimate, because EC2 had forgotten some machine before its end was seen."""
        return any(machine.state == "gone" for machine in self.machines)

    def spent_usd(self, now_s: float, machines: Iterable[MachineState] | None = None) -> float:
        """Return the USD that machines have cost until ``now_s``, at the prices seen.

        Args:
            now_s: seconds since the epoch.
            machines: machines of the run; None: all.
        """
        return math.fsum(machine.usd(now_s) for machine in (self.machines if machines is None else machines))


_ENDINGS: dict[str, Ending] = {
    facts.ENDED_BY_ITSELF: "finished",
    facts.ENDED_BY_US: "stopped by us",
    facts.TAKEN_BACK: "interrupted",
}


def ending_of(code: str) -> Ending:
    """Return the cause of a machine's end, matched by the beginning of EC2's StateReason code."""
    return next((ending for beginning, ending in _ENDINGS.items() if code.startswith(beginning)), "unknown")


PRICES_EVERY_S = 600.0
"""Seconds between two requests for spot prices: they move over hours, and a machine is billed by the second."""


class PriceChange(NamedTuple):
    """A change of a spot pool's price.

    Attributes:
        at_s: time from which it holds, seconds since the epoch.
        zone: availability zone of the pool.
        instance_type: instance type of the pool.
        usd_per_hour: USD an hour, without volume and address.
    """

    at_s: float
    zone: str
    instance_type: str
    usd_per_hour: float


def price_request(names: Sequence[str], from_s: float) -> Request:
    """Return the request for the spot prices of instance types in every zone from ``from_s`` (epoch seconds) on.

    'It also returns the last price change before the start time, which is the effective price as of the start time'
    (EC2 API reference, DescribeSpotPriceHistory): from now on, that is the price of now.
    """
    return read(
        "ec2",
        "describe_spot_price_history",
        "what the types cost now, zone by zone",
        InstanceTypes=list(names),
        ProductDescriptions=[facts.SPOT_PRODUCT],
        StartTime=datetime.datetime.fromtimestamp(from_s, datetime.UTC),
    )


def changes_of(answer: Answer) -> list[PriceChange]:
    """Return the price changes in an answer of DescribeSpotPriceHistory, oldest first."""
    return sorted(
        PriceChange(row["Timestamp"].timestamp(), row["AvailabilityZone"], row["InstanceType"], float(row["SpotPrice"]))
        for row in answer.get("SpotPriceHistory", ())
    )


def spot_prices_due(order: Order, seen: ClusterState, now_s: float) -> bool:
    """Return whether to ask for spot prices: spot machines ran since the last, and 10 minutes passed or all have ended.

    Args:
        order: order of the run.
        seen: the last cluster state; where all machines have ended, prices are asked for once more, for their bill.
        now_s: seconds since the epoch.
    """
    seen_s = billed_from_s(order, seen)
    are_billed = any(not machine.on_demand and (machine.until_s or now_s) > seen_s for machine in seen.machines)
    return are_billed and (not seen.alive or now_s >= seen_s + PRICES_EVERY_S)


def billed_from_s(order: Order, seen: ClusterState) -> float:
    """Return when spot prices were last seen, or else the run was ordered (epoch seconds): bills go up to then."""
    return order.created_s if seen.prices_seen_s is None else seen.prices_seen_s


def rebilled(order: Order, seen: ClusterState, history: Answer, now_s: float) -> ClusterState:
    """Return the cluster state with spot machines billed by a price ``history`` from the last look until ``now_s``.

    Where nobody has looked for hours, prices have moved meanwhile, and EC2 has billed each second at its own; so also
    of machines that have ended since.

    Args:
        order: order of the run.
        seen: its last look.
        history: AWS's answer with the price changes from `billed_from_s` on.
        now_s: seconds since the epoch.
    """
    machines, from_s = seen.machines, billed_from_s(order, seen)
    usd_per_hour = {zone: dict(of_types) for zone, of_types in seen.spot_usd_per_hour.items()}
    worst = {(zone.name, name): rate.worst_usd_per_hour for zone in order.zones for name, rate in zone.rates.items()}
    for change in changes_of(history):
        pool = change.zone, change.instance_type
        if pool not in worst or not change.usd_per_hour > 0:
            continue  # a pool that the order does not know, or a price that is none
        usd = min(change.usd_per_hour + order.extras_usd_per_hour, worst[pool])
        usd_per_hour.setdefault(change.zone, {})[change.instance_type] = usd
        then_s = min(max(change.at_s, from_s), now_s)
        machines = tuple(
            machine.repriced(usd, then_s) if (machine.zone or seen.zone, machine.instance_type) == pool else machine
            for machine in machines
        )
    return seen.model_copy(update={"machines": machines, "spot_usd_per_hour": usd_per_hour, "prices_seen_s": now_s})


TOGETHER_S = 300.0
"""Seconds within which losses of machines of a pool count as one event."""


def seen_pools(seen: ClusterState, order: Order) -> tuple[ObservedPool, ...]:
    """Return hours, losses and outages of each spot pool, from the ended spot machines of this life of the run.

    An outage that no machine has ended lasted at least until the run's last machine ended: so long is counted, as
    time in which no other came. Machines of before the resumption are left out.
    """
    pools: dict[tuple[str, str], list[MachineState]] = defaultdict(list)
    ended: dict[tuple[str, str], int] = defaultdict(int)
    waited_s: dict[tuple[str, str], float] = defaultdict(float)
    last_s = max((machine.until_s or seen.time_s for machine in seen.machines), default=0.0)
    for machine in seen.machines:
        if not machine.on_demand and machine.since_s >= order.created_s and machine.until_s is not None:
            pool = machine.instance_type, machine.zone or seen.zone
            pools[pool].append(machine)
            later_s = [
                other.since_s
                for other in seen.machines
                if other.host == machine.host and other.since_s >= machine.until_s
            ]
            if machine.ending == "interrupted":
                ended[pool] += bool(later_s)
                waited_s[pool] += min(later_s, default=last_s) - machine.until_s
    return tuple(
        ObservedPool(
            instance_type=name,
            region=order.region,
            zone=zone or None,
            instance_hours=sum((machine.until_s or machine.since_s) - machine.since_s for machine in machines) / 3600,
            losses=len(
                lost := sorted(machine.until_s or 0.0 for machine in machines if machine.ending == "interrupted")
            ),
            events=_events(lost),
            outages=ended[name, zone],
            outage_hours=waited_s[name, zone] / 3600,
        )
        for (name, zone), machines in sorted(pools.items())
        if any((machine.until_s or machine.since_s) > machine.since_s for machine in machines)
    )


def remember(seen: ClusterState, order: Order, run_dir: Path) -> None:
    """Add what a finished run has seen of spot pools to the user's file, for later plans; once for each life.

    A mark in the run's folder keeps it from being added again.

    Args:
        seen: last cluster state of the run.
        order: order of the run's present life.
        run_dir: the run's folder.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
    """
    pools = seen_pools(seen, order)
    try:
        (run_dir / f".observed.{order.life}").touch(exist_ok=False)
    except FileExistsError:
        return  # Another terminal saw it end, too.
    if pools:
        keep(observed_file(), pools, until=iso(seen.time_s))


def _events(lost_s: list[float]) -> int:
    """Count preemption events among sorted moments of losses (seconds); losses close together are one event."""
    return sum(place == 0 or lost_s[place] - lost_s[place - 1] > TOGETHER_S for place in range(len(lost_s)))


BOOT_FOLDER = "boot"
"""Folder, in the bucket and in the run's folder, of the logs of machines that failed to boot."""

_LINES = 4
_LINE_CHARACTERS = 200


def failed(machines: Iterable[MachineState], life: int | None = None) -> list[MachineState]:
    """Return the machines that ended by themselves before a step (`MachineState.has_failed`).

    Args:
        machines: machines of a run.
        life: only those rented in this life of the run; None: in any.
    """
    return [machine for machine in machines if machine.has_failed and life in (None, machine.life)]


def hopeless_hosts(order: Order, seen: ClusterState, hosts: Collection[str]) -> list[str]:
    """Return those of ``hosts`` that no machine is rented for again: 3 machines of this life failed before a step.

    Args:
        order: order of the run's present life.
        seen: its last look.
        hosts: names to choose from.
    """
    counts = Counter(machine.host for machine in failed(seen.machines, order.life))
    return [host for host in hosts if is_given_up(counts[host])]


def boot_log_end(run_dir: Path) -> str | None:
    """Return the last four lines of the newest boot log in a run's folder, joined by ' | '; None: there is none."""
    logs = (run_dir / BOOT_FOLDER).glob("*.log")
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    text = "" if newest is None else read_tail(newest)
    lines = [line.strip()[:_LINE_CHARACTERS] for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LINES:]) or None


def why_failed(run_dir: Path, machines: Sequence[MachineState]) -> str:
    """Return a sentence on why machines failed, with the end of their log in the run's folder or EC2's reason.

    Args:
        run_dir: the run's folder, with the logs that were fetched.
        machines: machines that failed, at least one.
    """
    named = ", ".join(dict.fromkeys(f"{machine.host} ({machine.instance_type})" for machine in machines))
    state_reason = f"EC2 says: {_reason(machines) or 'nothing'}"
    if all(machine.heartbeat_s is not None for machine in machines):
        return f"{named} ended before a step was done; {last_log_line(run_dir, machines[-1].host) or state_reason}"
    words = boot_log_end(run_dir)
    return f"{named} ended before it had booted; {f'the newest boot log ends: {words}' if words else state_reason}"


def _reason(machines: Sequence[MachineState]) -> str | None:
    return next((machine.reason for machine in machines if machine.reason), None)


def judged(run_dir: Path, seen: ClusterState) -> RunStatus:
    """Return the status of a run by its last cluster state and the events in its folder, without asking AWS.

    A run that was never granted machines has failed.

    Args:
        run_dir: the run's folder.
        seen: its last look.

    Raises:
        BadInput: a log in the folder cannot be read.
    """
    if not seen.machines:
        return RunStatus(state=RunState.FAILED, reason="its machines were never granted")
    status = judge(
        last_events(run_dir),
        alive=bool(seen.alive),
        stop_wished=seen.stop_wished_s is not None,
        last_line=None if seen.alive else _why_ended(run_dir, seen),
    )
    return replace(status, reason=status.reason or seen.stop_reason)


def last_seen(run_dir: Path) -> ClusterState:
    """Read a run's last cluster state from its folder; an empty state at time 0 if there was no look yet.

    Raises:
        BadInput: the file is there and cannot be read, such as where it was cut off by whatever ended the process.
    """
    path = run_dir / SEEN_FILE
    return ClusterState.load(path) if path.exists() else ClusterState(time_s=0.0)


def failed_s(order: Order, events: Sequence[LogEvent]) -> float | None:
    """Return when a run's log ended in a failure (seconds since the epoch); None: it did not, since its last launch.

    Args:
        order: order of the present life; failures of earlier lives do not count.
        events: end of the run's log.
    """
    since_s = events[-1].time_s if events else 0.0
    # A failure before the run was resumed is what it was resumed from.
    return since_s if since_s >= order.created_s and failure_reason(events) is not None else None


def stepped_s(events: Sequence[LogEvent]) -> float | None:
    """Return when a step was logged last (seconds since the epoch); None: none is in these events."""
    return next((event.time_s for event in reversed(events) if isinstance(event, StepsLogged)), None)


def stopped_s(events: Sequence[LogEvent]) -> float | None:
    """Return when training ended or stopped (seconds since the epoch), if that is the last event; None: it goes on."""
    last = events[-1] if events else None
    return last.time_s if isinstance(last, TrainingFinished) else None


def _why_ended(run_dir: Path, seen: ClusterState) -> str | None:
    """Return a sentence on the end of a run that wrote no event about it, by its machines and logs; None: not known."""
    taken = [machine for machine in seen.machines if machine.ending == "interrupted"]
    if taken:
        return f"EC2 took {', '.join(machine.host for machine in taken)} back"
    unbooted = failed(seen.machines)
    return last_log_line(run_dir) or (why_failed(run_dir, unbooted) if unbooted else _reason(seen.machines))
