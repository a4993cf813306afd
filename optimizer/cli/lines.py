"""Text files a line at a time: opened with one sentence on failure, and queries in JSON Lines with their answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from hetopt.profiler.errors import BadInput
from hetopt.profiler.step_samples import Configuration, parse_configuration


@contextmanager
def opened(path: Path, option: str) -> Iterator[TextIO]:
    """The file, or standard input for ``-``.

    Raises:
        BadInput: it cannot be read, also while it is being read.
    """
    if str(path) == "-":
        yield sys.stdin
        return
    try:
        stream = path.open(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{option} names {path}, which does not exist.", hint="name a JSON Lines file, or -") from None
    except OSError as error:
        raise BadInput(f"{option}: {path} cannot be read: {error.strerror}.", hint="name another file") from None
    try:
        with stream:
            yield stream
    except UnicodeDecodeError:
        raise BadInput(f"{option}: {path} is not UTF-8 text.", hint="name a JSON Lines file") from None


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
        sys.stdout.write(json.dumps({**self.fields, **answer}, allow_nan=False) + "\n")


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
    try:
        configuration = parse_configuration(line)
    except BadInput as error:
        try:
            data = json.loads(line, parse_constant=str)
        except ValueError:
            data = None
        if isinstance(data, dict):
            fields = data
        return Query(number=number, fields=fields, configuration=None, reason=error.message)
    return Query(number=number, fields=json.loads(line, parse_constant=str), configuration=configuration)
