"""Workers of a session that train for themselves, and put together what they have learned now and then.

A step is counted by the batches that a script was given, not by what its optimizer did: a GradScaler may skip an update
on one worker alone, and the others must not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.model_vector import ModelVector
from hetopt.trainer.sync.sync_assembly import make_synchroniser
from hetopt.trainer.sync.synchroniser import Synchronizer


class Between:
    """Between epochs, and after the session, the model is the average of all workers'.

    Args:
        synchroniser: averages.
        model: this worker's.

    Attributes:
        synchroniser: as above.
    """

    def __init__(self, synchroniser: Synchronizer, model: nn.Module) -> None:
        self.synchroniser = synchroniser
        self._vector = ModelVector(model)
        self._paused = ExitStack()

    def pause(self) -> None:
        """An epoch is over: until `resume` the model is the average."""
        self._paused.enter_context(self.synchroniser.averaged())

    def resume(self) -> None:
        """Training goes on from this worker's own model."""
        self._paused.close()

    def end(self) -> None:
        """The model is the average from here on."""
        with self.synchroniser.averaged():
            average = self._vector.read()
        self.resume()
        self._vector.write(average)


def gradient_energy(parameters: Sequence[nn.Parameter], scale: float) -> float:
    """Squared norm of what backward left in ``.grad``, without the factor of a loss scale."""
    with torch.no_grad():
        found = [energy(one.grad.detach().reshape(-1).float()) for one in parameters if one.grad is not None]
    return sum(found) / scale**2


def synchroniser_of(
    spec: RunSpec,
    loader: Any,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    stopwatch: Stopwatch,
) -> Synchronizer:
    """Who brings the workers' models together.

    Args:
        spec: of the session, whose workers train for themselves.
        loader: the script's.
        model: this worker's; now the same on all of them.
        optimizer: of the script.
        device: where the model is.
        stopwatch: of the device.

    Raises:
        BadInput: rounds are counted in epochs, and nobody knows how long those are.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if is_stream and spec.sync.name == "fedavg":
        raise BadInput(
            "The rounds of fedavg are counted in passes over the data, and a stream does not say how long one is.",
            hint="use sync='local-sgd(8)', which counts steps",
        )
    synchroniser = make_synchroniser(
        spec,
        model,
        optimizer,
        device=device,
        clock=time.perf_counter,
        stopwatch=stopwatch,
        dataset_size=1 if is_stream else len(loader.dataset),
    )
    assert synchroniser is not None
    return synchroniser
