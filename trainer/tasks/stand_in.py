"""`stand-in`: a gradient of 1 MB that costs nothing to compute, in the place of a job that cannot be trained here.

A rehearsal of such a job's plan waits as long as the plan's machines would compute, and exchanges this gradient over
links that are as much slower as it is smaller. Nothing is learned: its loss means nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hetopt.core.run_spec import SHAPES, STAND_IN
from hetopt.trainer.data.fetch import Batch, TensorPairs, inputs_and_targets
from hetopt.trainer.task import Task, TaskData
from hetopt.trainer.tasks.recipes import sgd

SAMPLES = 65_536
_EVALUATED = 64


class _Sheets(nn.Module):
    """Model that returns each sample's number times the sum of all parameters: its gradient is dense and cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.sheets = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return [n] for numbers of shape [n, 1]."""
        total = torch.stack([sheet.sum() for sheet in self.sheets]).sum()
        return numbers[:, 0] * total


def _data(folder: Path | None) -> TaskData:
    """Return `SAMPLES` numbers from -1 to 1 as inputs, with targets of 0; no folder is read."""
    numbers = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    nothing = torch.zeros(SAMPLES)
    return TaskData(
        train=TensorPairs(numbers, nothing),
        evaluation=TensorPairs(numbers[:_EVALUATED], nothing[:_EVALUATED]),
        description="nothing: a stand-in for a job that is not trained here",
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean of the model's outputs, a scalar; targets do not count."""
    numbers, _ = inputs_and_targets(batch)
    output: Tensor = model(numbers)
    return output.mean()


def stand_in() -> Task:
    """Return the task `stand-in`, for rehearsals: a gradient of 1 MB, almost no computation, and no target."""
    return Task(
        name=STAND_IN,
        model=_Sheets,
        data=_data,
        loss=_loss,
        optimizer=sgd(1e-6),
        batch_size=64,
        learning_rate_rule="none",
        usual_epochs=1,
    )
