"""One exchange of gradients: remember, compress, sum over all workers, and keep what was not sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
import torch.distributed as dist

from hetopt.profiler.errors import BadInput
from hetopt.trainer.exchange.collective import SumCollective
from hetopt.trainer.exchange.compressor import Compressor, PayloadT
from hetopt.trainer.exchange.dense_all_reduce import DenseAllReduce
from hetopt.trainer.exchange.identity import IdentityCompressor
from hetopt.trainer.exchange.memory import ErrorFeedback, Memory, NoMemory
from hetopt.trainer.exchange.sparse_all_gather import SparseAllGather
from hetopt.trainer.exchange.topk import TopKCompressor
from hetopt.trainer.exchange.wire import wire_format
from hetopt.trainer.spec import Compression


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeStats:
    """What one exchange cost this worker.

    ``sent_bytes`` is what it contributed (the backend forwards more, see `collective_time_s`); ``compress_s`` the
    work on its own gradient; ``sync_s`` the collective, with the wait for slower workers and the sum of what arrived.
    """

    sent_bytes: int
    compress_s: float
    sync_s: float


class GradientExchange(Protocol):
    """What the training step needs of an `Exchange`, whatever its payload."""

    @property
    def memory(self) -> Memory:
        """What has not been sent yet; part of a checkpoint."""
        ...

    def run(self, flat: torch.Tensor) -> ExchangeStats:
        """Replace the weighted local gradient by the sum over all workers, in place."""
        ...


class Exchange(Generic[PayloadT]):
    """A compressor, a memory and a collective that fit together.

    The caller weights its local mean gradient by ``local_batch_size / global_batch_size`` first: then the sum is the
    gradient of one machine with the whole batch, and residuals are in units of that sum.
    """

    def __init__(
        self,
        *,
        compressor: Compressor[PayloadT],
        ratio: float,
        memory: Memory,
        collective: SumCollective[PayloadT],
        group: dist.ProcessGroup | None = None,
        generator: torch.Generator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compressor: Compressor[PayloadT] = compressor
        self._ratio = ratio
        self._memory = memory
        self._collective: SumCollective[PayloadT] = collective
        self._group = group
        self._generator = generator
        self._clock = clock

    @property
    def memory(self) -> Memory:
        """What has not been sent yet; part of a checkpoint."""
        return self._memory

    def run(self, flat: torch.Tensor) -> ExchangeStats:
        """Replace the weighted local gradient (1-D fp32) by the sum over all workers, in place.

        If the collective fails, nothing has been committed and the residual is that of the step before.
        """
        started = self._now(flat)
        prepared = self._memory.prepare(flat)
        payload = self._compressor.compress(prepared, self._ratio, self._generator)
        sent_bytes = payload.nbytes
        compressed = self._now(flat)
        self._collective.run(payload, flat, self._group)
        synced = self._now(flat)
        self._memory.commit(prepared, payload)
        committed = self._now(flat)
        return ExchangeStats(
            sent_bytes=sent_bytes,
            compress_s=(compressed - started) + (committed - synced),
            sync_s=synced - compressed,
        )

    def _now(self, flat: torch.Tensor) -> float:
        # A GPU works behind the clock's back; the parts of an exchange wait for each other anyway.
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        return self._clock()


def make_exchange(
    compression: Compression,
    numel: int,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> GradientExchange:
    """The exchange for a gradient of ``numel`` elements under ``compression``.

    Sparse gradients come with error feedback: what Top-k leaves out would otherwise never be learnt.

    Raises:
        BadInput: there is no such compressor, or the ratio does not fit it.
    """
    wire_format(compression.name)
    if compression.name == "topk":
        return Exchange(
            compressor=TopKCompressor(),
            ratio=compression.ratio,
            memory=ErrorFeedback(numel, device=device),
            collective=SparseAllGather(),
            group=group,
            clock=clock,
        )
    if compression.ratio != 1.0:
        raise BadInput(
            f"The identity compressor sends everything; it cannot send a fraction of {compression.ratio:g}.",
            hint="use topk, or a ratio of 1",
        )
    return Exchange(
        compressor=IdentityCompressor(),
        ratio=1.0,
        memory=NoMemory(),
        collective=DenseAllReduce(),
        group=group,
        clock=clock,
    )
