"""torch's own ways to send less with DistributedDataParallel: its communication hooks, and how many bytes they send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HookName = Literal["none", "tuned", "fp16", "powersgd"]

FP32_BYTES, FP16_BYTES = 4, 2
DENSE_STEPS = 2
"""PowerSGD's first steps are dense: as few as torch allows, for its default of 1,000 is more than a short run has."""

RANK = 2
"""Of PowerSGD's factors: for image classifiers, as its authors propose (Vogels et al. 2019)."""


class CommunicationHook(Protocol):
    """A way for DistributedDataParallel to sum gradients."""

    @property
    def dense_steps(self) -> int:
        """So many first steps are like DistributedDataParallel's own."""
        ...

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The parallel model."""
        ...

    def sent_bytes(self, steps: int) -> int:
        """That a worker has contributed in so many steps, all that there were."""
        ...


@dataclass(frozen=True, kw_only=True)
class NoHook:
    """DistributedDataParallel with all its defaults."""

    gradient_bytes: int
    dense_steps: int = 0

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The parallel model."""
        return DistributedDataParallel(model)

    def sent_bytes(self, steps: int) -> int:
        """The whole gradient in every step."""
        return steps * self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Tuned(NoHook):
    """DistributedDataParallel as who knows it has it: gradients are views of its buckets, and the graph is static."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The parallel model."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


@dataclass(frozen=True, kw_only=True)
class Fp16Hook:
    """Gradients are cast to fp16 on their way."""

    gradient_bytes: int
    dense_steps: int = 0

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The parallel model."""
        parallel = DistributedDataParallel(model, forward_sync_buffers=False)
        parallel.register_comm_hook(None, fp16_compress_hook)
        return parallel

    def sent_bytes(self, steps: int) -> int:
        """Half of the gradient in every step."""
        return steps * self.gradient_bytes * FP16_BYTES // FP32_BYTES


class PowerSgdHook:
    """Gradients travel as factors of low rank; what that leaves out is added to the next gradient.

    The gradient is one bucket: the hook waits inside its callbacks, and a bucket each would block gloo's threads.

    Args:
        gradient_bytes: of the model.
    """

    dense_steps = DENSE_STEPS

    def __init__(self, gradient_bytes: int) -> None:
        self._gradient_bytes = gradient_bytes
        # Rows of an embedding that no word of the batch has are zero, and cannot be made orthogonal without an epsilon.
        self._state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=DENSE_STEPS,
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]  # torch's own annotation is int
        )

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The parallel model."""
        whole_mb = self._gradient_bytes / 2**20 + 1
        parallel = DistributedDataParallel(model, forward_sync_buffers=False, bucket_cap_mb=whole_mb)
        parallel.register_comm_hook(self._state, powerSGD_hook)
        return parallel

    def sent_bytes(self, steps: int) -> int:
        """As the hook counts, after the dense steps."""
        compressed = FP32_BYTES * int(self._state.total_numel_after_compression)
        return min(steps, DENSE_STEPS) * self._gradient_bytes + compressed


def make_hook(name: HookName, gradient_bytes: int) -> CommunicationHook:
    """The hook of that name for a gradient of so many bytes."""
    match name:
        case "none":
            return NoHook(gradient_bytes=gradient_bytes)
        case "tuned":
            return Tuned(gradient_bytes=gradient_bytes)
        case "fp16":
            return Fp16Hook(gradient_bytes=gradient_bytes)
        case "powersgd":
            return PowerSgdHook(gradient_bytes)
