"""`hetopt fetch`: the trained model of a run, wherever it trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.options import NewestRun

if TYPE_CHECKING:
    from hetopt.api.run import Run


def fetch(
    run: NewestRun = None,
    out: Path | None = typer.Option(None, "--out", "-o", help="Copy the model to this file."),
    json_: bool = typer.Option(False, "--json", help="Print where it is as JSON."),
) -> None:
    """Bring the trained model of a run here, and say where it is.

    The file is of the safetensors format, and holds the state dictionary: `safetensors.torch.load_file` reads it.
    A rented run keeps its model in its bucket, where no rule deletes it; `hetopt launch` fetches it when it ends.
    """
    from hetopt.api.run import Run
    from hetopt.cli import render
    from hetopt.core.run_folder import is_unfinished

    found = Run.find(run)
    path, _ = found.fetch_model()
    what = "unfinished model" if is_unfinished(path) else "model"
    if out is not None:
        _copy(path, out)
        path = out
    if json_:
        render.print_json({"run": found.name, "model": str(path), "bytes": path.stat().st_size})
    else:
        render.line(f"the {what} of {found.name} is {path}")


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
