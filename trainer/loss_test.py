"""Whether the gradients of parts of a batch add up to that of the batch: tried once, before a run trains.

One worker computes its first batch whole, and then in two unequal parts, in evaluation mode and with the same random
numbers for the same sample. What differs by more than rounding would differ between the workers of a run, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import Batch, rows_of, same_batch, samples_in
from hetopt.trainer.inexact import BATCH_STATISTICS, WHOLE_BATCH
from hetopt.trainer.loss_reading import SAME, LossReading, read_loss
from hetopt.trainer.random_rows import RandomRows
from hetopt.trainer.task import Loss, mean_of

Kind: TypeAlias = Literal["untested", "mean", "counted", "read", "sum", "coupled"]

KINDS: tuple[Kind, ...] = ("untested", "mean", "counted", "read", "sum", "coupled")

TOLERANCE = 1e-3
"""Of relative differences of gradients in fp32, which round differently in parts; tokens in the place of samples make
differences of some percent."""

MOST_SAMPLES = 16
"""That are tried; enough for sequences to have unequal lengths."""


@dataclass(frozen=True, kw_only=True)
class LossTest:
    """What was found.

    Attributes:
        kind: ``mean``: over samples; ``counted``: over what the loss says itself; ``read``: over what its graph says;
            ``sum``: over samples; ``coupled``: none of these; ``untested``: there was a single sample.
        sizes: samples of the two parts.
        off: relative difference of the gradient of the parts, by the weights of the kind (of ``coupled``: by samples).
        may_leave_out: whether a mean over samples is a cross entropy that leaves out targets if the data say so.
        statistics_off: the same with BatchNorm in training mode; None: there is none.
    """

    kind: Kind
    sizes: tuple[int, int] = (0, 0)
    off: float = 0.0
    may_leave_out: bool = False
    statistics_off: float | None = None

    def to_list(self) -> list[float]:
        """The outcome as numbers, which workers can gather."""
        statistics = -1.0 if self.statistics_off is None else self.statistics_off
        return [float(KINDS.index(self.kind)), *map(float, self.sizes), self.off, float(self.may_leave_out), statistics]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> LossTest:
        """The outcome that `to_list` wrote."""
        kind, first, second, off, may_leave_out, statistics = row
        return cls(
            kind=KINDS[int(kind)],
            sizes=(int(first), int(second)),
            off=off,
            may_leave_out=bool(may_leave_out),
            statistics_off=None if statistics < 0 else statistics,
        )

    def problem(self, accepted: Sequence[str]) -> BadInput | None:
        """Why such a loss cannot be trained by several workers; None: it can, or that is accepted."""
        first, second = self.sizes
        if self.kind == "sum":
            return BadInput(
                f"The loss is a sum over samples: the gradient of {first + second} samples is the sum of those of "
                f"{first} and of {second} of them.",
                hint='use reduction="mean", or return the tuple (loss, number of samples)',
            )
        if self.kind == "coupled" and WHOLE_BATCH not in accepted:
            return BadInput(
                f"The loss is no mean over samples: the gradient of {first + second} samples differs by "
                f"{100 * self.off:.1f} % "
                f"from that of {first} and {second} of them.",
                hint="return the tuple (sum, count) if it is a mean over tokens or weights; if its samples depend on "
                f'each other (contrastive), accept the difference with Task(accept_inexact=("{WHOLE_BATCH}",))',
            )
        return None

    def note(self, model: nn.Module, accepted: Sequence[str]) -> str:
        """What is not exact and was not accepted, in a sentence; empty: nothing."""
        if self.statistics_off is None or self.statistics_off <= TOLERANCE or BATCH_STATISTICS in accepted:
            return ""
        names = [f"{name} ({type(one).__name__})" for name, one in batch_norms(model)]
        more = f" and {len(names) - 1} more normalise" if len(names) > 1 else " normalises"
        return (
            f"{names[0]}{more} each worker's samples by themselves: the gradient of {sum(self.sizes)} samples in parts "
            f"of {self.sizes[0]} and {self.sizes[1]} differs by {100 * self.statistics_off:.1f} %"
        )


STATISTICS_HINT = f'use GroupNorm or LayerNorm, or accept it with accept_inexact=("{BATCH_STATISTICS}",)'


def batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What normalises by the statistics of a batch, with names."""
    return [
        (name or type(one).__name__, one)
        for name, one in model.named_modules()
        if isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)
    ]


def probe_loss(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], read: Callable[[Sequence[int]], Batch], samples: int
) -> LossTest:
    """Try the first samples whole and in two parts. Model and random numbers are then as before, gradients too.

    Args:
        model: on its device.
        loss: of the task.
        read: gives the batch of some samples, by their places in the first batch.
        samples: of the first batch, or as many as fit.
    """
    samples = min(samples, MOST_SAMPLES)
    if samples < 2:
        return LossTest(kind="untested")
    sizes = (max(1, samples // 3), samples - max(1, samples // 3))
    batches = _batches(read, samples, sizes[0])
    if batches is None:
        return LossTest(kind="untested")
    trial = _Trial(model, loss, batches, sizes)
    with as_before(model):
        model.eval()
        test = trial.compare()
        norms = [one for _, one in batch_norms(model)]
        if norms and sizes[0] > 1:
            for one in norms:
                one.train()
            test = LossTest(
                kind=test.kind,
                sizes=sizes,
                off=test.off,
                may_leave_out=test.may_leave_out,
                statistics_off=trial.difference(test.kind),
            )
    return test


class _Trial:
    """A batch and its two parts."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Loss],
        batches: Sequence[Batch],
        sizes: tuple[int, int],
    ) -> None:
        self._model = model
        self._loss = loss
        self._batches = batches
        self._sizes = sizes
        self._parameters = [one for one in model.parameters() if one.requires_grad]

    def compare(self) -> LossTest:
        """By which weights the parts are the whole, if by any."""
        whole, first, second = self._computed()
        by_samples = _off(whole.gradient, first, second, float(self._sizes[0]), float(self._sizes[1]))
        if whole.count is not None:
            assert first.count is not None
            assert second.count is not None
            off = _off(whole.gradient, first, second, first.count, second.count)
            return self._test("counted" if off <= TOLERANCE else "coupled", off)
        readings = (whole.reading, first.reading, second.reading)
        if all(one.kind == "counted" or one.may_be_counted for one in readings) and any(
            one.kind == "counted" for one in readings
        ):
            counts = [one.denominator for one in readings]
            off = _off(whole.gradient, first, second, counts[1], counts[2])
            if off <= TOLERANCE and abs(counts[1] + counts[2] - counts[0]) <= SAME * counts[0]:
                return self._test("read", off)
        if by_samples <= TOLERANCE:
            return self._test("mean", by_samples, may_leave_out=all(one.may_be_counted for one in readings))
        summed = (whole.gradient - first.gradient - second.gradient).norm() / whole.gradient.norm()
        return self._test("sum", float(summed)) if summed <= TOLERANCE else self._test("coupled", by_samples)

    def difference(self, kind: Kind) -> float:
        """Of the parts from the whole, by the weights of that kind."""
        whole, first, second = self._computed()
        if kind == "counted" and first.count is not None and second.count is not None:
            return _off(whole.gradient, first, second, first.count, second.count)
        if kind == "read":
            return _off(whole.gradient, first, second, first.reading.denominator, second.reading.denominator)
        return _off(whole.gradient, first, second, float(self._sizes[0]), float(self._sizes[1]))

    def _test(self, kind: Kind, off: float, *, may_leave_out: bool = False) -> LossTest:
        return LossTest(kind=kind, sizes=self._sizes, off=off, may_leave_out=may_leave_out)

    def _computed(self) -> tuple[_Computed, _Computed, _Computed]:
        first, second = self._sizes
        return (
            self._compute(self._batches[0], 0, first + second),
            self._compute(self._batches[1], 0, first),
            self._compute(self._batches[2], first, second),
        )

    def _compute(self, batch: Batch, begin: int, samples: int) -> _Computed:
        with RandomRows(begin, samples):
            told = self._loss(self._model, batch)
        loss, count = told if isinstance(told, tuple) else (told, None)
        reading = read_loss(loss, samples)
        found = torch.autograd.grad(mean_of(told), self._parameters, allow_unused=True)
        pieces = [
            torch.zeros_like(own).flatten() if one is None else one.to_dense().flatten()
            for own, one in zip(self._parameters, found, strict=True)
        ]
        return _Computed(
            gradient=torch.cat(pieces).double(), count=None if count is None else float(count), reading=reading
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    gradient: Tensor
    count: float | None
    reading: LossReading


def _off(whole: Tensor, first: _Computed, second: _Computed, left: float, right: float) -> float:
    """Relative difference of the mean of two parts, so weighted, from the whole."""
    mean = (left * first.gradient + right * second.gradient) / (left + right or 1.0)
    return float((mean - whole).norm() / whole.norm().clamp(min=1e-30))


def _batches(read: Callable[[Sequence[int]], Batch], samples: int, first: int) -> list[Batch] | None:
    """The whole batch and its parts: as workers would read them, or cut, where samples change as they are read."""
    everyone = range(samples)
    whole = read(everyone)
    if samples_in(whole) != samples:
        return None
    if same_batch(whole, read(everyone)):
        return [whole, read(everyone[:first]), read(everyone[first:])]
    return [whole, rows_of(whole, 0, first), rows_of(whole, first, samples)]


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Modes, buffers and random numbers are afterwards what they were."""
    modes = [(one, one.training) for one in model.modules()]
    buffers = [(one, one.clone()) for one in model.buffers()]
    devices = sorted({one.device.index or 0 for one in model.parameters() if one.is_cuda})
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
