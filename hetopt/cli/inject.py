"""`hetopt inject`: change a host of a rehearsal while it runs, from any terminal."""

from __future__ import annotations

import typer

from hetopt.cli.completion import runs


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
    """
    from hetopt.backends.emulation.description import parse_change
    from hetopt.backends.emulation.injection import ask_for_change
    from hetopt.backends.runs import RunFolders, runs_home
    from hetopt.cli import render
    from hetopt.core import formatting
    from hetopt.core.errors import BadInput
    from hetopt.core.run_folder import read_spec

    folder = RunFolders(home=runs_home()).find(run)
    miniature = read_spec(folder).miniature
    if miniature is None:
        raise BadInput(
            f"{folder.name} is no rehearsal, so nothing can be done to its hosts.",
            hint="start one with `hetopt launch PLAN --on rehearsal`",
        )
    asked = parse_change(change, [host.name for host in miniature.hosts])
    here = asked
    if asked.rate_bits_per_s is not None:
        here = asked.model_copy(update={"rate_bits_per_s": asked.rate_bits_per_s / miniature.time_factor})
    ask_for_change(folder, here)
    if json_:
        render.print_json(asked.model_dump(exclude_none=True))
        return
    rate = here.rate_bits_per_s
    scaled = f" (here {formatting.bit_rate(rate)})" if rate is not None and miniature.time_factor != 1 else ""
    render.line(f"asked {folder.name} for: {change.strip()}{scaled}")
