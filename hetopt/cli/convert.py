"""`hetopt convert`: write a session into a training script, and show that it computes what it did before."""

from __future__ import annotations

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

    script: Annotated[Path, typer.Argument(help="A training script with one loop over a DataLoader.")]
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
        bool, typer.Option("--compare/--no-compare", help="Run both for three steps and compare their gradients.")
    ] = True


@options(Conversion)
def convert(asked: Conversion) -> None:
    """Write a session into a training script, and take DistributedDataParallel out of it.

    What changes is printed as a diff. Then both scripts run for three steps, the new one alone and as two workers that
    share every batch 3 to 1, and the gradients that their optimizers step by are compared.

    \b
      hetopt convert train.py -o train_hetopt.py -- --batch-size 64
    """
    import hetopt
    from hetopt.api.exactness import EXACT
    from hetopt.cli import parse, render, terminal
    from hetopt.core.artifact import write_atomically
    from hetopt.core.errors import RunFailed
    from hetopt.core.names import converted_script, typed_script

    name, *arguments = typed_script((str(asked.script), *(asked.arguments or ())))
    asked = replace(asked, script=Path(name), arguments=arguments)
    target = asked.output or converted_script(asked.script)
    converted = hetopt.convert(asked.script)
    parse.ready_to_write(target, force=asked.force)
    terminal.write(converted.diff)
    for remark in converted.remarks:
        render.bullet(remark)
    write_atomically(target, converted.text)
    render.note(f"wrote {target}")
    if not asked.compare:
        return
    found = _compared(asked, target)
    if found.is_of_batch_norm:
        write_atomically(target, hetopt.convert(asked.script, batch_norm="synchronized").text)
        render.note(
            "that is BatchNorm, which normalises the samples of each worker by themselves: wrote "
            f'batch_norm="synchronized" into the session of {target}, which normalises by the whole batch; workers '
            "then wait for each other in every such layer"
        )
        found = _compared(asked, target)
    found = found if found.is_exact else _compared_in_float64(asked, target, found)
    render.note("not compared: what comes later, as the last batch of an epoch, schedules, evaluation and files")
    if not found.is_exact:
        raise RunFailed(
            f"the new script does not compute what the old one does: {EXACT:g} would be rounding.",
            hint="docs/your-own-code.md says which losses need a word; random numbers of the model are a cause as well",
        )


def _compared(asked: Conversion, target: Path, precision: Precision = "float32") -> Exactness:
    """Both scripts for three steps, and what they differ by."""
    from hetopt.api.exactness import compare
    from hetopt.cli import render

    computed = "" if precision == "float32" else f", computed in {precision}"
    with render.progress(f"comparing both for three steps{computed}") as reporter:
        found = compare(asked.script, target, asked.arguments or (), precision=precision, reporter=reporter)
    render.line(
        f"largest relative difference of a gradient over {found.steps} steps{computed}: {found.alone:.1e} alone, "
        f"{found.shared:.1e} on two workers that share batches 3 to 1"
    )
    return found


def _compared_in_float64(asked: Conversion, target: Path, narrow: Exactness) -> Exactness:
    """Where scripts differ as they are: whether that is rounding, which deep networks amplify from layer to layer."""
    from hetopt.cli import render
    from hetopt.core.errors import RunFailed

    try:
        found = _compared(asked, target, "float64")
    except RunFailed as error:
        render.note(f"in float64, which would tell rounding from a mistake, it cannot be computed: {error.message}")
        return narrow
    if found.is_exact:
        render.note("what they differ by is the rounding of a narrower type, which training amplifies")
    return found
