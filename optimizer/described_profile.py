"""Profile of a job that was described and not measured: counted operations and bytes in place of timings."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from hetopt.core.errors import BadInput
from hetopt.core.formatting import bytes_, duration
from hetopt.core.profile import Counted, Device, Host, Job, Profile, StepTime
from hetopt.optimizer.market.instance_type import Accelerator
from hetopt.optimizer.model_counts import FULL, MASTER_BYTES, ModelCount, Recipe
from hetopt.optimizer.step_time.device_memory import blocks_of, schemes
from hetopt.optimizer.step_time.gpu_transfer import Precision, gpu_of, is_half
from hetopt.optimizer.step_time.priors import beside_others
from hetopt.optimizer.step_time.transfer import LAUNCH_S
from hetopt.optimizer.step_time.utilisation import REFERENCE, sample_s, utilisation_prior

COUNTED = "counted"
"""Device type of a described profile, which is no machine."""

REFERENCE_GPU = ("A100", 40 * 2**30)
"""Name and memory, bytes, of the GPU `REFERENCE`, as drivers tell them."""

OPERATORS_A_LAYER = 60
"""Number of kernels of forward, backward and update a layer."""


HARDLY_USED = 0.05
"""Share of a GPU's peak rate below which something else than its matrix products may have taken the time."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Past training of the described job: wall time, seconds, and the GPUs (type and number) that were used."""

    took_s: float
    gpus: Accelerator

    def utilisation(self, count: ModelCount, recipe: Recipe, samples: int, precision: Precision) -> float:
        """Return the share (MFU) of the GPUs' peak rate that training on ``samples`` had, half of attention counted.

        Args:
            count: counts of the model.
            recipe: how the model was trained.
            samples: number that the whole training passed over.
            precision: number format in which matrices were multiplied.

        Raises:
            BadInput: no rates of the GPU are published, or the share would be above 1.
        """
        flops = recipe.passes * samples * (count.forward_flops - count.attention_flops / 2)
        most = self._most_flops(precision)
        share = flops / most
        if share > 1:
            raise BadInput(
                f"{duration(self.took_s)} on {self.gpus.count} x {self.gpus.name} would mean a "
                f"utilisation of {100 * share:,.0f} % of its peak, "
                f"{most / self.took_s / self.gpus.count / 1e12:g} TFLOP/s in {precision}.",
                hint="correct `took`, `on`, or what was trained",
            )
        return share

    def usual_flops(self, precision: Precision) -> float:
        """Return the FLOPs that the timed training did if it used its GPUs at the usual share of their peak rate.

        Raises:
            BadInput: no rates of the GPU are published.
        """
        return utilisation_prior().transformer.usual * self._most_flops(precision)

    def _most_flops(self, precision: Precision) -> float:
        """Return the floating-point operations that the GPUs can do in ``took_s`` at their peak rate.

        Raises:
            BadInput: no rates of the GPU are published.
        """
        gpu = gpu_of(self.gpus)
        if gpu is None:
            raise BadInput(f"no rates of the {self.gpus.name} are published.", hint="leave `took` and `on` out")
        return self.took_s * self.gpus.count * 1e12 * gpu.tflops(precision)

    def remarks(self, count: ModelCount, recipe: Recipe, samples: int, precision: Precision) -> Iterator[str]:
        """Yield a warning sentence if the timed training used less than 5 % of its GPUs' peak rate; else nothing.

        Arguments and errors are as of `utilisation`.
        """
        share = self.utilisation(count, recipe, samples, precision)
        if share < HARDLY_USED:
            yield (
                f"The {self.gpus.name} was used at {100 * share:.2g} % of its peak: if loading or Python is the "
                "reason, faster GPUs will not help. The range allows for that."
            )

    def by_time(
        self, counted: Counted, count: ModelCount, recipe: Recipe, samples: int, precision: Precision
    ) -> Counted:
        """Return ``counted`` rescaled so that a sample takes as long as it did in the timed training.

        ``log_sd`` becomes the spread between GPUs. If the training used less than `HARDLY_USED` of its GPUs' peak, its
        seconds a sample are kept as ``unexplained_s``.

        Args:
            counted: operations and bytes of a sample, by count.
            count: counts of the model.
            recipe: how the model was trained.
            samples: number that the whole training passed over.
            precision: number format in which matrices were multiplied.

        Raises:
            BadInput: no rates of the GPUs are published, the training would be above their peak rate, or their memory
                does not hold a step of one sample.
        """
        share, gpu, gpus = self.utilisation(count, recipe, samples, precision), gpu_of(self.gpus), self.gpus.count
        assert gpu is not None
        memory = recipe.memory(count, 1, half=is_half(precision))
        needed = min(way.held(memory, blocks_of(counted)).peak_bytes(1) for way in schemes(counted, gpus))
        if needed > self.gpus.memory_bytes:  # what was trained needed no reserve, which plans leave
            raise BadInput(
                f"{self.gpus.name} has {bytes_(self.gpus.memory_bytes)} of memory, and a step of one sample takes "
                f"{bytes_(needed)}{' of each' * (gpus > 1)}.",
                hint="correct `on`, or what was trained and how: `method`, `optimizer`",
            )
        each_s = self.took_s * gpus / samples / beside_others(gpus)
        factor = each_s / sample_s(counted, gpu, precision)
        return counted.model_copy(
            update={
                "flops": factor * counted.flops,
                "moved_bytes": None if counted.moved_bytes is None else factor * counted.moved_bytes,
                "log_sd": utilisation_prior().transformer.gpu_log_sd,
                "unexplained_s": each_s if share < HARDLY_USED else None,
            }
        )


def described_profile(
    count: ModelCount,
    *,
    samples: int,
    batch_size: int,
    precisions: Sequence[Precision],
    now: datetime.datetime,
    recipe: Recipe = FULL,
    timed: Timed | None = None,
) -> Profile:
    """Return a profile of a described job on an A100, its step times computed from counts instead of measured.

    Args:
        count: counts of the model.
        samples: number that the whole training passes over; the profile's data set has as many.
        batch_size: samples of a step.
        precisions: precisions of matrix products, the usual one first; the profile has a device for each.
        now: the profile's date.
        recipe: how the model is trained.
        timed: a past training of the job, by which step times are scaled; None: there was none.

    Raises:
        BadInput: the timed training is impossible, see `Timed.by_time`.
    """
    trained = recipe.trained_parameters(count.parameters)
    operators = OPERATORS_A_LAYER * count.layers

    def device(precision: Precision) -> Device:
        """Return the device of the profile that computes in a precision. Errors are as of `Timed.by_time`."""
        prior, memory = utilisation_prior(), recipe.memory(count, batch_size, half=is_half(precision))
        counted = prior.counted(count, precision, recipe)
        if timed is not None:
            counted = timed.by_time(counted, count, recipe, samples, precision)
        fixed_s = LAUNCH_S * operators if count.kind == "transformer" else prior.fixed_s
        each_s = sample_s(counted, REFERENCE, precision)
        # One sample must fit: what a GPU cannot hold at once, it computes in micro-batches.
        peak_bytes = round(memory.peak_bytes(1))
        return Device(
            type=COUNTED,
            kind="cuda",
            workers_per_host=1,
            threads_per_worker=1,
            # torch's default multiplies in TF32 where there are such units, and devices call it fp32.
            precision="fp32" if precision == "default" else precision,
            step_times=tuple(
                _step(size, fixed_s + each_s * size, peak_bytes, recipe) for size in sorted({1, max(2, batch_size)})
            ),
            memory_limit_bytes=REFERENCE_GPU[1],
            memory=memory,
            matmul_flops_per_s=1e12 * REFERENCE.fp32_tflops,
            copy_bytes_per_s=1e9 * REFERENCE.bandwidth_gb_per_s,
            counted=counted,
        )

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
        devices=tuple(map(device, precisions)),
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
