"""A worker process that runs a training script with a session in it, in place of a task.

torchrun starts it as ``python -m hetopt.trainer.script_worker RUN_DIR``. The script finds what it would find if a
person had started it by torchrun: its arguments, its folder among Python's, torchrun's variables, one device; nobody at
the keyboard, and no display. Its session finds the run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, EventLog, read_log
from hetopt.core.interruption import die_with_parent
from hetopt.core.run_folder import OUTPUT_FOLDER, OUTPUT_VARIABLE, RUN_VARIABLE, SPEC_VARIABLE, living_file, read_living
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import failure_reason
from hetopt.core.search_path import run_script
from hetopt.trainer.failure import Lines
from hetopt.trainer.host.agent import HOST_PID_VARIABLE
from hetopt.trainer.worker import Place, check_place, choose_device, keep_freed_memory, leave

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_VISIBLE = "CUDA_VISIBLE_DEVICES"

HOST_SAYS_S = 3.0
"""For the process that hosts the workers to find one that was killed: it looks ten times a second."""


class ScriptExited(RunFailed):
    """The script said itself that it failed, by its exit code.

    Args:
        place: its worker, file and line.
        code: the exit code, or what was given to `sys.exit` in its place.
    """

    def __init__(self, place: str, code: object) -> None:
        said = f"with code {code}" if isinstance(code, int) else f"and said: {code}"
        super().__init__(f"{place}: the script exits here {said}.", hint="see what it printed")
        self.code = code % 256 if isinstance(code, int) else 1


def main(arguments: list[str]) -> int:
    """Run the script to its end; the exit code is the script's, or hetopt's where something else went wrong."""
    host = os.environ.get(HOST_PID_VARIABLE)
    if host is not None:
        die_with_parent(int(host), signal.SIGKILL)
    run_dir = Path(arguments[0])
    # torch takes seconds to import: only after the guard stands.
    from hetopt.trainer.failure import FailureReport

    place, code = Place.of(os.environ), 0
    with FailureReport(run_dir, place.rank) as report:
        try:
            _run(run_dir, read_living(run_dir), place)
        except ScriptExited as exited:
            code = exited.code
            raise
    return code or report.exit_code


def _run(run_dir: Path, spec: RunSpec, place: Place) -> None:
    import torch

    from hetopt.trainer.ddp.script import unequal
    from hetopt.trainer.failure import OthersFailed, is_peer_loss
    from hetopt.trainer.script.plan import REGISTRY, SessionPlan, Stopped

    check_place(spec, place)
    threads = spec.workers[place.rank].threads
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(spec, place, torch.cuda.device_count())
    os.environ.update(surroundings(os.environ, device))
    for name in _DISPLAYS:
        os.environ.pop(name, None)
    os.environ[SPEC_VARIABLE], os.environ[RUN_VARIABLE] = str(living_file(run_dir)), str(run_dir)
    outputs = run_dir.resolve() / OUTPUT_FOLDER
    outputs.mkdir(exist_ok=True)
    os.environ[OUTPUT_VARIABLE] = str(outputs)
    keep_freed_memory()
    script, lines = spec.script[0], Lines(spec.script[0])
    sys.argv = list(spec.script_command)
    who = f"worker {place.rank}, " if place.world_size > 1 else ""
    reason, ended_at = "script", script
    try:
        try:
            with unequal(SessionPlan(spec=spec), run_dir) as ddp_run:
                run_script(script)
        except SystemExit as stop:
            ended_at = lines.of(stop)
            if stop.code not in (None, 0):
                raise ScriptExited(f"{who}{ended_at}", stop.code) from None
        for one in REGISTRY.open:
            one.close()  # of a script that wrote no `with`: the others hear where one worker came to its end early
    except Stopped:
        reason = "stopped"
    except (ScriptExited, OthersFailed):
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
    """What a script finds in its environment besides what torchrun says.

    A script takes the first device there is (``cuda``, ``cuda:0``) or that of its local rank, so a worker sees its own
    alone; where it sees none, its local rank is torchrun's, by which scripts let one worker of a machine prepare data.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return {_VISIBLE: "", "MPLBACKEND": "Agg"}
    visible = [name for name in environment.get(_VISIBLE, "").split(",") if name]
    return {_VISIBLE: visible[int(index)] if visible else index, "LOCAL_RANK": "0", "MPLBACKEND": "Agg"}


def _nobody_knows_why(run_dir: Path) -> bool:
    """Return whether no worker of this machine has said why it left, nor has its host, in the time that they take."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return False  # the hosts find out who is lost
    time.sleep(HOST_SAYS_S)
    return failure_reason(read_log(run_dir / EVENTS_FILE).events) is None


def _tell_end(run_dir: Path, reason: str) -> bool:
    """Write the event that ends a run; says whether there was one: a step of a session was done."""
    log = read_log(run_dir / EVENTS_FILE).events
    told = RunFold.of(log)
    ends = [(event.step, event.epoch) for event in log if event.event == "session_finished"]
    step, epoch = max([(told.step, told.epoch), *ends])
    if not step:
        return False
    with closing(EventLog(run_dir / EVENTS_FILE)) as events:
        events.write("training_finished", step=step, epoch=epoch, reason=reason, training_s=told.trained_for_s or 0.0)
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m hetopt.trainer.script_worker RUN_DIR", file=sys.stderr)
        sys.exit(BadInput.exit_code)
    leave(main(sys.argv[1:]))
