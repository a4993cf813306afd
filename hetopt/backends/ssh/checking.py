"""`hetopt hosts check`: what would keep the user's machines from training together, in a sentence each, asked at once.

Nothing is written on any of them. What they say is judged by pure functions (`own_troubles`, `troubles_between`).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hetopt.backends.ec2.facts import PYTHON
from hetopt.backends.host import entry
from hetopt.backends.ssh.gpus import places
from hetopt.backends.ssh.link import SSH, Conversation, Link
from hetopt.core.artifact import Artifact, CleanText, HostName, Record
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.formatting import bit_rate, bytes_, listed
from hetopt.core.hosts import CPU, MOST_HOSTS, AddressAmongHosts, Host, Port
from hetopt.core.plain_text import known, one_line, typed
from hetopt.core.search_path import requirement

FACTS_WITHIN_S = 40.0
WAYS_WITHIN_S = 60.0
CPU_PACKAGES_BYTES, GPU_PACKAGES_BYTES = 1.5e9, 8e9
"""Of the locked packages once they are installed; `catalogs/aws/provisioning.json` has what was measured of each."""
LEAST_FREE_BYTES = 2e9
"""Bytes that a run needs on a host's disk: the code, a few megabytes, and two checkpoints of a model of a hundred
megabytes."""


Count = Annotated[int, Field(ge=0, le=2**60)]
"""A number of bytes, files or processors."""
Rate = Annotated[float, Field(ge=0, le=2**64)]
"""A rate in bits a second."""


class Seen(Record):
    """A host's report on itself.

    Attributes:
        python: major and minor version of its interpreter.
        executable: path of the interpreter.
        cpus: processors that its processes may use.
        memory_bytes: bytes of the machine; None: not known.
        writable: whether its folder can be written.
        there: the nearest existing folder at or above the host's folder.
        free_bytes: free on the disk of that folder.
        packages: versions of the packages that training needs; None: not installed.
        installs: why no environment can be made there; None: one can, or none is wanted.
        gpus: rows of `nvidia-smi` (name, memory, driver, compute capability); or its error as a text.
        torch_trouble: why its torch cannot use its GPUs; None: it can, or none are used.
        left: folders that earlier runs left there.
        address: IP address that the other hosts use; None: not known.
        port: port on which it listens for them; None: it cannot.
        listen_trouble: why it cannot listen; None: it can.
    """

    python: tuple[Count, Count]
    executable: CleanText
    cpus: int = Field(ge=1, le=4096)
    memory_bytes: Count | None
    writable: bool
    there: CleanText
    free_bytes: Count
    packages: dict[CleanText, CleanText | None]
    installs: CleanText | None = None
    gpus: tuple[Annotated[tuple[CleanText, ...], Field(min_length=1)], ...] | CleanText
    torch_trouble: CleanText | None = None
    left: tuple[CleanText, ...] = ()
    address: AddressAmongHosts | None
    port: Port | None
    listen_trouble: CleanText | None


class Ways(Record):
    """A host's links to other hosts, by their names.

    Attributes:
        reached: 'yes', or why the other host was not reached.
        rates: bits a second to the other host, and back, where that was measured.
    """

    reached: dict[CleanText, CleanText]
    rates: dict[CleanText, tuple[Rate, Rate]]


@dataclass(frozen=True, kw_only=True)
class Suggested:
    """A setting of a host that plans need and the inventory lacks, with the value measured there.

    Attributes:
        setting: name of the field of `Host`.
        value: whole megabits a second, tenths of a GiB or a number, rounded down: a plan that counts on more than there
            is would be late.
        source: phrase on where the value comes from.
    """

    setting: str
    value: float
    source: str


@dataclass(frozen=True)
class Trouble:
    """A sentence on what would keep a host from training, or should be known, with what mends it.

    Attributes:
        said: sentence without its full stop.
        hint: what mends it.
        verdict: ``bad``: it keeps the host from training; ``unknown``: it does not.
    """

    said: str
    hint: str
    verdict: Literal["bad", "unknown"] = "bad"


@dataclass(frozen=True, kw_only=True)
class HostFound:
    """The result of checking a host: its report, troubles, link rates, and settings that its inventory lacks.

    Attributes:
        name: name of the host.
        seen: its report on itself; None: it could not be asked.
        troubles: the worst first; empty: none.
        rates: bits a second to another host, and back, by its name; empty: not measured.
        for_plans: settings that plans need and its inventory lacks, as far as they were measured.
    """

    name: str
    seen: Seen | None = None
    troubles: tuple[Trouble, ...] = ()
    rates: Mapping[str, tuple[float, float]]
    for_plans: tuple[Suggested, ...] = ()

    @property
    def verdict(self) -> Literal["good", "bad", "unknown"]:
        """The worst verdict on the host; good: it has no troubles."""
        return self.troubles[0].verdict if self.troubles else "good"


def check_hosts(hosts: Sequence[Host], link: Link = SSH) -> tuple[HostFound, ...]:
    """Ask all hosts at once about themselves and their links to each other; return a result for each, in order.

    Nothing is written on them. A host that cannot be reached has that as its trouble.

    Args:
        hosts: hosts to ask, at least one.
        link: the way to them.

    Raises:
        BadInput: the command that reaches them (ssh) cannot be started here.
    """
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        talks = [Conversation(host=host, link=link) for host in hosts]
        try:
            token = secrets.token_hex(32)
            answers = list(pool.map(lambda talk: _facts(talk, token), talks))
            seen = {host.name: answer for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, Seen)}
            wishes = _wishes(seen)
            answered_ways = list(pool.map(lambda talk: _ways(talk, wishes.get(talk.host.name)), talks))
        finally:
            list(pool.map(Conversation.end, talks))
    ways = {host.name: way for host, way in zip(hosts, answered_ways, strict=True) if way is not None}
    between = troubles_between(hosts, seen, ways)
    results = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, HetoptError):
            text = answer.message.rstrip(".").removeprefix(f"{host.name} ")
            results.append(HostFound(name=host.name, troubles=(Trouble(text, answer.hint or ""),), rates={}))
            continue
        rates = ways[host.name].rates if host.name in ways else {}
        troubles = [*own_troubles(host, answer), *between[host.name]]
        results.append(
            HostFound(
                name=host.name,
                seen=answer,
                troubles=tuple(sorted(troubles, key=lambda trouble: trouble.verdict)),
                rates=rates,
                for_plans=tuple(suggested(host, answer, rates)),
            )
        )
    return tuple(results)


def suggested(host: Host, seen: Seen, rates: Mapping[str, tuple[float, float]]) -> Iterator[Suggested]:
    """Yield the host's settings that plans need, that its inventory lacks, and that were measured there.

    Args:
        host: host as its owner describes it.
        seen: its report on itself.
        rates: bits a second to another host, and back, by its name.
    """
    if host.cpus is None:
        yield Suggested(setting="cpus", value=seen.cpus, source="read there: what its processes may use")
    if host.memory_gib is None and seen.memory_bytes is not None:
        gib = math.floor(10 * seen.memory_bytes / 2**30) / 10
        yield Suggested(setting="memory_gib", value=gib, source="read there: all of its memory")
    slowest = min(((min(both), name) for name, both in rates.items()), default=(0.0, ""))
    if host.network_mbit is None and slowest[0] >= 1e6:
        source = f"measured with {slowest[1]}: the slower direction"
        yield Suggested(setting="network_mbit", value=int(slowest[0] / 1e6), source=source)


def _facts(talk: Conversation, token: str) -> Seen | HetoptError:
    """Return a host's report on itself, or the error of a host that gives none.

    Blocks for at most `FACTS_WITHIN_S` seconds.
    """
    host = talk.host
    is_gpu_used = CPU not in host.devices and not host.install  # what is installed for a run will be that of the lock
    about = {"address": host.private, "folder": host.folder, "install": host.install, "gpu": is_gpu_used}
    try:
        return talk.begin(json.dumps({**about, "token": token}).encode() + b"\n", Seen, FACTS_WITHIN_S)
    except HetoptError as error:
        return error


def _wishes(seen: Mapping[str, Seen]) -> dict[str, dict[str, Any]]:
    """Return each host's links to try, by name: ``others`` to reach, and ``measure``, the next in a ring, for rates."""
    open_ = [(name, report.address, report.port) for name, report in seen.items() if report.port is not None]
    names = [name for name, _, _ in open_]
    after = dict(zip(names, [*names[1:], *names[:1]], strict=True))
    return {
        name: {"others": [other for other in open_ if other[0] != name], "measure": [after.get(name)]} for name in seen
    }


def _ways(talk: Conversation, wish: dict[str, Any] | None) -> Ways | None:
    """Return which of the wished hosts a host reached, and how fast; None: it was to try none, or did not answer."""
    if wish is None or not wish["others"]:
        return None
    try:
        answer = talk.ask(json.dumps(wish).encode() + b"\n", Ways, WAYS_WITHIN_S)
    except HetoptError:
        return None
    asked = {name for name, _, _ in wish["others"]}
    return Ways(
        reached={name: how for name, how in answer.reached.items() if name in asked},
        rates={name: rate for name, rate in answer.rates.items() if name in asked},
    )


def own_troubles(host: Host, seen: Seen) -> Iterator[Trouble]:
    """Yield what would keep a host from training, or should be known, by its report.

    Args:
        host: host as its owner describes it.
        seen: its report on itself.
    """
    if seen.installs is not None:
        hint = "name an interpreter that has torch, without `install`"
        yield Trouble(f"nothing can be installed there: {seen.installs}", hint)
    locked = PYTHON.removeprefix("python")
    if host.install and CPU in host.devices and ".".join(map(str, seen.python)) != locked:
        yield Trouble(
            f"it has Python {'.'.join(map(str, seen.python))}, and the locked torch for CPUs is for {locked}",
            f'name another interpreter there: python = "{PYTHON}"',
        )
    missing = [name for name in entry.PACKAGES if seen.packages.get(name) is None]
    if missing and not host.install:
        yield Trouble(
            f"{seen.executable} has no {', '.join(missing)}",
            # Debian and others let pip install nothing beside the system's own packages (PEP 668).
            f"`{typed(seen.executable)} -m venv ~/venv && ~/venv/bin/pip install "
            f"{shlex.join(map(requirement, missing))}` "
            'there, and python = "~/venv/bin/python" in the inventory; or let each run install its own, install = true',
        )
    if not seen.writable:
        yield Trouble(
            f"nothing can be written to {seen.there}", 'name a folder of yours: folder = "/data/alice/hetopt"'
        )
    packages = CPU_PACKAGES_BYTES if CPU in host.devices else GPU_PACKAGES_BYTES
    needed = LEAST_FREE_BYTES + host.install * packages
    if seen.free_bytes < needed:
        yield Trouble(
            f"{seen.there} has {bytes_(seen.free_bytes)} free, and a run needs {bytes_(needed)}",
            'make room, or name another folder: folder = "/data/alice/hetopt"',
        )
    if seen.left:
        runs = f"{len(seen.left)} run{'s' * (len(seen.left) > 1)}"
        yield Trouble(f"{runs} left files there", f"`rm -r {typed(*seen.left)}`", "unknown")
    yield from _devices(host, seen)


def _devices(host: Host, seen: Seen) -> Iterator[Trouble]:
    """Yield what is wrong with a host's GPUs: no driver, too few, others than listed, unused, or unusable by torch."""
    wanted = [device for device in host.devices if device != CPU]
    if isinstance(seen.gpus, str):
        hint = "see `nvidia-smi` there; after an update it wants a reboot"
        yield Trouble(f"the NVIDIA driver does not answer ({seen.gpus})", hint, "bad" if wanted else "unknown")
        return
    names = [gpu[0] for gpu in seen.gpus]
    there, listed_ = ", ".join(names) or "none", f"devices = {list(names)}".replace("'", '"')
    if len(wanted) > len(names):
        are = "is" if len(names) == 1 else "are"
        yield Trouble(
            f"{len(wanted)} GPUs are wanted, and there {are} {there}", "correct `devices`, or see `nvidia-smi` there"
        )
    elif places(wanted, names) is None:
        yield Trouble(f"its GPUs are {there}, and not {', '.join(wanted)}", f"correct it: {listed_}")
    elif seen.torch_trouble is not None and seen.packages.get("torch") is not None:
        hint = "install a torch that was built for its NVIDIA driver (https://pytorch.org), or a newer driver"
        yield Trouble(f"its torch cannot use its GPUs ({one_line(seen.torch_trouble).rstrip('.')})", hint)


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", text)
    return () if match is None else (int(match[1]), int(match[2]))


def troubles_between(
    hosts: Sequence[Host], seen: Mapping[str, Seen], ways: Mapping[str, Ways]
) -> dict[str, list[Trouble]]:
    """Return the troubles between hosts by host name: unequal torch, blocked links.

    Hosts without such a trouble have an empty list. torch counts where hetopt does not install it; it is no obstacle.

    Args:
        hosts: hosts in order; a single one has no links to be blocked.
        seen: reports of the hosts that answered, by name.
        ways: links of the hosts that tried them, by name.
    """
    troubles: dict[str, list[Trouble]] = {host.name: [] for host in hosts}
    unmanaged = {host.name for host in hosts if not host.install}
    torches = {
        name: torch for name, report in seen.items() if name in unmanaged and (torch := report.packages.get("torch"))
    }
    newest = max(torches, key=lambda name: _version(torches[name]), default="")
    for name in seen:
        if name in torches and _version(torches[name]) != _version(torches[newest]):
            text = f"it has torch {torches[name]}, and {newest} {torches[newest]}"
            hint = "install the same there: results of two versions differ in their last digits"
            troubles[name].append(Trouble(text, hint, "unknown"))
        troubles[name] += _unreached(name, seen, ways.get(name)) if len(hosts) > 1 else ()
    return troubles


def _unreached(name: str, seen: Mapping[str, Seen], way: Ways | None) -> Iterator[Trouble]:
    """Yield a trouble if a host's workers cannot listen, and for the other hosts that it cannot reach.

    ``way`` None: the host did not try.
    """
    if seen[name].port is None:
        text = f"its workers cannot listen on {seen[name].address or 'any address'} ({seen[name].listen_trouble})"
        yield Trouble(text, 'say by which address the others reach it: private = "192.168.1.20"')
    failed: dict[str, list[str]] = {}
    for other, how in way.reached.items() if way is not None else ():
        failed.setdefault(how, []).append(other)
    for how, others in failed.items():
        if how != "yes":
            at = f" at {seen[others[0]].address}" if len(others) == 1 else ""
            yield Trouble(
                f"it cannot reach {listed(others)}{at} ({how.lower()})",
                f"let {name} reach all ports of {listed(others)} (firewall), or have all of them in one VPN and "
                "say their addresses there: `private`",
            )


def in_words(host: HostFound) -> str:
    """Return '16 CPUs, 62 GB, 2 × RTX 3090, torch 2.13.0; 940 Mbit/s to box2, ...' on a host; '' if unreached."""
    seen = host.seen
    if seen is None:
        return ""
    names = [] if isinstance(seen.gpus, str) else [gpu[0] for gpu in seen.gpus]
    parts = (
        f"{seen.cpus} CPU{'s' * (seen.cpus != 1)}",
        *([bytes_(seen.memory_bytes)] if seen.memory_bytes else []),
        *(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)),
        f"torch {seen.packages.get('torch') or 'none'}",
    )
    rates = [f"{bit_rate(to)} to {name}, {bit_rate(back)} back" for name, (to, back) in host.rates.items()]
    return "; ".join([", ".join(parts), *rates])


INVENTORY_FILE = "inventory.json"


class Inventory(Artifact):
    """The hosts of a run, the address by which each was reached, and why some hosts are left out.

    Attributes:
        hosts: hosts as their owner describes them.
        addresses: address by which each was reached, by name.
        left_out: sentence on why a host takes no part, by name.
        bundle_sha256: hash of the code of the run.
    """

    KIND: ClassVar[str] = "inventory"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN --on ssh"

    hosts: tuple[Host, ...] = Field(min_length=1, max_length=MOST_HOSTS)
    addresses: dict[HostName, AddressAmongHosts] = Field(default_factory=dict)
    left_out: dict[HostName, CleanText] = Field(default_factory=dict)
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def host(self, name: str) -> Host:
        """Return the host with a name.

        Raises:
            BadInput: the inventory has no such host; the nearest name is told.
        """
        by_name = {host.name: host for host in self.hosts}
        return by_name[known(name, by_name, "host")]

    def fit(self) -> tuple[Host, ...]:
        """Return the hosts that can take part: all but those left out; empty: none can."""
        return tuple(host for host in self.hosts if host.name not in self.left_out)

    def address(self, name: str) -> str:
        """Return a host's address among the others: the inventory's, or else that by which it was reached.

        Raises:
            BadInput: there is no such host, or neither the inventory nor a connection tells its address.
        """
        address = self.host(name).private or self.addresses.get(name)
        if address is None:
            raise BadInput(f"{name} has no address among the others.", hint="say it: private = 192.168.1.20")
        return address
