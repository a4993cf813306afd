"""How far BatchNorm takes a script's gradient from that of one machine: named once, with a figure if it can be had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetopt.trainer.data.fetch import rows_of, samples_in
from hetopt.trainer.loss_test import STATISTICS_HINT, as_before, batch_norms
from hetopt.trainer.random_rows import RandomRows
from hetopt.trainer.session.batches import Part

FEWEST = 4
"""Samples that make two parts which BatchNorm can normalise."""


class BatchNormNote:
    """Keeps what the model was last called with, until the first backward pass.

    Args:
        model: of the script.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._called: tuple[tuple[Any, ...], dict[str, Any], Tensor] | None = None
        self._derivative: Tensor | None = None
        self._hook = model.register_forward_hook(self._keep, with_kwargs=True) if batch_norms(model) else None

    def close(self) -> None:
        """Remove the hook and drop what it kept."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._called = self._derivative = None

    def look(self, loss: Tensor) -> None:
        """Look at the first loss before its backward pass."""
        if self._called is not None:
            output = self._called[2]
            (self._derivative,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)

    def text(self, part: Part) -> str:
        """A sentence on what normalises by the samples of a worker alone; empty: nothing does. After backward.

        Args:
            part: that the loss is of.
        """
        called, derivative = self._called, self._derivative
        self.close()
        norms = [(name, one) for name, one in batch_norms(self._model) if one.training]
        if not norms:
            return ""
        name, first = norms[0]
        more = f" and {len(norms) - 1} more normalise" if len(norms) > 1 else " normalises"
        off = None if called is None or derivative is None else self._off(derivative, part.rows, *called)
        measured = "" if off is None else f": the gradient of {part.rows} samples in two parts differs by {off:.1%}"
        return (
            f"{name} ({type(first).__name__}){more} each worker's samples by themselves{measured}; "
            f'normalise by the whole batch, session(..., batch_norm="synchronized"), or {STATISTICS_HINT}.'
        )

    def _keep(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._called = (arguments, named, output)

    def _off(
        self, derivative: Tensor, rows: int, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> float | None:
        """Relative difference of the gradient of two unequal parts, by the derivative of the loss as it is."""
        given = [list(arguments), named]
        if rows < FEWEST or samples_in(given) != rows or len(output) != rows:
            return None
        parameters = [one for one in self._model.parameters() if one.requires_grad]
        cut = max(2, rows // 3)

        def gradient(first: int, last: int) -> Tensor:
            own: Any = rows_of([list(arguments), named], first, last)
            with RandomRows(first, last - first):
                again = self._model(*own[0], **own[1])
            found = torch.autograd.grad(again, parameters, derivative[first:last].to(again.dtype), allow_unused=True)
            pieces = [one.to_dense().flatten() for one in found if one is not None]
            return torch.cat(pieces).double()

        with as_before(self._model):
            try:
                whole, parts = gradient(0, rows), gradient(0, cut) + gradient(cut, rows)
            except (RuntimeError, TypeError, ValueError):
                return None  # it does not take parts of what it was given
        return float((whole - parts).norm() / whole.norm()) if bool(whole.any()) else None
