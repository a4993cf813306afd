"""`hetopt status --watch`: a run as it goes on, drawn every other second from what its log has gained since."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.cli.render import Picture
    from hetopt.core.events.fold import RunFold
    from hetopt.core.events.reader import EventReader
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.timeline import Happening

EVERY_S = 2.0
"""Drawing sixteen workers takes some ten milliseconds: less than a hundredth of a core."""

RECENT_S = 60.0
"""Of steps, whose pace tells when the run will be over."""

LATEST_HAPPENINGS = 5
BAR = 24


@dataclass(kw_only=True)
class Watched:
    """What was read of a run so far.

    Attributes:
        progress: folded from all events.
        recent: of the last minute: (when, steps, seconds a step).
        happenings: the newest.
        log, decisions: where reading goes on, in the log and in what the supervisor did.
    """

    progress: RunFold
    recent: deque[tuple[float, int, float]] = field(default_factory=deque)
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=LATEST_HAPPENINGS))
    log: EventReader
    decisions: EventReader

    @classmethod
    def of(cls, folder: Path, launch: Launch | None) -> Watched:
        """Nothing was read of a run yet."""
        from hetopt.core.events.decisions import DECISIONS_FILE
        from hetopt.core.events.fold import RunFold
        from hetopt.core.events.log import EVENTS_FILE
        from hetopt.core.events.reader import EventReader

        return cls(
            progress=RunFold.launched(launch.starts if launch is not None else ()),
            log=EventReader(path=folder / EVENTS_FILE),
            decisions=EventReader(path=folder / DECISIONS_FILE),
        )

    def read(self, *, time_factor: float) -> None:
        """Go on with what the log has gained."""
        from hetopt.core.events.records import StepsLogged
        from hetopt.reports.timeline import happening

        for event in [*self.log.read(), *self.decisions.read()]:
            self.progress.take(event)
            if isinstance(event, StepsLogged):
                self.recent.append((event.time_s, event.steps, event.step_time_s))
            at_s = self.progress.trained_for_s or 0.0
            found = happening(event, self.progress.roster.host, at_s=at_s, time_factor=time_factor)
            if found is not None:
                self.happenings.append(found)
        while self.recent and self.recent[-1][0] - self.recent[0][0] > RECENT_S:
            self.recent.popleft()

    @property
    def step_time_s(self) -> float | None:
        """Mean time of the steps of the recent past, in seconds; None before the first step."""
        steps = sum(count for _, count, _ in self.recent)
        return sum(count * time_s for _, count, time_s in self.recent) / steps if steps else None


def watch(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it is over. Where stdout is no terminal, each new state is one line."""
    from hetopt.cli import render

    launch = run.launch
    watched = Watched.of(run.folder, launch)
    factor = launch.time_factor if launch else 1.0
    if not render.is_terminal():
        last = ""
        while True:
            status = run.status()
            watched.read(time_factor=factor)
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
            watched.read(time_factor=factor)
            state = status.state.value + (f" ({status.reason})" if status.reason else "")
            show(picture(run.name, state, watched, launch, now_s=time.time()))
            if status.state.is_over:
                return
            sleep(EVERY_S)


def picture(name: str, state: str, watched: Watched, launch: Launch | None, *, now_s: float) -> Picture:
    """How the run is now, in words.

    Args:
        name: of the run.
        state: of it.
        watched: what was read.
        launch: what was predicted; None: nothing was.
        now_s: seconds since the epoch.
    """
    from hetopt.cli.render import Picture
    from hetopt.core import formatting

    progress = watched.progress
    metrics = "  ".join(f"{metric} {value:.4g}" for metric, value in progress.metrics.items())
    loss = f", loss {progress.loss:.4g}" if progress.loss is not None else ""
    expected = launch.prediction.steps.value if launch is not None else None
    title = (
        f"{name}: {state}, step {formatting.count(progress.step)}, epoch {progress.epoch:.1f}{loss}  {metrics}".rstrip()
    )
    return Picture(
        title=title,
        lines=[
            *([_bar(progress.step / expected, f"of about {formatting.count(expected)} steps")] if expected else []),
            *_pace(watched, launch, expected),
            *_money(progress, launch, state, now_s),
            *_exchange(watched),
            *_table(_workers(watched)),
            *([f"  {unread.sentence}"] if (unread := watched.log.unread + watched.decisions.unread).lines else []),
            *(
                f"  at {formatting.duration(max(0.0, one.time_s))} {one.sentence}"
                for one in reversed(watched.happenings)
            ),
        ],
    )


def _table(rows: list[list[str]]) -> list[str]:
    """The workers' rows below a heading, numbers to the right."""
    if not rows:
        return []
    whole = [["worker", "batch", "computing", "waiting", "of a step: █ computing ░ waiting"], *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(4)]
    first, *numbers = widths
    return [
        "  ".join(
            [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:4], numbers, strict=True)), row[4]]
        )
        for row in whole
    ]


def _bar(share: float, text: str) -> str:
    full = round(BAR * min(max(share, 0.0), 1.0))
    return f"  {'█' * full}{'░' * (BAR - full)} {share:.0%} {text}"


def _pace(watched: Watched, launch: Launch | None, expected: float | None) -> list[str]:
    from hetopt.core import formatting

    now = watched.step_time_s
    if now is None:
        return []
    said = f", predicted {formatting.duration(launch.prediction.step_time_s.value)}" if launch is not None else ""
    left = ""
    if expected is not None and watched.progress.finish_reason is None and expected > watched.progress.step:
        left = f"; about {formatting.duration((expected - watched.progress.step) * now)} of stepping left"
    return [f"  {formatting.duration(now)} a step{said}{left}"]


def _money(progress: RunFold, launch: Launch | None, state: str, now_s: float) -> list[str]:
    from hetopt.core import formatting

    if launch is None or progress.elapsed_s is None or progress.last_event_s is None:
        return []
    since_s = now_s - progress.last_event_s if state.startswith("running") else 0.0
    elapsed_s = progress.elapsed_s + max(0.0, since_s)
    spent = launch.hourly_usd * elapsed_s / 3600
    budget = launch.plan.goal.budget_usd
    of = f" of a budget of {formatting.usd(budget)}" if budget is not None else ""
    rate = formatting.usd(launch.hourly_usd)
    return [
        f"  {formatting.duration(elapsed_s)} since launch; {formatting.usd(spent)}{of} at the plan's {rate} an hour"
    ]


def _exchange(watched: Watched) -> list[str]:
    from hetopt.core import formatting

    traffic, latest = watched.progress.traffic, watched.progress.latest
    told = latest.exchange if latest is not None else None
    if traffic is None or told is None:
        return []
    share = formatting.share(traffic.sent_bytes / traffic.dense_bytes)
    return [f"  gradients go as {traffic.way}: {formatting.bytes_(told.sent_bytes)} a step, {share} of dense so far"]


def _workers(watched: Watched) -> list[list[str]]:
    from hetopt.core import formatting

    latest, roster = watched.progress.latest, watched.progress.roster
    if latest is None:
        return []
    rows = []
    longest = max(latest.step_time_s, 1e-9)
    for rank, place in enumerate(watched.progress.latest_places):
        compute_s, wait_s = latest.compute_s[rank], latest.wait_s[rank]
        computing = round(BAR * min(compute_s / longest, 1.0))
        waiting = round(min(BAR * wait_s / longest, BAR - computing))
        rows.append(
            [
                roster.workers[place].host,
                formatting.count(latest.local_batch_sizes[rank]),
                formatting.duration(compute_s),
                formatting.duration(wait_s),
                "█" * computing + "░" * waiting,
            ]
        )
    return rows
