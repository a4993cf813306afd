"""What pages show below a command, held against what the command prints where a test types it.

A page shows it in a block of text behind the block of commands. ``...`` on a line of its own leaves lines out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_PRINTED = ("# ", "python -m ", "$ ")
"""How files and commands begin that pages show as text."""

LEFT_OUT = re.compile(r"^\.\.\.\n", re.MULTILINE)
NUMBER = re.compile(r"[~±+-]?\$?\d[\d.,]*(?:e[+-]\d+)?(?:\s*(?:[%×]|(?:[mµ]?s|min|h|d|[kMGT]i?B|threads?|CPUs?)\b))?")
NUMBERS = re.compile(r"#(?:\s*#)+")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page shows below some commands."""

    page: str
    commands: tuple[str, ...]
    text: str


def all_shown() -> Iterator[Shown]:
    """Of all pages."""
    for path in sorted(DOCS.glob("*.md")):
        blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
        for (kind, typed), (below, text) in pairwise(blocks):
            if kind == "console" and below == "text" and not text.startswith(NOT_PRINTED):
                commands = tuple(line[2:] for line in typed.splitlines() if line.startswith("$ "))
                yield Shown(page=path.name, commands=commands, text=text)


def shown(page: str, command: str) -> Shown:
    """What a page shows below the first command that begins so."""
    return next(one for one in all_shown() if one.page == page and any(c.startswith(command) for c in one.commands))


def masked(text: str) -> str:
    """The words, with ``#`` for every number and its unit: a machine's own."""
    return " ".join(NUMBERS.sub("#", NUMBER.sub("#", text)).split())


def assert_shown(page: str, command: str, said: str) -> None:
    """The words that a page shows are those that were printed, in that order; numbers may be others."""
    whole, at = masked(said), 0
    for part in LEFT_OUT.split(shown(page, command).text):
        words = masked(part)
        found = whole.find(words, at)
        assert found >= 0, f"{page} shows below `{command}`:\n{part}\nbut this was printed:\n{said}"
        at = found + len(words) - words.endswith("#")  # a number that goes on beyond what is left out


def assert_shown_exactly(page: str, command: str, said: str, *, recording: bool) -> None:
    """The lines are those that were printed, to the last digit; with ``recording``, other digits are written."""
    assert_shown(page, command, said)
    printed = [line.rstrip() for line in said.splitlines()]
    before = shown(page, command).text
    after, at = [], 0
    for part in LEFT_OUT.split(before):
        lines = part.splitlines()
        places = [_place(lines, printed, at, alike) for alike in (str, masked)]
        begin = next((one for one in places if one is not None), None)
        assert begin is not None, f"{page} breaks the lines below `{command}` elsewhere:\n{said}"
        at = begin + len(lines)
        after.append("".join(f"{line}\n" for line in printed[begin:at]))
    text = "...\n".join(after)
    if recording:
        path = DOCS / page
        path.write_text(path.read_text(encoding="utf-8").replace(before, text), encoding="utf-8")
    assert shown(page, command).text == text, "write it again with --record, and read what the page says about it"


def _place(lines: list[str], among: list[str], after: int, alike: Callable[[str], str]) -> int | None:
    """Where these lines stand among others, compared by what is alike of them; None: nowhere."""
    wanted, found = [alike(line) for line in lines], [alike(line) for line in among]
    return next((n for n in range(after, len(found)) if found[n : n + len(wanted)] == wanted), None)
