"""Draws the plots of the claims from the committed results: ``python docs/plots.py``. A test compares."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.claims import CLAIMS, Plot, figures

IMAGES = Path(__file__).resolve().parent / "images"

COLOURS = ("#1f7a5c", "#8fb8a8", "#b9a37e", "#9aa3ad", "#6f7f95")
"""The first is hetopt's."""

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 64, 40
_MOST_LINES = 6  # of the grid


def draw(plot: Plot, values: Mapping[str, float]) -> str:
    """Return a plot as an SVG file that needs nothing else.

    Args:
        plot: what is drawn.
        values: figures by name.
    """
    marks = [plot.factor * values[name] for name in plot.marks]
    series = {name: [plot.factor * values[key] for key in keys] for name, keys in plot.series.items()}
    most = max([*marks, *(value for heights in series.values() for value in heights)]) * 1.08
    band = (WIDTH - _LEFT - _RIGHT) / len(plot.groups)
    bar = 0.8 * band / len(series)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / most * (HEIGHT - _TOP - _BOTTOM)

    shapes = []
    step = _round_step(most / _MOST_LINES)
    for line in range(int(most / step) + 1):
        value = line * step
        shapes.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="quiet" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}{plot.unit}'
            "</text>"
        )
    for place, (name, heights) in enumerate(series.items()):
        for group, value in enumerate(heights):
            x = _LEFT + band * (group + 0.1) + bar * place
            shapes.append(
                f'<rect fill="{COLOURS[place]}" x="{x:.1f}" y="{y(value):.1f}" width="{bar * 0.92:.1f}" '
                f'height="{HEIGHT - _BOTTOM - y(value):.1f}"><title>{escape(name)}, {escape(plot.groups[group])}: '
                f"{value:.3g}{plot.unit}</title></rect>"
            )
            if place == 0:
                shapes.append(
                    f'<text x="{x + bar / 2:.1f}" y="{y(value) - 4:.1f}" text-anchor="middle">{value:.3g}</text>'
                )
    for group, name in enumerate(plot.groups):
        shapes.append(
            f'<text x="{_LEFT + band * (group + 0.5):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    for group, value in enumerate(marks):
        shapes.append(
            f'<line class="mark" x1="{_LEFT + band * (group + 0.06):.1f}" x2="{_LEFT + band * (group + 0.94):.1f}" '
            f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
    return _picture(plot.title, [*_legend(plot), *shapes])


def _legend(plot: Plot) -> list[str]:
    drawn, x = [], _LEFT
    names = [*plot.series, *([plot.marks_name] if plot.marks else [])]
    for place, name in enumerate(names):
        drawn.append(
            f'<rect x="{x}" y="36" width="10" height="10" fill="{COLOURS[place]}"/>'
            if place < len(plot.series)
            else f'<line class="mark" x1="{x}" x2="{x + 10}" y1="41" y2="41"/>'
        )
        drawn.append(f'<text class="quiet" x="{x + 15}" y="45">{escape(name)}</text>')
        x += 34 + round(6.6 * len(name))
    return drawn


def _picture(title: str, shapes: Sequence[str]) -> str:
    """Return an SVG file of shapes, with title and frame."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            "<style>text{font:12px system-ui,sans-serif;fill:#24292f}.quiet{fill:#57606a}.grid{stroke:#d8dee4}"
            ".mark{stroke:#24292f;stroke-dasharray:4 3}.name{font-weight:600}</style>",
            '<rect width="100%" height="100%" rx="6" fill="#ffffff"/>',
            f'<text class="name" x="{_LEFT}" y="22">{escape(title)}</text>',
            *shapes,
            "</svg>",
            "",
        ]
    )


def pictures() -> dict[Path, str]:
    """Return the plot of every claim that has a result, by path."""
    drawn = {}
    for claim in CLAIMS:
        if (result := claim.result()) is not None:
            drawn[IMAGES / f"{claim.benchmark}.svg"] = draw(claim.plot, figures(result))
    return drawn


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


if __name__ == "__main__":
    for path, drawn in pictures().items():
        path.write_text(drawn, encoding="utf-8")
