"""Documents for a browser and a notebook: one style sheet, tiles, tables, bars and intervals.

No font, picture or script comes from elsewhere: a page shows the same wherever it is sent, also on a telephone, in the
dark, on paper and to a screen reader. There is one accent colour; all else is a tint of it, or grey, and differs in
lightness. Every figure stands beside its words as ``data-value``, in SI units or dollars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from hetopt.core import formatting
from hetopt.core.paths import opened_file
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
    Tile,
    Tiles,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #56606b; --paper: #fff; --card: #f5f7f9; --line: #d5dae0;
  --accent: #0b62c4; --warn: #a84800; --a: #0b62c4; --b: #86b2e8; --c: #7d8894; --d: #39434d; --e: #cdd3d9;
  --tint: #dbe8f8; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9fabb7; --paper: #14181c;
  --card: #1c2227; --line: #343c45; --accent: #6db3ff; --warn: #f0a35c; --a: #6db3ff; --b: #2f69a8; --c: #8793a0;
  --d: #cfd6dd; --e: #3d4650; --tint: #1d3550; } }
* { box-sizing: border-box; } [hidden] { display: none !important; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 64rem; padding: 1.6rem 1.2rem 3rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .1rem 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; } li { margin: .3rem 0; } a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.soft, .of { color: var(--soft); } .small { font-size: .85rem; } .of { margin: 0; font-size: .85rem; }
.kind { color: var(--accent); font-weight: 600; font-size: .85rem; margin: 0; }
.lead { font-size: 1.1rem; } .risk { color: var(--warn); font-weight: 600; } .advice { font-weight: 600; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .6rem; color: var(--soft);
  font-size: .85rem; }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; } .tile p { margin: 0; }
.tile .big { font-size: 1.5rem; font-weight: 650; line-height: 1.35; font-variant-numeric: tabular-nums; }

table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-weight: inherit; } thead th { color: var(--soft); font-size: .85rem; vertical-align: bottom; }
td:last-child, th:last-child { padding-right: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
.chosen { font-weight: 650; color: var(--accent); }

.bar { display: flex; height: 1.2rem; border-radius: .2rem; overflow: hidden; background: var(--card); }
.bar i { display: block; min-width: 1px; border-right: 1px solid var(--paper); } .bar i:last-child { border: 0; }
.bar.thin { height: .45rem; background: var(--e); margin: .35rem 0; min-width: 5rem; }
.bar .a { background: var(--a); } .bar .b { background: var(--b); } .bar .c { background: var(--c); }
.bar .d { background: var(--d); } .bar .e { background: var(--e); } .bar .over { background: var(--warn); }
.swatch { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; }
.swatch.a { background: var(--a); } .swatch.b { background: var(--b); } .swatch.c { background: var(--c); }
.swatch.d { background: var(--d); } .swatch.e { background: var(--e); }
.interval { position: relative; height: 1.1rem; min-width: 7rem; background:
  linear-gradient(var(--c), var(--c)) 50% 50% / 1px 100% no-repeat, linear-gradient(var(--line), var(--line))
  0 50% / 100% 1px no-repeat; }
.interval i { position: absolute; top: .35rem; height: .4rem; background: var(--b); border-radius: .2rem; }
.interval b { position: absolute; top: .25rem; width: .6rem; height: .6rem; background: var(--accent);
  transform: translateX(-50%) rotate(45deg); } .interval b.out { background: var(--warn); }

.ways { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.ways + .of { margin-top: .6rem; }
.way { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.way.own { border: 2px solid var(--accent); } .way h3 { font-size: .95rem; margin: 0 0 .3rem; color: var(--soft); }
.way.own h3 { color: var(--accent); } .way p { margin: .15rem 0; } .way b { font-size: 1.15rem; }
.way p > .soft { white-space: nowrap; display: inline-block; }
.way .soft { font-size: .85rem; }
pre { background: var(--card); border-radius: .4rem; padding: .6rem .9rem; overflow-x: auto; white-space: pre-wrap; }

svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
figure { margin: 1.4rem 0 0; display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: 0 .8rem; }
figure.whole { display: block; } figure > figcaption { align-content: start; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: baseline; }
figcaption .small { flex-basis: 100%; } .key1 { font-size: .9rem; }
output { font-variant-numeric: tabular-nums; font-weight: 600; }
.sample { width: 26px; height: 8px; vertical-align: middle; margin-right: .3rem; }
.plot { position: relative; border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); margin: .2rem 0; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.plot span { position: absolute; left: .3rem; font-size: .75rem; color: var(--soft); background: var(--paper);
  padding: 0 .2rem; pointer-events: none; } .plot span:empty { display: none; }
.plot .top { top: 0; } .plot .bottom { bottom: 0; }
.line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; } .band { opacity: .28; }
.level { stroke: var(--soft); stroke-dasharray: 3 3; vector-effect: non-scaling-stroke; }
.happened { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 1 3; vector-effect: non-scaling-stroke; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); } .line.d { stroke: var(--d); }
.band.a { fill: var(--a); } .band.c { fill: var(--c); } .band.d { fill: var(--d); }
.cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1.5px solid var(--ink); pointer-events: none; }
.worker { display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: 0 .8rem; margin-top: .5rem; }
.worker > div:first-child { font-size: .85rem; } .worker .plot { margin: 0; }
.ticks { margin-left: 11.8rem; display: flex; justify-content: space-between; font-size: .75rem; color: var(--soft); }
.line.c { stroke: var(--c); }
.name { white-space: nowrap; } th .of { font-weight: 400; }
#now { position: sticky; top: 0; background: var(--paper); padding: .3rem 0; z-index: 1;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
#now input { display: block; width: calc(100% - 11.8rem); margin: .2rem 0 0 11.8rem; accent-color: var(--accent); }

@media (max-width: 40rem) { body { padding: 1rem .9rem 2rem; } h1 { font-size: 1.4rem; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; }
  .tile .big { font-size: 1.25rem; } .ways { grid-template-columns: 1fr; }
  figure, .worker { grid-template-columns: minmax(0, 1fr); } .ticks { margin-left: 0; }
  #now input { width: 100%; margin-left: 0; }
  .front text { font-size: 22px; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody, tr, td, tbody th { display: block; } tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  tbody th { border: 0; padding: 0; font-weight: 600; }
  td { display: flow-root; border: 0; padding: .05rem 0 .05rem 7.5rem; }
  td::before { content: attr(data-label); color: var(--soft); font-size: .85rem; float: left; width: 7rem;
    margin-left: -7.5rem; }
  td.n { display: inline-block; padding: 0 1.1rem 0 0; white-space: normal; }
  td.n::before { float: none; width: auto; margin: 0 .4rem 0 0; } td:empty, td.n:empty { display: none; } }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } #now input { display: none; }
  * { print-color-adjust: exact; } tr, .way, .tile, figure, li { break-inside: avoid; }
  h2, h3 { break-after: avoid; } #now { position: static; } }
"""

COLOURS = ("a", "b", "c", "d", "e")

_HEAD_BYTES = 1024
_CLASSES = {"strong": "lead", "warning": "risk", "good": "advice", "soft": "soft"}


def page(document: Document) -> str:
    """Return a document as the text of one HTML page, which needs no other file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{_maker(document.kind)}\n"
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header>\n<p class="kind">{escape(document.kind)}</p>\n<h1>{escape(document.title)}</h1>\n'
        f"{inside(document.about)}\n</header>\n<main>\n{inside(document.blocks)}\n</main>\n"
        f"<footer>{cell(document.below)}</footer>{document.script}\n</body>\n</html>\n"
    )


def _maker(kind: str) -> str:
    return f'<meta name="generator" content="{escape(kind)}">'


def is_page(path: Path, kind: str) -> bool:
    """Return whether a file is a page of a kind, such as ``hetopt plan``, by its first 1,024 bytes.

    Args:
        path: file to look at.
        kind: as of `Document.kind`.

    Raises:
        BadInput: the file cannot be read.
    """
    with opened_file(path) as stream:
        return _maker(kind).encode() in stream.read(_HEAD_BYTES)


def notebook(document: Document) -> str:
    """Return HTML of an iframe that holds a document's page: it neither takes a notebook's styles nor gives it any.

    Scripts of the page run in it.
    """
    style = "width:100%;height:36rem;border:0"
    return f'<iframe srcdoc="{escape(page(document))}" sandbox="allow-scripts" style="{style}"></iframe>'


def inside(blocks: Iterable[Block]) -> str:
    """Return blocks as markup: each heading opens a section, which it names for a screen reader too.

    A heading over nothing is left out.
    """
    parts: list[str] = []
    name = ""
    for is_heading, group in groupby(blocks, key=lambda block: isinstance(block, Heading)):
        if is_heading:
            name = [block.text for block in group if isinstance(block, Heading)][-1]
            continue
        body = "\n".join(filter(None, map(_block, group)))
        if body and name:
            key = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
            body = f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(name)}</h2>\n{body}\n</section>'
        parts.append(body)
    return "\n".join(parts)


def _block(block: Block) -> str:
    """Return the HTML of a block, text escaped; empty for a heading or a block without content."""
    match block:
        case Line(is_copied=True):
            return f"<pre>{escape(block.text)}</pre>"
        case Line():
            kind = f' class="{_CLASSES[block.style]}"' if block.style else ""
            return f"<p{kind}>{escape(block.text)}</p>" if block.text else ""
        case Remarks():
            items = "".join(f"<li>{escape(sentence)}</li>" for sentence in block.sentences)
            return f"<ul>{items}</ul>" if items else ""
        case Facts():
            rows = list(block.values.items())
            return _table(Table(name="facts", columns=[Column("fact"), Column("value")], rows=rows))
        case Tiles():
            return f'<div class="tiles">{"".join(map(_tile, block.tiles))}</div>'
        case Table(are_cards=True):
            return _cards(block)
        case Table():
            return _table(block)
        case Html():
            return block.markup
        case Heading():
            return ""


def cell(value: Cell) -> str:
    """Return the HTML of a cell, text escaped.

    A number has its value beside its words, and its interval behind them.
    """
    if isinstance(value, Html):
        return value.markup
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Line):
        text = escape(value.text)
        return f'<span class="{_CLASSES[value.style]}">{text}</span>' if value.style else text
    return _number(value) + _span(value)


def _number(figure: Figure) -> str:
    return f'<span data-figure="{escape(figure.key)}" data-value="{figure.value!r}">{escape(str(figure))}</span>'


def _span(figure: Figure) -> str:
    return f' <span class="soft">{escape(figure.span)}</span>' if figure.span else ""


def _tile(tile: Tile) -> str:
    below = "".join(
        part.markup if isinstance(part, Html) else f'<p class="of">{cell(part)}</p>' for part in tile.below if part
    )
    return f'<div class="tile"><p class="of">{escape(tile.name)}</p><p class="big">{cell(tile.value)}</p>{below}</div>'


def _cards(table: Table) -> str:
    """Return each row as a card: its first cell above, the others named where they are no figures with an interval."""
    cards = []
    for number, (first, *others) in enumerate(table.rows):
        named = zip(table.columns[1:], others, strict=True)
        cells = "".join(
            f"<p><b>{_number(value)}</b>{_span(value)}</p>"
            if isinstance(value, Figure)
            else cell(value)
            if isinstance(value, Html)
            else f'<p><span class="of">{escape(column.name)}</span> {cell(value)}</p>'
            for column, value in named
            if value
        )
        note = f'<p class="soft">{escape(table.notes[number])}</p>' if table.notes else ""
        css_class, mark = (" own", " (this plan)") if number == table.chosen else ("", "")
        cards.append(f'<section class="way{css_class}"><h3>{cell(first)}{mark}</h3>{cells}{note}</section>')
    return f'<div class="ways">{"".join(cards)}</div>' if cards else ""


def _table(table: Table) -> str:
    """Return a table; empty without rows. On a narrow screen each row is a block of labelled lines.

    Roles are spelled out, because a browser forgets that it is a table once it is drawn as blocks.
    """
    if not table.rows:
        return ""
    kinds = [' class="n"' if column.kind == "number" else "" for column in table.columns]
    head = "".join(
        f'<th role="columnheader" scope="col"{kind}>{escape(column.name)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = []
    for number, (first, *others) in enumerate(table.rows):
        name = cell(first)
        if number == table.chosen:
            name = f'<span class="chosen">{name} (this plan)</span>'
        cells = "".join(
            f'<td role="cell"{kind} data-label="{escape(column.name)}">{cell(value)}</td>'
            for column, kind, value in zip(table.columns[1:], kinds[1:], others, strict=True)
        )
        rows.append(f'<tr role="row"><th role="rowheader" scope="row"{kinds[0]}>{name}</th>{cells}</tr>\n')
    caption = f'<p class="of">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<table role="table"><caption class="unseen">{escape(table.name)}</caption>\n'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{"".join(rows)}</tbody></table>{caption}'
    )


def parts_bar(name: str, parts: Sequence[tuple[str, float]]) -> str:
    """Return HTML of a bar of a whole's parts, in the order of `COLOURS`; the last colour is for all that is left.

    Args:
        name: words for a screen reader.
        parts: name and size of each, in one unit; sizes are shown as fractions of their sum.
    """
    total = math.fsum(size for _, size in parts) or 1.0
    drawn = "".join(
        f'<i class="{COLOURS[min(place, len(COLOURS) - 1)]}" style="width:{100 * size / total:.2f}%" '
        f'title="{escape(label)}"></i>'
        for place, (label, size) in enumerate(parts)
    )
    spelled = ", ".join(f"{label} {formatting.share(size / total)}" for label, size in parts)
    legend = " · ".join(
        f'<span class="swatch {COLOURS[min(place, len(COLOURS) - 1)]}"></span> {escape(label)}'
        for place, (label, _) in enumerate(parts)
    )
    bar = f'<div class="bar" role="img" aria-label="{escape(f"{name}: {spelled}")}">{drawn}</div>'
    return f'{bar}<p class="of">{legend}</p>'


def interval_bar(predicted: float, low: float, high: float, measured: float, *, widest: float) -> str:
    """Return HTML of a measured figure beside its prediction and interval, on a log scale.

    Empty: the prediction or the measurement is 0 or below.

    Args:
        predicted: value in the middle of the scale.
        low: lower end of the interval.
        high: upper end of the interval.
        measured: value that is marked, in the warning colour outside the interval.
        widest: ratio to the prediction at the edge of the scale, above 1; what is beyond stays there.
    """
    if predicted <= 0 or measured <= 0:
        return ""

    def place(value: float) -> float:
        ratio = min(max(value, 1e-12) / predicted, widest)
        return 50 + 50 * math.log(max(ratio, 1 / widest)) / math.log(widest)

    left, right = place(low), place(high)
    out = "" if low <= measured <= high else ' class="out"'
    return (
        f'<div class="interval" aria-hidden="true"><i style="left:{left:.1f}%;width:{max(right - left, 0.6):.1f}%"></i>'
        f'<b{out} style="left:{place(measured):.1f}%"></b></div>'
    )
