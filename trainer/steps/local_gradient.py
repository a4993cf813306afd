"""Forward and backward over one worker's micro-batches, and what happens when one of them does not fit into memory.

A micro-batch larger than any that this worker has computed may not fit. Before it is tried, what a forward pass changes
besides gradients is kept, and it is put back if memory runs out: the step can then be computed again in smaller
micro-batches as if the larger one had never been tried. No sample is lost and none counts twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetopt.core.errors import RunFailed
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.generators import Generators
from hetopt.trainer.steps.step import LossModule, Reader

_RUNS_WITH_LESS = 1
"""Runs that prove nothing: the optimizer takes its memory at the end of the first."""

_WEIGHTS_KEPT = 64


class DoesNotFit(RunFailed):
    """A micro-batch of ``samples`` needs more memory than this worker has."""

    def __init__(self, part: MicroBatch) -> None:
        super().__init__(
            f"a micro-batch of {len(part)} samples does not fit into the memory of this worker.",
            hint="set max_local_batch_size of the worker",
        )
        self.part = part

    @property
    def samples(self) -> int:
        """The size that was too large."""
        return len(self.part)


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """What a forward pass changes besides gradients: the model's buffers and torch's random sequences, as they were."""

    buffers: tuple[tuple[Tensor, Tensor], ...]
    generators: Generators
    device: torch.device

    @classmethod
    def now(cls, model: nn.Module, device: torch.device) -> Before:
        """Keep them as they are."""
        return cls(
            buffers=tuple((buffer, buffer.clone()) for buffer in model.buffers()),
            generators=Generators.at(device),
            device=device,
        )

    def restore(self) -> None:
        """Restore the buffers and the random generators as they were."""
        with torch.no_grad():
            for buffer, kept in self.buffers:
                buffer.copy_(kept)
        self.generators.restore_generators(self.device)


class LocalGradient:
    """Accumulates a worker's part of the gradient in ``parameter.grad``.

    Args:
        model: whose gradient it is.
        forward: the mean loss of a batch; its backward pass accumulates the gradient.
        reader: of the samples.
        device: where all of it happens.
        counting: tells what the last loss was a mean over; None: over samples.

    Attributes:
        counted: what the losses of the last run were means over in all, a double on the device; None: over samples.
        part_counted: the same of its last micro-batch.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        forward: Callable[[Batch], Tensor],
        reader: Reader,
        device: torch.device,
        counting: LossModule | None = None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._reader = reader
        self._device = device
        self._counting = counting
        self.counted: Tensor | None = None
        self.part_counted: Tensor | None = None
        self._weights: dict[float, Tensor] = {}
        self._part: MicroBatch | None = None
        self._runs = 0
        self._proven = 0

    @property
    def proven(self) -> int:
        """Samples of the largest micro-batch that is known to fit."""
        return self._proven

    def try_out(self, part: MicroBatch) -> None:
        """Compute a micro-batch for nothing: its gradient is not wanted, and all else is put back.

        Raises:
            DoesNotFit: memory ran out.
        """
        before = Before.now(self._model, self._device)
        self._compute([part], 1.0, None, before)
        before.restore()

    def run(
        self,
        parts: Sequence[MicroBatch],
        factor: float,
        *,
        after: Callable[[MicroBatch], None] | None = None,
    ) -> Tensor:
        """Add ``factor * samples * mean gradient`` of every micro-batch; the sum of their losses over samples. Where
        the loss counts something else, that stands for samples.

        Args:
            parts: what to compute.
            factor: 1 / B, times the loss scale.
            after: called when the gradient of each has been added.

        Raises:
            DoesNotFit: memory ran out. Gradients are spoilt; everything else is as before if ``parts`` held a
                micro-batch larger than ``proven``.
        """
        largest = max(map(len, parts), default=0)
        before = Before.now(self._model, self._device) if largest > self._proven else None
        loss_sum = self._compute(parts, factor, after, before)
        self._runs += 1
        if self._runs > _RUNS_WITH_LESS:
            self._proven = max(self._proven, largest)
        return loss_sum

    def _compute(
        self,
        parts: Sequence[MicroBatch],
        factor: float,
        after: Callable[[MicroBatch], None] | None,
        before: Before | None,
    ) -> Tensor:
        """Accumulate; or put everything back and say what did not fit."""
        try:
            return self._accumulate(parts, factor, after)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._part is None:
                raise
        # Out here, where the error is gone: its traceback holds on to what filled the memory.
        if before is not None:
            before.restore()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise DoesNotFit(self._part)

    def _accumulate(
        self, parts: Sequence[MicroBatch], factor: float, after: Callable[[MicroBatch], None] | None
    ) -> Tensor:
        loss_sum: Tensor | None = None
        self.counted = self.part_counted = None
        if self._counting is not None and self._counting.is_counted:
            self.counted = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in parts:
            self._part = part
            loss = self._add(part, factor)
            summed = loss.detach().double() * len(part)
            if self.part_counted is not None and self.counted is not None:
                self.counted = self.counted + self.part_counted
                # A mean over nothing is no number.
                summed = torch.where(self.part_counted > 0, loss.detach().double() * self.part_counted, 0.0)
            loss_sum = summed if loss_sum is None else loss_sum + summed
            if after is not None:
                after(part)
        return torch.zeros((), dtype=torch.float64, device=self._device) if loss_sum is None else loss_sum

    def _add(self, part: MicroBatch, factor: float) -> Tensor:
        loss = self._forward(self._reader.read(part))
        # The weight enters as the gradient of the loss, which spares an operator forwards and one backwards.
        if self.counted is None or self._counting is None:
            weight = self._weight(len(part) * factor)
        else:
            self.part_counted = self._counting.count
            assert self.part_counted is not None
            weight = (self.part_counted * factor).to(loss.dtype)
        torch.autograd.backward(loss, weight)
        return loss

    def _weight(self, value: float) -> Tensor:
        weight = self._weights.get(value)
        if weight is None:
            if len(self._weights) > _WEIGHTS_KEPT:
                self._weights.clear()
            weight = self._weights[value] = torch.tensor(value, device=self._device)
        return weight


def half_of(samples: int, rank: int) -> int:
    """The micro-batch to try when one of so many samples does not fit.

    Raises:
        RunFailed: it was a single sample.
    """
    if samples == 1:
        raise RunFailed(
            f"worker {rank} has too little memory for a single sample.",
            hint="leave this worker out, or give it a device with more memory",
        )
    return samples // 2
