"""All runs on one page: what goes on, what it costs and when it will be over, beside what was planned; and several
compared."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from urllib.parse import quote

import numpy as np

from hetopt.core import formatting
from hetopt.optimizer.plan import Range
from hetopt.reports import chart, html
from hetopt.reports.document import (
    UNITS,
    Block,
    Cell,
    Column,
    Document,
    Drawing,
    Heading,
    Html,
    Line,
    Table,
    Tile,
    Tiles,
    columns,
)
from hetopt.reports.html import interval_bar, share_bar
from hetopt.reports.live_run import RunSummary
from hetopt.reports.series import Envelope
from hetopt.reports.timeline import place, step_of

NOT_READ = "not read yet"
"""The state of a run whose log is still being read."""

MOST_COMPARED = 4
"""As many lines as can be told apart."""

TIMELINE_RUNS = 24

START = "hetopt launch plan.json --on local"
"""What makes the first run."""

WIDEST = 4.0
"""Ratio of measured to predicted at the edges of a drawing."""

GRID = 200
"""Points of time of a comparison."""

REFRESH_S = 15
"""Between two looks of a browser without scripts."""

SCRIPT = """
(() => {
  const boxes = () => [...document.querySelectorAll("input[name=run]")];
  const renew = async () => {
    if (document.hidden) return;
    const said = document.getElementById("live");
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      const chosen = new Set(boxes().filter(box => box.checked).map(box => box.value));
      const at = document.activeElement ? document.activeElement.id : "";
      document.querySelector("main").replaceWith(next);
      for (const box of boxes()) box.checked = chosen.has(box.value);
      if (at && document.getElementById(at)) document.getElementById(at).focus({ preventScroll: true });
      said.textContent = "live";
    } catch (problem) { said.textContent = "no longer live: the server does not answer"; }
  };
  setInterval(renew, 5000);
})();
"""
"""Puts what the server says every few seconds in place of what is shown; choices and focus stay."""


def overview(runs: Sequence[RunSummary], *, now_s: float, unread: int) -> str:
    """Return the page of all runs, newest first.

    Args:
        runs: to show.
        now_s: seconds since the epoch.
        unread: runs whose logs are still being read.
    """
    if not runs:
        start: list[Block] = [
            Line("There are no runs yet. Start one, and it is shown here:"),
            Line(START, is_copied=True),
        ]
        return _page("Runs", start)
    going = [run for run in runs if not run.is_over and run.state != NOT_READ]
    rest = [run for run in runs if run.is_over or run.state == NOT_READ]
    spent = math.fsum(run.usd or 0.0 for run in runs if run.is_rented)
    ends = [run.left_s for run in going if run.left_s is not None]
    reading = [f"{unread} more are being read"] if unread else []
    tiles = [
        Tile(name="running", value=str(len(going)), below=[f"of {len(runs)} runs", *reading]),
        Tile(name="next one finishes", value=f"in {formatting.duration(min(ends))}" if ends else "-"),
        Tile(name="spent on rented machines", value=formatting.usd(spent), below=["all runs together"]),
    ]
    lists = [_runs(going, now_s, "running"), _runs(rest, now_s, "over")]
    return _page("Runs", [Tiles(tiles), Heading("Runs"), *lists, Heading("Timeline"), _timeline(runs, now_s)])


def compare(runs: Sequence[RunSummary]) -> str:
    """Return several runs side by side, each beside its plan."""
    rows = [[name, *map(cell, runs)] for name, cell in (*_COMPARED, *_metrics(runs))]
    table = Table(
        name="figures of the runs",
        columns=[Column("figure"), *(Column(run.run) for run in runs)],
        rows=[row for row in rows if any(row[1:])],
    )
    blocks: list[Block] = [Heading("Side by side"), table, Heading("Training loss"), Drawing("".join(_losses(runs)))]
    return _page(f"{len(runs)} runs compared", blocks)


def brief(run: RunSummary, *, now_s: float) -> str:
    """Return the page of a run that has no report: it has not been through a step, or nothing was predicted for it."""
    return _page(run.run, [Heading("So far"), _runs([run], now_s, "the run")])


def message(title: str, text: str) -> str:
    """Return a page that says one thing."""
    return _page(title, [Line(text)])


def _page(title: str, blocks: Sequence[Block]) -> str:
    navigation = (
        '<nav aria-label="pages"><ul><li><a href="/">all runs</a></li>'
        '<li><a href="/metrics">metrics for Prometheus</a></li></ul></nav>'
    )
    return html.page(
        Document(
            kind="hetopt",
            title=title,
            about=[Drawing(navigation)],
            blocks=blocks,
            below=Html('<span id="live" role="status">live</span>; nothing can be changed from here.'),
            head=f'<noscript><meta http-equiv="refresh" content="{REFRESH_S}"></noscript>\n',
            script=f"\n<script>{SCRIPT}</script>",
        )
    )


def _runs(runs: Sequence[RunSummary], now_s: float, name: str) -> Drawing:
    if not runs:
        return Drawing()
    table = Table(
        name=f"runs: {name}",
        columns=columns("run, state, progress, cost, finish, result, beside its plan"),
        rows=[
            [
                _html(_name(run)),
                _html(_state(run)),
                _html(_progress(run)),
                _html(_money(run)),
                _html(_finish(run, now_s)),
                _result(run),
                _html(_beside(run)),
            ]
            for run in runs
        ],
    )
    button = '<p><button type="submit">compare the chosen ones</button></p>' if len(runs) > 1 else ""
    return Drawing(f'<form action="/compare" aria-label="{name}">{html.inside([table])}{button}</form>')


def _html(markup: str) -> Cell:
    return Html(markup) if markup else ""


def _name(one: RunSummary) -> str:
    key = escape(one.run)
    where = formatting.counted(one.workers, "worker") if one.workers else ""
    where += f" {place(one.on)}" if one.on else ""
    return (
        f'<input type="checkbox" name="run" value="{key}" id="choose-{key}" aria-label="choose {key}"> '
        f'<a class="name" href="/run/{quote(one.run)}" id="open-{key}">{key}</a>'
        f'<p class="of">{escape(", ".join(filter(None, [one.task, where])))}</p>'
    )


def _state(one: RunSummary) -> str:
    kind = "risk" if one.state in ("failed", "unreadable") else "chosen" if not one.is_over else ""
    ended = formatting.ending(one.reason) if one.state == "finished" else ""
    why = f'<p class="of">{escape(one.reason)}</p>' if one.reason and not ended and one.reason != one.state else ""
    return f'<span class="{kind}">{escape(one.state)}{escape(ended)}</span>{why}'


def _progress(one: RunSummary) -> str:
    if one.progress is None:
        return f"step {formatting.count(one.step)}" if one.step else ""
    said = step_of(one.step, one.expected_steps)
    return f"{said}{share_bar('steps done', one.progress)}"


def _money(one: RunSummary) -> str:
    if one.usd is None:
        return ""
    told = "" if one.is_rented else "if it were rented"
    if one.usd_is_estimate:
        told = "estimated: when some machines ended was not seen"
    note = f'<p class="of">{told}</p>' if told else ""
    if one.budget_usd:
        used = share_bar("budget used", one.usd / one.budget_usd)
        return f"{formatting.usd(one.usd)} of {formatting.usd(one.budget_usd)}{used}{note}"
    return f"{formatting.usd(one.usd)}{note}"


def _finish(one: RunSummary, now_s: float) -> str:
    if one.is_over:
        took = one.elapsed_s
        return f'<span class="name">took {formatting.duration(took)}</span>' if took is not None else ""
    if one.left_s is None:
        return ""
    return f'in {formatting.duration(one.left_s)}<p class="of">{_clock(now_s + one.left_s)}</p>'


def _result(one: RunSummary) -> str:
    told = [f"{name} {value:.4g}" for name, value in one.metrics.items()]
    told += [f"training loss {one.loss:.4g}"] if one.loss is not None else []
    return ", ".join(told)


def _beside(one: RunSummary) -> str:
    """The whole time that it took or will take, beside what was predicted."""
    said, outlook = one.predicted_s, one.outlook_s
    if said is None or outlook is None or one.state in ("stopped", "failed"):
        return ""
    longer = "longer" if outlook > said.value else "shorter"
    apart = f"{100 * abs(outlook / said.value - 1):.0f} % {longer}" if said.value else ""
    return apart + interval_bar(said.value, said.low, said.high, outlook, widest=WIDEST)


def _clock(time_s: float) -> str:
    """A moment as a person reads it, in the time zone of this machine."""
    return f"{datetime.datetime.fromtimestamp(time_s).astimezone():%Y-%m-%d %H:%M}"


def _timeline(runs: Sequence[RunSummary], now_s: float) -> Drawing:
    """When the newest runs ran, on one axis up to now or to the last predicted finish."""
    shown = [one for one in runs if one.started_s is not None and one.latest_s is not None][:TIMELINE_RUNS]
    if not shown:
        return Drawing()
    rows = []
    begin_s = min(one.started_s or now_s for one in shown)
    end_s = max(_until(one, now_s) + (one.left_s or 0.0) * (not one.is_over) for one in shown)
    share = 100 / max(end_s - begin_s, 1.0)  # percent of a second
    for one in shown:
        start_s, until_s = one.started_s or now_s, _until(one, now_s)
        left_s = 0.0 if one.is_over else one.left_s or 0.0
        parts = "".join(
            f'<i class="{kind}" style="left:{at:.2f}%;width:{size:.2f}%"></i>'
            for kind, at, size in (
                ("", share * (start_s - begin_s), share * (until_s - start_s)),
                ("left", share * (until_s - begin_s), share * left_s),
            )
            if size > 0
        )
        said = f"{one.run}: {_clock(start_s)} to {_clock(until_s)}, {one.state}"
        rows.append(
            f'<li><a href="/run/{quote(one.run)}">{escape(one.run)}</a>'
            f'<div class="track" role="img" aria-label="{escape(said)}" title="{escape(said)}">{parts}</div></li>'
        )
    axis = f'<div class="ticks"><span>{_clock(begin_s)}</span><span>{_clock(end_s)}</span></div>'
    return Drawing(f'<ol class="when">{"".join(rows)}</ol>{axis}')


def _until(one: RunSummary, now_s: float) -> float:
    return (one.latest_s or now_s) if one.is_over else now_s


def _figure(unit: str, name: str) -> Callable[[RunSummary], Cell]:
    """Return what makes the cell of a field; empty where nothing is known."""

    def cell(run: RunSummary) -> Cell:
        value = getattr(run, name)
        if isinstance(value, Range):
            say = UNITS[unit]
            return Html(f'{say(value.value)}<p class="of">{say(value.low)} to {say(value.high)}</p>')
        return "" if value is None else UNITS[unit](value)

    return cell


def _metrics(runs: Sequence[RunSummary]) -> Iterator[tuple[str, Callable[[RunSummary], Cell]]]:
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        yield name, partial(_metric, name)


def _metric(name: str, run: RunSummary) -> str:
    return f"{run.metrics[name]:.4g}" if name in run.metrics else ""


def _losses(runs: Sequence[RunSummary]) -> Iterator[str]:
    """The loss of each run over the time that it trained."""
    drawn = [one for one in runs if one.curve]
    if not drawn:
        return
    grid = np.linspace(0.0, max(one.curve[-1][0] for one in drawn), GRID)
    lines = []
    for number, one in enumerate(drawn):
        times, losses = np.array(one.curve).T
        values = np.interp(grid, times, losses, left=np.nan, right=np.nan)
        around = Envelope(low=values, middle=values, high=values)
        lines.append(chart.Line(key=f"run{number}", label=one.run, envelope=around, colour="adca"[number]))
    low = min(loss for one in drawn for _, loss in one.curve)
    high = max(loss for one in drawn for _, loss in one.curve)
    axes = chart.Axes(end_s=grid, marks_s=())
    wide = low > 0 and high > 10 * low
    note = "over the time of training" + (", logarithmic" if wide else "")
    yield chart.line_chart("Training loss", lines, axes, say=lambda value: f"{value:.3g}", note=note, logarithmic=wide)
    yield chart.ticks(axes)


_COMPARED: tuple[tuple[str, Callable[[RunSummary], Cell]], ...] = (
    ("state", lambda run: _html(_state(run))),
    ("task", lambda run: run.task),
    ("where", lambda run: run.on or ""),
    ("machines of the plan", lambda run: run.machines),
    ("workers", lambda run: str(run.workers)),
    ("time", _figure("s", "elapsed_s")),
    ("time predicted", _figure("s", "predicted_s")),
    ("beside its plan", lambda run: _html(_beside(run))),
    ("cost", lambda run: _html(_money(run))),
    ("cost predicted", _figure("USD", "predicted_usd")),
    ("time predicted if rented", _figure("s", "rented_s")),
    ("cost predicted if rented", _figure("USD", "rented_usd")),
    ("steps", _figure("steps", "step")),
    ("steps predicted", _figure("steps", "expected_steps")),
    ("step time", _figure("s", "step_time_s")),
    ("step time predicted", _figure("s", "predicted_step_time_s")),
    ("straggler wait in a step", _figure("share", "wait_share")),
    ("restarts of workers", lambda run: str(run.restarts or "")),
    ("training loss", _figure("number", "loss")),
)
"""What runs are compared by."""
