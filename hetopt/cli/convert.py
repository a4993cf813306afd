"""`hetopt convert`: write a session into a training script, and measure how far shares are from one machine."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetopt.cli.options import options

if TYPE_CHECKING:
    from hetopt.api.exactness import Exactness, Precision


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

    The four lines are printed as a diff. Then both scripts run for three steps, the new one alone and as two workers
    that share every batch 3 to 1, and the gradients and rates that their optimizers step by are compared. Where the
    script is not one loop over a DataLoader, the four lines are printed, and nothing is written.

    \b
      hetopt convert train.py -o train_hetopt.py -- --batch-size 64
    """
    import hetopt
    from hetopt.api.converting import FOUR_LINES, NotPlain
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
        _compare(asked, target)


def _compare(asked: Conversion, target: Path) -> None:
    """Run both scripts for three steps, and say how far shares are from one machine.

    Raises:
        RunFailed: alone, the new script computes something else than the old one.
    """
    from hetopt.api.exactness import EXACT
    from hetopt.cli import render
    from hetopt.core.errors import RunFailed

    compared = _compared(asked, target, "float32")
    if not compared.is_exact and not compared.options:
        # Deep networks amplify rounding from layer to layer, and float64 tells it from a mistake.
        with suppress(RunFailed):  # some operators have no float64
            compared = _compared(asked, target, "float64")
    if compared.options:
        raise RunFailed(
            f"the new script tells its optimizers something else than the old one: {compared.options}.",
            hint="see which of its lines ask for the number of workers, or for the size of a batch",
        )
    if compared.alone > EXACT:
        raise RunFailed(
            f"the new script alone differs from the old one by {_spelled(compared.alone)}.",
            hint="random numbers that depend on time or on processes are one cause",
        )
    computed = ", computed in float64" if compared.precision == "float64" else ""
    render.line(f"Shares differ from one machine by {_spelled(compared.shared)}{computed}.")
    if compared.shared > EXACT:
        render.bullet(
            'BatchNorm normalises each worker\'s samples, as under DistributedDataParallel: batch_norm="synchronized" '
            "normalises by the whole batch."
            if compared.is_of_batch_norm
            else "The loss is a sum, couples samples, or averages over something else: weight= or run.gather may mend "
            "it, as docs/your-own-code.md shows."
        )


def _compared(asked: Conversion, target: Path, precision: Precision) -> Exactness:
    from hetopt.api.exactness import compare
    from hetopt.cli import render

    with render.progress(f"comparing both for three steps in {precision}") as reporter:
        return compare(asked.script, target, asked.arguments or (), precision=precision, reporter=reporter)


def _spelled(distance: float) -> str:
    """Return a relative distance as people write it: 12 %, or 2e-7."""
    if math.isinf(distance):
        return "the parameters that it trains"
    return f"{100 * distance:.2g} %" if distance >= 1e-3 else f"{distance:.0e}".replace("e-0", "e-")
