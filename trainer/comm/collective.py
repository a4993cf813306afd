"""What a collective is: payloads of all workers in, their dense sum out, the same bits on every worker."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.payload import Payload

PayloadT_contra = TypeVar("PayloadT_contra", bound=Payload, contravariant=True)


class SumCollective(Protocol[PayloadT_contra]):
    """Adds up the payloads of all workers. SUM, never a mean: gradients come weighted by their share of the batch."""

    def run(self, payload: PayloadT_contra, out: Tensor, channel: Channel) -> None:
        """Write the dense sum over all workers into ``out``.

        Args:
            payload: this worker's part.
            out: 1-D fp32, overwritten; may be the memory that the payload's values lie in.
            channel: to the other workers.
        """
        ...
