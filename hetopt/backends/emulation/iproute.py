"""What a rehearsal's network is made with: `ip` and `tc`, the named namespaces, and the processes in them.

Many commands go to one process, and what it refuses is one sentence.

What an exchange takes in a miniature: the links of the box, and processors that are not there at once.

The bytes of a message travel while the workers that wait for them are being woken: where bytes take long, waking hardly
shows, and where they take no time, a message takes as long as waking does. So it takes less than the sum of both:

    (waking^p + sending^p)^(1/p)

A ring all-reduce has two messages on their way at any time: waking for one overlaps with the other, and links never
rest. Whatever else is sent goes one after the other: while workers are woken the link rests, and saves up some time in
which it then sends at full speed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetopt.core.comm.cost import Primitive
from hetopt.core.errors import RunFailed
from hetopt.optimizer.fit import LinkModel

Tool = Literal["ip", "tc"]


class NetworkRefused(RunFailed):
    """The kernel, or iproute2, would not do it. ``reason`` is its own word for why."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"`{command}` was refused: {reason}.", hint="run `hetopt gc`, then try again")
        self.reason = reason


def find_tool(tool: Tool) -> str | None:
    """Where the program is. People's PATH often leaves out the folders of system tools."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def command(tool: Tool, arguments: Sequence[str], *, namespace: str | None = None) -> list[str]:
    """The argument vector of one command, inside a namespace where one is named."""
    inside = [] if namespace is None else ["-n", namespace]
    return [find_tool(tool) or tool, *inside, *arguments]


def run(tool: Tool, arguments: Sequence[str], *, namespace: str | None = None) -> str:
    """Do one command and return what it printed.

    Raises:
        NetworkRefused: it failed.
    """
    done = _call(command(tool, arguments, namespace=namespace), None)
    if done.returncode != 0:
        raise NetworkRefused(f"{tool} {' '.join(arguments)}", _reason(done.stderr))
    return done.stdout


def run_batch(tool: Tool, lines: Sequence[str], *, namespace: str | None = None, tolerates: bool = False) -> None:
    """Do many commands, one a line without the tool's name, in one process; the first that fails ends it.

    Args:
        tool: that does them.
        lines: the commands.
        namespace: inside which; None: this process's.
        tolerates: passes over those that fail: for removing what may be gone already.

    Raises:
        NetworkRefused: one of them failed.
    """
    if not lines:
        return
    done = _call(command(tool, ["-force"] * tolerates + ["-batch", "-"], namespace=namespace), lines)
    if done.returncode != 0 and not tolerates:
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        raise NetworkRefused(f"{tool} {lines[int(failed[1]) - 1] if failed else lines[0]}", _reason(done.stderr))


def _call(arguments: list[str], lines: Sequence[str] | None) -> subprocess.CompletedProcess[str]:
    text = None if lines is None else "".join(f"{line}\n" for line in lines)
    try:
        return subprocess.run(
            arguments,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise NetworkRefused(arguments[0], error.strerror or "it cannot be run") from None


def _reason(stderr: str) -> str:
    """The first line that says why, without the prefixes of netlink."""
    for line in stderr.splitlines():
        reason = line.removeprefix("RTNETLINK answers: ").removeprefix("Error: ").strip().rstrip(".")
        if reason and not reason.startswith("Command failed"):
            return reason
    return "it did not say why"


BURST_S = 0.002
"""A link that was idle may send so long at full speed: enough that a late timer costs no throughput, and little enough
that even small messages feel the rate. Measured from 1 Mbit/s to 2 Gbit/s: a transfer takes its bytes over the rate,
plus 4 % for the headers of packets of 1500 bytes."""
_LEAST_BURST_BYTES = 3100  # two packets
QUEUE_S = 0.05
"""How much a link holds back before it drops. In a long queue the acknowledgements of one direction would wait behind
the data of the other: with 0.4 s, transfers in both directions at 5 Mbit/s took 1.3 times as long as one, with this 1.1
times."""
_LEAST_QUEUE_BYTES = 48_000
_LEAST_RATE = 8  # the kernel counts bytes


def limit(rate_bits_per_s: float) -> str:
    """The token bucket of one direction of a link, as `tc` reads it."""
    rate = max(_LEAST_RATE, round(rate_bits_per_s))
    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    queue = max(_LEAST_QUEUE_BYTES, round(rate / 8 * QUEUE_S))
    return f"tbf rate {rate}bit burst {burst} limit {burst + queue}"


_FOLDER = Path("/run/netns")  # where `ip` keeps them
_KILL_PATIENCE_S = 10.0


def file_of(name: str) -> Path:
    """The file that stands for a namespace."""
    return _FOLDER / name


def namespaces() -> list[str]:
    """The names of all of them."""
    return sorted(path.name for path in _FOLDER.glob("*"))


def pids_in(names: Iterable[str]) -> list[int]:
    """The processes in these namespaces: those whose own namespace is the same file."""
    inodes: set[tuple[int, int]] = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = (_FOLDER / name).stat()
            inodes.add((status.st_dev, status.st_ino))
    pids: list[int] = []
    for entry in os.listdir("/proc") if inodes else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):  # gone since, a zombie, or not ours to look at
                status = os.stat(f"/proc/{entry}/ns/net")
                if (status.st_dev, status.st_ino) in inodes:
                    pids.append(int(entry))
    return pids


def kill_in(names: Sequence[str]) -> None:
    """Kill every process in these namespaces, and wait until they are gone.

    Raises:
        RunFailed: one of them cannot be killed.
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
"""Fastest link that is imitated. Beyond it the processors that carry the packets are the bottleneck, not the limit."""

BOX_EFFICIENCY = 0.94
"""Share of a limited link that a collective reaches. Headers take 4 %; ring all-reduces of 0.4 MB reached 0.95 of links
of 25 and 100 Mbit/s, one of 10 MB over four hosts at 100 Mbit/s 0.91 (2-core virtual machine, gloo, 2026-11)."""

WAKING_S, CROWDED_WAKING_S = 1.2e-3, 0.55e-3
"""One message between hosts, and what is added for each worker that a processor has. Beside training, on two
processors, each of the messages that gather a Top-k of 0.4 MB at 1 % took 2.1 to 2.9 ms among four workers and 3.3 to
3.7 ms among eight, at 25 as at 400 Mbit/s. The same was found where processors compute twice as fast (yardsticks of
1.45 and 0.7 ms): a worker waits for the turn that the kernel gives it, and turns last as long on any machine."""

RING_WAKING = 0.58
"""The same in a ring all-reduce: of 0.4 MB, at 25, 100 and 400 Mbit/s, its messages took 34, 8.9 and 2.3 to 3.1 ms with
four workers, and 17.4, 5.2 and 2.0 to 3.2 ms with eight, whose messages are half as large."""

BESIDE_BYTES = 1.5
"""The power p; the same measurements."""

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
    """A limited link between hosts of a miniature; ``latency_s`` is that of waking.

    Attributes:
        saved_s: of sending at the limited rate, which a link that rests before each message saves up.
    """

    saved_s: float

    def time_s(self, messages: float, traffic_bytes: float) -> float:
        """Seconds of a primitive: its messages one after the other, each with its part of the bytes."""
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        return messages * math.pow(waking + sending, 1 / BESIDE_BYTES)

    def sd_s(self, messages: float, traffic_bytes: float) -> float:
        """Standard deviation of that time: of waking, and of sending."""
        if messages <= 0:
            return 0.0
        waking, sending = self._powers(messages, traffic_bytes)
        parts = math.hypot(waking * WAKING_LOG_SD, sending * SENDING_LOG_SD) / (waking + sending)
        return parts * self.time_s(messages, traffic_bytes)

    def _powers(self, messages: float, traffic_bytes: float) -> tuple[float, float]:
        """Waking and sending of a message, to the power p."""
        sending_s = max(0.0, traffic_bytes / messages / self.bytes_per_s - self.saved_s)
        return self.latency_s**BESIDE_BYTES, sending_s**BESIDE_BYTES


def box_link(primitive: Primitive, rate_bits_per_s: float, workers_per_processor: float) -> BoxLink:
    """What a primitive finds one of them to be.

    Args:
        primitive: ``all_reduce`` has two messages on their way at any time.
        rate_bits_per_s: of the slowest host of the group.
        workers_per_processor: that have to be woken.
    """
    waking_s = WAKING_S + CROWDED_WAKING_S * workers_per_processor
    ring = primitive == "all_reduce"
    return BoxLink(
        latency_s=RING_WAKING * waking_s if ring else waking_s,
        bytes_per_s=BOX_EFFICIENCY * min(rate_bits_per_s, BOX_BITS_PER_S) / 8,
        saved_s=0.0 if ring else min(BURST_S, waking_s),
    )
