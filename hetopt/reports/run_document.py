"""A run as a document: what was predicted and what was measured, its curves, and where the money went."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from hetopt.core import formatting
from hetopt.core.comm.compression_text import way_in_words
from hetopt.optimizer.launch_record import OWN_PLACES, Launch
from hetopt.reports.chart import charts
from hetopt.reports.cursor import SCRIPT
from hetopt.reports.document import (
    Block,
    Cell,
    Column,
    Document,
    Figure,
    Heading,
    Html,
    Line,
    Remarks,
    Table,
    Tile,
    Tiles,
    columns,
)
from hetopt.reports.html import interval_bar
from hetopt.reports.plan_document import bill
from hetopt.reports.report import Averaging, Compared, Report, Sent, WorkerReport
from hetopt.reports.timeline import NotableEvent

WIDEST = 2.0
"""Largest ratio of measured to predicted that is drawn; beyond it a mark stays at the edge."""

MOST_HAPPENINGS = 30

HERE = {"local": "local ", "rehearsal": "rehearsed "}
"""Words for the workers of backends that are this machine, by backend."""


def document(report: Report, launch: Launch | None = None) -> Document:
    """Return a run's report as a document; with ``launch``, also tiles, bill and dates, as a page has them.

    Args:
        report: report of the run.
        launch: record of what was started, for tiles, bill and dates as a page has them; None: these are left out.
    """
    kind, where = HERE.get(report.on, ""), "" if report.on in HERE else f" on {report.on}"
    workers = f"{formatting.counted(len(report.workers), f'{kind}worker')}{where}"
    begun = "" if launch is None else f", begun {launch.created[:10]}"
    verdict, rented = list(report.verdict), (report.rented_total_s, report.rented_cost_usd)
    if report.on in HERE:
        verdict.append(
            f"The cluster of the plan is predicted to take {formatting.duration(rented[0])} and "
            f"{formatting.usd(rented[1])}; this run did not train on it."
        )
    return Document(
        kind="hetopt run",
        title=f"{report.task} on {workers}: {report.state}{formatting.ending(report.finish_reason)}",
        about=[
            Line(f"  {report.run_id}{begun}", "soft"),
            *([Line(f"  {formatting.reached(report.metrics, None)}")] if report.metrics else []),
        ],
        blocks=[
            *([] if launch is None else [Tiles(list(_tiles(report, launch)))]),
            Heading("Verdict"),
            Remarks(verdict),
            Heading(f"Predicted and measured{', here' if report.on in HERE else ''}"),
            _compared(report.compared),
            Heading("Workers"),
            worker_table(report.workers),
            *_over_time(report),
            *([] if launch is None else _money(report, launch)),
        ],
        below="" if launch is None else f"Planned by hetopt {launch.plan.hetopt_version}.",
        script=f'\n<script type="application/json" id="data">{_data(report)}</script>\n<script>{SCRIPT}</script>',
    )


def _tiles(report: Report, launch: Launch) -> Iterator[Tile]:
    """Yield the run's time and cost, each beside its prediction, and the metrics that it has reached.

    Of a run that is not over, its steps stand for its time.
    """
    figures = {compared.name: compared for compared in report.compared}
    if "run time" not in figures and report.over_time.step:
        expected, step = launch.prediction.steps.value, report.over_time.step[-1]
        yield Tile(name="steps", value=formatting.count(step), below=[f"of about {formatting.count(expected)}"])
    for name in ("run time", "cost at the plan's rate", "cost", "step time"):
        if name in figures:
            yield _compared_tile(figures[name], launch.plan.goal.budget_usd)
    for name, value in report.metrics.items():
        yield Tile(name=name, value=f"{value:.4g}")


def _compared_tile(compared: Compared, budget_usd: float | None) -> Tile:
    """Return a tile of a measured figure with its prediction below, and of a cost its share of the budget.

    Args:
        compared: the figure.
        budget_usd: None: there is none to share.
    """
    interval = _interval(compared)
    predicted = f"predicted {_figure(compared, 'predicted')}{f' ({interval})' if interval else ''}"
    below: list[Cell] = [predicted, _drawn(compared)]
    if compared.error is not None:
        below.append(f"{formatting.percent(compared.error)} from its prediction")
    if compared.unit == "USD" and budget_usd is not None:
        share = formatting.share(compared.measured / budget_usd)
        below.append(f"{share} of the budget of {formatting.usd(budget_usd)}")
    return Tile(name=compared.name, value=_figure(compared, "measured"), below=below)


def _compared(figures: Sequence[Compared]) -> Table:
    """Return each figure with its interval; drawn on a logarithmic scale, 1 is the prediction."""
    return Table(
        name="what was predicted and what was measured",
        columns=[
            *columns(", #predicted, #90 % interval, #measured, #difference"),
            Column(f"{1 / WIDEST:.2g} to {WIDEST:g} times"),
        ],
        rows=[
            [
                compared.name,
                _figure(compared, "predicted"),
                _interval(compared),
                _figure(compared, "measured"),
                "" if compared.error is None else formatting.percent(compared.error),
                _drawn(compared),
            ]
            for compared in figures
        ],
    )


def _figure(compared: Compared, which: str) -> Figure:
    name = re.sub(r"[^a-z]+", "_", compared.name)
    return Figure(getattr(compared, which), compared.unit, f"{name}_{which}")


def _interval(compared: Compared) -> str:
    return f"{_figure(compared, 'low')} – {_figure(compared, 'high')}" if compared.low < compared.high else ""


def _drawn(compared: Compared) -> Html:
    return Html(interval_bar(compared.predicted, compared.low, compared.high, compared.measured, widest=WIDEST))


def worker_table(workers: Sequence[WorkerReport]) -> Table:
    """Return a table of workers: type, slowdown (or speed), local batch size, mean compute and wait time of a step.

    A worker that is gone has 'gone' in the place of its batch size.
    """
    on_rehearsal = any(worker.speed is not None for worker in workers)
    return Table(
        name="means of a step of each worker",
        columns=[
            Column("worker", "word"),
            Column("planned as", "word", may_go=0),
            Column("speed" if on_rehearsal else "slowdown", "number", may_go=1),
            *columns("#batch, #compute, #waiting"),
        ],
        rows=[
            [
                worker.host,
                worker.type,
                f"{worker.slowdown if worker.speed is None else worker.speed:g}",
                formatting.count(worker.local_batch_size) if worker.is_present else "gone",
                "" if worker.compute_s is None else formatting.duration(worker.compute_s),
                "" if worker.wait_s is None else formatting.duration(worker.wait_s),
            ]
            for worker in workers
        ],
        caption="batch: local batch size, samples · compute, waiting: mean of a step",
    )


def _over_time(report: Report) -> Iterator[Block]:
    """Yield the curves, with a slider, then what happened on the way and what workers sent, in sentences."""
    over_time, last = report.over_time, {happened.kind: happened for happened in report.happenings}
    # Of what is routine, only the last of a kind is news.
    news = [happened for happened in report.happenings if not happened.is_routine or happened is last[happened.kind]]
    yield Heading("Over the run")
    if over_time.series:
        predicted_s = next((figure.predicted for figure in report.compared if figure.name == "step time"), None)
        trained = (
            f"{formatting.duration(over_time.end_s[-1])} of training, {formatting.counted(over_time.step[-1], 'step')}."
        )
        slider = (
            f'<div id="now"><span id="said" class="soft" aria-live="polite">{trained}</span>'
            '<input type="range" id="moment" min="0" max="1000" value="0" aria-label="moment of the run" hidden></div>'
        )
        markup = "".join([slider, *charts(over_time, [happened.time_s for happened in news], predicted_s)])
        yield Html(markup)
    sentences = [_sentence(happened) for happened in news[:MOST_HAPPENINGS]]
    if len(news) > MOST_HAPPENINGS:
        sentences.append(f"and {len(news) - MOST_HAPPENINGS} more, in the report's JSON")
    if report.together is not None:
        sentences.append(_together(report.together))
    elif report.sent is not None:
        sentences.append(_sent(report.sent))
    yield Remarks(sentences)


def _sentence(happened: NotableEvent) -> str:
    step = f" (step {formatting.count(happened.step)})" if happened.step is not None else ""
    return f"at {formatting.duration(max(0.0, happened.time_s))}{step}: {happened.sentence}"


def _together(averaging: Averaging) -> str:
    """Return a sentence on how often local SGD workers averaged, and how far apart their parameters had come."""
    steps = averaging.synchronised + averaging.local
    apart = ""
    if averaging.divergence is not None:
        apart = f"; they had come apart by {formatting.share(averaging.divergence)} of the parameters' norm"
    return (
        f"{averaging.policy}: workers came together in {formatting.count(averaging.synchronised)} of "
        f"{formatting.counted(steps, 'step')} ({formatting.share(averaging.synchronised / max(1, steps))}), and sent "
        f"{formatting.bytes_(averaging.sent_bytes)} each{apart}"
    )


def _sent(sent: Sent) -> str:
    """Return a sentence on how much of the gradients went over the network, and by which methods."""
    if sent.sent_bytes == sent.dense_bytes:
        return f"sent {formatting.bytes_(sent.sent_bytes)} per worker, uncompressed"
    ways = sorted(sent.ways, key=lambda way: -way.steps)
    phrases = [f"{way_in_words(way.way)} in {formatting.counted(way.steps, 'step')}" for way in ways]
    return (
        f"sent {formatting.share(sent.sent_bytes / sent.dense_bytes)} of dense bytes "
        f"({formatting.bytes_(sent.sent_bytes)} of {formatting.bytes_(sent.dense_bytes)} per worker): "
        f"{'; '.join(phrases)}"
    )


def _money(report: Report, launch: Launch) -> Iterator[Block]:
    """Yield the run's cost at the plan's rate, and the bill of the rented plan by term."""
    yield Heading("Where the money goes")
    here = next((compared for compared in report.compared if compared.unit == "USD"), None)
    if here is not None:
        budget = launch.plan.goal.budget_usd
        is_own, hourly = report.on in OWN_PLACES, formatting.usd(report.hourly_usd)
        rate = "on your hosts" if is_own else f"at the plan's {hourly} an hour"
        limit = f", of a budget of {formatting.usd(budget)}" if budget is not None else ""
        yield Line(f"This run took {_figure(here, 'measured')} {rate}, predicted were {_interval(here)}{limit}.")
    yield Line(f"Predicted for the plan's cluster, {formatting.usd(report.rented_cost_usd)} in all:", "soft")
    yield from bill(launch.plan.chosen)


def _data(report: Report) -> str:
    """Return the curves as JSON for the page's cursor, with ``<`` escaped as it stands in a script element."""
    over_time = report.over_time
    series = {curve.key: (curve.unit, curve.values) for curve in over_time.series}
    data = {**over_time.model_dump(include={"end_s", "step", "ways", "way"}), "series": series}
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
