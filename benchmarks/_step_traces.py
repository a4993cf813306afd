"""Public step times (Pollux and Sia artifacts) as protocols: what to fit on, what to predict, and how that is scored.

The folder's README defines files, splits and scoring. A probe is the rows of one more layout, which leave the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks._outcome import DATA
from hetopt.core.step_samples import StepSample, read_samples
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.physics import Array
from hetopt.optimizer.step_time.posterior import fit
from hetopt.optimizer.step_time.priors import LINK_CLASSES, PRIORS, Normal

FOLDERS = ("cifar10-aws", "bert-aws", "ncf-aws", "cifar10-rtx", "bert-rtx", "ncf-rtx")
AZURE = ("cifar10-azure", "ncf-azure")
"""Folders that came later, with machines whose workers exchange through the host."""

EVERY = (*FOLDERS, *AZURE)

PROBES = {"no probe": 0, "one probe": 1, "three probes": 3}
PROTOCOLS = (*PROBES, "10 % of rows")

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


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """What hetopt's model believes before it sees a sample: priors, and classes of links inside a machine."""

    priors: Mapping[str, Normal]
    classes: Sequence[Mapping[str, Normal]]

    def fitted(self, shown: Samples) -> StepTimeModel:
        """Return the model fitted to samples of machines that no catalogue knows."""
        return StepTimeModel(posterior=fit(observe(shown), priors=self.priors, classes=self.classes), catalog={})


DEFAULT = Beliefs(priors=PRIORS, classes=LINK_CLASSES)


def tasks(root: Path, folder: str, beliefs: Beliefs = DEFAULT) -> list[Task]:
    """Return the tasks of all protocols of a folder; hetopt suggests the probes without seeing a time of theirs."""
    profile, answers = read(root, folder, "profile"), read(root, folder, "answers")
    probes = beliefs.fitted(profile).suggest(answers, max(PROBES.values()), [None] * len(answers))
    probed = {protocol: {answers[probe.row].layout for probe in probes[:count]} for protocol, count in PROBES.items()}
    by_protocol = [
        Task(
            folder=folder,
            protocol=protocol,
            shown=profile + tuple(sample for sample in answers if sample.layout in layouts),
            asked=tuple(sample for sample in answers if sample.layout not in layouts),
        )
        for protocol, layouts in probed.items()
    ]
    tenth, rest = read(root, folder, "profile-10pct"), read(root, folder, "answers-90pct")
    return [*by_protocol, Task(folder=folder, protocol=PROTOCOLS[-1], shown=tenth, asked=rest)]


def score(predicted_s: Sequence[float] | Array, asked: Samples) -> Score:
    """Return the relative errors of predictions; one that is missing or not positive is off by 100 %."""
    true = np.array([sample.step_time_s for sample in asked])
    predicted = np.asarray(predicted_s, dtype=np.float64)
    usable = np.isfinite(predicted) & (predicted > 0)
    error = np.where(usable, (predicted - true) / true, -1.0)
    return Score(
        median=float(np.median(np.abs(error))),
        p90=float(np.percentile(np.abs(error), 90)),
        bias=float(np.median(error)),
    )


def score_hetopt(task: Task, beliefs: Beliefs = DEFAULT) -> Score:
    """Return the score of hetopt's model on a task, with its intervals."""
    predicted = beliefs.fitted(task.shown).predict(task.asked)
    true = np.array([sample.step_time_s for sample in task.asked])
    low, high = (
        np.array([getattr(step_time, f"step_time_{end}_s") for step_time in predicted]) for end in ("low", "high")
    )
    return replace(
        score([step_time.step_time_s for step_time in predicted], task.asked),
        coverage=float(np.mean((low <= true) & (true <= high))),
        width=float(np.median((high - low) / true)),
    )
