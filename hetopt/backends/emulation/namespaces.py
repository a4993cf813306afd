"""Builds a small network on this machine: a Linux network namespace and a rate-limited link for every host.

The hosts of network ``ab12`` are the namespaces ``hetopt-ab12-h0``, ``hetopt-ab12-h1`` and so on. Each has one link,
``eth0``, to a bridge in the namespace ``hetopt-ab12``. The bridge has a namespace of its own so that this machine's
packet filter (Docker's drops what bridges forward), its network managers and its addresses have nothing to do with it.
That namespace is made first and removed last, and whoever made it holds a lock on it as long as it lives: whatever a
killed process left can be told from a living rehearsal, and removed. The bridge's alias says what it is for.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from hetopt.backends.emulation import iproute
from hetopt.backends.emulation.iproute import NetworkRefused, file_of, kill_in, limit, namespaces
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

    def __init__(self, network_id: str, hosts: Sequence[EmulatedHost], lock: int) -> None:
        self.id = network_id
        self._lock: int | None = lock
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
                lock = _locked(network_id, fcntl.LOCK_EX)
                assert lock is not None, "its name was free"
            network = cls(network_id, hosts, lock)
            network._build(owner)
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

    address = staticmethod(host_address)

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
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        remove(self.id)

    def _build(self, purpose: str) -> None:
        switch = _switch(self.id)
        iproute.run("ip", ["link", "add", "name", _BRIDGE, "type", "bridge"], namespace=switch)
        iproute.run("ip", ["link", "set", "dev", _BRIDGE, "alias", alias_of(purpose)], namespace=switch)
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
                    f"addr add {self.address(place)}/24 dev {LINK}",
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
    """A network that exists on this machine; it may be another process's.

    Attributes:
        id: its number.
        purpose: what it is for, usually a run's folder, of a long one the end; empty where its maker did not say it.
        in_use: whether the process that made it is running.
    """

    id: str
    purpose: str
    in_use: bool


def find_networks() -> list[FoundNetwork]:
    """Every network of a rehearsal on this machine.

    Raises:
        BadInput: there are some, and this process may not look into them.
    """
    ids = sorted({found[0] for name in _all_names() if (found := _ID.match(name.removeprefix(PREFIX)))})
    return [FoundNetwork(id=id_, purpose=_purpose(id_), in_use=_is_locked(id_)) for id_ in ids]


def find_leftovers() -> list[FoundNetwork]:
    """The networks whose makers are gone. One that is being made this moment is none of them."""
    left = [network for network in find_networks() if not network.in_use]
    if left:
        time.sleep(_YOUNG_S)  # its maker may be between its first step and locking it
        left = [network for network in find_networks() if not network.in_use]
    return left


def _locked(network_id: str, how: int) -> int | None:
    """Lock a network's first namespace; returns the descriptor that holds the lock, None where another process does."""
    descriptor = os.open(file_of(_switch(network_id)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(network_id: str) -> bool:
    try:
        descriptor = _locked(network_id, fcntl.LOCK_SH)
    except OSError:
        return False  # it has just gone
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


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
    iproute.run_batch("ip", [f"netns del {name}" for name in names if name != switch], tolerates=True)
    iproute.run_batch("ip", [f"netns del {switch}"] if switch in names else [], tolerates=True)
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


def _purpose(network_id: str) -> str:
    """Return what its bridge says; empty where there is no bridge yet, or any more."""
    try:
        told = iproute.run("ip", ["-j", "link", "show", "dev", _BRIDGE], namespace=_switch(network_id))
    except NetworkRefused as error:
        if _lacks_rights(error):
            raise BadInput(f"looking into network namespaces {_RIGHTS}.", hint="run the command as root") from None
        return ""
    return str(json.loads(told)[0].get("ifalias", ""))


def alias_of(purpose: str) -> str:
    """Return a purpose as text that fits an interface; of a long one the end is kept, which tells folders apart."""
    printable = re.sub(r"\s+", " ", purpose).encode("utf-8", errors="replace")
    return printable[max(0, len(printable) - ALIAS_BYTES) :].decode("utf-8", errors="ignore")


def _lacks_rights(error: NetworkRefused) -> bool:
    return "not permitted" in error.reason or "ermission denied" in error.reason
