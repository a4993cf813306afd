"""A run in words: what matters of it now, in a line, and what its log says, a line for each thing that happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetopt.core import formatting
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import Evaluated, LogEvent, RunFailure, RunStarted, StepsLogged, TrainingFinished
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.timeline import happening

RECENT_S = 60.0
"""Of steps, whose mean time tells when the run will be over."""

DAY_S = 86_400.0

LEAST_BETWEEN_S = 5.0
BETWEEN_SHARE = 0.03
"""Steps are told this long after they were told last, or, of a long run, when so much of its time has gone by."""


@dataclass(kw_only=True)
class RecentSteps:
    """The steps of the last minute: when, how many, and seconds a step."""

    rows: deque[tuple[float, int, float]] = field(default_factory=deque)

    def take(self, event: StepsLogged) -> None:
        """Go on with these steps."""
        self.rows.append((event.time_s, event.steps, event.step_time_s))
        while event.time_s - self.rows[0][0] > RECENT_S:
            self.rows.popleft()

    @property
    def step_time_s(self) -> float | None:
        """Their mean time, in seconds; None: there was none."""
        steps = sum(count for _, count, _ in self.rows)
        return sum(count * time_s for _, count, time_s in self.rows) / steps if steps else None


def wait_share(progress: RunFold) -> float | None:
    """What the workers spend waiting for the slowest, as a part of the newest steps; None: no step yet."""
    latest = progress.latest
    if latest is None or not latest.wait_s or latest.step_time_s <= 0:
        return None
    return sum(latest.wait_s) / len(latest.wait_s) / latest.step_time_s


def left_s(progress: RunFold, expected_steps: float | None, step_time_s: float | None) -> float | None:
    """Seconds of stepping that are left at this pace; None: not known, or over."""
    if expected_steps is None or step_time_s is None or progress.finish_reason is not None or progress.clock.awaits:
        return None
    return max(0.0, expected_steps - progress.step) * step_time_s


_PLACES = {
    "local": "on this machine",
    "rehearsal": "rehearsed on this machine",
    "ssh": "on your own machines",
    "ec2": "on EC2",
}


def place(on: str) -> str:
    """Where a backend trains, to stand behind its workers: 'on this machine'."""
    return _PLACES.get(on, f"on {on}")


def step_of(step: int, expected: float | None) -> str:
    """How far a run has come: 'step 12 of 281', or beyond what was predicted 'step 300, 281 predicted'."""
    said = f"step {formatting.count(step)}"
    if not expected:
        return said
    most = max(1, round(expected))
    return f"{said} of {formatting.count(most)}" if step <= most else f"{said}, {formatting.count(most)} predicted"


def figures(
    progress: RunFold, launch: Launch | None, *, step_time_s: float | None, now_s: float, money: bool = True
) -> list[str]:
    """The figures that a person watches, as phrases, the most important first; what is not known is left out.

    Args:
        progress: of the run.
        launch: what was predicted; None: nothing was.
        step_time_s: mean time of recent steps.
        now_s: seconds since the epoch.
        money: whether to say what it has cost.
    """
    expected = launch.prediction.steps.value if launch is not None else None
    waiting, left, latest = wait_share(progress), left_s(progress, expected, step_time_s), progress.latest
    told = [step_of(progress.step, expected)]
    if progress.loss is not None:
        told.append(f"loss {progress.loss:.4g}")
    if latest is not None and step_time_s:
        told.append(f"{formatting.count(round(sum(latest.local_batch_sizes) / step_time_s))} samples/s")
    if waiting is not None and latest is not None and len(latest.wait_s) > 1:
        told.append(f"straggler wait {formatting.share(waiting)}")
    if launch is not None and money and progress.elapsed_s is not None:
        told.append(formatting.usd(launch.running_usd_per_hour * progress.elapsed_s / SECONDS_PER_HOUR))
    if left is not None:
        form = "%H:%M" if left < DAY_S else "%a %H:%M"
        told.append(f"ends in {formatting.duration(left)}, at {time.strftime(form, time.localtime(now_s + left))}")
    metrics = formatting.reached(progress.metrics, None)
    return told + ([f"evaluated: {metrics}"] if metrics else [])


def pause(progress: RunFold, now_s: float) -> str | None:
    """Why no step is done now: who went, came or is not heard, for how long, and what follows; None: training goes on.

    Args:
        progress: of the run.
        now_s: seconds since the epoch.
    """
    event = progress.pausing
    if event is None:
        return None
    took = formatting.duration(max(0.0, now_s - event.time_s))
    if isinstance(event, RunStarted):
        where = formatting.listed(list(dict.fromkeys(worker.host for worker in event.workers)))
        after = f" from step {formatting.count(event.resumed_step)}" if event.resumed_step else ""
        return f"workers start on {where}{after}, for {took} so far"
    alone = {progress.roster.workers[place].host for place in progress.roster.present} <= {event.host}
    if event.dies:
        follows = "the run waits for it" if alone else "the others go on from the last checkpoint"
        return f"{event.host} is gone for {took}: {follows}"
    if event.cut:
        follows = "the run waits for it" if alone else "unless it is heard again, the others go on without it"
        return f"{event.host} is not heard for {took}: {follows}"
    comes = "is there again" if event.returns else "has to leave"
    return f"{event.host} {comes}: all save a checkpoint and workers start anew, for {took} so far"


def audited(progress: RunFold) -> str:
    """How far shares are from one machine, as audit steps measured it, in a sentence; empty where none was audited."""
    audits = progress.audits
    if audits is None:
        return ""
    times = "once" if audits.count == 1 else formatting.counted(audits.count, "time")
    what = audits.reason or f"shares differ from one machine by {formatting.distance(audits.distance)}"
    if not audits.reason and audits.distance > audits.tolerance:
        what += ", no further than its own random numbers vary"
    return f"Audited {times}: {what}."


class RunLog:
    """What the log of a run says, a line at a time."""

    def __init__(self, launch: Launch | None) -> None:
        self._launch = launch
        self._progress = RunFold.launched(launch.starts if launch is not None else ())
        self._recent = RecentSteps()
        self._told_s = 0.0

    def lines(self, event: LogEvent) -> Iterator[str]:
        """What is to be said of the next event: nothing of most, a line of what happened, steps now and then."""
        progress = self._progress
        progress.take(event)
        at_s = progress.trained_for_s or 0.0
        said = self._sentence(event, at_s)
        if said is not None:
            yield f"{formatting.duration(at_s)}: {said}"

    def _sentence(self, event: LogEvent, at_s: float) -> str | None:
        progress, launch = self._progress, self._launch
        match event:
            case RunStarted():
                batches = ", ".join(formatting.count(worker.local_batch_size) for worker in event.workers)
                workers = formatting.counted(len(event.workers), "worker")
                return f"{event.task} starts on {workers}, local batch sizes {batches}"
            case StepsLogged():
                self._recent.take(event)
                if progress.step > event.steps and at_s - self._told_s < max(LEAST_BETWEEN_S, BETWEEN_SHARE * at_s):
                    return None
                self._told_s = at_s
                now = self._recent.step_time_s
                return ", ".join(figures(progress, launch, step_time_s=now, now_s=event.time_s, money=False)[:4])
            case Evaluated():
                return f"step {formatting.count(event.step)}: {formatting.reached(event.metrics, None)}"
            case TrainingFinished():
                return f"over after {formatting.counted(progress.step, 'step')}{formatting.ending(event.reason)}"
            case RunFailure():
                return f"failed: {progress.failure}"
            case _:
                factor = launch.time_factor if launch is not None else 1.0
                found = happening(event, progress.roster.host, at_s=at_s, time_factor=factor)
                return found.sentence if found is not None else None
