"""How things look in a terminal: the artifact on stdout, remarks and a progress bar on stderr.

All text goes through `_shown`: what others wrote commands nothing here, and the library's parameters become options.
Only this file knows rich, which draws the bar alone: to import it took a twentieth of a first answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO
from weakref import WeakKeyDictionary

from hetopt.cli import terminal
from hetopt.cli.flags import in_flags
from hetopt.core.interruption import PIECES, Reporter
from hetopt.core.paths import shortened
from hetopt.reports.document import Block, Line, Remarks, Style
from hetopt.reports.text import BAR, COLUMNS, SCREEN, lines, on_one_screen, shown, wrapped

STYLES = {"strong": "1", "soft": "2", "warning": "1;31", "good": "1;32"}
"""Styles of documents as terminals name them (ECMA-48, Select Graphic Rendition)."""


def _columns() -> int:
    """Return the width of the terminal on stdout; ``COLUMNS`` of the environment goes before it."""
    return shutil.get_terminal_size((COLUMNS, SCREEN)).columns


def _styled(text: str, style: str, stream: TextIO) -> str:
    """Return a text with the codes of a style, where its stream is a terminal that has styles (no-color.org)."""
    codes = STYLES.get(style)
    is_plain = not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") in ("dumb", "unknown")
    return text if is_plain or not codes or not text else f"\x1b[{codes}m{text}\x1b[0m"


def _put(stream: TextIO, text: str) -> None:
    """Write a line at once; lost output is an error of the command line (see `terminal.output_errors`)."""
    with terminal.output_errors():
        print(text, file=stream, flush=True)


def _remarked(text: str) -> list[str]:
    """Return the lines of a remark on stderr; where that is no terminal, one: a reader there looks for words."""
    return wrapped(_shown(text), _columns()) if sys.stderr.isatty() else [_shown(text)]


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout.

    Raises:
        ValueError: a number is NaN or infinite.
        OutputLost: it cannot be written.
    """
    terminal.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def show(blocks: Iterable[Block]) -> None:
    """Print a document's blocks on stdout."""
    for text, style in lines(blocks, _columns(), _shown):
        _put(sys.stdout, _styled(text, style, sys.stdout))


def answer(blocks: Sequence[Block], *, explain: bool) -> None:
    """Print a document's blocks, the most important first: as many as one screen holds, or to ``explain`` all.

    Args:
        blocks: blocks, the most important first.
        explain: whether to print all of them; else as many as one screen holds.
    """
    room = SCREEN - _lines_above.pop(sys.stderr, 0)
    show(blocks if explain else on_one_screen(blocks, _columns(), _shown, room=room))


_lines_above: WeakKeyDictionary[TextIO, int] = WeakKeyDictionary()
"""Lines of the remarks on each terminal that no answer stands below yet."""


def line(text: str = "", *, style: Style = "") -> None:
    """Print a line of text on stdout.

    Args:
        text: words; empty: an empty line.
        style: style of a document; empty: plain.
    """
    show([Line(text, style)])


def bullet(text: str, *, mark: str = "•") -> None:
    """Print a sentence behind a bullet on stdout."""
    show([Remarks([text], mark)])


def note(text: str) -> None:
    """Print a remark on stderr: what is going on, where a file went."""
    remark = _remarked(text)
    for part in remark:
        _put(sys.stderr, _styled(part, "soft", sys.stderr))
    if sys.stderr.isatty():
        terminal_below = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        _lines_above[terminal_below] = _lines_above.get(terminal_below, 0) + len(remark)


def error(message: str, hint: str | None) -> None:
    """Print an error message and its hint on stderr.

    Both are cut at 2,000 characters.

    Args:
        message: sentence of the error.
        hint: next step; None: there is none.
    """
    for mark, style, text in (("error:", "warning", message), ("  →", "strong", hint)):
        if text:
            first, *others = _remarked(f"{mark} {shortened(text, terminal.MOST_MESSAGE_CHARACTERS)}")
            for part in (first.replace(mark, _styled(mark, style, sys.stderr), 1), *others):
                _put(sys.stderr, part)


@contextmanager
def progress(description: str) -> Iterator[Reporter]:
    """Show a live progress bar on stderr during a with block; where stderr is no terminal, lines of `PlainProgress`.

    The block gets a reporter, to be used inside it alone; its notes go above the bar.
    """
    if not sys.stderr.isatty():
        yield Reporter(progress=PlainProgress(write=lambda text: note(f"{description}: {text}")).tell, note=note)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    out = Console(stderr=True, highlight=False, emoji=False)
    words = TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=out.width < NARROW))
    shown = (
        TextColumn("{task.description}", markup=False),
        BarColumn(min(BAR, out.width // 5)),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    # What is written meanwhile, as by `note`, goes above the bar: rich stands in for stderr.
    with Progress(*shown, words, console=out, refresh_per_second=2, transient=True, expand=True) as live:
        task = live.add_task(_shown(description), total=None, text="")

        def tell(text: str, done: float | None) -> None:
            live.update(task, text=_shown(text), completed=done or 0.0, total=None if done is None else 1.0)

        yield Reporter(progress=tell, note=note)


NARROW = 60
"""Columns of a terminal below which a line of progress is cut, and never wrapped."""

TENTH = 0.1
MINUTE_S = 60.0
_FIGURES = re.compile(r"[\d.,]+")


@dataclass(kw_only=True)
class PlainProgress:
    """A writer of progress to files and CI logs, in few lines.

    There is a line at each new kind of activity, then one each tenth of the whole or each minute, whichever comes
    later.

    Two texts are of one kind if their first phrases differ in figures alone.

    Attributes:
        write: writes a line.
        clock: returns seconds.
    """

    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _kinds: set[str] = field(default_factory=set)
    _share: float = 0.0
    _at_s: float = 0.0

    def tell(self, text: str, done: float | None) -> None:
        """Write a line where one is due: the first of its kind, else a minute and a tenth after the last line.

        Args:
            text: words on what is being done; its first phrase tells the kind.
            done: share that is done, 0 to 1; None: not known, and the minute alone counts.
        """
        kind, now_s = _FIGURES.sub("", text.partition(PIECES)[0]), self.clock()
        waits = now_s - self._at_s < MINUTE_S or (done is not None and done - self._share < TENTH)
        if kind in self._kinds and waits:
            return
        self._kinds.add(kind)
        self._share, self._at_s = done or 0.0, now_s
        self.write(text if done is None else f"{text} ({done:.0%})")


def _shown(text: str) -> str:
    """Return the text escaped for the terminal, with options in place of the library's parameters."""
    return shown(in_flags(text))
