"""From what a person types to numbers in seconds, dollars and samples; each bad value becomes one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from hetopt.core.artifact import kind_in
from hetopt.core.commands import typed
from hetopt.core.errors import BadInput
from hetopt.core.grammar import arguments, fields, numbers
from hetopt.core.quantities import NUMBER, quantity
from hetopt.core.reading import read_text


def is_attended() -> bool:
    """Whether a person can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def slowdowns(text: str | None) -> tuple[float, ...] | None:
    """'1,1,2,4' or '1 x2, 2, 4': one factor a worker."""
    return None if text is None else numbers(text, "--slowdown")


def market(text: str | None, *, spot: bool, on_demand: bool) -> str:
    """What was said of the market, in one of three options.

    Raises:
        BadInput: options exclude each other.
    """
    asked: dict[str, str] = {"--spot": "spot"} if spot else {}
    if on_demand:
        asked["--on-demand"] = "on-demand"
    if text is not None:
        asked[f"--market {text}"] = text
    if len(set(asked.values())) > 1:
        raise BadInput(
            f"{' and '.join(asked)} exclude each other.", hint="keep one of them; --market any takes both markets"
        )
    return next(iter(asked.values()), "any")


def time_weight(text: str | None) -> float | None:
    """'time=2,cost=1' as the part of time: 2/3."""
    if text is None:
        return None
    said = fields(arguments(text, "--weights"), {"time": "time", "cost": "cost"})
    weights = {name: quantity(value, NUMBER, f"--weights: {name}") for name, value in said.items()}
    if len(weights) != 2 or min(weights.values()) < 0 or not sum(weights.values()):
        raise BadInput(
            f"--weights must be time=W,cost=W with numbers of 0 or more, one of them above 0, got {text!r}.",
            hint="for example --weights time=2,cost=1",
        )
    return weights["time"] / sum(weights.values())


def text_of(path: Path, option: str) -> str:
    """The text in a file that an option names.

    Raises:
        BadInput: it cannot be read.
    """
    return read_text(path, hint=f"name a text file with {option}")


def ready_to_write(path: Path | None, *, force: bool, replaces: str | None = None) -> None:
    """Refuse an output that could not be written, before any work is done for it; ask before replacing a file.

    Args:
        path: of the output.
        force: whether anything may be replaced.
        replaces: kind of artifact, or of page, that is replaced unasked: what the same command makes again in seconds.

    Raises:
        BadInput: the folder is missing or read-only, the path is a folder, or the file exists and may not be replaced.
    """
    if path is None:
        return
    if str(path) == "-" or path.is_fifo():
        raise BadInput(f"{path} is no file to write to.", hint="name a file; --json prints to standard output")
    folder = path.parent if path.parent.parts else Path()
    if not folder.is_dir():
        raise BadInput(
            f"{path} cannot be written: there is no folder {folder}.",
            hint=f"make it with `mkdir -p {typed(folder)}`",
        )
    if path.is_dir():
        raise BadInput(f"{path} is a folder.", hint="name a file in it")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise BadInput(
            f"{path} cannot be written: permission denied.", hint="name a file in a folder that you can write to"
        )
    if path.is_file() and not force and not (replaces is not None and _is_kind(path, replaces)):
        if is_attended():
            if typer.confirm(f"{path} exists. Replace it?", err=True):
                return
            raise typer.Exit(2)
        raise BadInput(f"{path} exists already.", hint="add --force to replace it, or name another file")


def _is_kind(path: Path, kind: str) -> bool:
    """Whether a file is an artifact, or a page, of this kind."""
    from hetopt.reports.document import is_page

    return kind_in(path) == kind or is_page(path, kind)


def substitutes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """TYPE=OTHER[,OTHER]: for a type those that may stand in for it."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        written = arguments(text, "--substitute")
        if len(written.pairs) != 1:
            raise BadInput(
                f"--substitute must be TYPE=OTHER[,OTHER], got {text!r}.",
                hint="for example --substitute c7i.large=c6i.large",
            )
        [(planned, first)] = written.pairs.items()
        found[planned] = (first, *written.values)
    return found


def images(texts: Sequence[str]) -> dict[str, str]:
    """KIND=AMI: the image of a kind of machine."""
    found: dict[str, str] = {}
    for text in texts:
        written = arguments(text, "--image")
        if written.values or not written.pairs:
            raise BadInput(
                f"--image must be KIND=AMI, got {text!r}.", hint="for example --image x86_64-gpu=ami-0123456789abcdef0"
            )
        found |= written.pairs
    return found
