"""Runs `ip` and `tc`: many commands in one process, and what they refuse as one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
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
