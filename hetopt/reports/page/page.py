"""The whole page of a run: where it stands against its prediction, its charts on one axis of time, and its bill."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from hetopt.core import formatting
from hetopt.core.comm.way_text import way_in_words
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.document import document, figure, interval_bar, section, sentences, share_bar, table, tile, tiles
from hetopt.reports.page.chart import Axes, ticks
from hetopt.reports.page.cursor import SCRIPT
from hetopt.reports.page.run_charts import Known, anatomy, averages, evaluations, exchange, loss, step_time
from hetopt.reports.page.series import RunSeries, Stretches, stretches
from hetopt.reports.plan_page import cost_terms
from hetopt.reports.report import Compared, Report
from hetopt.reports.run_words import place
from hetopt.reports.timeline import Happening

MOST_MARKS = 60
"""Happenings with a mark of their own; of what is routine only the first and last are kept beyond that."""

WIDEST_RATIOS = (1.25, 1.5, 2.0, 4.0)
"""Of measured to predicted that are drawn: the first with room for all; beyond the last a mark stays at the edge."""

LEAST_GAP = 0.045
"""Between the numbers of two happenings on the axis of time, as a part of it; what is nearer is a dot."""


def page(report: Report, launch: Launch, run: RunSeries) -> str:
    """The document."""
    over = stretches(run.end_s)
    marks = _marks(report.happenings)
    axes = Axes(end_s=over.end_s, marks_s=[one.time_s for one in marks])
    known: Known = {}
    charts = [
        _strip(marks, axes),
        loss(run, over, axes, known),
        *evaluations(run, axes),
        step_time(run, over, axes, known, report),
        anatomy(run, over, axes, known, report),
        *exchange(run, over, axes, known),
        *averages(run, over, axes, known),
        ticks(axes),
    ]
    first, *rest = report.verdict
    workers = formatting.counted(len(report.workers), "worker")
    return document(
        kind="hetopt run",
        title=f"{report.task}: {report.state}{formatting.ending(report.finish_reason)}",
        about=[
            f'<p class="lead">{escape(first)}</p>',
            f'<p class="soft">{escape(report.run_id)}, {workers} {escape(place(report.on))}, begun '
            f"{escape(launch.created[:10])}.</p>",
        ],
        main=[
            tiles(_summary(report, launch, run)),
            section("Predicted and measured", _compared(report.compared), sentences(rest)),
            section(
                "Over the run",
                f'<div id="now"><span id="said" class="soft" aria-live="polite">'
                f"{formatting.duration(run.duration_s)} of training, {formatting.counted(run.step[-1], 'step')}.</span>"
                '<input type="range" id="moment" min="0" max="1000" value="0" aria-label="moment of the run" hidden>'
                "</div>",
                *charts,
            ),
            section("What happened", *_told(marks, report.happenings)),
            section("Workers", _workers(report)),
            section("Where the money goes", _money(report, launch)),
        ],
        below=f"Planned by hetopt {escape(launch.plan.hetopt_version)}.",
        script=f'\n<script type="application/json" id="data">{_data(run, over, known)}</script>\n'
        f"<script>{SCRIPT}</script>",
    )


def _summary(report: Report, launch: Launch, run: RunSeries) -> Iterable[str]:
    """What it took and cost, each beside what was predicted, and what it has reached."""
    figures = {one.name: one for one in report.compared}
    widest = _widest(report.compared)
    if "run time" not in figures:
        expected = launch.prediction.steps.value
        yield tile(
            "steps",
            formatting.count(run.step[-1]),
            f"of about {formatting.count(expected)}",
            share_bar("steps done", run.step[-1] / max(expected, 1.0)),
        )
    for name in ("run time", "cost at the plan's rate", "cost", "step time"):
        if name not in figures:
            continue
        one = figures[name]
        said = f"predicted {_figure(one, 'predicted')}"
        said += f" ({_figure(one, 'low')} to {_figure(one, 'high')})" if one.low < one.high else ""
        error = f"{formatting.percent(one.error)} from its prediction" if one.error is not None else ""
        yield tile(name, _figure(one, "measured"), said, _drawn(one, widest), error, *_of_budget(one, launch))
    for name, value in report.metrics.items():
        yield tile(name, f"{value:.4g}")


def _of_budget(one: Compared, launch: Launch) -> Iterable[str]:
    """How much of the budget the cost is."""
    budget = launch.plan.goal.budget_usd
    if one.unit == "USD" and budget is not None:
        yield f"{formatting.share(one.measured / budget)} of the budget of {formatting.usd(budget)}"


def _drawn(one: Compared, widest: float) -> str:
    return interval_bar(one.predicted, one.low, one.high, one.measured, widest=widest)


def _compared(figures: Sequence[Compared]) -> str:
    """Each with its interval: 1 is the prediction, on a logarithmic scale."""
    widest = _widest(figures)
    rows = []
    for one in figures:
        interval = f"{_figure(one, 'low')} to {_figure(one, 'high')}" if one.low < one.high else ""
        rows.append(
            [
                escape(one.name),
                _figure(one, "predicted"),
                interval,
                _figure(one, "measured"),
                formatting.percent(one.error) if one.error is not None else "",
                _drawn(one, widest),
            ]
        )
    scale = f"{1 / widest:.2g} to {widest:g} times"
    columns = ["figure", "predicted", "90 % interval", "measured", "difference", scale]
    return table("what was predicted and what was measured", columns, rows, numbers=frozenset({1, 2, 3, 4}))


def _workers(report: Report) -> str:
    """Means of a step of each worker."""
    rows = [
        [
            escape(worker.host),
            escape(worker.type),
            formatting.count(worker.local_batch_size) if worker.is_present else "gone",
            formatting.duration(worker.compute_s),
            formatting.duration(worker.wait_s),
            formatting.count(worker.steps),
        ]
        for worker in report.workers
    ]
    columns = ["worker", "planned as", "local batch size", "computing", "straggler wait", "steps"]
    return table("means of a step of each worker", columns, rows, numbers=frozenset({2, 3, 4, 5}))


def _widest(figures: Sequence[Compared]) -> float:
    """The scale that has room for all of them."""
    drawn = [one for one in figures if one.predicted > 0 and one.measured > 0]
    ratios = [max(value, 1e-12) / one.predicted for one in drawn for value in (one.low, one.measured, one.high)]
    most = max((max(ratio, 1 / ratio) for ratio in ratios), default=1.0)
    return next((widest for widest in WIDEST_RATIOS if most <= widest), WIDEST_RATIOS[-1])


def _figure(one: Compared, which: str) -> str:
    say = {"s": formatting.duration, "USD": formatting.usd}.get(one.unit, formatting.count)
    return figure(f"{re.sub(r'[^a-z]+', '_', one.name)}_{which}", getattr(one, which), say)


def _marks(happenings: Sequence[Happening]) -> list[Happening]:
    """Those that get a number on the axis of time."""
    if len(happenings) <= MOST_MARKS:
        return list(happenings)
    news = [one for one in happenings if not one.is_routine]
    routine = [one for one in happenings if one.is_routine]
    left = max(2, MOST_MARKS - len(news))
    return sorted([*news[:MOST_MARKS], *routine[: left // 2], *routine[-(left // 2) :]], key=lambda one: one.time_s)


def _strip(marks: Sequence[Happening], axes: Axes) -> str:
    drawn, last = [], -1.0
    for number, one in enumerate(marks, start=1):
        at = axes.x(one.time_s) / 1000
        has_room = at - last >= LEAST_GAP
        last = at if has_room else last
        kind, said = ("", str(number)) if has_room else (' class="dot"', "")
        drawn.append(
            f'<a href="#event{number}"{kind} style="left:{100 * at:.2f}%" title="{escape(one.sentence)}" '
            f'aria-label="event {number}">{said}</a>'
        )
    return f'<nav class="marks" aria-label="what happened when">{"".join(drawn)}</nav>' if drawn else ""


def _told(marks: Sequence[Happening], happenings: Sequence[Happening]) -> Iterable[str]:
    if not marks:
        return
    yield '<ol class="told">'
    for number, one in enumerate(marks, start=1):
        step = f", step {formatting.count(one.step)}" if one.step is not None else ""
        yield (
            f'<li id="event{number}"><b>{number}</b> at {formatting.duration(max(0.0, one.time_s))}{step}: '
            f"{escape(one.sentence)}</li>"
        )
    yield "</ol>"
    if len(marks) < len(happenings):
        more = len(happenings) - len(marks)
        yield f'<p class="soft">and {more} more changes of local batch sizes and compression.</p>'


def _money(report: Report, launch: Launch) -> str:
    """The bill of the rented plan by term; and what this run comes to at the plan's rate."""
    here = next((one for one in report.compared if one.unit == "USD"), None)
    said = ""
    if here is not None:
        budget = launch.plan.goal.budget_usd
        own = report.on == "ssh"
        rate = "on your hosts" if own else f"at the plan's {formatting.usd(report.hourly_usd)} an hour"
        limit = f", of a budget of {formatting.usd(budget)}" if budget is not None else ""
        said = (
            f"<p>This run took {_figure(here, 'measured')} {rate}, "
            f"predicted were {_figure(here, 'low')} to {_figure(here, 'high')}{limit}.</p>"
        )
    rented = formatting.usd(report.rented_cost_usd)
    return (
        f"{said}<p class='soft'>Predicted for the plan's cluster, {rented} in all:</p>{cost_terms(launch.plan.chosen)}"
    )


def _data(run: RunSeries, over: Stretches, known: Known) -> str:
    """What the cursor reads. ``<`` cannot end the script that holds it."""
    last = (np.append(over.first[1:], len(run.step)) - 1).tolist()
    ways = list(dict.fromkeys(way for way in run.ways if way))
    data = {
        "end_s": [round(float(time_s), 3) for time_s in over.end_s],
        "step": run.step[last].tolist(),
        "ways": [way_in_words(way) for way in ways],
        "way": [ways.index(run.ways[row]) + 1 if run.ways[row] else 0 for row in last],
        "series": known,
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
