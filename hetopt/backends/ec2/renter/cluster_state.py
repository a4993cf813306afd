"""Keeps what was last seen of a run: its machines, what they cost, and how the run is; nobody needs to log in for that.

A machine whose boot fails leaves its log in the bucket and shuts down, so nobody hears of it by the run's events. It is
asked for again, as is one that has booted and ends before a step was done, until it is given up
(`hetopt.backends.backend`): each try costs minutes of the machine. Prices of spot pools are asked for in one call,
believed up to the worst price, and billed from then on. What a run has seen of its pools, hours and preemptions, is
kept for the next plan once the run is over.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hetopt.backends.backend import is_given_up
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.objects import changes_of, history_parameters
from hetopt.backends.ec2.renter.order import Order, Zone
from hetopt.backends.ec2.renter.request import Answer, Request, read
from hetopt.backends.host.renewal import PRICES_EVERY_S, Stay, spent_usd
from hetopt.core.artifact import Artifact, HostName, Told
from hetopt.core.errors import BadInput
from hetopt.core.events.records import LogEvent, TrainingFinished
from hetopt.core.run_status import RunState, RunStatus, failure_reason, judge, last_events, last_log_line, read_tail
from hetopt.optimizer.cost.billing import is_free
from hetopt.optimizer.cost.observed_preemptions import ObservedPool, keep, observed_file
from hetopt.optimizer.plan import Market

SEEN_FILE = "seen.json"

Ending = Literal["finished", "stopped by us", "interrupted", "unknown"]

Duty = Literal["serves", "waits", "relieved"]
"""A machine is a host of the run; or is to be one, and is not placed yet; or has no place any more: another has it."""


class MachineState(Stay):
    """One machine as EC2 told of it, with its time on the bill."""

    id: str
    host: HostName
    instance_type: str
    state: Told = Field(description="as EC2 calls it: pending, running, shutting-down, terminated; or 'gone'")
    reason: Told | None = None
    ending: Ending | None = None
    zone: str = ""
    minimum_s: NonNegativeFloat = facts.MINIMUM_BILLED_S
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

    def usd(self, now_s: float) -> float:
        """USD until ``now_s``. What EC2 takes back within its first hour is free, but for disk and address."""
        lasted_s = math.inf if self.until_s is None else self.until_s - self.since_s
        if is_free(lasted_s, taken_back=self.ending == "interrupted", within_s=facts.FREE_IF_TAKEN_WITHIN_S):
            beside = {"usd_per_hour": self.extras_usd_per_hour, "minimum_s": self.minimum_s}
            return Stay(since_s=self.since_s, until_s=self.until_s, **beside).usd(now_s)
        return super().usd(now_s)

    def repriced(self, usd_per_hour: float, now_s: float) -> Self:
        """From then on at another price; who is on demand, had ended, or was never seen stays as it is."""
        had_ended = self.until_s is not None and self.until_s <= now_s
        if self.on_demand or had_ended or self.state == "unseen" or usd_per_hour == self.usd_per_hour:
            return self
        return super().repriced(usd_per_hour, now_s)


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
    given_up: tuple[str, ...] = Field(
        default=(), description="hosts that no machine is rented for again: their boots fail"
    )
    asks: NonNegativeInt = Field(default=0, description="how often lost machines were asked for")
    asked_s: NonNegativeFloat | None = Field(default=None, description="when they were asked for last")
    on_demand: bool = Field(default=False, description="the run moves to on-demand machines, or has")
    spot_usd_per_hour: dict[str, dict[str, PositiveFloat]] = Field(
        default_factory=dict, description="by zone and type, volume and address included; absent: as it was ordered"
    )
    prices_seen_s: NonNegativeFloat | None = Field(default=None, description="when they were seen last")
    prices_asked_s: NonNegativeFloat | None = Field(default=None, description="when they were asked for last")
    placed_s: NonNegativeFloat = Field(default=0.0, description="when this generation began")
    resume_from: str | None = Field(default=None, description="the checkpoint that this generation went on from")
    paused_s: NonNegativeFloat | None = Field(default=None, description="when it was told to wait for new machines")
    cleared: bool = Field(default=False, description="groups and templates are gone too")

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
    def has_moved(self) -> bool:
        """Whether nobody trains on spot any more of a run that was to move, and nobody waits for that."""
        return self.on_demand and not self.waiting and all(machine.on_demand for machine in self.serving)

    def usd_per_hour(self, zone: Zone, instance_type: str, market: Market) -> float:
        """What a machine that is rented now costs, as far as is known."""
        ordered = zone.usd_per_hour(instance_type, market)
        return (
            ordered if market == "on-demand" else self.spot_usd_per_hour.get(zone.name, {}).get(instance_type, ordered)
        )

    def with_machines(self, ids: Collection[str], **changes: Any) -> Self:
        """The same cluster, with something else in the records of these machines."""
        machines = (one.model_copy(update=changes) if one.id in ids else one for one in self.machines)
        return self.model_copy(update={"machines": tuple(machines)})

    @property
    def is_estimate(self) -> bool:
        """Whether what was spent is an estimate, because of some machine nobody saw when it ended."""
        return any(machine.is_forgotten for machine in self.machines)

    def spent_usd(self, now_s: float, machines: Iterable[MachineState] | None = None) -> float:
        """What machines have cost by now, each piece of time at the price that was seen for it.

        Args:
            now_s: seconds since the epoch.
            machines: of the run; absent: all.
        """
        return spent_usd(self.machines if machines is None else machines, now_s)


def ending_of(code: str) -> Ending:
    """Why a machine ended, by EC2's StateReason."""
    if code == facts.ENDED_BY_ITSELF:
        return "finished"
    if code == facts.ENDED_BY_US:
        return "stopped by us"
    if code.startswith(facts.TAKEN_BACK):
        return "interrupted"
    return "unknown"


def price_request(names: Sequence[str], from_s: float) -> Request:
    """Ask what types cost on spot in every zone, from a moment on (seconds since the epoch)."""
    purpose = "what the types cost now, zone by zone"
    return read("ec2", "describe_spot_price_history", purpose, **history_parameters(names, from_s))


def spot_types(order: Order) -> list[str]:
    """All types that an order may rent on spot."""
    return list(dict.fromkeys(name for role in order.roles if role.market == "spot" for name in role.instance_types))


def are_due(order: Order, seen: ClusterState, now_s: float) -> bool:
    """Whether prices are to be asked for: some machine is billed at them, and the last ones are old.

    Of machines that have all ended they are asked for once more, for their bill.
    """
    asked_s = order.created_s if seen.prices_asked_s is None else seen.prices_asked_s
    if seen.alive:
        on_spot = any(not machine.on_demand for machine in seen.alive)
        return on_spot and seen.stop_wished_s is None and now_s >= asked_s + PRICES_EVERY_S
    return any(not machine.on_demand and (machine.until_s or 0.0) > asked_s for machine in seen.machines)


def billed_from_s(order: Order, seen: ClusterState) -> float:
    """From when on nobody has seen prices: machines are billed at those of then."""
    return order.created_s if seen.prices_seen_s is None else seen.prices_seen_s


def rebilled(order: Order, seen: ClusterState, history: Answer, now_s: float) -> ClusterState:
    """The run at the prices that were just seen, its machines billed at what their pools have cost since the last time.

    Where nobody has looked for hours, prices have moved meanwhile, and EC2 has billed each second at its own; so also
    of machines that have ended since.

    Args:
        order: of the run.
        seen: its last look.
        history: of prices, from `billed_from_s` on.
        now_s: seconds since the epoch.
    """
    machines, from_s = list(seen.machines), billed_from_s(order, seen)
    usd_per_hour = {zone: dict(of_types) for zone, of_types in seen.spot_usd_per_hour.items()}
    worst = {(zone.name, name): rate.worst_usd_per_hour for zone in order.zones for name, rate in zone.rates.items()}
    for change in changes_of(history):
        pool = change.zone, change.instance_type
        if pool not in worst or not change.usd_per_hour > 0:
            continue  # a pool that the order does not know, or a price that is none
        usd = min(change.usd_per_hour + order.extras_usd_per_hour, worst[pool])
        usd_per_hour.setdefault(change.zone, {})[change.instance_type] = usd
        then_s = min(max(change.at_s, from_s), now_s)
        for place, machine in enumerate(machines):
            if (machine.zone or seen.zone, machine.instance_type) == pool:
                machines[place] = machine.repriced(usd, then_s)
    return seen.model_copy(
        update={
            "machines": tuple(machines),
            "spot_usd_per_hour": usd_per_hour,
            "prices_seen_s": now_s,
            "prices_asked_s": now_s,
        }
    )


TOGETHER_S = 300.0
"""Machines of a pool that go within so long of each other go together."""


def seen_pools(seen: ClusterState, order: Order) -> tuple[ObservedPool, ...]:
    """The spot pools of this life of a run; what it had before it was resumed was counted then."""
    spot = {host for role in order.roles if role.market == "spot" for host in role.hosts}
    pools: dict[tuple[str, str], list[MachineState]] = defaultdict(list)
    for machine in seen.machines:
        if (
            machine.host in spot
            and not machine.on_demand
            and machine.since_s >= order.created_s
            and machine.until_s is not None
        ):
            pools[machine.instance_type, machine.zone or seen.zone].append(machine)
    return tuple(
        ObservedPool(
            instance_type=name,
            region=order.region,
            zone=zone or None,
            instance_hours=sum((one.until_s or one.since_s) - one.since_s for one in machines) / 3600,
            losses=len(lost := sorted(one.until_s or 0.0 for one in machines if one.ending == "interrupted")),
            events=_events(lost),
        )
        for (name, zone), machines in sorted(pools.items())
        if any((one.until_s or one.since_s) > one.since_s for one in machines)
    )


def remember(seen: ClusterState, order: Order, run_dir: Path) -> None:
    """Add what a run that is over has seen to what launches keep, for the next plan; once for each life of a run.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
    """
    pools = seen_pools(seen, order)
    try:
        (run_dir / f".observed.{order.life}").touch(exist_ok=False)
    except FileExistsError:
        return  # Another terminal saw it end, too.
    if pools:
        until = datetime.datetime.fromtimestamp(seen.time_s, datetime.UTC).isoformat(timespec="seconds")
        keep(observed_file(), pools, until=until)


def _events(lost_s: list[float]) -> int:
    """How often machines were taken, given when each was, in order."""
    return sum(place == 0 or lost_s[place] - lost_s[place - 1] > TOGETHER_S for place in range(len(lost_s)))


BOOT_FOLDER = "boot"
"""In the bucket and in the run's folder: the logs of machines that failed to boot."""

_LINES = 4
_LINE_CHARACTERS = 200


def failed(machines: Iterable[MachineState], life: int | None = None) -> list[MachineState]:
    """Those that ended by themselves before a step was done with them.

    Args:
        machines: of a run.
        life: of the run; absent: any.
    """
    return [machine for machine in machines if machine.has_failed and life in (None, machine.life)]


def hopeless_hosts(order: Order, seen: ClusterState, hosts: Collection[str]) -> list[str]:
    """Return those of these hosts that no machine is to be rented for again, since theirs fail."""
    counts = Counter(machine.host for machine in failed(seen.machines, order.life))
    return [host for host in hosts if is_given_up(counts[host])]


def last_words(run_dir: Path) -> str | None:
    """The end of the newest boot log."""
    folder = run_dir / BOOT_FOLDER
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    for path in reversed(logs):
        lines = [line.strip()[:_LINE_CHARACTERS] for line in read_tail(path).splitlines() if line.strip()]
        if lines:
            return " | ".join(lines[-_LINES:])
    return None


def why_failed(run_dir: Path, machines: Sequence[MachineState]) -> str:
    """One sentence on machines that failed, with the end of their log.

    Args:
        run_dir: the run's folder, with the logs that were fetched.
        machines: at least one.
    """
    named = ", ".join(dict.fromkeys(f"{machine.host} ({machine.instance_type})" for machine in machines))
    reason = next((machine.reason for machine in machines if machine.reason), None)
    if all(machine.heartbeat_s is not None for machine in machines):
        words, said = last_log_line(run_dir, machines[-1].host), f"EC2 says: {reason or 'nothing'}"
        return f"{named} ended before a step was done; {words or said}"
    words = last_words(run_dir)
    told = f"the newest boot log ends: {words}" if words else f"EC2 says: {reason or 'nothing'}; it left no boot log"
    return f"{named} ended before it had booted; {told}"


_LOSSES_SHOW_S = 180.0


def judged(run_dir: Path, seen: ClusterState) -> RunStatus:
    """How the run is, by what is in its folder."""
    if not seen.machines:
        return RunStatus(state=RunState.FAILED, reason="its machines were never granted")
    status = judge(
        last_events(run_dir),
        alive=bool(seen.alive),
        stop_wished=seen.stop_wished_s is not None,
        last_line=None if seen.alive else _last_words(run_dir, seen),
    )
    return replace(status, reason=status.reason or seen.stop_reason)


def last_seen(run_dir: Path) -> ClusterState:
    """What was last seen of a run; nothing at the epoch before the first look.

    Raises:
        BadInput: it cannot be read, such as where it was cut off by whatever ended the process.
    """
    path = run_dir / SEEN_FILE
    return ClusterState.load(path) if path.exists() else ClusterState(time_s=0.0)


def is_cleared(run_dir: Path) -> bool:
    """Whether everything of the run was given back. Where what was seen last cannot be read, nobody knows that."""
    with suppress(BadInput):
        return last_seen(run_dir).cleared
    return False


def has_failed(order: Order, events: Sequence[LogEvent], now_s: float) -> bool:
    """Whether the run failed by itself: no machine went with it, nor in the minutes that a notice gives."""
    since_s = events[-1].time_s if events else now_s
    # A failure before the run was resumed is what it was resumed from.
    in_this_life = since_s >= order.created_s
    return in_this_life and failure_reason(events) is not None and now_s - since_s > _LOSSES_SHOW_S


def stopped_s(events: Sequence[LogEvent]) -> float | None:
    """When the run last stopped with a checkpoint; None while it goes on."""
    last = events[-1] if events else None
    return last.time_s if isinstance(last, TrainingFinished) else None


def _last_words(run_dir: Path, seen: ClusterState) -> str | None:
    """Why a run ended that wrote no event about it."""
    taken = [machine for machine in seen.machines if machine.ending == "interrupted"]
    if taken:
        return f"EC2 took {', '.join(machine.host for machine in taken)} back"
    told = last_log_line(run_dir)
    if told is not None:
        return told
    unbooted = failed(seen.machines)
    if unbooted:
        return why_failed(run_dir, unbooted)
    reasons = [machine.reason for machine in seen.machines if machine.reason]
    return reasons[0] if reasons else None
