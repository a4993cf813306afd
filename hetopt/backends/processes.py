"""Runs that are a process of this machine: started in a session of their own, found, watched and ended by their folder.

The launching process and its run share fate (unless ``attached`` is False): when the launcher dies, by whatever signal,
the kernel ends the run's process, and that ends whatever it has started.

One launch of a run at a time: whoever hosts it holds a lease on its folder, a lock on an open file. The kernel lets go
of it when the last process that has the file open ends, by whatever signal, so a lease never outlives its run and
nobody has to clean up after a crash.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hetopt.backends.backend import RunHandle
from hetopt.core.artifact import write_atomically
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.log import EVENTS_FILE, tell_failure
from hetopt.core.events.records import CheckpointSaved, LogEvent, StepsLogged, TrainingStarted
from hetopt.core.interruption import in_one_piece
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.process_guard import StopSignal, die_with_parent
from hetopt.core.reading import MissingFile, read_json
from hetopt.core.run_folder import (
    CHECKPOINT_FOLDER,
    LATEST_OBJECT,
    LIVING_FILE,
    OBJECTS_FOLDER,
    STOP_FILE,
    write_spec,
)
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus, judge, last_events, last_words, log_bytes
from hetopt.core.search_path import INSTALLED_ONLY
from hetopt.core.worker_logs import LOG_FOLDER

PROCESS_FILE = "process.json"
_SAME_START_S = 1.0


LEASE_FILE = "lease"

ENDING_S = 5.0
"""How long the last processes of a run that is over may take to end."""

LONGEST_STOP_S = 600.0
"""A run that has not ended by itself so long after somebody wished it does not hear that."""


@contextmanager
def lease(run_dir: Path) -> Iterator[int]:
    """Hold the lease inside; a process that is given the descriptor holds it for the rest of its life.

    Raises:
        BadInput: somebody else has it, or the folder cannot be written.
    """
    try:
        descriptor = os.open(run_dir / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{run_dir} cannot be written: {error.strerror}.", hint="name another folder") from None
    try:
        until_s = time.monotonic() + ENDING_S
        while not _is_taken(descriptor):
            if time.monotonic() > until_s:
                raise BadInput(f"a run is alive in {run_dir}.", hint="stop it first, or name another folder")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    """Whether the lease is ours now; it is not where somebody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Program:
    """The process that is to host a run.

    Attributes:
        module: started as ``python -m MODULE RUN_DIR [LAUNCHER_PID]``; it ends with the launcher that is named.
        log_name: where its own output goes, in the run's log folder.
        defaults: its environment, unless the launcher's own or the caller's says otherwise.
        fixed: its environment, whatever they say.
        prefix: the words of another command that starts it, such as ``("nice", "-n", "19")``. It must become the
            process that it starts, so that ending one ends the other.
    """

    module: str
    log_name: str
    defaults: Mapping[str, str]
    fixed: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessLauncher(ABC):
    """Starts, watches and stops runs on this machine; each of its forms says what the process is.

    Attributes:
        attached: the run ends when the process that started it does.
        grace_s: how long `stop` waits for workers that neither step, as long as theirs take, nor save a checkpoint.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
    """

    attached: bool = True
    grace_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False, compare=False)

    @abstractmethod
    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """The process for this run, after whatever it needs is made ready in the folder."""

    def _check(self, spec: RunSpec) -> None:  # noqa: B027  # most runs can be done
        """Refuse a run before anything of it is in its folder.

        Raises:
            BadInput: it cannot be done here.
        """

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run and return at once. A folder that holds a checkpoint is resumed.

        Args:
            spec: every worker of it runs on this machine, whatever host it names.
            run_dir: the run's folder; it exists.
            environment: set on top of this process's own environment.

        Raises:
            BadInput: the folder cannot be written, a run is alive in it, or the run cannot be done here.
        """
        run_dir = run_dir.resolve()
        if _find_process(run_dir) is not None:
            raise BadInput(f"a run is alive in {run_dir}.", hint="stop it first, or name another folder")
        self._check(spec)
        with lease(run_dir) as held:
            return self._start(spec, run_dir, environment, held)

    def _start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str], held: int) -> RunHandle:
        """Start the process, which keeps the lease."""
        program = self.program(spec, run_dir)
        write_spec(run_dir, spec)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        (run_dir / LIVING_FILE).unlink(missing_ok=True)
        log = run_dir / LOG_FOLDER
        log.mkdir(mode=0o700, exist_ok=True)
        command = [*program.prefix, sys.executable, "-m", program.module, str(run_dir)]
        if self.attached:
            command.append(str(os.getpid()))
        logged = log_bytes(run_dir)  # by earlier sessions
        # Whoever is interrupted must know which process it is to end.
        with (log / program.log_name).open("ab") as output, in_one_piece():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**program.defaults, **os.environ, **environment, **program.fixed, **INSTALLED_ONLY},
                start_new_session=True,
                pass_fds=(held,),
            )
            self._started[run_dir] = process
            identity = {
                "pid": process.pid,
                "create_time": psutil.Process(process.pid).create_time(),
                "log_bytes": logged,
            }
            write_atomically(run_dir / PROCESS_FILE, json.dumps(identity) + "\n")
        return RunHandle(run_dir=run_dir)

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is now; reads the end of its event log and asks for one process."""
        run_dir = handle.run_dir.resolve()
        self._reap(run_dir)
        return run_status(run_dir)

    def stop(self, handle: RunHandle) -> None:
        """End the run: a wish first, then SIGTERM, then SIGKILL. When it returns nothing of the run is left."""
        run_dir = handle.run_dir.resolve()
        process = _find_process(run_dir)
        if process is None:
            self._reap(run_dir)
            return
        (run_dir / STOP_FILE).touch()
        family = _family(process)
        # A run that is still starting looks at the wish only after seconds, and has nothing to save.
        started = self.poll(handle).state is not RunState.STARTING
        if not (started and self._ends_by_itself(run_dir)):
            family = _family(process) or family
            _signal(process.terminate)
            if not self._gone(run_dir, self.grace_s):
                family = _family(process) or family
                _signal(process.kill)
        for member in family:
            _signal(member.kill)
        self._until(lambda: not any(_lives(member) for member in family), self.grace_s)
        self._reap(run_dir)

    def _ends_by_itself(self, run_dir: Path) -> bool:
        """Let the workers finish their steps and save a checkpoint: as long as it grows, it is waited for.

        Over a slow link it arrives for minutes. Ended meanwhile, the run would lose the steps since the one before.
        """
        begun_s = changed_s = self.clock()
        patience_s, saved = self.grace_s + _step_s(last_events(run_dir)), _saved(run_dir)
        while not self._gone(run_dir, min(1.0, patience_s)):
            now_s, now = self.clock(), _saved(run_dir)
            if now != saved:
                saved, changed_s = now, now_s
            elif now_s - changed_s >= patience_s:
                return False
            if now_s - begun_s >= LONGEST_STOP_S:
                return False
        return True

    def _gone(self, run_dir: Path, within_s: float) -> bool:
        def gone() -> bool:
            self._reap(run_dir)
            return _find_process(run_dir) is None

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


def _step_s(events: Sequence[LogEvent]) -> float:
    """How long nothing may be heard of a run that is well: of its steps since workers started, and of a checkpoint."""
    starts = [at for at, event in enumerate(events) if isinstance(event, TrainingStarted)]
    since = events[starts[-1] if starts else 0 :]
    times_s = [event.time_s for event in since if isinstance(event, TrainingStarted | StepsLogged)]
    apart_s = max((later - earlier for earlier, later in itertools.pairwise(times_s)), default=0.0)
    return apart_s + max((event.written_s for event in since if isinstance(event, CheckpointSaved)), default=0.0)


def _saved(run_dir: Path) -> dict[Path, int]:
    """What checkpoints and models the run's folder has, whole or in part, and how many bytes of each."""
    folders = (run_dir / CHECKPOINT_FOLDER, (run_dir / OBJECTS_FOLDER / LATEST_OBJECT).parent)
    sizes: dict[Path, int] = {}
    for path in (*run_dir.glob("model*"), *(path for folder in folders for path in folder.rglob("*"))):
        with suppress(OSError):  # a newer one has taken its place
            sizes[path] = path.stat().st_size
    return sizes


def run_status(run_dir: Path) -> RunStatus:
    """How the run in a folder is now, whoever started it."""
    # Alive is asked first: a run that ends in between has then written its last event before it is read.
    alive = _find_process(run_dir) is not None
    return judge(
        last_events(run_dir, _earlier_bytes(run_dir) if alive else 0),
        alive=alive,
        stop_wished=(run_dir / STOP_FILE).exists(),
        last_line=None if alive else last_words(run_dir),
    )


def _earlier_bytes(run_dir: Path) -> int:
    """How long the log was when the process began: what earlier sessions did says nothing of this one."""
    try:
        return int(read_json(run_dir / PROCESS_FILE).get("log_bytes", 0))
    except (BadInput, ValueError, TypeError, AttributeError):
        return 0


def _find_process(run_dir: Path) -> psutil.Process | None:
    """The living process that hosts the run. A number that another process has since been given does not count."""
    try:
        identity = read_json(run_dir / PROCESS_FILE)
        process = psutil.Process(int(identity["pid"]))
        same = abs(process.create_time() - float(identity["create_time"])) < _SAME_START_S
        return process if same and _lives(process) else None
    except (MissingFile, psutil.NoSuchProcess):
        return None
    except (BadInput, ValueError, KeyError, TypeError, OverflowError):
        return None  # not a file that `start` wrote, so nothing that we may signal


def _lives(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended counts as gone even while its parent has not collected its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return


QUIET_TORCH = {
    # The agent greets with paragraphs at INFO and WARNING; what matters to a person reaches the event log.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(ProcessLauncher):
    """Worker processes under torchrun, on this machine."""

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """See `ProcessLauncher.program`."""
        return Program(
            module="hetopt.trainer.host.agent",
            log_name="host.log",
            defaults=QUIET_TORCH,
            fixed=collectives_on(LOOPBACK),
        )


def conduct(argv: Sequence[str], conducted: Callable[[Path, StopSignal], int]) -> int:
    """Be the process of a run that a `ProcessLauncher` has started; the exit code is hetopt's.

    It ends with the launcher that is named. What it cannot do is told where people look: in the run's log.

    Args:
        argv: of the process: its module, the run's folder, and the launcher's number where both share fate.
        conducted: conducts the run in a folder until it is over, or somebody has asked this process to end.
    """
    if len(argv) not in (2, 3):
        print(f"usage: {argv[0]} RUN_DIR [PARENT_PID]", file=sys.stderr)
        return BadInput.exit_code
    run_dir, stop_signal = Path(argv[1]), StopSignal()
    stop_signal.listen()
    if len(argv) > 2:
        die_with_parent(int(argv[2]), signal.SIGTERM)
    try:
        return conducted(run_dir, stop_signal)
    except HetoptError as refused:
        print(refused.message, file=sys.stderr)
        if run_dir.is_dir():
            tell_failure(run_dir / EVENTS_FILE, refused.message, hint=refused.hint)
        return refused.exit_code
