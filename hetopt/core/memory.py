"""The memory that training takes of a worker: a fixed part, and a part by the samples of a micro-batch.

Two measures. Of a *device*, all tensors that are alive at a time; they are the same on every device:

    peak(b) = parameters + buffers + gradient + optimizer state + residual
              + max(computing(b), updating(b), exchanging + fresh gradient, evaluating)

``b`` being the samples of a micro-batch. Between micro-batches that were counted, computing and updating go straight
from one to the next; beyond, on with the slope of the last ones. Of a *process*, the most it used, by a line in ``b``.

Lines are fitted by least squares on relative errors without negative coefficients (`non_negative`). That is own code,
as every plan and worker needs it: `scipy.optimize.nnls` gives the same (a test compares them), and its import takes 14
times as long as a bare python's start, where a whole plan may take 60 times.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from statistics import linear_regression
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt

from hetopt.core.artifact import Record

if TYPE_CHECKING:  # commands that fit nothing do not wait for it
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]

SLOPE_POINTS = 3
"""Number of the last counted sizes whose slope goes on beyond what was counted."""


class StepMemory(Record):
    """The bytes that a step of one micro-batch size takes beyond what is kept from step to step.

    Attributes:
        samples: of the micro-batch.
        computing_bytes: highest sum of the batch, saved activations, and what forward and backward take for a moment.
        updating_bytes: highest sum of what is left of that while the optimizer updates, and what the update takes.
    """

    samples: PositiveInt
    computing_bytes: PositiveInt = Field(
        description="the batch, saved activations and what forward and backward take for a moment, at the highest"
    )
    updating_bytes: NonNegativeInt = Field(
        description="what is left of that while the optimizer updates, and what it takes for a moment, at the highest"
    )


class ExchangeMemory(NamedTuple):
    """The bytes of the gradient exchange on a worker.

    Attributes:
        kept_bytes: kept from step to step (residuals).
        taken_bytes: taken while it runs.
    """

    kept_bytes: int = 0
    taken_bytes: int = 0


ALONE = ExchangeMemory()
"""Memory of no exchange: a single worker."""


class Blocks(NamedTuple):
    """The modules by which a model is sharded and recomputed: their number, and the bytes of its weights as multiplied.

    Attributes:
        number: number of blocks, one behind the other.
        share: fraction of all weights that lies in the largest block.
        weight_bytes: bytes of all weights of a replica, as they are multiplied with.
    """

    number: int
    share: float
    weight_bytes: float


class TrainingMemory(Record):
    """The bytes of one replica's tensors in training, counted: kept from step to step, and taken by a step.

    Attributes:
        parameter_bytes: of all parameters, trained or not.
        buffer_bytes: of the model's buffers.
        gradient_bytes: of the gradient.
        optimizer_bytes: of the optimizer's state after a step.
        evaluating_bytes: most that an evaluation takes.
        fresh_bytes: of gradients that backward makes anew, beside the copy that is exchanged; 0: there is no copy.
        steps: what a step takes, in increasing order of micro-batch size; at least one.
    """

    parameter_bytes: PositiveInt = Field(description="of all parameters, trained or not")
    buffer_bytes: NonNegativeInt = Field(description="of the model's buffers")
    gradient_bytes: PositiveInt
    optimizer_bytes: NonNegativeInt = Field(description="of the optimizer's state after a step")
    evaluating_bytes: NonNegativeInt = Field(default=0, description="taken by an evaluation, at the highest")
    fresh_bytes: NonNegativeInt = Field(
        default=0,
        description="of gradients that backward makes anew, of which what is exchanged is a copy: with a session",
    )
    steps: tuple[StepMemory, ...] = Field(min_length=1, description="in increasing order of samples")

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights, buffers, gradient and optimizer state, which are held from step to step."""
        return self.parameter_bytes + self.buffer_bytes + self.gradient_bytes + self.optimizer_bytes

    def peak_bytes(self, samples: int, exchange: ExchangeMemory = ALONE) -> float:
        """Return the peak bytes of a worker's tensors with micro-batches of ``samples``, gradient exchange included.

        Args:
            samples: of a micro-batch; other sizes than counted ones are interpolated, or go on with the last slope.
            exchange: memory of the gradient exchange; by default none.
        """
        step = max(self._along("computing_bytes", samples), self._along("updating_bytes", samples))
        exchanging = exchange.taken_bytes + self.fresh_bytes if exchange.taken_bytes else 0
        return self.kept_bytes + exchange.kept_bytes + max(step, exchanging, self.evaluating_bytes)

    def shared(
        self, blocks: Blocks, devices: int, *, regathers: bool = True, recomputes: bool = False
    ) -> TrainingMemory:
        """Return the memory of each of ``devices`` that share one replica by torch's ``fully_shard`` (FSDP2).

        A device keeps an equal part of weights, gradients and optimizer state. What a step takes beside is the highest
        of four moments. ``w`` are the weights of a block, ``g`` its gradient as backward makes it, and ``r`` in fp32
        on its way to the devices; ``W``, ``G``, ``R`` are those of what lies in no block; ``S`` is what the samples
        take, and ``L`` the number of blocks:

            W + 2 w         + S                forward is over: the last block, and the buffer in which weights arrive
            W + 2 w + G + r + S                backward computes a block, fetches the next, and sends the last gradient
            W + 2 w + G + g + r + S (1 - 1/L)  the block's own gradient is there, and its activations are not
                      G + R                    what lies in no block is sent last

        Weights that stay gathered until backward are those of L + 1 and then of L - 1 blocks, in the place of two. With
        activations recomputed, S is the inputs of blocks, 2 of the 34 bytes a token and width that a block keeps in 16
        bits (Korthikanti et al. 2022, section 4.1; Chen et al. 2016), and all of one block with the gradient of its
        widest layer, 34 and 8.

        Args:
            blocks: by which the model is gathered and recomputed.
            devices: number of devices that share the replica; 1: one has all of it.
            regathers: whether weights are freed after forward and gathered again for backward.
            recomputes: whether the activations of a block are computed again in backward.
        """
        count, block, weights, sent = blocks.number, blocks.share, blocks.weight_bytes, self.gradient_bytes
        rest, fresh = max(0.0, 1 - count * block), sent * weights / self.parameter_bytes
        copies = self.parameter_bytes - weights  # in 16 bits: devices that share gather these alone
        updating = self._along("updating_bytes", 0)
        kept, after = (min(1.0, 2 / 34 + 42 / 34 / count), 2 / 34) if recomputes else (1.0, 1 - 1 / count)
        gathered, later = (weights * (rest + block * (2 if regathers else count + more)) for more in (1, -1))
        backward = later + rest * fresh + block * sent
        moments = (
            [(gathered, kept), (backward, kept), (backward + block * fresh, after), (rest * (fresh + sent), 0.0)]
            if devices > 1
            else [(copies, kept)]
        )

        def on_each(step: StepMemory) -> StepMemory:
            """Return a step's memory on one of the devices: computing at the highest of ``moments``."""
            samples_bytes, left = max(0.0, step.computing_bytes - copies), step.updating_bytes - updating
            computing = max(fixed + share * samples_bytes for fixed, share in moments)
            return step.model_copy(
                update={"computing_bytes": round(computing), "updating_bytes": round(left + updating / devices)}
            )

        return self.model_copy(
            update={
                "parameter_bytes": math.ceil(self.parameter_bytes / devices),
                "gradient_bytes": math.ceil(sent / devices),
                "optimizer_bytes": math.ceil(self.optimizer_bytes / devices),
                "evaluating_bytes": self.evaluating_bytes + (round(gathered) if devices > 1 else 0),
                "steps": tuple(map(on_each, self.steps)),
            }
        )

    def largest_micro_batch(self, limit_bytes: float, exchange: ExchangeMemory = ALONE) -> int | None:
        """Return the largest micro-batch, in samples, that fits into ``limit_bytes``; 0: none does; None: any does.

        Any means: up to 2^40 samples.

        Args:
            limit_bytes: memory of the worker.
            exchange: memory of the gradient exchange; by default none.
        """
        return _largest_micro_batch(self, limit_bytes, exchange)

    def _along(self, column: str, samples: int) -> float:
        """Return the bytes that a field of `StepMemory` has at a micro-batch of ``samples``, never falling with them.

        Linear between counted sizes; beyond them, with the slope at that end.
        """
        sizes = [step.samples for step in self.steps]
        counted = list(accumulate((float(getattr(step, column)) for step in self.steps), max))
        if samples > sizes[-1]:
            return counted[-1] + _slope(sizes[-SLOPE_POINTS:], counted[-SLOPE_POINTS:]) * (samples - sizes[-1])
        if samples < sizes[0]:
            # Some is there for any number of samples: towards none it falls by what the first sizes show, at most.
            return max(counted[0] - _slope(sizes[:2], counted[:2]) * (sizes[0] - samples), 0.0)
        right = bisect_left(sizes, samples)
        left = max(0, right - 1)
        part = (samples - sizes[left]) / max(1, sizes[right] - sizes[left])
        return counted[left] + part * (counted[right] - counted[left])


MOST_DOUBLINGS = 41
"""Doublings of one sample beyond which no micro-batch is tried."""


@lru_cache(maxsize=1024)  # machines of many types have the same GPUs
def _largest_micro_batch(memory: TrainingMemory, limit_bytes: float, exchange: ExchangeMemory) -> int | None:
    peak = partial(memory.peak_bytes, exchange=exchange)
    beyond = next((size for power in range(MOST_DOUBLINGS) if peak(size := 2**power) > limit_bytes), None)
    if beyond is None:
        return None
    return bisect_right(range(beyond), limit_bytes, lo=max(1, beyond // 2), key=peak) - 1


def _slope(sizes: Sequence[int], counted: Sequence[float]) -> float:
    """Return the bytes of a sample by least squares; of a single size, its bytes over its samples."""
    return counted[0] / sizes[0] if len(sizes) == 1 else max(0.0, linear_regression(sizes, counted).slope)


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """A worker's peak memory as a line: ``peak_bytes = fixed_bytes + per_sample_bytes * local_batch_size``.

    Attributes:
        fixed_bytes: peak memory without samples.
        per_sample_bytes: growth with each sample of the local batch.
    """

    fixed_bytes: float
    per_sample_bytes: float

    def peak_bytes(self, local_batch_size: int) -> float:
        """Return the peak memory of one worker at a local batch size in samples, in bytes."""
        return self.fixed_bytes + self.per_sample_bytes * local_batch_size

    def largest_batch(self, limit_bytes: float) -> int | None:
        """Return the largest local batch size, in samples, within ``limit_bytes``; 0: none fits; None: any fits."""
        if self.per_sample_bytes <= 0:
            return None if self.fixed_bytes <= limit_bytes else 0
        return max(0, math.floor((limit_bytes - self.fixed_bytes) / self.per_sample_bytes))


def fit_memory(local_batch_sizes: Sequence[int], peak_bytes: Sequence[int]) -> MemoryLine:
    """Fit a worker's peak bytes as a line in its local batch size, never sloping down, by least squares.

    One batch size alone, or noise that shows no growth, gives the mean as a constant; a line that would start below 0
    goes through it.

    Args:
        local_batch_sizes: samples, at least one size.
        peak_bytes: peak memory at each size, above 0.
    """
    import numpy as np

    sizes, peaks = np.asarray(local_batch_sizes, dtype=np.float64), np.asarray(peak_bytes, dtype=np.float64)
    # Never below zero bytes before the first sample. Weighted so that it is absolute errors that count.
    fixed, slope = non_negative(np.stack([1 / peaks, sizes / peaks], axis=1), peaks**2).tolist()
    return MemoryLine(fixed_bytes=fixed, per_sample_bytes=slope)


def memory_limit_bytes(total_bytes: int, *, workers: int, fraction: float) -> int:
    """Return the bytes of each of ``workers`` workers that share ``fraction`` (0 to 1) of a memory equally."""
    return max(1, int(total_bytes * fraction) // workers)


Precision = Literal["fp32", "tf32", "bf16", "fp16"]
"""Precision in which matrices are multiplied: ``fp32`` is torch's default, ``tf32`` its switch for products on NVIDIA's
Ampere and later, ``bf16`` and ``fp16`` its autocast, the latter with a loss scale."""

Sharding = Literal["none", "grads", "full", "auto"]
"""What the devices of a machine share of a model: nothing (``none``); gradients and optimizer state (``grads``);
weights as well (``full``); or all that where one device cannot hold a replica (``auto``)."""


_ROUNDS = 30
_COLLINEAR = 1e-12  # of the product of both squared lengths


def non_negative(design: Array, weights: Array | None = None) -> Array:
    """Return the two coefficients ``c >= 0`` that minimise ``sum w (X c - 1)^2`` for ``design`` X [n, 2], all >= 0.

    Where the columns are collinear, the first takes all.

    Args:
        design: X, at least one row, its first column not all 0.
        weights: w [n]; None: all 1.
    """
    import numpy as np

    weighted = design if weights is None else design * weights[:, None]
    gram, target = weighted.T @ design, weighted.sum(axis=0)
    first = np.array([target[0] / gram[0, 0], 0.0])
    product = float(gram[0, 0] * gram[1, 1])
    determinant = product - float(gram[0, 1]) ** 2
    if determinant <= _COLLINEAR * product:
        return first
    free = np.array([gram[1, 1] * target[0] - gram[0, 1] * target[1], gram[0, 0] * target[1] - gram[0, 1] * target[0]])
    if (free >= 0).all():
        return free / determinant
    # The squares are a bowl: if its lowest point lies beyond one axis, the lowest that is allowed lies on that axis.
    return first if free[1] < 0 else np.array([0.0, target[1] / gram[1, 1]])


def robust_non_negative(design: Array, limit: Callable[[Array], float]) -> Array:
    """Return the two coefficients ``c >= 0`` that fit ``X c = 1`` by Huber's loss, for ``design`` X [n, 2], all >= 0.

    Residuals beyond the threshold count linearly (Huber 1964), by up to 30 rounds of reweighting.

    Args:
        design: X, as of `non_negative`.
        limit: returns the threshold, given the absolute residuals [n].
    """
    import numpy as np

    weights = np.ones(len(design))
    coefficients = non_negative(design)
    for _ in range(_ROUNDS):
        residuals = np.abs(design @ coefficients - 1)
        before, weights = weights, np.minimum(1.0, limit(residuals) / np.maximum(residuals, 1e-300))
        if np.array_equal(before, weights):
            break
        coefficients = non_negative(design, weights)
    return coefficients
