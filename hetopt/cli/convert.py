"""`hetopt convert`: write a session into a training script, and measure how far shares are from one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    script: Annotated[Path, typer.Argument(help="A training script of one process, with a loop over a DataLoader.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Its own arguments, after --, to compare both scripts with.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The new script. Default: NAME_hetopt.py beside the old one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Run both for three steps and compare their gradients and rates."),
    ] = True,
) -> None:
    """Write a session into a training script of one process; one that uses DistributedDataParallel runs as it is.

    The four lines are printed as a diff. Then both scripts run for three steps, the new one as two workers that share
    every batch 3 to 1, and equally, and the gradients and rates that their optimizers step by are compared. Where the
    script is not one loop over a DataLoader, the four lines are printed, and nothing is written.

    \b
      hetopt convert train.py -o train_hetopt.py -- --batch-size 64
    """
    import hetopt
    from hetopt.api.converting import FOUR_LINES, NotPlain
    from hetopt.api.exactness import check_script
    from hetopt.cli import parse, render, terminal
    from hetopt.core.plain_text import converted_script, typed_script

    name, *own_arguments = typed_script((str(script), *(arguments or ())))
    script = Path(name)
    target = output or converted_script(script)
    try:
        converted = hetopt.convert(script)
    except NotPlain:
        terminal.write(FOUR_LINES)
        raise
    parse.ready_to_write(target, force=force)
    terminal.write(converted.diff)
    for remark in converted.remarks:
        render.bullet(remark)
    parse.save(target, converted.text)
    if compare:
        with render.progress("comparing both for three steps") as reporter:
            shares = check_script(target, own_arguments, before=script, reporter=reporter)
        render.line(str(shares))
