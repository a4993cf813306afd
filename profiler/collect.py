"""The `Profile` made from a probe's event log: medians, lines, smoothed noise and mean gains."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from hetopt.core.artifact import Record, faults
from hetopt.core.calibration_benchmark import usual_mean
from hetopt.core.comm.cost import fit_alpha_beta
from hetopt.core.errors import RunFailed
from hetopt.core.memory import Precision, StepMemory, TrainingMemory, fit_memory
from hetopt.core.profile import (
    Collective,
    Device,
    Evaluation,
    ExchangeTrial,
    GainPoint,
    Host,
    Job,
    Link,
    NoiseSample,
    Pilot,
    PilotSync,
    PrecisionTrial,
    Profile,
    StepTime,
)
from hetopt.core.run_spec import ProbeSchedule
from hetopt.core.training_laws import Moments, smoothed
from hetopt.profiler.records import (
    EVENTS,
    FINISHED,
    STARTED,
    CompressorPoint,
    DeviceFacts,
    EvaluationCost,
    GainMeasured,
    LinkPoint,
    MemoryCounted,
    PilotSeen,
    PrecisionRefused,
    SweepEnded,
    SweepPoint,
    WorkerSteps,
)
from hetopt.profiler.schedule import LATER_PASSES, PILOT_SHARE, SWEEP_SHARE

Event = Mapping[str, object]
R = TypeVar("R", bound=Record)

LOW_GAIN_QUANTILE = 0.1

USUAL: Precision = "fp32"
"""Precision in which everything is measured that does not depend on the precision."""


def collect(
    events: Sequence[Event],
    schedule: ProbeSchedule,
    *,
    device_type: str,
    started_at_s: float,
    hetopt_version: str,
    data_dir: str | None = None,
) -> Profile:
    """Return the profile made from a probe's events.

    Sweeps and pilots of a precision that diverged (see `diverged`) are left out.

    Args:
        events: the whole log, in order; events that are not a probe's are passed over.
        schedule: schedule of the probe.
        device_type: catalogue name of the machine, or ``local``.
        started_at_s: when the processes were started, seconds since the epoch (the clock of the events).
        hetopt_version: version of this program.
        data_dir: folder of the data, for the record; None: the job has none.

    Raises:
        RunFailed: the log ends before the probe was finished, lacks a required event, has an event with impossible
            fields, or has no step of any batch size (memory was too small).
    """
    begun, ended = _time_of(events, STARTED), _time_of(events, FINISHED)
    if begun is None or ended is None:
        raise RunFailed(
            "the measurement ended before it was finished, so there is no profile.",
            hint="run `hetopt profile` again",
        )
    seen = _pilots_seen(events)
    broken = diverged(seen)
    left_out = {index for index, sweep in enumerate(schedule.sweeps) if sweep.precision in broken}
    points = [point for point in _all(events, SweepPoint) if point.sweep not in left_out]
    timed = [worker for point in points for worker in point.workers]
    yardsticks_s = [worker.yardstick_s for worker in timed if worker.yardstick_s is not None]
    # How fast the machine was in the mean, while its steps were timed.
    usual_s = statistics.fmean(yardsticks_s) if yardsticks_s else None
    contention_logs = [math.log(worker.contention) for worker in timed if worker.contention is not None]
    return Profile(
        created=datetime.datetime.fromtimestamp(started_at_s, datetime.UTC).isoformat(timespec="seconds"),
        hetopt_version=hetopt_version,
        seed=schedule.seed,
        data_dir=data_dir,
        host=_only(events, Host),
        job=(job := _only(events, Job)),
        devices=_devices(events, points, usual_s, schedule, device_type),
        links=_links(_all(events, LinkPoint)),
        noise=_noise(_all(events, NoiseSample)),
        gain=_gain(_all(events, GainMeasured), schedule.gain_ratios),
        exchange_trials=tuple(_all(events, ExchangeTrial)),
        pilots=(pilots := _pilots([pilot for pilot in seen if pilot.precision == USUAL], job)),
        precision_trials=_trials([pilot for pilot in seen if pilot.precision not in (USUAL, *broken)], pilots, job),
        evaluation_s=next((cost.evaluation_s for cost in _all(events, EvaluationCost)), None),
        yardstick_s=usual_s,
        yardstick_log_sd=statistics.stdev(map(math.log, yardsticks_s)) if len(yardsticks_s) > 1 else None,
        contention=math.exp(statistics.fmean(contention_logs)) if contention_logs else None,
        contention_log_sd=statistics.stdev(contention_logs) if len(contention_logs) > 1 else None,
        startup_s=max(0.0, begun - started_at_s),
        profiling_s=max(0.0, ended - started_at_s),
    )


def _devices(
    events: Sequence[Event],
    points: Sequence[SweepPoint],
    usual_s: float | None,
    schedule: ProbeSchedule,
    device_type: str,
) -> tuple[Device, ...]:
    """Return a device for each sweep that measured anything, step times scaled to the usual speed of the processor.

    Args:
        events: events of the probe.
        points: step times that the profile keeps.
        usual_s: mean time of the calibration micro-benchmark, in seconds; None: not timed, and step times stay as they
            are.
        schedule: schedule of the probe.
        device_type: catalogue name of the machine, or ``local``.

    Raises:
        RunFailed: no sweep measured anything.
    """
    facts = {fact.sweep: fact for fact in _all(events, DeviceFacts)}
    ended = {end.sweep: end for end in _all(events, SweepEnded)}
    compressors = _all(events, CompressorPoint)
    counted = _all(events, MemoryCounted)
    evaluating = max((cost.peak_bytes for cost in _all(events, EvaluationCost)), default=0)
    devices = []
    for index, sweep in enumerate(schedule.sweeps):
        swept = [point for point in points if point.sweep == index]
        fact = facts.get(index)
        if not swept or fact is None:
            continue
        counts = [
            event.memory.model_copy(update={"evaluating_bytes": evaluating})
            for event in counted
            if event.sweep == index
        ]
        devices.append(
            Device(
                type=device_type,
                kind=fact.kind,
                workers_per_host=sweep.concurrent_workers,
                threads_per_worker=sweep.threads_per_worker,
                precision=fact.precision,
                step_times=tuple(
                    _step_time(
                        size,
                        [
                            _at_usual_speed(worker, usual_s)
                            for point in swept
                            for worker in point.workers
                            if point.local_batch_size == size
                        ],
                    )
                    for size in sorted({point.local_batch_size for point in swept})
                ),
                memory_limit_bytes=_memory_limit(fact.memory_limit_bytes, swept, ended.get(index)),
                memory=joined(counts) if counts else None,
                compressors=tuple(point.cost for point in compressors if point.sweep == index),
                matmul_flops_per_s=fact.matmul_flops_per_s,
                copy_bytes_per_s=fact.copy_bytes_per_s,
            )
        )
    if not devices:
        raise RunFailed(
            "no training step could be measured: not even the smallest batch fits in memory.",
            hint="use a smaller model or a machine with more memory",
        )
    return tuple(devices)


def _at_usual_speed(worker: WorkerSteps, usual_s: float | None) -> WorkerSteps:
    """Return a worker's timed steps scaled by ``usual_s``, the mean yardstick, over the worker's own yardstick.

    Unchanged if either is None. Scaled steps scatter two thirds as much, as a shared processor changes its speed by a
    third within seconds.
    """
    factor = 1.0 if usual_s is None or worker.yardstick_s is None else usual_s / worker.yardstick_s
    scaled = {name: tuple(factor * time_s for time_s in getattr(worker, name)) for name in ("samples_s", "phases_s")}
    return worker.model_copy(update=scaled)


def _step_time(size: int, timed: Sequence[WorkerSteps]) -> StepTime:
    """Return the step time at a batch size, pooled over workers and passes: median times, and the largest peak memory.

    The peak is None if no worker knows its own. ``timed`` must not be empty.
    """
    samples = tuple(sample for worker in timed for sample in worker.samples_s)
    load_s, forward_s, backward_s, optimizer_s = (
        statistics.median(column) for column in zip(*(worker.phases_s for worker in timed), strict=True)
    )
    return StepTime(
        local_batch_size=size,
        step_time_s=statistics.median(samples),
        samples_s=samples,
        load_s=load_s,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        peak_memory_bytes=max(worker.peak_memory_bytes or 0 for worker in timed) or None,
    )


def _memory_limit(limit_bytes: int, points: Sequence[SweepPoint], end: SweepEnded | None) -> int:
    """Return a worker's memory limit in bytes, lowered below the predicted peak of a batch that did not fit.

    Args:
        limit_bytes: bytes that a worker may use, as logged for the device.
        points: step times with their peak memory.
        end: the batch that did not fit; None: all fitted.
    """
    peaks = [(point.local_batch_size, point.peak_memory_bytes) for point in points if point.peak_memory_bytes]
    if end is None or not peaks:
        return limit_bytes
    line = fit_memory([size for size, _ in peaks], [peak for _, peak in peaks])
    learnt = int(line.peak_bytes(end.local_batch_size)) - 1
    return min(limit_bytes, max(learnt, max(peak for _, peak in peaks)))


def _links(points: Sequence[LinkPoint]) -> tuple[Link, ...]:
    """Return a link for each collective, number of workers and scope: payloads, and the line through their times."""
    kinds: dict[tuple[Collective, int, bool], list[LinkPoint]] = {}
    for point in points:
        kinds.setdefault((point.collective, point.workers, point.across_hosts), []).append(point)
    return tuple(
        make_link(
            collective,
            workers=workers,
            across_hosts=across_hosts,
            payload_bytes=[point.payload_bytes for point in timed],
            time_s=[usual_mean(point.samples_s) for point in timed],
        )
        for (collective, workers, across_hosts), timed in kinds.items()
    )


def _noise(samples: Sequence[NoiseSample]) -> tuple[NoiseSample, ...]:
    """Return the noise samples, each with both moments averaged over itself and about twenty samples before."""
    moments = (
        Moments(gradient_variance=sample.gradient_variance, gradient_square=sample.gradient_square)
        for sample in samples
    )
    pairs = zip(samples, smoothed(moments), strict=True)
    return tuple(sample.model_copy(update=vars(average)) for sample, average in pairs)


def _gain(measured: Sequence[GainMeasured], ratios: Sequence[float]) -> tuple[GainPoint, ...]:
    """Return mean and `LOW_GAIN_QUANTILE` of the gain over sampled steps, ratios ascending; empty without samples.

    Raises:
        RunFailed: a sample has not one gain for each ratio.
    """
    if not measured:
        return ()
    if any(len(sample.gains) != len(ratios) for sample in measured):
        raise _broken(GainMeasured, "it has not one gain for each ratio of the schedule")
    gains = np.array([sample.gains for sample in measured])
    means, lows = gains.mean(axis=0), np.quantile(gains, LOW_GAIN_QUANTILE, axis=0)
    return tuple(
        GainPoint(ratio=ratio, gain=float(mean), gain_low=float(min(low, mean)))
        for ratio, mean, low in sorted(zip(ratios, means, lows, strict=True))
    )


def _pilots_seen(events: Iterable[Event]) -> tuple[PilotSeen, ...]:
    """Return the last event of each pilot.

    Raises:
        RunFailed: an event of a pilot has impossible fields.
    """
    return tuple({pilot.pilot: pilot for pilot in _all(events, PilotSeen)}.values())


def diverged(pilots: Sequence[PilotSeen]) -> frozenset[Precision]:
    """Return the precisions in which a pilot diverged and the fp32 pilot of the same batch and seed did not."""
    lost = [pilot for pilot in pilots if pilot.ended == "diverged"]
    anyway = {(pilot.global_batch_size, pilot.seed) for pilot in lost if pilot.precision == USUAL}
    return frozenset(
        pilot.precision
        for pilot in lost
        if pilot.precision != USUAL and (pilot.global_batch_size, pilot.seed) not in anyway
    )


def refusals(events: Sequence[Event]) -> tuple[str, ...]:
    """Return a sentence with the reason for each precision that a probe tried and left out; empty: none.

    Raises:
        RunFailed: an event of a pilot or of a refused precision has impossible fields.
    """
    lost = diverged(_pilots_seen(events))
    return (
        *(f"{event.precision} is left out: {event.reason}" for event in _all(events, PrecisionRefused)),
        *(f"{precision} is left out: a pilot diverged in it, and did not in {USUAL}" for precision in sorted(lost)),
    )


def _trials(seen: Sequence[PilotSeen], pilots: Sequence[Pilot], job: Job) -> tuple[PrecisionTrial, ...]:
    """Return the steps of each pilot in another precision beside those of the fp32 pilot with its batch size and seed.

    Steps are counted to the target, or to the best metric of the worse of both pilots if that is worse. Pilots without
    a partner are left out.
    """
    usual = {(pilot.global_batch_size, pilot.seed): pilot for pilot in pilots if pilot.sync is None}
    better = max if job.target_higher_is_better else min
    worse = min if job.target_higher_is_better else max
    trials = []
    for pilot in seen:
        other = usual.get((pilot.global_batch_size, pilot.seed))
        if other is None or not pilot.evaluations:
            continue
        both = (pilot.evaluations, other.evaluations)
        level = worse(*(better(evaluation.metric for evaluation in evaluations) for evaluations in both))
        level = worse(level, job.target_value)
        steps, usual_steps = (
            steps_to_target(evaluations, target=level, higher_is_better=job.target_higher_is_better)
            for evaluations in both
        )
        if steps is not None and usual_steps is not None:
            trials.append(
                PrecisionTrial(
                    precision=pilot.precision,
                    global_batch_size=pilot.global_batch_size,
                    seed=pilot.seed,
                    steps=steps,
                    usual_steps=usual_steps,
                )
            )
    return tuple(trials)


def _pilots(seen: Sequence[PilotSeen], job: Job) -> tuple[Pilot, ...]:
    """Return the profile's pilots: those that were evaluated after a step, and, with a sync, averaged at least once."""
    return tuple(
        Pilot(
            global_batch_size=pilot.global_batch_size,
            learning_rate_scale=pilot.learning_rate_scale,
            seed=pilot.seed,
            evaluations=pilot.evaluations,
            steps_to_target=steps_to_target(
                pilot.evaluations, target=job.target_value, higher_is_better=job.target_higher_is_better
            ),
            sync=None
            if pilot.sync is None
            else PilotSync(
                policy=pilot.sync,
                workers=pilot.workers,
                share=min(1.0, (pilot.synchronised or 0) / max(1, pilot.step)),
            ),
        )
        for pilot in seen
        if any(evaluation.step > 0 for evaluation in pilot.evaluations)
        and (pilot.sync is None or pilot.synchronised)  # else its workers never met
    )


def steps_to_target(evaluations: Sequence[Evaluation], *, target: float, higher_is_better: bool) -> float | None:
    """Return the optimizer steps until the metric reaches ``target``, linear between evaluations; None: it never does.

    At least 1. A target that the first evaluation reaches counts at that evaluation's step.

    Args:
        evaluations: evaluations in increasing order of step.
        target: value of the metric to reach.
        higher_is_better: whether reaching means at least (True) or at most (False) ``target``.
    """
    sign = 1.0 if higher_is_better else -1.0
    before: Evaluation | None = None
    for now in evaluations:
        if sign * (now.metric - target) >= 0:
            if before is None:
                return float(max(1, now.step))
            part = (target - before.metric) / (now.metric - before.metric)
            return max(1.0, before.step + part * (now.step - before.step))
        before = now
    return None


def _time_of(events: Iterable[Event], name: str) -> float | None:
    """Return when the last event called ``name`` was written, seconds since the epoch; None: there is none."""
    times = [event["time_s"] for event in events if event.get("event") == name]
    return float(times[-1]) if times and isinstance(times[-1], int | float) else None


def _all(events: Iterable[Event], kind: type[R]) -> list[R]:
    """Return the records of one kind among a log's events, in order; empty: there are none.

    Raises:
        RunFailed: an event of that kind has impossible fields.
    """
    try:
        return [
            kind.model_validate({key: value for key, value in event.items() if key not in ("event", "time_s")})
            for event in events
            if event.get("event") == EVENTS[kind]
        ]
    except ValidationError as error:
        raise _broken(kind, faults(error)[0]) from None


def _only(events: Iterable[Event], kind: type[R]) -> R:
    """Return the last record of one kind among a log's events.

    Raises:
        RunFailed: there is none, or one has impossible fields.
    """
    if not (records := _all(events, kind)):
        raise _broken(kind, "it is missing")
    return records[-1]


def _broken(kind: type[Record], why: str) -> RunFailed:
    return RunFailed(f"the measurement's log is damaged at '{EVENTS[kind]}': {why}.", hint="run `hetopt profile` again")


def joined(counts: Sequence[TrainingMemory]) -> TrainingMemory:
    """Merge memory counts of one job into one: of each figure, and at each micro-batch size, the larger.

    ``counts`` must not be empty.
    """
    steps: dict[int, StepMemory] = {}
    for step in (step for count in counts for step in count.steps):
        known = steps.get(step.samples, step)
        steps[step.samples] = StepMemory(
            samples=step.samples,
            computing_bytes=max(step.computing_bytes, known.computing_bytes),
            updating_bytes=max(step.updating_bytes, known.updating_bytes),
        )
    figures = TrainingMemory.model_fields.keys() - {"steps"}
    largest = {name: max(getattr(count, name) for count in counts) for name in figures}
    return TrainingMemory(**largest, steps=tuple(steps[samples] for samples in sorted(steps)))


FACTS_SHARE = 0.05

SHOWN: Mapping[object, tuple[str, float]] = {
    STARTED: ("looking at the model and the host", 0.0),
    EVENTS[Job]: ("", FACTS_SHARE),
    EVENTS[SweepPoint]: ("step time at batch {local_batch_size}", FACTS_SHARE),
    EVENTS[CompressorPoint]: ("compressing with {cost[name]}", FACTS_SHARE),
    EVENTS[EvaluationCost]: ("evaluation", FACTS_SHARE),
    EVENTS[LinkPoint]: ("{collective} of {payload_bytes:,} bytes", SWEEP_SHARE),
    EVENTS[PilotSeen]: ("pilot at batch {global_batch_size}, epoch {epoch:.3g}", 1 - PILOT_SHARE),
    FINISHED: ("done", 1.0),
}
"""Text to show for each kind of event, filled by its fields ("" keeps the text before), and the least share of a probe
that is done by then."""


def progress(events: Sequence[Event], schedule: ProbeSchedule) -> tuple[str, float]:
    """Return a probe's present work, in words, and the share of the probe that is done, 0 to 1, from its events so far.

    The share never falls. Without events the result is 'starting workers' and 0.
    """
    text, done = "starting workers", 0.0
    # Points and pilots may be left out, so that these shares are the most that each brings.
    sizes = (1 + LATER_PASSES) * sum(len(sweep.local_batch_sizes) for sweep in schedule.sweeps)
    brings = {
        EVENTS[SweepPoint]: (SWEEP_SHARE - FACTS_SHARE) / max(1, sizes),
        EVENTS[PilotSeen]: PILOT_SHARE / max(1, len(schedule.pilots)),
    }
    for event in events:
        shown, least = SHOWN.get(event.get("event"), ("", 0.0))
        text = shown.format_map(event) or text
        is_over = event.get("ended", "") is not None  # a pilot is seen several times
        done = max(done, least) + is_over * brings.get(str(event.get("event")), 0.0)
    return text, min(done, 1.0)


def make_link(
    collective: Collective, *, workers: int, across_hosts: bool, payload_bytes: Sequence[int], time_s: Sequence[float]
) -> Link:
    """Return the profile's `Link` of timed payloads: samples in order of size, and the line fitted through them.

    Args:
        collective: the collective that was timed.
        workers: number of workers that took part, at least 2.
        across_hosts: whether the workers were on several hosts.
        payload_bytes: bytes that one worker contributed, in any order.
        time_s: seconds of each payload, above 0.
    """
    pairs = sorted(zip(payload_bytes, time_s, strict=True))
    payloads, times = tuple(size for size, _ in pairs), tuple(time for _, time in pairs)
    line = fit_alpha_beta(payloads, times)
    return Link(
        scope="network" if across_hosts else "host",
        collective=collective,
        workers=workers,
        payload_bytes=payloads,
        time_s=times,
        latency_s=line.latency_s,
        bytes_per_s=line.bytes_per_s,
    )
