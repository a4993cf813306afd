"""How long a job's step takes on a GPU where it was never run, from GPUs where it was, by public measurements.

A mixed model of the log throughput ``y`` of a job on a GPU (Gelman and Hill 2007, chapter 12), normal in every part,
and so a Gaussian process (Rasmussen and Williams 2006, chapter 2):

    y = level + gain log b + x' (beta + beta_k(z) + s) + u + w + w_k(z) + h + r + e

    b, gain         local batch size, and how throughput follows it in the mean of jobs of its kind and of GPUs that
                    hold as much
    level           of the job; nothing is believed of it beforehand, one measured GPU fixes it
    x               what a GPU offers the job, logs: matrix rate in the job's precision, memory bandwidth,
                    multiprocessors x clock, local batch size, size of the memory; and the compute capability
    beta            slopes of all jobs; ``beta_k``: of jobs like this one; ``s``: of this job alone, as a second GPU
                    tells
    z               what a job is like: the kind of model, logs of its step and of its sample (seconds on a common
                    GPU), and of the operations a second that it reaches; jobs of a kind are the more alike the nearer
    u, w, w_k, h    what a GPU, an architecture (for all jobs, for jobs like this one), and an architecture in half
                    precision is better than its facts
    r, e            what this job finds in a GPU or an architecture; noise

For each `JobFacts` there is a model with standard deviations of its own, as less of ``z`` is known. Everything but the
level shrinks to zero where nothing is known, so a GPU that no row of the data has needs no special case. The
standard deviations of the parts are fitted by ``benchmarks.transfer``, which writes them beside the measurements; here
the process is conditioned on those and on the GPUs that were measured. Throughputs are of whole steps at one batch
size, and hold where hosts are as those GPUs' usually are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hetopt.core.step_samples import ModelKind
from hetopt.optimizer.market.instance_type import Accelerator, AcceleratorModel

Array = NDArray[np.float64]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "default"]
"""What matrices are multiplied in. ``default`` is torch's own: TF32 in convolutions where there is such a unit, fp32
elsewhere."""

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "": "default",
        "fp32": "fp32",
        "tf32": "tf32",
        "tf32_conv": "default",
        "bf16": "bf16",
        "amp_bf16": "bf16",
        "fp16": "fp16",
        "amp_fp16": "fp16",
    }
)
"""By the names that step samples have."""


def is_half(precision: Precision) -> bool:
    """Return whether matrices are multiplied in 16 bits in this precision."""
    return precision in ("fp16", "bf16")


POSTERIOR = Path(__file__).parent / "gpu_posterior.npz"

FEATURES = 6
LEVEL_SD = 3.0
"""Of a job's level, a log: nothing is known of it."""

KINDS: tuple[str, ...] = (*get_args(ModelKind), "other")
"""Of models; the last has what is none of the others."""

JobFacts = Literal["operations", "kind", "nothing"]
"""What is known of a job beside its steps: the kind of model and its operations, the kind alone, or neither."""

BATCH_GAIN = 0.35
"""Power of the local batch size that throughput follows where nothing else tells; slopes are of what is beside it. Jobs
that were left out are as well predicted with 0.3 to 0.5 (15.7 to 15.9 % in the median), and worse with 0 (17.4 %)."""

KIND_GAINS = np.array([0.15 * (kind == "recurrent") for kind in KINDS])
"""What kinds of models add to `BATCH_GAIN`. A recurrent one launches kernels for every step in time, whatever the
batch: with batches of 5 to 80, throughput of an LSTM follows their power of 0.48 on K80 and P100 and of 0.51 on V100
(Gavel's traces). Of Tacotron 2, left out, the error falls from 26 to 20 % in the median and from 70 to 52 % at the 90th
percentile; of all jobs left out, at the 90th percentile from 39.5 to 36.7 %. Spreads are fitted without it."""

LENGTH = 1.5
"""Logs of seconds over which jobs are alike; ``RATE_LENGTH``: of operations a second."""

RATE_LENGTH = 0.7

POOLED_SLOPES = np.array([0.13, 0.46, 0.07, 0.0, 0.10, 0.0])
"""By `features_of`, over all jobs: to bring a step to a common GPU, which only ``z`` needs, and not exactly."""

COMMON_MEMORY_GIB = 16.0
"""Of a common GPU, and of one that does not say."""

CORES_PER_MULTIPROCESSOR = {3: 192, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 12: 128}
"""Single-precision units by major capability (CUDA programming guide), but for 6.0 and 8.0, which have 64."""

GUESSED_RATE_LOG_SD = 0.1
"""Of a matrix rate that the vendor does not publish, taken to be the usual multiple of the single-precision rate."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published facts of a GPU: peak rates, memory bandwidth and size, and compute capability.

    Attributes:
        key: name, memory and form, as the posterior names what it knows: "A100 40 SXM4".
        capability: NVIDIA's compute capability.
        fp32_tflops, tf32_tflops, fp16_tflops: peak rates of matrix products, dense.
        bandwidth_gb_per_s, memory_gib: bandwidth and size of its memory.
        log_sd: what guessed facts add to the spread of its step time.
        halves_slowly: whether it multiplies slower in 16 bits than in 32, which nobody then does.
    """

    key: str
    capability: float
    fp32_tflops: float
    tf32_tflops: float
    fp16_tflops: float
    bandwidth_gb_per_s: float
    memory_gib: float
    log_sd: float = 0.0
    halves_slowly: bool = False

    def tflops(self, precision: Precision) -> float:
        """Return the GPU's peak dense rate of matrix products, TFLOP/s; 'default': between those of fp32 and TF32.

        The rates of fp16 and bf16 are the same.
        """
        if precision == "fp32":
            return self.fp32_tflops
        if precision == "tf32":
            return self.tf32_tflops
        if precision == "default":
            return math.sqrt(self.fp32_tflops * self.tf32_tflops)
        return self.fp16_tflops

    @property
    def multiprocessor_ghz(self) -> float:
        """Multiprocessors times clock, GHz: a core makes two operations a cycle."""
        narrow = self.capability in (6.0, 8.0)
        return 1000 * self.fp32_tflops / (2 * (64 if narrow else CORES_PER_MULTIPROCESSOR[int(self.capability)]))


@dataclass(frozen=True, kw_only=True)
class Place:
    """GPU, precision and local batch size (samples) of a measured or predicted step."""

    gpu: Gpu
    precision: Precision
    batch_size: float

    @property
    def half(self) -> bool:
        """Return whether matrices are multiplied in 16 bits."""
        return is_half(self.precision)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured seconds of a job's step on one GPU, in one precision and at one batch size.

    Attributes:
        log_sd: standard deviation of the log of ``step_time_s``.
        kind: kind of the model; None: not known.
        flops_per_sample: operations forward and backward; None: not counted.
    """

    place: Place
    step_time_s: float
    log_sd: float = 0.0
    kind: str | None = None
    flops_per_sample: float | None = None

    @property
    def likeness(self) -> tuple[float, float, float]:
        """Features ``z``: logs of the step's and a sample's seconds and of operations a second, as on a common GPU.

        The last is not a number (NaN) where operations were not counted.
        """
        step = math.log(self.step_time_s) + float(features_of([self.place])[0] @ POOLED_SLOPES)
        sample = step - math.log(self.place.batch_size)
        return step, sample, math.nan if self.flops_per_sample is None else math.log(self.flops_per_sample) - sample


SLOPES = ("all jobs", "alike", "alike in rate", "one job", "one column")
PARTS = (
    "gpu",
    "architecture",
    "architecture, alike",
    "architecture, alike in rate",
    "architecture, half",
    "architecture, job",
    "gpu, job",
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the parts of the GPU model, in logs of throughput.

    Attributes:
        slopes: deviation of each slope, a row for each of `SLOPES`, a column for each feature.
        parts: deviation of each of `PARTS`.
        noise: deviation of one measurement from another of the same.
        calibration: factor on all intervals, from jobs that were left out.
    """

    slopes: Array
    parts: Array
    noise: float
    calibration: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Table of jobs on GPUs as arrays, with an entry (a cell) for each job on a GPU.

    Attributes:
        features: ``x``, a row a cell.
        capability, gpu: compute capability and key of the GPU.
        half: whether matrices are multiplied in 16 bits.
        job: name of the job.
        column: index of the set of the job's runs, all of which have one level.
        kind: kind of the model, a place in `KINDS`.
        likeness: likeness of the column, see `Measured.likeness`.
    """

    features: Array
    capability: Array
    gpu: NDArray[np.str_]
    half: NDArray[np.bool_]
    job: NDArray[np.str_]
    column: NDArray[np.intp]
    kind: NDArray[np.intp]
    likeness: Array

    def __len__(self) -> int:
        return len(self.gpu)

    @property
    def kind_gain(self) -> Array:
        """The log throughput that the kind of each cell's model adds with the batch (`KIND_GAINS`), [cells]."""
        return KIND_GAINS[self.kind] * self.features[:, 3]

    @classmethod
    def of(cls, places: Sequence[Place], job: str, column: int, kind: int, likeness: Sequence[float]) -> Cells:
        """Return the cells of one job, one a place; ``column``: number of its set of runs, ``kind``: in `KINDS`."""
        return cls(
            features=features_of(places),
            capability=np.array([place.gpu.capability for place in places]),
            gpu=np.array([place.gpu.key for place in places], dtype=np.str_),
            half=np.array([place.half for place in places]),
            job=np.full(len(places), job),
            column=np.full(len(places), column),
            kind=np.full(len(places), kind),
            likeness=np.tile(np.asarray(likeness, dtype=np.float64), (len(places), 1)),
        )

    def when(self, facts: JobFacts) -> Cells:
        """Return the same cells with what is known of their jobs reduced to ``facts``: operations, kind, or nothing."""
        if facts == "operations":
            return self
        likeness = self.likeness.copy()
        likeness[:, 2] = math.nan
        kind = self.kind if facts == "kind" else np.zeros_like(self.kind)
        return replace(self, likeness=likeness, kind=kind)

    def chosen(self, which: NDArray[np.bool_]) -> Cells:
        """Return the cells for which the boolean mask ``which``, [cells], is true."""
        return Cells(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def alikeness(left: Cells, other: Cells) -> tuple[Array, Array]:
    """Return how alike jobs are, 0 to 1, for all pairs of cells: in step time, and also in FLOP/s, [left, other]."""
    squares = (((left.likeness[:, None, :2] - other.likeness[None, :, :2]) / LENGTH) ** 2).sum(axis=2)
    alike = _same(left.kind, other.kind) * np.exp(-squares / 2)
    # A job is like itself in the rate that nobody counted.
    away = (left.likeness[:, None, 2] - other.likeness[None, :, 2]) / RATE_LENGTH
    in_rate = alike * np.where(np.isnan(away), _same(left.job, other.job), np.exp(-(away**2) / 2))
    return alike, in_rate


def _covariance(cells: Cells, other: Cells, spread: Spread) -> Array:
    """Return the covariance of the log throughputs of pairs of cells, without noise."""
    every, of_alike, of_rate, of_job, of_column = (
        (cells.features * sds**2) @ other.features.T for sds in spread.slopes
    )
    gpu, architecture, alike_architecture, rate_architecture, half, own_architecture, own_gpu = (
        spread.parts**2
    ).tolist()
    alike, in_rate = alikeness(cells, other)
    job, column = _same(cells.job, other.job), _same(cells.column, other.column)
    covariance = every + of_alike * alike + of_rate * in_rate + of_job * job + (LEVEL_SD**2 + of_column) * column
    covariance += _same(cells.gpu, other.gpu) * (gpu + own_gpu * job)
    covariance += _same(cells.capability, other.capability) * (
        architecture
        + alike_architecture * alike
        + rate_architecture * in_rate
        + half * np.outer(cells.half, other.half)
        + own_architecture * job
    )
    return np.asarray(covariance, dtype=np.float64)


def _same(left: NDArray[Any], other: NDArray[Any]) -> Array:
    return np.asarray(left[:, None] == other[None], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """Mixed model of jobs' log throughputs on GPUs, conditioned on the public measurements.

    Attributes:
        cells: the public measurements.
        throughput: logs of samples a second over ``batch ** BATCH_GAIN``, less the mean of their column, [cells].
        spread: standard deviations of the model's parts.
        precision: inverse of the covariance of ``throughput``, [cells, cells].
    """

    cells: Cells
    throughput: Array
    spread: Spread
    precision: Array

    @classmethod
    def of(cls, cells: Cells, throughput: Array, spread: Spread) -> GpuModel:
        """Return the model conditioned on measured log throughputs, [cells]; inverts their covariance, [cells, cells].

        It takes a tenth of a second for a thousand cells.
        """
        among = _covariance(cells, cells, spread) + spread.noise**2 * np.eye(len(cells))
        return cls(
            cells=cells,
            throughput=throughput,
            spread=spread,
            precision=np.asarray(np.linalg.inv(among), dtype=np.float64),
        )

    @cached_property
    def _weights(self) -> Array:
        return self.precision @ (self.throughput - self.cells.kind_gain)

    def without(self, *, jobs: Sequence[str] = (), gpu: str | None = None) -> GpuModel:
        """Return the model as if some ``jobs``, and all cells of one ``gpu`` (by key), had not been measured."""
        kept = ~np.isin(self.cells.job, list(jobs)) & (self.cells.gpu != gpu)
        # The inverse of a part of a matrix, by the inverse of all of it (Schur complement).
        across = self.precision[np.ix_(kept, ~kept)]
        precision = self.precision[np.ix_(kept, kept)] - across @ np.linalg.solve(
            self.precision[np.ix_(~kept, ~kept)], across.T
        )
        return replace(self, cells=self.cells.chosen(kept), throughput=self.throughput[kept], precision=precision)

    def steps(self, measured: Sequence[Measured], asked: Sequence[Place]) -> tuple[Array, Array]:
        """Return the predicted log seconds of a job's step, [asked], and their covariance, [asked, asked].

        Args:
            measured: steps of the same job, at least one; the first that says a kind says the job's.
            asked: GPUs, precisions and batch sizes to predict.
        """
        kind = next((KINDS.index(step.kind) for step in measured if step.kind is not None), 0)
        at = [step.place for step in measured]
        cells = Cells.of([*at, *asked], "", -1, kind, np.mean([step.likeness for step in measured], axis=0).tolist())
        shared = _covariance(cells, self.cells, self.spread)
        among = _covariance(cells, cells, self.spread) - shared @ self.precision @ shared.T
        among += self.spread.noise**2 * np.eye(len(cells))
        expected = shared @ self._weights + cells.kind_gain
        known, new = slice(len(measured)), slice(len(measured), None)
        seen = among[known, known] + np.diag([step.log_sd**2 for step in measured])
        gain = np.linalg.solve(seen, among[known, new]).T
        batches, wanted = (np.log([place.batch_size for place in places]) for places in (at, asked))
        throughput = (1 - BATCH_GAIN) * batches - np.log([step.step_time_s for step in measured])
        # The level's prior is wide and not infinite: about the first throughput it is as good as flat.
        middle = throughput.mean()
        predicted = middle + expected[new] + gain @ (throughput - middle - expected[known])
        left = among[new, new] - gain @ among[known, new]
        guessed = np.diag([place.gpu.log_sd**2 for place in asked]) + max(place.gpu.log_sd**2 for place in at)
        return (1 - BATCH_GAIN) * wanted - predicted, self.spread.calibration**2 * left + guessed


def features_of(places: Sequence[Place]) -> Array:
    """Return the features ``x`` of places, [places, 6]: logs of rates, batch and memory, and capability, centred."""
    return np.array(
        [
            (
                math.log(place.gpu.tflops(place.precision) / 60),
                math.log(place.gpu.bandwidth_gb_per_s / 700),
                math.log(place.gpu.multiprocessor_ghz / 110),
                math.log(place.batch_size / 64),
                place.gpu.capability - 7.5,
                math.log(place.gpu.memory_gib / COMMON_MEMORY_GIB),
            )
            for place in places
        ]
    ).reshape(len(places), FEATURES)


def save(models: Mapping[JobFacts, GpuModel], path: Path = POSTERIOR) -> None:
    """Write the GPU models to a file that `gpu_model` reads: the measurements once, and the spread of each model.

    Numbers are rounded to 32 bits; a file there is replaced.
    """
    whole = models["operations"]
    cells = {field.name: getattr(whole.cells, field.name) for field in fields(Cells)}
    numbers = {name: column.astype(np.float32) for name, column in cells.items() if column.dtype == np.float64}
    spreads = {
        f"{facts} {name}": value
        for facts, model in models.items()
        for name, value in (
            ("slopes", model.spread.slopes),
            ("parts", model.spread.parts),
            ("noise", np.array([model.spread.noise, model.spread.calibration])),
        )
    }
    np.savez_compressed(path, **{**cells, **numbers, **spreads}, throughput=whole.throughput.astype(np.float32))


@cache
def gpu_model(facts: JobFacts) -> GpuModel:
    """Return the bundled GPU model for jobs of which ``facts`` are known: operations, kind, or nothing; cached."""
    with np.load(POSTERIOR) as stored:
        noise, calibration = stored[f"{facts} noise"].tolist()
        cells = {field.name: stored[field.name] for field in fields(Cells)}
        exact = {name: column.astype(np.float64) for name, column in cells.items() if column.dtype == np.float32}
        # Architectures are told apart by their numbers, to a tenth.
        exact["capability"] = exact["capability"].round(1)
        return GpuModel.of(
            Cells(**{**cells, **exact}).when(facts),
            stored["throughput"].astype(np.float64),
            Spread(
                slopes=stored[f"{facts} slopes"],
                parts=stored[f"{facts} parts"],
                noise=noise,
                calibration=calibration,
            ),
        )


def facts_of(measured: Sequence[Measured]) -> JobFacts:
    """Return how much is known of a job from its measured steps: 'operations' and kind, 'kind' alone, or 'nothing'."""
    if all(step.kind is None for step in measured):
        return "nothing"
    return "kind" if any(step.flops_per_sample is None for step in measured) else "operations"


@lru_cache(maxsize=4096)
def steps_elsewhere(measured: tuple[Measured, ...], asked: tuple[Place, ...]) -> tuple[Array, Array]:
    """Return the predicted log seconds of a job's step, [asked], and their covariance, [asked, asked]; cached.

    Args:
        measured: steps of the job, at least one; they also tell which bundled model is used (`facts_of`).
        asked: GPUs, precisions and batch sizes to predict; all in one call cost as much as one alone.
    """
    return gpu_model(facts_of(measured)).steps(measured, asked)


def gpu_of(accelerator: Accelerator) -> Gpu | None:
    """Return the published facts of a catalogue's accelerator; None where its fp32 rate or bandwidth is not known.

    Rates of matrix units that are not published are guessed from the others. A slice of a GPU is taken to have its part
    of every rate.
    """
    model = accelerator.model
    if model is None or model.fp32_tflops is None or model.memory_bandwidth_gb_per_s is None:
        return None
    capability = _capability(model)
    newer = capability >= 8
    tf32, fp16, part = model.tf32_tensor_tflops, model.fp16_tensor_tflops, accelerator.fraction
    guessed, halves_slowly = fp16 is None and capability >= 7, fp16 is not None and fp16 < model.fp32_tflops
    fp16 = max(model.fp32_tflops, fp16 or model.fp32_tflops * (2 if capability >= 7 else 1))
    return Gpu(
        key=_key(model.name, model.memory_gib),
        capability=capability,
        fp32_tflops=part * model.fp32_tflops,
        tf32_tflops=part * (tf32 or (fp16 / 2 if newer else model.fp32_tflops)),
        fp16_tflops=part * fp16,
        bandwidth_gb_per_s=part * model.memory_bandwidth_gb_per_s,
        memory_gib=part * model.memory_gib,
        log_sd=math.hypot(GUESSED_RATE_LOG_SD if guessed else 0.0, 0.1 * math.log2(part)),
        halves_slowly=halves_slowly,
    )


MEASURED_RATES_LOG_SD = 0.25
"""Of a step's ratio where a GPU is known by the rates that were measured on it: its architecture is not known."""


def measured_gpu(*, fp32_tflops: float, bandwidth_gb_per_s: float, memory_gib: float) -> Gpu:
    """Return a GPU that no catalogue has, by its measured rates; assumed to have TF32 and 16-bit matrix units."""
    return Gpu(
        key="",
        capability=8.6,
        fp32_tflops=fp32_tflops,
        tf32_tflops=fp32_tflops,
        fp16_tflops=2 * fp32_tflops,
        bandwidth_gb_per_s=bandwidth_gb_per_s,
        memory_gib=memory_gib,
        log_sd=MEASURED_RATES_LOG_SD,
    )


def _capability(model: AcceleratorModel) -> float:
    """Return a GPU's compute capability; where it is unpublished or unlisted here, a guess from its matrix units."""
    if model.compute_capability is not None and int(float(model.compute_capability)) in CORES_PER_MULTIPROCESSOR:
        return float(model.compute_capability)
    if model.tf32_tensor_tflops is not None:
        return 8.6
    return 7.5 if model.fp16_tensor_tflops is not None else 6.1


SOCKETED = {"P100": "PCIe", "V100": "SXM2", "A100": "SXM4", "H100": "SXM5", "H200": "SXM5"}
"""The form in which clouds have these; others are cards."""


def _key(name: str, memory_gib: float) -> str:
    """Return a GPU's key in `Cells`: name, memory in GiB and form, which is PCIe unless `SOCKETED` says otherwise."""
    bare = name.removesuffix(" PCIe")
    form = "PCIe" if bare != name else SOCKETED.get(bare, "PCIe")
    return f"{bare} {memory_gib:g} {form}"
