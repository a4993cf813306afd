"""`hetopt stop`: end a run from any terminal; its workers save a checkpoint first."""

from __future__ import annotations

import typer


def stop(
    run: str | None = typer.Argument(None, help="Run, or any unambiguous part of its name. Default: the newest."),
    json_: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """Stop a run. Its workers finish the step, save a checkpoint and leave; nothing is left running.

    Go on later with `hetopt launch --on local --resume RUN` (or `--on rehearsal`, where it was one).
    """
    from hetopt.optimizer.cli import render
    from hetopt.optimizer.cli.run_record import launcher_of, read_launch
    from hetopt.optimizer.ec2.launcher import Ec2Launcher
    from hetopt.trainer.launch.base import RunHandle
    from hetopt.trainer.launch.runs import RunFolders, runs_home

    folder = RunFolders(home=runs_home()).find(run)
    launcher = launcher_of(read_launch(folder), folder)
    handle = RunHandle(run_dir=folder)
    # Of rented machines nothing is asked first: they are given back, and then it is read how far they came.
    before = (launcher.known if isinstance(launcher, Ec2Launcher) else launcher.poll)(handle).state
    over = launcher.is_cleared(handle) if isinstance(launcher, Ec2Launcher) else before.is_over
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
