"""Which runs can go on: what a backend whose runs are processes of this machine asks before it resumes one."""

from __future__ import annotations

from pathlib import Path

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import ProcessLauncher
from hetopt.core.errors import BadInput
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch


def resumable(launcher: ProcessLauncher, folder: Path, place: str, latest: Path) -> Launch:
    """The launch of a run that can go on.

    Args:
        launcher: that started it.
        folder: the run's.
        place: where that launcher's runs are, such as ``local``.
        latest: what names the run's newest checkpoint.

    Raises:
        BadInput: it was started elsewhere, is not over, or has no checkpoint.
    """
    launch = Launch.load(folder / LAUNCH_FILE)
    if launch.on != place:
        raise BadInput(
            f"{folder.name} was started on {launch.on}, and goes on there.",
            hint=f"hetopt launch --on {launch.on} --resume {folder.name}",
        )
    state = launcher.poll(RunHandle(run_dir=folder)).state
    if not state.is_over:
        raise BadInput(f"{folder.name} is still {state.value}.", hint=f"end it first with `hetopt stop {folder.name}`")
    if not latest.exists():
        raise BadInput(f"{folder.name} has no checkpoint to go on from.", hint="start it anew from its plan")
    return launch
