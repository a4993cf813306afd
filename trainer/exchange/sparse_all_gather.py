"""Gathers sparse payloads everywhere and adds them up on arrival."""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.trainer.exchange.blocks import Workspace
from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.payload import SparsePayload


class SparseAllGather:
    """One all-gather of ``[indices | value bits]``; payloads are accumulated in rank order.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.
    All payloads have the same number of elements; `PaddedSparseAllGather` is for those that do not.
    """

    def __init__(self) -> None:
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        lengths = [payload.indices.numel()] * channel.workers
        _gather_and_sum(payload, lengths, out, channel, self._workspace)


class PaddedSparseAllGather:
    """The same for payloads of any length: lengths are gathered first, and all are padded to the longest.

    Nothing of the padding is read, so no element is met by zeros that somebody made up.
    """

    def __init__(self) -> None:
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        length = torch.tensor([payload.indices.numel()], dtype=torch.int32, device=payload.indices.device)
        lengths = [int(count) for count in channel.all_gather(length).flatten().tolist()]
        _gather_and_sum(payload, lengths, out, channel, self._workspace)


def _gather_and_sum(
    payload: SparsePayload, lengths: list[int], out: Tensor, channel: Channel, workspace: Workspace
) -> None:
    longest, own, device = max(lengths), payload.indices.numel(), payload.indices.device
    packed = workspace.take("packed", 2 * longest, torch.int32, device)
    packed[:own].copy_(payload.indices)
    # Values travel as the integers that have their bits, so that one message carries both.
    packed[longest : longest + own].copy_(payload.values.view(torch.int32))
    received = workspace.take("received", channel.workers * 2 * longest, torch.int32, device)
    parts = channel.all_gather(packed, received).view(channel.workers, 2, longest)
    out.zero_()
    for part, length in zip(parts, lengths, strict=True):
        values = part[1, :length].view(torch.float32)
        out.index_add_(0, part[0, :length], values)
