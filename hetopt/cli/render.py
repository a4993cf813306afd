"""How things look in a terminal; the only file that knows rich. stdout carries the artifact, stderr the progress.

All text goes through `_shown`: what others wrote commands nothing here, and the library's parameters become options.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from weakref import WeakKeyDictionary

from rich.console import Console
from rich.markup import escape

from hetopt.cli import terminal
from hetopt.cli.flags import in_flags
from hetopt.core.interruption import PIECES, Reporter
from hetopt.core.paths import shortened
from hetopt.reports.document import Block, Line, Remarks, Style
from hetopt.reports.text import BAR, SCREEN, lines, on_one_screen, shown

STYLES = {"strong": "bold", "soft": "dim", "warning": "bold red", "good": "bold green"}
"""Names that rich has for the styles of documents."""


class _Console(Console):
    """A rich console that turns failed writes (full disk, closed pipe) into the command line's errors."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, with failed writes as errors of the command line.

        Raises:
            OutputLost: it cannot be written.
        """
        with terminal.output_errors():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Raise an error where rich would end the process.

        Raises:
            ReaderGone: whoever read has seen enough.
        """
        raise terminal.ReaderGone("the output is no longer read.")


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on the current stdout or stderr (tests and pipes replace them).

    Progress and errors that go to a file or a pipe keep one line a sentence: a reader or a program there looks for
    words, and the width of a terminal that is not there must not break them.

    Args:
        stderr: whether it writes to stderr.
    """
    stream = sys.stderr if stderr else sys.stdout
    return _Console(file=stream, highlight=False, emoji=False, soft_wrap=stderr and not stream.isatty())


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout.

    Raises:
        ValueError: a number is NaN or infinite.
        OutputLost: it cannot be written.
    """
    terminal.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def show(blocks: Iterable[Block]) -> None:
    """Print a document's blocks on stdout."""
    out = console()
    for text, style in lines(blocks, out.width, _shown):
        out.print(text, style=STYLES.get(style, style), markup=False, soft_wrap=True)


def answer(blocks: Sequence[Block], *, explain: bool) -> None:
    """Print a document's blocks, the most important first: as many as one screen holds, or to ``explain`` all.

    Args:
        blocks: blocks, the most important first.
        explain: whether to print all of them; else as many as one screen holds.
    """
    room = SCREEN - _lines_above.pop(sys.stderr, 0)
    show(blocks if explain else on_one_screen(blocks, console().width, _shown, room=room))


_lines_above: WeakKeyDictionary[IO[str], int] = WeakKeyDictionary()
"""Lines of the remarks on each terminal that no answer stands below yet."""


def _remark(out: Console, text: str) -> None:
    """Print a remark on a console of stderr."""
    out.print(_shown(text), markup=False, style="dim")
    if out.is_terminal:
        _lines_above[out.file] = _lines_above.get(out.file, 0) + len(out.render_lines(_shown(text)))


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
    _remark(console(stderr=True), text)


def error(message: str, hint: str | None) -> None:
    """Print an error message and its hint on stderr.

    Both are cut at 2,000 characters.

    Args:
        message: sentence of the error.
        hint: next step; None: there is none.
    """
    out = console(stderr=True)
    out.print(f"[bold red]error:[/] {_cell(shortened(message, terminal.MOST_MESSAGE_CHARACTERS))}")
    if hint:
        out.print(f"  [bold]→[/] {_cell(shortened(hint, terminal.MOST_MESSAGE_CHARACTERS))}")


@contextmanager
def progress(description: str) -> Iterator[Reporter]:
    """Show a live progress bar on stderr inside; where stderr is no terminal, the few lines of `PlainProgress`.

    Args:
        description: words before the bar.

    Yields:
        Reporter of what is done and of remarks.
    """
    out = console(stderr=True)
    if not out.is_terminal:
        plain = PlainProgress(write=lambda line: out.print(_shown(f"{description}: {line}"), markup=False, style="dim"))
        yield Reporter(progress=plain.tell, note=note)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    said = TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=out.width < NARROW))
    shown = (
        TextColumn("{task.description}", markup=False),
        BarColumn(min(BAR, out.width // 5)),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*shown, said, console=out, refresh_per_second=2, transient=True, expand=True) as live:
        task = live.add_task(_shown(description), total=None, text="")

        def tell(text: str, done: float | None) -> None:
            live.update(task, text=_shown(text), completed=done or 0.0, total=None if done is None else 1.0)

        # Through its own console, or the remark would be written into the line.
        yield Reporter(progress=tell, note=lambda text: _remark(live.console, text))


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
        """Write a line of progress, where one is due.

        Args:
            text: words on what is being done; its first phrase tells the kind.
            done: share that is done, 0 to 1; None: not known.
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


def _cell(text: str) -> str:
    """Return the text escaped for rich's markup."""
    return escape(_shown(text))
