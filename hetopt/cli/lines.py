"""Text files a line at a time: opened with one sentence on failure, and queries in JSON Lines with their answers."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hetopt.cli import terminal
from hetopt.core.errors import BadInput
from hetopt.core.paths import lines_of, opened_file, parse_json
from hetopt.core.step_samples import HINT, Configuration, parse_configuration
from hetopt.core.synchronization import parse_sync


@contextmanager
def opened(path: Path, option: str) -> Iterator[tuple[Iterator[str], bool]]:
    """The lines of a file, or of standard input for ``-``, and whether all of them are there already.

    Raises:
        BadInput: it cannot be read, also while it is being read.
    """
    if str(path) == "-":
        if sys.stdin.isatty():
            raise BadInput(f"{option} would be read from this terminal.", hint="name a JSON Lines file, or pipe one in")
        at_once = stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
        yield lines_of(sys.stdin, origin="standard input", hint="give JSON Lines"), at_once
        return
    hint = f"name a JSON Lines file with {option}, or - for standard input"
    with opened_file(path, hint=hint) as stream, io.TextIOWrapper(stream, encoding="utf-8") as text:
        yield lines_of(text, origin=str(path), hint=hint), True


@dataclass(frozen=True, kw_only=True)
class Query:
    """One line that asks for a prediction.

    Attributes:
        number: of the line, from 1.
        fields: of the object as it was written; empty where the line is none.
        configuration: absent where the line cannot be used; ``reason`` says why.
    """

    number: int
    fields: dict[str, object]
    configuration: Configuration | None
    reason: str = ""

    def write(self, **answer: object) -> None:
        """The line with an answer added, on standard output."""
        try:
            text = json.dumps({**self.fields, **answer}, allow_nan=False)
        except ValueError:  # NaN and infinity in fields that hetopt does not read
            text = json.dumps({**json.loads(json.dumps(self.fields), parse_constant=str), **answer}, allow_nan=False)
        terminal.write(text + "\n")


def queries(lines: Iterable[str]) -> Iterator[Query]:
    """Every line that is not empty."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _query(number, line)


def chunks(asked: Iterable[Query], size: int) -> Iterator[list[Query]]:
    """So many at a time."""
    source = iter(asked)
    while chunk := list(islice(source, size)):
        yield chunk


def _query(number: int, line: str) -> Query:
    fields: dict[str, object] = {}
    configuration, reason = None, ""
    try:
        data = parse_json(line, origin=f"line {number}", hint=HINT)
        fields = data if isinstance(data, dict) else {}
        asked = parse_configuration(line)
        if asked.sync is not None:
            parse_sync(asked.sync, option="sync")
        configuration = asked
    except BadInput as error:
        reason = error.message
    return Query(number=number, fields=fields, configuration=configuration, reason=reason)
