"""How long a job's step takes on a GPU where it was never run, from GPUs where it was, by public measurements.

A mixed model of the log throughput ``y`` of a job on a GPU (Gelman and Hill 2007, chapter 12), normal in every part:

    y = level + x' (beta + sum_k phi_k(z) beta_k + s) + u + w + sum_k phi_k(z) w_k + h + r + e

    level       of the job; nothing is believed of it beforehand, one measured GPU fixes it
    x           what a GPU offers the job, logs: matrix rate in the job's precision, memory bandwidth, multiprocessors x
                clock, local batch size; and the compute capability
    beta        slopes of all jobs; ``beta_k``: of jobs like this one; ``s``: of this job alone, as a second GPU tells
    phi_k(z)    what a job is like: a radial basis of ``z``, the logs of its step and of its sample,
                seconds on a common GPU
    u, w, h     what a GPU, an architecture, and an architecture in half precision is better than its facts
    r, e        what this job finds in a GPU or an architecture; noise

Everything but the level shrinks to zero where nothing is known, so a GPU that no row of the data has needs no special
case. ``benchmarks.transfer`` writes the posterior of what jobs share; here it is conditioned on the GPUs that
were measured. Throughputs are of whole steps at one batch size, and hold where hosts are as those GPUs' usually are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetopt.optimizer.market.instance_type import Accelerator, AcceleratorModel

Array = NDArray[np.float64]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "default"]
"""What matrices are multiplied in. ``default`` is torch's own: TF32 in convolutions where there is such a unit, fp32
elsewhere."""

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {"": "default", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "amp_fp16": "fp16"}
)
"""By the names that step samples have."""

POSTERIOR = Path(__file__).parent / "gpu_posterior.npz"

FEATURES = 5
LEVEL_SD = 3.0
"""Of a job's level, a log: nothing is known of it."""

LENGTH = 1.5
"""Logs of seconds over which jobs are alike."""

POOLED_SLOPES = np.array([0.13, 0.46, 0.07, 0.0, 0.10])
"""By `features_of`, over all jobs: to bring a step to a common GPU, which only ``z`` needs, and not exactly."""

CORES_PER_MULTIPROCESSOR = {3: 192, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 12: 128}
"""Single-precision units by major capability (CUDA programming guide), but for 6.0 and 8.0, which have 64."""

GUESSED_RATE_LOG_SD = 0.1
"""Of a matrix rate that the vendor does not publish, taken to be the usual multiple of the single-precision rate."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's published facts.

    Attributes:
        key: name, memory and form, as the posterior names what it knows: "A100 40 SXM4".
        capability: NVIDIA's compute capability.
        fp32_tflops, tf32_tflops, fp16_tflops: peak rates of matrix products, dense.
        bandwidth_gb_per_s: of its memory.
        log_sd: what guessed facts add to the spread of its step time.
    """

    key: str
    capability: float
    fp32_tflops: float
    tf32_tflops: float
    fp16_tflops: float
    bandwidth_gb_per_s: float
    log_sd: float = 0.0

    def tflops(self, precision: Precision) -> float:
        """Peak rate of matrix products in a precision."""
        if precision == "fp32":
            return self.fp32_tflops
        if precision == "tf32":
            return self.tf32_tflops
        if precision == "default":
            return math.sqrt(self.fp32_tflops * self.tf32_tflops)
        return self.fp16_tflops

    @property
    def multiprocessor_ghz(self) -> float:
        """Multiprocessors times clock: a core makes two operations a cycle."""
        narrow = self.capability in (6.0, 8.0)
        return 1000 * self.fp32_tflops / (2 * (64 if narrow else CORES_PER_MULTIPROCESSOR[int(self.capability)]))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A GPU, what it computes in, and how many samples it takes a step."""

    gpu: Gpu
    precision: Precision
    batch_size: float

    @property
    def half(self) -> bool:
        """Whether matrices are multiplied in 16 bits."""
        return self.precision in ("fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step that was measured.

    Attributes:
        log_sd: how well that step is known.
    """

    place: Place
    step_time_s: float
    log_sd: float = 0.0

    @property
    def likeness(self) -> tuple[float, float]:
        """``z``: logs of the step's and of a sample's seconds, brought to a common GPU."""
        step = math.log(self.step_time_s) + float(features_of([self.place])[0] @ POOLED_SLOPES)
        return step, step - math.log(self.place.batch_size)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of what is this job's alone, in logs.

    Attributes:
        slopes: of its slopes, by feature.
        architecture, gpu: of what it finds in an architecture, in a GPU.
        noise: of one measurement against another of the same.
        calibration: factor on all intervals, from jobs that were left out.
    """

    slopes: Array
    architecture: float
    gpu: float
    noise: float
    calibration: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """The posterior of what jobs share.

    Attributes:
        gpus: keys of the GPUs that have been measured; ``capabilities``: their architectures.
        centres: of the radial basis, a row each.
        mean, covariance: of ``beta``, ``beta_k``, ``u``, ``w``, ``w_k``, ``h``, in the order of `shared_rows`.
    """

    gpus: tuple[str, ...]
    capabilities: tuple[float, ...]
    centres: Array
    mean: Array
    covariance: Array
    spread: Spread

    @cached_property
    def _whitening(self) -> Array:
        return whitening(self.centres)

    def basis(self, likeness: Sequence[float]) -> Array:
        """``phi(z)``."""
        return np.asarray(basis(self.centres, self._whitening, np.asarray([likeness]))[0], dtype=np.float64)

    def steps(self, measured: Sequence[Measured], asked: Sequence[Place]) -> tuple[Array, Array]:
        """Logs of the seconds of a step at each place that is asked about, and their covariance.

        Args:
            measured: at least one step of the same job.
            asked: where.
        """
        places = [*(one.place for one in measured), *asked]
        likeness = np.mean([one.likeness for one in measured], axis=0)
        features = features_of(places)
        rows = shared_rows(places, features, np.tile(self.basis(likeness.tolist()), (len(places), 1)), self)
        covariance = rows @ self.covariance @ rows.T + job_covariance(places, features, self.spread)
        known, new = slice(len(measured)), slice(len(measured), None)
        seen = covariance[known, known] + np.diag([one.log_sd**2 for one in measured])
        gain = np.linalg.solve(seen, covariance[known, new]).T
        batches = np.log([place.batch_size for place in places])
        throughput = batches[known] - np.log([one.step_time_s for one in measured])
        # The level's prior is wide and not infinite: about the first throughput it is as good as flat.
        middle, expected = throughput.mean(), rows @ self.mean
        told = middle + expected[new] + gain @ (throughput - middle - expected[known])
        left = covariance[new, new] - gain @ covariance[known, new]
        guessed = np.diag([place.gpu.log_sd**2 for place in asked])
        guessed += max((one.place.gpu.log_sd**2 for one in measured), default=0.0)
        return batches[new] - told, self.spread.calibration**2 * left + guessed


def features_of(places: Sequence[Place]) -> Array:
    """``x``, a row a place, centred on common GPUs."""
    return np.array(
        [
            (
                math.log(place.gpu.tflops(place.precision) / 60),
                math.log(place.gpu.bandwidth_gb_per_s / 700),
                math.log(place.gpu.multiprocessor_ghz / 110),
                math.log(place.batch_size / 64),
                place.gpu.capability - 7.5,
            )
            for place in places
        ]
    ).reshape(len(places), FEATURES)


def whitening(centres: Array) -> Array:
    """Makes values of the radial functions independent, each of variance one (Nystroem's approximation)."""
    values, vectors = np.linalg.eigh(_alike(centres, centres) + 1e-6 * np.eye(len(centres)))
    return np.asarray(vectors / np.sqrt(values), dtype=np.float64)


def basis(centres: Array, whitened: Array, likeness: Array) -> Array:
    """``phi``, a row for each row of ``likeness``."""
    return np.asarray(_alike(likeness, centres) @ whitened, dtype=np.float64)


def _alike(one: Array, other: Array) -> Array:
    squares = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-squares / (2 * LENGTH**2)), dtype=np.float64)


def shared_rows(places: Sequence[Place], features: Array, phi: Array, known: GpuModel) -> Array:
    """By what each place's throughput follows what jobs share; ``known`` names GPUs and architectures."""
    phi = np.concatenate([np.ones((len(places), 1)), phi], axis=1)
    gpu = np.array([[place.gpu.key == key for key in known.gpus] for place in places], dtype=np.float64)
    architecture = np.array(
        [[place.gpu.capability == capability for capability in known.capabilities] for place in places],
        dtype=np.float64,
    )
    half = np.array([[place.half] for place in places], dtype=np.float64)
    return np.concatenate([_outer(phi, features), gpu, _outer(phi, architecture), architecture * half], axis=1)


def _outer(phi: Array, columns: Array) -> Array:
    return np.asarray((phi[:, :, None] * columns[:, None, :]).reshape(len(phi), -1), dtype=np.float64)


def job_covariance(places: Sequence[Place], features: Array, spread: Spread) -> Array:
    """Of what is one job's alone, its level included, between places."""
    capability = np.array([place.gpu.capability for place in places])
    gpu = np.array([place.gpu.key for place in places])
    return np.asarray(
        LEVEL_SD**2
        + (features * spread.slopes**2) @ features.T
        + spread.architecture**2 * (capability[:, None] == capability[None])
        + spread.gpu**2 * (gpu[:, None] == gpu[None])
        + spread.noise**2 * np.eye(len(places)),
        dtype=np.float64,
    )


def save(model: GpuModel, path: Path = POSTERIOR) -> None:
    """Write a posterior as `gpu_model` reads it."""
    upper = np.triu_indices(len(model.mean))
    np.savez_compressed(
        path,
        gpus=np.array(model.gpus),
        capabilities=np.array(model.capabilities),
        centres=model.centres,
        mean=model.mean.astype(np.float32),
        covariance=model.covariance[upper].astype(np.float32),
        slopes=model.spread.slopes,
        spread=np.array([model.spread.architecture, model.spread.gpu, model.spread.noise, model.spread.calibration]),
    )


@cache
def gpu_model() -> GpuModel:
    """The posterior that ships."""
    with np.load(POSTERIOR) as stored:
        mean = stored["mean"].astype(np.float64)
        covariance = np.zeros((len(mean), len(mean)))
        upper = np.triu_indices(len(mean))
        covariance[upper] = stored["covariance"]
        covariance.T[upper] = stored["covariance"]
        architecture, gpu, noise, calibration = stored["spread"].tolist()
        return GpuModel(
            gpus=tuple(stored["gpus"].tolist()),
            capabilities=tuple(stored["capabilities"].tolist()),
            centres=stored["centres"],
            mean=mean,
            covariance=covariance,
            spread=Spread(
                slopes=stored["slopes"], architecture=architecture, gpu=gpu, noise=noise, calibration=calibration
            ),
        )


@lru_cache(maxsize=4096)
def transferred(
    measured: tuple[Measured, ...], asked: Place, alone: tuple[Measured, ...] = ()
) -> tuple[float, float, float]:
    """Log of the seconds of a step at one place, its standard deviation, and that from ``alone`` (default: from all).

    Catalogues have many types with one GPU, so answers are kept.
    """
    told, covariance = gpu_model().steps(measured, [asked])
    log_sd = math.sqrt(covariance[0, 0])
    if len(measured) == 1 or not alone:
        return float(told[0]), log_sd, log_sd
    return float(told[0]), log_sd, math.sqrt(gpu_model().steps(alone, [asked])[1][0, 0])


def gpu_of(accelerator: Accelerator) -> Gpu | None:
    """The facts of a catalogue's accelerator; absent where a rate or its bandwidth is not published.

    A slice of a GPU is taken to have its part of every rate.
    """
    model = accelerator.model
    if model is None or model.fp32_tflops is None or model.memory_bandwidth_gb_per_s is None:
        return None
    capability = _capability(model)
    newer = capability >= 8
    tf32, fp16, part = model.tf32_tensor_tflops, model.fp16_tensor_tflops, accelerator.fraction
    guessed = fp16 is None and capability >= 7
    fp16 = fp16 or model.fp32_tflops * (2 if capability >= 7 else 1)
    return Gpu(
        key=_key(model.name, model.memory_gib),
        capability=capability,
        fp32_tflops=part * model.fp32_tflops,
        tf32_tflops=part * (tf32 or (fp16 / 2 if newer else model.fp32_tflops)),
        fp16_tflops=part * fp16,
        bandwidth_gb_per_s=part * model.memory_bandwidth_gb_per_s,
        log_sd=math.hypot(GUESSED_RATE_LOG_SD if guessed else 0.0, 0.1 * math.log2(part)),
    )


MEASURED_RATES_LOG_SD = 0.25
"""Of a step's ratio where a GPU is known by the rates that were measured on it: its architecture is not known."""


def measured_gpu(*, fp32_tflops: float, bandwidth_gb_per_s: float) -> Gpu:
    """A GPU that no catalogue has, by what it was measured to do; taken to be like GPUs with TF32 and 16-bit units."""
    return Gpu(
        key="",
        capability=8.6,
        fp32_tflops=fp32_tflops,
        tf32_tflops=fp32_tflops,
        fp16_tflops=2 * fp32_tflops,
        bandwidth_gb_per_s=bandwidth_gb_per_s,
        log_sd=MEASURED_RATES_LOG_SD,
    )


def _capability(model: AcceleratorModel) -> float:
    """The compute capability, by the units that there are where it is not said."""
    if model.compute_capability is not None and int(float(model.compute_capability)) in CORES_PER_MULTIPROCESSOR:
        return float(model.compute_capability)
    if model.tf32_tensor_tflops is not None:
        return 8.6
    return 7.5 if model.fp16_tensor_tflops is not None else 6.1


SOCKETED = {"P100": "PCIe", "V100": "SXM2", "A100": "SXM4", "H100": "SXM5", "H200": "SXM5"}
"""The form in which clouds have these; others are cards."""


def _key(name: str, memory_gib: float) -> str:
    bare = name.removesuffix(" PCIe")
    form = "PCIe" if bare != name else SOCKETED.get(bare, "PCIe")
    return f"{bare} {memory_gib:g} {form}"
