"""Documents for people: headings, figures, tables, drawings and remarks, whatever renders them.

`hetopt.reports.text` renders documents for a terminal, `hetopt.reports.html` for a page and a notebook. Programs read
the record that a document is made of, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from hetopt.core import formatting

if TYPE_CHECKING:
    from hetopt.optimizer.plan import Range

Style = Literal["", "strong", "soft", "warning", "good"]

UNITS: Mapping[str, formatting.Say] = MappingProxyType(
    {
        "s": formatting.duration,
        "USD": formatting.usd,
        "bytes": formatting.bytes_,
        "steps": formatting.count,
        "number": lambda value: f"{value:.4g}",
        "share": formatting.share,
        "chance": formatting.chance,
        "fine share": lambda value: f"{100 * value:.1f} %",
    }
)
"""Function that writes a value as text, by its unit."""


@dataclass(frozen=True)
class Figure:
    """A value with its unit, its 90 % interval where there is one, and a name for programs that read pages.

    Attributes:
        value: the number, in SI units or dollars.
        unit: key of `UNITS`.
        key: name for programs that read pages; empty: none.
        low: lower end of the 90 % interval; None: there is no interval.
        high: upper end of the 90 % interval; None: there is no interval.
    """

    value: float
    unit: str
    key: str = ""
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, known: Range, unit: str, key: str = "") -> Figure:
        """Return a figure of a predicted value with its 90 % interval; ``key`` names it for programs.

        Args:
            known: value and ends of the interval.
            unit: key of `UNITS`.
            key: name for programs that read pages; empty: none.
        """
        return cls(known.value, unit, key, known.low, known.high)

    def __str__(self) -> str:
        return UNITS[self.unit](self.value)

    @property
    def span(self) -> str:
        """Interval in few characters; empty: there is none. Only seconds and dollars have one."""
        if self.low is None or self.high is None:
            return ""
        if self.unit == "s":
            return formatting.duration_span(self.value, self.low, self.high)
        return f"{formatting.usd(self.low)}–{formatting.usd(self.high)[1:]}"


@dataclass(frozen=True)
class Html:
    """Markup for pages alone: pictures, inputs, bars; a terminal has the figures beside it.

    Attributes:
        markup: shown on a page as it is, not escaped.
    """

    markup: str


Cell: TypeAlias = "str | Figure | Html | Line"


@dataclass(frozen=True)
class Heading:
    """A section's title, up to the next heading; it is not shown over an empty section.

    Attributes:
        text: title, without markup.
    """

    text: str


@dataclass(frozen=True)
class Line:
    """A sentence or a phrase that stands alone, or in a cell.

    Attributes:
        text: the words, which may have line breaks.
        style: how it is shown; empty: plainly.
        hang: blanks before all lines but the first, where a terminal folds it.
        is_copied: whether it is a command for the clipboard, which is never wrapped.
    """

    text: str
    style: Style = ""
    hang: int = 0
    is_copied: bool = False


@dataclass(frozen=True)
class Remarks:
    """A list of sentences.

    Attributes:
        sentences: one a line; none: nothing is shown.
        mark: bullet before each, on a terminal.
    """

    sentences: Sequence[str]
    mark: str = "•"


@dataclass(frozen=True)
class Facts:
    """Named values, one a line.

    Attributes:
        values: values by their names, in order.
    """

    values: Mapping[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A main figure of a page, in large type, with explaining lines below it.

    Attributes:
        name: words above the figure.
        value: figure in large type.
        below: lines below it.
    """

    name: str
    value: Cell
    below: Sequence[Cell] = ()


@dataclass(frozen=True)
class Tiles:
    """The main figures of a page, the most important first; a screen has them in its first lines."""

    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: words above the column.
        kind: ``number``: aligned right; ``word``: never folded; ``text``: folded where a terminal is narrow.
        may_go: place in the order in which columns are left out where a terminal is narrow; None: it stays.
    """

    name: str
    kind: Literal["number", "word", "text"] = "text"
    may_go: int | None = None


def columns(text: str) -> Sequence[Column]:
    """Return columns from names with commas between; a name after ``#`` is a number's, one after ``!`` a word's."""
    marks: Mapping[str, Literal["number", "word"]] = {"#": "number", "!": "word"}
    names = [name.strip() for name in text.split(",")]
    return [Column(name[1:], marks[name[0]]) if name[:1] in marks else Column(name) for name in names]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under columns; the first names the row.

    Attributes:
        name: words for a screen reader.
        notes: a sentence below each row, where a terminal has room for few columns; empty: none.
        chosen: index of the row that is marked; None: no row is.
        caption: words below the table; empty: none.
        are_cards: whether a page shows each row as a card.
        columns: columns of the table; the first names the row.
        rows: cells of each row, as many as columns.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    chosen: int | None = None
    caption: str = ""
    are_cards: bool = False


Block: TypeAlias = Heading | Line | Remarks | Facts | Tiles | Table | Html


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document of a title and blocks, for a terminal, a page or a program.

    Attributes:
        kind: kind of page, such as ``hetopt plan``; by it `is_page` knows a file.
        title: heading of the whole.
        about: blocks below the heading.
        blocks: blocks of the main part.
        below: last line; empty: none.
        script: markup at the end of a page, not escaped; empty: none.
    """

    kind: str
    title: str
    about: Sequence[Block] = ()
    blocks: Sequence[Block] = ()
    below: Cell = ""
    script: str = ""

    @property
    def under_title(self) -> list[Block]:
        """Blocks for a terminal: the title as a line, then all others."""
        return [Line(self.title, "strong"), *self.about, *self.blocks]
