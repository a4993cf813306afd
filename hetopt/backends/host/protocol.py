"""The protocol of a run's machines and their renter, through the bucket: names of objects, and their contents.

runs/RUN/placement.json      which machine is which host, where all meet, and the spec    written by the renter
runs/RUN/outcome.json        that the run is over for good                                written by the first host
runs/RUN/lease.json          until when they may train and live, and by what they extend  written by the renter
                             that themselves
runs/RUN/state/ID.json       that machine ID lives, and what it does                      written by that machine
runs/RUN/events/OFFSET.jsonl the run's events from that byte on                           written by the first host
runs/RUN/log/HOST/...        the end of what its processes printed                        written by each host
runs/RUN/ckpt/...            checkpoints; LATEST names the newest that is complete,       written by each host
                             and the generation of machines that says so
models/RUN/outputs/...       what a script wrote for its user, likewise                written by the first host
models/RUN/model.safetensors the trained model, beside the runs, which the bucket     written by the first host
                             forgets after a while

torchrun ranks nodes by the text of their addresses, and EC2 hands out addresses as it likes. So the run's workers are
put into the order that their addresses will have, and a rank means the same to everybody.

A machine that nobody looks after lives until its lease ends, and as long as the budget still pays for that. A lease is
what the budget pays for at on-demand prices from the moment at which it was written. While spot costs less,
more is left than was feared; whoever follows the run writes that into the next lease. Where nobody does, each machine
asks EC2 what the pools of all machines have cost since, and reckons by itself:

    spent(t)   all machines of the lease, since it was written, at the prices of their pools           [USD]
    end(t)     t + (left - spent(t)) / worst - shutdown                  (`hetopt.core.budget_law`)     [s]

Machines that were lost since are reckoned as if they were there, and none comes that the lease does not tell of: the
renter writes a lease that nobody extends before it asks for any. So spent(t) is never less than what was spent. However
different the moments are at which machines reckon, or how many of them get no answer and stay with the end that they
had: together they stay within the budget. A machine grants time to nobody else, and needs no right but to see prices.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, Self

from pydantic import Field, NonNegativeFloat, StringConstraints, ValidationError

from hetopt.core import budget_law
from hetopt.core.artifact import CleanText, HostName, Record, RecordLeavingOut
from hetopt.core.batch_partition import spec_of_living
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import CloudRefused
from hetopt.core.listening import SECRET_PATTERN
from hetopt.core.run_spec import MEETING_PORT, Node, RunSpec

OUTCOME_OBJECT = "outcome.json"
WANTED_OBJECT = "ckpt/WANTED"

LOG_TAIL_BYTES = 256 * 1024
"""What is kept of the end of a log."""

MODELS_FOLDER = "models"
"""Of the bucket: what was trained, a folder a run. No rule of the bucket deletes it."""

CHECKPOINT_PATTERN = r"step-[0-9]{1,15}"


_LAST_MOMENT_S = 1e11
"""In the year 5138: no end is later."""

InstanceId = Annotated[str, StringConstraints(pattern=r"^i-[0-9a-z]{1,32}$")]
Generation = Annotated[int, Field(ge=0, le=10_000, strict=True)]


Usd = Annotated[float, Field(ge=0, le=1e9)]


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Written(Record):
    """The base of records that machines and their renter write for each other."""

    @classmethod
    def of_json(cls, data: bytes | None) -> Self | None:
        """Parse a record from JSON; return None if there is no data, or it is no such record."""
        try:
            return cls.model_validate_json(data or b"", strict=True)
        except ValidationError:
            return None


class Terms(Record):
    """The limits that a machine is given when it boots, within which it believes later messages."""

    spec_sha256: Digest = Field(description="of the run that was ordered, see `spec_digest`")
    group_secret: str = Field(
        pattern=rf"^{SECRET_PATTERN}$",
        description="what all machines of the run know, and nobody else (`hetopt.trainer.host.gate`)",
    )
    end_s: float = Field(
        gt=0,
        description="when it ends, unless the lease says otherwise, in seconds since the epoch: what the budget pays "
        "for at the worst",
    )
    latest_end_s: float = Field(
        gt=0, description="what no lease extends it beyond: what the budget pays for at the least"
    )


class PaidMachine(Record):
    """A machine on the bill, with its USD an hour: now, at most, and the part of it for volume and address."""

    zone: str
    instance_type: str
    on_demand: bool
    usd_per_hour: Usd
    worst_usd_per_hour: Usd
    extras_usd_per_hour: Usd


class Renewal(Record):
    """The USD that a run has left at a moment, and all machines on its bill, by which they extend their lease.

    It tells of every machine on the bill. Where others are to come, a lease without one is written first.
    """

    since_s: float = Field(ge=0, le=_LAST_MOMENT_S, description="the moment, seconds since the epoch")
    left_usd: Usd
    worst_usd_per_hour: float = Field(gt=0, le=1e9, description="of all machines that may ever come of the order")
    checkpoint_s: float = Field(ge=0, le=_LAST_MOMENT_S, description="to write and upload the last checkpoint")
    latest_end_s: float = Field(
        default=_LAST_MOMENT_S,
        ge=0,
        le=_LAST_MOMENT_S,
        description="what it extends no life beyond",
    )
    machines: tuple[PaidMachine, ...] = Field(min_length=1)


class Lease(Written):
    """The moments (seconds since the epoch) until which machines live, and train (``stop_training_s``; 0: end now)."""

    end_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    stop_training_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    renewal: Renewal | None = Field(default=None, description="absent: nobody but the renter extends it")

    @property
    def wishes_end(self) -> bool:
        """True if somebody wants the run to end, whatever its budget."""
        return self.stop_training_s == 0.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A machine's node in a run (host, address, meeting point), with the placements of all machines."""

    node: Node
    told: Placements

    @property
    def leads(self) -> bool:
        """True if the worker of rank 0 is on this machine."""
        return self.told.spec.workers[0].host == self.node.host


class Place(Record):
    """A machine's place in a run: the host that it is, and its address among the other machines."""

    host: HostName
    address: str


class Placements(Written, RecordLeavingOut):
    """The places of all machines of a run, the checkpoint to resume from, and the run, as the renter writes them."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("pauses",)

    generation: Generation = Field(description="grows when machines are replaced")
    resume_from: str | None = Field(
        default=None,
        pattern=rf"^{CHECKPOINT_PATTERN}$",
        description="the checkpoint that all machines go on from; absent: from the start",
    )
    pauses: bool = Field(
        default=False, description="this generation saves a checkpoint and waits for the next: machines join"
    )
    meeting: str
    hosts: dict[InstanceId, Place] = Field(min_length=1)
    spec: RunSpec

    @property
    def present(self) -> list[str]:
        """The names of the hosts that are there."""
        return [place.host for place in self.hosts.values()]


def placement_of(data: bytes | None, instance_id: str, spec_sha256: str | None = None) -> Placement | None:
    """Return a machine's placement parsed from ``data``; None: it has none, or it is of another run.

    Args:
        data: JSON of the placements; None: there are none yet.
        instance_id: of the machine.
        spec_sha256: of the run that was ordered, see `spec_digest`; None: any run will do.
    """
    placements = Placements.of_json(data)
    mine = None if placements is None else placements.hosts.get(instance_id)
    if placements is None or mine is None or spec_sha256 not in (None, spec_digest(placements.spec)):
        return None
    try:
        node = Node(host=mine.host, address=mine.address, meeting=placements.meeting)
    except ValidationError:
        return None
    if node.host not in {worker.host for worker in placements.spec.workers}:
        return None
    return Placement(node=node, told=placements)


def spec_digest(spec: RunSpec) -> str:
    """Return the SHA-256 in hex of a run without its workers, which change as machines come and go.

    Machines are told it when they boot, so whatever is written into the bucket later can name no other task and no
    other data.
    """
    fixed = json.dumps(spec.model_dump(mode="json", exclude={"workers"}), sort_keys=True, allow_nan=False)
    return hashlib.sha256(fixed.encode("utf-8", errors="surrogatepass")).hexdigest()


class State(Record):
    """A machine's report of what it does, by its clock; after its workers' end with their generation and reason."""

    time_s: float = Field(ge=0, le=_LAST_MOMENT_S, description="the moment, seconds since the epoch")
    does: str = Field(pattern=r"^([a-z ]{1,80}|ended with -?[0-9]{1,3})$")
    generation: Generation | None = None
    reason: CleanText | None = None


def checkpoint_name(found: object) -> str | None:
    """Return ``found`` if it is the name of a checkpoint, such as ``step-120``; else None."""
    return found if isinstance(found, str) and re.fullmatch(CHECKPOINT_PATTERN, found) else None


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The name of the newest complete checkpoint, which a run resumes from, and the generation that named it."""

    checkpoint: str
    generation: int = 0

    @property
    def data(self) -> bytes:
        """The bytes that are written to the bucket."""
        return f"{self.checkpoint} {self.generation}\n".encode()

    @classmethod
    def of(cls, data: bytes) -> Latest | None:
        """Parse the contents of the bucket's object LATEST; return None if they name no checkpoint."""
        match = re.fullmatch(rf"({CHECKPOINT_PATTERN})(?: ([0-9]{{1,9}}))?\s*", data.decode("ascii", errors="replace"))
        return None if match is None else cls(checkpoint=match[1], generation=int(match[2] or 0))


class Outcome(Written):
    """The first host's message that its generation ended the run for good: no machine needs to be replaced."""

    generation: Generation


def is_over(data: bytes | None, generation: int) -> bool:
    """Return whether an outcome's JSON (None: absent) says that the run ended for good in ``generation`` or later."""
    outcome = Outcome.of_json(data)
    return outcome is not None and outcome.generation >= generation


def without(spec: RunSpec, lost: Collection[str]) -> RunSpec:
    """Return the run without the hosts ``lost``, at the same global batch: other local batch sizes grow in proportion.

    Raises:
        CloudRefused: nobody is left, or the workers that are left cannot hold the batch.
    """
    places = [place for place, worker in enumerate(spec.workers) if worker.host not in lost]
    if not places:
        raise CloudRefused("all machines of the run are lost.", hint="launch the plan again")
    left = spec_of_living(spec, places, {})
    for worker in left.workers if spec.script else ():  # a task computes what does not fit at once in micro-batches
        share, most = worker.local_batch_size, worker.max_local_batch_size
        if most is not None and share > most:
            raise CloudRefused(
                f"{worker.host} has memory for {most} samples at once, and would get {share} of the batch, as other "
                "machines are lost; a script has no micro-batches.",
                hint="launch the plan again",
            )
    return left


def placement_json(
    spec: RunSpec,
    places: Mapping[str, Place],
    generation: int = 0,
    resume_from: str | None = None,
    *,
    pauses: bool = False,
) -> bytes:
    """Return the placements in JSON, ``places`` by machine id; ``pauses``: save a checkpoint, and wait for the next."""
    first = next(place for place in places.values() if place.host == spec.workers[0].host)
    placements = Placements(
        generation=generation,
        resume_from=resume_from,
        pauses=pauses,
        # A port of its own for each generation: what is left of the last must not be met.
        meeting=f"{first.address}:{MEETING_PORT + generation}",
        hosts=dict(places),
        spec=spec,
    )
    return placements.model_dump_json(indent=2).encode()


GoesOn = Callable[[int, int], bool]
"""Is told the bytes that are there, and all; says whether to go on."""


class Objects(Protocol):
    """The interface to a run's object store: named bytes that all machines of the run share."""

    def get(self, name: str) -> bytes | None:
        """Return the bytes under a name; None if there are none or the store cannot be reached."""
        stored = self.versioned(name)
        return None if stored is None else stored.data

    def put(self, name: str, data: bytes) -> bool:
        """Write bytes under a name; return whether that succeeded."""

    def send(self, name: str, path: Path) -> bool:
        """Write a file under a name, in parts if it is large; return whether that succeeded.

        Raises:
            FileNotFoundError: there is none.
        """

    def fetch(self, name: str, path: Path) -> bool:
        """Read an object into the file ``path``, whole or not at all; return whether that succeeded."""

    def versioned(self, name: str) -> Versioned | None:
        """Return the bytes under a name, with their version; None if there are none or the store cannot be reached."""

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write bytes if the object's version is still ``version`` (None: absent); return whether they were written."""

    def names(self, prefix: str) -> Sequence[str] | None:
        """Return the sorted names of all objects with a prefix; None if the store does not answer."""

    def delete(self, name: str) -> None:
        """Try to remove the object under a name; report no failure."""

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Download the objects below a bucket's URL into a folder while ``goes_on()``; return whether all are there."""


@dataclass(frozen=True, kw_only=True)
class Versioned:
    """The bytes of an object, and the version that names just these bytes."""

    data: bytes
    version: str


class BilledTime(Record):
    """The time of a machine on the bill: when it began and ended, and the prices paid in between."""

    since_s: NonNegativeFloat = Field(description="when it began, seconds since the epoch")
    until_s: NonNegativeFloat | None = Field(default=None, description="when it ended; absent while it runs")
    usd_per_hour: NonNegativeFloat = Field(
        description="all that is paid for it now, volume and address included; of one that has ended, at last"
    )
    minimum_s: NonNegativeFloat = Field(default=0.0, description="paid for at least")
    paid_usd: NonNegativeFloat = Field(default=0.0, description="what it had cost when its price last changed")
    priced_s: NonNegativeFloat | None = Field(default=None, description="from when on it costs what it does now")

    def usd(self, now_s: float) -> float:
        """Return the USD that this machine has cost until ``now_s`` (seconds since the epoch), or until its end."""
        end_s = max(now_s if self.until_s is None else self.until_s, self.since_s + self.minimum_s)
        from_s = self.since_s if self.priced_s is None else self.priced_s
        return self.paid_usd + self.usd_per_hour * max(end_s - from_s, 0.0) / SECONDS_PER_HOUR

    def repriced(self, usd_per_hour: float, now_s: float) -> Self:
        """Return the stay at ``usd_per_hour`` from ``now_s`` (seconds since the epoch) on; what it had cost stays."""
        from_s = max(now_s, self.since_s + self.minimum_s, self.priced_s or 0.0)
        paid_usd = self.model_copy(update={"until_s": None}).usd(now_s)
        return self.model_copy(update={"usd_per_hour": usd_per_hour, "paid_usd": paid_usd, "priced_s": from_s})


def spent_usd(stays: Iterable[BilledTime], now_s: float) -> float:
    """Return the USD that machines (``stays``) have cost together until ``now_s``, in seconds since the epoch."""
    return math.fsum(stay.usd(now_s) for stay in stays)


PRICES_EVERY_S = 600.0
"""Prices move over hours, and a machine is billed by the second: a look costs nothing, and tells little more often."""


@dataclass(frozen=True, kw_only=True)
class PriceChange:
    """A spot pool's price from a moment on (seconds since the epoch), in USD an hour without volume and address."""

    zone: str
    instance_type: str
    at_s: float
    usd_per_hour: float


AskPrices = Callable[[Sequence[str], float], Sequence[PriceChange] | None]
"""What types have cost on spot in every zone from a moment on, in order; None where nobody answers."""


def renewed_end_s(renewal: Renewal, changes: Sequence[PriceChange], now_s: float) -> float:
    """Return when unattended machines shut down (seconds since the epoch), by spot prices since their lease began.

    Args:
        renewal: what the lease says of the budget.
        changes: of prices, from `Renewal.since_s` on, with those that held then.
        now_s: seconds since the epoch.
    """
    stays = [_stay(renewal, machine, changes, now_s) for machine in renewal.machines]
    left_usd = renewal.left_usd - spent_usd(stays, max(now_s, renewal.since_s))
    return budget_law.end_s(max(now_s, renewal.since_s), left_usd, renewal.worst_usd_per_hour)


def _stay(renewal: Renewal, machine: PaidMachine, changes: Sequence[PriceChange], now_s: float) -> BilledTime:
    """Return the stay of a machine since the lease was written, as if it were still there."""
    if machine.on_demand:
        return BilledTime(since_s=renewal.since_s, usd_per_hour=machine.usd_per_hour)
    mine = [
        (change.at_s, min(change.usd_per_hour + machine.extras_usd_per_hour, machine.worst_usd_per_hour))
        for change in changes
        if (change.zone, change.instance_type) == (machine.zone, machine.instance_type)
    ]
    before = [usd for at_s, usd in mine if at_s <= renewal.since_s]
    # A pool of which nobody tells what it cost at first cost the most that it can.
    first_usd = max(before[-1], machine.usd_per_hour) if before else machine.worst_usd_per_hour
    stay = BilledTime(since_s=renewal.since_s, usd_per_hour=first_usd)
    for at_s, usd in mine:
        if renewal.since_s < at_s < now_s:
            stay = stay.repriced(usd, at_s)
    return stay


@dataclass(kw_only=True)
class Allowance:
    """The moments (seconds since the epoch) to which a machine may live and train, by the last lease that it read.

    Attributes:
        latest_end_s: beyond which no lease extends its life.
        ask_prices: of EC2.
        end_s: when it is shut down; before the first lease, as it was told when it booted.
        stop_training_s: when training must end, for the last checkpoint to be uploaded by then.
    """

    latest_end_s: float
    ask_prices: AskPrices
    end_s: float
    stop_training_s: float = math.inf
    _renewal: Renewal | None = None
    _renewed_s: float = 0.0
    _asked_s: float = -math.inf

    def hear(self, lease: Lease, now_s: float) -> None:
        """Update both moments by the lease just read; extend a renewable lease by asking EC2 for prices, if due."""
        if lease.renewal != self._renewal:
            self._renewal, self._renewed_s = lease.renewal, 0.0
        self._extend(lease, now_s)
        # Later while less is spent than was feared; sooner once there are more machines.
        self.end_s, self.stop_training_s = min(lease.end_s, self.latest_end_s), lease.stop_training_s
        if lease.renewal is None or lease.wishes_end:
            return
        renewed_s = min(self._renewed_s, self.latest_end_s, lease.renewal.latest_end_s)
        if renewed_s > self.end_s:
            self.end_s, self.stop_training_s = renewed_s, renewed_s - lease.renewal.checkpoint_s

    def _extend(self, lease: Lease, now_s: float) -> None:
        """Reckon the end anew when prices may have moved, or half of the time is over in which that is of use."""
        if lease.renewal is None:
            return
        last_s = max(lease.renewal.since_s, self._asked_s)
        ends_s = max(lease.stop_training_s, self._renewed_s - lease.renewal.checkpoint_s)
        if now_s >= last_s + min(PRICES_EVERY_S, (ends_s - last_s) / 2):
            self._asked_s = now_s
            self._renewed_s = max(self._renewed_s, self._reckoned_s(lease.renewal, now_s))

    def _reckoned_s(self, renewal: Renewal, now_s: float) -> float:
        """Return the end of the lease by present prices (seconds since the epoch); 0 where nobody tells them."""
        types = list(dict.fromkeys(machine.instance_type for machine in renewal.machines if not machine.on_demand))
        changes = self.ask_prices(types, renewal.since_s) if types else []
        return 0.0 if changes is None else renewed_end_s(renewal, changes, now_s)
