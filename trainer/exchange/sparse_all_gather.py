"""Gathers sparse payloads everywhere and adds them up on arrival."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetopt.trainer.exchange.compressor import SparsePayload
from hetopt.trainer.exchange.group import group_size, staging_device


class SparseAllGather:
    """One all-gather of ``[indices | value bits]``; payloads are accumulated in rank order.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.
    """

    def run(self, payload: SparsePayload, out: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        workers = group_size(group)
        if workers == 1:
            out.zero_()
            payload.add_to(out)
            return
        kept = payload.indices.numel()
        # Values travel as the integers that have their bits, so that one message carries both.
        packed = torch.cat((payload.indices, payload.values.view(torch.int32))).to(staging_device(out, group))
        gathered = torch.empty(workers * 2 * kept, dtype=torch.int32, device=packed.device)
        dist.all_gather_single(gathered, packed, group=group)
        out.zero_()
        for part in gathered.to(out.device).view(workers, 2, kept):
            SparsePayload(indices=part[0], values=part[1].view(torch.float32), numel=payload.numel).add_to(out)
