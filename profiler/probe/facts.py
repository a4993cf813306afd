"""Facts that are looked up or counted rather than timed: the host, the job, and memory used and left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from hetopt.core.interruption import usable_processors
from hetopt.core.profile import Host, Job
from hetopt.core.step_samples import ModelKind
from hetopt.profiler.probe.replica import Replica
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.task import Task, least_samples

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_facts(device: torch.device) -> Host:
    """The machine that this worker runs on."""
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


def job_facts(task: Task, reference: str, replica: Replica, reader: BatchReader, part: MicroBatch) -> Job:
    """What is trained, counted on one small batch.

    Args:
        task: the task.
        reference: the text that names it.
        replica: a model of it; its gradient is overwritten.
        reader: reads the training data.
        part: the samples to count on.
    """
    return Job(
        task=reference,
        parameters=replica.gradient.numel(),
        gradient_bytes=replica.gradient.nbytes,
        dataset_size=len(reader.dataset),
        batch_size=task.batch_size,
        least_local_batch_size=least_samples(replica.loss.model),
        learning_rate_rule=task.learning_rate_rule,
        target_metric=task.target.metric,
        target_value=task.target.value,
        target_higher_is_better=task.target.higher_is_better,
        usual_epochs=task.usual_epochs,
        operators_per_step=_operators(lambda: _whole_step(replica, reader, part)),
        flops_per_sample=_flops(lambda: _whole_step(replica, reader, part)) / len(part) or None,
        model_kind=model_kind(replica.loss.model.modules()),
        parameter_shapes=replica.shapes,
    )


def host_memory_bytes() -> int:
    """Memory that processes here may use: the machine's, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not mounted, or "max"
            total = min(total, int(path.read_text()))
    return total


def device_memory_bytes(device: torch.device) -> int:
    """Memory that the workers of this device share. On a GPU what other programs hold is not counted."""
    if device.type == "cpu":
        return host_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)


def reset_peak_memory(device: torch.device) -> None:
    """Forget how much memory was used before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # The allocator keeps what was freed; glibc's gives it back when asked, others lack the function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Writing 5 resets VmHWM (Linux, proc_pid_clear_refs). Where that is refused the peak only ever grows, which
    # is still right for batch sizes tried in increasing order.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory used since the last reset: of its tensors on a GPU, of the process on a CPU. None where unknown.

    Pages of files (libraries, mapped data) are left out: workers of a machine share them, and the kernel takes them
    back where memory is short. How many of them a process touches depends on whether it began as a fork.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        return resident_peak_bytes(Path("/proc/self/status").read_text())
    return None


def resident_peak_bytes(status: str) -> int | None:
    """Of a ``/proc/PID/status`` (Linux, proc_pid_status): the most in memory, less the pages of files there now."""
    told = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmHWM" not in told:
        return None
    most, of_files = (1024 * int(told.get(name, "0 kB").split()[0]) for name in ("VmHWM", "RssFile"))
    return max(1, most - of_files)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _whole_step(replica: Replica, reader: BatchReader, part: MicroBatch) -> None:
    replica.gradient.zero_()
    replica.loss(reader.read(part)).backward()
    replica.optimizer.step()


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the operators that do work; views only relabel memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not func.is_view and func.namespace != "profiler":
            self.count += 1
        return func(*args, **(kwargs or {}))


class _Nowhere(ModuleTracker):
    """Follows no module: torch's hooks on what modules are given refuse `torch.autograd.grad`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def flop_count() -> FlopCounterMode:
    """Return a counter of the floating-point operations of matrix work, of all modules together."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Nowhere()
    return counter


def _operators(run: Callable[[], None]) -> int:
    counter = OperatorCount()
    with counter:
        run()
    return counter.count


def _flops(run: Callable[[], None]) -> int:
    """Floating-point operations of the matrix work in ``run``, forward and backward."""
    counter = flop_count()
    with without_fused_layers(), counter:
        run()
    flops: int = counter.get_total_flops()
    return flops


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Leave oneDNN and cuDNN out: fused recurrent layers are opaque to the FLOP counter.

    Without them such a layer falls apart into the matrix products that it is made of.
    """
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
"""In the name of a module's class: attention is written anew in most models."""


def model_kind(modules: Iterable[nn.Module]) -> ModelKind | None:
    """The kind of a model; None where its modules do not tell.

    A recurrent module makes it recurrent, and attention (by the names of modules) a transformer unless most weights
    beside tables are of convolutions. Without either, convolutions make it convolutional, and tables with most of the
    weights an embedding model.
    """
    every = list(modules)
    weights = {
        id(one): one.numel() for module in every for one in module.parameters(recurse=False) if one.requires_grad
    }
    convolutional = _of(every, CONVOLUTIONS)
    embedded = _of(every, EMBEDDINGS)
    if any(isinstance(module, RECURRENT) for module in every):
        return "recurrent"
    attends = any(word in type(module).__name__.lower() for module in every for word in ATTENTION)
    if attends and 2 * convolutional <= sum(weights.values()) - embedded:
        return "transformer"
    if convolutional:
        return "convolution"
    return "embedding" if 2 * embedded > sum(weights.values()) else None


def _of(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> int:
    """Weights of some kinds of module, shared ones once."""
    own = {
        id(one): one.numel()
        for module in modules
        if isinstance(module, kinds)
        for one in module.parameters(recurse=False)
    }
    return sum(own.values())
