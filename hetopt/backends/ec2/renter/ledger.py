"""The ledger of a run: what was asked of the cloud and what it made, a line before and a line after each call.

It is written before the call leaves this machine and flushed to the disk, so that whatever ends the process, the names
of everything that may exist are known: the line before says what was about to be made, the line after its ids.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.request import Answer, Edge, Kind, Request
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.reading import parse_json

LEDGER_FILE = "ledger.jsonl"
REGIONS_FILE = "regions"

SETTLES_S = 60.0
"""EC2 may not list for seconds what it has just made, nor know its id."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line.

    Attributes:
        call: number of the call within the run; its lines share it.
        event: begun, done, refused, or lost where nobody knows whether it was carried out.
        ids: of what the call made, in the line after.
    """

    call: int
    event: str
    time_s: float
    step: str
    api_name: str
    region: str
    makes: Kind | None = None
    token: str | None = None
    ids: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Appends entries to a file; each is on the disk before the next thing happens."""

    path: Path
    region: str
    clock: Callable[[], float]

    def begin(self, request: Request) -> int:
        """Write down what is about to be asked; answers the call's number."""
        call = sum(entry.event == "begun" for entry in read_ledger(self.path))
        token = request.parameters.get("ClientToken")
        self.write(request, call, "begun", token=token if isinstance(token, str) else None)
        return call

    def write(self, request: Request, call: int, event: str, **more: object) -> None:
        """Write down how a call stands, and what it made, or why it did not; see `Entry`."""
        line: dict[str, object] = {
            "call": call,
            "event": event,
            "time_s": round(self.clock(), 3),
            "step": request.step,
            "api_name": request.api_name,
            "region": self.region,
            "makes": request.makes,
            **more,
        }
        append_durably(self.path, json.dumps({key: value for key, value in line.items() if value is not None}))


@dataclass(frozen=True, kw_only=True)
class LedgerEdge:
    """Carries out what changes something with a line in the ledger before and after; reads pass by."""

    inner: Edge
    ledger: Ledger

    def __call__(self, request: Request) -> Answer:
        if request.reads_only:
            return self.inner(request)
        call = self.ledger.begin(request)
        try:
            answer = self.inner(request)
        except HetoptError as error:
            unknown = isinstance(error, ApiRefused) and error.may_be_done
            self.ledger.write(request, call, "lost" if unknown else "refused", reason=error.message)
            raise
        self.ledger.write(request, call, "done", ids=tuple(made_ids(request, answer)))
        return answer


def made_ids(request: Request, answer: Answer) -> list[str]:
    """The ids in the answer of a call that makes something; of one that removes, the ids that it named."""
    match request.operation:
        case "create_fleet":
            return [answer["FleetId"], *(i for found in answer.get("Instances", ()) for i in found["InstanceIds"])]
        case "create_security_group":
            return [answer["GroupId"]]
        case "create_launch_template":
            return [answer["LaunchTemplate"]["LaunchTemplateId"]]
        case "create_schedule_group" | "delete_schedule_group":
            return [str(request.parameters["Name"])]
        case "put_object":
            return [f"s3://{request.parameters['Bucket']}/{request.parameters['Key']}"]
        case "terminate_instances":
            return list(request.parameters["InstanceIds"])
        case "delete_fleets":
            return list(request.parameters["FleetIds"])
        case "delete_security_group" | "delete_launch_template" | "delete_volume":
            return [str(value) for key, value in request.parameters.items() if key.endswith("Id")]
    return []


def read_ledger(path: Path) -> list[Entry]:
    """The entries so far. A last line that was being written when the process died is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [entry for line in lines if (entry := _entry(line)) is not None]


def unresolved(entries: Iterable[Entry]) -> list[Entry]:
    """Calls of which nobody knows how they ended: the process died on the way, or the answer never came."""
    open_: dict[int, Entry] = {}
    for entry in entries:
        if entry.event == "begun":
            open_[entry.call] = entry
        elif entry.event != "lost":
            open_.pop(entry.call, None)
    return list(open_.values())


def recorded_ids(entries: Iterable[Entry], prefix: str) -> list[str]:
    """Every id of one kind that the ledger knows, by its prefix such as 'fleet-'."""
    return list(dict.fromkeys(name for entry in entries for name in entry.ids if name.startswith(prefix)))


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a run has made and not removed, as far as its ledger knows.

    Attributes:
        ids: of machines, fleets, templates and groups.
        settles_s: for so long EC2 may not know all of it: what it has just made is in no list.
        hanging: whether something may have been made by a call whose answer nobody has.
    """

    ids: tuple[str, ...] = ()
    settles_s: float = 0.0
    hanging: bool = False

    def of_kind(self, prefix: str) -> list[str]:
        """The ids that begin so."""
        return [id_ for id_ in self.ids if id_.startswith(prefix)]


def made(entries: Sequence[Entry], now_s: float) -> Made:
    """What the ledger knows to have been made, and not to have been removed.

    Args:
        entries: of the ledger.
        now_s: seconds since the epoch.
    """
    ids = _there(entries)
    open_ = [entry for entry in unresolved(entries) if entry.makes not in (None, "object")]
    newest_s = max((entry.time_s for entry in entries if entry.makes not in (None, "object")), default=-SETTLES_S)
    return Made(
        ids=tuple(ids),
        settles_s=min(SETTLES_S, max(0.0, newest_s + SETTLES_S - now_s)),
        hanging=any(now_s < entry.time_s + SETTLES_S for entry in open_),
    )


def _there(entries: Iterable[Entry]) -> dict[str, float]:
    """What was made and not removed, with when that was."""
    there: dict[str, float] = {}
    for entry in entries:
        if entry.event == "done" and entry.makes not in (None, "object"):
            there |= dict.fromkeys(entry.ids, entry.time_s)
        elif entry.event == "done":
            for id_ in entry.ids:
                there.pop(id_, None)
    return there


def last_made_s(entries: Iterable[Entry]) -> float | None:
    """When something was last made that is not known to be removed; None: nothing is."""
    return max(_there(entries).values(), default=None)


def remember_region(home: Path, region: str) -> None:
    """Note that something may be rented in a region, before it is. The file outlives the folders of runs."""
    if region not in known_regions(home):
        home.mkdir(parents=True, exist_ok=True)
        append_durably(home / REGIONS_FILE, region)


def known_regions(home: Path) -> list[str]:
    """Every region that anything was ever rented in from here."""
    try:
        lines = (home / REGIONS_FILE).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return []
    return sorted(set(lines))


def append_durably(path: Path, line: str) -> None:
    """Append one line and wait until it is on the disk.

    Raises:
        BadInput: the file cannot be written. Nothing may be rented then.
    """
    try:
        new = not path.exists()
        with path.open("ab+") as stream:
            if stream.tell() and not _ends_line(stream.fileno(), stream.tell()):
                stream.write(b"\n")  # the process before died in the middle of its last line
            stream.write(line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            _sync_folder(path.parent)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}.", hint="nothing is rented without it; make room and try again"
        ) from None


def _ends_line(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not know it, and need it not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(line: str) -> Entry | None:
    try:
        found: Any = parse_json(line, origin="the ledger")
        if not isinstance(found, Mapping):
            return None
        return Entry(**{**found, "ids": tuple(found.get("ids", ()))})
    except (BadInput, ValueError, TypeError):
        return None
