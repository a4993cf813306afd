"""A profile of a job that was only described: what is counted of it, in the place of what would be measured."""

from __future__ import annotations

import datetime
from importlib.metadata import version

from hetopt.core.profile import Counted, Device, Host, Job, Profile, StepTime
from hetopt.optimizer.model_counts import FULL, MASTER_BYTES, ModelCount, Recipe
from hetopt.optimizer.step_time.gpu_transfer import Precision, is_half
from hetopt.optimizer.step_time.transfer import LAUNCH_S
from hetopt.optimizer.step_time.utilisation import REFERENCE, sample_s, utilisation_prior

COUNTED = "counted"
"""The device type of a described profile: no machine."""

REFERENCE_GPU = ("A100", 40 * 2**30)
"""Name and memory of `REFERENCE` as drivers tell them."""

OPERATORS_A_LAYER = 60
"""Kernels of forward, backward and update."""


def described_profile(
    count: ModelCount,
    *,
    samples: int,
    batch_size: int,
    precision: Precision,
    now: datetime.datetime,
    recipe: Recipe = FULL,
    counted: Counted | None = None,
) -> Profile:
    """Return the profile of a job that was only described, from its counted operations, bytes and samples.

    Args:
        count: the model.
        samples: that it is trained on, all in all.
        batch_size: samples of a step.
        precision: of its matrix products.
        now: the profile's date.
        recipe: how the model is trained.
        counted: what a sample computes and moves; absent: as the model counts to.
    """
    prior = utilisation_prior()
    memory = recipe.memory(count, batch_size, half=is_half(precision))
    trained = recipe.trained_parameters(count.parameters)
    # One sample must fit: what a GPU cannot hold at once, it computes in micro-batches.
    peak_bytes = round(memory.peak_bytes(1))
    counted = counted or prior.counted(count, precision, recipe)
    operators = OPERATORS_A_LAYER * count.layers
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
            parameters=trained,
            gradient_bytes=MASTER_BYTES * trained,
            dataset_size=samples,
            batch_size=batch_size,
            learning_rate_rule="none",
            target_metric="loss",
            target_value=0.0,
            target_higher_is_better=False,
            operators_per_step=operators,
            flops_per_sample=recipe.passes * count.forward_flops,
            model_kind=count.kind,
        ),
        devices=(
            Device(
                type=COUNTED,
                kind="cuda",
                workers_per_host=1,
                threads_per_worker=1,
                # torch's default multiplies in TF32 where there are such units, and devices call it fp32.
                precision="fp32" if precision in ("tf32", "default") else precision,
                step_times=tuple(
                    _step(size, fixed_s + each_s * size, peak_bytes, recipe) for size in sorted({1, max(2, batch_size)})
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


def _step(size: int, step_time_s: float, peak_bytes: int, recipe: Recipe) -> StepTime:
    return StepTime(
        local_batch_size=size,
        step_time_s=step_time_s,
        samples_s=(step_time_s,),
        load_s=0.0,
        forward_s=step_time_s / recipe.passes,
        backward_s=step_time_s * (1 - 1 / recipe.passes),
        optimizer_s=0.0,
        peak_memory_bytes=peak_bytes,
    )
