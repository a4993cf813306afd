"""The promises on public step times of real clusters, one default configuration for all folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetopt.core.step_samples import StepSample, read_samples
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from tests.work import calls_of

FOLDERS = ("cifar10-aws", "bert-aws", "ncf-aws", "cifar10-rtx", "bert-rtx", "ncf-rtx")


def read(shared_data: Path, folder: str, name: str) -> tuple[StepSample, ...]:
    with (shared_data / "step-traces" / folder / f"{name}.jsonl").open() as lines:
        return read_samples(lines, origin=name)


def scored(shown: tuple[StepSample, ...], asked: tuple[StepSample, ...]) -> tuple[float, float, float]:
    """Median and 90th percentile of the error, and coverage."""
    found = StepTimeModel.fit(observe(shown), {}).predict(asked)
    true = np.array([sample.step_time_s for sample in asked])
    error = np.abs(np.array([one.step_time_s for one in found]) / true - 1)
    inside = [one.step_time_low_s <= t <= one.step_time_high_s for one, t in zip(found, true, strict=True)]
    return float(np.median(error)), float(np.percentile(error, 90)), float(np.mean(inside))


def test_without_a_probe(shared_data: Path) -> None:
    scores = [scored(read(shared_data, f, "profile"), read(shared_data, f, "answers")) for f in FOLDERS]
    assert np.mean([median for median, _, _ in scores]) < 0.11
    assert min(coverage for _, _, coverage in scores) > 0.80


@pytest.mark.parametrize(("count", "median", "p90"), [(1, 0.065, 0.17), (3, 0.055, 0.14)])
def test_with_probes_of_its_own_choosing(shared_data: Path, count: int, median: float, p90: float) -> None:
    scores = []
    for folder in FOLDERS:
        shown, answers = read(shared_data, folder, "profile"), read(shared_data, folder, "answers")
        probes = StepTimeModel.fit(observe(shown), {}).suggest(answers, count, [None] * len(answers))
        layouts = {answers[probe.row].layout for probe in probes}
        scores.append(
            scored(
                shown + tuple(sample for sample in answers if sample.layout in layouts),
                tuple(sample for sample in answers if sample.layout not in layouts),
            )
        )
    assert np.mean([one[0] for one in scores]) < median
    assert np.mean([one[1] for one in scores]) < p90
    assert min(one[2] for one in scores) > 0.80


def test_from_a_tenth_of_the_rows(shared_data: Path) -> None:
    scores = [scored(read(shared_data, f, "profile-10pct"), read(shared_data, f, "answers-90pct")) for f in FOLDERS]
    assert np.mean([one[0] for one in scores]) < 0.055
    assert np.mean([one[1] for one in scores]) < 0.15
    assert all(0.80 < one[2] <= 0.97 for one in scores)


def test_ten_times_the_rows_are_fitted_with_little_more_work(shared_data: Path) -> None:
    rows = read(shared_data, "ncf-aws", "answers") + read(shared_data, "ncf-aws", "profile")
    few, many = (observe(rows[:count]) for count in (200, 2000))
    StepTimeModel.fit(few, {})
    calls = [calls_of(lambda: StepTimeModel.fit(few, {})), calls_of(lambda: StepTimeModel.fit(many, {}))]
    assert calls[1] < 4 * calls[0]
