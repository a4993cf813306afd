"""`hetopt logs`, `stop` and `inject`: what is asked of a run, or done to it, from any terminal."""

from __future__ import annotations

import typer

from hetopt.cli.options import NewestRun, runs


def logs(
    run: NewestRun = None,
    follow: bool = typer.Option(False, "--follow", "-f", help="Keep printing until the run is over."),
    events: bool = typer.Option(False, "--events", "--json", help="The event log (JSON Lines) instead of the output."),
    worker: int | None = typer.Option(None, "--worker", "-w", min=0, help="Only this worker's output."),
) -> None:
    """Print what happened in a run and what its workers wrote, each line behind its source; -f follows.

    \b
      hetopt logs
      hetopt logs --follow
    """
    from hetopt.api.run import Run
    from hetopt.cli import terminal

    for line in Run.find(run).logs(worker=worker, events=events, follow=follow):
        terminal.write(f"{line.text}\n" if events else f"[{line.source}] {line.text}\n")
        if follow:
            terminal.flush()
    terminal.flush()


def stop(
    run: NewestRun = None,
    json_: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """Stop a run. Its workers finish the step, save a checkpoint and leave; nothing is left running.

    Go on later with `hetopt launch --resume RUN`.

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


def inject(
    run: str = typer.Argument(..., autocompletion=runs, help="Run, or any unambiguous part of its name."),
    change: str = typer.Argument(
        ..., help="What happens to which host: 'h2 speed=0.25,rate=10mbit', 'h3 dies', 'h1 cut', '* rate=50mbit'."
    ),
    json_: bool = typer.Option(False, "--json", help="Print the change as JSON, as it was asked for."),
) -> None:
    """Slow a host of a running rehearsal down, limit its link, cut it off, or let it die.

    Speeds are those that `hetopt launch` shows, rates those of the rehearsed cluster. A moment in front puts the change
    off: '30s h2 speed=0.5' is 30 seconds after training began, 'step 500 h2 speed=0.5' at that step.

    \b
      hetopt inject 20261120-131649 'h1 speed=0.5,rate=10mbit'
      hetopt inject 20261120-131649 'h2 dies'
    """
    from hetopt.api.run import Run
    from hetopt.cli import render
    from hetopt.core import formatting

    found = Run.find(run)
    asked, rate_here = found.change(change)
    if json_:
        render.print_json(asked.model_dump(exclude_none=True))
        return
    scaled = rate_here is not None and rate_here != asked.rate_bits_per_s
    here = f" (here {formatting.bit_rate(rate_here)})" if scaled and rate_here is not None else ""
    render.line(f"asked {found.name} for: {change.strip()}{here}")
