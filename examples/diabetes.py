"""A task of your own: predict how diabetes progresses within a year from ten measurements of 442 patients.

    hetopt profile examples/diabetes.py:task -o diabetes.json

Everything that hetopt asks of a job is here: a model, data that has a length, a mean loss, an optimizer, sums that
judge a batch, metrics from those sums, and a target. The data (Efron et al. 2004) comes with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData

EVALUATED_PATIENTS = 82


def model() -> nn.Module:
    """Return a small network, [n, 10] -> [n, 1]."""
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def data(folder: Path | None) -> TaskData:
    """Return 360 patients to train on and 82 to evaluate on; inputs have variance 1, the progression is in hundreds.

    ``folder`` is what the user gave with --data; this data needs none.
    """
    patients = load_diabetes()
    inputs = torch.as_tensor(patients.data, dtype=torch.float32)
    inputs = (inputs - inputs.mean(dim=0)) / inputs.std(dim=0)
    progression = torch.as_tensor(patients.target, dtype=torch.float32).unsqueeze(1) / 100
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    evaluated, trained = order[:EVALUATED_PATIENTS], order[EVALUATED_PATIENTS:]
    return TaskData(
        train=TensorPairs(inputs[trained], progression[trained]),
        evaluation=TensorPairs(inputs[evaluated], progression[evaluated]),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss over the batch; hetopt weights the local batches of unequal workers."""
    inputs, progression = batch
    return functional.mse_loss(model(inputs), progression)


def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """Return sums over samples, never means: workers evaluate a part each, and the sums are added up."""
    inputs, progression = batch
    error = model(inputs) - progression
    return {"squared_error": error.square().sum(), "absolute_error": error.abs().sum()}


def metrics(sums: Mapping[str, float], samples: int) -> dict[str, float]:
    """Return the metrics by name, from the sums over all samples."""
    return {
        "mean_absolute_error": sums["absolute_error"] / samples,
        "root_mean_square_error": (sums["squared_error"] / samples) ** 0.5,
    }


task = Task(
    name="diabetes",
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9),
    evaluate=evaluate,
    metrics=metrics,
    target=Target(metric="mean_absolute_error", value=0.48, higher_is_better=False),
    batch_size=32,
    learning_rate_rule="sqrt",
)
