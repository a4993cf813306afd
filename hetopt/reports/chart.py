"""Charts over the run's time: the plot is an SVG that stretches, its words are HTML that does not.

So a page is as readable on a telephone as on a wide screen. All charts share one axis of time, from the first step to
the last. What lies side by side differs in lightness or dash, and each says in words where it begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from hetopt.core import formatting
from hetopt.reports.series import Column, Envelope

WIDTH = 1000
"""Of every plot, in its own units."""

DASHES = ("", "7 4", "2 3", "9 3 2 3")


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """One quantity over time.

    Attributes:
        key: its name in the page's data, by which the cursor finds it.
        label: for people.
        envelope: [points] each.
        colour: a variable of the page's style.
    """

    key: str
    label: str
    envelope: Envelope
    colour: str = "a"


@dataclass(frozen=True, kw_only=True, eq=False)
class Axes:
    """What all charts of a page share: when its points are, and what happened when."""

    end_s: Column
    marks_s: Sequence[float]

    @property
    def duration_s(self) -> float:
        """Seconds from the left edge of the chart to its right edge."""
        return float(self.end_s[-1])

    def x(self, time_s: float) -> float:
        """Where a moment is, 0 to WIDTH."""
        return WIDTH * min(max(time_s / self.duration_s, 0.0), 1.0) if self.duration_s > 0 else 0.0

    def xs(self) -> list[float]:
        """Horizontal place of every point, 0 to WIDTH."""
        return [self.x(float(time_s)) for time_s in self.end_s]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The vertical scale of a chart: maps values to heights."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def around(cls, columns: Sequence[Column], *, logarithmic: bool = False, from_zero: bool = False) -> Scale:
        """A scale that holds all that is known in the columns."""
        known = np.concatenate([np.ravel(column)[np.isfinite(np.ravel(column))] for column in columns])
        known = known[known > 0] if logarithmic else known
        if not len(known):
            return cls(low=0.0, high=1.0)
        low, high = float(known.min()), float(known.max())
        if from_zero:
            low = 0.0
        if low == high:
            low, high = (low / 2, high * 2) if logarithmic else (min(low, 0.0), high if high > low else low + 1)
        if low == high:
            high = low + 1
        return cls(low=low, high=high, logarithmic=logarithmic)

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top."""
        if self.logarithmic:
            inside = min(max(value, self.low), self.high)
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_chart(
    title: str,
    lines: Sequence[Line],
    axes: Axes,
    *,
    say: formatting.Say,
    note: str = "",
    logarithmic: bool = False,
    from_zero: bool = False,
    height: int = 150,
    level: tuple[str, float] | None = None,
) -> str:
    """Lines with their bands from least to largest.

    Args:
        title: of the chart.
        lines: at most as many as there are dashes.
        axes: the page's.
        say: how values are told.
        note: below the title.
        logarithmic: the heights.
        from_zero: whether the scale begins at 0.
        height: of the plot, pixels.
        level: a horizontal line, and what it is.
    """
    columns = [part for line in lines for part in (line.envelope.low, line.envelope.high)]
    levels = [np.array([level[1]])] if level is not None else []
    scale = Scale.around([*columns, *levels], logarithmic=logarithmic, from_zero=from_zero)

    def y(value: float) -> float:
        return height * (1 - scale.share(value))

    parts = []
    for number, line in enumerate(lines):
        dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
        parts.append(f'<path class="band {line.colour}" d="{_band(line.envelope, axes, y)}"/>')
        parts.append(f'<path class="line {line.colour}"{dash} d="{_path(line.envelope.middle, axes, y)}"/>')
    if level is not None:
        at = y(level[1])
        parts.append(f'<path class="level" d="M0 {at:.1f}H{WIDTH}"/>')
    legend = " ".join(_legend(line, DASHES[number]) for number, line in enumerate(lines))
    told = f' <span class="soft">{escape(level[0])} {escape(say(level[1]))}</span>' if level is not None else ""
    return figure(
        title,
        legend + told,
        plot(
            "".join(parts),
            axes,
            height=height,
            top=say(scale.high),
            bottom=say(scale.low),
            name=f"{title}: {'; '.join(_in_words(line, say) for line in lines)}",
        ),
        note=note,
    )


def plot(inside: str, axes: Axes, *, height: int, name: str, top: str = "", bottom: str = "") -> str:
    """The stretching part of a chart, with what happened as lines from top to bottom."""
    marks = "".join(f"M{axes.x(time_s):.1f} 0V{height}" for time_s in axes.marks_s)
    return (
        f'<div class="plot" style="height:{height}px"><svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(name)}">{inside}'
        f'<path class="happened" d="{marks}"/></svg>'
        f'<span class="top">{escape(top)}</span><span class="bottom">{escape(bottom)}</span>'
        '<i class="cursor" hidden></i></div>'
    )


def figure(title: str, legend: str, body: str, *, note: str = "", rows: bool = False) -> str:
    """A chart with its title beside it, or above it where the screen is narrow; ``legend`` and ``body`` are HTML.

    Args:
        title: of the chart.
        legend: behind it.
        body: a plot; or rows of a label and a plot each.
        note: below the title.
        rows: whether it is rows.
    """
    said = f'<span class="soft small">{escape(note)}</span>' if note else ""
    kind = ' class="whole"' if rows else ""
    return f"<figure{kind}><figcaption><b>{escape(title)}</b> {legend}{said}</figcaption>{body}</figure>"


def ticks(axes: Axes, count: int = 5) -> str:
    """The axis of time, once for all charts above it."""
    said = ["0", *(formatting.duration(axes.duration_s * k / (count - 1)) for k in range(1, count))]
    inside = "".join(f"<span>{one}</span>" for one in said)
    return f'<div class="ticks">{inside}</div>'


def _in_words(line: Line, say: formatting.Say) -> str:
    """Where a line begins, ends and lies."""
    middle = line.envelope.middle[np.isfinite(line.envelope.middle)]
    if not len(middle):
        return f"{line.label} unknown"
    low, high = float(np.nanmin(line.envelope.low)), float(np.nanmax(line.envelope.high))
    first, last = say(float(middle[0])), say(float(middle[-1]))
    return f"{line.label} {first} at first, {last} at the end, {say(low)} to {say(high)} on the way"


def _legend(line: Line, dash: str) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<span class="key1"><svg class="sample" viewBox="0 0 26 8"><path class="line {line.colour}"{dashed} '
        f'd="M0 4H26"/></svg>{escape(line.label)} <output data-series="{escape(line.key)}"></output></span>'
    )


def path(values: Column, axes: Axes, high: float, height: int) -> str:
    """Return a line from 0 to ``high``."""
    return _path(values, axes, lambda value: height * (1 - min(value / high, 1.0)))


def _path(values: Column, axes: Axes, y: Callable[[float], float]) -> str:
    """A line through what is known; a gap where nothing is."""
    parts, pen_is_down = [], False
    for x, value in zip(axes.xs(), values.tolist(), strict=True):
        if math.isfinite(value):
            parts.append(f"{'L' if pen_is_down else 'M'}{x:.1f} {y(value):.1f}")
        pen_is_down = math.isfinite(value)
    return "".join(parts)


def _band(around: Envelope, axes: Axes, y: Callable[[float], float]) -> str:
    known = np.isfinite(around.low)
    if not known.any() or np.array_equal(around.low, around.high, equal_nan=True):
        return ""
    xs = np.array(axes.xs())[known].tolist()
    over = [f"{x:.1f} {y(value):.1f}" for x, value in zip(xs, around.high[known].tolist(), strict=True)]
    under = [f"{x:.1f} {y(value):.1f}" for x, value in zip(xs, around.low[known].tolist(), strict=True)]
    return f"M{'L'.join([*over, *reversed(under)])}Z"
