"""Documents for a terminal: lines of characters with a style each, laid out for its width."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

from hetopt.core.plain_text import escaped, without_colours
from hetopt.reports.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Figure,
    Heading,
    Html,
    Line,
    Remarks,
    Table,
)

LONGEST_WORD = 12
"""Fewest characters of a column that folds: in a narrower one a table cannot be read."""

BAR = 24
"""Characters of a progress bar, where there is room for them."""

COLUMNS = 80
"""Width, in characters, of a document whose terminal nobody knows."""

SCREEN = 23
"""Most lines of an answer: a terminal of 24 has the prompt below it."""

_GLUE = "\xa0"
_GLUED = re.compile(r"(?<=\d) (?=%|×|(?:min|h|s|d|ms|µs|GiB|MiB|GB|MB|kB|vCPUs?)\b)|(?<=×) ")
"""Blanks at which no line ends: between a number and its unit."""

Styled = tuple[str, str]
"""A line of text, and its style as `hetopt.reports.document.Style` has it."""

Spell = Callable[[str], str]


def shown(text: str) -> str:
    """Return a text safe for a terminal: printable characters and line breaks alone, tabs expanded, no colours."""
    return escaped(without_colours(text).expandtabs(4), keep="\n")


def lines(blocks: Iterable[Block], width: int, spell: Spell = shown) -> list[Styled]:
    """Return a document's blocks as lines for a terminal ``width`` characters wide, each with its style.

    What pages alone show is left out.

    Args:
        blocks: blocks of the document, in order.
        width: characters of a line; commands to copy may be longer.
        spell: returns a text as it may be shown.
    """
    styled: list[Styled] = []
    heading: list[Styled] = []
    for block in blocks:
        if isinstance(block, Heading):
            heading = [("", ""), (spell(block.text), "strong")]
            continue
        inside = list(_lines(block, width, spell))
        if inside:
            styled += [*heading, *inside]
            heading = []
    return styled


def whole(document: Document, width: int = COLUMNS) -> str:
    """Return a document as plain text, wrapped at ``width`` characters."""
    return "\n".join(line for line, _ in lines(document.under_title, width))


def on_one_screen(blocks: Sequence[Block], width: int, spell: Spell = shown, *, room: int = SCREEN) -> list[Block]:
    """Shorten blocks to a screen: leave the last out, say how to see them, then put the commands.

    Blocks that fit are returned as they are.

    The last go first: remarks sentence by sentence, then what stands under headings. Commands stay.

    Args:
        blocks: blocks, the most important first.
        width: characters of a line of the terminal.
        spell: returns a text as it may be shown, see `lines`.
        room: number of lines that there are.
    """

    def height(some: Sequence[Block]) -> int:
        return sum(max(1, math.ceil(len(text) / width)) for text, _ in lines(some, width, spell))

    commands = [block for block in blocks if isinstance(block, Line) and block.is_copied]
    end = [Line("More: the same command with `explain`.", "soft"), *commands]
    shown = [block for block in blocks if block not in commands]
    first = next((place for place, block in enumerate(shown) if isinstance(block, Heading)), len(shown))

    def is_long() -> bool:
        return height([*shown, *end]) > room

    if height(blocks) <= room:
        return list(blocks)
    for place in reversed(range(len(shown))):
        block = shown[place]
        while isinstance(block, Remarks) and block.sentences and is_long():
            block = shown[place] = Remarks(block.sentences[:-1], block.mark)
        if place >= first and is_long():
            del shown[place]
    while shown and not lines(shown[-1:], width, spell):
        shown.pop()
    return [*shown, *end]


def _lines(block: Block, width: int, spell: Spell) -> Iterator[Styled]:
    """Yield a block's lines, wrapped to ``width``, each with its style; none for blocks that pages alone show."""
    match block:
        case Line(is_copied=True):
            yield spell(block.text), block.style
        case Line():
            yield from ((line, block.style) for line in wrapped(spell(block.text), width, hang=block.hang))
        case Remarks():
            for sentence in block.sentences:
                yield from ((line, "") for line in hung(spell(block.mark), spell(sentence), width))
        case Facts():
            names = [spell(name) for name in block.values]
            widest = max(map(len, names), default=0)
            for name, value in zip(names, block.values.values(), strict=True):
                yield from ((line, "") for line in hung(f"{name:<{widest}} ", _cell(value, spell), width))
        case Table():
            yield from _table(block, width, spell)


def wrapped(text: str, width: int, *, hang: int = 0) -> list[str]:
    """Return the lines that a text takes; all but the first begin with ``hang`` blanks.

    A number stays with its unit, and words with hyphens, such as options, stay whole.

    Args:
        text: may have line breaks; an empty line stays.
        width: characters of a line.
        hang: blanks before all lines but the first.
    """
    return [
        line.replace(_GLUE, " ")
        for part in text.split("\n")
        for line in textwrap.wrap(
            _GLUED.sub(_GLUE, part),
            max(width, hang + 1),
            subsequent_indent=" " * hang,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        or [""]
    ]


def hung(mark: str, text: str, width: int) -> list[str]:
    """Return the lines of a text: the first behind two blanks and a mark, the others indented to stand under its words.

    Args:
        mark: bullet or name.
        text: words behind it; empty: there is one line, of the mark alone.
        width: characters of a line. The words have at least 12 of them, even where the line becomes longer.
    """
    first, *others = wrapped(text, max(width - len(mark) - 3, LONGEST_WORD))
    return [f"  {mark} {first}".rstrip(), *(f"{' ' * (len(mark) + 3)}{line}" for line in others)]


def _text(cell: Cell) -> str:
    """Return a cell as plain text, a figure with its interval; empty for markup."""
    if isinstance(cell, Figure):
        return f"{cell} ({cell.span})" if cell.span else str(cell)
    return cell.text if isinstance(cell, Line) else cell if isinstance(cell, str) else ""


def _cell(cell: Cell, spell: Spell) -> str:
    return spell(_text(cell)).replace("\n", " ")


def _table(table: Table, width: int, spell: Spell) -> Iterator[Styled]:
    """Yield the rows in columns; where these do not fit, each row as a line with facts below it."""
    places = [
        place
        for place in range(len(table.columns))
        if not table.rows or not all(isinstance(row[place], Html) for row in table.rows)
    ]
    columns = [table.columns[place] for place in places]
    rows = [[_cell(row[place], spell) for place in places] for row in table.rows]
    if table.chosen is not None:
        rows = [[f"{'»' if row == table.chosen else ' '} {cells[0]}", *cells[1:]] for row, cells in enumerate(rows)]
    head = [spell(column.name) for column in columns]
    fitted = _fitted(columns, [head, *rows], width)
    for number, cells in enumerate([head, *rows] if fitted is not None else rows, start=fitted is None):
        is_chosen = number - 1 == table.chosen
        style = "strong" if is_chosen or (number == 0 and not table.notes) else "soft" if number == 0 else ""
        if fitted is None:
            yield from ((line, "strong") for line in wrapped(cells[0], width))
            facts = {name: cell for name, cell in zip(head[1:], cells[1:], strict=True) if cell}
            yield from _lines(Facts(facts), width, str)
        else:
            hang = 0 if table.chosen is None else 2
            yield from ((line, style) for line in _row(columns, cells, *fitted, hang=hang))
        if table.notes and number:
            yield from ((line, "soft") for line in wrapped(f"    {spell(table.notes[number - 1])}", width, hang=4))
    if table.caption:
        yield from ((line, "soft") for line in wrapped(spell(table.caption), width))
    gone = [] if fitted is None else [name for place, name in enumerate(head) if place not in fitted[0]]
    if gone and not table.notes:
        yield from ((line, "soft") for line in wrapped(f"left out for lack of width: {', '.join(gone)}", width))


def _fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[dict[int, int], int] | None:
    """Return the width of each column that is shown, and the gap between them; None: they do not fit."""
    natural = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    least = [
        min(LONGEST_WORD, max(len(word) for cell in cells for word in (cell.split() or [""])))
        if column.kind == "text"
        else widest
        for column, widest, cells in zip(columns, natural, zip(*rows, strict=True), strict=True)
    ]
    kept = list(range(len(columns)))
    order = sorted((column.may_go, place) for place, column in enumerate(columns) if column.may_go is not None)
    for goes in (None, *(place for _, place in order)):
        kept = [place for place in kept if place != goes]
        for narrowest, gap in product((natural, least), (2, 1)):
            room = width - gap * (len(kept) - 1)
            if sum(narrowest[place] for place in kept) > room:
                continue
            widths = {place: natural[place] for place in kept}
            while sum(widths.values()) > room:
                widest = max((place for place in kept if widths[place] > least[place]), key=widths.__getitem__)
                widths[widest] -= 1
            return widths, gap
    return None


def _row(
    columns: Sequence[Column], cells: Sequence[str], widths: dict[int, int], gap: int, *, hang: int
) -> Iterator[str]:
    """Yield the lines of one row; ``hang``: blanks before what of the first cell does not fit on its first line."""
    parts = [
        [cells[place]] if len(cells[place]) <= width else wrapped(cells[place], width, hang=0 if place else hang)
        for place, width in widths.items()
    ]
    for number in range(max(map(len, parts))):
        line = (
            f"{part[number] if number < len(part) else '':{'>' if columns[place].kind == 'number' else '<'}{width}}"
            for part, (place, width) in zip(parts, widths.items(), strict=True)
        )
        yield (gap * " ").join(line).rstrip()
