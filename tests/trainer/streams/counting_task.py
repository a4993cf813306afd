"""A task whose model counts how often each sample was trained on.

The loss of sample i is ``-w[i]``, so a step of B samples adds ``learning rate / B`` to the weight of each. On a stream
with a linear, uncapped learning rate ``B / B0`` that is ``1 / B0``, whatever the batch: after training, ``w[i] B0`` is
how often sample i is in the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData

SAMPLES = 60_000
EXTRA = 8_000
"""Beyond an epoch: streams go on while a run ends."""


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES + EXTRA))


def samples(first: int, last: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """What a stream brings: the numbers of samples, and something beside them."""
    numbers = torch.arange(first, last, stride)
    return numbers, numbers.float()


def _data(folder: Path | None) -> TaskData:
    everything = TensorPairs(*samples(0, SAMPLES))
    return TaskData(train=everything, evaluation=TensorPairs(*samples(0, 8)))


def _loss(model: Counts, batch: tuple[Tensor, Tensor]) -> Tensor:
    return -model.weight[batch[0]].mean()


def counting() -> Task:
    return Task(
        name="counting",
        model=Counts,
        data=_data,
        loss=_loss,  # type: ignore[arg-type]  # its own model and batches
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        evaluate=lambda model, batch: {"zero": torch.zeros(())},
        metrics=lambda sums, count: {"zero": 0.0},
        target=Target(metric="zero", value=1.0),
        batch_size=16,
        learning_rate_rule="none",
    )
