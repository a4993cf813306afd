"""`hetopt check`: every mistake that a task file can hold is found, with its line, before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetopt.trainer.check import check

GOOD = """\
import torch
from torch import nn
from torch.nn import functional
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData

def data(folder):
    inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    pairs = TensorPairs(inputs, inputs.sum(dim=1, keepdim=True))
    return TaskData(train=pairs, evaluation=pairs)

def model():
    return nn.Linear(5, 1)

def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def evaluate(model, batch):
    return {"square": (model(batch[0]) - batch[1]).square().sum()}

def metrics(sums, samples):
    return {"mse": sums["square"] / samples}

task = Task(
    name="mine", model=model, data=data, loss=loss, optimizer=optimizer, batch_size=8,
    evaluate=evaluate, metrics=metrics, target=Target(metric="mse", value=0.1, higher_is_better=False),
)
"""

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "extending" / "task.md"
SMALLEST = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
"""As the documents have it."""


def line_of(text: str, part: str) -> int:
    """Where a part of a file is, from 1."""
    return 1 + next(number for number, line in enumerate(text.splitlines()) if part in line)


# What replaces what in the good file, the sentence that is expected, and the line that it names.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "raises": ("return nn.Linear(5, 1)", "return nn.Linear(5)", "model raised TypeError", "return nn.Linear(5)"),
    "no model": ("return nn.Linear(5, 1)", "return 5", "gives a int, not Module", "def model"),
    "no data": ("return TaskData(train=pairs, evaluation=pairs)", "return pairs", "not TaskData", "def data"),
    "empty": ("train=pairs", "train=TensorPairs(inputs[:0], inputs[:0])", "has no samples", "return TaskData"),
    "unknown length": ("train=pairs", "train=(x for x in pairs)", "not a map-style dataset", "return TaskData"),
    "sum": (".mse_loss(model(batch[0]), batch[1])", ".mse_loss(model(batch[0]), batch[1], reduction='sum')",
            "is a sum over samples", "def loss"),
    "no scalar": (".mse_loss(model(batch[0]), batch[1])", ".mse_loss(model(batch[0]), batch[1], reduction='none')",
                  r"has shape \(4, 1\)", "def loss"),
    "no tensor": ("return functional.mse_loss", "return 0.5 or functional.mse_loss", "is a float", "def loss"),
    "other loss": ("functional.mse_loss(model(batch[0]), batch[1])", "batch[1].mean()", "depend on its model",
                   "def loss"),
    "not finite": ("functional.mse_loss(model(batch[0]), batch[1])", "(model(batch[0]) * torch.inf).mean()",
                   "loss of the first samples is", "def loss"),
    "half": ("return nn.Linear(5, 1)", "return nn.Linear(5, 1).half()", "float16 parameters", "def model"),
    "frozen": ("return nn.Linear(5, 1)", "return nn.Linear(5, 1).requires_grad_(False)", "no parameters to train",
               "def model"),
    "no optimizer": ("return torch.optim.SGD(model.parameters(), lr=0.1)", "return 0.1", "gives a float",
                     "def optimizer"),
    "closure": ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.LBFGS(model.parameters())",
                "LBFGS computes several gradients in a step", "def optimizer"),
    "sparse step": ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.SparseAdam(model.parameters())",
                    "The optimizer's step raised RuntimeError: SparseAdam", "def optimizer"),
    "several": ("return torch.optim.SGD(model.parameters(), lr=0.1)",
                "return [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]", "gives a list",
                "def optimizer"),
    "mean": (".square().sum()", ".square().mean()", "'square' of evaluate is no sum", "def evaluate"),
    "no sums": ('return {"square": (model(batch[0]) - batch[1]).square().sum()}', "return 5",
                "gives a int, not Mapping", "def evaluate"),
    "no metric": ('{"mse":', '{"rmse":', "'mse' is not among the task's metrics: rmse", "def metrics"),
    "metric raises": ('sums["square"]', 'sums["squares"]', "metrics raised KeyError", 'sums["squares"]'),
    "batch sizes": ("pairs = TensorPairs(inputs, inputs.sum(dim=1, keepdim=True))",
                    "pairs = Ragged(inputs, inputs.sum(dim=1, keepdim=True))\n"
                    "    Ragged.gather = lambda self, rows: (self.inputs[: 1 + len(rows) // 3], self.targets[:1])",
                    "A batch of 4 samples has 2 rows", "def data"),
}  # fmt: skip


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:task"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_with_its_line(name: str, tmp_path: Path) -> None:
    before, after, said, line = MISTAKES[name]
    assert before in GOOD
    text = GOOD.replace(before, after)
    if name == "batch sizes":
        text = text.replace("def data(", "class Ragged(TensorPairs): pass\n\ndef data(")
    found = [finding for finding in check(written(tmp_path, text), None) if finding.level == "error"]
    assert len(found) == 1, found
    assert re.search(said, found[0].text), found[0].text
    assert found[0].where.endswith(f"mine.py:{line_of(text, line)}"), found[0].where
    assert found[0].hint


def test_what_costs_something_is_a_warning(tmp_path: Path) -> None:
    loss = "return functional.mse_loss(model(batch[0]), batch[1])"
    found = check(written(tmp_path, GOOD.replace(loss, "return (model(batch[0]) - batch[1]).norm()")), None)
    assert [finding.level for finding in found] == ["warning"], found
    assert "the loss couples samples" in found[0].text
    assert "mine.py:" in found[0].where


@pytest.mark.parametrize("text", [GOOD, SMALLEST], ids=["whole", "smallest"])
def test_nothing_is_found_where_nothing_is_wrong(text: str, tmp_path: Path) -> None:
    assert check(written(tmp_path, text), None) == []


@pytest.mark.parametrize(
    ("text", "attribute", "said"),
    [
        (GOOD + "1 / 0\n", "task", "mine.py, line 31 failed: ZeroDivisionError"),
        (GOOD, "tusk", "called 'tusk'"),
        (GOOD, "GOOD", "called 'GOOD'"),
        (GOOD + "mine = 5\n", "mine", "is of type int"),
        (GOOD.replace("loss=loss", "loss=5"), "task", "loss that cannot be called"),
    ],
)
def test_the_command_says_it_in_a_sentence(
    text: str, attribute: str, said: str, tmp_path: Path, hetopt: Callable[..., Any]
) -> None:
    reference = written(tmp_path, text).replace(":task", f":{attribute}")
    answer = hetopt("check", reference, "--json")
    assert answer.code == 2
    assert said in json.loads(answer.out)[0]["text"]
    assert "error:" in answer.err
    assert "Traceback" not in answer.err
