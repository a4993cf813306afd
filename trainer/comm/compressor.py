"""What a compressor is: it selects, or packs, a gradient into a payload, and knows nothing of other workers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Generator, Tensor

from hetopt.trainer.comm.payload import Payload

PayloadT_co = TypeVar("PayloadT_co", bound=Payload, covariant=True)


class Compressor(Protocol[PayloadT_co]):
    """Makes a gradient small, with no communication inside.

    What was left out is the memory's business, how payloads meet is the collective's.
    """

    @property
    def name(self) -> str:
        """The name that plans and `wire_bytes` know it by."""
        ...

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> PayloadT_co:
        """The payload for a flat fp32 gradient.

        Args:
            flat: 1-D fp32, not empty; left as it is.
            ratio: fraction of the elements to send, in (0, 1]; compressors of everything ignore it.
            generator: the private source of randomness, on the gradient's device; in the same state it gives the same
                payload.
        """
        ...
