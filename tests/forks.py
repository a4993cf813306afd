"""Processes of tests, as forks of one that has imported torch and what trains: each starts in milliseconds."""

from __future__ import annotations

import atexit
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from hetopt.core.forks import WORKERS_NEED, ForkServer
from tests.disturbance import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parent.parent


@cache
def server() -> ForkServer:
    """One for all tests of this process."""
    server = ForkServer.importing((*WORKERS_NEED, "hetopt.trainer.session"), {**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(server.close)
    return server


def ended(
    *programs: Sequence[str],
    environment: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> list[subprocess.CompletedProcess[str]]:
    """What became of processes that ran side by side; none is left.

    Args:
        programs: arguments of Python for each: a file or ``-m MODULE``, and its own.
        environment: beside this process's own; collectives stay on this machine, in one thread.
        patience_s: until all must have ended.

    Returns:
        Their exit codes; what they wrote, to either stream, as ``stdout``.
    """
    usual = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    until_s = time.monotonic() + patience_s
    outputs = [TemporaryFile("w+", encoding="utf-8") for _ in programs]  # noqa: SIM115  # closed below
    running = []
    try:
        for program, output in zip(programs, outputs, strict=True):
            own = {**usual, **(environment or {})}
            running.append(server().start(program, environment=own, stdout=output, folder=REPOSITORY))
        found = []
        for program, process, output in zip(programs, running, outputs, strict=True):
            code = process.wait(until_s - time.monotonic())
            output.seek(0)
            found.append(subprocess.CompletedProcess(list(program), code, output.read()))
        return found
    finally:
        for process in running:
            process.kill()
            process.wait()
        for output in outputs:
            output.close()


def all_end_well(*programs: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run processes side by side until all have ended with 0; see `ended`."""
    for done in ended(*programs, environment=environment):
        assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}"
