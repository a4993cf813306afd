"""`hetopt logs`, `fetch`, `stop` and `inject`: what is asked of a run, or done to it, from any terminal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.api.run import Run
from hetopt.cli import render, terminal
from hetopt.cli.options import NewestRun, runs
from hetopt.core import formatting
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.interruption import Reporter
from hetopt.core.run_folder import OUTPUT_FOLDER, UNFINISHED_MODEL_FILE

if TYPE_CHECKING:
    from hetopt.core.run_folder import Outputs


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

    for line in Run.find(run).logs(worker=worker, events=events, follow=follow):
        terminal.write(f"{line.text}\n" if events else f"[{line.source}] {line.text}\n")
        if follow:
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

    stopping = Run.find(run)
    # Machines are given back first; how far they came is read after.
    before, over = stopping.last_known()
    if not over:
        stopping.stop(reporter=Reporter(progress=lambda text, done: render.note(text)))
    after = stopping.status()
    if json_:
        render.print_json(
            {"run": stopping.name, "was": before.state.value, "is": after.state.value, "reason": after.reason}
        )
    elif over:
        render.line(f"{stopping.name} was already {before.state.value}.")
    else:
        render.line(f"{stopping.name} is {after.state.value}.")


def inject(
    run: str = typer.Argument(..., autocompletion=runs, help="Run, or any unambiguous part of its name."),
    change: str = typer.Argument(
        ..., help="What happens to which host: 'h2 speed=0.25,rate=10mbit', 'h3 dies', 'h1 cut', '* rate=50mbit'."
    ),
    json_: bool = typer.Option(False, "--json", help="Print the change as JSON, as it was asked for."),
) -> None:
    """Slow a host of a running rehearsal down, limit its link, cut it off, or let it die.

    Speeds are as `hetopt launch` shows them, rates as in the rehearsed cluster. A moment in front puts the change
    off: '30s h2 speed=0.5' is 30 seconds after training began, 'step 500 h2 speed=0.5' at that step.

    \b
      hetopt inject 20261120-131649 'h1 speed=0.5,rate=10mbit'
      hetopt inject 20261120-131649 'h2 dies'
    """

    rehearsed = Run.find(run)
    asked, rate_here = rehearsed.change(change)
    if json_:
        render.print_json(asked.model_dump(exclude_none=True))
        return
    scaled = rate_here is not None and rate_here != asked.rate_bits_per_s
    here = f" (here {formatting.bit_rate(rate_here)})" if scaled and rate_here is not None else ""
    render.line(f"asked {rehearsed.name} for: {change.strip()}{here}")


def fetch(
    run: NewestRun = None,
    out: Path | None = typer.Option(None, "--out", "-o", help="Copy the model to this file."),
    json_: bool = typer.Option(False, "--json", help="Print where it is as JSON."),
) -> None:
    """Bring the trained model of a run here, and the files that its script wrote for you; say where they are.

    The model's file is of the safetensors format, and holds the state dictionary: `safetensors.torch.load_file` reads
    it. A rented run keeps both in its bucket, where no rule deletes them; `hetopt launch` fetches them when it ends.

    \b
      hetopt fetch
      hetopt fetch 20261120-131649 -o model.safetensors
    """

    fetched = Run.find(run)
    path, _ = fetched.fetch_model()
    outputs = fetched.fetch_outputs()
    what = "unfinished model" if path.stem == Path(UNFINISHED_MODEL_FILE).stem else "model"
    if out is not None:
        _copy(path, out)
        path = out
    if json_:
        facts = {"run": fetched.name, "model": str(path), "bytes": path.stat().st_size}
        render.print_json({**facts, "outputs": list(outputs.sizes), "left_out": outputs.left_out})
    else:
        render.line(f"the {what} of {fetched.name} is {path}")
        _tell(fetched, outputs)


def bring_model(run: Run) -> None:
    """Fetch the model and outputs of a rented run; where that fails, print how to fetch them later.

    Nothing is raised where bucket, network or disk refuse.
    """

    try:
        path, url = run.fetch_model()
        render.note(f"the model is {path}; the bucket keeps it in {url} until you remove it")
        _tell(run, run.fetch_outputs())
    except (BadInput, CloudRefused, OSError) as error:
        render.note(f"not all was fetched: {error} Try again: `hetopt fetch {run.name}`")


def _tell(run: Run, outputs: Outputs) -> None:
    """Print the folder of the script's output files, and those that were left out."""

    if outputs.sizes:
        render.line(f"{len(outputs.sizes)} outputs are in {run.folder / OUTPUT_FOLDER}")
    for sentence in outputs.left_out:
        render.note(sentence)


def _copy(path: Path, out: Path) -> None:
    """Copy a file whole or not at all."""

    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.copyfile(path, partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
