"""A small HTML table, as notebooks show records."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetopt.core.plain_text import one_line


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, below: Sequence[str] = ()) -> str:
    """A table with a bold title, and sentences under it. All texts are escaped.

    Args:
        title: above it.
        head: names of the columns.
        rows: cells, as many as there are columns.
        below: sentences.
    """
    columns = "".join(f"<th>{_cell(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    told = "".join(f"<li>{_cell(sentence)}</li>" for sentence in below)
    return (
        f"<div><b>{_cell(title)}</b><table><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>"
        f"{f'<ul>{told}</ul>' if told else ''}</div>"
    )


def _cell(text: str) -> str:
    return escape(one_line(text))
