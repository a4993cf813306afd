"""Hosts of runs, and scripts that are measured, as forks of a process that has imported torch.

They are what the product starts as ``python -m MODULE``.

What they do, how they are found, signalled and reaped is as it is (`hetopt.trainer.host.forks`); only the seconds of
imports are saved. Processes that tests start by themselves, and what those start, begin as they do for a person: so
every kind of start is seen as well.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from hetopt.api import exactness, profiling_script
from hetopt.backends import processes
from hetopt.backends.host import agent
from hetopt.trainer.host.forks import ForkedProcess, ForkServer
from tests import forks

MODULES = (
    "hetopt.trainer.host.agent",
    "hetopt.backends.emulation.conductor",
    "hetopt.profiler.script.child",
    "hetopt.profiler.script.gradients",
    "hetopt.trainer.torchrun",
)
"""Those that are forked."""

STARTING = (processes, agent, profiling_script, exactness)
"""The product's modules that start them."""


class Forking:
    """What the product's modules have as ``subprocess``.

    Args:
        server: that hosts are forked from; asked for when the first of them starts.
    """

    def __init__(self, server: Callable[[], ForkServer]) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: Any,
        stderr: int,
        cwd: Path | None = None,
        pass_fds: Iterable[int] = (),
        start_new_session: bool = False,
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if [*command[:2]] == [sys.executable, "-m"] and command[2] in MODULES:
            return self._server().start(
                command[1:], environment=env, stdin=stdin, stdout=stdout, stderr=stderr, folder=cwd, keep=pass_fds
            )
        return subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            start_new_session=start_new_session,
        )

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, timeout: float, **rest: bool
    ) -> subprocess.CompletedProcess[bytes]:
        assert rest == {"capture_output": True, "check": False}, "all that is asked for by those who wait"
        with TemporaryFile() as out, TemporaryFile() as err:
            process = self.Popen(command, env=env, stdin=stdin, stdout=out, stderr=err.fileno())
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


def fork_from(server: Callable[[], ForkServer], patch: pytest.MonkeyPatch | None = None) -> None:
    """Hosts that this process starts are forks from now on, or as long as the patch lasts."""
    for module in STARTING:
        (patch or pytest.MonkeyPatch()).setattr(module, "subprocess", Forking(cache(server)))


@contextmanager
def forked_hosts() -> Iterator[None]:
    """Hosts that this process starts are forks meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            fork_from(forks.server, patch)
        yield
