"""Changes of a script's text where its syntax tree says so: comments, layout and everything else stay as they are."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

Span = tuple[int, int]
"""From one byte of the text to another."""


@dataclass(frozen=True)
class _Change:
    span: Span
    parts: tuple[str | Span, ...]


class TextEdits:
    """Collects changes, and makes them all at once. A part of the text that moves takes the changes inside it along."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()  # columns of the tree count bytes
        lines = self._text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._changes: list[_Change] = []
        self._before: dict[int, list[tuple[str, int | None]]] = {}
        self._levels: Counter[int] = Counter()
        self.unit = "\t" if any(line.startswith(b"\t") for line in lines) else "    "
        self._inside_strings = set(_continued_strings(text))

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> Span:
        """Where a node stands."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def replace(self, what: ast.expr | ast.stmt | ast.keyword | Span, *parts: str | ast.expr) -> None:
        """Put these in place of it: texts, and expressions as they are written now."""
        span = what if isinstance(what, tuple) else self.span(what)
        if all(one.span != span for one in self._changes):
            told = tuple(one if isinstance(one, str) else self.span(one) for one in parts)
            self._changes.append(_Change(span, told))

    def drop(self, statement: ast.stmt) -> None:
        """Remove a statement with its lines."""
        assert statement.end_lineno is not None
        self.replace((self._starts[statement.lineno - 1], self._starts[statement.end_lineno]))

    def drop_keyword(self, keyword: ast.keyword) -> None:
        """Remove an argument, with the comma before it, or with its line where it has one for itself."""
        start, end = self.span(keyword)
        line_start, line_end = self._starts[keyword.lineno - 1], self._starts[keyword.end_lineno or keyword.lineno]
        head, tail = self._text[line_start:start], self._text[end:line_end]
        if head.strip():
            start = line_start + len(head.rstrip()) - head.rstrip().endswith(b",")
        elif tail.strip() in (b"", b","):
            start, end = line_start, line_end
        else:
            end += len(tail) - len(tail.lstrip(b", "))
        self.replace((start, end))

    def insert(self, line: int, text: str, *, first: bool = False, around: int | None = None) -> None:
        """Put a whole line before another.

        Args:
            line: before which.
            text: of the new one.
            first: before others that were put there.
            around: how many of that line's moves to the right are none of the new line's; None: all.
        """
        told = self._before.setdefault(line, [])
        told.insert(0 if first else len(told), (text, around))

    def _inserted(self, line: int) -> Iterator[str]:
        for text, around in self._before.get(line, []):
            yield text if around is None else self.unit * max(0, self._levels[line] - around) + text

    def indent(self, first: int, last: int) -> None:
        """Move lines to the right, but for those that begin inside a string."""
        self._levels.update(line for line in range(first, last + 1) if line not in self._inside_strings)

    def text(self) -> str:
        """With all changes made."""
        return "".join(self._rendered(0, len(self._text), None))

    def margin(self, line: int) -> str:
        """What a line begins with before its first word."""
        told = self._text[self._starts[line - 1] : self._starts[line]].decode()
        return told[: len(told) - len(told.lstrip())]

    def _rendered(self, start: int, end: int, inside: _Change | None) -> Iterator[str]:
        """A part of the text, by the outermost changes within it."""
        within = [one for one in self._changes if one is not inside and start <= one.span[0] and one.span[1] <= end]
        outer = sorted(
            (
                one
                for one in within
                if not any(
                    other is not one and other.span[0] <= one.span[0] and one.span[1] <= other.span[1]
                    for other in within
                )
            ),
            key=lambda one: one.span,
        )
        place = start
        for change in outer:
            yield from self._plain(place, change.span[0], is_last=False)
            if change.span[0] in self._starts:
                line = self._starts.index(change.span[0]) + 1
                yield from self._inserted(line)
                if change.parts:
                    yield self.unit * self._levels[line]
            for part in change.parts:
                if isinstance(part, str):
                    yield part
                else:
                    yield from self._rendered(*part, change)
            place = change.span[1]
        yield from self._plain(place, end, is_last=end == len(self._text))

    def _plain(self, start: int, end: int, *, is_last: bool) -> Iterator[str]:
        for number, begin in enumerate(self._starts, start=1):
            stop = self._starts[number] if number < len(self._starts) else begin
            a, b = max(start, begin), min(end, stop)
            if begin == a and (a < b or (is_last and begin == end)):
                yield from self._inserted(number)
                if self._text[a:stop].strip():
                    yield self.unit * self._levels[number]
            if a < b:
                yield self._text[a:b].decode()


def _continued_strings(text: str) -> Iterator[int]:
    """Lines that begin inside a string."""
    begun = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            yield from range(token.start[0] + 1, token.end[0] + 1)
        elif tokenize.tok_name[token.type] == "FSTRING_START":
            begun.append(token.start[0])
        elif tokenize.tok_name[token.type] == "FSTRING_END":
            yield from range(begun.pop() + 1, token.end[0] + 1)
