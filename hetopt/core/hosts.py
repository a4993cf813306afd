"""The user's own machines, from a ``hosts.toml`` or from ``alice@box1,bob@box2:2222`` on a command line.

usd_per_kwh = 0.30                 # what stands above the tables holds for every host

[box1]                             # its name in plans, runs and reports
address = "box1.lan"               # as `ssh` takes it: a name, a number, or a Host of ~/.ssh/config; absent: the name
devices = ["RTX 3090", "RTX 3090"] # a worker each; absent: the CPU, one worker
kw = 0.7                           # drawn while training
hours = "18:00-08:00"              # when it may be used, in this machine's time; absent: always
"""

import datetime
import ipaddress
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from hetopt.core.artifact import Record, validated
from hetopt.core.errors import BadInput
from hetopt.core.paths import HOST_PATTERN, host_name, read_text, shown
from hetopt.core.plain_text import known

CPU = "cpu"
"""Name of the device of a host that computes on its processors."""

MOST_HOSTS = 256
MOST_DEVICES = 64
DEFAULT_PYTHON = "python3"
DEFAULT_FOLDER = "~/.cache/hetopt"

_USER = r"[A-Za-z_][A-Za-z0-9._-]{0,63}"
_ADDRESS = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[?(?=[^:]*:[^:]*:)[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?\]?"
_HOP = re.compile(rf"(?:({_USER})@)?({_ADDRESS})(?::([0-9]{{1,5}}))?")
_PATH = r"[^\x00-\x1f-][^\x00-\x1f]{0,999}"
_GPU = r"[A-Za-z0-9][\w .+-]{0,79}"
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]|24):([0-5]\d)")
_NO_FILE_HINT = (
    """name the machines, `hosts=alice@box1,bob@box2`, or write the file: [box1], and below address = "box1\""""
)
_FILE_HINT = "correct it there; docs/ssh.md shows one"
_MOST_BYTES = 1_000_000
_MINUTES = 24 * 60


def _must_be(what: str) -> PydanticCustomError:
    """Return a fault worded as those of pydantic's own types (`hetopt.core.artifact`)."""
    return PydanticCustomError("host", "Input should be {what}", {"what": what})


def _shaped(pattern: str, what: str) -> AfterValidator:
    """Return a validator that accepts printable texts of a whole pattern; ``what``: what a text must be, for errors."""

    def check(text: str) -> str:
        """Return the text if it matches the pattern and is printable; refuse another."""
        if re.fullmatch(pattern, text) is None or not text.isprintable():
            raise _must_be(what)
        return text

    return AfterValidator(check)


def _hops(text: str) -> str:
    """Return the text if it lists hosts to go through, ``USER@ADDRESS:PORT`` with commas; refuse another."""
    try:
        _hosts_at(text)
    except BadInput:
        raise _must_be("hosts to go through, such as alice@gateway:22") from None
    return text


def _address_of_one(text: str) -> str:
    """Return one machine's IP address in its usual form; refuse another text, and an address of all or many."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _must_be("an address, such as 10.0.0.5") from None
    if address.is_unspecified or address.is_multicast:
        raise _must_be("the address of one machine, such as 10.0.0.5")
    return str(address)


def _in_private_network(text: str) -> str:
    """Return an IP address that strangers do not reach, as workers listen there; refuse another."""
    address = _address_of_one(text)
    if ipaddress.ip_address(address).is_global:
        raise _must_be("its address in a private network, such as 10.0.0.5")
    return address


def _of_one_kind(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return a host's devices if they are GPUs alone or ``cpu`` alone; refuse a mixture."""
    if CPU in devices and any(device != CPU for device in devices):
        raise _must_be("GPUs, or cpu, and not both")
    return devices


Address = Annotated[
    str,
    _shaped(_ADDRESS, "a host's name or number alone, such as box1.lan or 10.0.0.5"),
    AfterValidator(lambda text: text.strip("[]")),
]
User = Annotated[str, _shaped(_USER, "a user's name, such as alice")]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
File = Annotated[str, _shaped(_PATH, "a path, such as ~/venv/bin/python")]
Amount = Annotated[float, Field(gt=0, strict=True)]
AddressAmongHosts = Annotated[str, AfterValidator(_address_of_one)]
"""IP address of one machine, at which its workers listen and by which hosts meet."""
Device = Annotated[
    str,
    _shaped(_GPU, "the name of a GPU, such as RTX 3090, or cpu"),
    AfterValidator(lambda name: CPU if name.lower() == CPU else name),
]
Devices = Annotated[
    tuple[Device, ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    Field(min_length=1, max_length=MOST_DEVICES),
    AfterValidator(_of_one_kind),
]


class Hours(Record):
    """The hours at which a machine may be used: ``18:00-08:00``, or several with commas between them.

    Attributes:
        spans: minutes of the day at which each span begins and ends; where the end is not later than the begin, it is
            of the next day.
    """

    spans: tuple[tuple[int, int], ...]

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        """Return hours as minutes of the day, from a text of spans; no spans, which are refused, if one is misspelt."""
        if not isinstance(given, str):
            return given
        matches = [_HOURS.fullmatch(part.strip()) for part in given.split(",")]
        spans = [
            (60 * int(match[1]) + int(match[2]), 60 * int(match[3]) + int(match[4]))
            for match in matches
            if match is not None
        ]
        return {"spans": spans if len(spans) == len(matches) else ()}

    @model_validator(mode="after")
    def _of_a_day(self) -> Self:
        """Return the hours if there is a span and each is within a day and not empty; refuse others."""
        if not self.spans or any(
            not (0 <= begin < _MINUTES and 0 <= end <= _MINUTES) or begin == end for begin, end in self.spans
        ):
            raise _must_be("from when to when, such as 18:00-08:00")
        return self

    def has(self, moment: datetime.datetime) -> bool:
        """Return whether a moment, in this machine's local time, is within the hours; a span's end is not."""
        minute = 60 * moment.hour + moment.minute
        return any(
            begin <= minute < end if begin < end else minute >= begin or minute < end for begin, end in self.spans
        )


class Host(Record):
    """A machine that the user owns: how ssh reaches it, its devices, its cost, and when it may be used.

    Attributes:
        name: name of the host in plans, runs and reports.
        address: name or number that `ssh` takes.
        user: name there; None: as ssh's configuration says.
        port: port of ssh; None: as ssh's configuration says.
        key: file of a private key; None: ssh's configuration and agent.
        jump: hosts to go through, ``alice@gateway:22``, with commas between them; None: none.
        private: address among the other hosts; None: the one by which ssh reaches it.
        devices: device of each worker: ``cpu``, or the name of a GPU.
        usd_per_hour: cost of an hour; None: by ``kw``, or not known. One of both at most is given.
        kw: electric power that the host draws while training, in kW; None: not known.
        usd_per_kwh: price of electricity; ``kw`` needs it.
        hours: when the host may be used; None: always.
        python: an interpreter there that has torch.
        install: whether each run makes an environment of its own there, from the locked packages; it goes with the run.
        folder: folder where a run has its files while it lasts; nothing else is written.
        memory_gib: memory of the machine, for plans; None: not known.
        cpus: logical processors, for plans; None: not known.
        network_mbit: rate of its link in Mbit/s, for plans; None: not known.
    """

    name: Annotated[str, _shaped(HOST_PATTERN, "of letters, digits and ._-, such as box1")]
    address: Address
    user: User | None = None
    port: Port | None = None
    key: File | None = None
    jump: Annotated[str, AfterValidator(_hops)] | None = None
    private: Annotated[str, AfterValidator(_in_private_network)] | None = None
    devices: Devices = (CPU,)
    usd_per_hour: Amount | None = None
    kw: Amount | None = None
    usd_per_kwh: Amount | None = None
    hours: Hours | None = None
    python: File = DEFAULT_PYTHON
    install: Annotated[bool, Field(strict=True)] = False
    folder: File = DEFAULT_FOLDER
    memory_gib: Amount | None = None
    cpus: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = None
    network_mbit: Amount | None = None

    @model_validator(mode="after")
    def _costs_once(self) -> Self:
        """Return the host; raise `ValueError` if it costs by the hour and by power, or its power has no price."""
        if self.usd_per_hour is not None and self.kw is not None:
            raise ValueError("`usd_per_hour` and `kw` are both given: say its whole cost an hour, or what it draws")
        if self.kw is not None and self.usd_per_kwh is None:
            raise ValueError("`kw` needs the price of that: add usd_per_kwh = 0.30, for example")
        return self

    @property
    def through(self) -> tuple["Host", ...]:
        """The jump hosts that ssh goes through, the nearest first; empty: none."""
        return () if self.jump is None else _hosts_at(self.jump)

    @property
    def way(self) -> str:
        """The address, port and hops by which ssh reaches the host; the same text means the same machine."""
        return f"{self.address} {self.port} {self.jump}"

    @property
    def reached_as(self) -> str:
        """The ssh address for people: ``box1 (alice@box1.lan:2222 through gateway)``."""
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        way = f"{user}{self.address}{port}" + (f" through {self.jump}" if self.jump else "")
        return self.name if way == self.name else f"{self.name} ({way})"

    @property
    def cost_usd_per_hour(self) -> float | None:
        """The cost of an hour of training on the host: as the inventory says, or its electricity; None: not known."""
        if self.usd_per_hour is not None:
            return self.usd_per_hour
        return None if self.kw is None or self.usd_per_kwh is None else self.kw * self.usd_per_kwh

    @property
    def cost_in_words(self) -> str:
        """The source of the hourly cost: '0.45 kW at $0.3 a kWh'; 'as the inventory says' where that is all."""
        if self.usd_per_hour is not None or self.kw is None:
            return "as the inventory says"
        return f"{self.kw:g} kW at ${self.usd_per_kwh:g} a kWh"

    def may_be_used(self, moment: datetime.datetime) -> bool:
        """Return whether the host's hours allow a run at a moment, in this machine's local time."""
        return self.hours is None or self.hours.has(moment)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read the user's machines from a ``hosts.toml`` file, in its order.

    Raises:
        MissingFile: there is no such file.
        BadInput: the file cannot be read or is no TOML, names no host or over 256, names one twice, or a setting is
            unknown or invalid.
    """
    import tomllib  # a plan without hosts does not wait for it

    text = read_text(path, most_bytes=_MOST_BYTES, hint=_NO_FILE_HINT)
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} must be TOML: {str(error)[:200]}.", hint=_FILE_HINT) from None
    except RecursionError:
        raise BadInput(f"{path} is nested too deeply.", hint=_FILE_HINT) from None
    common = {key: value for key, value in given.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    for settings in (common, *tables.values()):
        for key in settings:
            known(key, sorted(Host.model_fields.keys() - {"name"}), f"setting of a host (in {path})")
    hosts = [
        validated(Host, {"address": name, **common, **table, "name": name}, origin=f"{path}, [{name}]", hint=_FILE_HINT)
        for name, table in tables.items()
    ]
    return _checked(hosts, str(path))


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse machines from ``alice@box1,bob@box2:2222``, each named after its address; other facts have defaults.

    Raises:
        BadInput: the text is not ``USER@ADDRESS:PORT`` with commas between, or names a host twice or over 256 hosts.
    """
    return _checked(_hosts_at(text), "`hosts`")


def _hosts_at(text: str) -> tuple[Host, ...]:
    """Parse hosts such as ``alice@box1,bob@box2:2222``, named after their addresses; users and ports may be left out.

    Raises:
        BadInput: a part is not written so, or a host's setting cannot be.
    """
    hosts = []
    for part in (item.strip() for item in text.split(",")):
        hop = _HOP.fullmatch(part)
        if hop is None:
            raise BadInput(
                f"`hosts` must be USER@ADDRESS:PORT with commas between them, got {shown(part)}.",
                hint="for example alice@box1,bob@box2:2222, or name a file of hosts with `inventory`",
            )
        user, address, port = hop.groups()
        given = {"name": host_name(address), "address": address, "user": user, "port": port and int(port)}
        hosts.append(validated(Host, given, origin=f"`hosts`, {part}", hint="correct it, or leave it out"))
    return tuple(hosts)


_SEEN_BY_PLANS = (
    "devices",
    "cost_usd_per_hour",
    "hours",
    "memory_gib",
    "cpus",
    "network_mbit",
)


def alike(hosts: Sequence[Host], measured: Collection[str] = ()) -> dict[str, tuple[Host, ...]]:
    """Group hosts that a plan need not tell apart; return the groups by the name of their first host.

    Alike are hosts with the same devices, cost, hours, memory, processors and network rate.

    Args:
        hosts: hosts of an inventory.
        measured: names of hosts that were measured: each is a group of its own.
    """
    groups: dict[tuple[object, ...], list[Host]] = {}
    for host in hosts:
        key = (host.name,) if host.name in measured else tuple(getattr(host, field) for field in _SEEN_BY_PLANS)
        groups.setdefault(key, []).append(host)
    return {group[0].name: tuple(group) for group in groups.values()}


def placeable(hosts: Sequence[Host], measured: Collection[str] = ()) -> dict[str, tuple[Host, ...]]:
    """Return the groups of `alike`, and hosts of mixed GPUs again with one kind of GPU alone and without that kind.

    Such a host is called after the GPUs that are used: ``box.RTX-3090``.

    Args:
        hosts: hosts of an inventory.
        measured: as of `alike`.
    """
    kinds = alike(hosts, measured)
    for group in list(kinds.values()):
        gpus = group[0].devices
        for kind in dict.fromkeys(gpus) if len(set(gpus)) > 1 else ():
            for part in (tuple(gpu for gpu in gpus if (gpu == kind) == is_alone) for is_alone in (True, False)):
                name = re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(["", *dict.fromkeys(part)]))
                some = [host.model_copy(update={"name": f"{host.name}{name}"[:80], "devices": part}) for host in group]
                kinds.setdefault(some[0].name, tuple(some))
    return kinds


def _checked(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    """Return the hosts of an inventory after checking them together.

    Raises:
        BadInput: there are none or too many, or two have one name or are reached alike.
    """
    if not 0 < len(hosts) <= MOST_HOSTS:
        raise BadInput(
            f"{where} must name 1 to {MOST_HOSTS} hosts, got {len(hosts)}.",
            hint="write a table, [box1], for each",
        )
    seen: dict[str, str] = {}
    for host in hosts:
        for what, key in (("is called", host.name), ("is reached as", host.way)):
            if key in seen:
                shown_key = host.name if what == "is called" else host.address
                raise BadInput(f"{where}: more than one host {what} {shown_key}.", hint="leave one of them out")
        seen |= {host.name: "", host.way: ""}
    return tuple(hosts)
