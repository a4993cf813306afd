"""Facts that are looked up or counted, not timed: the host, operators and FLOPs, and the memory that a step takes."""

from __future__ import annotations

import ctypes
import os
import platform
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hetopt.core.interruption import usable_processors
from hetopt.core.memory import StepMemory, TrainingMemory
from hetopt.core.profile import Host
from hetopt.core.step_samples import ModelKind

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_facts(device: torch.device) -> Host:
    """Return this machine's hardware and software: CPU, memory, versions, and its GPUs if ``device`` is one.

    Without a GPU as ``device`` the fields on accelerators are None and 0, whatever the machine has.
    """
    cuda = device.type == "cuda"
    return Host(
        cpu_model=_cpu_model(),
        logical_cpus=usable_processors(),
        memory_bytes=host_memory_bytes(),
        operating_system=f"{platform.system()} {platform.release()}",
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        accelerator=torch.cuda.get_device_name(device) if cuda else None,
        accelerator_count=torch.cuda.device_count() if cuda else 0,
        accelerator_memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
    )


def host_memory_bytes() -> int:
    """Return the bytes of main memory that processes may use: the machine's, or the control group's lower limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # not mounted, or "max"
            total = min(total, int(path.read_text()))
    return total


def device_memory_bytes(device: torch.device) -> int:
    """Return the bytes that workers on a device may use: main memory, or a GPU's less what other programs hold.

    Of main memory it is `host_memory_bytes`, whatever other programs use.
    """
    if device.type == "cpu":
        return host_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory_bytes` returns: on a GPU torch's allocator's, else the process's.

    If the system does not allow the latter, the peak only ever grows.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # The allocator keeps what was freed; glibc's gives it back when asked, others lack the function.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Writing 5 resets VmHWM (Linux, proc_pid_clear_refs). Where that is refused the peak only ever grows, which
    # is still right for batch sizes tried in increasing order.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return peak bytes since `reset_peak_memory`: a GPU's tensors, or a process less file pages; None: unknown.

    Pages of files (libraries, mapped data) are left out: workers of a machine share them, and the kernel takes them
    back when memory is short.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        return resident_peak_bytes(Path("/proc/self/status").read_text())
    return None


def resident_peak_bytes(status: str) -> int | None:
    """Return a process's peak resident bytes less file pages, from the text of ``/proc/PID/status``; None: not said."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmHWM" not in fields:
        return None
    most, of_files = (1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("VmHWM", "RssFile"))
    return max(1, most - of_files)


def _cpu_model() -> str:
    """Return the processor's model name by the kernel, else by Python, else 'unknown'."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


class WorkCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counter of torch operators, views left out, and of FLOPs of matrix work, which counts while it is entered.

    Attributes:
        operators: number of operators so far.
        flops: floating-point operations of matrix products and convolutions so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.operators = self.flops = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator and return its result; count it unless it is a view, and its FLOPs if torch has a formula."""
        named = kwargs or {}
        result = func(*args, **named)
        self.operators += not func.is_view and func.namespace != "profiler"
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **named, out_val=result)
        return result


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Turn oneDNN and cuDNN off in this context, so that fused recurrent layers become matrix products to count."""
    before = torch._C._get_mkldnn_enabled()
    # Not torch.backends.mkldnn.flags: it also sets what only Intel GPUs have, with a warning.
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


CONVOLUTIONS = (nn.modules.conv._ConvNd,)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
ATTENTION = ("attention", "attn", "transformer")
"""Words in the names of modules' classes that tell attention, in small letters: most models write it anew."""


def model_kind(modules: Iterable[nn.Module]) -> ModelKind | None:
    """Return a model's kind by its modules: 'recurrent', 'transformer', 'convolution' or 'embedding'; None: neither.

    Recurrent with a recurrent module; a transformer with attention (by names of classes) unless most weights outside
    embedding tables are of convolutions; then convolutional with a convolution; then embedding if tables have most of
    the weights.
    """
    every = list(modules)
    weights = _of(every, (nn.Module,))
    convolutional = _of(every, CONVOLUTIONS)
    embedded = _of(every, EMBEDDINGS)
    if any(isinstance(module, RECURRENT) for module in every):
        return "recurrent"
    attends = any(word in type(module).__name__.lower() for module in every for word in ATTENTION)
    if attends and 2 * convolutional <= weights - embedded:
        return "transformer"
    if convolutional:
        return "convolution"
    return "embedding" if 2 * embedded > weights else None


def _of(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> int:
    """Return the number of weights in some kinds of module, shared ones once."""
    sizes = {
        id(parameter): parameter.numel()
        for module in modules
        if isinstance(module, kinds)
        for parameter in module.parameters(recurse=False)
    }
    return sum(sizes.values())


def states_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return all tensors in the states of optimizers, such as momentum buffers; empty before their first step."""
    return [
        leaf
        for optimizer in optimizers
        for state in optimizer.state.values()
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor)
    ]


class StepMemoryCount:
    """Counter of the bytes of memory that a training step takes: in computing, and in the optimizers' updates.

    Memory that a job keeps from step to step is not counted as taken; on a GPU the memory that its libraries hold is
    part of computing. Call `begins`, `gets`, `updates` and `updated`, in this order, with ``tensors`` entered
    meanwhile.

    Args:
        device: device that computes the step.
        parameters: parameters of the model, trained or not.
        buffers: buffers of the model.
        optimizers: optimizers that have stepped once, so that their state exists.
        gradient_bytes: bytes of all trained parameters.
        gradient: buffer in which the gradient lies from step to step; None: backward makes a new one in each step.

    Attributes:
        tensors: the counter of live and peak bytes, a context to enter around the step.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        gradient_bytes: int,
        gradient: Tensor | None = None,
    ) -> None:
        """Make a counter, and count the bytes that the job keeps from step to step."""
        self._parameters, self._buffers, self._optimizers = parameters, buffers, optimizers
        self._gradient_bytes = gradient_bytes
        kept = [*parameters, *buffers, *states_of(optimizers), *([] if gradient is None else [gradient])]
        self.tensors: PeakBytes = count_on(device)
        self.tensors.hold(kept)
        self._kept_bytes = bytes_of(kept)
        self._computing = self._updating = self._fresh = 0

    def begins(self) -> None:
        """Begin to count the memory of a step, and forget the counts of earlier steps."""
        self._computing = self._updating = 0
        self.tensors.begin_phase()

    def gets(self, batch: object) -> None:
        """Count the tensors in a step's batch as memory of that step."""
        self.tensors.hold(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))

    def updates(self, fresh: Iterable[Tensor | None] = ()) -> None:
        """Close the memory peak of computing, begin the optimizer update's; ``fresh``: gradients backward made.

        ``fresh`` is empty, or None in the place of a gradient, where backward wrote into a buffer that is kept.
        """
        self._computing = max(self._computing, self.tensors.peak_bytes - self._kept_bytes)
        self._fresh = bytes_of(fresh)
        self.tensors.begin_phase()

    def updated(self) -> None:
        """Close the memory peak of an optimizer's update, which is over now."""
        self._updating = max(self._updating, self.tensors.peak_bytes - self._kept_bytes - self._fresh)
        self.tensors.begin_phase()

    def result(self, samples: int) -> TrainingMemory:
        """Return the counted memory, bytes by kind of tensor, as that of a step of ``samples`` samples."""
        return TrainingMemory(
            parameter_bytes=bytes_of(self._parameters),
            buffer_bytes=bytes_of(self._buffers),
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=bytes_of(states_of(self._optimizers)),
            fresh_bytes=self._fresh,
            steps=(
                StepMemory(samples=samples, computing_bytes=max(1, self._computing), updating_bytes=self._updating),
            ),
        )


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counter of the live and peak bytes of tensors that are made on one device while it is entered.

    A storage counts once, whatever views share it, until the last tensor on it is gone. Tensors made before count if
    given to `hold`. Scratch space of operators makes no tensor and is not seen.

    Attributes:
        live_bytes: bytes that tensors hold now.
        peak_bytes: most bytes that tensors held at a time since the last `begin_phase`.
        is_paused: whether operators are not counted for now, such as those that read samples on the host.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a counter of one device at 0 bytes."""
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._device = device
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.live_bytes = self.peak_bytes = 0
        self.is_paused = False

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before the context as live; those of other devices are passed over."""
        for storage in self._storages(tensors):
            self._see(storage, storage.nbytes())

    def begin_phase(self) -> None:
        """Set the peak back to the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator and return its result; count the tensors in it, but never unknown ones of the arguments."""
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        for storage in self._storages(tree_leaves((args, kwargs))):
            self._see(storage, 0)  # of before, unless it is known
        result = func(*args, **(kwargs or {}))
        for storage in self._storages(tree_leaves(result)):
            self._see(storage, storage.nbytes())
        return result

    def _storages(self, values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of the tensors among ``values`` that are on the counted device."""
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                yield from (part.untyped_storage() for part in _strided(value))

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage of ``size`` bytes as live until it is freed; a known one by as much as it has grown.

        A storage first seen with 0 bytes never counts.
        """
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self.live_bytes += size
        elif (counted := self._known[key][1]) and size > counted:  # grown in place
            self._known[key] = self._known[key][0], size
            self.live_bytes += size - counted
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)[1]


class AllocatedBytes(nullcontext[None]):
    """Reader of a GPU's live and peak bytes from torch's allocator; as a context it does nothing."""

    def __init__(self, device: torch.device) -> None:
        """Make a reader of one GPU."""
        super().__init__()
        self._device = device
        self.is_paused = False  # or not: the host's memory is not the GPU's

    @property
    def live_bytes(self) -> int:
        """Bytes that tensors on the GPU hold now, all of the process."""
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors on the GPU held at a time since the last `begin_phase`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing, as the allocator knows of all tensors."""

    def begin_phase(self) -> None:
        """Set the allocator's peak back to the bytes that are live now."""
        torch.cuda.reset_peak_memory_stats(self._device)


PeakBytes: TypeAlias = TensorBytes | AllocatedBytes
"""Counter of live and peak bytes between its beginning and its end as a context."""


def count_on(device: torch.device) -> PeakBytes:
    """Return a counter of live and peak bytes on a device: the allocator's on a GPU, else of tensors."""
    return AllocatedBytes(device) if device.type == "cuda" else TensorBytes(device)


def bytes_of(values: Iterable[object]) -> int:
    """Return the bytes of the storages of all tensors among ``values``, each storage once; other values are skipped."""
    storages = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for value in values
        if isinstance(value, Tensor)
        for part in _strided(value)
    }
    return sum(storages.values())


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors, each with a storage, that a dense or sparse COO tensor consists of; else none."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()
