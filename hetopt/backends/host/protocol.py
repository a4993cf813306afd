"""The protocol of a run's machines and their renter, through the bucket: names of objects, and their contents.

runs/RUN/placement.json      which machine is which host, where all meet, and the spec    written by the renter
runs/RUN/outcome.json        that the run is over for good                                written by the first host
runs/RUN/lease.json          until when they may train and live                           written by the renter
runs/RUN/state/ID.json       that machine ID lives, and what it does                      written by that machine
runs/RUN/events/OFFSET.jsonl the run's events from that byte on                           written by the first host
runs/RUN/log/HOST/...        the end of what its processes printed                        written by each host
runs/RUN/ckpt/...            checkpoints; LATEST names the newest that is complete,       written by each host
                             and the generation of machines that says so
models/RUN/outputs/...       what a script wrote for its user, likewise                written by the first host
models/RUN/model.safetensors the trained model, beside the runs, which the bucket     written by the first host
                             forgets after a while

torchrun ranks nodes by the text of their addresses, so the run's workers are put into the order of these, and a rank
means the same to everybody. A machine lives until its lease ends (`hetopt.core.budget_law`); whoever follows the run
writes later leases, as less was spent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, Self

from pydantic import Field, StringConstraints, ValidationError

from hetopt.core.artifact import CleanText, HostName, Record, RecordLeavingOut
from hetopt.core.batch_partition import begun_on, spec_of_living
from hetopt.core.errors import CloudRefused
from hetopt.core.hosts import AddressAmongHosts
from hetopt.core.listening import SECRET_PATTERN
from hetopt.core.run_spec import MEETING_PORT, MeetingPoint, Node, RunSpec, host_names

OUTCOME_OBJECT = "outcome.json"
WANTED_OBJECT = "ckpt/WANTED"

LOG_TAIL_BYTES = 256 * 1024
"""Bytes of the end of a log that are kept."""

MODELS_FOLDER = "models"
"""Folder of the bucket for what was trained, a folder a run. No rule of the bucket deletes it."""

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
        """Parse a record from JSON; None: there is no data, or it is no such record."""
        try:
            return cls.model_validate_json(data or b"", strict=True)
        except ValidationError:
            return None


class Terms(Record):
    """The limits that a machine is given when it boots, within which it believes later messages.

    Attributes:
        spec_sha256: digest of the run that was ordered, see `spec_digest`.
        group_secret: secret that all machines of the run know, and nobody else.
        end_s: when the machine ends unless the lease says otherwise, seconds since the epoch.
        latest_end_s: moment that no lease extends its life beyond, seconds since the epoch.
    """

    spec_sha256: Digest
    group_secret: str = Field(pattern=rf"^{SECRET_PATTERN}$")
    end_s: float = Field(gt=0)
    latest_end_s: float = Field(gt=0)


class Lease(Written):
    """The moments until which the machines of a run live and train.

    Attributes:
        end_s: until when they live, seconds since the epoch.
        stop_training_s: until when they train, seconds since the epoch; 0: they save a checkpoint and end now.
    """

    end_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    stop_training_s: float = Field(ge=0, le=_LAST_MOMENT_S)

    @property
    def wishes_end(self) -> bool:
        """True if somebody wants the run to end, whatever its budget."""
        return self.stop_training_s == 0.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A machine's place in a run, with the places of all others.

    Attributes:
        node: host, address and meeting point of this machine.
        placements: placements of all machines, as the renter wrote them.
    """

    node: Node
    placements: Placements

    @property
    def leads(self) -> bool:
        """True if the worker of rank 0 is on this machine."""
        return self.placements.spec.workers[0].host == self.node.host


class Place(Record):
    """The host that a machine is in a run, and its address.

    Attributes:
        host: name of the host.
        address: its IP address among the other machines.
    """

    host: HostName
    address: AddressAmongHosts


class Placements(Written, RecordLeavingOut):
    """The places of all machines of a run, the checkpoint to resume from, and the run, as the renter writes them.

    Attributes:
        generation: number that grows when machines are replaced.
        resume_from: name of the checkpoint that all machines go on from; None: from the start.
        pauses: whether this generation saves a checkpoint and waits for the next: machines join.
        meeting: IP address and port where all machines meet.
        hosts: places by machine id.
        spec: spec of the run, with its workers.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("pauses",)

    generation: Generation
    resume_from: str | None = Field(default=None, pattern=rf"^{CHECKPOINT_PATTERN}$")
    pauses: bool = False
    meeting: MeetingPoint
    hosts: dict[InstanceId, Place] = Field(min_length=1)
    spec: RunSpec

    @property
    def present(self) -> list[str]:
        """The names of the hosts that have a machine, which are not waited for."""
        return [place.host for place in self.hosts.values()]


def placement_of(data: bytes | None, instance_id: str, spec_sha256: str | None = None) -> Placement | None:
    """Return a machine's placement parsed from ``data``; None: it has none, or the data are of another run or damaged.

    Args:
        data: JSON of the placements; None: there are none yet.
        instance_id: id of the machine.
        spec_sha256: digest of the run that was ordered, see `spec_digest`; None: any run will do.
    """
    placements = Placements.of_json(data)
    mine = None if placements is None else placements.hosts.get(instance_id)
    if placements is None or mine is None or spec_sha256 not in (None, spec_digest(placements.spec)):
        return None
    if mine.host not in host_names(placements.spec):
        return None
    node = Node(host=mine.host, address=mine.address, meeting=placements.meeting)
    return Placement(node=node, placements=placements)


def spec_digest(spec: RunSpec) -> str:
    """Return the SHA-256 in hex of a run without its workers, which change as machines come and go.

    Machines are told it when they boot, so whatever is written into the bucket later can name no other task and no
    other data.
    """
    fixed = json.dumps(spec.model_dump(mode="json", exclude={"workers"}), sort_keys=True, allow_nan=False)
    return hashlib.sha256(fixed.encode("utf-8", errors="surrogatepass")).hexdigest()


class State(Record):
    """A machine's report of what it does.

    Attributes:
        time_s: when, by its own clock, seconds since the epoch.
        does: a few words, or 'ended with N', the exit code of its workers.
        generation: generation in which its workers ended; None: they have not.
        reason: why they failed; None: they did not, or nobody knows.
    """

    time_s: float = Field(ge=0, le=_LAST_MOMENT_S)
    does: str = Field(pattern=r"^([a-z ]{1,80}|ended with -?[0-9]{1,3})$")
    generation: Generation | None = None
    reason: CleanText | None = None


def checkpoint_name(name: object) -> str | None:
    """Return ``name`` if it is the name of a checkpoint, such as ``step-120``; else None."""
    return name if isinstance(name, str) and re.fullmatch(CHECKPOINT_PATTERN, name) else None


class Latest(Written):
    """The name of the newest complete checkpoint, which a run resumes from.

    Attributes:
        checkpoint: its name, such as ``step-120``.
        generation: generation of the machines that named it.
    """

    checkpoint: str = Field(pattern=rf"^{CHECKPOINT_PATTERN}$")
    generation: Generation = 0


class Outcome(Written):
    """The first host's message that its generation ended the run for good: no machine needs to be replaced.

    Attributes:
        generation: number of that generation.
    """

    generation: Generation


def is_over(data: bytes | None, generation: int) -> bool:
    """Return whether a run ended for good in ``generation`` or later, by the JSON of its outcome.

    Args:
        data: JSON of the `Outcome`; None: there is none, so that the run goes on.
        generation: generation of the machines that ask.
    """
    outcome = Outcome.of_json(data)
    return outcome is not None and outcome.generation >= generation


def without(spec: RunSpec, lost: Collection[str]) -> RunSpec:
    """Return the run without the hosts ``lost``, at the same global batch: other local batch sizes grow in proportion.

    Raises:
        CloudRefused: no machine is left, or a worker of a script would get more samples than its memory holds.
        BadInput: the global batch has fewer samples than there are workers left.
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


def placed_on(spec: RunSpec, there: Collection[str]) -> RunSpec:
    """Return the run's spec as the hosts ``there`` begin it.

    In an elastic run, the workers of absent hosts keep their places behind, and may join from memory; else they are
    left out.

    Args:
        spec: spec of the run, with all of its workers.
        there: names of the hosts that are present.

    Raises:
        CloudRefused: no host is present, or a worker of a script would get more samples than its memory holds.
        BadInput: the global batch has fewer samples than there are workers left.
    """
    absent = [worker.host for worker in spec.workers if worker.host not in there]
    return begun_on(spec, there) if spec.is_elastic and there else without(spec, absent)


def placement_json(
    spec: RunSpec,
    places: Mapping[str, Place],
    generation: int = 0,
    resume_from: str | None = None,
    *,
    pauses: bool = False,
) -> bytes:
    """Return the JSON of the placements that machines read.

    Args:
        spec: spec of the run, whose first worker's host is where all meet.
        places: places by machine id.
        generation: number of this generation.
        resume_from: name of the checkpoint to go on from; None: from the start.
        pauses: whether machines save a checkpoint and wait for the next placements.

    Raises:
        StopIteration: the first worker's host has no place.
    """
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
"""Callback of a download: given the bytes that are there and all bytes, it returns whether to go on."""


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
            FileNotFoundError: there is no such file.
        """

    def fetch(self, name: str, path: Path) -> bool:
        """Read an object into the file ``path``, whole or not at all; return whether that succeeded."""

    def versioned(self, name: str) -> Versioned | None:
        """Return the bytes under a name, with their version; None if there are none or the store cannot be reached."""

    def put_over(self, name: str, data: bytes, version: str | None) -> bool:
        """Write bytes if the object's version is still ``version``; return whether they were written.

        Args:
            name: name of the object.
            data: new contents.
            version: version that the object must have, as of `versioned`; None: it must be absent.
        """

    def names(self, prefix: str) -> Sequence[str] | None:
        """Return the sorted names of all objects with a prefix; None if the store does not answer."""

    def delete(self, name: str) -> None:
        """Try to remove the object under a name; report no failure."""

    def download(self, url: str, folder: Path, goes_on: GoesOn) -> bool:
        """Download the objects below a bucket's URL into a folder while ``goes_on``; return whether all are there.

        Args:
            url: address of the objects, ``s3://BUCKET/PREFIX``.
            folder: folder to download into.
            goes_on: called with the bytes that are there and all bytes; False ends the download.

        Raises:
            BadInput: there are no such objects, or this store does not read them.
        """


@dataclass(frozen=True, kw_only=True)
class Versioned:
    """The bytes of an object, and the version that names just these bytes.

    Attributes:
        data: the bytes.
        version: text that differs for other bytes, such as an ETag.
    """

    data: bytes
    version: str
