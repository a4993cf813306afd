"""Time to a quality over other links: the steps of one training run, and the time of a step on each kind of link.

What a step learns does not depend on how long it takes: a run says after which step a quality was reached and by which
method each step's gradient travelled, and a step of each method is timed on every kind of link.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._outcome import DATA
from benchmarks._rehearsal import By, Log
from hetopt.core.comm.composition import combine
from hetopt.core.run_spec import Compression

SMOOTHED_OVER = 3
"""Evaluations that a quality is the mean of: single ones differ by a point where nothing else does."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training task with its data, batch and quality metric.

    Attributes:
        task, batch, epochs: name of the task, global batch in samples, and length of a run.
        data: folder of its data under the shared data; None: it comes with the task.
        metric, higher_is_better: metric of quality, and which direction is better.
        points: units of the metric in one point.
    """

    task: str
    data: str | None
    batch: int
    epochs: float
    metric: str = "accuracy"
    higher_is_better: bool = True
    points: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Way:
    """The method by which gradients travelled in a step: trainer and compression."""

    by: By
    compression: Compression


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps whose gradients travelled by one method; ``sent_bytes`` of one worker in one step."""

    steps: int
    way: Way
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The evaluations and sent bytes of a run by step, whatever time its steps took.

    Attributes:
        stretches: consecutive steps by method, in order.
        evaluations: (steps done, quality then) of each; larger is better.
        dense_bytes: bytes of the whole gradient; 1 where none was exchanged.
    """

    stretches: tuple[Stretch, ...]
    evaluations: tuple[tuple[int, float], ...]
    dense_bytes: float

    @property
    def ways(self) -> dict[Way, float]:
        """The mean bytes that a worker sent in a step, by method."""
        steps: dict[Way, int] = {}
        sent: dict[Way, float] = {}
        for stretch in self.stretches:
            steps[stretch.way] = steps.get(stretch.way, 0) + stretch.steps
            sent[stretch.way] = sent.get(stretch.way, 0.0) + stretch.steps * stretch.sent_bytes
        return {way: sent[way] / steps[way] for way in steps}

    @property
    def sent_bytes(self) -> float:
        """The bytes that one worker sent in the whole run."""
        return sum(stretch.steps * stretch.sent_bytes for stretch in self.stretches)

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return sum(stretch.steps for stretch in self.stretches)

    def over(self, step_time_s: Mapping[Way, float]) -> list[tuple[float, float]]:
        """Return the seconds until each evaluation, with its quality, for a given step time of each method."""
        points: list[tuple[float, float]] = []
        done, done_s = 0, 0.0
        left = list(self.evaluations)
        for stretch in self.stretches:
            while left and left[0][0] <= done + stretch.steps:
                step, quality = left.pop(0)
                points.append((done_s + (step - done) * step_time_s[stretch.way], quality))
            done, done_s = done + stretch.steps, done_s + stretch.steps * step_time_s[stretch.way]
        return points


def trajectory(log: Log, *, by: By, compression: Compression, job: Job) -> Trajectory:
    """Return the trajectory that a run's log records.

    Args:
        log: log of a run of ``job``.
        by: trainer of the run.
        compression: compression that the run was asked for; what a step's event names counts in its place.
        job: job, whose metric counts.
    """
    sign = 1 if job.higher_is_better else -1
    stretches, evaluations, dense_bytes = [], [], 1.0
    exchange = next((event["exchange"] for event in log if "exchange" in event), None)
    for event in log:
        if event["event"] == "step":
            # Of a period whose every step was one between two ways nothing is told: it counts with the one before.
            exchange = event.get("exchange", exchange)
            averages = event.get("sync")
            if exchange is None:  # parameters are averaged, and no gradient ever travelled
                way, sent_bytes = Way(by=by, compression=compression), 0.0
            elif by == "hetopt":
                way, sent_bytes = Way(by=by, compression=_in_use(compression, exchange)), float(exchange["sent_bytes"])
            else:
                hook = "ddp" if exchange["way"] == "none" else by
                way, sent_bytes = Way(by=hook, compression=Compression()), float(exchange["sent_bytes"])
            if exchange is not None:
                dense_bytes = float(exchange["dense_bytes"])
            if averages is not None:
                sent_bytes = averages["sent_bytes"] / event["steps"]
            stretches.append(Stretch(steps=int(event["steps"]), way=way, sent_bytes=sent_bytes))
        elif event["event"] == "evaluated":
            evaluations.append((int(event["step"]), sign * float(event["metrics"][job.metric])))
    return Trajectory(stretches=tuple(stretches), evaluations=tuple(evaluations), dense_bytes=dense_bytes)


def _in_use(compression: Compression, exchange: Mapping[str, str | float]) -> Compression:
    """Return the compression of a step, where a controller has left the one that the run was asked for."""
    name, collective = str(exchange["compressor"]), str(exchange["collective"])
    memory = combine(compression.name, memory=compression.memory, collective=compression.collective).memory
    if name != compression.name:
        return Compression(name=name, ratio=float(exchange["ratio"]), collective=collective, memory=memory)
    return compression.model_copy(
        update={"ratio": float(exchange["ratio"]), "collective": collective, "memory": memory}
    )


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean curve of runs with different seeds, evaluation by evaluation; as long as the shortest."""
    return [
        (statistics.fmean(at for at, _ in points), statistics.fmean(quality for _, quality in points))
        for points in zip(*curves, strict=False)
    ]


def smoothed(measured: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a curve whose qualities are means of the last `SMOOTHED_OVER` evaluations; fewer at the beginning."""
    qualities = [quality for _, quality in measured]
    return [
        (at_s, sum(few) / len(few))
        for place, (at_s, _) in enumerate(measured)
        for few in [qualities[max(0, place + 1 - SMOOTHED_OVER) : place + 1]]
    ]


def reached_s(measured: Sequence[tuple[float, float]], quality: float) -> float | None:
    """Return the seconds until the smoothed quality was reached; None if it never was."""
    usual = smoothed(measured)
    return time_to(usual, quality) if any(smooth >= quality for _, smooth in usual) else None


def final(measured: Sequence[tuple[float, float]]) -> float:
    """Return the smoothed quality at the end."""
    return smoothed(measured)[-1][1]


def qualities(log: Log, job: Job) -> list[tuple[float, float]]:
    """Return the seconds trained until each evaluation, evaluations left out, with the metric; larger is better.

    Evaluations are what the benchmark looks with: they take equally long on every side, and no pace is kept in them.
    """
    sign = 1 if job.higher_is_better else -1
    trained_s, points = 0.0, []
    for event in log:
        if event["event"] == "step":
            trained_s += event["steps"] * (event["step_time_s"] + event.get("control_s", 0.0))
        elif event["event"] == "evaluated":
            points.append((trained_s, sign * event["metrics"][job.metric]))
    return points


def time_to(measured: Sequence[tuple[float, float]], quality: float) -> float:
    """Return the seconds until a quality was first reached, interpolated between evaluations.

    Args:
        measured: (seconds, quality) of each evaluation, in order, at least one.
        quality: to reach; larger is better.

    Raises:
        ValueError: it was never reached.
    """
    before_s, before = measured[0][0], measured[0][1]
    for at_s, reached in measured:
        if reached >= quality:
            part = (quality - before) / (reached - before) if reached > before else 1.0
            return before_s + min(1.0, max(0.0, part)) * (at_s - before_s)
        before_s, before = at_s, reached
    raise ValueError(f"a quality of {quality} was never reached")


def data_folder(job: Job) -> Path | None:
    """Return the folder of the job's data; None if it is not on this machine."""
    if job.data is None:
        return None
    return DATA / job.data if (DATA / job.data).is_dir() else None
