"""The curves of a run on its page: charts on one axis of time, a step of each worker, and how gradients travelled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import numpy as np

from hetopt.core import formatting
from hetopt.reports.chart import Axes, Line, figure, line_chart, path, plot
from hetopt.reports.document import UNITS
from hetopt.reports.html import swatch
from hetopt.reports.report import Report
from hetopt.reports.series import Evaluation, OverTime, Series, as_column, envelope_of

MOST_METRICS = 6

_COLOURS = "adca"
_KINDS = 4
_OF_WORKERS = ("share", "compute", "wait")
"""Beginnings of the keys of curves that are drawn together, a row a worker."""


def charts(report: Report, axes: Axes) -> Iterator[str]:
    """Yield all charts of a run."""
    told = report.over_time
    step_time = next((figure for figure in report.compared if figure.name == "step time"), None)
    for title, group in groupby(told.series, key=lambda series: series.title):
        curves = list(group)
        if curves[0].key == "share0":
            yield _evaluations(told.evaluations, axes)
            yield _workers(report, axes)
        if curves[0].key == "ratio" or (curves[0].key == "sent" and len(curves) == 1):
            yield figure("How gradients travel", "", _ways(told))
        if not curves[0].key.startswith(_OF_WORKERS):
            predicted = step_time.predicted if step_time is not None and curves[0].key == "step_time" else None
            yield _chart(title, curves, axes, predicted=predicted)


def _chart(title: str, curves: Sequence[Series], axes: Axes, *, predicted: float | None) -> str:
    lines = [
        Line(key=series.key, label=series.label or "median", envelope=envelope_of(series), colour=_COLOURS[number])
        for number, series in enumerate(curves)
    ]
    notes = ["band: least to largest"] if any(series.low for series in curves) else []
    is_wide = curves[0].is_logarithmic
    return line_chart(
        f"{title[0].upper()}{title[1:]}",
        lines,
        axes,
        say=UNITS[curves[0].unit],
        note=", ".join([*notes, *(["logarithmic"] if is_wide else [])]),
        logarithmic=is_wide,
        from_zero=not is_wide and curves[0].unit != "number",
        height=110,
        level=None if predicted is None else ("predicted", predicted),
    )


def _evaluations(evaluations: Sequence[Evaluation], axes: Axes) -> str:
    """Return a row for each metric of the evaluations."""
    rows = []
    for name in list(dict.fromkeys(name for one in evaluations for name in one.metrics))[:MOST_METRICS]:
        points = [(one.time_s, one.metrics[name]) for one in evaluations if name in one.metrics]
        values = [value for _, value in points]
        low, high, height = min(values), max(values), 44
        span = high - low or 1.0
        path = "L".join(
            f"{axes.x(at_s):.1f} {height - 4 - (height - 8) * (value - low) / span:.1f}" for at_s, value in points
        )
        said = f"{low:.4g} to {high:.4g}, last {values[-1]:.4g}"
        label = f"{name} of {formatting.counted(len(values), 'evaluation')}: {said}"
        drawn = plot(f'<path class="line a" d="M{path}"/>', axes, height=height, name=label)
        told = f"<b>{escape(name)}</b><br><span class=soft>{said}</span>"
        rows.append(f'<div class="worker"><div>{told}</div>{drawn}</div>')
    return figure("Evaluations", "", "".join(rows), rows=True) if rows else ""


def _workers(report: Report, axes: Axes) -> str:
    """Return where each worker's time in a step goes, and its share, on the same scale for all of them."""
    curves = {series.key: as_column(series.values) for series in report.over_time.series}
    hosts = [series.label for series in report.over_time.series if series.key.startswith("share")]
    drawn = (("compute", "a", "", 46), ("wait", "c", "2 3", 46), ("share", "d", "", 26))
    of = {key: np.array([curves[f"{key}{worker}"] for worker in range(len(hosts))]) for key, *_ in drawn}
    times = np.nan_to_num(np.concatenate([of["compute"], of["wait"]]))
    # A few hiccups at the start must not flatten all the rest.
    highest_s = float(np.quantile(times, 0.995)) * 1.05 or 1.0
    highest = {"compute": highest_s, "wait": highest_s, "share": float(np.nanmax(of["share"], initial=1.0))}
    rows = []
    for worker, host in enumerate(hosts):
        paths = {
            key: f'<path class="line {colour}" stroke-dasharray="{dash}" '
            f'd="{path(of[key][worker], axes, highest[key], height)}"/>'
            for key, colour, dash, height in drawn
        }
        last = of["share"][worker, -1]
        share = formatting.counted(last, "sample") if math.isfinite(last) else "gone"
        kind = report.workers[worker].type if worker < len(report.workers) else ""
        outputs = " ".join(f'<output data-series="{key}{worker}"></output>' for key, *_ in drawn)
        label = f"<b>{escape(host)}</b> <span class=soft>{escape(kind)}, {share}</span><br>{outputs}"
        top = formatting.duration(highest_s) if worker == 0 else ""
        name = f"computing and waiting of {host} over time; the table of workers has its means"
        times_drawn = plot(paths["compute"] + paths["wait"], axes, height=46, name=name, top=top)
        shares_drawn = plot(paths["share"], axes, height=26, name=f"local batch size of {host}, {share} at the end")
        rows.append(f'<div class="worker"><div>{label}</div><div>{times_drawn}{shares_drawn}</div></div>')
    legend = (
        f'<span class="key1">{swatch("a")} computing</span> <span class="key1">{swatch("c")} waiting, dotted</span> '
        f'<span class="key1">{swatch("d")} line below: local batch size</span>'
    )
    return figure("A step of each worker", legend, "".join(rows), note="medians", rows=True)


def _ways(told: OverTime) -> str:
    """Return the ways gradients were exchanged, as pieces of the axis of time."""
    pieces, begin_s, place = [], 0.0, 0
    for way, group in groupby(told.way):
        place += len(list(group))
        name = told.ways[way - 1] if way else "not synchronized"
        kind = f"k{(way - 1) % _KINDS}" if way else "none"
        length_s = max(told.end_s[place - 1] - begin_s, 1e-9)
        begin_s = told.end_s[place - 1]
        pieces.append(
            f'<i class="{kind}" style="flex:{length_s:.6g}" title="{escape(name)}, {formatting.duration(length_s)}">'
            f"{escape(name)}</i>"
        )
    used = ", then ".join(told.ways)
    return f'<div class="pieces" role="img" aria-label="{escape(used)}">{"".join(pieces)}</div>'
