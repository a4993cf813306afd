"""Jobs that are trained until they are good, and when a run became so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._rehearsal import Log


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is trained until it is good.

    Attributes:
        task, batch, epochs: what is trained, with which global batch, for how long.
        data: its folder under the shared data; None: it comes with the task.
        metric, higher_is_better: what good is.
        points: units of the metric in one point.
        learning_rate_scale: of the task's rate. Where that is so large that rounding decides where training goes, final
            qualities of equal methods lie points apart.
    """

    task: str
    data: str | None
    batch: int
    epochs: float
    metric: str = "accuracy"
    higher_is_better: bool = True
    points: float = 0.01
    learning_rate_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PacedJob(Job):
    """A job on unequal hosts, whose best split computes for ``best_step_s``."""

    best_step_s: float


DIGITS = PacedJob(
    task="digits",
    data=None,
    batch=96,
    best_step_s=0.07,
    epochs=4,
)
BIG_JOBS = (
    PacedJob(
        task="resnet20-cifar10",
        data="cifar10",
        batch=128,
        best_step_s=0.55,
        epochs=5,
    ),
    PacedJob(
        task="lstm-small",
        data="wikitext-2",
        batch=40,
        best_step_s=1.0,
        epochs=1.5,
        metric="perplexity",
        higher_is_better=False,
        points=1.0,
        learning_rate_scale=0.25,
    ),
)


def qualities(log: Log, job: Job) -> list[tuple[float, float]]:
    """Seconds trained until each evaluation, without the evaluations before, and the metric; larger is better.

    Evaluations are what the benchmark looks with: they take equally long on every side, and no pace is kept in them.
    """
    sign = 1 if job.higher_is_better else -1
    trained_s, found = 0.0, []
    for event in log:
        if event["event"] == "step":
            trained_s += event["steps"] * (event["step_time_s"] + event.get("control_s", 0.0))
        elif event["event"] == "evaluated":
            found.append((trained_s, sign * event["metrics"][job.metric]))
    return found


def time_to(measured: Sequence[tuple[float, float]], quality: float) -> float:
    """Seconds until a quality was first reached, on the line between the evaluations before and after."""
    before_s, before = measured[0][0], measured[0][1]
    for at_s, reached in measured:
        if reached >= quality:
            part = (quality - before) / (reached - before) if reached > before else 1.0
            return before_s + min(1.0, max(0.0, part)) * (at_s - before_s)
        before_s, before = at_s, reached
    raise ValueError(f"a quality of {quality} was never reached")


def data_folder(job: Job) -> Path | None:
    """Where the job's data is, if it is here."""
    if job.data is None:
        return None
    base = Path(os.environ.get("HETOPT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    return base / job.data if (base / job.data).is_dir() else None
