"""What one worker sent: parts of a gradient that can be added to dense vectors, and taken out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetopt.trainer.comm.energy import kept_energy, take_out


class Payload(Protocol):
    """What one worker sent, in the units of its gradient."""

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        ...

    def subtract_from(self, flat: Tensor) -> float:
        """Subtract the payload from the dense vector x that it was made of, in place.

        Returns:
            The energy that this takes away, ``||x||^2 - ||x - sent||^2``; of a selection, and of any other projection,
            that is ``||sent||^2``.
        """
        ...

    def dense(self) -> Tensor:
        """The dense vector that the payload stands for, 1-D fp32; may be the payload's own memory."""
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

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        return take_out(flat, self.values)

    def dense(self) -> Tensor:
        """The values themselves."""
        return self.values


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

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        kept = kept_energy(flat.index_select(0, self.indices), self.values)
        flat.index_add_(0, self.indices, self.values, alpha=-1)
        return kept

    def dense(self) -> Tensor:
        """Zeros but for the sent elements."""
        flat = torch.zeros(self.numel, dtype=self.values.dtype, device=self.values.device)
        self.add_to(flat)
        return flat
