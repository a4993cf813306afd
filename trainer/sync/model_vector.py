"""One worker's model as one vector: its parameters and, after them, its running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ModelVector:
    """Reads a model into a flat fp32 vector, and writes it back.

    Args:
        model: parameters that are not trained, and counters, stay out of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
        self._tensors = [*self._parameters, *self._buffers]
        self.parameters = sum(p.numel() for p in self._parameters)
        """Elements that are parameters; the first ones."""

    def read(self) -> Tensor:
        """A copy, [elements]."""
        with torch.no_grad():
            return torch.cat([tensor.detach().reshape(-1).float() for tensor in self._tensors])

    def write(self, flat: Tensor, *, buffers: bool = True) -> None:
        """Make the model what ``flat`` is, with its running statistics or without."""
        tensors = self._tensors if buffers else self._parameters
        parts = torch.split(flat[: sum(t.numel() for t in tensors)], [t.numel() for t in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
