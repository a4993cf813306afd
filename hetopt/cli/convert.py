"""`hetopt convert`: write a session into a training script, and measure how far shares are from one machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetopt.cli.options import options


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `hetopt convert` is asked for."""

    script: Annotated[Path, typer.Argument(help="A training script of one process, with a loop over a DataLoader.")]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Its own arguments, after --, to compare both scripts with.", show_default=False),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The new script. Default: NAME_hetopt.py beside the old one."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Run both for three steps and compare their gradients and rates."),
    ] = True


@options(Conversion)
def convert(asked: Conversion) -> None:
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
    from hetopt.core.artifact import write_atomically
    from hetopt.core.names import converted_script, typed_script

    name, *arguments = typed_script((str(asked.script), *(asked.arguments or ())))
    asked = replace(asked, script=Path(name), arguments=arguments)
    target = asked.output or converted_script(asked.script)
    try:
        converted = hetopt.convert(asked.script)
    except NotPlain:
        terminal.write(FOUR_LINES)
        raise
    parse.ready_to_write(target, force=asked.force)
    terminal.write(converted.diff)
    for remark in converted.remarks:
        render.bullet(remark)
    write_atomically(target, converted.text)
    render.note(f"wrote {target}")
    if asked.compare:
        with render.progress("comparing both for three steps") as reporter:
            shares = check_script(target, asked.arguments or (), before=asked.script, reporter=reporter)
        render.line(str(shares))
