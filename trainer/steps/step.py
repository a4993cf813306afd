"""One training step up to the summed gradient: what every form of it takes and leaves behind.

Every micro-batch contributes its mean gradient times (its samples / B), and workers SUM: whatever the shares, the
result is the mean gradient of one machine with the whole batch of B samples. Where a loss is a mean over something else
(tokens), its counts stand for samples, and are added up over the workers before anything is compressed.

Squared norms of the gradients of groups of samples, read off while a step is computed.

The noise of a gradient shows in how far the gradients of parts of a batch differ (`hetopt.core.training_laws`). Where
several workers train, each one's samples are a group; a single worker has its micro-batches.

Number formats of the forward and backward pass, and the loss scale that fp16 needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch, samples_in
from hetopt.trainer.steps.stopwatch import Mark
from hetopt.trainer.task import Loss, cross_entropy_weight, mean_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Chooses the number format of each operator (parameters and gradients stay fp32)."""

    device_type: str
    precision: Precision

    def __call__(self) -> AbstractContextManager[object]:
        """A context for one forward pass."""
        dtype = _DTYPES.get(self.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)


AMPERE = (8, 0)
"""Compute capability from which NVIDIA's matrix units do TF32 and bf16; before, torch does bf16 in software."""


def lacks_units(device: torch.device, precision: Precision) -> bool:
    """Whether a device would compute in a precision without any gain."""
    if device.type != "cuda":
        return precision == "tf32"
    return precision in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < AMPERE


@contextlib.contextmanager
def matrices_in(precision: Precision) -> Iterator[None]:
    """Products of fp32 matrices are TF32's meanwhile, backward too, if that is the precision; else as usual.

    GPUs before Ampere have no such units, and compute in fp32.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    if precision == "tf32":
        products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor that keeps small fp16 gradients above zero (Micikevicius et al. 2018, section 3.2).

    It halves when a gradient overflows and doubles after ``growth_interval`` steps without overflow. PyTorch's
    GradScaler does the same, but decides from this worker's gradient; here it is decided from the sum, which all
    workers hold, so that they skip the same steps and stay identical.
    """

    value: float = 2.0**16
    clean_steps: int = 0
    growth_interval: int = 2000

    def after(self, *, finite: bool) -> LossScale:
        """The scale after a step whose summed gradient was, or was not, finite."""
        if not finite:
            return LossScale(value=max(1.0, self.value / 2), growth_interval=self.growth_interval)
        if self.clean_steps + 1 >= self.growth_interval:
            return LossScale(value=self.value * 2, growth_interval=self.growth_interval)
        return LossScale(value=self.value, clean_steps=self.clean_steps + 1, growth_interval=self.growth_interval)


def initial_loss_scale(precision: Precision) -> LossScale | None:
    """The scale to start from; only fp16 needs one."""
    return LossScale() if precision == "fp16" else None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTrace:
    """What one step left behind besides the gradient.

    Attributes:
        loss_sum: sum of this worker's losses over its samples, a double on the device.
        start: before the first sample was fetched.
        backward_end: when this worker's last gradient was ready (what its pace waited included).
        reduce_end: when the gradient of all workers was ready.
        waited_s: of the time until then, spent waiting for other workers.
        finite: whether the summed gradient may be applied; always true without loss scaling.
        way: in which the gradient was exchanged; steps of the same way can be compared. Empty: it was not.
        exchange: None: it was not, or everything was summed as it is under backward.
        under_backward: whether it was exchanged while backward still computed.
        gradient_energy: squared norm of this worker's weighted gradient; None: nobody asks.
    """

    loss_sum: Tensor
    start: Mark
    backward_end: Mark
    reduce_end: Mark
    waited_s: float = 0.0
    finite: bool = True
    way: str = ""
    exchange: ExchangeStats | None = None
    under_backward: bool = False
    gradient_energy: float | None = None


class Reader(Protocol):
    """Reads the samples of a step's micro-batches."""

    def read(self, part: MicroBatch) -> Batch:
        """The samples of a micro-batch, on the device."""


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
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            said = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise BadInput(
                f"The task's loss {said}; it must be a scalar tensor.",
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
