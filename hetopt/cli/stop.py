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

    \b
      hetopt stop
      hetopt stop 20261120-131649
    """
    from hetopt.api.run import Run
    from hetopt.cli import render

    found = Run.find(run)
    # Machines are given back first; how far they came is read after.
    before, over = found.last_known()
    if not over:
        render.note(f"stopping {found.name} …")
        try:
            found.stop()
        except BaseException:
            render.note(f"{found.name} may still run: end it with `hetopt stop {found.name}`")
            raise
    after = found.status()
    if json_:
        was, now = before.state.value, after.state.value
        render.print_json({"run": found.name, "was": was, "is": now, "reason": after.reason})
    elif over:
        render.line(f"{found.name} was already {before.state.value}.")
    else:
        render.line(f"{found.name} is {after.state.value}.")
