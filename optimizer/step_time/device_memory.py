"""Memory of a worker's device, and the samples that fit in it beside the model's state and the gradient exchange.

    usable(GPU)   = 0.9 memory - 750 MiB       its own; the context of CUDA and the libraries' workspaces
    usable(CPU)   = 0.9 memory - 1.5 GiB       main memory; the operating system, Python and torch
    micro-batch   = largest b with peak(b) <= usable      (`hetopt.core.memory`, with what the exchange keeps)
    kept          = 2 gradients with error feedback, 4 with momentum correction (the residual, and its swap copy)
    taken         = 0 to 2 gradients for a method to work in + 16 bytes for each element that a worker sends

A task computes a larger local batch in several micro-batches, so that one sample has to fit and no more. A script
computes what its loader gives it at once: there the local batch itself has to fit.

A selection works in the magnitudes and a mask: 5/4 of a gradient. An average of parameters keeps the parameters of the
last one beside the residual of its rounding, and takes two more copies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetopt.core.comm.composition import CORRECTION, FEEDBACK, combine
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.memory import ALONE, Blocks, ExchangeMemory, Sharding, TrainingMemory
from hetopt.core.profile import Counted
from hetopt.core.run_spec import Compression, Synchronization
from hetopt.optimizer.fit import FittedDevice, FittedModel
from hetopt.optimizer.market.instance_type import InstanceType

MEMORY_FRACTION = 0.9
"""Of a device's memory, for training: the rest is what allocators lose between blocks of unequal size. The part that
vLLM takes of a GPU by default, too (`gpu_memory_utilization`)."""

ACCELERATOR_CONTEXT_BYTES = 750 * 2**20
"""Taken by the CUDA context and the libraries' workspaces before the first tensor."""

HOST_MEMORY_BYTES = 3 * 2**29
"""Main memory that the operating system, Python and torch take before training: 1.5 GiB."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Scheme by which a device holds its part of a model replica: sharded or not, activations recomputed or not.

    Attributes:
        shards: devices of the machine that share the replica's weights, gradients and optimizer state.
        shard: the same as an option of the run; with "grads", weights stay gathered from forward to backward.
        recomputes: whether a layer's activations are computed anew for its backward pass.
    """

    shards: int = 1
    shard: Sharding = "none"
    recomputes: bool = False

    def held(self, memory: TrainingMemory, blocks: Blocks) -> TrainingMemory:
        """Return the bytes that one device holds under this scheme, from those of a whole replica (``memory``)."""
        if self == REPLICATED:
            return memory
        return memory.shared(blocks, self.shards, regathers=self.shard != "grads", recomputes=self.recomputes)


REPLICATED = Scheme()


def blocks_of(described: Counted) -> Blocks:
    """Return the layers of a described model, taken to be all alike and to hold all weights."""
    return Blocks(number=described.layers, share=1 / described.layers, weight_bytes=described.weight_bytes)


def sharable(model: FittedModel) -> Blocks | None:
    """Return the blocks by which devices can share a job's model; None: the model has none, or the job is a script."""
    described, job, memory = model.reference.device.counted, model.profile.job, counted(model)
    if described is not None:
        return blocks_of(described)
    if memory is None or job.blocks is None or job.block_share is None:
        return None
    # Autocast copies fp32 weights to 16 bits after they were gathered, and keeps the copies for backward.
    return Blocks(number=job.blocks, share=job.block_share, weight_bytes=memory.parameter_bytes)


def schemes(described: Counted | None, devices: int, asked: Sharding | None = None) -> list[Scheme]:
    """Return the schemes that may hold a replica on a machine's devices, the quicker first, the most saving last.

    A described job shards fully, if at all, and a transformer may recompute its layers.

    Args:
        described: operations of a described job; None: the job was measured.
        devices: number of devices of the machine; one shards nothing.
        asked: sharding that the job asks for (`Job.shard`), then the only one; None or "auto": any.
    """
    open_to: tuple[Sharding, ...] = ("grads", "full") if described is None else ("full",)
    offered = [shard for shard in open_to if asked in (None, "auto", shard)] if devices > 1 else []
    shared = [Scheme(shards=devices, shard=shard) for shard in offered]
    ways = shared if asked in offered else [REPLICATED, *shared]
    if described is not None and described.moved_bytes is not None:  # a transformer: layers that are all alike
        ways += [replace(scheme, recomputes=True) for scheme in ways]
    return ways


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of the device that one worker has, in bytes, and the samples that fit in it.

    Attributes:
        device_bytes: memory of the whole device.
        usable_bytes: memory less the reserve.
        micro_batch: most samples that are computed together; None: any number, as far as is known.
        splits: whether larger local batches are computed in micro-batches.
        free_bytes: memory beside what is kept from step to step and the exchange; None: not known.
        step_bytes: part of ``free_bytes`` that a step of a micro-batch takes.
        fresh_bytes: bytes of gradients that are there while a copy is exchanged.
        scheme: sharding and recomputing of the replica.
    """

    device_bytes: int
    usable_bytes: int
    micro_batch: int | None
    splits: bool
    free_bytes: float | None = None
    step_bytes: float = 0.0
    fresh_bytes: int = 0
    scheme: Scheme = REPLICATED

    @property
    def most_samples(self) -> int | None:
        """The most samples of a local batch; None: any number, as far as is known."""
        return None if self.splits else self.micro_batch

    @property
    def part(self) -> int | None:
        """The most samples of a micro-batch; None: local batches are not split, or it may be any number."""
        return self.micro_batch if self.splits else None


def counted(model: FittedModel) -> TrainingMemory | None:
    """Return the bytes of a worker's tensors, which are alike on every device; None: the profile did not count them."""
    return next((fitted.device.memory for fitted in model.devices if fitted.device.memory is not None), None)


def usable_on_gpu(memory_bytes: float) -> int:
    """Return how many bytes of a GPU's memory training may use: 90 %, less 750 MiB for the CUDA context."""
    return int(MEMORY_FRACTION * memory_bytes - ACCELERATOR_CONTEXT_BYTES)


def usable_bytes(instance: InstanceType) -> tuple[int, int]:
    """Return the memory of one worker's device and the part that training may use, in bytes; on CPUs main memory."""
    gpu = instance.accelerator
    if instance.cuda_devices and gpu is not None:
        return gpu.memory_bytes, usable_on_gpu(gpu.memory_bytes)
    return instance.memory_bytes, int(MEMORY_FRACTION * instance.memory_bytes - HOST_MEMORY_BYTES)


def room(
    model: FittedModel,
    *,
    on_gpu: bool,
    device_bytes: int,
    usable: int,
    time_s: Callable[[Scheme, int | None], float],
    exchange: ExchangeMemory = ALONE,
    measured: FittedDevice | None = None,
    devices: int = 1,
) -> Room | None:
    """Return a worker's device memory and its largest micro-batch; None: not even the fewest samples it can take fit.

    Args:
        model: fits of the profile.
        on_gpu: whether tensors are on a GPU; else the limit is that of the process, which holds more than they.
        device_bytes: bytes of the whole device.
        usable: bytes of it that training may use; 0 or less: nothing fits.
        time_s: returns the seconds of a device's step by scheme and largest micro-batch, in samples; None: any fits.
        exchange: memory of the exchange that takes most; one that takes nothing will do where no other fits.
        measured: fit of this very device; None: it was not profiled, and the reference device's memory counts.
        devices: devices of the machine, which share a replica where none can hold it alone.
    """
    job, memory, blocks = model.profile.job, counted(model), sharable(model)
    scheme = REPLICATED
    if memory is not None and blocks is not None:
        fits = {
            way: way.held(memory, blocks).largest_micro_batch(usable)
            for way in schemes(model.reference.device.counted, devices, job.shard)
        }
        fitting = [way for way, most in fits.items() if most is None or most >= job.least_local_batch_size]
        # The quickest in which the fewest samples of a step fit; where none fits, the most saving.
        scheme = min(fitting, key=lambda way: time_s(way, fits[way]), default=[*fits][-1])
        memory = scheme.held(memory, blocks)
    line = None if on_gpu and memory is not None else (measured or model.reference).memory
    least = job.least_local_batch_size

    def largest(kept: ExchangeMemory) -> int | None:
        """Return the largest micro-batch beside an exchange, by tensors and by process, the smaller; None: any fits."""
        by_tensors = None if memory is None else memory.largest_micro_batch(usable, kept)
        by_process = None if line is None else line.largest_batch(usable)
        return min((limit for limit in (by_tensors, by_process) if limit is not None), default=None)

    if usable <= 0:
        return None
    most = largest(exchange if scheme.shards == 1 else ALONE)
    if most is not None and most < least:
        most = largest(ALONE)
    if most is not None and most < least:
        return None
    # Micro-batches are as equal as can be: one more sample than fits makes two of about half as many.
    splits = not job.script and (most is None or most >= 2 * least - 1)
    if memory is None:
        return Room(device_bytes=device_bytes, usable_bytes=usable, micro_batch=most, splits=splits)
    return Room(
        device_bytes=device_bytes,
        usable_bytes=usable,
        micro_batch=most,
        splits=splits,
        free_bytes=usable - memory.kept_bytes,
        step_bytes=0.0 if most is None else memory.peak_bytes(most) - memory.kept_bytes,
        fresh_bytes=memory.fresh_bytes,
        scheme=scheme,
    )


@dataclass(frozen=True, kw_only=True)
class ExchangeLine:
    """Bytes of GPU memory that an exchange among n > 1 workers keeps, and works in (``fixed_bytes + each_bytes n``)."""

    kept_bytes: float
    fixed_bytes: float
    each_bytes: float

    @classmethod
    def of(cls, compression: Compression, sync: Synchronization, gradient_bytes: int) -> ExchangeLine:
        """Return an exchange's memory by number of workers; ``gradient_bytes``: of the whole gradient in fp32."""
        two, three = (
            exchange_memory(compression, gradient_bytes=gradient_bytes, workers=workers, sync=sync)
            for workers in (2, 3)
        )
        each = three.taken_bytes - two.taken_bytes
        return cls(kept_bytes=two.kept_bytes, fixed_bytes=two.taken_bytes - 2 * each, each_bytes=each)


RESIDUAL_VECTORS = {FEEDBACK: 2, CORRECTION: 4}

WORKING_VECTORS = {"identity": 0, "int8": 2, "int4": 2, "dgc": 2}
"""Of the size of the gradient; `SELECTION` where nothing is said."""

SELECTION = 1.25
"""A copy of the gradient in four bytes an element, and a mask in one."""

SENT_ELEMENT_BYTES = 16
"""Of an element that is sent: its value and its index, once as they are selected and once as they arrive."""


def exchange_memory(
    compression: Compression, *, gradient_bytes: int, workers: int, sync: Synchronization | None = None
) -> ExchangeMemory:
    """Return the bytes of device memory that an exchange keeps and takes, the gradient aside; 0 for one worker.

    Args:
        compression: compression of the gradient; ``auto``, which may come to any that sends a part, counts as topk.
        gradient_bytes: bytes of the whole gradient in fp32.
        workers: number of workers that exchange.
        sync: policy of synchronization; None: workers exchange in every step.

    Raises:
        BadInput: there is no such compression, or its memory and collective do not go together.
    """
    if workers == 1:
        return ALONE
    averages = sync is not None and sync.is_local
    chosen = combine(compression.name, memory=compression.memory, collective=compression.collective)
    sent = 0.0
    if chosen.method.by_ratio:
        sent = compression.ratio * gradient_bytes / VALUE_BYTES * SENT_ELEMENT_BYTES * workers
    return ExchangeMemory(
        kept_bytes=(RESIDUAL_VECTORS.get(chosen.memory, 0) + averages) * gradient_bytes,
        taken_bytes=int((WORKING_VECTORS.get(chosen.name, SELECTION) + 2 * averages) * gradient_bytes + sent),
    )
