"""A task whose computation is small beside its samples' way: the handwritten digits and two hidden layers."""

from __future__ import annotations

from torch import nn

from hetopt.trainer.task import Target, Task
from hetopt.trainer.tasks.digits import digits_data
from hetopt.trainer.tasks.recipes import classification, sgd


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def small_digits() -> Task:
    return classification(
        name="small-digits",
        model=_network,
        data=digits_data,
        optimizer=sgd(0.02),
        target=Target(metric="accuracy", value=0.95),
        batch_size=64,
    )
