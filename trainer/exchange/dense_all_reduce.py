"""Sums dense payloads on the way, with the backend's all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetopt.trainer.exchange.compressor import DensePayload
from hetopt.trainer.exchange.group import group_size, staging_device


class DenseAllReduce:
    """All-reduce with SUM: each element is summed in one place and handed out, so all workers hold the same bits."""

    def run(self, payload: DensePayload, out: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        if out.data_ptr() != payload.values.data_ptr():
            out.copy_(payload.values)
        if group_size(group) == 1:
            return
        staged = out.to(staging_device(out, group))
        dist.all_reduce(staged, op=dist.ReduceOp.SUM, group=group)
        if staged is not out:
            out.copy_(staged)
