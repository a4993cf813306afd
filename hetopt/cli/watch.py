"""`hetopt status --watch`: a run as it goes on, drawn every other second from what its log has gained since."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetopt.cli import render
from hetopt.cli.run_view import cost_words
from hetopt.core import formatting
from hetopt.core.comm.way_text import way_in_words
from hetopt.reports.live_run import LiveRun
from hetopt.reports.run_words import figures, pause

if TYPE_CHECKING:
    from hetopt.api.run import Run

EVERY_S = 2.0
"""Drawing sixteen workers takes some ten milliseconds: less than a hundredth of a core."""

LEGEND = "█ computing ░ waiting"


def watch(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over."""
    watched = LiveRun.of(run.folder, run.launch)
    with render.live_view() as show:
        while True:
            status = run.status()
            watched.read()
            state = status.state.value + (f" ({status.reason})" if status.reason else "")
            show(picture(run.name, state, watched, now_s=time.time()))
            if status.state.is_over:
                return
            sleep(EVERY_S)


def picture(name: str, state: str, watched: LiveRun, *, now_s: float) -> render.Picture:
    """How the run is now, in words.

    Args:
        name: of the run.
        state: of it.
        watched: what was read.
        now_s: seconds since the epoch.
    """
    progress, expected = watched.progress, watched.expected_steps
    now = figures(progress, watched.launch, step_time_s=watched.step_time_s, now_s=now_s, money=False)
    done = min(1.0, progress.step / expected) if expected else None
    filled = [] if done is None else [f"{render.bar(done, render.BAR)} {formatting.share(done)}"]
    waits = pause(progress, now_s)
    told = [*([f"  {waits}"] if waits else []), *_pace(watched), *_money(watched, state, now_s), *_exchange(watched)]
    after = [
        *([f"  {watched.unread.sentence}"] if watched.unread.lines else []),
        *(f"  at {formatting.duration(max(0.0, one.time_s))} {one.sentence}" for one in reversed(watched.happenings)),
    ]
    return render.Picture(
        title=f"{name}: {state}",
        lines=[
            *render.phrases([*filled, now[0], f"epoch {progress.epoch:.1f}", *now[1:]], columns=render.width()),
            *(line for text in told for line in render.wrapped(text, hang=2)),
            *_table(watched),
            *(line for text in after for line in render.wrapped(text, hang=4)),
        ],
    )


def _table(watched: LiveRun) -> list[str]:
    """The workers' rows below a heading, numbers to the right, and bars where there is room for them."""
    rows = _workers(watched)
    if not rows:
        return []
    whole = [["worker", "batch", "computing", "waiting"], *(cells for cells, _ in rows)]
    first, *numbers = [max(len(row[column]) for row in whole) for column in range(4)]
    lines = [
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:4], numbers, strict=True))])
        for row in whole
    ]
    room = min(render.BAR, render.width() - len(lines[0]) - 3)
    if room < len(LEGEND):
        return lines
    bars = [LEGEND, *("█" * round(room * parts[0]) + "░" * round(room * parts[1]) for _, parts in rows)]
    return [f"{line}  {told}" for line, told in zip(lines, bars, strict=True)]


def _pace(watched: LiveRun) -> list[str]:
    now, launch = watched.step_time_s, watched.launch
    if now is None:
        return []
    said = f", predicted {formatting.duration(launch.prediction.step_time_s.value)}" if launch is not None else ""
    return [f"  {formatting.duration(now)} a step{said}"]


def _money(watched: LiveRun, state: str, now_s: float) -> list[str]:
    launch, elapsed_s = watched.launch, watched.elapsed_s(now_s, is_running=state.startswith(("starting", "running")))
    if launch is None or elapsed_s is None:
        return []
    since = f"  {formatting.duration(elapsed_s)} since launch"
    budget = launch.plan.goal.budget_usd
    of = f" of a budget of {formatting.usd(budget)}" if budget is not None else ""
    spent = cost_words(watched.usd(elapsed_s) or 0.0, launch.running_usd_per_hour, launch.on, of)
    return [f"{since}; {spent}"]


def _exchange(watched: LiveRun) -> list[str]:
    traffic, latest = watched.progress.traffic, watched.progress.latest
    told = latest.exchange if latest is not None else None
    if traffic is None or told is None:
        return []
    share = formatting.share(traffic.sent_bytes / traffic.dense_bytes)
    way, sent = way_in_words(traffic.way), formatting.bytes_(told.sent_bytes)
    return [f"  gradients: {way}, {sent} a step, {share} of dense so far"]


def _workers(watched: LiveRun) -> list[tuple[list[str], tuple[float, float]]]:
    """Of each worker its cells, and which parts of the longest step it computes and waits."""
    latest, roster = watched.progress.latest, watched.progress.roster
    if latest is None:
        return []
    rows = []
    longest = max(latest.step_time_s, 1e-9)
    for rank, place in enumerate(watched.progress.latest_places):
        compute_s, wait_s = latest.compute_s[rank], latest.wait_s[rank]
        computing = min(compute_s / longest, 1.0)
        cells = [
            roster.workers[place].host,
            formatting.count(latest.local_batch_sizes[rank]),
            formatting.duration(compute_s),
            formatting.duration(wait_s),
        ]
        rows.append((cells, (computing, min(wait_s / longest, 1.0 - computing))))
    return rows
