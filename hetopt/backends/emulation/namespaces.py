"""Builds a small network on this machine: a Linux network namespace and a rate-limited link for every host.

The hosts of network ``ab12`` are the namespaces ``hetopt-ab12-h0``, ``hetopt-ab12-h1`` and so on. Each has one link,
``eth0``, to a bridge in the namespace ``hetopt-ab12``. The bridge has a namespace of its own so that this machine's
packet filter (Docker's drops what bridges forward), its network managers and its addresses have nothing to do with it.
That namespace is made first and removed last, and the bridge carries its `Owner`: whatever a killed process left can be
told from a living rehearsal, and removed, without any file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from hetopt.backends.emulation import iproute
from hetopt.backends.emulation.iproute import NetworkRefused, file_of, kill_in, limit, namespaces, pids_in
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.interruption import in_one_piece
from hetopt.core.scaled_emulation import EmulatedHost
from hetopt.trainer.host.forks import ForkedProcess, ForkServer

PREFIX = "hetopt-"
LINK = "eth0"
"""What every host calls its link."""
MOST_HOSTS = 154
_FIRST_OCTET = 101  # three digits each: addresses sort as text as the hosts do, which is how torchrun ranks them
_BRIDGE = "switch"
_ID = re.compile(r"[0-9a-f]{4}")
_YOUNG_S = 0.5
_PROBE = "a look at what is possible here"
_RIGHTS = "needs root or CAP_NET_ADMIN and CAP_SYS_ADMIN"

ALIAS_BYTES = 255  # IFALIASZ in <linux/if.h>, less the final zero

_CONGESTION_CONTROL = "reno"
"""In every kernel and open to every namespace, so that links behave alike on all machines. BBR, the default of some,
takes the burst of an idle link for its rate."""


def host_address(place: int) -> str:
    """The address of the host at this place, counted from 0; the same in every network."""
    return f"10.77.0.{_FIRST_OCTET + place}"


class EmulatedNetwork:
    """A network that this process has made, and removes. A context manager."""

    def __init__(self, network_id: str, hosts: Sequence[EmulatedHost]) -> None:
        self.id = network_id
        self._hosts = tuple(hosts)
        self._rates: dict[int, float | None] = {}
        self._children: dict[int, list[subprocess.Popen[bytes] | ForkedProcess]] = {}

    @classmethod
    def create(cls, hosts: Sequence[EmulatedHost], *, owner: str) -> EmulatedNetwork:
        """Make a network of these hosts, their links at their rates.

        Args:
            hosts: in order of their addresses.
            owner: what the network is for, such as the folder of a run; `hetopt gc` tells it to a person.

        Raises:
            BadInput: there are more hosts than addresses.
            NetworkRefused: this process may not make networks, or the kernel lacks a part (see `why_not`).
        """
        check_size(len(hosts))
        claimed: list[str] = []
        try:
            with in_one_piece():  # a signal in the middle of it would leave a namespace that nobody knows of
                claimed.append(network_id := _claim_id())
            network = cls(network_id, hosts)
            network._build(Owner.this_process(owner))
        except BaseException:
            for each in claimed:
                remove(each)
            raise
        return network

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def address(self, place: int) -> str:
        """The address of a host."""
        return host_address(place)

    def namespace(self, place: int) -> str:
        """The name of a host's namespace, for `ip netns exec`."""
        return _namespace(self.id, self._hosts[place])

    def set_rates(self, rates_bits_per_s: Mapping[int, float | None]) -> None:
        """Give links new rates, both directions, while traffic flows. None lifts the limit.

        A smaller bucket would never let a packet pass that is larger than it, and the packets behind that one neither:
        the kernel hands on up to 64 kB at once, and keeps what is queued when a bucket is changed. So a link that
        becomes slower begins with an empty queue, and what was in it is sent again.
        """
        ports: list[str] = []
        for place, rate in rates_bits_per_s.items():
            before = self._rates.get(place)
            commands: list[str] = []
            if before is not None and (rate is None or rate < before):
                commands.append("qdisc del dev {device} root")
            if rate is not None:
                commands.append("qdisc replace dev {device} root " + limit(rate))
            self._rates[place] = rate
            if commands:
                own = [command.format(device=LINK) for command in commands]
                iproute.run_batch("tc", own, namespace=self.namespace(place))
                ports += [command.format(device=_port(place)) for command in commands]
        if ports:
            iproute.run_batch("tc", ports, namespace=_switch(self.id))

    def take_down(self, place: int) -> None:
        """Take a host's link down, so that nothing reaches it."""
        iproute.run("ip", ["link", "set", "dev", _port(place), "down"], namespace=_switch(self.id))

    def bring_up(self, place: int) -> None:
        """Bring a host's link up again."""
        iproute.run("ip", ["link", "set", "dev", _port(place), "up"], namespace=_switch(self.id))

    def popen(
        self,
        place: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host. It is a direct child of this process."""
        inside = iproute.command("ip", ["netns", "exec", self.namespace(place), *arguments])
        process = subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env)
        self._children.setdefault(place, []).append(process)
        return process

    def fork(
        self,
        place: int,
        server: ForkServer,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes],
    ) -> ForkedProcess:
        """Start a process on a host, as `popen` does, that is a fork of one that has imported what it needs.

        Raises:
            NoFork: it cannot be one; see `ForkServer.start`.
        """
        process = server.start(arguments, environment=env, stdout=output, network=file_of(self.namespace(place)))
        self._children.setdefault(place, []).append(process)
        return process

    def pids(self, place: int) -> list[int]:
        """The processes that run on a host."""
        return pids_in([self.namespace(place)])

    def kill(self, place: int) -> None:
        """Kill every process on a host, and wait until they are gone.

        Raises:
            RunFailed: one of them cannot be killed.
        """
        children = self._children.pop(place, [])
        for process in children:
            process.kill()  # it may not have entered the namespace yet
        kill_in([self.namespace(place)])
        for process in children:
            process.wait()  # or it would stay in the process table as a zombie

    def remove(self) -> None:
        """Remove the network and kill what still runs in it. Once more does no harm."""
        for place in list(self._children):
            self.kill(place)
        remove(self.id)

    def _build(self, owner: Owner) -> None:
        switch = _switch(self.id)
        # The owner first: until it is there, nobody can tell this network from a leftover.
        iproute.run("ip", ["link", "add", "name", _BRIDGE, "type", "bridge"], namespace=switch)
        iproute.run("ip", ["link", "set", "dev", _BRIDGE, "alias", owner.alias], namespace=switch)
        places = range(len(self._hosts))
        iproute.run_batch("ip", [f"netns add {self.namespace(place)}" for place in places])
        ports = [f"link set dev {_BRIDGE} up"]
        for place in places:
            port = _port(place)
            ports.append(f"link add name {port} type veth peer name {LINK} netns {self.namespace(place)}")
            ports.append(f"link set dev {port} master {_BRIDGE} up")
        iproute.run_batch("ip", ports, namespace=switch)
        for place in places:
            iproute.run_batch(
                "ip",
                [
                    f"addr add {host_address(place)}/24 dev {LINK}",
                    "link set dev lo up",
                    f"link set dev {LINK} up",
                ],
                namespace=self.namespace(place),
            )
            tcp = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            iproute.run("ip", ["netns", "exec", self.namespace(place), "/bin/sh", "-c", tcp])
        self.set_rates({place: host.rate_bits_per_s for place, host in enumerate(self._hosts)})


@dataclass(frozen=True, kw_only=True)
class FoundNetwork:
    """A network that exists on this machine; it may be another process's."""

    id: str
    owner: Owner | None

    @property
    def in_use(self) -> bool:
        """Whether the process that made it is running."""
        return self.owner is not None and self.owner.lives


def find_networks() -> list[FoundNetwork]:
    """Every network of a rehearsal on this machine.

    Raises:
        BadInput: there are some, and this process may not look into them.
    """
    ids = sorted({found[0] for name in _all_names() if (found := _ID.match(name.removeprefix(PREFIX)))})
    return [FoundNetwork(id=network_id, owner=_owner(network_id)) for network_id in ids]


def find_leftovers() -> list[FoundNetwork]:
    """The networks whose makers are gone. One that is being made this moment is none of them."""
    left = [network for network in find_networks() if not network.in_use]
    if any(network.owner is None for network in left):
        time.sleep(_YOUNG_S)  # its maker may be between its first step and signing it
        left = [network for network in find_networks() if not network.in_use]
    return left


def remove(network_id: str) -> None:
    """Remove a network, whoever made it, and kill what still runs in it. One that is gone already is no error.

    Raises:
        BadInput: that is no network's number.
        RunFailed: something of it stays, for lack of rights or because a process cannot be killed.
    """
    if not _ID.fullmatch(network_id):
        raise BadInput(f"there is no rehearsal {network_id!r}.", hint="see `hetopt gc --dry-run`")
    switch = _switch(network_id)
    names = _names(network_id)
    kill_in(names)
    iproute.run_tolerant("ip", [f"netns del {name}" for name in names if name != switch])
    iproute.run_tolerant("ip", [f"netns del {switch}"] if switch in names else [])
    if left := _names(network_id):
        raise RunFailed(f"the network namespaces {', '.join(left)} cannot be removed.", hint="run `hetopt gc` as root")


def check_size(hosts: int) -> None:
    """Refuse more hosts than there are addresses.

    Raises:
        BadInput: so it is.
    """
    if hosts > MOST_HOSTS:
        raise BadInput(
            f"a rehearsal must have at most {MOST_HOSTS} hosts, got {hosts}.", hint="rehearse a smaller cluster"
        )


def why_not() -> str | None:
    """One sentence on why no network can be made here; None when one was made, and removed, just now."""
    if sys.platform != "linux":
        return "a rehearsal needs Linux network namespaces, and this is not Linux"
    for tool in ("ip", "tc"):
        if iproute.find_tool(tool) is None:
            return f"a rehearsal needs `{tool}` (iproute2), which is not installed"
    probe = EmulatedHost(name="h0", rate_bits_per_s=1e7)
    try:
        with EmulatedNetwork.create([probe], owner=_PROBE) as network:
            started = network.popen(0, ["true"], stderr=subprocess.PIPE)
            said = started.communicate()[1].decode(errors="replace").strip()
    except NetworkRefused as error:
        if _lacks_rights(error):
            return f"a rehearsal makes network namespaces, which {_RIGHTS}"
        return f"this machine's kernel cannot make a rehearsal's network ({error.message.rstrip('.')})"
    return f"no process can be started in a network namespace ({said})" if started.returncode != 0 else None


def _claim_id() -> str:
    """A number that no other network has; its first namespace is made, which makes it ours."""
    while True:
        network_id = secrets.token_hex(2)
        try:
            iproute.run("ip", ["netns", "add", _switch(network_id)])
        except NetworkRefused as error:
            if "File exists" in error.reason:
                continue
            raise
        return network_id


def _switch(network_id: str) -> str:
    return f"{PREFIX}{network_id}"


def _namespace(network_id: str, host: EmulatedHost) -> str:
    return f"{PREFIX}{network_id}-{host.name}"


def _port(place: int) -> str:
    return f"port{place}"


def _all_names() -> list[str]:
    return [name for name in namespaces() if name.startswith(PREFIX)]


def _names(network_id: str) -> list[str]:
    switch = _switch(network_id)
    return [name for name in namespaces() if name == switch or name.startswith(f"{switch}-")]


def _owner(network_id: str) -> Owner | None:
    """Who signed the bridge; None when there is no bridge yet (or any more), or it is not signed."""
    try:
        told = iproute.run("ip", ["-j", "link", "show", "dev", _BRIDGE], namespace=_switch(network_id))
    except NetworkRefused as error:
        if _lacks_rights(error):
            raise BadInput(f"looking into network namespaces {_RIGHTS}.", hint="run the command as root") from None
        return None
    return Owner.parse(json.loads(told)[0].get("ifalias", ""))


def _lacks_rights(error: NetworkRefused) -> bool:
    return "not permitted" in error.reason or "ermission denied" in error.reason


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that made a network, and what for.

    Attributes:
        pid: its number, which another process may have been given since.
        started_ticks: when it started, in clock ticks since boot: with the number it names one process for good, and
            unlike a time of day it does not move when somebody sets the clock.
        purpose: for a person, usually the run's folder.
    """

    pid: int
    started_ticks: int
    purpose: str

    @classmethod
    def this_process(cls, purpose: str) -> Owner:
        """The calling process as an owner, told apart from a later one of the same number by its start."""
        pid = os.getpid()
        started_ticks = _started_ticks(pid)
        if started_ticks is None:
            raise OSError(f"/proc does not know process {pid}")
        return cls(pid=pid, started_ticks=started_ticks, purpose=purpose)

    @classmethod
    def parse(cls, alias: str) -> Owner | None:
        """The owner that `alias` gave; None for any other text."""
        found = re.fullmatch(r"pid (\d+) started (\d+) for (.*)", alias, re.DOTALL)
        return cls(pid=int(found[1]), started_ticks=int(found[2]), purpose=found[3]) if found else None

    @property
    def alias(self) -> str:
        """The owner as text that fits an interface; of a long purpose the end is kept, which tells folders apart."""
        head = f"pid {self.pid} started {self.started_ticks} for "
        printable = re.sub(r"\s+", " ", self.purpose).encode("utf-8", errors="replace")
        room = ALIAS_BYTES - len(head)
        return head + printable[max(0, len(printable) - room) :].decode("utf-8", errors="ignore")

    @property
    def lives(self) -> bool:
        """Whether that process is still running; a zombie is not."""
        return _started_ticks(self.pid) == self.started_ticks


def _started_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, counted behind the name in parentheses; None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else started_ticks
