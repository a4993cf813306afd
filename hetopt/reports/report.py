"""The `Report`: what was predicted beside what happened, and where the difference came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from hetopt.core import formatting
from hetopt.core.artifact import Artifact, CleanText, Record
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.records import SyncFigures
from hetopt.optimizer.launch_record import OWN_PLACES, Launch
from hetopt.optimizer.plan import Range
from hetopt.reports.series import OverTime, over_time
from hetopt.reports.timeline import Kind, NotableEvent, audited, happenings

TOLERANCE = 0.10
"""Largest relative difference of measured and predicted run time at which a prediction is called good."""


Unit = Literal["s", "steps", "USD"]


class Compared(Record):
    """The prediction with its interval and the measurement of one figure."""

    name: str
    unit: Unit
    predicted: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    measured: NonNegativeFloat

    @property
    def error(self) -> float | None:
        """Relative error, (measured - predicted) / predicted; above 0: it took more; None: the prediction is 0."""
        return (self.measured - self.predicted) / self.predicted if self.predicted else None


class WorkerReport(Record):
    """One worker over the whole run, all of its sessions. Seconds are means over the steps that it took part in."""

    host: CleanText
    type: CleanText
    slowdown: PositiveFloat
    speed: PositiveFloat | None = Field(default=None, description="of its host in a rehearsal, relative")
    local_batch_size: int = Field(description="share at the end, samples; of a worker that is gone, in its last step")
    compute_s: NonNegativeFloat | None = Field(description="absent before its first step")
    wait_s: NonNegativeFloat | None
    steps: int = Field(default=0, description="logged, that it took part in")
    is_present: bool = Field(default=True, description="whether it was there at the end")


class Contention(Record):
    """Wall time of computing over its processor time, others' programs in between; absent where nobody measured."""

    profiled: float | None = Field(default=None, ge=1, description="while the job was profiled")
    launched: float | None = Field(default=None, ge=1, description="just before the launch")
    measured: float | None = Field(default=None, ge=1, description="in the run, by workers not slowed on purpose")


class Way(Record):
    """One option to exchange gradients, and in how many steps it was used."""

    way: CleanText = Field(description="compressor, ratio and collective")
    steps: int


class Sent(Record):
    """Bytes that one worker contributed to gradient synchronization over the whole run (the mean of all workers)."""

    sent_bytes: NonNegativeFloat
    dense_bytes: PositiveFloat = Field(description="what sending everything in fp32 would have come to")
    ways: tuple[Way, ...] = Field(description="in the order of first use")
    changes: int = Field(description="of the way, on the way")


class Averaging(Record):
    """Frequency and cost of averaging the parameters of local SGD workers."""

    policy: CleanText
    synchronised: int = Field(description="steps that ended in an average")
    local: int = Field(description="steps that did not")
    sent_bytes: NonNegativeFloat = Field(description="by one worker, votes included")
    divergence: NonNegativeFloat | None = Field(
        description="how far workers had come apart, in the mean over the averages: root of the mean squared distance "
        "from the average over its norm; absent where nobody measured"
    )


class Interrupted(Record):
    """Interruptions of a run, stopped and resumed or short of workers, and their cost, all of it in its run time."""

    sessions: int = Field(description="how often it began to train, the times that it went on included")
    launches: int = Field(default=0, description="how often it was launched; 0: a report of an older version")
    idle_s: NonNegativeFloat = Field(description="between sessions: no part of the run time, nor of its cost")
    recoveries: int = Field(description="of the workers, within a session")
    recovery_s: NonNegativeFloat = Field(description="that these took, from the last step before to the next one")
    lost_steps: int = Field(description="done again, from a checkpoint")
    lost_s: NonNegativeFloat = Field(description="that these took, at the mean time of a step")


class Report(Artifact):
    """A run, predicted against measured."""

    KIND: ClassVar[str] = "report"
    VERSION: ClassVar[int] = 3
    MADE_BY: ClassVar[str] = "hetopt report RUN"
    SHOWN_BY: ClassVar[str] = "hetopt.reports.run_document:document"

    run_id: str
    task: CleanText
    on: str
    state: str
    finish_reason: CleanText | None
    metrics: dict[CleanText, float]
    compared: tuple[Compared, ...]
    workers: tuple[WorkerReport, ...]
    global_batch_size: int
    interrupted: Interrupted | None = Field(default=None, description="absent for a run in one piece")
    unread_lines: int = Field(default=0, description="of the event log, that could not be read and are left out")
    share_changes: int
    contention: Contention | None = Field(default=None, description="absent in reports of older versions")
    sent: Sent | None = Field(default=None, description="absent for a single worker, and for runs of older versions")
    together: Averaging | None = Field(default=None, description="absent where gradients are exchanged")
    hourly_usd: NonNegativeFloat = Field(description="what the plan's machines cost an hour")
    within_tolerance: bool | None = Field(description="run time within 10 % of its prediction; absent while running")
    verdict: tuple[CleanText, ...] = Field(
        description="one sentence each: did the prediction hold, and where did it miss"
    )
    rented_total_s: NonNegativeFloat = Field(description="predicted for the rented cluster")
    rented_cost_usd: NonNegativeFloat = Field(description="predicted for the rented cluster")
    over_time: OverTime = Field(default=OverTime(), description="the run's curves")
    happenings: tuple[NotableEvent, ...] = Field(default=(), description="what bends the curves")

    def __str__(self) -> str:
        """Return the document as `hetopt report` prints it."""
        from hetopt.reports.run_document import document
        from hetopt.reports.text import whole

        return whole(document(self))

    def __repr__(self) -> str:
        return f"<Report of {self.run_id}: {self.state}>"


def worker_reports(progress: RunFold, speeds: Mapping[str, float], *, newest: bool = False) -> tuple[WorkerReport, ...]:
    """Return each worker's mean compute and wait seconds of a step, workers that are gone included.

    Args:
        progress: figures folded from the run's events.
        speeds: relative speed of each host in a rehearsal, by host; empty: it is none.
        newest: whether the figures are of the last period logged, of workers that were in it; else over the run.
    """
    latest = progress.latest if newest else None
    now: dict[int, tuple[float, float]] = {}
    if latest is not None:
        times = zip(latest.compute_s, latest.wait_s, strict=True)
        now = dict(zip(progress.latest_places, times, strict=False))
    reports = []
    for place, worker in enumerate(progress.roster.workers):
        means = (worker.compute_s / worker.steps, worker.wait_s / worker.steps) if worker.steps else (None, None)
        compute_s, wait_s = now.get(place, means)
        reports.append(
            WorkerReport(
                host=worker.host,
                type=worker.type,
                slowdown=worker.slowdown,
                speed=speeds.get(worker.host),
                local_batch_size=worker.local_batch_size,
                compute_s=compute_s,
                wait_s=wait_s,
                steps=worker.steps,
                is_present=place in progress.roster.present,
            )
        )
    return tuple(reports)


def make_report(launch: Launch, history: RunHistory, *, state: str, unread_lines: int = 0) -> Report:
    """Return the report of a run: what its events measured beside what its launch predicted.

    Args:
        launch: record of what was started, and what was predicted for it.
        history: events of the run.
        state: state of the run now.
        unread_lines: lines of the event log that could not be read.

    Raises:
        BadInput: the run has not logged a single step yet.
    """
    progress = history.run
    step_time_s = progress.step_time_s
    if step_time_s is None:
        how = "failed before its first step" if state == "failed" else "has not logged a step yet"
        raise BadInput(
            f"{launch.run_id} {how}, so there is nothing to report.",
            hint=f"look at it with `hetopt status {launch.run_id}` or `hetopt logs {launch.run_id}`",
        )
    compared = _compare(launch, progress, step_time_s)
    by_name = {figure.name: figure for figure in compared}
    finished = progress.finish_reason is not None and progress.finish_reason != "stopped"
    run_time = by_name.get("run time")
    within = None if run_time is None or run_time.error is None else abs(run_time.error) <= TOLERANCE
    rented = launch.plan.chosen.prediction
    interrupted = _interrupted(progress, step_time_s, launches=len(launch.starts))
    contention = Contention(
        profiled=launch.plan.profile.contention,
        launched=None if launch.machine is None else launch.machine.contention,
        measured=progress.contention if launch.spec.miniature is None else None,
    )
    of_audits = audited(progress)
    happened = happenings(history, time_factor=launch.time_factor)
    return Report(
        run_id=launch.run_id,
        task=progress.task,
        on=launch.on,
        state=state,
        finish_reason=progress.finish_reason,
        metrics=dict(progress.metrics),
        compared=compared,
        workers=worker_reports(progress, launch.speeds),
        global_batch_size=progress.global_batch_size,
        interrupted=interrupted,
        unread_lines=unread_lines,
        share_changes=progress.share_changes,
        contention=contention,
        sent=None
        if not progress.ways
        else Sent(
            sent_bytes=progress.sent_bytes,
            dense_bytes=progress.dense_bytes,
            ways=tuple(Way(way=way, steps=steps) for way, steps in progress.ways.items()),
            changes=progress.exchange_changes,
        ),
        together=_together([row.sync for row in history.steps if row.sync is not None]),
        hourly_usd=launch.plan.chosen.usd_per_hour,
        within_tolerance=within if finished else None,
        verdict=(
            *_verdict(by_name, within, happened, progress, interrupted, contention.measured),
            *([of_audits] if of_audits else []),
            *([_batch(progress)] if launch.spec.batch_policy == "critical" else []),
        ),
        rented_total_s=rented.total_s.value,
        rented_cost_usd=rented.cost_usd.value,
        over_time=over_time(history),
        happenings=happened,
    )


def _together(synced: Sequence[SyncFigures]) -> Averaging | None:
    """Return the averages of parameters that steps logged, added up; None where gradients are exchanged."""
    if not synced:
        return None
    apart = [(sync.divergence, sync.synchronised) for sync in synced if sync.divergence is not None]
    counted = sum(averages for _, averages in apart)
    return Averaging(
        policy=synced[0].policy,
        synchronised=sum(sync.synchronised for sync in synced),
        local=sum(sync.local for sync in synced),
        sent_bytes=sum(sync.sent_bytes for sync in synced),
        divergence=sum(divergence * averages for divergence, averages in apart) / counted if counted else None,
    )


def _batch(progress: RunFold) -> str:
    """Return a sentence on how far the batch grew with the gradient noise, and on what its steps were worth."""
    planned, latest = formatting.counted(progress.global_batch_size, "sample"), progress.latest
    last = 0 if latest is None else sum(latest.local_batch_sizes)
    if last == progress.global_batch_size:
        return f"The batch stayed at {planned}: no noise that was measured gave reason for a larger one."
    return (
        f"The batch grew from {planned} as planned to {last:,}, as the noise allowed: "
        f"{formatting.counted(progress.step, 'step')} made the progress of "
        f"{formatting.count(round(progress.planned_step))} planned ones."
    )


def _compare(launch: Launch, progress: RunFold, step_time_s: float) -> tuple[Compared, ...]:
    """Return predictions beside measurements, all sessions together; time in which nothing ran is left out.

    Only the step time, where the run was stopped, is not over, or its log does not begin with the first step.
    """
    prediction = launch.prediction
    step_time = _held("step time", "s", prediction.step_time_s, step_time_s)
    # Where the log does not begin with the first step, what came before it is not known.
    if progress.training_s is None or progress.finish_reason == "stopped" or progress.first_step:
        return (step_time,)
    startup_s = progress.startup_s or 0.0
    startup = Range(value=prediction.startup_s, low=prediction.startup_s, high=prediction.startup_s)
    total_s = startup_s + progress.training_s + progress.recovery_s
    is_own = launch.on in OWN_PLACES
    hourly = launch.running_usd_per_hour if is_own else launch.plan.chosen.usd_per_hour
    return (
        step_time,
        _held("steps", "steps", prediction.steps, max(0, progress.step - progress.first_step)),
        _held("training time", "s", prediction.training_s, progress.training_s),
        _held("start-up", "s", startup, startup_s),
        _held("run time", "s", prediction.total_s, total_s),
        _held(
            "cost" if is_own else "cost at the plan's rate",
            "USD",
            prediction.total_s,
            total_s,
            factor=hourly / SECONDS_PER_HOUR,
        ),
    )


def _held(name: str, unit: Unit, predicted: Range, measured: float, *, factor: float = 1.0) -> Compared:
    """Return a prediction and its measurement, both times ``factor``."""
    return Compared(
        name=name,
        unit=unit,
        predicted=factor * predicted.value,
        low=factor * predicted.low,
        high=factor * predicted.high,
        measured=factor * measured,
    )


def _interrupted(progress: RunFold, step_time_s: float, *, launches: int) -> Interrupted | None:
    """Return how a run was interrupted, all sessions together; None: it never was.

    Args:
        progress: fold of the run's events.
        step_time_s: seconds of a step, by which lost steps are counted.
        launches: how often the run was launched or resumed.
    """
    if progress.clock.sessions <= 1 and not progress.restarts:
        return None
    return Interrupted(
        sessions=progress.clock.sessions,
        launches=launches,
        idle_s=progress.clock.idle_s,
        recoveries=progress.restarts,
        recovery_s=progress.recovery_s,
        lost_steps=progress.lost_steps,
        lost_s=progress.lost_steps * step_time_s,
    )


def _of_interruptions(interrupted: Interrupted | None) -> list[str]:
    """Return a sentence for each kind of interruption; None: the run had none."""
    if interrupted is None:
        return []
    sentences = []
    if interrupted.sessions > 1:
        sentences.append(
            f"Its {interrupted.sessions} sessions are added up, start-ups included; the "
            f"{formatting.duration(interrupted.idle_s)} between them are no part of its time or cost."
        )
    if interrupted.recoveries:
        times = "once" if interrupted.recoveries == 1 else f"{interrupted.recoveries} times"
        sentences.append(
            f"Its workers changed {times} while it ran; going on took {formatting.duration(interrupted.recovery_s)} "
            "altogether."
        )
    if interrupted.lost_steps:
        sentences.append(
            f"{formatting.counted(interrupted.lost_steps, 'step')} had to be done again, from a checkpoint: about "
            f"{formatting.duration(interrupted.lost_s)} of lost work."
        )
    return sentences


def _verdict(
    figures: dict[str, Compared],
    within: bool | None,
    happenings: Sequence[NotableEvent],
    progress: RunFold,
    interrupted: Interrupted | None,
    contention: float | None,
) -> tuple[str, ...]:
    """Return sentences on how the run compares with its prediction, what explains the difference, and interruptions.

    Args:
        figures: comparisons by name; without ``run time`` only step time is judged.
        within: whether run time was within the tolerance; None: it is not known.
        happenings: happenings of the run, of which changes explain step times.
        progress: figures folded from the run's events.
        interrupted: interruptions; None: there were none.
        contention: measured slowdown by other programs; None: not known.
    """
    run_time, step_time = figures.get("run time"), figures["step time"]
    kinds = {happening.kind for happening in happenings}
    changes = [text for kind, text in _CHANGES.items() if kind in kinds]
    if run_time is None or run_time.error is None:
        logged = list(_logged("step time", changes, progress, interrupted, contention))
        is_slower = step_time.measured > step_time.high
        return (
            "The run has not finished, or was resumed: only step time can be held against its prediction.",
            *([f"Steps are slower than predicted: {'; '.join(logged) or _UNKNOWN}."] if is_slower else []),
            *_of_interruptions(interrupted),
        )
    inside = run_time.low <= run_time.measured <= run_time.high
    sentences = [
        f"The run took {formatting.duration(run_time.measured)} where {formatting.duration(run_time.predicted)} were "
        "predicted "
        f"({formatting.percent(run_time.error)}): {'within' if within else 'not within'} 10 %, and "
        f"{'in' if inside else 'outside'} the 90 % interval, {formatting.duration(run_time.low)} to "
        f"{formatting.duration(run_time.high)}."
    ]
    if not within:
        # Name the part that explains most seconds, so that the reader knows what to measure again.
        apart_s = run_time.measured - run_time.predicted
        parts_s = _parts_s(figures, interrupted)
        worst = max(parts_s, key=lambda name: parts_s[name] * apart_s)
        logged = list(_logged(worst, changes, progress, interrupted, contention if apart_s > 0 else None))
        sentences.append(
            f"The largest part of the difference is in the {worst} ({formatting.difference(parts_s[worst])}; "
            f"{formatting.difference(apart_s)} in all): {'; '.join(logged) or _UNKNOWN}."
        )
    if changes:
        sentences.append(f"The prediction does not count: {'; '.join(changes)}.")
    sentences += _of_interruptions(interrupted)
    return tuple(sentences)


_CHANGES: dict[Kind, str] = {
    "condition_changed": "its conditions changed",
    "miniature_slowed": "the emulation slowed down",
    "exchange_changed": "what the workers sent changed",
}
"""Kinds of events that change how long a step takes."""

_UNKNOWN = "no event of the run says why"

_SHARED = 1.15
"""Contention that is worth saying: what the processor time of two runs on a free machine differs by."""


def _logged(
    part: str,
    changes: Sequence[str],
    progress: RunFold,
    interrupted: Interrupted | None,
    contention: float | None,
) -> Iterator[str]:
    """Yield a sentence on each event that explains a part of a run's time.

    Args:
        part: name of the part, as of `_parts_s`.
        changes: sentences on what changed steps.
        progress: fold of the run's events.
        interrupted: what interruptions took; None: there were none.
        contention: factor by which other programs slowed computing; None: not measured.
    """
    if part == "step time":
        yield from changes
        if progress.stream_wait_s:
            yield f"steps waited {formatting.duration(progress.stream_wait_s)} for samples to arrive"
        if contention is not None and contention >= _SHARED:
            yield f"other programs used the processors, so that computing took {contention:.1f} times as long"
    elif part == "steps" and progress.finish_reason is not None:
        yield f"the run ended after step {formatting.count(progress.step)}{formatting.ending(progress.finish_reason)}"
    elif interrupted is not None:
        sentences = {
            "start-up": f"one start is predicted, and there were {interrupted.sessions}",
            "steps done again": f"{formatting.counted(interrupted.lost_steps, 'step')} since the last checkpoint",
            "recoveries": "workers were lost or came anew, and no prediction counts that",
        }
        yield from (text for name, text in sentences.items() if name == part)


def _parts_s(figures: dict[str, Compared], interrupted: Interrupted | None) -> dict[str, float]:
    """Return the seconds of run time beyond its prediction by where they come from, which add up to all of them.

    ``interrupted`` None: the run was not.
    """
    step_time, steps = figures["step time"], figures["steps"]
    run_time = figures["run time"]
    parts_s = {
        "step time": (step_time.measured - step_time.predicted) * steps.measured,
        "steps": (steps.measured - steps.predicted) * step_time.predicted,
        "start-up": figures["start-up"].measured - figures["start-up"].predicted,
        "steps done again": 0.0 if interrupted is None else interrupted.lost_s,
        "recoveries": 0.0 if interrupted is None else interrupted.recovery_s,
    }
    parts_s["evaluations and checkpoints"] = run_time.measured - run_time.predicted - sum(parts_s.values())
    return parts_s
