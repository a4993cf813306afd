"""The examples run: a task of one's own loads by its path, trains to its target, and judges any split alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetopt.core.profile import Profile
from hetopt.trainer.data.fetch import fetch
from hetopt.trainer.task import add_sums, evaluation_sums
from hetopt.trainer.tasks.load import load_task
from tests.face.test_predict import lines, measured

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MOST_EPOCHS = 30


def test_the_example_reaches_its_target() -> None:
    task = load_task(f"{EXAMPLES / 'diabetes.py'}:task")
    torch.manual_seed(0)
    data, model = task.data(None), task.model()
    optimizer = task.optimizer(model)
    order = torch.Generator().manual_seed(0)
    for _ in range(MOST_EPOCHS):
        indices = torch.randperm(len(data.train), generator=order).tolist()
        for start in range(0, len(indices), task.batch_size):
            optimizer.zero_grad()
            task.loss(model, fetch(data.train, indices[start : start + task.batch_size])).backward()
            optimizer.step()
        sums = evaluation_sums(task, model, data.evaluation, range(len(data.evaluation)))
        if task.target.reached(task.metrics(sums, len(data.evaluation))):
            return
    pytest.fail(f"the target was not reached in {MOST_EPOCHS} epochs")


def test_the_example_is_judged_alike_however_it_is_split() -> None:
    task = load_task(f"{EXAMPLES / 'diabetes.py'}:task")
    torch.manual_seed(0)
    data, model = task.data(None), task.model()
    everyone = range(len(data.evaluation))
    whole = evaluation_sums(task, model, data.evaluation, everyone)
    parts = [evaluation_sums(task, model, data.evaluation, everyone[part::3]) for part in range(3)]
    assert add_sums(parts) == pytest.approx(whole)


@pytest.mark.slow
def test_the_example_can_be_profiled(tmp_path: Path) -> None:
    """By the command that its docstring gives, in little time; with step times of somebody else's beside it."""
    output = tmp_path / "diabetes.json"
    (tmp_path / "steps.jsonl").write_text(lines(measured()), encoding="utf-8")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "hetopt.cli.main", "profile", f"{EXAMPLES / 'diabetes.py'}:task"),
            *("--from-samples", str(tmp_path / "steps.jsonl")),
            *("--workers", "1", "--time-budget", "5", "-o", str(output)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    profile = Profile.load(output)
    assert profile.job.dataset_size == 360
    assert len(profile.samples) == 15
