"""What machines and whoever rented them tell each other through the bucket: names of objects, and what is in them.

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
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from pydantic import Field, StringConstraints, ValidationError

from hetopt.core.artifact import HostName, Record, RecordLeavingOut, Told
from hetopt.core.batch_partition import spec_of_living
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.listening import SECRET_PATTERN
from hetopt.core.run_spec import MEETING_PORT, Node, RunSpec

OUTCOME_OBJECT = "outcome.json"
WANTED_OBJECT = "ckpt/WANTED"

MODELS_FOLDER = "models"
"""Of the bucket: what was trained, a folder a run. No rule of the bucket deletes it."""

CHECKPOINT_PATTERN = r"step-[0-9]{1,15}"


_LAST_MOMENT_S = 1e11
"""In the year 5138: no end is later."""

InstanceId = Annotated[str, StringConstraints(pattern=r"^i-[0-9a-z]{1,32}$")]
Generation = Annotated[int, Field(ge=0, le=10_000, strict=True)]


Usd = Annotated[float, Field(ge=0, le=1e9)]


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Terms(Record):
    """What a machine is told when it begins; what it hears later is believed within that."""

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
    """A machine on the bill, with what it costs an hour: now, at most, and of that its volume and address."""

    zone: str
    instance_type: str
    on_demand: bool
    usd_per_hour: Usd
    worst_usd_per_hour: Usd
    extras_usd_per_hour: Usd


class Renewal(Record):
    """What a run's budget leaves at a moment, and what it is spent on from then on: by it machines extend their lease.

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


class Lease(Record):
    """Until when a run may go on, in seconds since the epoch. 0 for ``stop_training_s`` means: end now."""

    end_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    stop_training_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    renewal: Renewal | None = Field(default=None, description="absent: nobody but the renter extends it")

    @property
    def wishes_end(self) -> bool:
        """Whether somebody wants the run to end, whatever its budget."""
        return self.stop_training_s == 0.0

    @classmethod
    def of_json(cls, data: bytes) -> Lease | None:
        """The lease that was written; None where it is something else, so that the one before holds."""
        try:
            return cls.model_validate_json(data, strict=True)
        except ValidationError:
            return None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one machine in a run: its node, and what all are told."""

    node: Node
    told: Placements

    @property
    def leads(self) -> bool:
        """Whether the worker of rank 0 is here."""
        return self.told.spec.workers[0].host == self.node.host


class Place(Record):
    """Which host of the run a machine is, and its address among the others."""

    host: HostName
    address: str


class Placements(RecordLeavingOut):
    """All machines of a run with their places, as the renter writes them."""

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

    @classmethod
    def of_json(cls, data: bytes) -> Placements | None:
        """What was written; None where a field is not what it must be."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None


def placement_of(data: bytes, instance_id: str, spec_sha256: str | None = None) -> Placement | None:
    """The place of a machine; None where it has none, the text is no placement, or places it in another run.

    Args:
        data: of the placement.
        instance_id: of the machine.
        spec_sha256: of the run that was ordered, see `spec_digest`; None: any run will do.
    """
    found = Placements.of_json(data)
    mine = None if found is None else found.hosts.get(instance_id)
    if found is None or mine is None or spec_sha256 not in (None, spec_digest(found.spec)):
        return None
    try:
        node = Node(host=mine.host, address=mine.address, meeting=found.meeting)
    except BadInput:
        return None
    if node.host not in {worker.host for worker in found.spec.workers}:
        return None
    return Placement(node=node, told=found)


def spec_digest(spec: RunSpec) -> str:
    """The hash of what was ordered: all of a run but its workers, who change as machines come and go.

    Machines are told it when they boot, so whatever is written into the bucket later can name no other task and no
    other data.
    """
    fixed = json.dumps(spec.model_dump(mode="json", exclude={"workers"}), sort_keys=True, allow_nan=False)
    return hashlib.sha256(fixed.encode("utf-8", errors="surrogatepass")).hexdigest()


class State(Record):
    """What a machine does, by its own clock; once its workers have ended, in which generation, and why if it knows."""

    time_s: float = Field(ge=0, le=_LAST_MOMENT_S, description="the moment, seconds since the epoch")
    does: str = Field(pattern=r"^([a-z ]{1,80}|ended with -?[0-9]{1,3})$")
    generation: Generation | None = None
    reason: Told | None = None


def checkpoint_name(found: object) -> str | None:
    """The name of a checkpoint, where it is one."""
    return found if isinstance(found, str) and re.fullmatch(CHECKPOINT_PATTERN, found) else None


@dataclass(frozen=True, kw_only=True)
class Latest:
    """What a run goes on from: the newest complete checkpoint, and which generation of machines has named it."""

    checkpoint: str
    generation: int = 0

    @property
    def data(self) -> bytes:
        """The bytes that are written to the bucket."""
        return f"{self.checkpoint} {self.generation}\n".encode()

    @classmethod
    def of(cls, data: bytes) -> Latest | None:
        """What `data` gave; None where it is something else."""
        found = re.fullmatch(rf"({CHECKPOINT_PATTERN})(?: ([0-9]{{1,9}}))?\s*", data.decode("ascii", errors="replace"))
        return None if found is None else cls(checkpoint=found[1], generation=int(found[2] or 0))


def outcome_json(generation: int) -> bytes:
    """That a generation needs no successor."""
    return json.dumps({"generation": generation}).encode()


def is_over(data: bytes | None, generation: int) -> bool:
    """Whether an outcome says that a generation is over for good."""
    try:
        return data is not None and _Outcome.model_validate_json(data, strict=True).generation >= generation
    except ValidationError:
        return False


class _Outcome(Record):
    generation: Generation


def ranked_spec(spec: RunSpec, places: Iterable[Place]) -> RunSpec:
    """The run with its workers in the order of their machines' addresses, as torchrun will rank them."""
    address = {place.host: place.address for place in places}
    workers = sorted(spec.workers, key=lambda worker: address[worker.host])  # stable: a host's workers stay together
    return spec.model_copy(update={"workers": tuple(workers)})


def without(spec: RunSpec, lost: Collection[str]) -> RunSpec:
    """The run on the hosts that are left, with the same global batch: each local batch size grows in proportion.

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
    """What the machines read to find themselves and each other, and whether to save a checkpoint and wait."""
    placements = Placements(
        generation=generation,
        resume_from=resume_from,
        pauses=pauses,
        # A port of its own for each generation: what is left of the last must not be met.
        meeting=f"{min(place.address for place in places.values())}:{MEETING_PORT + generation}",
        hosts=dict(places),
        spec=spec,
    )
    return placements.model_dump_json(indent=2).encode()


GoesOn = Callable[[int, int], bool]
"""Is told the bytes that are there, and all; says whether to go on."""


class Objects(Protocol):
    """Named bytes that all machines of a run see."""

    def get(self, name: str) -> bytes | None:
        """What is under a name; None where there is nothing, or where nobody can be reached."""
        found = self.versioned(name)
        return None if found is None else found.data

    def put(self, name: str, data: bytes) -> bool:
        """Write; says whether that went well."""

    def send(self, name: str, path: Path) -> bool:
        """Write a file, in parts where it is large; says whether that went well.

        Raises:
            FileNotFoundError: there is none.
        """

    def fetch(self, name: str, path: Path) -> bool:
        """Read into a file; says whether that went well. The file is whole, or not there."""

    def versioned(self, name: str) -> Versioned | None:
        """What is under a name, with its version; None where there is nothing, or where nobody can be reached."""

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write where that version still is (None: where nothing is); says whether that went well, and was so."""

    def names(self, prefix: str) -> Sequence[str]:
        """All names that begin so, sorted."""

    def delete(self, name: str) -> None:
        """Remove, if that goes well."""

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Fetch every object below a prefix into a folder; whether all of it is there."""


@dataclass(frozen=True, kw_only=True)
class Versioned:
    """What was under a name, and which version that was."""

    data: bytes
    version: str
