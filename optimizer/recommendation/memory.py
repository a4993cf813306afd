"""What a plan's machines hold of the job, part by part; and, where no machine holds it, what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.formatting import bytes_
from hetopt.core.memory import TrainingMemory
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.market.catalog import Catalog, Offer
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import OWN, Candidate, MachineMemory
from hetopt.optimizer.search.search_space import MachineOption
from hetopt.optimizer.step_time.device_memory import counted, exchange_memory, scheme_of, usable_bytes
from hetopt.optimizer.step_time.transfer import unusable

NOT_COUNTED = (
    "What training takes of memory was not counted in this profile: micro-batches are not planned, and machines are "
    "left out by the memory of the profiled process alone; profile again to have it."
)


def memory_table(
    model: FittedModel, candidates: Iterable[Candidate], options: Sequence[MachineOption]
) -> tuple[MachineMemory, ...]:
    """Return the memory use of each machine type, in its first candidate; empty where the profile counted none.

    Args:
        model: what the profile says.
        candidates: the chosen one first.
        options: that the candidates were chosen from.
    """
    if counted(model) is None:
        return ()
    known = {(option.name, option.precision): option for option in reversed(options)}
    by_type: dict[str, MachineMemory] = {}
    for candidate in candidates:
        memory = counted(model.computing_in(candidate.precision)) or counted(model)
        assert memory is not None
        workers = sum(len(group.local_batch_sizes) for group in candidate.groups)
        exchange = exchange_memory(
            candidate.compression, gradient_bytes=memory.gradient_bytes, workers=workers, sync=candidate.sync
        )
        for group in candidate.groups:
            option, share = known[group.instance_type, candidate.precision], max(group.local_batch_sizes)
            has = option.worker.room
            if group.instance_type in by_type or has is None:
                continue
            described = model.reference.device.counted
            held = memory if described is None else has.scheme.held(memory, described)
            instance = option.offer.instance_type
            part = min(share, has.micro_batch or share)
            peak, kept = held.peak_bytes(part, exchange), held.kept_bytes + exchange.kept_bytes
            line = model.reference.memory if option.worker.kind == "cpu" else None
            by_type[group.instance_type] = MachineMemory(
                instance_type=group.instance_type,
                device=_device(instance),
                device_bytes=has.device_bytes,
                usable_bytes=has.usable_bytes,
                local_batch_size=share,
                micro_batch=part,
                largest_micro_batch=has.micro_batch,
                parameter_bytes=held.parameter_bytes + held.buffer_bytes,
                gradient_bytes=held.gradient_bytes,
                optimizer_bytes=held.optimizer_bytes,
                residual_bytes=exchange.kept_bytes,
                activation_bytes=round(peak - kept),
                peak_bytes=round(peak if line is None else max(peak, line.peak_bytes(part))),
            )
    return tuple(by_type.values())


def _device(instance: InstanceType) -> str:
    gpu = instance.accelerator
    return gpu.name if instance.cuda_devices and gpu is not None else "main memory"


def fits_nowhere(model: FittedModel, catalog: Catalog, offered: Sequence[Offer]) -> NoFeasiblePlan:
    """Return the error where no machine holds the fewest samples: what they need, the largest device, what would help.

    Args:
        model: what the profile says.
        catalog: of the region, or of one's own machines.
        offered: of it, what was asked for.
    """
    instances = {offer.instance_type.name: offer.instance_type for offer in offered}
    possible = [instance for instance in instances.values() if unusable(instance) is None]
    described = model.reference.device.counted

    def size(instance: InstanceType) -> tuple[bool, int]:
        """Return whether a machine has GPUs, and the usable bytes of one device, or of all that share a replica."""
        shared = 1 if described is None else max(1, instance.cuda_devices)
        return instance.cuda_devices > 0, shared * usable_bytes(instance)[1]

    largest = max(possible, key=size)
    on_gpu = largest.cuda_devices > 0
    least, memory = model.profile.job.least_local_batch_size, counted(model) if on_gpu else None
    device_bytes, usable = usable_bytes(largest)
    if memory is not None and described is not None:
        memory = scheme_of(memory, described, devices=largest.cuda_devices, usable_bytes=usable).held(memory, described)
    line = model.reference.memory
    need = memory.peak_bytes(least) if memory is not None else line.peak_bytes(least) if line is not None else 0.0
    samples = "one sample" if least == 1 else f"{least} samples, the fewest that BatchNorm can normalise,"
    parts = "" if memory is None else f" ({_parts(memory, need)})"
    place = "of your own" if catalog.region == OWN else f"offered in {catalog.region}"
    device = "a GPU" if on_gpu else "main memory"
    if described is not None and largest.cuda_devices > 1:
        device = f"each of {largest.cuda_devices} GPUs that share the model"
    return NoFeasiblePlan(
        f"No machine {place} holds a training step of {samples}: it needs {bytes_(need)} of {device}{parts}, and the "
        f"largest, {largest.name}, has {bytes_(device_bytes)} ({_device(largest)}), of which training may use "
        f"{bytes_(max(0, usable))}.",
        hint=f"{_SMALLER_STEP if described is None else _SMALLER_JOB}, or allow machines with more memory: "
        "`hetopt gpus --sort memory --reverse`",
    )


_SMALLER_STEP = (
    "compute in bf16, recompute activations in the backward pass (gradient checkpointing, torch.utils.checkpoint), or "
    "train a smaller model"
)
_SMALLER_JOB = 'choose a smaller model, shorten the samples with `tokens`, or train adapters with `method="lora"`'
"""What makes a described job fit; sharding over a machine's GPUs and recomputing were tried."""


def _parts(memory: TrainingMemory, need: float) -> str:
    return (
        f"parameters {bytes_(memory.parameter_bytes + memory.buffer_bytes)}, gradients "
        f"{bytes_(memory.gradient_bytes)}, optimizer state {bytes_(memory.optimizer_bytes)}, activations "
        f"{bytes_(need - memory.kept_bytes)}"
    )
