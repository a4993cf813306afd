"""Runs that are a process of this machine: started in a session of their own, found, watched and ended by their folder.

When the launching process dies, by whatever signal, the kernel ends the run's process, and that ends whatever it has
started. A run that is detached goes on until it is over or stopped.

A run is alive if and only if the lease on its folder is locked: a lock on an open file, which the kernel lets go of
when the run's process ends. So a folder has one living run at most, nobody has to clean up after a crash, and neither a
clock that is set nor a file that was altered changes what is alive. The process that the folder names is ended only
where the kernel says too that it holds the lease.
"""

from __future__ import annotations

import fcntl
import itertools
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
from typing import Annotated

import psutil
from pydantic import Field, NonNegativeInt

from hetopt.backends.backend import RunHandle, until
from hetopt.core.artifact import Record, read_record, write_atomically
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.fold import RunClock
from hetopt.core.events.log import EVENTS_FILE, tell_failure
from hetopt.core.events.records import CheckpointSaved, LogEvent, StepsLogged, TrainingStarted
from hetopt.core.interruption import StopSignal, delay_signals, die_with_parent
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.paths import MissingFile, opened_file
from hetopt.core.run_folder import (
    CHECKPOINT_FOLDER,
    LATEST_OBJECT,
    LIVING_FILE,
    LOG_FOLDER,
    OBJECTS_FOLDER,
    OUTPUT_FOLDER,
    STOP_FILE,
    write_spec,
)
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus, judge, last_events, last_words, log_bytes
from hetopt.core.search_path import INSTALLED_ONLY

PROCESS_FILE = "process.json"
LEASE_FILE = "lease"

ENDING_S = 5.0
"""Seconds that the process of a run that is over may take to end, and that one which starts may take to be named in its
folder."""

LONGEST_STOP_S = 600.0
"""Seconds after which a run that was asked to end, and has not ended by itself, is ended: it does not hear that."""


class _Process(Record):
    """The record of the process that a launch started.

    Attributes:
        pid: its number, within what Linux gives; whether it is that process, the lease tells.
        log_bytes: length of the event log when it began: what earlier sessions did says nothing of this one.
    """

    pid: Annotated[int, Field(gt=0, le=2**22)]
    log_bytes: NonNegativeInt

    @classmethod
    def named_in(cls, run_dir: Path) -> _Process | None:
        """Read the process that a run's folder names; None: it names none in a way that can be read."""
        with suppress(BadInput):
            return read_record(cls, run_dir / PROCESS_FILE, hint="launch the run again")
        return None

    def holds_lease(self, run_dir: Path) -> bool:
        """Return whether this process has locked the lease; False where the kernel does not tell."""
        with suppress(OSError):
            lease_file = (run_dir / LEASE_FILE).stat()
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with suppress(FileNotFoundError):  # closed meanwhile
                    is_lease = os.path.samestat(os.stat(f"/proc/{self.pid}/fd/{number}"), lease_file)
                    if is_lease and " WRITE " in Path(f"/proc/{self.pid}/fdinfo/{number}").read_text(encoding="ascii"):
                        return True
        return False


@contextmanager
def lease(run_dir: Path) -> Iterator[int]:
    """Lock a run's folder in a with block, waiting up to 5 s; yield the lock's descriptor, which a child may keep.

    The lock lasts as long as any process has the descriptor open.

    Raises:
        BadInput: another process holds the lock, or the folder cannot be written or has no locks.
    """
    try:
        descriptor = os.open(run_dir / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{run_dir} cannot be written: {error.strerror}.", hint="name another folder") from None
    try:
        if not until(lambda: _locks_lease(descriptor, fcntl.LOCK_EX, run_dir), within_s=ENDING_S):
            raise BadInput(f"a run is alive in {run_dir}.", hint="stop it first, or name another folder")
        yield descriptor
    finally:
        os.close(descriptor)


def is_alive(run_dir: Path) -> bool:
    """Return whether the run in a folder is alive: whether any process has the folder's lease file locked.

    False also where the folder has no such file.

    Raises:
        BadInput: the lease cannot be read, or no file can be locked there.
    """
    with suppress(MissingFile), opened_file(run_dir / LEASE_FILE) as stream:
        return not _locks_lease(stream.fileno(), fcntl.LOCK_SH, run_dir)
    return False


def locks(descriptor: int, how: int) -> bool:
    """Try to lock an open file at once, without waiting; return whether that worked.

    Args:
        descriptor: descriptor of the file.
        how: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_lease(descriptor: int, how: int, run_dir: Path) -> bool:
    """Try to lock a run's lease at once; return whether that worked; BadInput: its file system has no locks."""
    try:
        return locks(descriptor, how)
    except OSError as error:
        raise BadInput(
            f"the lease in {run_dir} cannot be locked: {error.strerror}.",
            hint="keep runs on a file system that has locks: HETOPT_HOME says where",
        ) from None


@dataclass(frozen=True, kw_only=True)
class Program:
    """The command, log file and environment of the process that is to host a run.

    Attributes:
        module: started as ``python -m MODULE RUN_DIR LAUNCHER_PID``; it ends with the launcher that is named (0: none).
        log_name: file for its own output, in the run's log folder.
        defaults: environment variables that the launcher's own environment or the caller's may override.
        fixed: environment variables that override those.
        prefix: words of another command that starts it, such as ``("nice", "-n", "19")``; empty: none. That command
            must become the process that it starts, so that ending one ends the other.
    """

    module: str
    log_name: str
    defaults: Mapping[str, str]
    fixed: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessLauncher(ABC):
    """The base of launchers whose runs are a process of this machine, which may start others.

    Attributes:
        grace_s: seconds that `stop` waits for workers that neither step, as long as theirs take, nor save a checkpoint.
        clock: returns seconds of a monotonic clock.
        sleep: waits for so many seconds.
        detached: whether its runs go on when this process ends.
    """

    grace_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    detached: bool = False
    _started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False, compare=False)

    @abstractmethod
    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Prepare a run's folder, and return the program to start as the run's process; start nothing.

        Args:
            spec: spec of the run.
            run_dir: the run's folder.
        """

    def _check(self, spec: RunSpec) -> None:  # noqa: B027  # most runs can be done
        """Refuse a run before anything of it is in its folder.

        Raises:
            BadInput: it cannot be done here.
        """

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run's process and return at once; a folder that holds a checkpoint is resumed.

        Args:
            spec: spec of the run.
            run_dir: the run's folder, which exists.
            environment: variables on top of this process's own environment.

        Raises:
            BadInput: the folder cannot be written, a run is alive in it, or this machine cannot do the run.
        """
        run_dir = run_dir.resolve()
        self._check(spec)
        with lease(run_dir) as held:
            program = self.program(spec, run_dir)
            write_spec(run_dir, spec)
            (run_dir / STOP_FILE).unlink(missing_ok=True)
            (run_dir / LIVING_FILE).unlink(missing_ok=True)
            log = run_dir / LOG_FOLDER
            log.mkdir(mode=0o700, exist_ok=True)
            logged = log_bytes(run_dir)  # by earlier sessions
            # Whoever is interrupted must know which process it is to end.
            with (log / program.log_name).open("ab") as output, delay_signals():
                launcher = str(0 if self.detached else os.getpid())
                process = subprocess.Popen(
                    [*program.prefix, sys.executable, "-m", program.module, str(run_dir), launcher],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**program.defaults, **os.environ, **environment, **program.fixed, **INSTALLED_ONLY},
                    start_new_session=True,
                    pass_fds=(held,),  # the process keeps the lease
                )
                self._started[run_dir] = process
                named = _Process(pid=process.pid, log_bytes=logged)
                write_atomically(run_dir / PROCESS_FILE, named.model_dump_json() + "\n")
        return RunHandle(run_dir=run_dir)

    def poll(self, handle: RunHandle) -> RunStatus:
        """Return a run's status by the lock on its folder and the end of its event log; start nothing.

        Raises:
            BadInput: the lease or the log cannot be read.
        """
        run_dir = handle.run_dir.resolve()
        self._reap(run_dir)
        return run_status(run_dir)

    def stop(self, handle: RunHandle) -> None:
        """End the run and wait for it: first by a stop file, so that workers save, then SIGTERM, then SIGKILL.

        A run that is over is left as it is.

        Raises:
            BadInput: the run is alive, and no process that its folder names holds its lease here: it is another user's
                or machine's.
        """
        run_dir = handle.run_dir.resolve()
        process = _Process.named_in(run_dir)

        def is_held_by_process() -> bool:
            return process is not None and process.holds_lease(run_dir)

        # A process that is just ending has closed the lease before the kernel unlocks it.
        until(lambda: is_held_by_process() or not is_alive(run_dir), within_s=ENDING_S, sleep=self.sleep)
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ends by itself meanwhile
            if process is not None and is_held_by_process():
                self._end(run_dir, process)
            elif is_alive(run_dir):
                raise BadInput(
                    f"a run is alive in {run_dir}, and no process that its folder names holds its lease here.",
                    hint="stop it as the user, and on the machine, that launched it",
                )
        self._reap(run_dir)

    def _end(self, run_dir: Path, process: _Process) -> None:
        """End a process and all that it has started, if it holds the lease.

        Raises:
            ProcessLookupError: it is gone.
            psutil.NoSuchProcess: likewise.
        """
        with open(os.pidfd_open(process.pid), "rb") as pidfd:
            host = psutil.Process(process.pid)
            family = {*host.children(recursive=True)}
            # From here on no other process can be meant: what holds the lease now was opened before.
            if not process.holds_lease(run_dir):
                return
            (run_dir / STOP_FILE).touch()
            signal.pidfd_send_signal(pidfd.fileno(), signal.SIGCONT)  # one that is frozen hears no other
            # A run that is still starting looks at the wish only after seconds, and has nothing to save.
            started = run_status(run_dir).state is not RunState.STARTING
            if not (started and self._ends_by_itself(run_dir)):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(ProcessLookupError, psutil.NoSuchProcess):
                        family |= {*host.children(recursive=True)}
                        signal.pidfd_send_signal(pidfd.fileno(), number)
                    if until(lambda: self._is_gone(run_dir), within_s=self.grace_s, sleep=self.sleep):
                        break
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        until(lambda: not any(_lives(member) for member in family), within_s=self.grace_s, sleep=self.sleep)

    def _ends_by_itself(self, run_dir: Path) -> bool:
        """Wait for workers to finish their steps and save a checkpoint; return whether the run has ended by then.

        As long as the checkpoint grows, it is waited for: over a slow link it arrives for minutes. Ended meanwhile, the
        run would lose the steps since the one before.
        """
        begun_s = changed_s = self.clock()
        patience_s, saved = self.grace_s + _longest_silence_s(last_events(run_dir)), saved_bytes(run_dir)
        while not until(lambda: self._is_gone(run_dir), within_s=min(1.0, patience_s), sleep=self.sleep):
            now_s, now = self.clock(), saved_bytes(run_dir)
            if now != saved:
                saved, changed_s = now, now_s
            elif now_s - changed_s >= patience_s:
                return False
            if now_s - begun_s >= LONGEST_STOP_S:
                return False
        return True

    def _is_gone(self, run_dir: Path) -> bool:
        self._reap(run_dir)
        return not is_alive(run_dir)

    def _reap(self, run_dir: Path) -> None:
        """Collect our own child's exit code, or it would stay in the process table as a zombie."""
        process = self._started.get(run_dir)
        if process is not None and process.poll() is not None:
            del self._started[run_dir]


def _longest_silence_s(events: Sequence[LogEvent]) -> float:
    """Return the longest time between logged steps since workers started, plus the longest writing of a checkpoint, s.

    0 where nothing was logged.
    """
    clock, times_s = RunClock(), list[float]()
    for event in events:
        clock.take(event)
        if isinstance(event, TrainingStarted):
            times_s.clear()
        if isinstance(event, TrainingStarted | StepsLogged):
            times_s.append(clock.now_s)
    apart_s = max((later - earlier for earlier, later in itertools.pairwise(times_s)), default=0.0)
    return apart_s + max((event.written_s for event in events if isinstance(event, CheckpointSaved)), default=0.0)


def saved_bytes(run_dir: Path) -> dict[Path, int]:
    """Return the bytes of each checkpoint, model and output file in a run's folder, complete or partial, by path.

    Empty: nothing was saved.
    """
    objects = (run_dir / OBJECTS_FOLDER / LATEST_OBJECT).parent
    folders = (run_dir / CHECKPOINT_FOLDER, objects, run_dir / OUTPUT_FOLDER)
    sizes: dict[Path, int] = {}
    for path in (*run_dir.glob("model*"), *(path for folder in folders for path in folder.rglob("*"))):
        with suppress(OSError):  # a newer one has taken its place
            sizes[path] = path.stat().st_size
    return sizes


def run_status(run_dir: Path) -> RunStatus:
    """Return the status of the run in a folder, whichever process started it: by its lock and its log's end.

    Raises:
        BadInput: its lease or its log cannot be read.
    """
    # Alive is asked first: a run that ends in between has then written its last event before it is read.
    alive = is_alive(run_dir)
    process = _Process.named_in(run_dir) if alive else None
    return judge(
        last_events(run_dir, 0 if process is None else process.log_bytes),
        alive=alive,
        stop_wished=(run_dir / STOP_FILE).exists(),
        last_line=None if alive else last_words(run_dir),
    )


def _lives(process: psutil.Process) -> bool:
    """Return whether a process runs; one that has ended counts as gone before its parent collects its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


QUIET_TORCH = {
    # The agent greets with paragraphs at INFO and WARNING; what matters to a person reaches the event log.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(ProcessLauncher):
    """The launcher of runs whose workers are processes of this machine, under torchrun."""

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Return the program that hosts worker processes of this machine, torchrun's agent; no argument is used.

        Raises:
            RunFailed: this machine has no loopback interface.
        """
        return Program(
            module="hetopt.trainer.host.agent",
            log_name="host.log",
            defaults=QUIET_TORCH,
            fixed=collectives_on(LOOPBACK),
        )


def conduct(argv: Sequence[str], conducted: Callable[[Path, StopSignal], int]) -> int:
    """Run ``conducted`` as the process of a run, until it or the launcher in ``argv`` ends; return hetopt's exit code.

    A `ProcessLauncher` has started this process, which ends with the launcher. An error is written to the run's log.

    Args:
        argv: command line of this process: its module, the run's folder, and the launcher's process id (0: none).
        conducted: conducts the run in a folder until it is over or the signal says so, and returns the exit code.
    """
    run_dir, stop_signal = Path(argv[1]), StopSignal()
    stop_signal.listen()
    die_with_parent(int(argv[2]), signal.SIGTERM)
    try:
        return conducted(run_dir, stop_signal)
    except HetoptError as refused:
        print(refused.message, file=sys.stderr)
        if run_dir.is_dir():
            tell_failure(run_dir / EVENTS_FILE, refused.message, hint=refused.hint)
        return refused.exit_code
