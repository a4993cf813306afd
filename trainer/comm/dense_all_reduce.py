"""Sums dense payloads on the way, with the backend's all-reduce."""

from __future__ import annotations

from torch import Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.payload import DensePayload


class DenseAllReduce:
    """All-reduce with SUM: each element is summed in one place and handed out, so all workers hold the same bits."""

    def run(self, payload: DensePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        if out.data_ptr() != payload.values.data_ptr():
            out.copy_(payload.values)
        channel.all_reduce(out)
