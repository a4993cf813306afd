"""Public step times (Pollux and Sia artifacts) as protocols: what to fit on, what to predict, and how that is scored.

The folder's README defines files, splits and scoring. A probe is the rows of one more layout, which leave the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._outcome import DATA
from hetopt.core.step_samples import StepSample, read_samples
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.priors import PRIORS, Normal

FOLDERS = ("cifar10-aws", "bert-aws", "ncf-aws", "cifar10-rtx", "bert-rtx", "ncf-rtx")
AZURE = ("cifar10-azure", "ncf-azure")
"""Folders that came later, with machines whose workers exchange through the host."""

EVERY = (*FOLDERS, *AZURE)

PROTOCOLS = ("no probe", "one probe", "three probes", "10 % of rows")
PROBES = {"one probe": 1, "three probes": 3}

Array = NDArray[np.float64]
Samples = tuple[StepSample, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A folder of step times under a protocol: samples to fit on, and samples to predict."""

    folder: str
    protocol: str
    shown: Samples
    asked: Samples


@dataclass(frozen=True, kw_only=True)
class Score:
    """The relative errors of a contender on a task, and the coverage of its 90 % intervals where it has any."""

    median: float
    p90: float
    bias: float
    coverage: float | None = None
    width: float | None = None


def traces() -> Path | None:
    """Return the folder of the step traces; None where it is not on this machine."""
    folder = DATA / "step-traces"
    return folder if folder.is_dir() else None


def read(root: Path, folder: str, name: str) -> Samples:
    """Return the step-time samples of one file of a folder."""
    path = root / folder / f"{name}.jsonl"
    with path.open(encoding="utf-8") as lines:
        return read_samples(lines, origin=str(path))


def tasks(root: Path, folder: str, priors: dict[str, Normal] | None = None) -> list[Task]:
    """Return the tasks of all protocols of a folder; hetopt suggests the probes without seeing a time of theirs."""
    profile, answers = read(root, folder, "profile"), read(root, folder, "answers")
    model = StepTimeModel.fit(observe(profile), {}, priors or PRIORS)
    probes = model.suggest(answers, max(PROBES.values()), [None] * len(answers))
    by_protocol = [Task(folder=folder, protocol="no probe", shown=profile, asked=answers)]
    for protocol, count in PROBES.items():
        layouts = {answers[probe.row].layout for probe in probes[:count]}
        by_protocol.append(
            Task(
                folder=folder,
                protocol=protocol,
                shown=profile + tuple(sample for sample in answers if sample.layout in layouts),
                asked=tuple(sample for sample in answers if sample.layout not in layouts),
            )
        )
    shown, asked = read(root, folder, "profile-10pct"), read(root, folder, "answers-90pct")
    by_protocol.append(Task(folder=folder, protocol="10 % of rows", shown=shown, asked=asked))
    return by_protocol


def score(predicted_s: Sequence[float] | Array, asked: Samples) -> Score:
    """Return the relative errors of predictions; one that is missing or not positive is off by 100 %."""
    true = _times(asked)
    predicted = np.asarray(predicted_s, dtype=np.float64)
    usable = np.isfinite(predicted) & (predicted > 0)
    error = np.where(usable, (predicted - true) / true, -1.0)
    return Score(
        median=float(np.median(np.abs(error))),
        p90=float(np.percentile(np.abs(error), 90)),
        bias=float(np.median(error)),
    )


def score_hetopt(task: Task, priors: dict[str, Normal] | None = None) -> Score:
    """Return the score of hetopt's default model on a task, with its intervals."""
    predicted = StepTimeModel.fit(observe(task.shown), {}, priors or PRIORS).predict(task.asked)
    true = _times(task.asked)
    low, high = (
        np.array([getattr(step_time, f"step_time_{end}_s") for step_time in predicted]) for end in ("low", "high")
    )
    plain = score([step_time.step_time_s for step_time in predicted], task.asked)
    return Score(
        median=plain.median,
        p90=plain.p90,
        bias=plain.bias,
        coverage=float(np.mean((low <= true) & (true <= high))),
        width=float(np.median((high - low) / true)),
    )


def _times(samples: Samples) -> Array:
    return np.array([sample.step_time_s for sample in samples], dtype=np.float64)
