"""What a compressor is, and the payloads it makes: records that know their bytes and how to join a dense gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch

from hetopt.trainer.exchange.wire import Collective


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePayload:
    """Every element of a flat gradient: ``values`` is 1-D fp32 and may share memory with what was compressed."""

    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.values.nbytes

    def add_to(self, flat: torch.Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.add_(self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        """Subtract the payload from a dense vector, in place."""
        flat.sub_(self.values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparsePayload:
    """Some elements of a flat gradient of ``numel``: distinct int32 ``indices`` and their fp32 ``values``."""

    indices: torch.Tensor
    values: torch.Tensor
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.indices.nbytes + self.values.nbytes

    def add_to(self, flat: torch.Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        """Subtract the payload from a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values, alpha=-1)


Payload: TypeAlias = DensePayload | SparsePayload
PayloadT = TypeVar("PayloadT", DensePayload, SparsePayload)


class Compressor(Protocol[PayloadT]):
    """Makes a gradient small: stateless, and with no communication inside.

    What was left out is the memory's business, how payloads meet is the collective's.
    """

    @property
    def name(self) -> str:
        """The name that plans and `wire_bytes` know it by."""
        ...

    @property
    def collective(self) -> Collective:
        """How its payloads may be combined."""
        ...

    def compress(self, flat: torch.Tensor, ratio: float, generator: torch.Generator | None) -> PayloadT:
        """The payload for a flat fp32 gradient.

        Args:
            flat: 1-D fp32; left as it is.
            ratio: fraction of the elements to send, in (0, 1].
            generator: the private source of randomness; the same generator state gives the same payload.
        """
        ...

    def decompress(self, payload: PayloadT) -> torch.Tensor:
        """The dense vector that the payload stands for, 1-D fp32."""
        ...

    def wire_bytes(self, numel: int, ratio: float) -> int:
        """Bytes of the payload for a gradient of ``numel`` elements."""
        ...
