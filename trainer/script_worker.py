"""A worker process that runs a training script with a session in it, in place of a task.

torchrun starts it as ``python -m hetopt.trainer.script_worker RUN_DIR``. The script finds what it would find if a
person had started it: its arguments, its folder among Python's, one device. Its session finds the run.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from contextlib import closing
from pathlib import Path

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.events.reader import read_log
from hetopt.core.process_guard import die_with_parent
from hetopt.core.run_folder import RUN_VARIABLE, SPEC_FILE, SPEC_VARIABLE, read_spec
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.allocator import keep_freed_memory
from hetopt.trainer.host.agent import HOST_PID_VARIABLE
from hetopt.trainer.worker import Place, check_place, choose_device, leave


def main(arguments: list[str]) -> int:
    """Run the script to its end; the exit code."""
    host = os.environ.get(HOST_PID_VARIABLE)
    if host is not None:
        die_with_parent(int(host), signal.SIGKILL)
    run_dir = Path(arguments[0])
    # torch takes seconds to import: only after the guard stands.
    from hetopt.trainer.failure import FailureReport

    place = Place.of(os.environ)
    with FailureReport(run_dir, place.rank) as report:
        _run(run_dir, read_spec(run_dir), place)
    return report.exit_code


def _run(run_dir: Path, spec: RunSpec, place: Place) -> None:
    import torch

    from hetopt.trainer.session.flow import Stopped

    check_place(spec, place)
    script, *rest = spec.script
    threads = spec.workers[place.rank].threads
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(spec, place, torch.cuda.device_count())
    # A script takes the first device there is, or that of its local rank.
    os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    os.environ["LOCAL_RANK"] = "0"
    os.environ[SPEC_VARIABLE] = str(run_dir / SPEC_FILE)
    os.environ[RUN_VARIABLE] = str(run_dir)
    keep_freed_memory()
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    reason = "script"
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise RunFailed(f"{script} exited with code {stop.code}.", hint="see what it printed") from None
    except Stopped:
        reason = "stopped"
    if place.rank == 0:
        _tell_end(run_dir, reason, script)


def _tell_end(run_dir: Path, reason: str, script: str) -> None:
    """Write the event that ends a run."""
    told = RunFold.of(read_log(run_dir / EVENTS_FILE).events)
    if not told.logged_steps:
        raise RunFailed(
            f"{script} ended without a step of a session.",
            hint="write one in: `hetopt convert` does it for most scripts",
        )
    with closing(EventLog(run_dir / EVENTS_FILE)) as events:
        events.write(
            "training_finished", step=told.step, epoch=told.epoch, reason=reason, training_s=told.trained_for_s or 0.0
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m hetopt.trainer.script_worker RUN_DIR", file=sys.stderr)
        sys.exit(BadInput.exit_code)
    leave(main(sys.argv[1:]))
