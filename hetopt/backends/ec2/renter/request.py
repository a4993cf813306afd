"""Calls to AWS as plain data, what each refusal of them means, the ledger of those made, and boto3 to make them.

A refusal is one line of cause, the next command to try, and whether trying again can help (``errors.toml``); the names
of botocore's own exceptions stand for what goes wrong before a call leaves this machine.

botocore takes a lack of capacity for a fault of the server, and would ask an exhausted pool five times. So it gets one
attempt, and `Retrying` decides: the same call with the same token, later, and never at an exhausted pool. What makes
things carries a token, or a name that only one thing can have, so that a second call answers what the first one made.

The ledger is flushed to the disk before a call leaves this machine, so that whatever ends the process, the names of
everything that may exist are known: the line before says what was about to be made, the line after its ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any, Literal

from pydantic import ValidationError

from hetopt.backends.ec2 import facts
from hetopt.core.artifact import Record
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.core.events.log import is_torn
from hetopt.core.search_path import install_command
from hetopt.optimizer.market.quota import quota_of
from hetopt.optimizer.plan import Market

Kind = Literal["instance", "fleet", "security-group", "launch-template", "volume", "schedule-group", "object"]
"""Kinds of what a call can make."""

Answer = Mapping[str, Any]
"""Answer of the cloud to a call, as botocore parses it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call to AWS as data: what is asked and why, what it makes, which errors it tolerates, and its cost.

    Attributes:
        step: names the call within its sequence.
        service: service of the API, such as ec2.
        operation: operation as botocore's clients spell it, such as create_fleet.
        parameters: parameters as botocore takes them.
        purpose: why, for the person who reads the list before agreeing.
        makes: kind of what exists afterwards that did not before; None: nothing.
        tolerates: error codes that mean that the wished state holds already; the call then counts as done.
        passing: error codes that go away by themselves, so that the call is tried again.
        usd_per_hour: cost from then on, at the prices of the moment.
        worst_usd_per_hour: most that it can cost.
    """

    step: str
    service: str
    operation: str
    parameters: Mapping[str, Any]
    purpose: str
    makes: Kind | None = None
    tolerates: frozenset[str] = frozenset()
    passing: frozenset[str] = frozenset()
    usd_per_hour: float = 0.0
    worst_usd_per_hour: float = 0.0

    @property
    def reads_only(self) -> bool:
        """True if the request only reads, by the name of its operation."""
        return self.operation.startswith(("describe_", "get_", "head_", "list_", "simulate_"))

    @property
    def api_name(self) -> str:
        """Service and operation as AWS spells them: 'ec2:CreateFleet'."""
        return f"{self.service}:{''.join(word.capitalize() for word in self.operation.split('_'))}"

    def shown(self) -> dict[str, object]:
        """Return the parameters as JSON for people, with the size and hash of contents in their place."""

        def described(body: bytes) -> str:
            return f"<{len(body)} bytes, sha256 {hashlib.sha256(body).hexdigest()[:12]}>"

        shown: dict[str, object] = json.loads(json.dumps(self.parameters, default=described))
        return shown


def read(service: str, operation: str, purpose: str, **parameters: Any) -> Request:
    """Return a request, named by its operation, that changes nothing; call nothing.

    Args:
        service: service of the API.
        operation: operation as botocore's clients spell it.
        purpose: why.
        parameters: parameters as botocore takes them.
    """
    return Request(step=operation, service=service, operation=operation, parameters=parameters, purpose=purpose)


Edge = Callable[[Request], Answer]
"""Makes a call and returns its answer, or raises CloudRefused: AWS itself, or what wraps it with retries and a ledger.
"""


Reaction = Literal["again", "elsewhere", "passing", "stop"]
"""What to do after a refusal. ``again``: the same call, later. ``elsewhere``: another pool, at once; the same one has
nothing for minutes. ``passing``: goes away by itself where the caller knows that. ``stop``: a person must do
something."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of some of AWS's error codes: a row of ``errors.toml``.

    Attributes:
        codes: exact codes, or patterns of them.
        reaction: what to do.
        cause: sentence for people; like ``hint``, it may name what the call was about, see `_words`.
        hint: what a person can do.
        source: page where AWS documents it.
    """

    codes: tuple[str, ...]
    reaction: Reaction
    cause: str
    hint: str
    source: str


_READ = facts.read_table("renter/errors.toml")
TABLE = tuple(Meaning(**row) for row in _READ["refusal"])
"""All rows by which refusals are read; the last, for whatever has no other, is `UNKNOWN`."""
UNKNOWN = TABLE[-1]


def meaning_of(code: str) -> Meaning:
    """Return the row for an error code of AWS: by its exact name, else the first whose pattern fits, else `UNKNOWN`."""
    exact = (row for row in TABLE if code in row.codes)
    return next(exact, None) or next(row for row in TABLE if any(fnmatchcase(code, pattern) for pattern in row.codes))


class ApiRefused(CloudRefused):
    """The error of a call that AWS refused, in words, with whether trying again can help.

    Attributes:
        code: code of the API, or the name of botocore's exception.
        reaction: whether trying again can help.
        is_known: whether the table has the code.
        may_be_done: whether the call, or an attempt before the one that was refused, may have been carried out.
    """

    def __init__(self, request: Request, code: str, text: str, *, endpoint: str = "AWS") -> None:
        """Say what the error code means in a sentence, with the hint of who denied it, where AWS's text tells.

        Args:
            request: call that was refused.
            code: AWS's error code.
            text: AWS's own words.
            endpoint: name of what answered, for people.
        """
        row = meaning_of(code)
        words = _words(request, code, text, endpoint)
        hint = next((denier["hint"] for denier in _READ["denier"] if denier["text"] in text), row.hint)
        super().__init__(f"{row.cause.format_map(words)}.", hint=hint.format_map(words))
        self.code = code
        self.reaction = row.reaction
        self.is_known = row is not UNKNOWN
        self.may_be_done = row.reaction == "again"


def if_there(edge: Edge, request: Request, absent: Collection[str] = facts.NO_OBJECT) -> Answer | None:
    """Make a call about a resource; return the answer, or None if it is refused with a code in ``absent``.

    Args:
        edge: makes the call.
        request: the call.
        absent: codes that mean that the resource does not exist; by default those of S3 objects.

    Raises:
        CloudRefused: the call is refused for any other reason.
    """
    try:
        return edge(request)
    except ApiRefused as refused:
        if refused.code in absent:
            return None
        raise


def instances_in(answer: Answer) -> dict[str, Answer]:
    """Return the machines in an answer of DescribeInstances, by instance id."""
    return {
        machine["InstanceId"]: machine for reservation in answer["Reservations"] for machine in reservation["Instances"]
    }


def _words(request: Request, code: str, text: str, endpoint: str) -> dict[str, str]:
    """Return the texts for the placeholders of ``errors.toml``, by name; arguments are those of `ApiRefused`."""
    types = instance_types_of(request)
    target = request.parameters.get("TargetCapacitySpecification", {})
    market: Market = "on-demand" if target.get("DefaultTargetCapacityType") == "on-demand" else "spot"
    quota = quota_of(types[0], market) if types else None
    fleet = request.operation == "create_fleet" and "spot" not in text.lower()
    return {
        "action": request.api_name,
        "service": request.service,
        "code": code,
        # Some refusals begin with what was just said, and end with a page of what only AWS can decode.
        "text": " ".join(text.partition("Encoded authorization failure message")[0].split())
        .removeprefix(facts.DENIED_SENTENCE)
        .strip()[:300]
        .rstrip(" .")
        or "no reason was given",
        "endpoint": endpoint,
        "types": ", ".join(types) or "machines",
        "quota": f"{quota.name}, {quota.code}" if quota else code,
        "quota_code": quota.code if quota else "CODE",
        "linked_role": facts.FLEET_SERVICE if fleet else facts.SPOT_SERVICE,
        "linked_name": "fleets" if fleet else "spot machines",
        "bucket": str(request.parameters.get("Bucket", "")),
        "key": str(request.parameters.get("Key", "")),
    }


def instance_types_of(request: Request) -> list[str]:
    """Return the instance types that a CreateFleet call asks for, each once; of any other call none."""
    configs = request.parameters.get("LaunchTemplateConfigs", ())
    types = [override["InstanceType"] for config in configs for override in config["Overrides"]]
    return list(dict.fromkeys(types))


LEDGER_FILE = "ledger.jsonl"
REGIONS_FILE = "regions"

SETTLES_S = 60.0
"""Seconds for which EC2 may not list what it has just made, nor know its id."""


class Entry(Record):
    """A line of a run's ledger of AWS calls: how a call stood at a time, and which ids it made.

    Attributes:
        call: number of the call within the run; its lines share it.
        event: ``begun``, ``done``, ``refused``, or ``lost`` where nobody knows whether it was carried out.
        time_s: when, seconds since the epoch.
        step: name of the call within its sequence.
        api_name: service and operation.
        region: AWS region.
        makes: kind of what the call makes; None: nothing.
        token: idempotency token; None: the call has none.
        ids: identifiers of what the call made or removed, in its last line.
        reason: sentence of a refusal.
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
class LedgerEdge:
    """An edge to AWS that writes a line in a ledger before and after each call that changes something.

    Calls that only read pass by.

    Attributes:
        inner: edge that makes the calls.
        path: path of the ledger; each line is on the disk before the next thing happens.
        region: region that lines name.
        clock: returns seconds since the epoch.
    """

    inner: Edge
    path: Path
    region: str
    clock: Callable[[], float]

    def __call__(self, request: Request) -> Answer:
        """Make the call; one that changes something has a line in the ledger before and after it.

        Raises:
            BadInput: the ledger cannot be written; nothing is called then.
            CloudRefused: the call is refused; the ledger says so.
        """
        if request.reads_only:
            return self.inner(request)
        call = sum(entry.event == "begun" for entry in read_ledger(self.path))
        token = request.parameters.get("ClientToken")
        self._write(request, call, "begun", token=token if isinstance(token, str) else None)
        try:
            answer = self.inner(request)
        except HetoptError as error:
            unknown = isinstance(error, ApiRefused) and error.may_be_done
            self._write(request, call, "lost" if unknown else "refused", reason=error.message)
            raise
        self._write(request, call, "done", ids=tuple(made_ids(request, answer)))
        return answer

    def _write(self, request: Request, call: int, event: str, **more: Any) -> None:
        """Write down how a call stands, and what it made, or why it did not; see `Entry`."""
        entry = Entry(
            call=call,
            event=event,
            time_s=round(self.clock(), 3),
            step=request.step,
            api_name=request.api_name,
            region=self.region,
            makes=request.makes,
            **more,
        )
        append_durably(self.path, entry.model_dump_json(exclude_defaults=True))


_ID = re.compile(r'"((?:i|lt|sg|vol)-[0-9a-f]{8,})"')


def made_ids(request: Request, answer: Answer) -> list[str]:
    """Return the ids of resources that a call made, from its answer, or removed, from its parameters; else none."""
    if request.operation in ("create_schedule_group", "delete_schedule_group"):
        return [str(request.parameters["Name"])]
    removes = request.operation.startswith(("delete_", "terminate_"))
    source = request.parameters if removes else answer if request.makes is not None else {}
    return list(dict.fromkeys(_ID.findall(json.dumps(source, default=str))))


def read_ledger(path: Path) -> list[Entry]:
    """Read the entries of a ledger, none if there is no file; skip lines that cannot be read, as cut off by a crash."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValidationError):
            entries.append(Entry.model_validate_json(line))
    return entries


def unresolved(entries: Iterable[Entry]) -> list[Entry]:
    """Return the ``begun`` entries, in order, of calls whose end nobody knows: the process died, or no answer came.

    An entry ``lost``, of a try without an answer, leaves its call open.
    """
    open_: dict[int, Entry] = {}
    for entry in entries:
        if entry.event == "begun":
            open_[entry.call] = entry
        elif entry.event != "lost":
            open_.pop(entry.call, None)
    return list(open_.values())


@dataclass(frozen=True, kw_only=True)
class Made:
    """The ids that a run has made and not removed, by its ledger, and how long EC2 may not list them all.

    Attributes:
        ids: identifiers of machines, templates and groups.
        settles_s: seconds for which EC2 may not list all of these yet; 0: it lists them.
        hanging: whether something may have been made, within the last minute, by a call whose answer nobody has.
    """

    ids: tuple[str, ...] = ()
    settles_s: float = 0.0
    hanging: bool = False


def made(entries: Sequence[Entry], now_s: float) -> Made:
    """Return what a run has made and not removed, by the entries of its ledger, as of ``now_s`` (epoch seconds).

    Args:
        entries: entries of the ledger.
        now_s: seconds since the epoch.
    """
    ids = existing_ids(entries)
    open_ = [entry for entry in unresolved(entries) if entry.makes not in (None, "object")]
    newest_s = max((entry.time_s for entry in entries if entry.makes not in (None, "object")), default=-SETTLES_S)
    return Made(
        ids=tuple(ids),
        settles_s=min(SETTLES_S, max(0.0, newest_s + SETTLES_S - now_s)),
        hanging=any(now_s < entry.time_s + SETTLES_S for entry in open_),
    )


def existing_ids(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the ids that were made and not removed, by a ledger's entries, with when each was made (epoch seconds)."""
    made_s: dict[str, float] = {}
    for entry in entries:
        if entry.event == "done" and entry.makes not in (None, "object"):
            made_s |= dict.fromkeys(entry.ids, entry.time_s)
        elif entry.event == "done":
            for id_ in entry.ids:
                made_s.pop(id_, None)
    return made_s


def known_regions(home: Path) -> list[str]:
    """Read the sorted names of all regions that anything was ever rented in from this machine; none without a file."""
    path = home / REGIONS_FILE
    return sorted(set(path.read_text(encoding="utf-8").split())) if path.exists() else []


def append_durably(path: Path, line: str) -> None:
    """Append a line to a file, and wait until it is on the disk; an unfinished line before it is ended first.

    Args:
        path: path of the file, made if it is not there.
        line: without its line end.

    Raises:
        BadInput: the file cannot be written. Nothing may be rented then.
    """
    try:
        with path.open("ab+") as stream:
            if is_torn(stream.fileno()):
                stream.write(b"\n")
            stream.write(line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())  # of a new file this commits its name, too (ext4, xfs, btrfs)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}.", hint="nothing is rented without it; make room and try again"
        ) from None


_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60


class BotoEdge:
    """An edge to AWS in a region by boto3, with one attempt for each call. Clients are made when first needed.

    Args:
        region: AWS region.

    Raises:
        BadInput: boto3 is not installed.
    """

    def __init__(self, region: str) -> None:
        """Prepare, without a call.

        Raises:
            BadInput: boto3 is not installed.
        """
        try:
            import boto3
        except ImportError:
            raise BadInput("renting needs boto3, which is not installed.", hint=install_command("aws")) from None
        self.region = region
        self._session_class = boto3.Session
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def __call__(self, request: Request) -> Answer:
        """Make the call, and return its answer; a list is read to its last page, a body to its end.

        Raises:
            ApiRefused: AWS refuses the call, or cannot be reached.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        endpoint = os.environ.get("AWS_ENDPOINT_URL", f"{request.service} in {self.region}")
        try:
            answer: dict[str, Any] = self._call(self._client(request.service), request)
        except ClientError as error:
            refusal = error.response.get("Error", {})
            raise ApiRefused(
                request, str(refusal.get("Code", "Unknown")), str(refusal.get("Message", "")), endpoint=endpoint
            ) from None
        except (BotoCoreError, ResponseParserError, ValueError) as error:  # the last: an address that is none
            raise ApiRefused(request, type(error).__name__, str(error), endpoint=endpoint) from None
        answer.pop("ResponseMetadata", None)
        return answer

    def _call(self, client: Any, request: Request) -> dict[str, Any]:
        """Make the call; return all pages of its answer, where it has several."""
        if request.reads_only and client.can_paginate(request.operation):
            pages = client.get_paginator(request.operation).paginate(**request.parameters)
            joined: dict[str, Any] = pages.build_full_result()
            return joined
        answer: dict[str, Any] = getattr(client, request.operation)(**request.parameters)
        body = answer.get("Body")
        if body is not None and hasattr(body, "read"):
            answer["Body"] = body.read()
        return answer

    def _client(self, service: str) -> Any:
        """Return the boto3 client of a service, made once; BotoCoreError: the configuration of AWS cannot be read."""
        from botocore.config import Config

        if service not in self._clients:
            config = Config(
                retries={"total_max_attempts": 1},
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                user_agent_extra="hetopt",
                # A pool of sockets for each client of a command that lives for seconds is not worth its keep.
                max_pool_connections=4,
            )
            if self._session is None:
                self._session = self._session_class(region_name=self.region)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]


ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0
PATIENCE_S = 300.0
"""Seconds for which a call is repeated that fails for a passing reason: interfaces leave a group when their machines
have ended, which takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """An edge to AWS that makes a call again where that can help, and waits longer each time (equal jitter).

    Attributes:
        inner: edge that makes the calls.
        sleep: waits for so many seconds.
        random: source of the waits.
        attempts: most attempts of a call.
        patience_s: seconds for which a call is repeated that fails for a passing reason.
    """

    inner: Edge
    sleep: Callable[[float], None]
    random: Random
    attempts: int = ATTEMPTS
    patience_s: float = PATIENCE_S

    def __call__(self, request: Request) -> Answer:
        """Make the call, several times if need be; return its answer, empty where the refusal is one that it tolerates.

        Attempts are repeated while the refusal passes by itself, or may mean that nothing was done; it sleeps between
        them.

        Raises:
            ApiRefused: the refusal of the last attempt.
        """
        waited_s, attempt, unanswered = 0.0, 0, False
        while True:
            attempt += 1
            try:
                return self.inner(request)
            except ApiRefused as refused:
                if refused.code in request.tolerates:
                    return {}
                # Whatever it says: an attempt before it that nobody answered may have been carried out.
                unanswered = unanswered or refused.reaction == "again"
                refused.may_be_done = unanswered
                passing = refused.code in request.passing and waited_s < self.patience_s
                again = refused.reaction == "again" and attempt < self.attempts
                if not (passing or again):
                    raise
            wait_s = wait_before(attempt, self.random)
            self.sleep(wait_s)
            waited_s += wait_s


def wait_before(attempt: int, random: Random) -> float:
    """Return the seconds to wait after ``attempt`` attempts, at random from c/2 to c = min(20, 2^(attempt - 1))."""
    ceiling = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
    return random.uniform(ceiling / 2, ceiling)


def connect(region: str) -> Edge:
    """Return an edge to a region by boto3, with retries and no ledger: for calls of no run, or that only read.

    Raises:
        BadInput: boto3 is not installed.
    """
    return Retrying(inner=BotoEdge(region), sleep=time.sleep, random=Random())


def connect_run(
    region: str, run_dir: Path, home: Path, inner: Edge | None = None, clock: Callable[[], float] = time.time
) -> Edge:
    """Return an edge that records the changing calls of a run in its ledger, and keep its region in ``home``.

    Args:
        region: AWS region in which the run rents.
        run_dir: the run's folder, which holds its ledger.
        home: folder in which the regions that were ever used are kept.
        inner: edge that makes the calls; None: `connect`.
        clock: returns seconds since the epoch.

    Raises:
        BadInput: boto3 is not installed, or the region cannot be written down.
    """
    # Before something may be rented there. The file outlives the folders of runs.
    if region not in known_regions(home):
        home.mkdir(parents=True, exist_ok=True)
        append_durably(home / REGIONS_FILE, region)
    return LedgerEdge(inner=inner or connect(region), path=run_dir / LEDGER_FILE, region=region, clock=clock)
