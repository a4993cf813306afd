"""`hetopt status --watch`: a run as it goes on, drawn every other second from what its log has gained since."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.cli.render import Picture
    from hetopt.core.events.fold import RunFold
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.live_run import LiveRun

EVERY_S = 2.0
"""Drawing sixteen workers takes some ten milliseconds: less than a hundredth of a core."""

LEGEND = "█ computing ░ waiting"


def watch(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over. Where stdout is no terminal, each new state is one line."""
    from hetopt.cli import render
    from hetopt.reports.live_run import LiveRun

    launch = run.launch
    watched = LiveRun.of(run.folder, launch)
    if not render.is_terminal():
        last = ""
        while True:
            status = run.status()
            watched.read()
            shown = picture(run.name, status.state.value, watched, launch, now_s=time.time())
            if shown.title != last:
                last = shown.title
                render.line(last)
            if status.state.is_over:
                return
            sleep(EVERY_S)
    with render.live_view() as show:
        while True:
            status = run.status()
            watched.read()
            state = status.state.value + (f" ({status.reason})" if status.reason else "")
            show(picture(run.name, state, watched, launch, now_s=time.time()))
            if status.state.is_over:
                return
            sleep(EVERY_S)


def picture(name: str, state: str, watched: LiveRun, launch: Launch | None, *, now_s: float) -> Picture:
    """How the run is now, in words.

    Args:
        name: of the run.
        state: of it.
        watched: what was read.
        launch: what was predicted; None: nothing was.
        now_s: seconds since the epoch.
    """
    from hetopt.cli import render
    from hetopt.cli.render import Picture
    from hetopt.core import formatting
    from hetopt.reports.run_words import figures

    progress = watched.progress
    expected = launch.prediction.steps.value if launch is not None else None
    done = None if not expected else progress.step / expected
    now = figures(progress, launch, step_time_s=watched.step_time_s, now_s=now_s, money=False)
    filled = [] if done is None else [f"{render.bar(done, render.BAR)} {formatting.share(done)}"]
    told = [
        *_pace(watched, launch),
        *_money(progress, launch, state, now_s),
        *_exchange(watched),
    ]
    after = [
        *([f"  {watched.unread.sentence}"] if watched.unread.lines else []),
        *(f"  at {formatting.duration(max(0.0, one.time_s))} {one.sentence}" for one in reversed(watched.happenings)),
    ]
    return Picture(
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
    from hetopt.cli import render

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


def _pace(watched: LiveRun, launch: Launch | None) -> list[str]:
    from hetopt.core import formatting

    now = watched.step_time_s
    if now is None:
        return []
    said = f", predicted {formatting.duration(launch.prediction.step_time_s.value)}" if launch is not None else ""
    return [f"  {formatting.duration(now)} a step{said}"]


def _money(progress: RunFold, launch: Launch | None, state: str, now_s: float) -> list[str]:
    from hetopt.core import formatting
    from hetopt.reports.run_words import rents

    if launch is None or progress.elapsed_s is None or progress.last_event_s is None:
        return []
    since_s = now_s - progress.last_event_s if state.startswith("running") else 0.0
    elapsed_s = progress.elapsed_s + max(0.0, since_s)
    if not rents(launch):
        return [f"  {formatting.duration(elapsed_s)} since launch; $0, as nothing is rented"]
    spent = launch.hourly_usd * elapsed_s / 3600
    budget = launch.plan.goal.budget_usd
    of = f" of a budget of {formatting.usd(budget)}" if budget is not None else ""
    rate = formatting.usd(launch.hourly_usd)
    return [
        f"  {formatting.duration(elapsed_s)} since launch; {formatting.usd(spent)}{of} at the plan's {rate} an hour"
    ]


def _exchange(watched: LiveRun) -> list[str]:
    from hetopt.core import formatting

    traffic, latest = watched.progress.traffic, watched.progress.latest
    told = latest.exchange if latest is not None else None
    if traffic is None or told is None:
        return []
    share = formatting.share(traffic.sent_bytes / traffic.dense_bytes)
    return [f"  gradients go as {traffic.way}: {formatting.bytes_(told.sent_bytes)} a step, {share} of dense so far"]


def _workers(watched: LiveRun) -> list[tuple[list[str], tuple[float, float]]]:
    """Of each worker its cells, and which parts of the longest step it computes and waits."""
    from hetopt.core import formatting

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
