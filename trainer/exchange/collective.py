"""What a collective is: payloads of all workers in, their dense sum out, the same bits on every worker."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from hetopt.trainer.exchange.compressor import DensePayload, SparsePayload

PayloadT_contra = TypeVar("PayloadT_contra", DensePayload, SparsePayload, contravariant=True)


class SumCollective(Protocol[PayloadT_contra]):
    """Adds up the payloads of all workers. SUM, never a mean: gradients come weighted by their share of the batch."""

    def run(self, payload: PayloadT_contra, out: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Write the dense sum over all workers into ``out``.

        Args:
            payload: this worker's part; every worker brings the same number of elements.
            out: 1-D fp32, overwritten; may be the memory that the payload's values lie in.
            group: who takes part; ``None`` is the default group, or this process alone when there is none.
        """
        ...
