"""Fits to a profile that predictions are made from: lines through step times, links and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.cost import Operation, Primitive
from hetopt.core.errors import BadInput
from hetopt.core.memory import MemoryLine, Precision, fit_memory, robust_non_negative
from hetopt.core.profile import CompressorCost, Device, GainPoint, Link, Profile
from hetopt.optimizer.convergence.compression_penalty import ExchangeLosses, exchange_losses
from hetopt.optimizer.convergence.convergence import Convergence, fit_convergence

HUBER_RELATIVE = 0.03
"""Relative residual up to which a measurement counts fully (about the repeat noise of a quiet machine); beyond,
linearly."""

SPREAD_FLOOR = 0.03
"""Least log standard deviation of a fit: runs of one configuration on one machine differ by 2-5 % (DESIGN, models)."""

JITTER_LIMIT = 0.3
"""Largest relative spread of single steps that is believed: a machine so unsteady was busy with something else."""

UNSTEADY_LOG_SD = 0.15
"""Log standard deviation of a fit above which step times say more about the host's other work than about the job."""

SPREAD_ONE_BATCH_SIZE = 0.3
"""Log standard deviation of a fit where one batch size was measured, so that fixed and per-sample time cannot be told
apart."""


THREAD_SCALING = 0.85
"""Prior of eta in ``t ~ threads^-eta``, how step time falls with threads: small models leave many threads idle."""

THREAD_SCALING_SD = 0.15

LEAST_GROWTH = 0.1
"""Part of a step that must grow with its samples for the slope to be told from what measurements scatter."""


def times_as_long(law: Callable[[int], float], other: Callable[[int], float], samples: int) -> float:
    """Return the seconds of a step of ``samples`` samples by one step-time law over those by ``other``.

    Each law is a function from samples to seconds. Whole steps are compared, as a fitted slope may be next to nothing.
    """
    return law(samples) / other(samples)


@dataclass(frozen=True, kw_only=True)
class StepTimeLine:
    """Seconds of a step of ``b`` local samples, without exchange: ``max(floor_s, fixed_s + per_sample_s * b)``.

    Attributes:
        fixed_s: seconds paid whatever the batch (launching operators, the optimizer).
        per_sample_s: seconds a sample.
        floor_s: seconds that a step takes at least, however few samples; 0: no floor shows.
        log_sd: standard deviation of the log of (true / predicted) inside the measured range.
        jitter: relative standard deviation of single steps around their mean.
    """

    fixed_s: float
    per_sample_s: float
    floor_s: float
    log_sd: float
    jitter: float

    def time_s(self, local_batch_size: float) -> float:
        """Return the seconds that a worker computes for a step of ``local_batch_size`` samples, without exchange."""
        return max(self.floor_s, self.fixed_s + self.per_sample_s * local_batch_size)


@dataclass(frozen=True, kw_only=True)
class CompressorLine:
    """Seconds to compress and decompress one gradient by ratio, interpolated in its log, and flat outside.

    Attributes:
        log_ratios: logarithms of the measured ratios, ascending.
        compress_s: seconds to compress the gradient at each of them.
        decompress_s: seconds to decompress one payload at each of them.
    """

    log_ratios: tuple[float, ...]
    compress_s: tuple[float, ...]
    decompress_s: tuple[float, ...]

    def parts_s(self, ratio: float) -> tuple[float, float]:
        """Return seconds to compress a gradient at ``ratio``, and to decompress one payload.

        Ratios beyond the measured ones get the nearest one's seconds.
        """
        at = math.log(ratio)
        return (
            float(np.interp(at, self.log_ratios, self.compress_s)),
            float(np.interp(at, self.log_ratios, self.decompress_s)),
        )

    def time_s(self, ratio: float, payloads: int) -> float:
        """Return the seconds to compress one gradient at ``ratio``, and to decompress ``payloads`` payloads."""
        compress_s, each_s = self.parts_s(ratio)
        return compress_s + payloads * each_s


@dataclass(frozen=True, kw_only=True)
class FittedDevice:
    """Fits to one profiled kind of worker: step time by samples, peak memory and compressors.

    Attributes:
        device: the measurements.
        step_time: the whole step, loading and optimizer included.
        load_per_sample_s: part of the step's seconds a sample that fetches samples.
        optimizer_s: part of the step's seconds that is the optimizer's update.
        mean_to_median: mean over median step time; ``step_time`` includes this factor.
        memory: peak memory by samples; None: not measured at two batch sizes or more.
        compressors: cost of each measured compressor, by name.
    """

    device: Device
    step_time: StepTimeLine
    load_per_sample_s: float
    optimizer_s: float
    mean_to_median: float
    memory: MemoryLine | None
    compressors: dict[str, CompressorLine]

    def time_s(self, local_batch_size: float) -> float:
        """Return the mean seconds of a step without exchange: interpolated between measured batches, else by line."""
        points = self.device.step_times
        if not points[0].local_batch_size <= local_batch_size <= points[-1].local_batch_size:
            return self.step_time.time_s(local_batch_size)
        sizes = [point.local_batch_size for point in points]
        measured_s = float(np.interp(local_batch_size, sizes, [point.step_time_s for point in points]))
        return self.mean_to_median * measured_s

    @property
    def largest_measured(self) -> int:
        """The largest batch whose steps were timed: where samples weigh most, and nothing is extrapolated."""
        return self.device.step_times[-1].local_batch_size

    @property
    def grows(self) -> bool:
        """True where a step takes clearly longer with more samples, so that its line says what a sample takes."""
        samples = self.largest_measured
        return self.step_time.per_sample_s * samples >= LEAST_GROWTH * self.step_time.time_s(samples)

    @property
    def largest_batch(self) -> int | None:
        """Most samples that fit in the worker's memory; 0: none; None: memory was not measured, or does not grow."""
        return None if self.memory is None else self.memory.largest_batch(self.device.memory_limit_bytes)


MEASURED_LINK_LOG_SD = 0.3
"""Log standard deviation of a measured link's time: collectives of small gradients timed minutes apart on one 2-core
virtual machine differed by up to a factor of two, as where the scheduler puts the communication threads decides."""


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Latency (s a message) and bandwidth (bytes/s) of one hop of a collective: the alpha-beta model."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, messages: float, traffic_bytes: float) -> float:
        """Return the seconds of a collective with ``messages`` in a row and ``traffic_bytes`` over one link."""
        return messages * self.latency_s + traffic_bytes / self.bytes_per_s

    def sd_s(self, messages: float, traffic_bytes: float) -> float:
        """Return the prior standard deviation of `time_s` in seconds, 30 % of it."""
        return MEASURED_LINK_LOG_SD * self.time_s(messages, traffic_bytes)


@dataclass(frozen=True, kw_only=True)
class GainCurve:
    """Retained gradient energy of Top-k by the fraction of elements sent; never falling with it.

    Attributes:
        log_ratios: logarithms of the measured fractions below 1, ascending; empty: nothing was measured.
        gains: energy, (0, 1], that is retained at each of them.
    """

    log_ratios: tuple[float, ...]
    gains: tuple[float, ...]

    def gain(self, ratio: float) -> float:
        """Return the gradient energy, (0, 1], that Top-k retains at ``ratio``; refuse ratios below those measured.

        At a ratio of 1 and above it is 1.

        Raises:
            BadInput: the ratio is below every measured one, or none was measured.
        """
        if ratio >= 1:
            return 1.0
        at = math.log(ratio)
        if not self.log_ratios or at < self.log_ratios[0] - 1e-9:
            raise BadInput(
                f"the profile has no retained energy for a ratio of {100 * ratio:.4f} %.", hint="profile again"
            )
        return float(np.interp(at, (*self.log_ratios, 0.0), (*self.gains, 1.0)))


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """Fits to a profile in one precision, which plans are predicted from: devices, links, Top-k energy and convergence.

    Attributes:
        whole: the profile as it was given.
        profile: the part of it that was measured in the model's precision.
        devices: fits to each profiled kind of worker.
        host_links: latency and bandwidth between workers of one machine, by collective; empty: not measured.
        network_links: the same between machines; empty: not measured.
        gain: energy that Top-k retains.
        convergence: steps that training takes by batch size.
    """

    whole: Profile
    profile: Profile
    devices: tuple[FittedDevice, ...]
    host_links: dict[Primitive, LinkModel]
    network_links: dict[Primitive, LinkModel]
    gain: GainCurve
    convergence: Convergence

    @cached_property
    def reference(self) -> FittedDevice:
        """The device that other machines are compared with: `whole_host`, or the steadiest division of the same device.

        The latter only if steps of `whole_host` scatter widely, as on a busy host, and those less than half as much.
        """
        whole = self.whole_host
        alike = (f for f in self.devices if (f.device.type, f.device.kind) == (whole.device.type, whole.device.kind))
        steady = min(alike, key=lambda fitted: fitted.step_time.log_sd)
        unsteady = whole.step_time.log_sd > UNSTEADY_LOG_SD
        return steady if unsteady and steady.step_time.log_sd < whole.step_time.log_sd / 2 else whole

    @cached_property
    def whole_host(self) -> FittedDevice:
        """The device with the fewest workers on its host: with one, it has the host to itself."""
        return min(self.devices, key=lambda fitted: fitted.device.workers_per_host)

    @cached_property
    def thread_scaling(self) -> tuple[float, float]:
        """Eta in ``time ~ threads^-eta`` and its standard deviation: a prior, updated by CPU steps of the profile.

        Prior and evidence are normal; eta is kept within 0.3 to 1. The prior stands without steps of two numbers of
        threads that grow with their samples.
        """
        cpus = [fitted for fitted in self.devices if fitted.device.kind == "cpu" and fitted.grows]
        few = min(cpus, key=lambda fitted: fitted.device.threads_per_worker, default=None)
        many = max(cpus, key=lambda fitted: fitted.device.threads_per_worker, default=None)
        if few is None or many is None or few.device.threads_per_worker == many.device.threads_per_worker:
            return THREAD_SCALING, THREAD_SCALING_SD
        octaves = math.log(many.device.threads_per_worker / few.device.threads_per_worker)
        seen = math.log(few.step_time.per_sample_s / many.step_time.per_sample_s) / octaves
        seen_sd = math.hypot(few.step_time.log_sd, many.step_time.log_sd) / octaves
        prior, evidence = THREAD_SCALING_SD**-2, seen_sd**-2
        eta = (prior * THREAD_SCALING + evidence * seen) / (prior + evidence)
        return min(1.0, max(0.3, eta)), (prior + evidence) ** -0.5

    @cached_property
    def losses(self) -> ExchangeLosses:
        """Retained gradient energy, and the rounding noise that costs steps, by compressor, from exchange trials."""
        return exchange_losses(
            self.whole.exchange_trials,
            noise_scale=self.convergence.noise_scale,
            batch_size=self.whole.job.batch_size,
        )

    @property
    def precision(self) -> Precision:
        """The precision that the fitted steps were computed in."""
        return self.reference.device.precision

    def computing_in(self, precision: Precision) -> FittedModel:
        """Return the fits of the same job in another precision, with the same convergence; itself if not measured."""
        if precision == self.precision or precision not in self.whole.precisions:
            return self
        return replace(fit(self.whole, precision), convergence=self.convergence)


def fit(profile: Profile, precision: Precision | None = None) -> FittedModel:
    """Fit devices, links, retained energy and convergence to a profile, in one precision; None: the profile's first.

    Fits to measurements that are missing are empty.

    Args:
        profile: what was measured.
        precision: precision that steps were computed in, one of the profile's; None: the profile's first.
    """
    whole, profile = profile, profile.computing_in(precision or profile.precisions[0])
    return FittedModel(
        whole=whole,
        profile=profile,
        devices=tuple(fit_device(device) for device in profile.devices),
        host_links=fit_links([link for link in profile.links if link.scope == "host"]),
        network_links=fit_links([link for link in profile.links if link.scope == "network"]),
        gain=fit_gain(profile.gain),
        convergence=fit_convergence(profile),
    )


def fit_device(device: Device) -> FittedDevice:
    """Fit step time, sample loading, peak memory and compressor costs to the measurements of one profiled device.

    Lines go through medians, and step times are scaled from there to the mean, which a run pays. The memory is None
    where peaks of fewer than two batch sizes are known.
    """
    points = device.step_times
    sizes = [point.local_batch_size for point in points]
    fixed, per_sample, floor, log_sd = fit_step_time(sizes, [point.step_time_s for point in points])
    # Lines go through medians, which a hiccup cannot move. A run pays the mean, hiccups included: put their share back.
    deviations = np.concatenate([np.asarray(point.samples_s) / point.step_time_s for point in points])
    mean_to_median = float(np.clip(deviations, 0, 3).mean())
    jitter = min(JITTER_LIMIT, 1.4826 * statistics.median(np.abs(deviations - statistics.median(deviations)).tolist()))
    loads = [point.load_s / point.local_batch_size for point in points]
    peaks = [(p.local_batch_size, p.peak_memory_bytes) for p in points if p.peak_memory_bytes is not None]
    return FittedDevice(
        device=device,
        step_time=StepTimeLine(
            fixed_s=fixed * mean_to_median,
            per_sample_s=per_sample * mean_to_median,
            floor_s=floor * mean_to_median,
            log_sd=log_sd if device.counted is None else device.counted.log_sd,
            jitter=jitter,
        ),
        load_per_sample_s=min(statistics.median(loads), per_sample),
        optimizer_s=statistics.median(point.optimizer_s for point in points),
        mean_to_median=mean_to_median,
        memory=fit_memory([size for size, _ in peaks], [peak for _, peak in peaks]) if len(peaks) > 1 else None,
        compressors={
            name: _compressor_line([cost for cost in device.compressors if cost.name == name])
            for name in sorted({cost.name for cost in device.compressors})
        },
    )


def fit_step_time(local_batch_sizes: Sequence[int], time_s: Sequence[float]) -> tuple[float, float, float, float]:
    """Fit ``max(floor, a + c b)`` to seconds by batch size ``b``; return a, c, floor and the residuals' log spread.

    With ``a, floor >= 0`` and ``c > 0``. Of a single measurement, half of the time is taken to be fixed.

    Iteratively reweighted least squares with Huber's weights on the *relative* error (on absolute errors the slowest
    point would decide alone). A floor is taken only where it explains clearly more than the line: at least two points
    lie on it and the loss falls by half.

    Args:
        local_batch_sizes: samples of each measurement, in any order; at least one.
        time_s: median seconds of a step of each.

    Returns:
        Fixed seconds ``a``, seconds a sample ``c``, ``floor`` seconds (0: none), log standard deviation of the fit.
    """
    sizes, times = np.asarray(local_batch_sizes, dtype=np.float64), np.asarray(time_s, dtype=np.float64)
    order = np.argsort(sizes)
    sizes, times = sizes[order], times[order]
    if sizes.size == 1:
        # Not identified: half of the time is taken to be fixed (AdaptDL, section 2.3 of the same name).
        half = float(times[0]) / 2
        return half, half / float(sizes[0]), 0.0, SPREAD_ONE_BATCH_SIZE
    fixed, per_sample = _huber_line(sizes, times)
    best = (fixed, per_sample, 0.0)
    best_loss = _loss(sizes, times, *best)
    parameters = 2
    if best_loss > sizes.size * HUBER_RELATIVE**2 / 8:
        for count in range(2, sizes.size - 1):
            floor = float(statistics.median(times[:count]))
            line = _huber_line(sizes[count:], times[count:])
            loss = _loss(sizes, times, *line, floor)
            if loss < 0.5 * best_loss:
                best, best_loss, parameters = (*line, floor), loss, 3
    residuals = np.log(times / np.maximum(best[2], best[0] + best[1] * sizes))
    freedom = max(1, sizes.size - parameters)
    log_sd = math.hypot(SPREAD_FLOOR, math.sqrt(float(residuals @ residuals) / freedom))
    return (*best, log_sd)


def _huber_line(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    per_sample, fixed = robust_non_negative(
        np.stack([sizes / times, 1 / times], axis=1), lambda _: HUBER_RELATIVE
    ).tolist()
    # Where time does not grow over the measured range, a slope of a millionth keeps shares finite.
    return fixed, per_sample or 1e-6 * fixed


def _loss(sizes: NDArray[np.float64], times: NDArray[np.float64], fixed: float, slope: float, floor: float) -> float:
    """Return Huber's loss of the relative errors of ``max(floor, fixed + slope * size)``, summed over measurements."""
    residuals = np.abs(np.maximum(floor, fixed + slope * sizes) / times - 1)
    linear = HUBER_RELATIVE * (residuals - HUBER_RELATIVE / 2)
    return float(np.where(residuals <= HUBER_RELATIVE, residuals**2 / 2, linear).sum())


def _compressor_line(costs: Sequence[CompressorCost]) -> CompressorLine:
    ordered = sorted(costs, key=lambda cost: cost.ratio)
    return CompressorLine(
        log_ratios=tuple(math.log(cost.ratio) for cost in ordered),
        compress_s=tuple(cost.compress_s for cost in ordered),
        decompress_s=tuple(cost.decompress_s for cost in ordered),
    )


def fit_links(links: Sequence[Link]) -> dict[Primitive, LinkModel]:
    """Return latency (s) and bandwidth (bytes/s) of one hop by collective, from each collective's measured line.

    The alpha-beta time of a collective is linear in both (`cost.Terms`), so each is the measured line's coefficient
    divided by the formula's. Of several measurements of one collective the one with most workers is used. Collectives
    that were not measured are missing.
    """
    models: dict[Primitive, LinkModel] = {}
    for link in sorted(links, key=lambda link: link.workers):
        terms = Operation(primitive=link.collective, payload_bytes=1.0, members=link.workers).terms()
        models[link.collective] = LinkModel(
            latency_s=link.latency_s / terms.messages, bytes_per_s=link.bytes_per_s * terms.traffic_bytes
        )
    return models


def fit_gain(points: Sequence[GainPoint]) -> GainCurve:
    """Return retained energy by ratio through the points below ratio 1, never falling: dips are noise and filled.

    Without such points the curve is empty.
    """
    ordered = [point for point in sorted(points, key=lambda point: point.ratio) if point.ratio < 1]
    gains = np.maximum.accumulate(np.clip([point.gain for point in ordered], 1e-6, 1.0)) if ordered else np.empty(0)
    return GainCurve(
        log_ratios=tuple(math.log(point.ratio) for point in ordered), gains=tuple(float(gain) for gain in gains)
    )
