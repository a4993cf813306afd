"""Runs on this machine: worker processes under torchrun, in a session of their own, reachable from any terminal.

The launching process and its run share fate (unless ``attached`` is False): when the launcher dies, by whatever signal,
the kernel ends the host of the workers and the workers with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hetopt.profiler.artifact import write_atomically
from hetopt.profiler.errors import BadInput
from hetopt.trainer.events import EVENTS_FILE, parse_events
from hetopt.trainer.launch.base import RunHandle, RunState, RunStatus
from hetopt.trainer.launch.logs import LOG_FOLDER
from hetopt.trainer.launch.outcome import judge, last_log_line, read_tail
from hetopt.trainer.run_folder import STOP_FILE, write_spec
from hetopt.trainer.spec import RunSpec

PROCESS_FILE = "process.json"
_SAME_START_S = 1.0


def run_environment(workers: int, cpus: int) -> dict[str, str]:
    """What the processes of a local run need in their environment, unless the caller says otherwise.

    Collectives stay on the loopback device; the cores are shared out, because every worker would otherwise start a
    thread for each of them.
    """
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, cpus // workers)),
        # The agent greets with paragraphs at INFO and WARNING; what matters to a person reaches the event log.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
    }


@dataclass(frozen=True, kw_only=True)
class LocalLauncher:
    """Starts, watches and stops runs on this machine.

    Attributes:
        attached: the run ends when the process that started it does.
        grace_s: how long `stop` lets the workers finish their step and save a checkpoint.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
    """

    attached: bool = True
    grace_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False, compare=False)

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run and return at once. A folder that holds a checkpoint is resumed.

        Args:
            spec: every worker of it runs on this machine, whatever host it names.
            run_dir: the run's folder; it exists.
            environment: set on top of this process's own environment.

        Raises:
            BadInput: the folder cannot be written, or a run is alive in it.
        """
        run_dir = run_dir.resolve()
        if _find_host(run_dir) is not None:
            raise BadInput(f"a run is alive in {run_dir}.", hint="stop it first, or name another folder")
        write_spec(run_dir, spec)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        log = run_dir / LOG_FOLDER
        log.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "hetopt.trainer.launch.host", str(run_dir)]
        if self.attached:
            command.append(str(os.getpid()))
        defaults = run_environment(len(spec.workers), len(os.sched_getaffinity(0)))
        with (log / "host.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**defaults, **os.environ, **environment},
                start_new_session=True,
            )
        self._started[run_dir] = process
        identity = {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
        write_atomically(run_dir / PROCESS_FILE, json.dumps(identity) + "\n")
        return RunHandle(run_dir=run_dir)

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is now; reads the end of its event log and asks for one process."""
        run_dir = handle.run_dir.resolve()
        self._reap(run_dir)
        # Alive is asked first: a run that ends in between has then written its last event before it is read.
        alive = _find_host(run_dir) is not None
        events = list(parse_events(iter(read_tail(run_dir / EVENTS_FILE).splitlines(keepends=True))))
        return judge(
            events,
            alive=alive,
            stop_wished=(run_dir / STOP_FILE).exists(),
            last_line=None if alive else last_log_line(run_dir),
        )

    def stop(self, handle: RunHandle) -> None:
        """End the run: a wish first, then SIGTERM, then SIGKILL. When it returns nothing of the run is left."""
        run_dir = handle.run_dir.resolve()
        host = _find_host(run_dir)
        if host is None:
            return
        (run_dir / STOP_FILE).touch()
        family = _family(host)
        # A run that is still starting looks at the wish only after seconds, and has nothing to save.
        started = self.poll(handle).state is not RunState.STARTING
        if not (started and self._gone(run_dir, self.grace_s)):
            family = _family(host) or family
            _signal(host.terminate)
            if not self._gone(run_dir, self.grace_s):
                family = _family(host) or family
                _signal(host.kill)
        for process in family:
            _signal(process.kill)
        self._until(lambda: not any(_lives(process) for process in family), self.grace_s)
        self._reap(run_dir)

    def _gone(self, run_dir: Path, within_s: float) -> bool:
        def gone() -> bool:
            self._reap(run_dir)
            return _find_host(run_dir) is None

        return self._until(gone, within_s)

    def _until(self, reached: Callable[[], bool], within_s: float) -> bool:
        deadline = self.clock() + within_s
        while not reached():
            if self.clock() >= deadline:
                return False
            self.sleep(0.05)
        return True

    def _reap(self, run_dir: Path) -> None:
        """Collect our own child's exit code, or it would stay in the process table as a zombie."""
        process = self._started.get(run_dir)
        if process is not None and process.poll() is not None:
            del self._started[run_dir]


def _find_host(run_dir: Path) -> psutil.Process | None:
    """The living process that hosts the run. A number that another process has since been given does not count."""
    try:
        identity = json.loads((run_dir / PROCESS_FILE).read_text(encoding="utf-8"))
        process = psutil.Process(int(identity["pid"]))
        same = abs(process.create_time() - float(identity["create_time"])) < _SAME_START_S
        return process if same and _lives(process) else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    except (ValueError, KeyError, TypeError):
        return None  # not a file that `start` wrote, so nothing that we may signal


def _lives(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended counts as gone even while its parent has not collected its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(host: psutil.Process) -> list[psutil.Process]:
    try:
        return [host, *host.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
