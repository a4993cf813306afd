"""What a rehearsal's network is made with: `ip` and `tc`, the named namespaces, and the processes in them.

Many commands go to one process, and what it refuses is one sentence.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from hetopt.core.errors import RunFailed

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


def run_batch(tool: Tool, lines: Sequence[str], *, namespace: str | None = None) -> None:
    """Do many commands, one a line without the tool's name, in one process; the first that fails ends it.

    Raises:
        NetworkRefused: one of them failed.
    """
    if not lines:
        return
    done = _call(command(tool, ["-batch", "-"], namespace=namespace), lines)
    if done.returncode != 0:
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        raise NetworkRefused(f"{tool} {lines[int(failed[1]) - 1] if failed else lines[0]}", _reason(done.stderr))


def run_tolerant(tool: Tool, lines: Sequence[str]) -> None:
    """Do many commands and pass over those that fail: for removing what may be gone already."""
    if lines:
        _call(command(tool, ["-force", "-batch", "-"]), lines)


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
    try:
        return sorted(os.listdir(_FOLDER))
    except FileNotFoundError:
        return []


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
