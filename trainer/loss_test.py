"""Whether the gradients of parts of a batch add up to that of the batch: measured once, before a run trains.

One worker computes its first batch whole, and then in two unequal parts, in evaluation mode but for BatchNorm. What
differs by more than rounding would differ between the workers of a run, too. Where random numbers are drawn even so,
nothing is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.context import Generators
from hetopt.trainer.data.fetch import Batch, samples_in
from hetopt.trainer.task import Loss, batch_norms, cross_entropy_weight, least_samples, mean_of

Kind: TypeAlias = Literal["untested", "mean", "counted", "sum", "coupled"]

KINDS: tuple[Kind, ...] = ("untested", "mean", "counted", "sum", "coupled")

TOLERANCE = 1e-3
"""Of relative differences of gradients in fp32, which round differently in parts; tokens in the place of samples make
differences of some percent."""

MOST_SAMPLES = 16
"""That are tried; enough for sequences to have unequal lengths."""


@dataclass(frozen=True, kw_only=True)
class LossTest:
    """What a loss is a mean over, and how far unequal parts of a batch are from the batch.

    Attributes:
        kind: ``mean``: over samples; ``counted``: over what the loss returns, or over the targets of its cross entropy;
            ``sum``: over samples; ``coupled``: none of these; ``untested``: there was a single sample.
        first: samples of the first part.
        second: samples of the second part.
        off: relative difference of the parts' gradient, weighted as workers weigh it; 0 where it is not known.
        targets_per_sample: weight of the cross entropy's targets, of one sample; 0 where the loss is no cross entropy.
    """

    kind: Kind = "untested"
    first: int = 0
    second: int = 0
    off: float = 0.0
    targets_per_sample: float = 0.0

    def to_list(self) -> list[float]:
        """Return the outcome as numbers, which workers can gather."""
        return [float(KINDS.index(self.kind)), *map(float, astuple(self)[1:])]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> LossTest:
        """Return the outcome that `to_list` wrote."""
        kind, first, second, off, targets = row
        return cls(kind=KINDS[int(kind)], first=int(first), second=int(second), off=off, targets_per_sample=targets)

    @property
    def problem(self) -> BadInput | None:
        """Why several workers cannot train such a loss; None: they can."""
        if self.kind != "sum":
            return None
        return BadInput(
            f"The loss is a sum over samples: the gradient of {self.first + self.second} samples is the sum of those "
            f"of {self.first} and of {self.second} of them.",
            hint='use reduction="mean", or return the tuple (loss, number of samples)',
        )

    @property
    def note(self) -> str:
        """How far shares are from one machine, and why, in a sentence; empty where they are not."""
        if self.off <= TOLERANCE:
            return ""
        why = "the loss couples samples or is a mean over something else than samples"
        if self.kind != "coupled":
            why = "layers normalise each worker's samples by themselves, as under DistributedDataParallel"
        return (
            f"shares differ from one machine by {100 * self.off:.1f} % (parts of {self.first} and {self.second} "
            f"samples): {why}"
        )

    @property
    def hint(self) -> str:
        """What brings the parts together, or at least nearer."""
        if self.kind == "coupled":
            return "return the tuple (sum, count) if it is a mean over tokens or weights; else keep shares large"
        return "use GroupNorm or LayerNorm where that matters; else keep shares large"


def probe_loss(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], read: Callable[[Sequence[int]], Batch], samples: int
) -> LossTest:
    """Compute the first samples whole and in two parts. Model and random numbers are then as before, gradients too.

    Args:
        model: on its device.
        loss: of the task.
        read: gives the batch of some samples, by their places in the first batch.
        samples: of the first batch, or as many as fit.
    """
    samples = min(samples, MOST_SAMPLES)
    if samples < 2:
        return LossTest()
    first = max(1, samples // 3)
    batches, sizes = _batches(read, samples, first), (samples, first, samples - first)
    if samples_in(batches[0]) != samples:
        return LossTest()

    def computed() -> list[_Computed]:
        return [_compute(model, loss, batch, size) for batch, size in zip(batches, sizes, strict=True)]

    with _as_before(model):
        model.eval()
        device = next(model.parameters()).device
        before = Generators.at(device)
        still = computed()
        draws = before.has_drawn(device)
        kind, off = _kind(still, draws=draws)
        targets = still[0].targets / samples if kind == "mean" else 0.0
        if kind != "coupled" and not draws and first >= least_samples(model):
            for norm in batch_norms(model):
                norm.train()
            off = _off(computed(), by=kind)
    return LossTest(kind=kind, first=first, second=samples - first, off=off, targets_per_sample=targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    gradient: Tensor
    samples: int
    count: float | None
    targets: float

    def weight(self, by: Kind) -> float:
        if by == "sum":
            return 1.0
        return float(self.samples) if by != "counted" else self.targets if self.count is None else self.count


def _compute(model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], batch: Batch, samples: int) -> _Computed:
    returned = loss(model, batch)
    count = float(returned[1]) if isinstance(returned, tuple) else None
    mean = mean_of(returned)
    targets = cross_entropy_weight(mean)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(mean, parameters, allow_unused=True)
    pieces = [
        (torch.zeros_like(parameter) if gradient is None else gradient.to_dense()).flatten()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return _Computed(
        gradient=torch.cat(pieces).double(),
        samples=samples,
        count=count,
        targets=0.0 if targets is None else float(targets),
    )


def _kind(computed: Sequence[_Computed], *, draws: bool) -> tuple[Kind, float]:
    """Return by which weights the parts are the whole, if by any, and how far they are from it."""
    whole, *parts = computed
    per_sample = whole.targets / whole.samples
    uneven = any(abs(part.targets - per_sample * part.samples) > TOLERANCE * whole.targets for part in parts)
    kind: Kind = "counted" if whole.count is not None or uneven else "mean"
    off = 0.0 if draws else _off(computed, by=kind)
    if off <= TOLERANCE:
        return kind, off
    is_sum = whole.count is None and _off(computed, by="sum") <= TOLERANCE
    return "sum" if is_sum else "coupled", off


def _off(computed: Sequence[_Computed], *, by: Kind) -> float:
    """Return the relative difference of two parts, weighted, from the whole."""
    whole, first, second = computed
    total = 1.0 if by == "sum" else first.weight(by) + second.weight(by)
    mean = (first.weight(by) * first.gradient + second.weight(by) * second.gradient) / (total or 1.0)
    return float((mean - whole.gradient).norm() / whole.gradient.norm().clamp(min=1e-30))


def _batches(read: Callable[[Sequence[int]], Batch], samples: int, first: int) -> list[Batch]:
    """Read the whole batch and its parts; samples that are changed at random as they are read, are so twice alike."""
    drawn, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    whole = read(range(samples))
    torch.set_rng_state(drawn)
    random.setstate(python)
    np.random.set_state(numpy)
    return [whole, read(range(first)), read(range(first, samples))]


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Modes, buffers and random numbers are afterwards what they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, kept in buffers:
                if not torch.equal(buffer, kept):  # a graph may need those that stayed as they were
                    buffer.copy_(kept)
