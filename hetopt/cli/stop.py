"""`hetopt stop`: end a run from any terminal; its workers save a checkpoint first."""

from __future__ import annotations

import typer

from hetopt.cli.options import NewestRun


def stop(
    run: NewestRun = None,
    json_: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """Stop a run. Its workers finish the step, save a checkpoint and leave; nothing is left running.

    Go on later with `hetopt launch --on local --resume RUN` (or `--on rehearsal`, where it was one).
    """
    from hetopt.api.run import Run
    from hetopt.backends.ec2.renter.launcher import Ec2Launcher
    from hetopt.backends.ec2.renter.run_status import is_cleared, known
    from hetopt.cli import render
    from hetopt.core.run_status import RunState

    found = Run.find(run)
    folder, launcher, handle = found.folder, found.backend, found.handle
    if isinstance(launcher, Ec2Launcher):
        # Machines are given back first; how far they came is read after.
        over = is_cleared(folder)
        before = known(folder).state if over else RunState.RUNNING
    else:
        before = launcher.poll(handle).state
        over = before.is_over
    if not over:
        render.note(f"stopping {folder.name} …")
        try:
            launcher.stop(handle)
        except BaseException:
            render.note(f"{folder.name} may still run: end it with `hetopt stop {folder.name}`")
            raise
    after = launcher.poll(handle)
    if json_:
        render.print_json({"run": folder.name, "was": before.value, "is": after.state.value, "reason": after.reason})
    elif over:
        render.line(f"{folder.name} was already {before.value}.")
    else:
        render.line(f"{folder.name} is {after.state.value}.")
