"""What was last seen of a run: its machines and what they cost, kept in its folder, so that nobody needs to log in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.order import Zone
from hetopt.backends.ec2.stays import Stay, spent_usd
from hetopt.core.artifact import Artifact, HostName, Record, Told
from hetopt.core.run_spec import WorkerSpec
from hetopt.optimizer.cost.billing import is_free
from hetopt.optimizer.plan import Market

SEEN_FILE = "seen.json"

Ending = Literal["finished", "stopped by us", "interrupted", "unknown"]

Duty = Literal["serves", "waits", "relieved"]
"""A machine is a host of the run; or is to be one, and is not placed yet; or has no place any more: another has it."""


class MachineState(Record):
    """One machine as EC2 told of it."""

    id: str
    host: HostName
    instance_type: str
    state: Told = Field(description="as EC2 calls it: pending, running, shutting-down, terminated; or 'gone'")
    reason: Told | None = None
    ending: Ending | None = None
    since_s: NonNegativeFloat
    until_s: NonNegativeFloat | None = None
    zone: str = ""
    usd_per_hour: PositiveFloat = Field(description="what it costs now; of one that has ended, at last")
    paid_usd: NonNegativeFloat = Field(default=0.0, description="what it had cost when its price last changed")
    priced_s: NonNegativeFloat | None = Field(default=None, description="from when on it costs what it does now")
    extras_usd_per_hour: NonNegativeFloat = Field(description="the part of it that is paid even for what EC2 took back")
    heartbeat_s: NonNegativeFloat | None = Field(default=None, description="when the machine last said that it lives")
    has_stepped: bool = Field(default=False, description="a step was done while it had its place")
    on_demand: bool = Field(default=False, description="nobody takes it back")
    duty: Duty = "serves"
    end_asked_s: NonNegativeFloat | None = Field(
        default=None, description="when it was ended because it has no place any more"
    )
    ends_outside_s: NonNegativeFloat | None = Field(
        default=None, description="when the account ends it, as far as is known here"
    )
    address: str = Field(default="", description="in the run's network, by which EC2 names its host")
    life: NonNegativeInt = Field(default=0, description="how often the run had been resumed when it was rented")

    @property
    def is_forgotten(self) -> bool:
        """Whether EC2 had forgotten it before its end was seen: until when it was paid for is an estimate."""
        return self.state == "gone"

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself before a step was done with it. One that EC2 has forgotten may have done some."""
        by_itself = self.ending in ("finished", "unknown") and not self.is_forgotten
        was_awaited = self.heartbeat_s is None or self.duty == "serves"
        return not self.alive and not self.has_stepped and was_awaited and by_itself

    @property
    def alive(self) -> bool:
        """Whether it is on the bill."""
        return self.until_s is None

    def stay(self, *, minimum_s: float, free_within_s: float) -> Stay:
        """Its time on the bill. What EC2 takes back within its first hour is free, but for disk and address."""
        free = self.until_s is not None and is_free(
            self.until_s - self.since_s, taken_back=self.ending == "interrupted", within_s=free_within_s
        )
        stay = Stay(
            since_s=self.since_s, until_s=self.until_s, usd_per_hour=self.extras_usd_per_hour, minimum_s=minimum_s
        )
        if free:
            return stay
        return replace(stay, usd_per_hour=self.usd_per_hour, paid_usd=self.paid_usd, priced_s=self.priced_s)

    def repriced(self, usd_per_hour: float, now_s: float, *, minimum_s: float) -> Self:
        """From then on at another price; who is on demand, had ended, or was never seen stays as it is."""
        had_ended = self.until_s is not None and self.until_s <= now_s
        if self.on_demand or had_ended or self.state == "unseen" or usd_per_hour == self.usd_per_hour:
            return self
        lived = self.model_copy(update={"until_s": None})
        then = lived.stay(minimum_s=minimum_s, free_within_s=0.0).repriced(usd_per_hour, now_s)
        return self.model_copy(
            update={"usd_per_hour": then.usd_per_hour, "paid_usd": then.paid_usd, "priced_s": then.priced_s}
        )


class SpotPrices(Record):
    """What machines on spot cost at one moment: by zone and type, volume and address included."""

    seen_s: NonNegativeFloat
    usd_per_hour: Mapping[str, Mapping[str, PositiveFloat]]

    def of(self, zone: Zone, instance_type: str) -> float:
        """Of a type in a zone; where nothing was seen of it, what the order says."""
        return self.usd_per_hour.get(zone.name, {}).get(instance_type, zone.rates[instance_type].usd_per_hour)


class ClusterState(Artifact):
    """The last look at a run."""

    KIND: ClassVar[str] = "seen"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt status"

    time_s: NonNegativeFloat
    zone: str = ""
    generation: NonNegativeInt = Field(default=0, description="how often machines were replaced")
    machines: tuple[MachineState, ...] = ()
    lease_end_s: NonNegativeFloat | None = Field(default=None, description="until when the machines may live")
    lease_renews: bool = Field(default=False, description="whether machines may extend that lease by themselves")
    lease_tag: str | None = Field(default=None, description="which version of the lease in the bucket that was")
    ends_outside: bool = Field(default=True, description="the account ends machines where it has the role for it")
    stop_wished_s: NonNegativeFloat | None = None
    stop_reason: Told | None = None
    absent: tuple[WorkerSpec, ...] = Field(
        default=(), description="workers whose machines are lost, and are to come back"
    )
    given_up: tuple[str, ...] = Field(
        default=(), description="hosts that no machine is rented for again: their boots fail"
    )
    asks: NonNegativeInt = Field(default=0, description="how often lost machines were asked for")
    asked_s: NonNegativeFloat | None = Field(default=None, description="when they were asked for last")
    on_demand: bool = Field(default=False, description="the run moves to on-demand machines, or has")
    zone_wanted: str | None = Field(default=None, description="where the run is leaving for")
    switches: Mapping[str, NonNegativeFloat] = Field(
        default={}, description="when the run last set out from one zone to another, by both names in order"
    )
    prices: SpotPrices | None = Field(default=None, description="as they were seen last; absent: when it was ordered")
    prices_before: SpotPrices | None = Field(default=None, description="as they were seen the time before that")
    prices_asked_s: NonNegativeFloat | None = Field(default=None, description="when they were asked for last")
    placed_s: NonNegativeFloat = Field(default=0.0, description="when this generation began")
    resume_from: str | None = Field(default=None, description="the checkpoint that this generation went on from")
    paused_s: NonNegativeFloat | None = Field(default=None, description="when it was told to wait for new machines")
    strange_objects: tuple[str, ...] = Field(
        default=(), description="the first of the bucket's objects that are no files of a run, and were not fetched"
    )
    cleared: bool = Field(default=False, description="groups and templates are gone too")
    minimum_billed_s: NonNegativeFloat = facts.MINIMUM_BILLED_S.value
    free_within_s: NonNegativeFloat = facts.FREE_IF_TAKEN_WITHIN_S.value

    @property
    def alive(self) -> list[MachineState]:
        """The machines on the bill."""
        return [machine for machine in self.machines if machine.alive]

    @property
    def serving(self) -> list[MachineState]:
        """Of those, the hosts of the run: one machine each."""
        return [machine for machine in self.alive if machine.duty == "serves"]

    @property
    def waiting(self) -> list[MachineState]:
        """Of those, the ones that have no place yet."""
        return [machine for machine in self.alive if machine.duty == "waits"]

    @property
    def is_settled(self) -> bool:
        """Whether nobody comes, goes or is missed just now."""
        changes = self.absent or self.zone_wanted is not None or self.paused_s is not None
        return not changes and self.stop_wished_s is None and len(self.serving) == len(self.alive) > 0

    @property
    def has_moved(self) -> bool:
        """Whether nobody trains on spot any more of a run that was to move, and nobody waits for that."""
        return self.on_demand and not self.waiting and all(machine.on_demand for machine in self.serving)

    def usd_per_hour(self, zone: Zone, instance_type: str, market: Market) -> float:
        """What a machine that is rented now costs, as far as is known."""
        if market == "spot" and self.prices is not None:
            return self.prices.of(zone, instance_type)
        return zone.usd_per_hour(instance_type, market)

    @property
    def is_estimate(self) -> bool:
        """Whether what was spent is an estimate, because of some machine nobody saw when it ended."""
        return any(machine.is_forgotten for machine in self.machines)

    def spent_usd(self, now_s: float) -> float:
        """What the machines have cost by now, each piece of time at the price that was seen for it."""
        return self._spent_usd(self.machines, now_s)

    def spent_waiting_usd(self, now_s: float) -> float:
        """Of that, what those have cost that have no place yet."""
        return self._spent_usd(self.waiting, now_s)

    def _spent_usd(self, machines: Iterable[MachineState], now_s: float) -> float:
        stays = (
            machine.stay(minimum_s=self.minimum_billed_s, free_within_s=self.free_within_s) for machine in machines
        )
        return spent_usd(stays, now_s)


def ending_of(code: str) -> Ending:
    """Why a machine ended, by EC2's StateReason."""
    if code == facts.ENDED_BY_ITSELF.value:
        return "finished"
    if code == facts.ENDED_BY_US.value:
        return "stopped by us"
    if code.startswith(facts.TAKEN_BACK.value):
        return "interrupted"
    return "unknown"
