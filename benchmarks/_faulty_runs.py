"""Real runs with faults, one after another: ``python -m benchmarks._faulty_runs FOLDER``.

One process imports torch, which takes seconds, and then has for each run of ``FOLDER/runs.json`` its workers forked,
each under a warden as in a run of its own. Faults happen when the run's log has come to their step, and what came of it
is written to ``FOLDER/NAME/outcome.json``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from hetopt.core.artifact import write_atomically
from hetopt.core.events.log import EVENTS_FILE, Event, parse_events
from hetopt.core.interruption import die_with_parent
from hetopt.core.run_folder import CHECKPOINT_FOLDER, MANIFEST_FILE, read_from, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.trainer import worker
from hetopt.trainer.host.agent import HOST_PID_VARIABLE, MEETING_VARIABLE
from hetopt.trainer.host.forks import WORKERS_NEED, import_all

RUNS_FILE, OUTCOME_FILE = "runs.json", "outcome.json"
FaultKind = Literal["kill", "freeze", "slow", "notice", "tear", "full", "leave", "return", "kill-all"]
_LOOK_S = 0.02
_FROZEN_S = 1.0
_SLOW_TURNS, _SLOW_TURN_S = 10, 0.1
_DISK_BYTES = 8_000_000
"""Room for some checkpoints."""
_FULL_S = 1.0
_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is injected into a run at a step.

    Attributes:
        at_step: when the log has come to this step.
        kind: ``kill`` a worker (it is replaced), ``freeze`` it for a second, give ``notice`` (all workers save and end,
            and begin again), ``tear`` the newest checkpoint at a byte and kill all, ``leave``: a worker goes with its
            warden and does not come back until it is to ``return``, ``kill-all``, ``slow``: for a second a worker gets
            a tenth of its time, ``full``: for a second there is no room for a checkpoint.
        place: number of the worker, for faults of one worker.
        byte: where a checkpoint is torn, as a fraction of its largest file.
    """

    at_step: int
    kind: FaultKind
    place: int = 0
    byte: float = 0.5


class FaultyRun:
    """A run with its faults and processes.

    Args:
        run_dir: existing folder of the run.
        spec: run spec.
        faults: faults to inject, in the order of their steps.
        environment: variables of the workers, on top of this process's.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: RunSpec,
        faults: list[Fault],
        environment: dict[str, str],
    ) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._faults = list(faults)
        self._environment = environment
        self._wardens: dict[int, int] = {}
        self._away: set[int] = set()
        self._read = 0
        self._step = 0
        self._last: Event | None = None
        self._failures = 0

    def run(self, within_s: float) -> str:
        """Start the run, inject its faults, and return the event by which it ended; empty: not in time.

        Raises:
            _Again: all workers are gone, and the run is to go on from its checkpoint: by another call.
        """
        write_spec(self._run_dir, self._spec)
        # What is due at a step happens once this start has come to it: who leaves before all have begun ends the run.
        self._look()
        self._step = 0
        began_s = time.monotonic()
        meeting, store = _start_store()
        try:
            for place in range(len(self._spec.workers)):
                self._start(place, meeting)
            while time.monotonic() - began_s < within_s:
                self._look()
                if self._faults and self._step >= self._faults[0].at_step:
                    self._do(self._faults.pop(0), meeting)
                if self._collect(meeting):
                    break
                time.sleep(_LOOK_S)
            self._look()
        finally:
            for warden in self._wardens.values():
                _end(warden)
            _end(store)
        return "" if self._last is None else str(self._last["event"])

    def _start(self, place: int, meeting: str) -> None:
        """Fork a process that keeps a worker's place alive; its output goes to the place's log."""
        here = os.getpid()
        child = os.fork()
        if child == 0:
            os.environ.update(
                {
                    **self._environment,
                    HOST_PID_VARIABLE: str(here),
                    "RANK": str(place),
                    "LOCAL_RANK": str(place),
                    "WORLD_SIZE": str(len(self._spec.workers)),
                    MEETING_VARIABLE: meeting,
                }
            )
            _redirect(self._run_dir / f"worker-{place}.log")
            _leave(worker.main([str(self._run_dir)]))
        self._wardens[place] = child

    def _collect(self, meeting: str) -> bool:
        """Reap supervisors that have ended; return whether the run is over; raise `_Again` to launch it again."""
        for place, warden in list(self._wardens.items()):
            pid, status = os.waitpid(warden, os.WNOHANG)
            if pid:
                del self._wardens[place]
                if os.waitstatus_to_exitcode(status) != 0:
                    self._failures += 1
        if self._wardens:
            return False
        if self._last is not None and self._last["event"] == "training_finished" and self._last["reason"] != "stopped":
            return True
        if self._failures > 20 * len(self._spec.workers):
            return True
        # Ended on notice, or killed: the run goes on from its checkpoint, with everybody.
        (self._run_dir / "stop").unlink(missing_ok=True)
        self._away.clear()
        self._last = None
        raise _Again

    def _look(self) -> None:
        """Read new events of the log: the last step, and the event by which the run ended."""
        text, self._read = read_from(self._run_dir / EVENTS_FILE, self._read)
        for event in parse_events(text.splitlines(keepends=True)):
            if event["event"] == "step":
                self._step = event["step"]
            if event["event"] in ("training_finished", "run_failed"):
                self._last = event

    def _may_do_without(self, place: int) -> bool:
        """Return whether the run goes on without a worker; else the others wait a minute and end, as they should."""
        left = len(self._wardens) - 1
        return 2 * left > len(self._wardens) or (2 * left == len(self._wardens) and place != min(self._wardens))

    def _do(self, fault: Fault, meeting: str) -> None:
        """Inject a fault, and wait as long as it lasts; raise `_Again` where it ends all workers."""
        match fault.kind:
            case "kill":
                _signal(_child_of(self._wardens.get(fault.place)), signal.SIGKILL)
            case "freeze":
                frozen = _child_of(self._wardens.get(fault.place))
                _signal(frozen, signal.SIGSTOP)
                time.sleep(_FROZEN_S)
                _signal(frozen, signal.SIGCONT)
            case "slow":
                slowed = _child_of(self._wardens.get(fault.place))
                for _ in range(_SLOW_TURNS):
                    _signal(slowed, signal.SIGSTOP)
                    time.sleep(0.9 * _SLOW_TURN_S)
                    _signal(slowed, signal.SIGCONT)
                    time.sleep(0.1 * _SLOW_TURN_S)
            case "full":
                filler = self._run_dir / CHECKPOINT_FOLDER / "filler"
                _fill(filler)
                time.sleep(_FULL_S)
                filler.unlink()
            case "notice":
                (self._run_dir / "stop").touch()
            case "leave":
                if fault.place in self._wardens and self._may_do_without(fault.place):
                    _end(self._wardens.pop(fault.place))
                    self._away.add(fault.place)
            case "return":
                for place in sorted(self._away):
                    self._start(place, meeting)
                self._away.clear()
            case "tear":
                self._wait_for_two_checkpoints()
                self._end_all()
                tear(self._run_dir / CHECKPOINT_FOLDER, fault.byte)
                raise _Again
            case "kill-all":
                self._end_all()
                raise _Again

    def _end_all(self) -> None:
        """Kill all workers, and forget who had left: all start at the next turn."""
        for warden in self._wardens.values():
            _end(warden)
        self._wardens.clear()
        self._away.clear()

    def _wait_for_two_checkpoints(self) -> None:
        """Wait until two checkpoints are whole, as a disk may be slow; the run goes on meanwhile."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while len(complete(self._run_dir / CHECKPOINT_FOLDER)) < 2 and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)


class _Again(Exception):
    """The signal that all workers are gone, and the run is to be started again."""


def complete(folder: Path) -> list[Path]:
    """Return the whole checkpoints: a manifest is written before a checkpoint gets its name."""
    return [path for path in folder.glob("step-*[0-9]") if (path / MANIFEST_FILE).exists()]


def tear(folder: Path, byte: float) -> None:
    """Truncate the largest file of the newest checkpoint to the fraction ``byte``; nothing where there are not two."""
    steps = complete(folder)
    if len(steps) < 2:
        return  # without another one the run would be refused, as it should be
    newest = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    largest = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(largest, int(byte * largest.stat().st_size))


def run_all(folder: Path) -> None:
    """Do all runs of ``FOLDER/runs.json``, one after the other, and write how each ended into its folder.

    A run that takes longer than it may ends, and counts as not over.
    """
    for entry in json.loads((folder / RUNS_FILE).read_text(encoding="utf-8")):
        run_dir = folder / entry["name"]
        run_dir.mkdir(exist_ok=True)
        spec = RunSpec.model_validate(entry["spec"])
        faults = [Fault(**fault) for fault in entry["faults"]]
        run = FaultyRun(run_dir, spec, faults, entry.get("environment", {}))
        with (
            _small_disk(run_dir / CHECKPOINT_FOLDER) if any(fault.kind == "full" for fault in faults) else nullcontext()
        ):
            began_s = time.monotonic()
            ended = _until_the_end(run, began_s + float(entry.get("within_s", 120.0)))
        write_atomically(run_dir / OUTCOME_FILE, json.dumps({"ended": ended}))
        took_s = time.monotonic() - began_s
        print(f"  {entry['name']}: {ended or 'not in time'} after {took_s:.1f} s", file=sys.stderr)


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk at a folder inside, which only root may do."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(file: Path) -> None:
    """Write to a file until there is no room left."""
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))


def _until_the_end(run: FaultyRun, deadline_s: float) -> str:
    """Return the event by which a run ended, however often it began again; empty: not in time."""
    while True:
        with suppress(_Again):
            return run.run(deadline_s - time.monotonic())


def _start_store() -> tuple[str, int]:
    """Start a process that holds the rendezvous store; return the store's address and the process's number."""
    here, there = get_context("fork").Pipe()
    child = os.fork()
    if child == 0:
        die_with_parent(os.getppid(), signal.SIGKILL)
        _hold_store(there)
    meeting = here.recv_bytes().decode()
    return meeting, child


def _hold_store(tell: Connection) -> NoReturn:
    """Open the rendezvous store, send its address over ``tell``, and keep it until this process is killed."""
    from hetopt.trainer.host.gate import open_store

    store = open_store()
    tell.send_bytes(f"127.0.0.1:{store.port}".encode())
    while True:
        signal.pause()


def _child_of(warden: int | None) -> int | None:
    """Return the process number of the worker under the supervisor process ``warden``; None: there is none."""
    if warden is None:
        return None
    try:
        children = Path(f"/proc/{warden}/task/{warden}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def _signal(process: int | None, number: signal.Signals) -> None:
    """Send a signal to a process; None, or a process that is gone: do nothing."""
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _end(process: int) -> None:
    """Kill a child of this process, and with it what dies with its parent."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _redirect(log: Path) -> None:
    """Append this process's output and errors to a log from now on."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # Whoever lets it run in turns may end while it stands still.
    die_with_parent(os.getppid(), signal.SIGKILL)
    import_all(WORKERS_NEED)
    run_all(Path(sys.argv[1]))
