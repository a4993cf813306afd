"""Gathers sparse payloads everywhere and adds them up on arrival."""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.coding import ElementCoding, PlainIndices
from hetopt.trainer.comm.payload import SparsePayload

PLAIN = ElementCoding(indices=PlainIndices(), values=torch.float32)


class SparseAllGather:
    """One all-gather of elements with their indices; payloads are accumulated in rank order.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.
    All payloads have the same number of elements; `PaddedSparseAllGather` is for those that do not.

    Args:
        coding: of the elements in the message.
    """

    def __init__(self, coding: ElementCoding = PLAIN) -> None:
        self._coding = coding
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        lengths = [payload.indices.numel()] * channel.workers
        _gather_and_sum(payload, lengths, out, channel, self._coding, self._workspace)


class PaddedSparseAllGather:
    """The same for payloads of any length: lengths are gathered first, and all are padded to the longest.

    Nothing of the padding is read, so no element is met by zeros that somebody made up.

    Args:
        coding: of the elements in the message.
    """

    def __init__(self, coding: ElementCoding = PLAIN) -> None:
        self._coding = coding
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        length = torch.tensor([payload.indices.numel()], dtype=torch.int32, device=payload.indices.device)
        lengths = [int(count) for count in channel.all_gather(length).flatten().tolist()]
        _gather_and_sum(payload, lengths, out, channel, self._coding, self._workspace)


def _gather_and_sum(
    payload: SparsePayload,
    lengths: list[int],
    out: Tensor,
    channel: Channel,
    coding: ElementCoding,
    workspace: Workspace,
) -> None:
    size, device = coding.nbytes(payload.numel, max(lengths)), payload.indices.device
    message = workspace.take("message", size, torch.uint8, device)
    coding.write(payload, message)
    received = channel.all_gather(message, workspace.take("received", channel.workers * size, torch.uint8, device))
    out.zero_()
    for data, length in zip(received, lengths, strict=True):
        coding.read(data, payload.numel, length).add_to(out)
