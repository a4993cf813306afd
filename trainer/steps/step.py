"""One training step up to the summed gradient: what every form of it takes and leaves behind.

Every micro-batch contributes its mean gradient times (its samples / B), and workers SUM: whatever the shares, the
result is the mean gradient of one machine with the whole batch of B samples. Where a loss is a mean over something else
(tokens), its counts stand for samples, and are added up over the workers before anything is compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.comm.compressor import Resumable
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.cross_entropy import cross_entropy_weight
from hetopt.trainer.data.fetch import Batch, samples_in
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.steps.noise_groups import NoiseSums
from hetopt.trainer.steps.precision import Autocast
from hetopt.trainer.steps.stopwatch import Mark
from hetopt.trainer.task import Loss, mean_of


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTrace:
    """What one step left behind besides the gradient.

    Attributes:
        loss_sum: sum of this worker's losses over its samples, a double on the device.
        start: before the first sample was fetched.
        backward_end: when this worker's last gradient was ready (what its pace waited included).
        reduce_end: when the gradient of all workers was ready.
        micro_batches: how many the worker's samples were computed in.
        waited_s: of the time until then, spent waiting for other workers.
        finite: whether the summed gradient may be applied; always true without loss scaling.
        noise: None: not measured.
        way: in which the gradient was exchanged; steps of the same way can be compared. Empty: it was not.
        exchange: None: it was not, or everything was summed as it is under backward.
        under_backward: whether it was exchanged while backward still computed.
        gradient_energy: squared norm of this worker's weighted gradient; None: nobody asks.
    """

    loss_sum: Tensor
    start: Mark
    backward_end: Mark
    reduce_end: Mark
    micro_batches: int
    waited_s: float = 0.0
    finite: bool = True
    noise: NoiseSums | None = None
    way: str = ""
    exchange: ExchangeStats | None = None
    under_backward: bool = False
    gradient_energy: float | None = None


class Step(Protocol):
    """Leaves the summed gradient in ``parameter.grad`` of every trainable parameter, the same bits on every rank."""

    @property
    def residual(self) -> Resumable:
        """What has not been sent yet, with all else that the exchange carries on; part of a checkpoint."""
        ...

    def warm_up(self, part: MicroBatch) -> None:
        """Do what a device does only the first time: compute a micro-batch, whose gradient is not wanted.

        Raises:
            DoesNotFit: it is too large for this worker's memory (see `hetopt.trainer.steps.local_gradient`).
        """
        ...

    def run(
        self,
        parts: Sequence[MicroBatch],
        global_batch_size: int,
        loss_scale: float | None,
        look_at: Sequence[float] = (),
    ) -> StepTrace:
        """Compute and exchange.

        Args:
            parts: this worker's micro-batches.
            global_batch_size: samples of the step over all workers.
            loss_scale: the fp16 loss scale of this step, the same on every rank; None: the gradient is not scaled.
            look_at: ratios to tell the kept energy at, by those forms that exchange the whole gradient.

        Raises:
            DoesNotFit: a micro-batch is too large for this worker's memory. Nothing of the step has left the worker,
                which may run it again in smaller micro-batches (see `hetopt.trainer.steps.local_gradient`).
        """
        ...


class Reader(Protocol):
    """Reads the samples of a step's micro-batches."""

    def read(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the device."""
        ...


class LossModule(nn.Module):
    """A model with its task's loss on top.

    Attributes:
        is_counted: whether the loss is a mean over something else than samples, as far as it was called or tested.
        count: of the last batch where the loss is counted, a double on the device.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], autocast: Autocast) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._autocast = autocast
        self.is_counted = False
        self.count: Tensor | None = None
        self._targets_per_sample = 0.0
        self._calls = 0

    def follow(self, *, counts: bool, targets_per_sample: float) -> None:
        """Weigh batches as a test of the loss found (see `hetopt.trainer.loss_test`).

        Args:
            counts: whether the loss is a mean over something else than samples.
            targets_per_sample: of a cross entropy that is a mean over samples while as many targets of each count.
        """
        self.is_counted, self._targets_per_sample = counts, targets_per_sample

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss over the batch, by samples or by what is counted."""
        with self._autocast():
            told = self._loss(self.model, batch)
        loss = told[0] if isinstance(told, tuple) else told
        if loss.dim() != 0:
            raise BadInput(
                f"The task's loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch, or a sum and its count",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise BadInput("The task's loss does not depend on its model.", hint="check the loss")
        if isinstance(told, tuple):
            self.is_counted = True
            self.count = torch.as_tensor(told[1], dtype=torch.float64, device=loss.device)
            return mean_of(told)
        if self._targets_per_sample:
            self._watch(loss, samples_in(batch) or 1)
        elif self.is_counted and (weight := cross_entropy_weight(loss)) is not None:
            self.count = weight.double()
        elif self.is_counted:
            raise BadInput(
                "The task's loss gives a sum and its count for some batches, and a mean for others.",
                hint="return (sum, count) for all of them",
            )
        return loss

    def _watch(self, loss: Tensor, samples: int) -> None:
        self._calls += 1
        # To look makes the host wait for a GPU.
        if loss.grad_fn is None or (loss.is_cuda and self._calls % _LOOK_EVERY):
            return
        weight = cross_entropy_weight(loss)
        if weight is None or abs(float(weight) - self._targets_per_sample * samples) > _SAME * samples:
            raise BadInput(
                "The task's loss leaves targets out of its mean (ignore_index) and did not when the run began, so that "
                "workers would weigh it wrongly.",
                hint="return the tuple (sum, count) from the loss",
            )


_LOOK_EVERY = 20

_SAME = 1e-3
"""Of a sample's targets: less than any that is left out."""


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes, in the model's order.

    Raises:
        BadInput: there are none, or some are not fp32.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise BadInput("The task's model has no parameters to train.", hint="check requires_grad")
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise BadInput(
                f"The task's model has {str(parameter.dtype).removeprefix('torch.')} parameters.",
                hint="keep parameters float32; the run's precision chooses bf16 or fp16 for the computation",
            )
    return parameters
