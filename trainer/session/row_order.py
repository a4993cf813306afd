"""In which order the rows of a batch are in what a script computes of it: rows in two orders are different samples.

`inputs[order]` and `targets[order]` go together, and so does what is sorted by length, computed and sorted back.
`inputs` and `inputs.flip(0)` do not: each sample meets another one of the batch (mixup, cutmix, negatives), and on a
worker one of its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.session.listening import tensors_in, unwrapped


class Unknown:
    """Rows that were packed, joined or folded: they may be in any order."""


class Differ:
    """Rows in several orders."""


Order: TypeAlias = Tensor | Unknown | Differ | None
"""[rows] the place in the batch of each row; None: as the batch was given."""

_TAKEN_AS_THEY_ARE = {"__getitem__", "index_select", "take_along_dim", "gather"}
"""The order of their index is not one that meets that of their rows."""

_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}


class RowOrders:
    """Follows the order of rows from call to call.

    Args:
        rows: of the batch.
        is_rows: whether a tensor with this tag has a row for each sample.
    """

    def __init__(self, rows: int, is_rows: Callable[[Any], bool]) -> None:
        self._rows, self._is_rows = rows, is_rows
        self._orders = WeakTensorKeyDictionary()

    def of_result(
        self,
        name: str,
        args: Sequence[Any],
        named: Mapping[str, Any],
        given: Sequence[Tensor],
        tags: Sequence[Any],
        result: Any,
    ) -> Order:
        """The order of what a call gives back.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            given: tensors among them.
            tags: of these.
            result: of the call.
        """
        met = [self._of(one) for one, tag in zip(given, tags, strict=True) if self._is_rows(tag)]
        if name in _TAKEN_AS_THEY_ARE and args and isinstance(args[0], Tensor):
            met = [self._of(args[0])] if self._is_rows(tags[0]) else [Unknown()]
        known = [one for one in met if not isinstance(one, Unknown)]
        if not known:
            return Unknown() if met else None
        if any(not _same(one, known[0]) for one in known[1:]):
            return Unknown() if name in _JOINS else Differ()
        return self._moved(name, args, named, known[0], result)

    def chooses(self, name: str, args: Sequence[Any], named: Mapping[str, Any], of_samples: Sequence[Tensor]) -> bool:
        """Whether a call takes some of the rows by numbers from outside torch, in another order than theirs: they were
        compared there, as by `numpy.argsort`. What each row says of itself (`numpy.nonzero`) keeps the order.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            of_samples: tensors among them that torch has made of samples.
        """
        own = args[0] if args else named.get("input")
        dim = self._dim(own) if isinstance(own, Tensor) else None
        index = _as_numbers(self._index(name, args, named, dim))
        if index is None or any(index is one for one in of_samples) or _as_index(index, self._rows) is not None:
            return False
        return bool((index.diff() < 0).any())

    def note(self, made: Tensor, order: Order) -> None:
        """Remember the order of a result's rows."""
        if order is None:
            self._orders.pop(unwrapped(made), None)  # type: ignore[no-untyped-call]  # torch's gap
        else:
            self._orders[unwrapped(made)] = order

    def _dim(self, tensor: Tensor) -> int | None:
        """The one of the first two dimensions that is as long as there are rows."""
        dims = [dim for dim, size in enumerate(tensor.shape[:2]) if size == self._rows]
        return dims[0] if len(dims) == 1 else None

    def _of(self, tensor: Tensor) -> Order:
        if self._dim(tensor) is None:
            return Unknown()
        order: Order = self._orders.get(unwrapped(tensor))  # type: ignore[no-untyped-call]  # torch's gap
        return order

    def _moved(self, name: str, args: Sequence[Any], named: Mapping[str, Any], order: Order, result: Any) -> Order:
        """The order after a call that may give rows other places."""
        own = args[0] if args else named.get("input")
        dim = self._dim(own) if isinstance(own, Tensor) else None
        if own is None or dim is None or not isinstance(order, Tensor | None):
            return order
        index = self._index(name, args, named, dim)
        if name in ("sort", "argsort", "msort"):
            index = list(tensors_in([result]))[-1]
        elif name == "flip" and dim in [one % own.dim() for one in _numbers([args[1:], named.get("dims", ())])]:
            index = torch.arange(self._rows).flip(0)
        elif name == "roll" and dim in (dims := _numbers(named.get("dims", args[2:]))):
            shift = _numbers(named.get("shifts", args[1:2]))[dims.index(dim)]
            index = torch.arange(self._rows).roll(shift)
        taken = _as_index(index, self._rows)
        if taken is None:
            return order
        before = torch.arange(self._rows) if order is None else order
        after = before[taken]
        return None if torch.equal(after, torch.arange(self._rows)) else after

    @staticmethod
    def _index(name: str, args: Sequence[Any], named: Mapping[str, Any], dim: int | None) -> Any:
        """What a call takes rows by, which are in a dimension; None: it takes none."""
        if name == "index_select" and dim is not None and named.get("dim", args[1] if len(args) > 1 else None) == dim:
            return named.get("index", args[-1])
        if name == "__getitem__" and dim is not None:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            plain = not any(one is None or one is Ellipsis for one in places)
            return places[dim] if plain and len(places) > dim else None
        return None


def _same(one: Order, other: Order) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is None and other is None


def _numbers(given: Any) -> list[int]:
    if isinstance(given, int):
        return [given]
    return [one for part in given for one in _numbers(part)] if isinstance(given, (tuple, list)) else []


def _as_index(index: Any, rows: int) -> Tensor | None:
    """Numbers of rows, one for each; None: it is something else."""
    numbers = _as_numbers(index)
    return None if numbers is None or len(numbers) != rows else numbers.detach().cpu()


def _as_numbers(index: Any) -> Tensor | None:
    """Numbers of rows; None: it is something else."""
    if isinstance(index, list) and all(isinstance(one, (int, np.integer)) for one in index):
        index = np.asarray(index, dtype=np.int64)
    if isinstance(index, np.ndarray) and index.dtype.kind == "i":
        index = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    is_list = isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1
    return index if is_list else None
