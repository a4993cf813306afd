"""How things look in a terminal; the only file that knows rich. stdout carries the artifact, stderr the progress.

All text goes through `_shown`: what others wrote commands nothing here, and the library's parameters become options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.live import Live as RichLive
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hetopt.cli import terminal
from hetopt.cli.flags import in_flags
from hetopt.core.reading import shortened
from hetopt.core.reporter import Reporter


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. Numbers (right) are never cut; text folds where the terminal is too narrow, unless fixed."""

    name: str
    justify: Literal["left", "right"] = "left"
    style: str | None = None
    fixed: bool = False


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


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, caption: str | None = None) -> None:
    """A table on stdout. Cells are plain text."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(
            _cell(column.name),
            justify=column.justify,
            style=column.style,
            no_wrap=column.fixed or column.justify == "right",
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*(_cell(cell) for cell in row))
    out = console()
    out.print(grid)
    if caption is not None:
        out.print(_shown(caption), style="dim", markup=False)


def heading(text: str) -> None:
    """A line that opens a part of the output."""
    console().print(f"\n{_cell(text)}", style="bold")


def line(text: str = "", *, style: str | None = None) -> None:
    """A plain line on stdout, wrapped at the terminal's width."""
    console().print(_shown(text), style=style, markup=False)


def bullet(text: str, *, mark: str = "•") -> None:
    """A sentence in a list, wrapped and indented behind its mark."""
    out = console()
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(mark, _cell(text))
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))


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
    """A part of the terminal that is drawn anew with each call; it stays as it was last. Never draws by itself."""
    with RichLive(console=console(), auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda picture: live.update(drawn(picture), refresh=True)


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return console().is_terminal


@contextmanager
def progress(description: str) -> Iterator[Reporter]:
    """A live line on stderr. Where stderr is no terminal, each new description is one plain line instead."""
    out = console(stderr=True)
    if not out.is_terminal:
        last = [""]

        def plain(text: str, done: float | None) -> None:
            if text != last[0]:
                last[0] = text
                share = "" if done is None else f" ({done:.0%})"
                out.print(_shown(f"{description}: {text}{share}"), markup=False, style="dim")

        yield Reporter(progress=plain, note=note)
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        console=out,
        transient=True,
    ) as bar:
        task = bar.add_task(_cell(description), total=1.0, what="")

        def live(text: str, done: float | None) -> None:
            bar.update(task, what=_cell(text), completed=done)

        # Through the bar's own console, or the remark would be written into the line.
        yield Reporter(progress=live, note=lambda text: bar.console.print(_shown(text), markup=False, style="dim"))


def _shown(text: str) -> str:
    """The text as it may reach the terminal, in the command line's words."""
    return terminal.shown(in_flags(text))


def _cell(text: str) -> str:
    """Plain text where rich expects its own markup."""
    return escape(_shown(text))
