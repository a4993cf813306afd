"""The charts of a run: loss, evaluations, step time, a step of each worker, and how gradients travelled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from itertools import groupby

import numpy as np

from hetopt.core import formatting
from hetopt.core.comm.way_text import way_in_words
from hetopt.reports.document import swatch
from hetopt.reports.page.chart import Axes, Line, figure, line_chart, plot, stack, steps_line
from hetopt.reports.page.series import Column, Envelope, RunSeries, Stretches, envelope
from hetopt.reports.report import Report

MOST_PIECES = 60
"""Of the bar of ways; beyond that it shows how long each was in use, and no longer when."""

MOST_METRICS = 6

_DIGITS = 5
_KINDS = 4

Known = dict[str, tuple[str, list[float | None]]]
"""Unit and values by the name of a series: what the cursor reads."""


def loss(run: RunSeries, over: Stretches, axes: Axes, known: Known) -> str:
    """The loss that was trained on."""
    around = envelope(run.loss, over)
    positive = bool((run.loss > 0).all())
    wide = positive and float(run.loss.max()) > 10 * float(run.loss.min())
    _know(known, "loss", "number", around.middle)
    return line_chart(
        "Training loss",
        [Line(key="loss", label="median", envelope=around)],
        axes,
        say=_figures,
        note="band: least to largest" + (", logarithmic" if wide else ""),
        logarithmic=wide,
    )


def evaluations(run: RunSeries, axes: Axes) -> Iterable[str]:
    """A row for each metric of the evaluations."""
    names = list(dict.fromkeys(name for one in run.evaluations for name in one.metrics))
    if not names:
        return
    rows = []
    for name in names[:MOST_METRICS]:
        points = [(one.time_s, one.metrics[name]) for one in run.evaluations if name in one.metrics]
        values = [value for _, value in points]
        low, high = min(values), max(values)
        height = 44

        def y(value: float, low: float = low, high: float = high, height: int = height) -> float:
            return height - 4 - (height - 8) * ((value - low) / (high - low) if high > low else 0.5)

        path = "M" + "L".join(f"{axes.x(time_s):.1f} {y(value):.1f}" for time_s, value in points)
        told = f"<b>{escape(name)}</b><br><span class=soft>{low:.4g} to {high:.4g}, last {values[-1]:.4g}</span>"
        said = (
            f"{name} of {formatting.counted(len(values), 'evaluation')}: {low:.4g} to {high:.4g}, last {values[-1]:.4g}"
        )
        drawn = plot(f'<path class="line a" d="{path}"/>', axes, height=height, name=said)
        rows.append(f'<div class="worker"><div>{told}</div>{drawn}</div>')
    yield figure("Evaluations", "", "".join(rows), rows=True)


def step_time(run: RunSeries, over: Stretches, axes: Axes, known: Known, report: Report) -> str:
    """Step time, beside its prediction."""
    around = envelope(run.step_time_s, over)
    _know(known, "step_time", "s", around.middle)
    said = next((one for one in report.compared if one.name == "step time"), None)
    return line_chart(
        "Step time",
        [Line(key="step_time", label="median", envelope=around)],
        axes,
        say=formatting.duration,
        note="band: least to largest",
        from_zero=True,
        height=110,
        level=None if said is None else ("predicted", said.predicted),
    )


def anatomy(run: RunSeries, over: Stretches, axes: Axes, known: Known, report: Report) -> str:
    """Where each worker's time in a step goes, and its share, on the same scale for all of them."""
    compute, wait = envelope(run.compute_s, over).middle, envelope(run.wait_s, over).middle
    sync = envelope(run.sync_s, over).middle
    shares = run.shares[np.append(over.first[1:], len(run.shares)) - 1]
    whole = np.nan_to_num(compute) + np.nan_to_num(wait) + np.nan_to_num(sync)[:, None]
    # A few hiccups at the start must not flatten all the rest.
    high = float(np.quantile(whole, 0.995)) * 1.05 or 1.0
    most = float(np.nanmax(shares))
    rows = []
    for worker in range(compute.shape[1]):
        host = run.hosts[worker] if worker < len(run.hosts) else f"worker {worker}"
        kind = report.workers[worker].type if worker < len(report.workers) else ""
        keys = {f"{name}{worker}": values[:, worker] for name, values in (("compute", compute), ("wait", wait))}
        for key, values in keys.items():
            _know(known, key, "s", values)
        _know(known, f"share{worker}", "number", shares[:, worker])
        drawn = stack(
            [("a", compute[:, worker]), ("b", sync), ("wait", wait[:, worker])],
            axes,
            high=high,
            height=46,
            name=f"step of {host} over time; the table of workers has its means",
            top=formatting.duration(high) if worker == 0 else "",
        )
        last = shares[-1, worker]
        told = formatting.counted(last, "sample") if math.isfinite(last) else "gone"
        share = steps_line(
            shares[:, worker],
            axes,
            high=most,
            height=26,
            colour="d",
            name=f"local batch size of {host}, {told} at the end",
        )
        label = (
            f"<b>{escape(host)}</b> <span class=soft>{escape(kind)}, {told}</span><br>"
            f'<output data-series="share{worker}"></output> <output data-series="compute{worker}"></output> '
            f'<output data-series="wait{worker}"></output>'
        )
        rows.append(f'<div class="worker"><div>{label}</div><div>{drawn}{share}</div></div>')
    _know(known, "sync", "s", sync)
    legend = (
        f'<span class="key1">{swatch("a")} computing</span> '
        f'<span class="key1">{swatch("b")} communication not overlapped '
        '<output data-series="sync"></output></span> '
        f'<span class="key1">{swatch("e")} waiting for the slowest</span> '
        f'<span class="key1">{swatch("d")} line below: local batch size</span>'
    )
    return figure("A step of each worker", legend, "".join(rows), note="medians", rows=True)


def exchange(run: RunSeries, over: Stretches, axes: Axes, known: Known) -> Iterable[str]:
    """What was sent, how much of it, and in which way; nothing for a single worker."""
    if not np.isfinite(run.sent_bytes).any():
        return
    ratio, gain = envelope(run.ratio, over), envelope(run.gain, over)
    _know(known, "ratio", "share", ratio.middle)
    _know(known, "gain", "share", gain.middle)
    yield figure("How gradients travel", "", _ways(run))
    if not all(np.all((values == 1) | np.isnan(values)) for values in (run.ratio, run.gain)):
        yield line_chart(
            "Elements sent, and energy kept",
            [
                Line(key="ratio", label="elements sent", envelope=ratio, colour="a"),
                Line(key="gain", label="energy kept", envelope=gain, colour="d"),
            ],
            axes,
            say=formatting.share,
            note="parts of the gradient, logarithmic",
            logarithmic=True,
            height=100,
        )
    yield _bytes_sent(run, over, axes, known, sent=run.sent_bytes, dense=run.dense_bytes)


def averages(run: RunSeries, over: Stretches, axes: Axes, known: Known) -> Iterable[str]:
    """When models that workers trained for themselves became one; nothing where gradients were summed."""
    if not np.isfinite(run.averaged).any():
        return
    part = envelope(run.averaged, over)
    _know(known, "averaged", "share", part.middle)
    yield line_chart(
        "Steps that end in an average",
        [Line(key="averaged", label="part of the steps", envelope=part, colour="a")],
        axes,
        say=formatting.share,
        note="of the workers' models",
        from_zero=True,
        height=80,
    )
    if np.isfinite(run.divergence).any():
        apart = envelope(_held(run.divergence), over)
        _know(known, "divergence", "share", apart.middle)
        yield line_chart(
            "How far workers had come apart",
            [Line(key="divergence", label="at an average", envelope=apart, colour="d")],
            axes,
            say=formatting.share,
            note="relative to the model's norm",
            from_zero=True,
            height=80,
        )
    yield _bytes_sent(run, over, axes, known, sent=run.averages_bytes)


def _bytes_sent(
    run: RunSeries, over: Stretches, axes: Axes, known: Known, *, sent: Column, dense: Column | None = None
) -> str:
    """What one worker has sent so far, from bytes of a step, and what it would have if all were sent in fp32."""
    last = np.append(over.first[1:], len(run.steps)) - 1
    lines = []
    for key, label, bytes_, colour in (("sent", "sent", sent, "a"), ("dense", "everything in fp32", dense, "d")):
        if bytes_ is not None:
            so_far = np.cumsum(np.nan_to_num(bytes_) * run.steps)[last]
            _know(known, key, "bytes", so_far)
            lines.append(Line(key=key, label=label, envelope=_plain(so_far), colour=colour))
    return line_chart(
        "Bytes sent by one worker",
        lines,
        axes,
        say=formatting.bytes_,
        note="all steps so far",
        from_zero=True,
        height=100,
    )


def _ways(run: RunSeries) -> str:
    """The ways gradients were exchanged, as pieces of the axis of time."""
    kinds = {way: number for number, way in enumerate(dict.fromkeys(way for way in run.ways if way))}
    pieces, begin_s, row = [], 0.0, 0
    for way, group in groupby(run.ways):
        row += len(list(group))
        end_s = float(run.end_s[row - 1])
        pieces.append((way, end_s - begin_s))
        begin_s = end_s
    if len(pieces) > MOST_PIECES:
        totals = {way: sum(length for one, length in pieces if one == way) for way in dict(pieces)}
        pieces = sorted(totals.items(), key=lambda piece: -piece[1])
    drawn = "".join(
        f'<i class="{f"k{kinds[way] % _KINDS}" if way else "none"}" style="flex:{max(length, 1e-9):.6g}" '
        f'title="{escape(way_in_words(way) or "not synchronized")}, {formatting.duration(max(length, 0.0))}">'
        f"{escape(way_in_words(way))}</i>"
        for way, length in pieces
    )
    used = ", then ".join(dict.fromkeys(way_in_words(way) for way, _ in pieces if way))
    return f'<div class="pieces" role="img" aria-label="{escape(used)}">{drawn}</div>'


def _held(values: Column) -> Column:
    """Each value until the next that is known."""
    rows = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))
    return np.asarray(values[rows], dtype=np.float64)


def _plain(values: Column) -> Envelope:
    return Envelope(low=values, middle=values, high=values)


def _know(known: Known, name: str, unit: str, values: Column) -> None:
    known[name] = (unit, [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()])


def _figures(value: float) -> str:
    return f"{value:.3g}"
