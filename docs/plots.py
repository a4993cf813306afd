"""Draws the README's plots from the committed results: ``python docs/plots.py``. A test holds them against those."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._outcome import figures_of

IMAGES = Path(__file__).resolve().parent / "images"

COLOURS = ("#1f7a5c", "#8fb8a8", "#b9a37e", "#9aa3ad", "#6f7f95")
"""The first is hetopt's."""

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 64, 40
_MOST_LINES = 6  # of the grid
MOST_RUNS = 20


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
        return _picture(self.title, [*self._legend(), *shapes])

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


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """An interval a row, upright, with a dot where the truth was.

    Attributes:
        title: what is shown.
        names: of the rows.
        rows: low end, truth and high end of each, over the predicted value.
    """

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[float]]

    def draw(self) -> str:
        """An SVG file that needs nothing else."""
        least, most = min(map(min, self.rows)) / 1.05, max(map(max, self.rows)) * 1.05
        band = (WIDTH - _LEFT - _RIGHT) / len(self.rows)

        def y(value: float) -> float:
            share = math.log(value / least) / math.log(most / least)
            return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

        shapes = [f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>']
        for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2):
            if least < value < most:
                shapes.append(
                    f'<text class="quiet" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
                )
        for place, (name, (low, truth, high)) in enumerate(zip(self.names, self.rows, strict=True)):
            x = _LEFT + band * (place + 0.5)
            shapes.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(high):.1f}" y2="{y(low):.1f}" stroke="{COLOURS[1]}" '
                f'stroke-width="10" stroke-linecap="round"/><circle cx="{x:.1f}" cy="{y(truth):.1f}" r="5" '
                f'fill="{COLOURS[0]}"><title>{escape(name)}: {truth:.2f}, predicted {low:.2f} to {high:.2f}</title>'
                f'</circle><text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>'
            )
        return _picture(self.title, shapes)


def _picture(title: str, shapes: Sequence[str]) -> str:
    """The frame of every plot."""
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


def unequal_workers() -> str:
    """How much faster than DistributedDataParallel workers of unequal speed train, by `benchmarks.balance`."""
    told = figures_of("balance")
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


def decisions() -> str:
    """What clusters cost that predicted steps chose, and how often they are too slow, by `benchmarks.decisions`."""
    told = figures_of("decisions")
    planners = {"hetopt": "hetopt", "Ernest": "ernest", "Scavenger": "scavenger", "AdaptDL": "pollux_adaptdl_own_code"}
    return Bars(
        title="The cheapest cluster for a throughput, chosen by predictions, judged by measurements",
        groups=["costs more than the best", "misses the throughput"],
        series={
            name: [100 * told[f"no_probe_extra_cost_{key}"], 100 * told[f"no_probe_missed_{key}"]]
            for name, key in planners.items()
        },
        marks=[100 * told["extra_cost_seen_all_rows"], 100 * told["missed_seen_all_rows"]],
        marks_name="noise alone",
        unit=" %",
    ).draw()


def predicted_runs() -> str:
    """Run times of the demo beside what was predicted of each, by `benchmarks.prediction`."""
    told = figures_of("prediction")
    numbers = [number for number in range(MOST_RUNS) if f"demo_run_{number}_measured_over_predicted" in told]
    rows = [
        [told[f"demo_run_{number}_{kind}_over_predicted"] for kind in ("low", "measured", "high")] for number in numbers
    ]
    return Intervals(
        title="Runs on this machine: 90 % interval of the prediction, and what was measured (predicted: 1)",
        names=[f"run {number + 1}" for number in numbers],
        rows=rows,
    ).draw()


def pictures() -> dict[Path, str]:
    """Every plot by its file."""
    return {
        IMAGES / "decisions.svg": decisions(),
        IMAGES / "predicted-runs.svg": predicted_runs(),
        IMAGES / "unequal-workers.svg": unequal_workers(),
    }


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no less."""
    power = 10 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


if __name__ == "__main__":
    for path, drawn in pictures().items():
        path.write_text(drawn, encoding="utf-8")
