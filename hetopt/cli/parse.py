"""Checks before a command runs: whether a person can answer, output files, and JSON Lines of input."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from hetopt.cli import terminal
from hetopt.core.artifact import kind_in, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.paths import MOST_BYTES, decoded, parse_json, read_text
from hetopt.core.plain_text import typed
from hetopt.core.run_spec import parse_sync
from hetopt.core.step_samples import HINT, Configuration, parse_line


def is_attended() -> bool:
    """Return whether a person is at the terminal to answer: standard input and stderr are both terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ready_to_write(path: Path | None, *, force: bool, replaces: str | None = None) -> None:
    """Check that an output file can be written; ask a person before one that exists is replaced.

    Nothing is written.

    Args:
        path: file of the output; None: there is none, and nothing is checked.
        force: whether anything may be replaced.
        replaces: kind of artifact, or of page, that is replaced unasked, as the same command makes it again in seconds;
            None: none is.

    Raises:
        BadInput: the folder is missing or read-only, the path is a folder, or the file exists and may not be replaced.
        Exit: a person declines (code 2).
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


def save(path: Path, text: str | bytes) -> None:
    """Write a file atomically, and note its path on stderr; a file that exists is replaced.

    Raises:
        BadInput: the file cannot be written.
    """
    from hetopt.cli import render

    write_atomically(path, text)
    render.note(f"wrote {path}")


def _is_kind(path: Path, kind: str) -> bool:
    """Return whether a file is a JSON artifact or an HTML page of this kind."""
    from hetopt.reports.html import is_page

    return kind_in(path) == kind or is_page(path, kind)


def lines_of(path: Path, option: str) -> Iterable[str]:
    """Return the lines of a text file, or of standard input for ``-``; errors name ``option``.

    A person's terminal is not read.

    Args:
        path: file, or ``-``.
        option: name for errors.

    Raises:
        BadInput: the file cannot be read, is no text or is larger than 64 MB, or ``-`` is a terminal.
    """
    hint = f"name a JSON Lines file with {option}, or - for standard input"
    if str(path) != "-":
        return io.StringIO(read_text(path, hint=hint))
    if sys.stdin.isatty():
        raise BadInput(f"{option} would be read from this terminal.", hint="name a JSON Lines file, or pipe one in")
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise BadInput(f"standard input is larger than {MOST_BYTES / 1e6:g} MB.", hint="give it in several parts")
    return io.StringIO(decoded(content, origin="standard input", hint="give JSON Lines"))


@dataclass(frozen=True, kw_only=True)
class Query:
    """A line of JSON Lines that asks for a predicted step time.

    Attributes:
        number: number of the line, from 1.
        fields: fields of the object as it was written; empty: the line is no object.
        configuration: cluster that is asked about; None: the line cannot be used, and ``reason`` says why.
        reason: why the line cannot be used; empty: it can.
    """

    number: int
    fields: dict[str, object]
    configuration: Configuration | None
    reason: str = ""

    def write(self, **answer: object) -> None:
        """Write the query with the fields of its answer as a JSON line on standard output.

        Args:
            **answer: fields that are added; they replace fields of the query.
        """
        terminal.write(json.dumps({**self.fields, **answer}) + "\n")


def queries(lines: Iterable[str]) -> Iterator[Query]:
    """Yield a query of a predicted step time for each line that is not empty; one that cannot be used says why."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _query(number, line)


def _query(number: int, line: str) -> Query:
    """Return the query in a line of JSON; one that cannot be used has no configuration, but a reason."""
    fields: dict[str, object] = {}
    configuration, reason = None, ""
    try:
        data = parse_json(line, origin=f"line {number}", hint=HINT)
        fields = data if isinstance(data, dict) else {}
        asked = parse_line(Configuration, line)
        if asked.sync is not None:
            parse_sync(asked.sync, option="sync")
        configuration = asked
    except BadInput as error:
        reason = error.message
    return Query(number=number, fields=fields, configuration=configuration, reason=reason)
