"""A profile of a job that was only described: what is counted of it, in the place of what would be measured."""

from __future__ import annotations

import datetime
from importlib.metadata import version

from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.core.profile import Device, Host, Job, Profile, StepTime
from hetopt.optimizer.model_counts import ModelCount
from hetopt.optimizer.step_time.gpu_transfer import Precision, is_half
from hetopt.optimizer.step_time.transfer import LAUNCH_S
from hetopt.optimizer.step_time.utilisation import CONTRIBUTION, REFERENCE, sample_s, utilisation_prior

COUNTED = "counted"
"""The device type of a described profile: no machine."""

REFERENCE_GPU = ("A100", 40 * 2**30)
"""Name and memory of `REFERENCE` as drivers tell them."""

MASTER_BYTES = 4
ADAM_BYTES = 8
HALF_BYTES = 2
"""Of a parameter: itself and its gradient in single precision each, Adam's two moments, and the copy that is multiplied
with in 16 bits. The first three are the 16 bytes of mixed precision (Rajbhandari et al. 2020, section 3.1)."""

OPERATORS_A_LAYER = 60
"""Kernels of forward, backward and update."""


def described_profile(
    count: ModelCount, *, samples: int, batch_size: int, precision: Precision, now: datetime.datetime
) -> Profile:
    """What the planner needs to know of a job, by what its operations, bytes and samples come to.

    Args:
        count: the model.
        samples: that it is trained on, all in all.
        batch_size: samples of a step.
        precision: of its matrix products.
        now: the profile's date.
    """
    prior = utilisation_prior()
    memory = training_memory(count, batch_size, precision)
    # One sample must fit: what a GPU cannot hold at once, it computes in micro-batches.
    peak_bytes = round(memory.peak_bytes(1))
    counted, operators = prior.counted(count, precision), OPERATORS_A_LAYER * count.layers
    fixed_s = LAUNCH_S * operators if count.kind == "transformer" else prior.fixed_s
    each_s = sample_s(counted, REFERENCE, precision)
    return Profile(
        created=now.isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        seed=0,
        host=Host(
            cpu_model="none: the job was described",
            logical_cpus=1,
            memory_bytes=REFERENCE_GPU[1],
            operating_system="none",
            python_version="none",
            torch_version="none",
            accelerator=REFERENCE_GPU[0],
            accelerator_count=1,
            accelerator_memory_bytes=REFERENCE_GPU[1],
        ),
        job=Job(
            task=count.name,
            parameters=count.parameters,
            gradient_bytes=MASTER_BYTES * count.parameters,
            dataset_size=samples,
            batch_size=batch_size,
            learning_rate_rule="none",
            target_metric="loss",
            target_value=0.0,
            target_higher_is_better=False,
            operators_per_step=operators,
            flops_per_sample=CONTRIBUTION * count.forward_flops,
            model_kind=count.kind,
        ),
        devices=(
            Device(
                type=COUNTED,
                kind="cuda",
                workers_per_host=1,
                threads_per_worker=1,
                precision=_device_precision(precision),
                step_times=tuple(
                    _step(size, fixed_s + each_s * size, peak_bytes) for size in sorted({1, max(2, batch_size)})
                ),
                memory_limit_bytes=REFERENCE_GPU[1],
                memory=memory,
                matmul_flops_per_s=1e12 * REFERENCE.fp32_tflops,
                copy_bytes_per_s=1e9 * REFERENCE.bandwidth_gb_per_s,
                counted=counted,
            ),
        ),
        profiling_s=0.0,
    )


def training_memory(count: ModelCount, batch_size: int, precision: Precision) -> TrainingMemory:
    """What training with Adam keeps and takes, activations of every layer included."""
    half = is_half(precision)
    copies = HALF_BYTES * count.parameters if half else 0
    per_sample = count.activation_bytes * (1 if half else 2)
    return TrainingMemory(
        parameter_bytes=MASTER_BYTES * count.parameters,
        buffer_bytes=0,
        gradient_bytes=MASTER_BYTES * count.parameters,
        optimizer_bytes=ADAM_BYTES * count.parameters,
        steps=tuple(
            StepMemory(samples=size, computing_bytes=max(1, round(copies + per_sample * size)), updating_bytes=0)
            for size in sorted({1, max(2, batch_size)})
        ),
    )


def _step(size: int, step_time_s: float, peak_bytes: int) -> StepTime:
    return StepTime(
        local_batch_size=size,
        step_time_s=step_time_s,
        samples_s=(step_time_s,),
        load_s=0.0,
        forward_s=step_time_s / CONTRIBUTION,
        backward_s=step_time_s * (1 - 1 / CONTRIBUTION),
        optimizer_s=0.0,
        peak_memory_bytes=peak_bytes,
    )


def _device_precision(precision: Precision) -> str:
    """As devices have it: ``fp32`` is torch's default, which multiplies in TF32 where there are such units."""
    return precision if precision in ("fp16", "bf16") else "fp32"
