"""The curves of a run in characters: a row a curve, a column a moment."""

from __future__ import annotations

import math
from itertools import groupby

from hetopt.core import formatting
from hetopt.reports.document import UNITS
from hetopt.reports.series import OverTime, Series

COLUMNS = 60
FEWEST_COLUMNS = 16
BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WORKERS = 16


def draw(told: OverTime, width: int) -> list[str]:
    """Return the lines of the chart, none longer than ``width``; none for a run without a step.

    Bars start at zero, and those of one quantity share their scale, so that workers can be compared; those of
    logarithmic curves have two levels a power of ten. A gap is time in which the run did something else than stepping,
    or in which a worker was not there.

    Args:
        told: the curves.
        width: of the terminal, characters.
    """
    if not told.series:
        return []
    groups = [list(group) for _, group in groupby(told.series, key=lambda series: series.title)]
    shown = [series for group in groups for series in group[:SHOWN_WORKERS]]
    names = {series.key: f"  {series.label}" if series.label else series.title for series in shown}
    ranges = {series.key: _range(series) for series in shown}
    widest, numbers = max(map(len, names.values())), max(map(len, ranges.values()))
    if width - widest - 3 - numbers < FEWEST_COLUMNS:  # a narrow terminal shows shapes alone
        ranges, numbers = dict.fromkeys(ranges, ""), 0
    columns = max(1, min(COLUMNS, width - widest - 3 - numbers))
    lines = []
    for group in groups:
        if group[0].label:
            lines.append(f"{group[0].title}{', log scale' if group[0].is_logarithmic else ''}")
        # Workers beyond those that are shown count too, or a bar would say another thing than it seems to.
        largest = max((value for series in group for value in series.values if value is not None), default=0.0)
        for series in group[:SHOWN_WORKERS]:
            bars = _bars(told, series, largest, columns)
            lines.append(f"{names[series.key]:<{widest}} {bars}  {ranges[series.key]:>{numbers}}".rstrip())
    end = f"{formatting.duration(told.end_s[-1])}, step {formatting.count(told.step[-1])}"
    lines.append(f"{'0 s':>{widest + 4}}{end:>{max(columns - 3, len(end) + 1)}}"[-width:].rstrip())
    more = max(map(len, groups)) - SHOWN_WORKERS
    return lines if more <= 0 else [*lines, f"{formatting.counted(more, 'more worker')} in the report's JSON"]


def _range(series: Series) -> str:
    known = [value for value in series.values if value is not None]
    if not known:
        return ""
    low, high = UNITS[series.unit](min(known)), UNITS[series.unit](max(known))
    return low if low == high else f"{low} – {high}"


def _bars(told: OverTime, series: Series, largest: float, columns: int) -> str:
    """Return one character a column: the mean over the stretches in it, weighed by the time that they take up of it."""
    known = [stretch for stretch in zip(told.begin_s, told.end_s, series.values, strict=True) if stretch[2] is not None]
    each_s = max(told.end_s[-1], 1e-9) / columns
    bars = ""
    for column in range(columns):
        begin, end = column * each_s, (column + 1) * each_s
        weights = [max(0.0, min(last, end) - max(first, begin)) for first, last, _ in known]
        total = sum(weights)
        mean = sum(weight * (value or 0.0) for weight, (*_, value) in zip(weights, known, strict=True)) / (total or 1)
        bars += BLOCKS[_level(mean / largest if largest > 0 else 0.0, series)] if total > 0 else " "
    return bars


def _level(part: float, series: Series) -> int:
    """Return the block that shows a part of the largest value."""
    if not series.is_logarithmic:
        return min(max(int(part * len(BLOCKS)), 0), len(BLOCKS) - 1)
    return max(len(BLOCKS) - 1 + math.floor(2 * math.log10(part) + 1e-9), 0) if part > 0 else 0
