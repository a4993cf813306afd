"""The curves of a run on its page: plots as SVG that stretches, their words as HTML that does not, also on a telephone.

All charts share one axis of time, from the first step to the last. What lies side by side differs in lightness or dash,
and each curve says in words where it begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np

from hetopt.core import formatting
from hetopt.reports.document import UNITS
from hetopt.reports.series import Column, OverTime, Series, as_column

WIDTH = 1000
"""Width of every plot, in its own units."""

HEIGHT, ROW_HEIGHT = 110, 34
"""Heights in pixels: of a plot, and of one that has a row beside others of its kind."""

DASHES = ("", "7 4", "2 3", "9 3 2 3")
_COLOURS = "adca"
"""As many lines as can be told apart in one plot."""

Y = Callable[[float], float]
"""Function from a value to its height in a plot, in pixels from the top."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The vertical scale of a chart: maps values to fractions of its height, 0 at the bottom and 1 at the top.

    Attributes:
        low: value at the bottom; a logarithmic scale takes smaller ones for it.
        high: value at the top, above ``low``.
        logarithmic: whether equal ratios have equal heights; then both ends are above 0.
    """

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def around(cls, columns: Sequence[Column], *, logarithmic: bool = False, from_zero: bool = False) -> Scale:
        """Return a scale over all finite values of the columns (above 0 if logarithmic); 0 to 1 without any.

        Args:
            columns: values, of any shape; at least one column.
            logarithmic: whether the scale is logarithmic; values up to 0 are left out then.
            from_zero: whether the scale begins at 0; not for a logarithmic one.
        """
        known = np.concatenate([np.ravel(column)[np.isfinite(np.ravel(column))] for column in columns])
        known = known[known > 0] if logarithmic else known
        if not len(known):
            return cls(low=0.0, high=1.0)
        low, high = float(known.min()), float(known.max())
        if from_zero:
            low = 0.0
        if low == high:
            low, high = (low / 2, high * 2) if logarithmic else (min(low, 0.0), low + 1)
        return cls(low=low, high=high, logarithmic=logarithmic)

    def share(self, value: float) -> float:
        """Return the height of a value on the scale, 0 at the bottom and 1 at the top.

        On a logarithmic scale a value beyond an end stays there.
        """
        if self.logarithmic:
            inside = min(max(value, self.low), self.high)
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The axis of time that all charts of a page share: its points and the marks on it.

    Attributes:
        end_s: ends of the stretches of time, in seconds since the first step; at least one.
        marks_s: moments that are marked, in seconds.
    """

    end_s: Sequence[float]
    marks_s: Sequence[float]

    def x(self, time_s: float) -> float:
        """Return the horizontal position of a moment (seconds), 0 to `WIDTH`; a moment beyond an end stays there."""
        return WIDTH * min(max(time_s / self.end_s[-1], 0.0), 1.0) if self.end_s[-1] > 0 else 0.0

    def plot(self, inside: str, name: str, height: int, *, top: str = "", bottom: str = "") -> str:
        """Return a chart's HTML around the SVG markup ``inside``, ``height`` pixels high, with a line at each mark.

        Args:
            inside: SVG markup of the curves.
            name: words for a screen reader.
            height: height of the plot, in pixels.
            top: words at the upper end of the scale; empty: none.
            bottom: words at the lower end of the scale; empty: none.
        """
        marks = "".join(f"M{self.x(time_s):.1f} 0V{height}" for time_s in self.marks_s)
        return (
            f'<div class="plot" style="height:{height}px"><svg viewBox="0 0 {WIDTH} {height}" '
            f'preserveAspectRatio="none" role="img" aria-label="{escape(name)}">{inside}'
            f'<path class="happened" d="{marks}"/></svg>'
            f'<span class="top">{escape(top)}</span><span class="bottom">{escape(bottom)}</span>'
            '<i class="cursor" hidden></i></div>'
        )

    def path(self, values: Column, y: Y) -> str:
        """Return an SVG path through the known values, with a gap where none is known."""
        parts, pen_is_down = [], False
        for end_s, value in zip(self.end_s, values.tolist(), strict=True):
            if math.isfinite(value):
                parts.append(f"{'L' if pen_is_down else 'M'}{self.x(end_s):.1f} {y(value):.1f}")
            pen_is_down = math.isfinite(value)
        return "".join(parts)

    def band(self, curve: Series, y: Y) -> str:
        """Return the SVG path of the area between a curve's least and largest values; empty: it has no band.

        Points without values are passed over: the area spans them.
        """
        if not curve.low:
            return ""
        low, high = as_column(curve.low), as_column(curve.high)
        known = np.isfinite(low)
        xs = [self.x(end_s) for end_s, is_known in zip(self.end_s, known, strict=True) if is_known]
        over = [f"{x:.1f} {y(value):.1f}" for x, value in zip(xs, high[known].tolist(), strict=True)]
        under = [f"{x:.1f} {y(value):.1f}" for x, value in zip(xs, low[known].tolist(), strict=True)]
        return f"M{'L'.join([*over, *reversed(under)])}Z" if over else ""


def charts(over_time: OverTime, marks_s: Sequence[float], predicted_step_s: float | None) -> Iterator[str]:
    """Yield the HTML of a chart for each quantity of a run, marked at ``marks_s``, then that of the time axis.

    Args:
        over_time: curves of the run, with at least one stretch of time.
        marks_s: moments that are marked, in seconds since the first step.
        predicted_step_s: predicted seconds of a step, drawn as a line; None: not drawn.
    """
    axis = Axis(end_s=over_time.end_s, marks_s=marks_s)
    for title, group in groupby(over_time.series, key=lambda series: series.title):
        curves = list(group)
        is_step_time = predicted_step_s is not None and curves[0].key == "step_time"
        yield _chart(title, curves, axis, level=predicted_step_s if is_step_time else None)
    ticks = ["0", *(formatting.duration(over_time.end_s[-1] * quarter / 4) for quarter in range(1, 5))]
    yield f'<div class="ticks">{"".join(f"<span>{moment}</span>" for moment in ticks)}</div>'


def _chart(title: str, curves: Sequence[Series], axis: Axis, *, level: float | None) -> str:
    """Return HTML of curves with their bands, in one plot or, where they are many, each in a row of the same scale.

    ``level`` None: no line at a predicted level.
    """
    is_wide, say = curves[0].is_logarithmic, UNITS[curves[0].unit]
    around = [as_column(end or curve.values) for curve in curves for end in (curve.low, curve.high)]
    levels = [np.array([level])] if level is not None else []
    from_zero = not is_wide and curves[0].unit != "number"
    scale = Scale.around([*around, *levels], logarithmic=is_wide, from_zero=from_zero)
    notes = [*(["band: least to largest"] if any(curve.low for curve in curves) else []), *["logarithmic"] * is_wide]
    in_rows = len(curves) > len(DASHES)
    height = ROW_HEIGHT if in_rows else HEIGHT

    def y(value: float) -> float:
        return height * (1 - scale.share(value))

    lines, legends = [], []
    for number, curve in enumerate(curves):
        place = 0 if in_rows else number
        dash = f' stroke-dasharray="{DASHES[place]}"' if DASHES[place] else ""
        kind = f'class="line {_COLOURS[place]}"{dash}'
        band = f'<path class="band {_COLOURS[place]}" d="{axis.band(curve, y)}"/>'
        lines.append(f'{band}<path {kind} d="{axis.path(as_column(curve.values), y)}"/>')
        legends.append(
            f'<span class="key1"><svg class="sample" viewBox="0 0 26 8"><path {kind} d="M0 4H26"/></svg>'
            f'{escape(_name(curve))} <output data-series="{escape(curve.key)}"></output></span>'
        )
    words = [_in_words(curve) for curve in curves]
    note = f'<span class="soft small">{", ".join(notes)}</span>'
    head = f"<b>{escape(title[:1].upper() + title[1:])}</b>"
    top, bottom = say(scale.high), say(scale.low)
    if in_rows:
        rows = "".join(
            f'<div class="worker"><div>{legend}</div>{axis.plot(line, f"{title}: {text}", height, top=top)}</div>'
            for line, legend, text in zip(lines, legends, words, strict=True)
        )
        return f'<figure class="whole"><figcaption>{head} {note}</figcaption>{rows}</figure>'
    if level is not None:
        lines.append(f'<path class="level" d="M0 {y(level):.1f}H{WIDTH}"/>')
        legends.append(f'<span class="soft">predicted {escape(say(level))}</span>')
    drawn = axis.plot("".join(lines), f"{title}: {'; '.join(words)}", height, top=top, bottom=bottom)
    return f"<figure><figcaption>{head} {' '.join(legends)}{note}</figcaption>{drawn}</figure>"


def _name(curve: Series) -> str:
    return curve.label or ("median" if curve.low else "")


def _in_words(curve: Series) -> str:
    """Return a curve in words: its first, last, least and largest value.

    Unknown where none of its values is known.
    """
    known = [value for value in curve.values if value is not None]
    name, say = _name(curve), UNITS[curve.unit]
    if not known:
        return f"{name} unknown".lstrip()
    low, high = (say(find(value for value in known)) for find in (min, max))
    return f"{name} {say(known[0])} at first, {say(known[-1])} at the end, {low} to {high} on the way".lstrip()
