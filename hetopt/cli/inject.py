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
