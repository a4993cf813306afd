"""`hetopt check`: how far unequal shares are from one machine, of a script; what would go wrong, of a task.

`hetopt convert` writes a session into a script, and measures the same.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import hetopt
from hetopt.cli import parse, render, terminal
from hetopt.cli.options import Json
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import converted_script, typed_script


def check(
    task: Annotated[str, typer.Argument(help="A task (digits, mine.py:task), or a training script (train.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after --.", show_default=False)
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data.")] = None,
    as_json: Json = False,
) -> None:
    """Say what several unequal machines would compute otherwise than one, before anything is rented.

    A script with DistributedDataParallel or a session does three steps alone, in shares of 3 to 1 and in equal shares,
    and the gradients that its optimizers step by are compared. The parts of a task are tried on a few samples.

    \b
      hetopt check -- train.py --lr 0.1
      hetopt check mine.py:task
    """

    name, *own_arguments = typed_script((task, *(arguments or ())))
    is_script = Path(name).suffix == ".py"
    if (is_script and data) or (own_arguments and not is_script):
        raise BadInput(
            f"--data is for tasks, arguments are for scripts, and {name} is a {'script' if is_script else 'task'}.",
            hint="hetopt check -- train.py ARGUMENTS, or hetopt check TASK --data FOLDER",
        )
    if is_script:
        _check_script(Path(name), own_arguments, as_json=as_json)
    else:
        _check_task(name, data, as_json=as_json)


def _check_script(script: Path, arguments: list[str], *, as_json: bool) -> None:
    """Print how far a script's training in unequal shares is from training on one machine."""
    from hetopt.api.exactness import check_script

    with render.progress("three steps alone and in shares") as reporter:
        shares = check_script(script, arguments, reporter=reporter)
    if as_json:
        render.print_json({**asdict(shares), "step": shares.step, "text": str(shares)})
    else:
        render.line(str(shares))


def _check_task(task: str, data: Path | None, *, as_json: bool) -> None:
    """Print the findings on a task, or a line that there are no errors; raise an error that counts those there are.

    Raises:
        BadInput: torch is missing, or the task has errors.
    """

    findings = hetopt.check(task, data=data)
    errors = [finding for finding in findings if finding.level == "error"]
    if as_json:
        render.print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            where = f" ({finding.where})" if finding.where else ""
            render.bullet(f"{finding.level}: {finding.text}{where}")
            render.bullet(finding.hint, mark="  →")
        if not errors:
            render.line(f"{task} can be trained on many workers.")
    if errors:
        count = "one error" if len(errors) == 1 else f"{len(errors)} errors"
        raise BadInput(f"{task} has {count}.", hint=errors[0].hint)


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
    from hetopt.api.converting import FOUR_LINES, NotPlain
    from hetopt.api.exactness import check_script

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
