"""What one worker sent: parts of a gradient that can be added to dense vectors, and taken out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetopt.trainer.exchange.energy import kept_energy


class Payload(Protocol):
    """What one worker sent, in the units of its gradient."""

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        ...

    def subtract_from(self, flat: Tensor) -> None:
        """Subtract the payload from a dense vector, in place."""
        ...

    def dense(self) -> Tensor:
        """The dense vector that the payload stands for, 1-D fp32; may be the payload's own memory."""
        ...

    def kept_energy(self, prepared: Tensor) -> float:
        """``||x||^2 - ||x - sent||^2`` for the vector x that it was made of, in double precision.

        Of a selection, and of any other projection, that is ``||sent||^2``.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePayload:
    """Every element of a flat gradient: ``values`` is 1-D fp32 and may share memory with what was compressed."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.values.nbytes

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.add_(self.values)

    def subtract_from(self, flat: Tensor) -> None:
        """Subtract the payload from a dense vector, in place."""
        flat.sub_(self.values)

    def dense(self) -> Tensor:
        """The values themselves."""
        return self.values

    def kept_energy(self, prepared: Tensor) -> float:
        """See `Payload`."""
        return kept_energy(prepared, self.values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparsePayload:
    """Some elements of a flat gradient of ``numel``: distinct int32 ``indices`` and their fp32 ``values``."""

    indices: Tensor
    values: Tensor
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.indices.nbytes + self.values.nbytes

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: Tensor) -> None:
        """Subtract the payload from a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values, alpha=-1)

    def dense(self) -> Tensor:
        """Zeros but for the sent elements."""
        flat = torch.zeros(self.numel, dtype=self.values.dtype, device=self.values.device)
        self.add_to(flat)
        return flat

    def kept_energy(self, prepared: Tensor) -> float:
        """See `Payload`."""
        return kept_energy(prepared.index_select(0, self.indices), self.values)
