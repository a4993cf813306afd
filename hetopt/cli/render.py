"""How things look in a terminal; the only file that knows rich. stdout carries the artifact, stderr the progress.

All text goes through `_shown`: what others wrote commands nothing here, and the library's parameters become options.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.live import Live as RichLive
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hetopt.cli import terminal
from hetopt.cli.flags import in_flags
from hetopt.core.reading import shortened
from hetopt.core.reporter import PIECES, Reporter

LONGEST_WORD = 12
"""Characters of a column that folds: in a narrower one a table cannot be read."""

BAR = 24
"""Characters of a bar, where there is room for them."""

MOST_PROGRESS_LINES = 5

_GLUE = "\xa0"
_GLUED = re.compile(r"(?<=\d) (?=%|×|(?:min|h|s|d|ms|µs|GiB|MiB|GB|MB|kB|vCPUs?)\b)|(?<=×) ")
"""Blanks at which no line ends: between a number and its unit."""


class _Console(Console):
    """A console whose stream may fail: a full disk and a reader that has gone are told as such."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich.

        Raises:
            OutputLost: it cannot be written.
        """
        with terminal.losses_told():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """See rich, which would end the process here.

        Raises:
            ReaderGone: whoever read has seen enough.
        """
        raise terminal.ReaderGone("the output is no longer read.")


def console(*, stderr: bool = False) -> Console:
    """A console on the stream as it is now (tests and pipes replace it).

    Progress and errors that go to a file or a pipe keep one line a sentence: a reader or a program there looks for
    words, and the width of a terminal that is not there must not break them.
    """
    stream = sys.stderr if stderr else sys.stdout
    return _Console(file=stream, highlight=False, soft_wrap=stderr and not stream.isatty())


def width() -> int:
    """Characters of a line on stdout."""
    return console().width


def print_json(value: Any) -> None:
    """``value`` as indented JSON on stdout."""
    terminal.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    fixed: Collection[str] = (),
    caption: str | None = None,
    gap: int = 2,
) -> None:
    """A table on stdout. Where a terminal is too narrow for it, each row is a line and facts below it.

    Args:
        columns: their names.
        rows: of cells, which are plain text.
        numbers: columns that are aligned right, and never cut.
        fixed: columns of text that never fold.
        caption: below it.
        gap: blanks between columns.
    """
    if _least_width(columns, rows, {*numbers, *fixed}, gap) > width():
        for first, *others in rows:
            line(first, style="bold")
            facts({name: cell for name, cell in zip(columns[1:], others, strict=True) if cell})
    else:
        grid = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for name in columns:
            justify: Literal["left", "right"] = "right" if name in numbers else "left"
            whole = name in numbers or name in fixed
            grid.add_column(_cell(name), justify=justify, no_wrap=whole, overflow="fold")
        for row in rows:
            grid.add_row(*map(_cell, row))
        console().print(grid)
    if caption is not None:
        line(caption, style="dim")


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str], gap: int) -> int:
    """Characters that a table takes where its texts fold as far as they may."""
    widths = []
    for texts in zip(columns, *rows, strict=True):
        if texts[0] in whole:
            widths.append(max(map(len, texts)))
        else:
            widths.append(min(LONGEST_WORD, max(len(word) for text in texts for word in (text.split() or [""]))))
    return sum(widths) + gap * (len(widths) - 1)


def fitted_table(
    columns: dict[str, list[str]],
    droppable: Sequence[str],
    *,
    words: Collection[str],
    fixed: Collection[str] = (),
    gap: int = 2,
    folding: str | None = None,
) -> list[str]:
    """A table without the columns that can be missed where it would not fit the terminal, which are named.

    Args:
        columns: cells by the name of the column; those that are dropped are removed.
        droppable: which can go, the first first.
        words: columns of text; the others are numbers.
        fixed: as of `table`.
        gap: likewise.
        folding: the column that can fold to the width of its name.
    """

    def needed() -> int:
        widths = [len(name) if name == folding else max(len(name), *map(len, cells)) for name, cells in columns.items()]
        return sum(widths) + gap * (len(widths) - 1)

    dropped: list[str] = []
    for name in droppable:
        if needed() > width() and name in columns:
            del columns[name]
            dropped.append(name)
    rows = list(zip(*columns.values(), strict=True))
    table(list(columns), rows, numbers=columns.keys() - set(words), fixed=fixed, gap=gap)
    return dropped


def heading(text: str) -> None:
    """A line that opens a part of the output."""
    console().print(f"\n{_cell(text)}", style="bold")


def wrapped(text: str, *, hang: int = 0) -> list[str]:
    """The lines that a text takes in the terminal; all but the first begin with ``hang`` blanks.

    A number stays with its unit, and words with hyphens, such as options, stay whole.
    """
    most = max(width(), hang + LONGEST_WORD)
    return [
        one.replace(_GLUE, " ")
        for part in _shown(text).split("\n")
        for one in textwrap.wrap(
            _GLUED.sub(_GLUE, part),
            most,
            subsequent_indent=" " * hang,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        or [""]
    ]


def line(text: str = "", *, style: str | None = None, hang: int = 0, is_copied: bool = False) -> None:
    """A plain line on stdout, wrapped at the terminal's width unless it ``is_copied``, as commands are.

    Args:
        text: of the line.
        style: as rich names it.
        hang: blanks before what does not fit on the first line.
        is_copied: whether it is for a clipboard: never wrapped.
    """
    out = console()
    if is_copied:
        out.print(_shown(text), style=style, markup=False, soft_wrap=True)
    else:
        out.print("\n".join(wrapped(text, hang=hang)), style=style, markup=False)


def bullet(text: str, *, mark: str = "•") -> None:
    """A sentence in a list, wrapped and indented behind its mark."""
    line(f"  {mark} {text}", hang=4)


def facts(values: Mapping[str, str]) -> None:
    """Named facts, one a line, the names aligned; long values are wrapped under themselves."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        grid.add_row(_cell(name), _cell(value))
    console().print(Padding(grid, (0, 0, 0, 2), expand=False))


def note(text: str) -> None:
    """A remark on stderr: what is going on, where a file went."""
    console(stderr=True).print(_shown(text), markup=False, style="dim")


def error(message: str, hint: str | None) -> None:
    """What is wrong and what to do next, on stderr."""
    out = console(stderr=True)
    out.print(f"[bold red]error:[/] {_cell(shortened(message, terminal.MOST_MESSAGE_CHARACTERS))}")
    if hint:
        out.print(f"  [bold]→[/] {_cell(shortened(hint, terminal.MOST_MESSAGE_CHARACTERS))}")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a live view shows: a title and plain lines, cut where the terminal ends."""

    title: str
    lines: Sequence[str]


def drawn(picture: Picture) -> Text:
    """The picture as rich shows it. Made of plain text: laying out a table takes several times as long."""
    text = Text(_shown(picture.title), style="bold", no_wrap=True, overflow="ellipsis")
    return text.append("\n" + _shown("\n".join(picture.lines)), style="not bold")


@contextmanager
def live_view() -> Iterator[Callable[[Picture], None]]:
    """A part of the terminal that is drawn anew with each call; it stays as it was last. Never draws by itself.

    Where stdout is no terminal, each new title is a line.
    """
    if not console().is_terminal:
        shown: list[str] = [""]

        def show(picture: Picture) -> None:
            if picture.title != shown[-1]:
                shown.append(picture.title)
                line(picture.title)

        yield show
        return
    with RichLive(console=console(), auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda picture: live.update(drawn(picture), refresh=True)


@contextmanager
def progress(description: str) -> Iterator[Reporter]:
    """A live line on stderr; where stderr is no terminal, the few lines of `PlainProgress`."""
    out = console(stderr=True)
    if not out.is_terminal:
        plain = PlainProgress(write=lambda line: out.print(_shown(f"{description}: {line}"), markup=False, style="dim"))
        yield Reporter(progress=plain.tell, note=note)
        return
    state = _Progress(description=description)
    with RichLive(console=out, get_renderable=state.drawn, refresh_per_second=2, transient=True) as live:
        # Through its own console, or the remark would be written into the line.
        yield Reporter(
            progress=state.tell, note=lambda text: live.console.print(_shown(text), markup=False, style="dim")
        )


TENTH = 0.1
MINUTE_S = 60.0
_FIGURES = re.compile(r"[\d.,]+")


@dataclass(kw_only=True)
class PlainProgress:
    """Progress for files and CI logs: a line at each new kind of thing, and of one that goes on a line each tenth of
    the whole or each minute, whichever comes later.

    Two texts are of one kind if their first phrases differ in figures alone.
    """

    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _kinds: set[str] = field(default_factory=set)
    _share: float = 0.0
    _at_s: float = 0.0

    def tell(self, text: str, done: float | None) -> None:
        """Write a line of it, where one is due."""
        kind, now_s = _FIGURES.sub("", text.partition(PIECES)[0]), self.clock()
        waits = now_s - self._at_s < MINUTE_S or (done is not None and done - self._share < TENTH)
        if kind in self._kinds and waits:
            return
        self._kinds.add(kind)
        self._share, self._at_s = done or 0.0, now_s
        self.write(text if done is None else f"{text} ({done:.0%})")


@dataclass(kw_only=True)
class _Progress:
    """What a live line shows: what goes on, a bar, for how long, and what was last said of it."""

    description: str
    text: str = ""
    done: float | None = None
    began_s: float = field(default_factory=time.monotonic)

    def tell(self, text: str, done: float | None) -> None:
        """Show this from now on."""
        self.text, self.done = text, done

    def drawn(self) -> Text:
        """As rich shows it."""
        lines = progress_lines(
            self.description,
            self.text,
            self.done,
            elapsed_s=time.monotonic() - self.began_s,
            columns=console(stderr=True).width,
        )
        return Text("\n".join(lines), no_wrap=True, overflow="crop")


def progress_lines(description: str, text: str, done: float | None, *, elapsed_s: float, columns: int) -> list[str]:
    """What goes on, in a line where that is wide enough, else in as many as hold it; cut at `MOST_PROGRESS_LINES`.

    Args:
        description: in a word.
        text: what is going on; its phrases, which ``PIECES`` divides, stay whole.
        done: the part of it that is (None: nobody knows).
        elapsed_s: for how long it has gone on.
        columns: of the terminal.
    """
    clock = f"{elapsed_s // 3600:.0f}:{elapsed_s // 60 % 60:02.0f}:{elapsed_s % 60 // 1:02.0f}"
    share = "" if done is None else f" {done:.0%} "
    head = f"{_shown(description)} {bar(done, min(BAR, columns - len(description) - len(share) - len(clock) - 3))}"
    head = f"{head}{share} {clock}" if done is not None else f"{_shown(description)} {clock}"
    text = _shown(text)
    if len(head) + 2 + len(text) < columns:
        return [f"{head}  {text}".rstrip()]
    rest = phrases(text.split(PIECES), columns=columns - 1)
    return [head[: columns - 1], *rest[: MOST_PROGRESS_LINES - 1]]


def phrases(pieces: Sequence[str], *, columns: int) -> list[str]:
    """Phrases beside each other, as many on a line as it holds, all whole that are not longer than one."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(PIECES) + len(piece) <= columns:
            lines[-1] += PIECES + piece
        else:
            lines += textwrap.wrap(piece, columns, initial_indent="  ", subsequent_indent="    ")
    return lines


def bar(done: float | None, columns: int) -> str:
    """A part of the whole, as a bar."""
    full = round(columns * min(max(done or 0.0, 0.0), 1.0))
    return "█" * full + "░" * (columns - full)


def _shown(text: str) -> str:
    """The text as it may reach the terminal, in the command line's words."""
    return terminal.shown(in_flags(text))


def _cell(text: str) -> str:
    """Plain text where rich expects its own markup."""
    return escape(_shown(text))
