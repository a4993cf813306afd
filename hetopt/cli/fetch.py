"""`hetopt fetch`: the trained model of a run, and the files that its script wrote, wherever it trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.options import NewestRun

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.core.run_folder import Outputs


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
    from hetopt.api.run import Run
    from hetopt.cli import render
    from hetopt.core.run_folder import is_unfinished

    found = Run.find(run)
    path, _ = found.fetch_model()
    outputs = found.fetch_outputs()
    what = "unfinished model" if is_unfinished(path) else "model"
    if out is not None:
        _copy(path, out)
        path = out
    if json_:
        told = {"run": found.name, "model": str(path), "bytes": path.stat().st_size}
        render.print_json({**told, "outputs": list(outputs.sizes), "left_out": outputs.left_out})
    else:
        render.line(f"the {what} of {found.name} is {path}")
        _tell(found, outputs)


def bring_model(run: Run) -> None:
    """What was paid for comes here; where that fails, how to get it is said, and the run has ended all the same."""
    from hetopt.cli import render
    from hetopt.core.errors import BadInput, CloudRefused

    try:
        path, url = run.fetch_model()
    except (BadInput, CloudRefused, OSError) as error:
        hint = getattr(error, "hint", None) or f"try again: `hetopt fetch {run.name}`"
        render.note(f"no model was fetched: {error} {hint}")
        return
    render.note(f"the model is {path}; the bucket keeps it in {url} until you remove it")
    try:
        _tell(run, run.fetch_outputs())
    except (BadInput, CloudRefused, OSError) as error:
        render.note(f"not all outputs were fetched: {error} Try again: `hetopt fetch {run.name}`")


def _tell(run: Run, outputs: Outputs) -> None:
    """Where the files of the script are, and what was left out."""
    from hetopt.cli import render
    from hetopt.core.run_folder import OUTPUT_FOLDER

    if outputs.sizes:
        render.line(f"{len(outputs.sizes)} outputs are in {run.folder / OUTPUT_FOLDER}")
    for sentence in outputs.left_out:
        render.note(sentence)


def _copy(path: Path, out: Path) -> None:
    """Whole or not at all.

    Raises:
        BadInput: it cannot be written there.
    """
    import os
    import shutil

    from hetopt.core.errors import BadInput

    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.copyfile(path, partial)
        os.replace(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadInput(f"{out} cannot be written: {error.strerror}.", hint="name another file with -o") from None
