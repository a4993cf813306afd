"""Builds a small network on this machine: a Linux network namespace and a rate-limited link for each host.

The hosts of network ``ab12`` are the namespaces ``hetopt-ab12-h0``, ``hetopt-ab12-h1`` and so on. Each has one link,
``eth0``, to a bridge in the namespace ``hetopt-ab12``, apart from this machine's packet filter (Docker's drops what
bridges forward), network managers and addresses. That namespace is made first and removed last, and its maker holds a
lock on it: whatever a killed process left can be told from a living rehearsal, and removed. The bridge's alias says
what it is for.

A message's bytes travel while the workers that wait for them are being woken, so that it takes less than the sum of
both: waking hardly shows where bytes take long, and bytes where they take no time.

    (waking^p + sending^p)^(1/p)

A ring all-reduce has two messages on their way at any time: waking for one overlaps with the other, and links never
rest. Whatever else is sent goes one after the other: while workers are woken the link rests, and saves up some time in
which it then sends at full speed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from hetopt.backends.processes import locks
from hetopt.core.comm.cost import Primitive
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.interruption import delay_signals
from hetopt.core.run_spec import EmulatedHost
from hetopt.optimizer.fit import LinkModel
from hetopt.trainer.host.forks import ForkedProcess, ForkServer

PREFIX = "hetopt-"
LINK = "eth0"
"""Name that every host gives its link."""
MOST_HOSTS = 154
"""Most hosts of an emulated network: as many as it has addresses."""
_FIRST_OCTET = 101  # three digits each: addresses sort as text as the hosts do, which is how torchrun ranks them
_BRIDGE = "switch"
_ID = re.compile(r"[0-9a-f]{4}")
_YOUNG_S = 0.5
_RIGHTS = "needs root or CAP_NET_ADMIN and CAP_SYS_ADMIN"


_CONGESTION_CONTROL = "reno"
"""In every kernel and open to every namespace, so that links behave alike on all machines. BBR, the default of some,
takes the burst of an idle link for its rate."""


def host_address(place: int) -> str:
    """Return the IPv4 address of the host at index ``place`` (from 0), the same in every emulated network."""
    return f"10.77.0.{_FIRST_OCTET + place}"


class EmulatedNetwork(contextlib.AbstractContextManager["EmulatedNetwork"]):
    """An emulated network that this process has made and removes: a context manager, to be made by `create`.

    Attributes:
        id: four hexadecimal digits, in the names of its namespaces.
    """

    def __init__(self, network_id: str, hosts: Sequence[EmulatedHost]) -> None:
        self.id = network_id
        self._lock: IO[bytes] | None = None
        self._hosts = tuple(hosts)
        self._rates: dict[int, float | None] = {}
        self._children: dict[int, list[subprocess.Popen[bytes] | ForkedProcess]] = {}

    @classmethod
    def create(cls, hosts: Sequence[EmulatedHost]) -> EmulatedNetwork:
        """Build a network of these hosts, with links at their rates, and lock it as in use. Needs root.

        Args:
            hosts: hosts in order of their addresses, which is that of indices from 0.

        Raises:
            BadInput: there are more hosts than addresses.
            NetworkRefused: this process may not make networks, or the kernel lacks a part (see `why_not`). Nothing is
                left.
        """
        check_size(len(hosts))
        network = cls(secrets.token_hex(2), hosts)
        with contextlib.ExitStack() as undo:
            with delay_signals():  # a signal in the middle of it would leave a namespace that nobody knows of
                run("ip", ["netns", "add", _switch(network.id)])
                undo.callback(network.remove)
                network._lock = file_of(_switch(network.id)).open("rb")
                fcntl.flock(network._lock, fcntl.LOCK_EX)  # somebody who looks for leftovers may have it for a moment
            network._build()
            undo.pop_all()
        return network

    def __exit__(self, *error: object) -> None:
        self.remove()

    address = staticmethod(host_address)

    def namespace(self, place: int) -> str:
        """Return the name of the network namespace of the host at index ``place``, for `ip netns exec`."""
        return f"{_switch(self.id)}-{self._hosts[place].name}"

    def set_rates(self, rates_bits_per_s: Mapping[int, float | None]) -> None:
        """Set links' rates (bits/s) by index of the host, in both directions, while traffic flows; None: no limit.

        A smaller bucket would never let a packet pass that is larger than it, and the packets behind that one neither:
        the kernel hands on up to 64 kB at once, and keeps what is queued when a bucket is changed. So a link that
        becomes slower begins with an empty queue, and what was in it is sent again.

        Args:
            rates_bits_per_s: new rate by index of the host; hosts that are not named keep theirs.

        Raises:
            NetworkRefused: the kernel refuses.
        """
        for place, rate in rates_bits_per_s.items():
            before, self._rates[place] = self._rates.get(place), rate
            becomes_slower = before is not None and (rate is None or rate < before)
            for namespace, device in ((self.namespace(place), LINK), (_switch(self.id), _port(place))):
                lines = [f"qdisc del dev {device} root"] if becomes_slower else []
                if rate is not None:
                    lines.append(f"qdisc replace dev {device} root {limit(rate)}")
                if lines:
                    run("tc", BATCH, namespace=namespace, lines=lines)

    def take_down(self, place: int) -> None:
        """Take down the link of the host at index ``place``, so that no packet reaches it.

        Raises:
            NetworkRefused: the kernel refuses.
        """
        run("ip", ["link", "set", "dev", _port(place), "down"], namespace=_switch(self.id))

    def bring_up(self, place: int) -> None:
        """Bring up again the link of the host at index ``place``, at the rate that it had.

        Raises:
            NetworkRefused: the kernel refuses.
        """
        run("ip", ["link", "set", "dev", _port(place), "up"], namespace=_switch(self.id))

    def popen(
        self,
        place: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host at index ``place``, as a direct child of this process; do not wait for it.

        Args:
            place: index of the host.
            arguments: command line.
            env: all of its environment; None: this process's.
            stdout: place where its output goes, as of `subprocess.Popen`.
            stderr: place where its errors go, as of `subprocess.Popen`.
        """
        inside = command("ip", ["netns", "exec", self.namespace(place), *arguments])
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
        """Start a process on the host at index ``place`` as a fork of ``server``, which has imported what it needs.

        Args:
            place: index of the host.
            server: server that forks.
            arguments: command line behind the interpreter.
            env: all of its environment.
            output: file for its output and errors.

        Raises:
            NoFork: it cannot be one; see `ForkServer.start`.
        """
        process = server.start(arguments, environment=env, stdout=output, network=file_of(self.namespace(place)))
        self._children.setdefault(place, []).append(process)
        return process

    def kill(self, place: int) -> None:
        """Kill every process on the host at index ``place``, and wait until they are gone.

        Raises:
            RunFailed: a process cannot be killed within 10 s.
        """
        children = self._children.pop(place, [])
        for process in children:
            process.kill()  # it may not have entered the namespace yet
        kill_in([self.namespace(place)])
        for process in children:
            process.wait()  # or it would stay in the process table as a zombie

    def remove(self) -> None:
        """Remove the network and kill what still runs in it; a second call does no harm.

        Raises:
            RunFailed: a process cannot be killed, or a namespace not be removed.
        """
        for place in list(self._children):
            self.kill(place)
        if self._lock is not None:
            self._lock.close()
        remove(self.id)

    def _build(self) -> None:
        """Make a namespace for each host, join all to one switch, and set the links' rates.

        NetworkRefused: a step failed.
        """
        switch = _switch(self.id)
        run("ip", ["link", "add", "name", _BRIDGE, "type", "bridge"], namespace=switch)
        places = range(len(self._hosts))
        run("ip", BATCH, lines=[f"netns add {self.namespace(place)}" for place in places])
        ports = [f"link set dev {_BRIDGE} up"]
        for place in places:
            port = _port(place)
            ports.append(f"link add name {port} type veth peer name {LINK} netns {self.namespace(place)}")
            ports.append(f"link set dev {port} master {_BRIDGE} up")
        run("ip", BATCH, namespace=switch, lines=ports)
        for place in places:
            up = [f"addr add {self.address(place)}/24 dev {LINK}", "link set dev lo up", f"link set dev {LINK} up"]
            run("ip", BATCH, namespace=self.namespace(place), lines=up)
            tcp = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            run("ip", ["netns", "exec", self.namespace(place), "/bin/sh", "-c", tcp])
        self.set_rates({place: host.rate_bits_per_s for place, host in enumerate(self._hosts)})


def find_networks() -> list[str]:
    """Return the sorted ids of all emulated networks on this machine, whichever processes made them."""
    names = (name.removeprefix(PREFIX) for name in namespaces() if name.startswith(PREFIX))
    return sorted({match[0] for name in names if (match := _ID.match(name))})


def find_leftovers() -> list[str]:
    """Return the ids of the emulated networks whose makers are gone, after 0.5 s if there are any; remove none.

    The wait lets a network that is being made lock itself.
    """
    left = [id_ for id_ in find_networks() if not is_in_use(id_)]
    if left:
        time.sleep(_YOUNG_S)  # its maker may be between its first step and locking it
        left = [id_ for id_ in find_networks() if not is_in_use(id_)]
    return left


def is_in_use(network_id: str) -> bool:
    """Return whether the process that made an emulated network is running: it holds the network's lock.

    False also if there is no such network.
    """
    with contextlib.suppress(OSError), file_of(_switch(network_id)).open("rb") as stream:  # or it has just gone
        return not locks(stream.fileno(), fcntl.LOCK_SH)
    return False


def remove(network_id: str) -> None:
    """Remove an emulated network, whichever process made it, and kill what runs in it; an absent network is no error.

    Raises:
        BadInput: ``network_id`` is no id of a network.
        RunFailed: something of it stays, for lack of rights or because a process cannot be killed.
    """
    if not _ID.fullmatch(network_id):
        raise BadInput(f"there is no rehearsal {network_id!r}.", hint="see `hetopt gc --dry-run`")
    switch = _switch(network_id)
    names = _names(network_id)
    kill_in(names)
    for name in sorted(names, key=lambda name: name == switch):
        with contextlib.suppress(NetworkRefused):  # another process removes it, too
            run("ip", ["netns", "del", name])
    if left := _names(network_id):
        raise RunFailed(f"the network namespaces {', '.join(left)} cannot be removed.", hint="run `hetopt gc` as root")


def check_size(hosts: int) -> None:
    """Refuse more hosts than an emulated network has addresses, 154.

    Raises:
        BadInput: there are more.
    """
    if hosts > MOST_HOSTS:
        raise BadInput(
            f"a rehearsal must have at most {MOST_HOSTS} hosts, got {hosts}.", hint="rehearse a smaller cluster"
        )


def why_not() -> str | None:
    """Try to make a network here, and remove it; return why that fails in a sentence, or None if it succeeds."""
    for tool in ("ip", "tc"):
        if find_tool(tool) is None:
            return f"a rehearsal needs `{tool}` (iproute2), which is not installed"
    try:
        with EmulatedNetwork.create([EmulatedHost(name="h0", rate_bits_per_s=1e7)]) as network:
            started = network.popen(0, ["true"], stderr=subprocess.PIPE)
            complaint = started.communicate()[1].decode(errors="replace").strip()
    except NetworkRefused as error:
        if any(refusal in error.reason for refusal in ("not permitted", "ermission denied")):
            return f"a rehearsal makes network namespaces, which {_RIGHTS}"
        return f"this machine's kernel cannot make a rehearsal's network ({error.message.rstrip('.')})"
    return f"no process can be started in a network namespace ({complaint})" if started.returncode != 0 else None


def _switch(network_id: str) -> str:
    return f"{PREFIX}{network_id}"


def _port(place: int) -> str:
    return f"port{place}"


def _names(network_id: str) -> list[str]:
    switch = _switch(network_id)
    return [name for name in namespaces() if name == switch or name.startswith(f"{switch}-")]


Tool = Literal["ip", "tc"]
BATCH = ("-batch", "-")
"""Arguments with which a tool reads many commands from its input, one a line without its name; the first that fails
ends it."""


class NetworkRefused(RunFailed):
    """The error of an `ip` or `tc` command that was refused or cannot be run.

    Attributes:
        reason: the tool's own words.
    """

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"`{command}` was refused: {reason}.", hint="run `hetopt gc`, then try again")
        self.reason = reason


def find_tool(tool: Tool) -> str | None:
    """Return the path of `ip` or `tc`, sought in PATH, /usr/sbin and /sbin; None if it is not installed."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def command(tool: Tool, arguments: Sequence[str], *, namespace: str | None = None) -> list[str]:
    """Return the argument vector of an `ip` or `tc` command in a network namespace (None: this process's).

    Args:
        tool: ``ip`` or ``tc``.
        arguments: arguments of the command.
        namespace: inside which it works; None: this process's.
    """
    inside = [] if namespace is None else ["-n", namespace]
    return [find_tool(tool) or tool, *inside, *arguments]


def run(tool: Tool, arguments: Sequence[str], *, namespace: str | None = None, lines: Sequence[str] = ()) -> str:
    """Run an `ip` or `tc` command in a namespace (None: this process's), with input ``lines``; return its output.

    Args:
        tool: tool that does it.
        arguments: arguments of the command.
        namespace: inside which the command works; None: this process's.
        lines: input of the command, each a command of its own with `BATCH`; empty: no input.

    Raises:
        NetworkRefused: the command failed, or cannot be run.
    """
    argv, text = command(tool, arguments, namespace=namespace), "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NetworkRefused(argv[0], error.strerror or "it cannot be run") from None
    if done.returncode != 0:
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        words = lines[int(failed[1]) - 1] if lines and failed else " ".join(arguments)
        raise NetworkRefused(f"{tool} {words}", _reason(done.stderr))
    return done.stdout


def _reason(stderr: str) -> str:
    """Return the first line that says why a command failed, without the prefixes of netlink."""
    for line in stderr.splitlines():
        reason = line.removeprefix("RTNETLINK answers: ").removeprefix("Error: ").strip().rstrip(".")
        if reason and not reason.startswith("Command failed"):
            return reason
    return "it did not say why"


BURST_S = 0.002
"""Seconds for which a link that was idle may send at full speed: enough that a late timer costs no throughput, and
little enough that even small messages feel the rate. Measured from 1 Mbit/s to 2 Gbit/s: a transfer takes its bytes
over the rate, plus 4 % for the headers of packets of 1500 bytes."""
_LEAST_BURST_BYTES = 3100  # two packets
QUEUE_S = 0.05
"""Seconds of traffic that a link holds back before it drops packets. In a long queue the acknowledgements of one
direction would wait behind the data of the other: with 0.4 s, transfers in both directions at 5 Mbit/s took 1.3
times as long as one, with this 1.1 times."""
_LEAST_QUEUE_BYTES = 48_000
_LEAST_RATE = 8  # the kernel counts bytes


def limit(rate_bits_per_s: float) -> str:
    """Return the `tc` arguments of a token bucket that limits a direction of a link to a rate, at least 8 bits/s."""
    rate = max(_LEAST_RATE, round(rate_bits_per_s))
    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    queue = max(_LEAST_QUEUE_BYTES, round(rate / 8 * QUEUE_S))
    return f"tbf rate {rate}bit burst {burst} limit {burst + queue}"


_FOLDER = Path("/run/netns")  # where `ip` keeps them
_KILL_PATIENCE_S = 10.0


def file_of(name: str) -> Path:
    """Return the path of the file that stands for a network namespace, under /run/netns."""
    return _FOLDER / name


def namespaces() -> list[str]:
    """Return the sorted names of all network namespaces of this machine that have a name."""
    return sorted(path.name for path in _FOLDER.glob("*"))


def pids_in(names: Iterable[str]) -> list[int]:
    """Return the ids of the processes in the network namespaces ``names``.

    Raises:
        NetworkRefused: a namespace exists, and its processes cannot be listed.
    """
    pids: list[int] = []
    for name in names:
        try:
            pids += map(int, run("ip", ["netns", "pids", name]).split())
        except NetworkRefused:
            if file_of(name).exists():
                raise
    return pids


def kill_in(names: Sequence[str]) -> None:
    """Kill every process in the network namespaces ``names``, and wait until they are gone, up to 10 s.

    Raises:
        RunFailed: a process cannot be killed in that time.
    """
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while pids := pids_in(names):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RunFailed(
                f"process {pids[0]} in a rehearsal's network cannot be killed.", hint="look at it with `ps`"
            )
        time.sleep(0.005)


BOX_BITS_PER_S = 1e9
"""Rate of the fastest link that is imitated. Beyond it the processors that carry the packets are the bottleneck, not
the limit."""

BOX_EFFICIENCY = 0.94
"""Share of a limited link that a collective reaches. Headers take 4 %; ring all-reduces of 0.4 MB reached 0.95 of links
of 25 and 100 Mbit/s, one of 10 MB over four hosts at 100 Mbit/s 0.91 (2-core virtual machine, gloo, 2026-11)."""

WAKING_S, CROWDED_WAKING_S = 1.2e-3, 0.55e-3
"""One message between hosts, and what is added for each worker that a processor has. Beside training, on two
processors, each of the messages that gather a Top-k of 0.4 MB at 1 % took 2.1 to 2.9 ms among four workers and 3.3 to
3.7 ms among eight, at 25 as at 400 Mbit/s. The same was found where processors compute twice as fast (yardsticks of
1.45 and 0.7 ms): a worker waits for the turn that the kernel gives it, and turns last as long on any machine."""

RING_WAKING = 0.58
"""Factor on the time to wake a waiting worker in a ring all-reduce: of 0.4 MB, at 25, 100 and 400 Mbit/s, its messages
took 34, 8.9 and 2.3 to 3.1 ms with four workers, and 17.4, 5.2 and 2.0 to 3.2 ms with eight, whose messages are half
as large."""

BESIDE_BYTES = 1.5
"""The power p by which waking and sending overlap; from the same measurements."""

WAKING_LOG_SD, SENDING_LOG_SD = 0.15, 0.025
"""How well both are known: what of an exchange is waking was up to a sixth longer or shorter than foreseen, while rates
are kept to the percent."""

STEERED, STEERED_LOG_SD = 1.05, 0.25
"""An exchange that `auto` chooses on the way, trials and looks included, over the one that promises most, and how well
that is known: nine rehearsals of four and eight hosts at 25 to 400 Mbit/s took 0.94 to 1.34 of it, in the median 1.04.
Three more of four hosts at 25 Mbit/s took 0.6: a trial had allowed them to send less."""

IN_TRAINING = 1.6
"""Processor time of an exchange in training over what compressing was timed to take by itself, where nothing else had
left the cache: 2.8, 5.0 and 2.6 ms beyond a dense exchange's against 2.1, 2.9 and 1.4 (int8, int4, Top-k 1 %; 98,000
parameters, 3 workers)."""


@dataclass(frozen=True, kw_only=True)
class BoxLink(LinkModel):
    """The cost of a rate-limited link between emulated hosts; ``latency_s`` is the time to wake a waiting worker.

    Attributes:
        saved_s: seconds of sending at the limited rate that a link saves up as it rests before each message.
    """

    saved_s: float

    def time_s(self, messages: float, traffic_bytes: float) -> float:
        """Return the seconds of a collective that sends ``messages`` in a row, with ``traffic_bytes`` in all.

        0 without messages.
        """
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        return messages * math.pow(waking + sending, 1 / BESIDE_BYTES)

    def sd_s(self, messages: float, traffic_bytes: float) -> float:
        """Return the standard deviation of `time_s` in seconds, from that of waking workers and of sending."""
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        parts = math.hypot(waking * WAKING_LOG_SD, sending * SENDING_LOG_SD) / (waking + sending)
        return parts * self.time_s(messages, traffic_bytes)

    def _powers(self, messages: float, traffic_bytes: float) -> tuple[float, float]:
        """Return the times of waking and of sending of a message, to the power p."""
        sending_s = max(0.0, traffic_bytes / messages / self.bytes_per_s - self.saved_s)
        return self.latency_s**BESIDE_BYTES, sending_s**BESIDE_BYTES


def box_link(primitive: Primitive, rate_bits_per_s: float, workers_per_processor: float) -> BoxLink:
    """Return the cost of an emulated link (bits/s) for a collective; workers that share processors wake more slowly.

    Args:
        primitive: primitive of the collective; ``all_reduce`` has two messages on their way at any time.
        rate_bits_per_s: rate of the slowest host of the group.
        workers_per_processor: workers that have to be woken, over processors.
    """
    waking_s = WAKING_S + CROWDED_WAKING_S * workers_per_processor
    ring = primitive == "all_reduce"
    return BoxLink(
        latency_s=RING_WAKING * waking_s if ring else waking_s,
        bytes_per_s=BOX_EFFICIENCY * min(rate_bits_per_s, BOX_BITS_PER_S) / 8,
        saved_s=0.0 if ring else min(BURST_S, waking_s),
    )
