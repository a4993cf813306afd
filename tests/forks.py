"""Processes of tests, as forks of one that has imported torch and what trains: each starts in milliseconds."""

from __future__ import annotations

import atexit
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from hetopt.backends.processes import QUIET_TORCH
from hetopt.trainer.host.forks import WORKERS_NEED, ForkServer
from tests.disturbance import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parent.parent

ALSO_NEEDED = (
    "hetopt.api.account",
    "hetopt.cli.launch",
    "hetopt.cli.main",
    "hetopt.trainer.session",
    "hetopt.trainer.host.agent",
    "hetopt.backends.emulation.conductor",
    "hetopt.profiler.probe.run",
    "hetopt.profiler.script.child",
    "hetopt.profiler.script.gradients",
    "hetopt.trainer.torchrun",
    "sklearn.datasets",
    "tests.ready_to_fork",
    "torch.distributed.launcher.api",
)
"""By commands, scripts and examples, by those who host workers, and by those who rehearse."""


@cache
def server() -> ForkServer:
    """One for all tests of this process."""
    environment = {**os.environ, **QUIET_TORCH, "OMP_NUM_THREADS": "1"}
    with chdir(REPOSITORY):  # where a module of tests is found
        server = ForkServer.importing((*WORKERS_NEED, *ALSO_NEEDED), environment)
    atexit.register(server.close)
    return server


class Forked:
    """A fork with its streams in pipes, of which `subprocess.Popen` has the names that tests use."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        streams = []
        with ExitStack() as written:
            for _ in range(2):
                reading, writing = os.pipe()
                streams.append(open(reading, encoding="utf-8", errors="replace"))  # noqa: SIM115  # closed with it
                written.callback(os.close, writing)
                streams.append(writing)
            self.stdout, out, self.stderr, err = streams
            self._process = server().start(program, environment=environment, stdout=out, stderr=err, folder=folder)
        self.args, self.pid = [*program], self._process.pid
        self.poll, self.wait, self.kill = self._process.poll, self._process.wait, self._process.kill
        self.send_signal, self.terminate = self._process.send_signal, self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until it ends."""
        with ThreadPoolExecutor(2) as pool:
            told = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # so that nobody waits for what it would say
                raise
            out, err = (one.result() for one in told)
        self.close()
        return out, err

    def close(self) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.wait()


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
