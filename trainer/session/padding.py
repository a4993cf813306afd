"""Whether a script's loss reads padding, which is as long as the longest of a worker's own samples: asked once.

    hidden, _ = lstm(embed(padded)); out = head(hidden.mean(1))

On one machine a sample is padded to the longest of the whole batch. Where that is left out (masks, packing, a causal
model whose labels are), a sample says the same however long its padding is: the model is asked for one sample, in
evaluation mode, padded as it was and less. What of its outputs the loss does not depend on may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hetopt.trainer.loss_test import as_before

_ROUNDING = 1e-4
"""Relative difference of outputs that are the same; kernels of other lengths add up in another order."""


class Padding(NamedTuple):
    """Of one sample in a batch.

    Attributes:
        row: of the sample.
        length: of the batch, along the dimension that is padded.
        needed: what the sample would have alone.
        alone: what is padded of it, as it is alone.
        by: the collate function.
    """

    row: int
    length: int
    needed: int
    alone: Tensor
    by: str


def mapped(change: Callable[[Tensor], Tensor], given: Any) -> Any:
    """The same arguments with other tensors, in containers and in objects that hold a batch."""

    def each(one: Any) -> Any:
        if isinstance(one, Tensor):
            return change(one)
        if not hasattr(one, "__dict__") or callable(one):
            return one
        other = copy.copy(one)
        vars(other).update({name: mapped(change, value) for name, value in vars(one).items()})
        return other

    return tree_map(each, given)


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors in containers and in objects that hold a batch, in their order."""
    found: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        found.append(one)
        return one

    mapped(keep, given)
    return found


class PaddingWatch:
    """Keeps what a model was called with for a batch that has padding.

    Args:
        model: of the script.
        paddings: of some samples.
        rows: of the batch.
    """

    def __init__(self, model: nn.Module, paddings: Sequence[Padding], rows: int) -> None:
        self._paddings, self._rows = paddings, rows
        self._called: list[tuple[nn.Module, Any, Any]] = []
        called = list(model.children()) if isinstance(model, nn.ModuleList) else [model]
        self._hooks = [one.register_forward_hook(self._keep, with_kwargs=True) for one in called]

    def close(self) -> None:
        """Remove the hooks and drop what they kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._called = [], []

    def read_by(self, loss: Tensor) -> Padding | None:
        """A sample of which a loss depends on how long its padding is; None: on none, or nobody can tell."""
        return next((found for one in self._called if (found := self._found(loss, *one)) is not None), None)

    def _keep(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._called.append((module, (arguments, named), output))

    def _found(self, loss: Tensor, module: nn.Module, given: Any, output: Any) -> Padding | None:
        outputs = _tensors(output)
        trained = [one for one in outputs if one.requires_grad]
        if not trained:
            return None
        found = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        by = {id(one): its for one, its in zip(trained, found, strict=True) if its is not None}
        derivatives = [by.get(id(one)) for one in outputs]
        with torch.no_grad(), as_before(module):
            module.eval()
            try:
                meant = [one for one in self._paddings if self._holds(given, one)]
                return next((one for one in meant if self._differs(module, given, derivatives, one)), None)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None  # it takes no such sample

    def _holds(self, given: Any, of: Padding) -> bool:
        """Whether the sample is among what the model was called with: scripts read batches ahead."""
        rows = [(one, _row_dim(one, self._rows)) for one in tensors_in(given)]
        return any(_begins(one.select(at, of.row), of.alone) for one, at in rows if at is not None)

    def _differs(self, module: nn.Module, given: Any, derivatives: Sequence[Tensor | None], of: Padding) -> bool:
        """Whether what a loss depends on is another with less padding, or is behind the sample's end."""
        long, short = (
            _tensors(module(*arguments, **named))
            for length in (of.length, of.needed)
            for arguments, named in [mapped(partial(self._cut, of=of, length=length), given)]
        )
        if not len(derivatives) == len(long) == len(short):
            return False
        return any(
            own is not None and _apart(self._row(own, of), longer, shorter)
            for own, longer, shorter in zip(derivatives, long, short, strict=True)
        )

    def _cut(self, one: Tensor, of: Padding, length: int) -> Tensor:
        """The sample's row of an argument, padded to a length."""
        at = _row_dim(one, self._rows)
        if at is None:
            return one
        one = self._row(one, of)
        for dim, size in enumerate(one.shape):
            one = one.narrow(dim, 0, length) if size == of.length and dim != at else one
        return one

    def _row(self, one: Tensor, of: Padding) -> Tensor:
        at = _row_dim(one, self._rows)
        return one if at is None else one.narrow(at, of.row, 1)


def _begins(row: Tensor, alone: Tensor) -> bool:
    """Whether a row begins as a sample is alone."""
    if row.dim() != alone.dim() or any(its > mine for mine, its in zip(row.shape, alone.shape, strict=True)):
        return False
    return torch.equal(row[tuple(slice(size) for size in alone.shape)].to(alone), alone)


def _apart(derivative: Tensor, long: Tensor, short: Tensor) -> bool:
    if derivative.shape != long.shape or long.dim() != short.dim():
        return False
    both = tuple(slice(size) for size in short.shape)
    beyond = derivative.clone()
    beyond[both] = 0
    counts = derivative[both] != 0
    apart = ((long[both] - short) * counts).norm()
    return bool(beyond.any()) or bool(apart > _ROUNDING * (short * counts).norm())


def _row_dim(one: Tensor, rows: int) -> int | None:
    """Where the samples are: in the first dimension or, where sequences come first, in the second."""
    return next((dim for dim, size in enumerate(one.shape[:2]) if size == rows), None)


def _tensors(output: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return [one for one in leaves if isinstance(one, Tensor) and one.dtype.is_floating_point]
