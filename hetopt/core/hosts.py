"""Machines that a person owns: what ``hosts.toml`` says of each, or ``alice@box1,bob@box2:2222`` on a command line.

usd_per_kwh = 0.30                 # what stands above the tables holds for every host

[box1]                             # its name in plans, runs and reports
address = "box1.lan"               # as `ssh` takes it: a name, a number, or a Host of ~/.ssh/config; absent: the name
devices = ["RTX 3090", "RTX 3090"] # a worker each; absent: the CPU, one worker
kw = 0.7                           # drawn while training
hours = "18:00-08:00"              # when it may be used, in this machine's time; absent: always
busy_cpus = 2                      # it is left to others while their programs keep more CPUs than that busy
"""

from __future__ import annotations

import datetime
import ipaddress
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hetopt.core.errors import BadInput
from hetopt.core.names import known
from hetopt.core.paths import HOST_PATTERN, host_name, is_name, shown
from hetopt.core.plain_text import fault_of
from hetopt.core.reading import read_text

CPU = "cpu"
"""The device of a host that computes on its processors."""

MOST_HOSTS = 256
MOST_DEVICES = 64
DEFAULT_PYTHON = "python3"
DEFAULT_FOLDER = "~/.cache/hetopt"

_USER = r"[A-Za-z_][A-Za-z0-9._-]{0,63}"
_ADDRESS = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,15})?\]?"
_HOP = rf"({_USER}@)?({_ADDRESS})(:[0-9]{{1,5}})?"
_PATH = r"(~/|/)?[^\x00-\x1f]{1,1000}"
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]|24):([0-5]\d)")
_NO_FILE_HINT = (
    """name the machines, `hosts=alice@box1,bob@box2`, or write the file: [box1], and below address = "box1\""""
)
_FILE_HINT = "correct it there; docs/ssh.md shows one"
_MOST_BYTES = 1_000_000
_MINUTES = 24 * 60


@dataclass(frozen=True, kw_only=True)
class Hours:
    """When a machine may be used: ``18:00-08:00``, or several with commas between them.

    Attributes:
        spans: first and last minute of the day of each; where the last is not later, it is of the next day.
    """

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str, where: str) -> Hours:
        """Read what a person wrote.

        Raises:
            BadInput: it is no such text.
        """
        found = [_HOURS.fullmatch(part.strip()) for part in text.split(",")]
        spans = [(60 * int(one[1]) + int(one[2]), 60 * int(one[3]) + int(one[4])) for one in found if one is not None]
        if len(spans) < len(found) or any(end > _MINUTES or begin == end for begin, end in spans):
            raise BadInput(
                f"{where} must say from when to when, got {shown(text)}.", hint='for example "18:00-08:00", or leave it'
            )
        return cls(spans=tuple(spans))

    def has(self, moment: datetime.datetime) -> bool:
        """Whether a moment, in the time of this machine, is in them."""
        minute = 60 * moment.hour + moment.minute
        return any(
            begin <= minute < end if begin < end else minute >= begin or minute < end for begin, end in self.spans
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of its owner.

    Attributes:
        name: in plans, runs and reports.
        address: as `ssh` takes it.
        user: absent: as ssh's configuration says.
        port: likewise.
        key: the file of a private key; absent: ssh's configuration and agent.
        jump: hosts to go through, ``alice@gateway:22``, with commas between them.
        private: its address among the others, where that is not the one by which ssh reaches it.
        devices: of each worker: ``cpu``, or the name of a GPU.
        usd_per_hour: what it costs.
        kw: what it draws while training, with...
        usd_per_kwh: ...the price of that.
        hours: when it may be used; absent: always.
        busy_cpus: it is left to others while they keep more than so many of its CPUs busy; absent: it is not looked at.
        python: an interpreter there that has torch.
        install: whether each run makes an environment of its own there, from the locked packages; it goes with the run.
        folder: where a run has its files while it lasts; nothing else is written.
        memory_gib: of the machine, for plans.
        cpus: likewise.
        network_mbit: of its link, likewise.
        internet_mbit: of its way to the internet, the slower direction; absent: nothing is planned over it.
    """

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    private: str | None = None
    devices: tuple[str, ...] = (CPU,)
    usd_per_hour: float | None = None
    kw: float | None = None
    usd_per_kwh: float | None = None
    hours: Hours | None = None
    busy_cpus: float | None = None
    python: str = DEFAULT_PYTHON
    install: bool = False
    folder: str = DEFAULT_FOLDER
    memory_gib: float | None = None
    cpus: int | None = None
    network_mbit: float | None = None
    internet_mbit: float | None = None

    @property
    def cost_usd_per_hour(self) -> float | None:
        """What an hour of training on it costs: as it was said, or its electricity; None: nobody said."""
        if self.usd_per_hour is not None:
            return self.usd_per_hour
        return None if self.kw is None or self.usd_per_kwh is None else self.kw * self.usd_per_kwh

    @property
    def cost_in_words(self) -> str:
        """What that rests on: '0.45 kW at $0.3 a kWh'; 'as the inventory says' where that is all."""
        if self.usd_per_hour is not None or self.kw is None:
            return "as the inventory says"
        return f"{self.kw:g} kW at ${self.usd_per_kwh:g} a kWh"

    def may_be_used(self, moment: datetime.datetime) -> bool:
        """Whether its owner leaves it to us at a moment, in this machine's time."""
        return self.hours is None or self.hours.has(moment)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The machines of a ``hosts.toml``, in its order.

    Raises:
        BadInput: the file cannot be read, names no host, or says something of one that cannot be.
    """
    text = read_text(path, most_bytes=_MOST_BYTES, hint=_NO_FILE_HINT)
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} must be TOML: {str(error)[:200]}.", hint=_FILE_HINT) from None
    except RecursionError:
        raise BadInput(f"{path} is nested too deeply.", hint=_FILE_HINT) from None
    common = {key: value for key, value in given.items() if not isinstance(value, dict)}
    _known_keys(common, str(path))
    tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    for name in tables:
        if not is_name(HOST_PATTERN, name):
            raise BadInput(
                f"{path}: a host's name must be of letters, digits and ._-, got {shown(name)}.", hint="rename it"
            )
    hosts = [_host(name, {**common, **table}, f"{path}, [{name}]") for name, table in tables.items()]
    return _checked(hosts, str(path))


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The machines of ``alice@box1,bob@box2:2222``: each is called as its address, and is what its ssh says it is.

    Raises:
        BadInput: it is no such text.
    """
    found = []
    for part in (one.strip() for one in text.split(",")):
        hop = re.fullmatch(_HOP, part)
        if hop is None:
            raise BadInput(
                f"`hosts` must be USER@ADDRESS:PORT with commas between them, got {shown(part)}.",
                hint="for example alice@box1,bob@box2:2222, or name a file of hosts with `inventory`",
            )
        user, address, port = hop[1], hop[2], hop[4]
        given: dict[str, Any] = {"address": address}
        given |= {"user": user.removesuffix("@")} if user else {}
        given |= {"port": int(port.removeprefix(":"))} if port else {}
        found.append(_host(host_name(address), given, f"`hosts`, {part}"))
    return _checked(found, "`hosts`")


_SEEN_BY_PLANS = (
    "devices",
    "cost_usd_per_hour",
    "hours",
    "memory_gib",
    "cpus",
    "network_mbit",
    "internet_mbit",
)


def alike(hosts: Sequence[Host], measured: Collection[str] = ()) -> dict[str, tuple[Host, ...]]:
    """Hosts in which a plan sees no difference, by the name of the first.

    Args:
        hosts: of an inventory.
        measured: names of those that were measured, each of which is like no other.
    """
    found: dict[tuple[object, ...], list[Host]] = {}
    for host in hosts:
        own = (host.name,) if host.name in measured else tuple(getattr(host, field) for field in _SEEN_BY_PLANS)
        found.setdefault(own, []).append(host)
    return {group[0].name: tuple(group) for group in found.values()}


def _checked(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    """All of an inventory together."""
    if not 0 < len(hosts) <= MOST_HOSTS:
        raise BadInput(
            f"{where} must name 1 to {MOST_HOSTS} hosts, got {len(hosts)}.",
            hint="write a table, [box1], for each",
        )
    seen: dict[str, str] = {}
    for host in hosts:
        for what, key in (("is called", host.name), ("is reached as", f"{host.address} {host.port} {host.jump}")):
            if key in seen:
                shown_key = host.name if what == "is called" else host.address
                raise BadInput(f"{where}: more than one host {what} {shown_key}.", hint="leave one of them out")
        seen |= {host.name: "", f"{host.address} {host.port} {host.jump}": ""}
    return tuple(hosts)


_FIELDS = {one.name for one in fields(Host)} - {"name"}
_PATTERNS = {
    "address": (_ADDRESS, "a host's name or number, such as box1.lan or 10.0.0.5"),
    "user": (_USER, "a user's name, such as alice"),
    "key": (_PATH, "the path of a private key, such as ~/.ssh/id_ed25519"),
    "jump": (rf"{_HOP}(,{_HOP})*", "hosts to go through, such as alice@gateway:22"),
    "python": (_PATH, "an interpreter, such as ~/venv/bin/python"),
    "folder": (_PATH, "a folder, such as ~/.cache/hetopt"),
}
_AMOUNTS = {
    "usd_per_hour": "dollars an hour",
    "kw": "kilowatts",
    "usd_per_kwh": "dollars a kilowatt-hour",
    "busy_cpus": "CPUs",
    "memory_gib": "GiB",
    "network_mbit": "megabits a second",
    "internet_mbit": "megabits a second",
}
_COUNTS = {"port": 65535, "cpus": 4096}


def _known_keys(given: Mapping[str, Any], where: str) -> None:
    for key in given:
        known(key, sorted(_FIELDS), f"setting of a host (in {where})")


def _host(name: str, given: Mapping[str, Any], where: str) -> Host:
    """One host of what was written; every value that cannot be is one sentence."""
    _known_keys(given, where)
    said: dict[str, Any] = {"address": name}
    for key, value in given.items():
        said[key] = _value(key, value, where)
    host = Host(name=name, **said)
    if host.usd_per_hour is not None and host.kw is not None:
        raise BadInput(
            f"{where} says both `usd_per_hour` and `kw`.",
            hint="say its whole cost an hour, or what it draws",
        )
    if host.kw is not None and host.usd_per_kwh is None:
        raise BadInput(f"{where} says `kw`, and not what that costs.", hint="add usd_per_kwh = 0.30, for example")
    return host


def _value(key: str, value: Any, where: str) -> Any:
    if key == "address" and isinstance(value, str):
        _address_alone(value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "private":
        return _private(value, where)
    if key == "hours":
        return Hours.of(str(value), f"{where}: hours")
    if key == "devices":
        return _devices(value, where)
    if key in _PATTERNS:
        pattern, what = _PATTERNS[key]
        fits = isinstance(value, str) and fault_of(value) is None and re.fullmatch(pattern, value) is not None
    elif key in _AMOUNTS:
        what, fits = f"{_AMOUNTS[key]}, a number above 0", is_number and 0 < value < math.inf
    elif key in _COUNTS:
        what = f"a whole number from 1 to {_COUNTS[key]}"
        fits = is_number and isinstance(value, int) and 1 <= value <= _COUNTS[key]
    else:
        what, fits = "true or false", isinstance(value, bool)
    if not fits:
        raise BadInput(f"{where}: {key} must be {what}, got {shown(str(value))}.", hint=_FILE_HINT)
    return float(value) if key in _AMOUNTS else value


def _address_alone(text: str, where: str) -> None:
    """A user and a port are settings of their own.

    Raises:
        BadInput: they stand in the address.
    """
    hop = re.fullmatch(_HOP, text)
    if hop is not None and (hop[1] or hop[4]):
        user = f'user = "{hop[1][:-1]}", ' if hop[1] else ""
        port = f", port = {hop[4][1:]}" if hop[4] else ""
        raise BadInput(
            f"{where}: address must be a host's name or number alone, got {shown(text)}.",
            hint=f'a setting each: {user}address = "{hop[2]}"{port}',
        )


def _private(value: Any, where: str) -> str:
    try:
        found = ipaddress.ip_address(str(value))
    except ValueError:
        found = None
    if found is None or found.is_global or found.is_unspecified or found.is_multicast:
        raise BadInput(
            f"{where}: private must be the host's address in a private network, got {shown(str(value))}.",
            hint="for example 10.0.0.5 or 192.168.1.20: workers listen there, and strangers must not reach them",
        )
    return str(found)


def _devices(value: Any, where: str) -> tuple[str, ...]:
    """``"cpu"``, ``"RTX 3090"``, ``["RTX 3090", "GTX 1080 Ti"]``."""
    names = [value] if isinstance(value, str) else value
    fine = isinstance(names, list) and 0 < len(names) <= MOST_DEVICES
    if not fine or not all(isinstance(one, str) and re.fullmatch(r"[A-Za-z0-9][\w .+-]{0,79}", one) for one in names):
        raise BadInput(
            f"{where}: devices must be the names of 1 to {MOST_DEVICES} devices, got {shown(str(value))}.",
            hint='for example ["RTX 3090", "RTX 3090"], or "cpu"',
        )
    devices = tuple(CPU if one.lower() == CPU else one for one in names)
    if CPU in devices and any(one != CPU for one in devices):
        raise BadInput(f"{where}: devices must be GPUs, or cpu, and not both.", hint="leave cpu out")
    return devices
