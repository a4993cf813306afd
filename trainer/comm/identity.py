"""The dense case: everything is sent, nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor

from hetopt.trainer.comm.payload import DensePayload


@dataclass(frozen=True, slots=True)
class IdentityCompressor:
    """Sends the gradient itself, whatever the ratio."""

    name: ClassVar[str] = "identity"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> DensePayload:
        """The gradient, not copied."""
        return DensePayload(values=flat)
