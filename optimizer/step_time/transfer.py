"""Step time on machine types that were never profiled: CPUs by CoreMark, GPUs by public measurements.

Tiers: *measured* (this type was profiled), *interpolated* (same family, or the same accelerator), *extrapolated*
(another family), *counted* (nothing was profiled: a step by its operations, see `utilisation`). From a CPU to a GPU
there is a roofline only. Every constant is a prior of ours with its interval; measuring the type replaces it.

Where the GPUs of a machine are unlike, worker i takes f_i + c_i b_i for b_i samples. Together they end at a level L:
``n b`` samples, with ``r_i = 1 / c_i``, take

    L = sum(f_i r_i) / sum(r_i) + b n / sum(r_i)

which is the line of a worker that stands for each of the n (`hetopt.core.batch_partition` shares a batch so).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hetopt.core.batch_partition import WorkerTime
from hetopt.core.memory import ALONE, ExchangeMemory
from hetopt.core.profile import Device
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import FittedDevice, FittedModel, StepTimeLine, times_as_long
from hetopt.optimizer.market.catalog_filter import FIRST_CAPABILITY_WITH_BF16
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType, pinned
from hetopt.optimizer.plan import Evidence
from hetopt.optimizer.step_time.device_memory import Room, Scheme, room, sharable, usable_bytes
from hetopt.optimizer.step_time.gpu_transfer import (
    COMMON_MEMORY_GIB,
    Gpu,
    Measured,
    Place,
    Precision,
    gpu_of,
    measured_gpu,
    steps_elsewhere,
)
from hetopt.optimizer.step_time.machine_bus import gathering_s
from hetopt.optimizer.step_time.utilisation import sample_s

CROSS_FAMILY_LOG_SD = 0.36
"""x / 1.8 with 90 % probability: at equal vCPU count CPU types differ 2.5 times, and CoreMark explains a part of it."""

UNKNOWN_CPU_LOG_SD = 0.45
"""A vCPU of a host whose CPU is not in the catalogue, against the catalogue's median: more than types differ there."""

SAME_FAMILY_LOG_SD = 0.12
SAME_ACCELERATOR_LOG_SD = 0.10

FP32_EFFICIENCY = 0.4
"""Share of peak fp32 rate that training reaches, typically 0.25 to 0.6; the rest is in the cross-family spread."""

BANDWIDTH_EFFICIENCY = 0.7
"""Share of peak memory bandwidth that element-wise kernels reach."""

LAUNCH_S = 8e-6
"""One operator called from Python without graph capture: 5-10 microseconds on current hosts."""

TOO_LITTLE_MEMORY = "too little memory for one sample"


ONLY_GPUS_PROFILED = "a CPU machine, while only GPUs were profiled"
NO_PUBLISHED_RATES = "no published rates of its GPU"
NO_RATES_OF_OWN_GPU = "the profile does not say how fast its own GPU is"
NO_RATES_FOR_GPUS = "a GPU, while the profile lacks the rates to predict one"
MENDED_BY_PROFILING = frozenset({ONLY_GPUS_PROFILED, NO_RATES_OF_OWN_GPU, NO_RATES_FOR_GPUS})
"""Reasons that another profile takes away; the others are the machines' own."""


@dataclass(frozen=True, kw_only=True)
class WorkerModel:
    """Predicted worker of a machine type: its compute time by samples, with uncertainty, and its memory.

    Attributes:
        workers: workers on one machine, one for each CUDA device, or one on a CPU machine.
        time: compute time of a step, optimizer included, with the samples that its memory holds.
        log_sd: standard deviation of the log of (true / predicted) step time.
        evidence: measured, interpolated, extrapolated or counted.
        evaluation_factor: time of an evaluation relative to the reference device.
        compress_factor: time of compression relative to the reference device.
        room: memory of the worker's device, and the samples that fit; None: not computed yet.
        unlike: compute time of each worker of the machine where these differ, and ``time`` is their `mean_worker`.
    """

    kind: Literal["cpu", "cuda"]
    workers: int
    time: WorkerTime
    log_sd: float
    evidence: Evidence
    evaluation_factor: float
    compress_factor: float
    room: Room | None = None
    unlike: tuple[WorkerTime, ...] = ()

    def slower(self, factor: float, log_sd: float) -> WorkerModel:
        """Return a copy that takes ``factor`` times as long for everything, with ``log_sd`` in place of its own."""
        return replace(
            self,
            time=self.time.slower(factor),
            log_sd=log_sd,
            evaluation_factor=factor * self.evaluation_factor,
            compress_factor=factor * self.compress_factor,
        )


class Unusable(Exception):
    """Error that says why no worker is planned on a machine type."""


@dataclass(frozen=True, kw_only=True)
class ReferenceHost:
    """Profiled machine as the catalogue rates it: CoreMark, family, and the steps of its GPUs.

    Attributes:
        coremark_per_vcpu: CoreMark iterations a second of one logical CPU.
        log_sd: standard deviation of the log of ``coremark_per_vcpu``.
        family: catalogue family of the machine; None: not a catalogue type.
        basis: source of ``coremark_per_vcpu``, in words.
        gpus: steps of the profiled GPUs, the reference's first; empty: none was profiled, or rates of none are known.
    """

    coremark_per_vcpu: float
    log_sd: float
    family: str | None
    basis: str
    gpus: tuple[Measured, ...] = ()


def reference_host(model: FittedModel, types: Iterable[InstanceType]) -> ReferenceHost:
    """Return the profiled machine's GPUs and its CoreMark: its type's, else the median of ``types`` with its CPU.

    Without either, the median of all types. The spread of the types that count is part of ``log_sd``.
    """
    known = list(types)
    host = model.profile.host
    gpus = _profiled_gpus(model, known)
    rated = [t for t in known if t.coremark_iterations_per_s is not None and not t.burstable and not t.bare_metal]
    profiled = next((t for t in rated if t.name == model.reference.device.type), None)
    if profiled is not None and profiled.coremark_iterations_per_s is not None:
        per_vcpu, basis = profiled.coremark_iterations_per_s / profiled.vcpus, f"CoreMark of {profiled.name}"
        return ReferenceHost(coremark_per_vcpu=per_vcpu, log_sd=0.0, family=profiled.family, basis=basis, gpus=gpus)
    words = _cpu_words(host.cpu_model)
    alike = [t for t in rated if t.cpu_model and words and words <= _cpu_words(t.cpu_model)]
    basis, least_log_sd = f"CoreMark of machines with its CPU ({host.cpu_model})", 0.0
    if not alike:
        alike, least_log_sd = rated, UNKNOWN_CPU_LOG_SD
        basis = f"the median CoreMark a vCPU, because no machine has its CPU ({host.cpu_model})"
    logs = [math.log((t.coremark_iterations_per_s or 0.0) / t.vcpus) for t in alike]
    return ReferenceHost(
        coremark_per_vcpu=math.exp(statistics.median(logs)) if logs else 1.0,
        log_sd=max(least_log_sd, statistics.pstdev(logs) if logs else UNKNOWN_CPU_LOG_SD),
        family=None,
        basis=basis,
        gpus=gpus,
    )


def _profiled_gpus(model: FittedModel, types: Sequence[InstanceType]) -> tuple[Measured, ...]:
    """Return a step of each profiled GPU and precision, at its largest batch size; empty for a profile of CPUs.

    Of several fits of one GPU that with the fewest workers on the host counts. GPUs without known rates are left out.
    """
    steps: dict[tuple[str, Precision], Measured] = {}
    reference = model.reference
    for fitted in (reference, *sorted(model.devices, key=lambda fitted: fitted.device.workers_per_host)):
        device, batch = fitted.device, fitted.largest_measured
        if device.kind == "cuda":
            # What was counted multiplies in what it says; torch's default has TF32 in convolutions.
            is_default = device.precision == "fp32" and (device.counted is None or device.counted.moved_bytes is None)
            precision: Precision = "default" if is_default else device.precision
            gpu = _profiled_gpu(model, device, types)
            if gpu is not None:
                step = Measured(
                    place=Place(gpu=gpu, precision=precision, batch_size=batch),
                    step_time_s=fitted.step_time.time_s(batch),
                    log_sd=0.0 if fitted is reference else fitted.step_time.log_sd,
                    kind=model.profile.job.model_kind,
                    flops_per_sample=model.profile.job.flops_per_sample,
                )
                steps.setdefault((device.type, precision), step)
    return tuple(steps.values()) if reference.device.kind == "cuda" else ()


def _profiled_gpu(model: FittedModel, device: Device, types: Sequence[InstanceType]) -> Gpu | None:
    """Return the published facts of a profiled GPU, or its measured rates where no type has it; None: unknown."""
    host = model.profile.host
    typed = next((t.accelerator for t in types if t.name == device.type and t.accelerator is not None), None)
    if typed is not None:
        return gpu_of(typed)
    named = [t.accelerator for t in types if t.accelerator and _same_accelerator(host.accelerator or "", t.accelerator)]
    if named:
        part = _part_of_gpu(host.accelerator or "")
        memory = (host.accelerator_memory_bytes or 0) / part
        nearest = min(named, key=lambda accelerator: abs(accelerator.memory_bytes - memory) if memory else 0)
        return gpu_of(replace(nearest, fraction=part))
    if device.matmul_flops_per_s is None or device.copy_bytes_per_s is None:
        return None
    return measured_gpu(
        fp32_tflops=device.matmul_flops_per_s / 1e12 / BANDWIDTH_EFFICIENCY,
        bandwidth_gb_per_s=device.copy_bytes_per_s / 1e9 / BANDWIDTH_EFFICIENCY,
        memory_gib=(host.accelerator_memory_bytes or 0) / 2**30 or COMMON_MEMORY_GIB,
    )


def worker_model(
    model: FittedModel, host: ReferenceHost, instance: InstanceType, exchange: ExchangeMemory = ALONE
) -> WorkerModel:
    """Return a worker's predicted compute time and memory on a machine type, measured there or transferred.

    Steps that were measured on the type, with all of its workers, go before a transfer from other machines.

    Args:
        model: fits of the profile.
        host: the profiled machine, see `reference_host`.
        instance: the machine type.
        exchange: memory of the exchange that takes most of a worker's device.

    Raises:
        Unusable: the type is never planned with (see `unusable`), nothing relates it to the profile, or it lacks the
            memory or the precision.
    """
    objection = unusable(instance) or lacks_precision(model, host, instance)
    if objection is not None:
        raise Unusable(objection)
    workers = max(1, instance.cuda_devices)
    for fitted in model.devices:
        if fitted.device.type == instance.name and fitted.device.workers_per_host == workers:
            line, kind = fitted.step_time, fitted.device.kind
            worker = _worker(model, kind, workers, line, log_sd=line.log_sd, evidence="measured", compress_factor=1.0)
            return _with_memory(worker, model, instance, exchange, fitted)
    accelerator = instance.accelerator
    if not instance.cuda_devices or accelerator is None:
        predicted = _on_cpus(model, host, instance)
    elif model.reference.device.kind == "cuda":
        predicted = _from_gpu(model, host, accelerator)
    else:
        predicted = _by_roofline(model, host, instance, accelerator)
    if model.profile.is_counted:
        predicted = replace(predicted, evidence="counted")
    return _with_memory(predicted, model, instance, exchange)


def unusable(instance: InstanceType) -> str | None:
    """Return why a machine type is not planned with, whatever the job; None: it is."""
    if instance.name.startswith("mac"):
        return "Mac hardware"
    if instance.bare_metal:
        return "bare metal (slow to start)"
    if instance.burstable or instance.family == "t1":
        return "burstable (its speed depends on credits)"
    if instance.other_accelerators or (instance.accelerator is not None and not instance.accelerator.is_cuda):
        return "an accelerator that torch does not drive"
    return pinned().objection(instance)


def lacks_precision(model: FittedModel, host: ReferenceHost, instance: InstanceType) -> str | None:
    """Return why a machine type is not planned with in the model's precision; None: it is.

    GPUs need units for the precision. The catalogue does not say which CPUs have them: only the profiled CPU counts.
    """
    precision, device = model.precision, model.reference.device
    if precision == "fp32" or instance.name == device.type:
        return None
    if instance.cuda_devices:
        return (
            f"a GPU, while {precision} was measured on a CPU" if device.kind == "cpu" else no_units(instance, precision)
        )
    if device.kind == "cpu" and instance.family != host.family and not _same_cpu(model, instance):
        return f"another CPU than the one that was measured in {precision}"
    return None


def no_units(instance: InstanceType, precision: Precision) -> str | None:
    """Return why a machine type's GPUs are not used in a precision; None: no GPU is known to lack fast units for it."""
    gpus = instance.unlike or (() if instance.accelerator is None else (instance.accelerator,))
    facts = [gpu for gpu in map(gpu_of, gpus) if gpu is not None]
    lacks = precision == "bf16" and any(gpu.capability < FIRST_CAPABILITY_WITH_BF16 for gpu in facts)
    slow = precision == "fp16" and any(gpu.halves_slowly for gpu in facts)
    return f"its GPU has no units for {precision}" if lacks or slow else None


def quickest_precision(instance: InstanceType) -> Precision:
    """Return the precision that a machine type's GPUs multiply quickest in: bf16, else fp16, else fp32."""
    halves: tuple[Precision, ...] = ("bf16", "fp16")
    return next((precision for precision in halves if no_units(instance, precision) is None), "fp32")


def _same_cpu(model: FittedModel, instance: InstanceType) -> bool:
    """Return whether an instance has the profiled CPU, by a name with a number: "AMD EPYC" does not say which."""
    words = _cpu_words(model.profile.host.cpu_model)
    return (
        any(map(str.isdecimal, "".join(words)))
        and instance.cpu_model is not None
        and words <= _cpu_words(instance.cpu_model)
    )


def _worker(
    model: FittedModel,
    kind: Literal["cpu", "cuda"],
    workers: int,
    line: StepTimeLine,
    *,
    log_sd: float,
    evidence: Evidence,
    compress_factor: float,
    fixed_factor: float = 1.0,
    sample_factor: float = 1.0,
) -> WorkerModel:
    """Return a worker whose steps follow a line, its fixed time and that of its samples each scaled by a factor."""
    time = WorkerTime(
        fixed_s=line.fixed_s * fixed_factor,
        per_sample_s=line.per_sample_s * sample_factor,
        floor_s=line.floor_s * fixed_factor,
    )
    return WorkerModel(
        kind=kind,
        workers=workers,
        time=time,
        log_sd=log_sd,
        evidence=evidence,
        evaluation_factor=_evaluation_factor(model, time),
        compress_factor=compress_factor,
    )


def _on_cpus(model: FittedModel, host: ReferenceHost, instance: InstanceType) -> WorkerModel:
    """Return a CPU's worker: ``a_i = a_ref s``, ``c_i = c_ref s (threads_ref / v_i)^eta``, ``s`` by CoreMark a vCPU.

    Fixed time is spent by one thread, so more vCPUs do not shorten it; samples are spread over the threads.

    Raises:
        Unusable: only GPUs were profiled, or no CoreMark of the type is published.
    """
    reference = model.reference
    if reference.device.kind != "cpu":
        raise Unusable(ONLY_GPUS_PROFILED)
    if instance.coremark_iterations_per_s is None:
        raise Unusable("no CPU benchmark to predict its speed from")
    one_thread = host.coremark_per_vcpu * instance.vcpus / instance.coremark_iterations_per_s
    eta, eta_sd = model.thread_scaling
    threads = reference.device.threads_per_worker
    factor = one_thread * (threads / instance.vcpus) ** eta
    same_family = instance.family == host.family
    log_sd = math.hypot(
        SAME_FAMILY_LOG_SD if same_family else CROSS_FAMILY_LOG_SD,
        0.0 if same_family else host.log_sd,
        eta_sd * math.log(instance.vcpus / threads),
        reference.step_time.log_sd,
    )
    return _worker(
        model,
        "cpu",
        1,
        reference.step_time,
        fixed_factor=one_thread,
        sample_factor=factor,
        log_sd=log_sd,
        evidence="interpolated" if same_family else "extrapolated",
        compress_factor=factor,
    )


def _from_gpu(model: FittedModel, host: ReferenceHost, accelerator: Accelerator) -> WorkerModel:
    """Return a GPU's worker, scaled from the profiled GPUs by public measurements of both (`gpu_transfer`).

    The whole step is scaled, its host's part included, as public measurements have both. A described job's time of
    samples is scaled by operations and bytes, and its fixed time stays.

    Raises:
        Unusable: no rates of the GPU are published, or none of the profiled ones are known.
    """
    reference, gpu = model.reference, gpu_of(accelerator)
    evidence: Evidence = "extrapolated"
    is_by_sheet = False
    if _is_reference(model, host, accelerator, gpu):
        factor, log_sd, evidence = 1.0, SAME_ACCELERATOR_LOG_SD, "interpolated"
    elif gpu is None:
        raise Unusable(NO_PUBLISHED_RATES)
    elif not host.gpus:
        raise Unusable(NO_RATES_OF_OWN_GPU)
    elif (counted := reference.device.counted) is not None and counted.moved_bytes is not None:
        place = host.gpus[0].place
        factor = sample_s(counted, gpu, place.precision) / sample_s(counted, place.gpu, place.precision)
        log_sd, is_by_sheet = 0.0, True  # the spread is that of all jobs
    else:
        step = host.gpus[0]
        log_s, covariance = steps_elsewhere(host.gpus, (replace(step.place, gpu=gpu),))
        factor, log_sd = math.exp(float(log_s[0])) / step.step_time_s, math.sqrt(covariance[0, 0])
    described = reference.device.counted
    if described is not None and described.unexplained_s is not None and gpu is not None:
        scaled_s = sample_s(described, gpu, host.gpus[0].place.precision)
        log_sd = math.hypot(log_sd, math.log(max(1.0, described.unexplained_s / scaled_s)) / Z90)
    return _worker(
        model,
        "cuda",
        accelerator.count,
        reference.step_time,
        fixed_factor=1.0 if is_by_sheet else factor,  # by data sheets it is the host that launches kernels
        sample_factor=factor,
        log_sd=math.hypot(log_sd, reference.step_time.log_sd),
        evidence=evidence,
        compress_factor=factor,
    )


def _is_reference(model: FittedModel, host: ReferenceHost, accelerator: Accelerator, gpu: Gpu | None) -> bool:
    """Return whether an accelerator is the very GPU that was profiled."""
    if host.gpus and gpu is not None and accelerator.fraction == 1:
        return gpu == host.gpus[0].place.gpu
    return _same_accelerator(model.profile.host.accelerator or "", accelerator)


def _by_roofline(
    model: FittedModel, host: ReferenceHost, instance: InstanceType, accelerator: Accelerator
) -> WorkerModel:
    """Return a GPU's worker from a CPU's: matrix work at the GPU's rate, other time as memory traffic, plus loading.

        c = F / (0.4 peak) + M / (0.7 bandwidth) + load,    a = operators x 8 us

    F is counted; M is what the CPU did beside matrix work, ``(c_cpu - load - F / matmul rate) x copy rate``. Loading a
    batch stays on the host's cores.

    Raises:
        Unusable: no rates of the GPU are published, or the profile has no FLOPs or no rates of its CPU.
    """
    flops, bandwidth = accelerator.fp32_flops_per_s, accelerator.memory_bandwidth_bytes_per_s
    if flops is None or bandwidth is None:
        raise Unusable(NO_PUBLISHED_RATES)
    job, reference = model.profile.job, model.reference
    device = reference.device
    if job.flops_per_sample is None or device.matmul_flops_per_s is None or device.copy_bytes_per_s is None:
        raise Unusable(NO_RATES_FOR_GPUS)
    compute_cpu_s = reference.step_time.per_sample_s - reference.load_per_sample_s
    traffic = max(0.0, compute_cpu_s - job.flops_per_sample / device.matmul_flops_per_s) * device.copy_bytes_per_s
    per_core = 1.0
    if instance.coremark_iterations_per_s is not None:
        per_core = host.coremark_per_vcpu * instance.vcpus / instance.coremark_iterations_per_s
    load_s = reference.load_per_sample_s * per_core
    per_sample_s = (
        job.flops_per_sample / (flops * FP32_EFFICIENCY) + traffic / (bandwidth * BANDWIDTH_EFFICIENCY) + load_s
    )
    fixed_s = job.operators_per_step * LAUNCH_S * per_core
    return _worker(
        model,
        "cuda",
        accelerator.count,
        replace(reference.step_time, fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=0.0),
        log_sd=math.hypot(CROSS_FAMILY_LOG_SD, reference.step_time.log_sd),
        evidence="extrapolated",
        compress_factor=device.copy_bytes_per_s / (bandwidth * BANDWIDTH_EFFICIENCY),
    )


def _with_memory(
    worker: WorkerModel,
    model: FittedModel,
    instance: InstanceType,
    exchange: ExchangeMemory,
    measured: FittedDevice | None = None,
) -> WorkerModel:
    """Return the worker with its device's memory, its most samples and micro-batch, and one update a step.

    Where activations are recomputed, samples take longer, and where GPUs share a replica, a micro-batch takes at least
    as long as gathering it.

    Args:
        worker: predicted without memory.
        model: fits of the profile.
        instance: the machine type.
        exchange: memory of the exchange that takes most of a worker's device.
        measured: fit of this type's own device; None: it was not profiled.

    Raises:
        Unusable: not even the fewest samples fit.
    """
    device_bytes, usable = usable_bytes(instance)
    line, point, blocks = model.reference.step_time, model.reference.device.step_times[-1], sharable(model)
    update = min(1.0, model.reference.optimizer_s / line.fixed_s) if line.fixed_s > 0 else 0.0

    def under(scheme: Scheme) -> WorkerTime:
        """Return the compute time under a memory scheme, with micro-batches of any size."""
        again = point.forward_s / (point.forward_s + point.backward_s) if scheme.recomputes else 0.0
        gathered_s = 0.0 if blocks is None else gathering_s(instance, scheme, blocks.weight_bytes)
        return replace(
            worker.time,
            per_sample_s=(1 + again) * worker.time.per_sample_s,
            floor_s=max(worker.time.floor_s, gathered_s),
            once_s=update * worker.time.fixed_s,
        )

    samples = max(1, model.profile.job.batch_size // worker.workers)
    held = room(
        model,
        on_gpu=worker.kind == "cuda",
        device_bytes=device_bytes,
        usable=usable if measured is None else measured.device.memory_limit_bytes,
        time_s=lambda scheme, most: replace(under(scheme), micro_batch=most).time_s(samples),
        exchange=exchange,
        measured=measured,
        devices=worker.workers,
    )
    if held is None:
        raise Unusable(TOO_LITTLE_MEMORY)
    time = replace(under(held.scheme), max_samples=held.most_samples, micro_batch=held.part)
    return replace(worker, time=time, room=held)


def _evaluation_factor(model: FittedModel, time: WorkerTime) -> float:
    """Return a worker's evaluation time over the profiled host's, by their seconds for the largest measured batch.

    The host evaluated with all of its threads; the reference worker may have had a part of them.
    """
    reference = model.reference
    slower = times_as_long(time.time_s, reference.step_time.time_s, reference.largest_measured)
    if reference.device.kind == "cuda":
        return slower
    eta, _ = model.thread_scaling
    division = reference.device.threads_per_worker / model.profile.host.logical_cpus
    return slower / math.pow(min(1.0, division), eta)


def _same_accelerator(name: str, accelerator: Accelerator) -> bool:
    """Return whether a driver's name ("NVIDIA A10G", "Tesla T4") means the catalogue's accelerator, a whole device."""
    aliases = accelerator.model.aliases if accelerator.model is not None else ()
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    return accelerator.fraction == 1 and any(
        set(re.findall(r"[a-z0-9]+", known.lower())) <= words for known in (accelerator.name, *aliases)
    )


MIG_SLICE = re.compile(r"\bmig (\d)g\.", re.IGNORECASE)
MIG_SLICES = 7
"""That a GPU can be divided into at most (NVIDIA, Multi-Instance GPU user guide)."""


def _part_of_gpu(name: str) -> float:
    """Return the part of a GPU's multiprocessors by its driver's name: 3/7 of "NVIDIA A100-SXM4-40GB MIG 3g.20gb"."""
    slices = MIG_SLICE.search(name)
    return 1.0 if slices is None else int(slices[1]) / MIG_SLICES


def _cpu_words(name: str) -> frozenset[str]:
    """Return the words that tell CPU models apart, without trade marks, core counts and clocks."""
    text = re.sub(r"\((r|tm)\)|@.*|\b\d+-core\b", " ", name.lower())
    return frozenset(re.findall(r"[a-z0-9-]+", text)) - {"cpu", "processor", "0", "with", "unknown"}


def worker_of(instance: InstanceType, like: Callable[[InstanceType], WorkerModel]) -> WorkerModel:
    """Return the predicted worker of a machine; where its GPUs are unlike, one whose time is their `mean_worker`.

    Args:
        instance: the machine type.
        like: returns the worker of a machine type whose GPUs are alike; errors of the call go through.
    """
    if not instance.unlike:
        return like(instance)
    count = len(instance.unlike)
    each = [like(replace(instance, accelerator=replace(gpu, count=count), unlike=())) for gpu in instance.unlike]
    rooms = [worker.room for worker in each if worker.room is not None]
    least = min(rooms, key=lambda room: math.inf if room.free_bytes is None else room.free_bytes, default=None)
    return replace(
        max(each, key=lambda worker: worker.log_sd),
        time=mean_worker([worker.time for worker in each]),
        unlike=tuple(worker.time for worker in each),
        evaluation_factor=len(each) / math.fsum(1 / worker.evaluation_factor for worker in each),
        compress_factor=max(worker.compress_factor for worker in each),
        room=least,
    )


def mean_worker(times: Sequence[WorkerTime]) -> WorkerTime:
    """Return the compute time of equal workers, as many as ``times``, that together are as fast as these unlike ones.

    ``max_samples`` is where the first of the unlike workers reaches its own.
    """
    rates = [1 / time.per_sample_s for time in times]
    rate = math.fsum(rates)

    def mean(of: Callable[[WorkerTime], float]) -> float:
        return math.fsum(share * of(time) for share, time in zip(rates, times, strict=True)) / rate

    def least(of: Callable[[WorkerTime], int | None]) -> int | None:
        """Return the samples of the mean worker with which the first worker is at its limit; None: none has one."""
        limits = [(most, time) for time in times for most in [of(time)] if most is not None]
        per_sample_s = len(times) / rate
        return min(
            (max(1, math.floor(most * time.per_sample_s / per_sample_s * (1 + 1e-9))) for most, time in limits),
            default=None,
        )

    fixed_s, floor_s = mean(lambda time: time.fixed_s), max(time.floor_s for time in times)
    return WorkerTime(
        fixed_s=fixed_s,
        per_sample_s=len(times) / rate,
        floor_s=floor_s,
        min_samples=max(time.min_samples for time in times),
        max_samples=least(lambda time: time.max_samples),
        micro_batch=least(lambda time: time.micro_batch),
        once_s=min(mean(lambda time: time.once_s), max(fixed_s, floor_s)),
    )
