"""A worker process: finds its place in the run, joins the others, and trains.

torchrun starts it as ``python -m hetopt.trainer.worker RUN_DIR`` with RANK, LOCAL_RANK and WORLD_SIZE in its
environment; torchrun of `hetopt.trainer.host.agent` as a fork that does the same.

Where workers may be lost, a warden keeps them alive: a process with everything imported that becomes a new worker when
one of them is killed. Importing torch takes seconds, and a fork of a process that has imported it milliseconds. The
warden has no thread and no process group, so that a fork of it is a fresh worker.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, EventLog, read_log
from hetopt.core.interruption import StopSignal, die_with_parent
from hetopt.core.run_folder import (
    OUTPUT_FOLDER,
    OUTPUT_VARIABLE,
    RUN_VARIABLE,
    SPEC_VARIABLE,
    STOP_FILE,
    living_file,
    read_living,
)
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import failure_reason
from hetopt.core.search_path import run_script
from hetopt.trainer.host.agent import (
    FIRST_RANK_VARIABLE,
    HOST_PID_VARIABLE,
    MEETING_VARIABLE,
    died_of,
)
from hetopt.trainer.host.forks import WORKERS_NEED, import_all, only_imports

_ENDING = (signal.SIGTERM, signal.SIGINT)


def keep(work: Callable[[], int], *, replacements: int, tell: Callable[[int, int], None]) -> int:
    """Run ``work`` in a fork of this process, anew each time that a signal kills it; return its exit code.

    Where a signal kills it once too often, or after this process was asked to end, this process ends by the same
    signal, so that whoever watches sees why. SIGTERM and SIGINT to this process are handed on to the fork.

    Args:
        work: work that is done in a process of its own, and returns its exit code.
        replacements: most forks after the first.
        tell: called before each of them with the number of the signal that ended the fork before, and how many
            replacements are left, with this one.
    """
    asked_to_end: list[int] = []
    child = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        """Note that this process was asked to end, and hand the signal on to the fork, if there is one."""
        asked_to_end.append(number)
        with suppress(ProcessLookupError):
            if child:
                os.kill(child, number)

    before = {number: signal.signal(number, hand_on) for number in _ENDING}
    try:
        for left in range(replacements, -1, -1):
            child = _fork(work)
            if asked_to_end:
                os.kill(child, asked_to_end[-1])
            _, status = os.waitpid(child, 0)
            code, child = os.waitstatus_to_exitcode(status), 0
            if code >= 0:
                return code
            if asked_to_end or left == 0:
                break
            tell(-code, left)
        _end_by(-code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fork(work: Callable[[], int]) -> int:
    """Run the work in a fork; return its process number. Signals that end wait until the fork listens for itself."""
    # What is sent to the worker before it hears for itself waits, instead of going to this process's listener in it.
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        child = os.fork()
        if child == 0:
            _leave(work, earlier)
        return child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _leave(work: Callable[[], int], mask: Iterable[int]) -> NoReturn:
    """Do the work and exit with its code, 1 after an exception; this process never goes on as a second supervisor."""
    code = 1
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = work()
    finally:
        os._exit(code)


def _end_by(number: int) -> NoReturn:
    """End this process by a signal's default action."""
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)
    signal.pause()
    raise AssertionError("unreachable")


if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from hetopt.trainer.context import WorkerContext

Imports = Callable[[], "Callable[[WorkerContext], None]"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank, local rank and world size that torchrun gave this process.

    Attributes:
        rank: rank of the worker among all, from 0.
        local_rank: rank of the worker on its machine, from 0.
        world_size: number of workers.
    """

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Return rank, local rank and world size from torchrun's variables; without them 0, 0 and 1.

        Raises:
            ValueError: a variable is no whole number.
        """
        return cls(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
        )


def choose_device(spec: RunSpec, place: Place, cuda_devices: int) -> str:
    """Return this worker's device, "cpu" or "cuda:INDEX", by its spec and its turn among the machine's workers.

    ``auto`` takes a CUDA device of its own while there are any and the CPU after that; ``cuda`` shares devices when
    there are more workers than devices.

    Args:
        spec: spec of the run.
        place: place that torchrun gave this process.
        cuda_devices: number of CUDA devices of this machine.

    Raises:
        BadInput: CUDA is demanded and there is none.
    """
    wish = spec.workers[place.rank].device
    if wish == "cpu":
        return "cpu"
    first_here = place.rank - place.local_rank
    turn = sum(worker.device != "cpu" for worker in spec.workers[first_here : place.rank])
    if wish == "auto":
        return f"cuda:{turn}" if turn < cuda_devices else "cpu"
    if cuda_devices == 0:
        raise BadInput(
            f"worker {place.rank} is to run on CUDA, but this machine has no CUDA device.",
            hint="set its device to 'auto' or 'cpu'",
        )
    return f"cuda:{turn % cuda_devices}"


class StopWish(StopSignal):
    """A callable that tells whether the run is asked to stop: by SIGTERM or SIGINT to this worker, or by its stop file.

    A second signal ends the process at once.

    Args:
        run_dir: folder of the run, where the stop file is looked for.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._file = run_dir / STOP_FILE

    def __call__(self) -> bool:
        return super().__call__() is not None or self._file.exists()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        super()._on_signal(number, frame)
        signal.signal(number, signal.SIG_DFL)


def training() -> Callable[[WorkerContext], None]:
    """Return the function `train`, imported only now: imports are most of a short run's start-up."""
    from hetopt.trainer.loop import train

    return train


def main(arguments: list[str], work: Imports = training) -> int:
    """Run a worker of the run in ``arguments[0]`` by the function that ``work()`` returns; return the exit code.

    Failures are logged in the run's folder and told by the exit code. A script of the run is run in this process.

    Args:
        arguments: arguments of the command line: the run's folder.
        work: imports and returns what the worker does once it has joined the others; where workers may be lost, `train`
            in any case.

    Raises:
        BadInput: where workers may be lost: the run folder has no usable spec.
    """
    host = os.environ.get(HOST_PID_VARIABLE)
    if host is not None:
        die_with_parent(int(host), signal.SIGKILL)
    run_dir = Path(arguments[0])
    meeting = os.environ.get(MEETING_VARIABLE)
    return _live(run_dir, None, work) if meeting is None else _keep_alive(run_dir, meeting)


def _live(run_dir: Path, meeting: str | None, work: Imports = training) -> int:
    """Run the worker, and log why if it ends early; return the exit code.

    ``meeting`` None: the place of the group is in the environment alone.
    """
    # torch takes seconds to import: only after the guard stands.
    with only_imports():
        from hetopt.trainer.failure import FailureReport

    with FailureReport(run_dir, int(os.environ.get("RANK", "0"))) as report:
        spec, place = read_living(run_dir), Place.of(os.environ)
        if spec.script and spec.probe is None:
            _work_by_script(run_dir, spec, place)
        else:
            _work(run_dir, spec, place, meeting, work)
    return report.exit_code


def _keep_alive(run_dir: Path, meeting: str) -> int:
    """Run the worker in a fork of this process, which has imported everything; return its exit code.

    A fork that a signal kills is replaced, as often as the run restarts workers.
    """
    import_all(WORKERS_NEED)

    spec, warden = read_living(run_dir), os.getpid()

    def work() -> int:
        die_with_parent(warden, signal.SIGKILL)
        return _live(run_dir, meeting)

    # torchrun counts the workers of this host alone.
    rank = int(os.environ.get(FIRST_RANK_VARIABLE, "0")) + Place.of(os.environ).rank
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(spec.workers))}
    return keep(work, replacements=spec.max_restarts, tell=partial(_tell_lost, run_dir, spec, rank))


def _tell_lost(run_dir: Path, spec: RunSpec, place: int, number: int, replacements: int) -> None:
    """Log that signal ``number`` killed the worker of rank ``place``; ``replacements`` are left, this one included."""
    with closing(EventLog(run_dir / EVENTS_FILE)) as events:
        events.write(
            "worker_lost",
            worker=place,
            host=spec.workers[place].host,
            reason=died_of({place: -number}, spec) or f"worker {place} was ended",
            replacements_left=replacements - 1,
        )


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1

LARGEST_KEPT_BYTES = 32 * 2**20
"""Most bytes that glibc (2.x, 64 bit) lets a single block have that is kept; a larger one is mapped and unmapped."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in this process, which spares page faults in each step; return whether it does.

    glibc returns freed memory to the kernel once there is more of it than a threshold, and a training step frees as
    much as it takes. The kernel then hands out every page anew in every step, zeroed, at the price of a fault. Four
    workers with an 8.7 MB gradient took up to 29,000 faults a step, which was a third of their processor time.
    What the process holds stays what it held at most. Where the library is not glibc, nothing changes.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    # Both: setting either stops glibc from adjusting the other.
    return bool(set_option(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(set_option(_M_TRIM_THRESHOLD, _NEVER))


def _prepared(spec: RunSpec, place: Place) -> str:
    """Set this process's allocator and number of threads; return its worker's device, ``cpu`` or ``cuda:INDEX``.

    Raises:
        BadInput: it is one of another number of workers than the run has, or a GPU is demanded and there is none.
    """
    import torch

    if place.world_size != len(spec.workers):
        raise BadInput(
            f"the spec is for {len(spec.workers)} workers, but {place.world_size} were started.",
            hint=f"run torchrun with {len(spec.workers)} processes",
        )
    keep_freed_memory()
    threads = spec.workers[place.rank].threads
    if threads is not None:
        torch.set_num_threads(threads)
    return choose_device(spec, place, torch.cuda.device_count())


def _work(run_dir: Path, spec: RunSpec, place: Place, meeting: str | None, work: Imports) -> None:
    """Join the other workers, on the device that the spec names, and do what ``work()`` returns.

    Args:
        run_dir: folder of the run.
        spec: spec of the run.
        place: rank, local rank and world size of this worker.
        meeting: address of the store where workers that may be lost meet, who then train; None: all stay to the end.
        work: imports and returns what the worker does; not used with ``meeting``.
    """
    import torch

    from hetopt.trainer.context import WorkerContext

    stop_wish = StopWish(run_dir)
    device = torch.device(_prepared(spec, place))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(spec.seed)
    if meeting is not None:
        _work_among_changing(run_dir, spec, place, device, stop_wish, meeting)
        return
    with (
        closing(EventLog(run_dir / EVENTS_FILE if place.rank == 0 else None)) as events,
        _process_group(place, device, spec.exchange_timeout_s) as store,
    ):
        # Until here a signal ends the process at once: there is nothing to save, and a worker that waits for its peers
        # could not answer.
        stop_wish.listen()
        context = WorkerContext(
            spec=spec,
            rank=place.rank,
            world_size=place.world_size,
            device=device,
            run_dir=run_dir,
            events=events,
            stop_requested=stop_wish,
            store=store,
        )
        with only_imports():
            do = work()
        do(context)


def _work_among_changing(
    run_dir: Path, spec: RunSpec, place: Place, device: torch.device, stop_wish: StopWish, meeting: str
) -> None:
    """Train with the workers that are there, from one generation to the next, until the run is over or is left."""
    from hetopt.trainer.elastic.rendezvous import Abandoned
    from hetopt.trainer.elastic.worker_group import WorkerGroup
    from hetopt.trainer.loop import Material, train
    from hetopt.trainer.sharding import wish_of

    material = Material.load(spec)
    group = WorkerGroup(
        spec,
        place.rank,
        life=secrets.token_hex(8),
        run_dir=run_dir,
        meeting=meeting,
        # Where all workers start again together nobody is to find what the last ones left; torchrun counts how often.
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        device=device,
        stop_requested=stop_wish,
    )
    with closing(group):
        try:
            context = group.join()
            stop_wish.listen()
            # Devices that share a model lose a part of it with one of them: all start again from a checkpoint.
            train(context, group if wish_of(spec, material.task.shard) == "none" else None, material)
        except Abandoned as why:
            if why.args:
                print(f"this process ends: {why}", file=sys.stderr)


@contextmanager
def _process_group(place: Place, device: object, timeout_s: float) -> Iterator[Store | None]:
    """Open the default process group of all workers, and yield its store, None for a single worker; close it then.

    Raises:
        BadInput: workers have different versions, or cannot meet.
        HungPeer: in place of a RuntimeError inside that says that a collective timed out.
    """
    if place.world_size == 1:
        yield None
        return
    import torch.distributed as dist

    from hetopt.trainer.agreement import join_group
    from hetopt.trainer.comm.peers import has_timed_out, hung
    from hetopt.trainer.host.gate import group_store

    store = group_store(os.environ, place.rank)
    join_group(store, place.rank, place.world_size, device, timeout_s)
    try:
        yield store
    except RuntimeError as error:
        if has_timed_out(error):
            raise hung(store, place.rank, range(place.world_size)) from error
        raise
    finally:
        dist.destroy_process_group()


def leave(exit_code: int) -> NoReturn:
    """End this process at once with ``exit_code``, after flushing its output; the interpreter is not torn down.

    Everything that matters is on disk by now. Whatever still refers to the process group (DistributedDataParallel, a
    module that torch imported while the group existed) keeps its threads alive past `destroy_process_group`, and then
    the interpreter's end aborts the process every few runs ("terminate called without an active exception", torch 2.13
    with gloo). It also takes one to two seconds, in which nothing is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_VISIBLE = "CUDA_VISIBLE_DEVICES"

HOST_SAYS_S = 3.0
"""Seconds for the process that hosts the workers to find one that was killed: it looks ten times a second."""


def _work_by_script(run_dir: Path, spec: RunSpec, place: Place) -> None:
    """Run the script of a run to its end.

    It finds what it would find if a person had started it by torchrun: its arguments, its folder among Python's,
    torchrun's variables, one device; nobody at the keyboard, and no display. Its session finds the run.
    """
    from hetopt.trainer.ddp.script import unequal
    from hetopt.trainer.failure import Lines, OthersFailed, is_peer_loss
    from hetopt.trainer.script.batches import REGISTRY, Stopped

    os.environ.update(surroundings(os.environ, _prepared(spec, place)))
    for name in _DISPLAYS:
        os.environ.pop(name, None)
    os.environ[SPEC_VARIABLE], os.environ[RUN_VARIABLE] = str(living_file(run_dir)), str(run_dir)
    outputs = run_dir.resolve() / OUTPUT_FOLDER
    outputs.mkdir(exist_ok=True)
    os.environ[OUTPUT_VARIABLE] = str(outputs)
    script, lines = spec.script[0], Lines(spec.script[0])
    sys.argv = list(spec.script_command)
    who = f"worker {place.rank}, " if place.world_size > 1 else ""
    reason, ended_at = "script", script
    try:
        try:
            with unequal(spec, run_dir) as ddp_run:
                run_script(script)
        except SystemExit as stop:
            ended_at = lines.of(stop)
            if stop.code not in (None, 0):
                how = f"with code {stop.code}" if isinstance(stop.code, int) else f"and said: {stop.code}"
                failed = RunFailed(f"the script exits here {how}.", hint="see what it printed")
                code = stop.code % 256 if isinstance(stop.code, int) else 1
                failed.exit_code = code or RunFailed.exit_code  # type: ignore[misc]  # of this failure alone
                raise failed from None
        for session in REGISTRY.open:
            session.close()  # of a script that wrote no `with`: the others hear where one worker came to its end early
    except Stopped:
        reason = "stopped"
    except OthersFailed:
        raise
    except RuntimeError as error:
        if is_peer_loss(error) and _nobody_knows_why(run_dir):
            raise RunFailed(
                f"{who}{lines.of(error)}: another worker has left, or does something else here.",
                hint="let all workers take the same number of steps and call the same collectives",
            ) from error
        raise
    except HetoptError as error:
        left = error.__context__ if isinstance(error.__context__, SystemExit) else error
        error.message = f"{who}{lines.of(left)}: {error.message}"
        raise
    trained = REGISTRY.begun > 0 or ddp_run() is not None
    if not trained or (place.rank == 0 and not _tell_end(run_dir, reason)):
        raise RunFailed(
            f"{who}{ended_at}: the script ended here without a step of DistributedDataParallel or of a session.",
            hint="a script that uses DistributedDataParallel runs as it is; into one for a single process "
            "`hetopt convert` writes a session",
        )


def surroundings(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variables for a script: its worker's GPU alone, with local rank 0, or no GPU; no display for plots.

    A script takes the first device there is (``cuda``, ``cuda:0``) or that of its local rank, so a worker sees its own
    alone; where it sees none, its local rank is torchrun's, by which scripts let one worker of a machine prepare data.

    Args:
        environment: variables of this process.
        device: device of the worker, "cpu" or "cuda:INDEX".
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return {_VISIBLE: "", "MPLBACKEND": "Agg"}
    visible = [name for name in environment.get(_VISIBLE, "").split(",") if name]
    return {_VISIBLE: visible[int(index)] if visible else index, "LOCAL_RANK": "0", "MPLBACKEND": "Agg"}


def _nobody_knows_why(run_dir: Path) -> bool:
    """Return whether, after a wait, the log has no reason why the run ended; False at once among several machines."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return False  # the hosts find out who is lost
    time.sleep(HOST_SAYS_S)
    return failure_reason(read_log(run_dir / EVENTS_FILE)) is None


def _tell_end(run_dir: Path, reason: str) -> bool:
    """Write the event that ends a run; return whether there was one: a step of a session was done."""
    log = read_log(run_dir / EVENTS_FILE)
    run = RunFold.of(log)
    ends = [(event.step, event.epoch) for event in log if event.event == "session_finished"]
    step, epoch = max([(run.step, run.epoch), *ends])
    if not step:
        return False
    with closing(EventLog(run_dir / EVENTS_FILE)) as events:
        events.write("training_finished", step=step, epoch=epoch, reason=reason, training_s=run.trained_for_s or 0.0)
    return True


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
