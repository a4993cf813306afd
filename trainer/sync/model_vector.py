"""One worker's model as one vector: its parameters and, after them, its running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        self._own: Tensor | None = None
        self.elements = sum(tensor.numel() for tensor in self._tensors)

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """A copy of the elements from ``begin`` to ``end``; absent: all, [elements]."""
        with torch.no_grad():
            spans = self._spans(begin, self.elements if end is None else end)
            return torch.cat([tensor.detach().reshape(-1)[span].float() for tensor, span in spans])

    def write(self, flat: Tensor, *, begin: int = 0) -> None:
        """Make the model what ``flat`` is, from its element ``begin`` on.

        Args:
            flat: 1-D, as long as what is to be changed.
            begin: where in the model it begins.
        """
        spans = list(self._spans(begin, begin + flat.numel()))
        with torch.no_grad():
            parts = torch.split(flat, [span.stop - span.start for _, span in spans])
            for (tensor, span), part in zip(spans, parts, strict=True):
                if part.numel() == tensor.numel():
                    tensor.copy_(part.view(tensor.shape))
                elif tensor.is_contiguous():
                    tensor.view(-1)[span].copy_(part)
                else:
                    whole = tensor.reshape(-1)
                    whole[span] = part.to(whole)
                    tensor.copy_(whole.view(tensor.shape))

    @contextmanager
    def replaced_by(self, flat: Tensor) -> Iterator[None]:
        """The model is ``flat`` inside, and what it was again afterwards."""
        self._own = self.read()
        self.write(flat)
        try:
            yield
        finally:
            self.write(self._own)
            self._own = None

    @property
    def is_replaced(self) -> bool:
        """Whether something else is in its place."""
        return self._own is not None

    def own(self) -> Tensor:
        """The model itself, whatever is in its place, [elements]."""
        return self.read() if self._own is None else self._own

    def _spans(self, begin: int, end: int) -> Iterator[tuple[Tensor, slice]]:
        """Tensors that have elements between two places, and which of theirs."""
        start = 0
        for tensor in self._tensors:
            low, high = max(begin - start, 0), min(end - start, tensor.numel())
            if low < high:
                yield tensor, slice(low, high)
            start += tensor.numel()
