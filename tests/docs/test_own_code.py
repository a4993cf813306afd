"""Code that people bring: every example is in order and learns, and a converted script computes what it did."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._ports import own_port
from hetopt.trainer.check import check
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import fetch, set_epoch
from hetopt.trainer.task import evaluation_sums
from hetopt.trainer.tasks.load import load_task
from tests.disturbance import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASKS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SCRIPT = EXAMPLES / "script"
MOST_CHANGED_LINES = 5
LOSS = re.compile(r"loss (\S+)")

EPOCHS = {"vision.py": 2, "characters.py": 6, "transformer.py": 6, "diabetes.py": 3}


@pytest.mark.parametrize("name", TASKS)
def test_an_example_is_in_order(name: str) -> None:
    tied = "are one parameter"
    found = [one for one in check(f"{EXAMPLES / name}:task", None) if tied not in one.text]
    assert found == []


@pytest.mark.parametrize("name", TASKS)
def test_an_example_learns(name: str) -> None:
    """The metric of its target is better after a few epochs."""
    task = load_task(f"{EXAMPLES / name}:task")
    torch.manual_seed(0)
    data, model = task.data(None), task.model()
    optimizer = task.optimizer(model)

    def metric() -> float:
        sums = evaluation_sums(task, model, data.evaluation, range(len(data.evaluation)))
        return task.metrics(sums, len(data.evaluation))[task.target.metric]

    before = metric()
    cursor = SampleCursor(len(data.train), 0)
    model.train()
    while cursor.epoch < EPOCHS[name]:
        batch = cursor.take([task.batch_size])
        set_epoch(data.train, batch.epoch, 0)
        optimizer.zero_grad()
        task.loss(model, fetch(data.train, batch.slice(0).copy())).backward()
        optimizer.step()
    after = metric()
    assert after > 1.5 * before if task.target.higher_is_better else after < 0.85 * before


def test_the_conversion_changes_five_lines_at_most() -> None:
    before, after = ((SCRIPT / name).read_text().splitlines() for name in ("train.py", "train_hetopt.py"))
    stripped = [[line.strip() for line in lines[1:] if line.strip()] for lines in (before, after)]
    changed = [line for line in difflib.ndiff(*stripped) if line[0] == "+"]
    assert 0 < len(changed) <= MOST_CHANGED_LINES, changed


def start(name: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT / name), "--epochs", "2"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_converted_script_computes_what_it_did() -> None:
    """Alone to the last digit; and two workers end where one machine did."""
    address, port = own_port()
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        start("train.py"),
        start("train_hetopt.py"),
        *(start("train_hetopt.py", RANK=str(rank), LOCAL_RANK=str(rank), **meeting) for rank in range(2)),
    ]
    told = [process.communicate(timeout=PATIENCE_S) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0], [err for _, err in told]
    before, alone, *together = (out for out, _ in told)
    losses = [float(loss) for loss in LOSS.findall(before)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert [float(loss) for loss in LOSS.findall(alone)] == pytest.approx(losses, abs=1e-6)
    # Each prints the loss of its own half; the model they share is judged alike.
    accuracies = [re.findall(r"accuracy (\S+)", out) for out in (before, *together)]
    assert len(accuracies[0]) == 2
    assert accuracies[1] == accuracies[2]
    assert [float(one) for one in accuracies[1]] == pytest.approx([float(one) for one in accuracies[0]], abs=0.02)
