"""Draws the README's plots from the committed results: ``python docs/plots.py``. A test holds them against those."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
RESULTS = DOCS.parent / "benchmarks" / "results"

COLOURS = ("#1f7a5c", "#8fb8a8", "#b9a37e", "#9aa3ad", "#6f7f95")
"""The first is hetopt's."""

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 64, 40
_MOST_LINES = 6  # of the grid


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Groups of bars side by side.

    Attributes:
        title: what is shown, with its unit.
        groups: names, one a group.
        series: values of each contender by its name, one a group.
        marks: a line across each group, such as the ideal; empty: none.
        marks_name: what the lines are.
        unit: behind each value.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]
    marks: Sequence[float] = ()
    marks_name: str = ""
    unit: str = ""

    def draw(self) -> str:
        """An SVG file that needs nothing else."""
        most = max([*self.marks, *(value for values in self.series.values() for value in values)]) * 1.08
        band = (WIDTH - _LEFT - _RIGHT) / len(self.groups)
        bar = 0.8 * band / len(self.series)

        def y(value: float) -> float:
            return HEIGHT - _BOTTOM - value / most * (HEIGHT - _TOP - _BOTTOM)

        shapes = []
        step = _round_step(most / _MOST_LINES)
        for line in range(int(most / step) + 1):
            value = line * step
            shapes.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
                f'<text class="quiet" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}{self.unit}'
                "</text>"
            )
        for place, (name, values) in enumerate(self.series.items()):
            for group, value in enumerate(values):
                x = _LEFT + band * (group + 0.1) + bar * place
                shapes.append(
                    f'<rect fill="{COLOURS[place]}" x="{x:.1f}" y="{y(value):.1f}" width="{bar * 0.92:.1f}" '
                    f'height="{HEIGHT - _BOTTOM - y(value):.1f}"><title>{escape(name)}, {escape(self.groups[group])}: '
                    f"{value:.3g}{self.unit}</title></rect>"
                )
                if place == 0:
                    shapes.append(
                        f'<text x="{x + bar / 2:.1f}" y="{y(value) - 4:.1f}" text-anchor="middle">{value:.3g}</text>'
                    )
        for group, name in enumerate(self.groups):
            shapes.append(
                f'<text x="{_LEFT + band * (group + 0.5):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
        for group, value in enumerate(self.marks):
            shapes.append(
                f'<line class="mark" x1="{_LEFT + band * (group + 0.06):.1f}" x2="{_LEFT + band * (group + 0.94):.1f}" '
                f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                f'height="{HEIGHT}" role="img" aria-labelledby="title">',
                f'<title id="title">{escape(self.title)}</title>',
                "<style>text{font:12px system-ui,sans-serif;fill:#24292f}.quiet{fill:#57606a}.grid{stroke:#d8dee4}"
                ".mark{stroke:#24292f;stroke-dasharray:4 3}.name{font-weight:600}</style>",
                '<rect width="100%" height="100%" rx="6" fill="#ffffff"/>',
                f'<text class="name" x="{_LEFT}" y="22">{escape(self.title)}</text>',
                *self._legend(),
                *shapes,
                "</svg>",
                "",
            ]
        )

    def _legend(self) -> list[str]:
        drawn, x = [], _LEFT
        names = [*self.series, *([self.marks_name] if self.marks else [])]
        for place, name in enumerate(names):
            drawn.append(
                f'<rect x="{x}" y="36" width="10" height="10" fill="{COLOURS[place]}"/>'
                if place < len(self.series)
                else f'<line class="mark" x1="{x}" x2="{x + 10}" y1="41" y2="41"/>'
            )
            drawn.append(f'<text class="quiet" x="{x + 15}" y="45">{escape(name)}</text>')
            x += 34 + round(6.6 * len(name))
        return drawn


def unequal_workers() -> str:
    """How much faster than DistributedDataParallel workers of unequal speed train, by `benchmarks.balance`."""
    told = _result("balance")
    clusters = ("9_12_18", "12_12_8_16", "9_9_6_24", "6_6_4_32", "2_17_20")
    rivals = {"in proportion to speed": "proportional", "OmniLearn": "omnilearn", "task allocation": "allocation"}
    return Bars(
        title="Unequal workers: times as fast as DistributedDataParallel, by the workers' cores",
        groups=[name.replace("_", ", ") for name in clusters],
        series={
            "hetopt": [told[f"speed_up_{name}"] for name in clusters],
            **{rival: [told[f"speed_up_{key}_{name}"] for name in clusters] for rival, key in rivals.items()},
        },
        marks=[told[f"ideal_speed_up_{name}"] for name in clusters],
        marks_name="ideal",
    ).draw()


def pictures() -> dict[Path, str]:
    """Every plot by its file."""
    return {IMAGES / "unequal-workers.svg": unequal_workers()}


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no less."""
    power = 10 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _result(name: str) -> dict[str, float]:
    told = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {**told["baselines"], **told["figures"]}


if __name__ == "__main__":
    for path, drawn in pictures().items():
        path.write_text(drawn, encoding="utf-8")
