"""The dense case: everything is sent, nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hetopt.trainer.exchange.compressor import DensePayload
from hetopt.trainer.exchange.wire import Collective, wire_bytes


@dataclass(frozen=True, slots=True)
class IdentityCompressor:
    """Sends the gradient itself, whatever the ratio."""

    name: ClassVar[str] = "identity"
    collective: ClassVar[Collective] = "all_reduce"

    def compress(self, flat: torch.Tensor, ratio: float, generator: torch.Generator | None) -> DensePayload:
        """The gradient, not copied."""
        return DensePayload(values=flat)

    def decompress(self, payload: DensePayload) -> torch.Tensor:
        """The gradient, not copied."""
        return payload.values

    def wire_bytes(self, numel: int, ratio: float) -> int:
        """Four bytes an element."""
        return wire_bytes(self.name, numel, ratio)
