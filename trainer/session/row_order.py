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

from hetopt.trainer.session.listening import REDUCTIONS, unwrapped


class Unknown:
    """Rows that were packed, repeated or folded: they may be in any order."""


class Differ:
    """Rows in several orders."""


Order: TypeAlias = Tensor | Unknown | Differ | None
"""[n] the place in the batch of each of n rows, [] of one; None: all of them, as the batch was given."""

_TAKEN_AS_THEY_ARE = {"__getitem__", "index_select", "take_along_dim", "gather"}
"""The order of their index is not one that meets that of their rows."""

JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "pad_sequence"}
_TURNS = {"transpose", "swapaxes", "swapdims", "movedim"}
_PARTS = {"split", "chunk", "tensor_split", "split_with_sizes"}
_ONE_BY_ONE = {"unbind", "__iter__"}


class RowOrders:
    """Follows the order of rows from call to call.

    Args:
        rows: of the batch.
        is_rows: whether a tensor with this tag has a row for each sample, or is one of them.

    Attributes:
        is_first: whether no tensor was seen to have something else before the samples, as sequences have that come
            first: where two dimensions are as long, the first is the samples'.
    """

    def __init__(self, rows: int, is_rows: Callable[[Any], bool]) -> None:
        self._rows, self._is_rows = rows, is_rows
        self._all = torch.arange(rows)
        self.is_first = True
        self._orders = WeakTensorKeyDictionary()

    def of_results(
        self,
        name: str,
        args: Sequence[Any],
        named: Mapping[str, Any],
        given: Sequence[Tensor],
        tags: Sequence[Any],
        made: Sequence[Tensor],
    ) -> list[Order]:
        """The order of each tensor that a call gives back.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            given: tensors among them.
            tags: of these.
            made: tensors that it gives back.
        """
        self.is_first = self.is_first and not (name in _TURNS and 0 in _numbers(args[1:3]))
        met = [self._of(one) for one, tag in zip(given, tags, strict=True) if self._is_rows(tag)]
        if name in JOINS:
            parts = [self._of(one) if self._is_rows(tag) else Unknown() for one, tag in zip(given, tags, strict=True)]
            return [self._joined(parts, one) for one in made]
        if name == "__setitem__":
            return [self._written(args, tags)]
        if name in _TAKEN_AS_THEY_ARE and args and isinstance(args[0], Tensor):
            met = [self._of(args[0])] if self._is_rows(tags[0]) else [Unknown()]
        known = [one for one in met if not isinstance(one, Unknown)]
        if not known:
            return [Unknown() if met else None] * len(made)
        order: Order = known[0]
        for one in known[1:]:
            order = _meeting(order, one, self._rows)
        if not isinstance(order, Tensor | None):
            return [order] * len(made)
        return self._moved(name, args, named, order, made)

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

    def places(self, tensor: Tensor) -> tuple[int | None, Tensor] | None:
        """The dimension of some rows and where in the batch they are, or one sample's; None: unknown, or in order."""
        order: Order = self._orders.get(unwrapped(tensor))  # type: ignore[no-untyped-call]  # torch's gap
        if not isinstance(order, Tensor):
            return None
        dim = self._dim(tensor, len(order)) if order.dim() else None
        return None if order.dim() and dim is None else (dim, order)

    def part_dim(self, tensor: Tensor) -> int | None:
        """The dimension of several rows, but not all of them, whose places are known; None: it has none."""
        dim, places = self.places(tensor) or (None, self._all)
        return None if len(places.reshape(-1)) == self._rows else dim

    def _dim(self, tensor: Tensor, rows: int | None = None) -> int | None:
        """The one of the first two dimensions that is as long as there are rows."""
        dims = [dim for dim, size in enumerate(tensor.shape[:2]) if size == (self._rows if rows is None else rows)]
        return dims[0] if len(dims) == 1 or (dims and self.is_first) else None

    def _of(self, tensor: Tensor) -> Order:
        order: Order = self._orders.get(unwrapped(tensor))  # type: ignore[no-untyped-call]  # torch's gap
        if isinstance(order, Differ) or (isinstance(order, Tensor) and not order.dim()):
            return order
        return Unknown() if self._dim(tensor, None if not isinstance(order, Tensor) else len(order)) is None else order

    def _normal(self, places: Tensor) -> Order:
        """One row is one whether it is sliced or taken, and all of them in their order are the batch."""
        if places.numel() == 1:
            return places.reshape(())
        return None if torch.equal(places, self._all) else places

    def _places(self, order: Tensor | None) -> Tensor:
        return self._all if order is None else order

    def _joined(self, parts: Sequence[Order], made: Tensor) -> Order:
        """Of rows that are put one after the other."""
        if any(isinstance(one, Differ) for one in parts):
            return Differ() if len(parts) == self._rows and made.dim() > 1 else Unknown()
        places = [self._places(one) for one in parts if isinstance(one, Tensor | None)]
        if not places or len(places) < len(parts):
            return Unknown()
        joined = torch.cat([one.reshape(-1) for one in places])
        if len(joined) == len(made):
            return self._normal(joined)
        return parts[0] if all(torch.equal(one, places[0]) for one in places) else Unknown()

    def _written(self, args: Sequence[Any], tags: Sequence[Any]) -> Order:
        """Of what rows are written into: those that come may be others than the place is for."""
        target, _, value = args[:3]
        is_rows = self._is_rows(tags[0])
        order = self._of(target) if is_rows else None if self._dim(target) is not None else Unknown()
        new = self._of(value) if isinstance(value, Tensor) and self._is_rows(tags[-1]) else Unknown()
        if isinstance(order, Unknown | Differ) or isinstance(new, Unknown):
            return order if is_rows else Unknown()
        dim = self._dim(target, None if order is None else order.numel())
        taken = None if dim is None else _taken(self._places(order), self._index("__setitem__", args, {}, dim))
        meeting = new if taken is None else _meeting(self._normal(taken), new, self._rows)
        if is_rows:
            return Differ() if isinstance(meeting, Differ) else order
        return Unknown() if isinstance(meeting, Differ) else order

    def _moved(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], order: Tensor | None, made: Sequence[Tensor]
    ) -> list[Order]:
        """The orders after a call that may give rows other places, or take some of them."""
        own = args[0] if args else named.get("input")
        dim = self._dim(own, None if order is None else order.numel()) if isinstance(own, Tensor) else None
        if own is None or dim is None or (order is not None and not order.dim()):
            return [order] * len(made)
        places = self._places(order)
        if name in (_PARTS | _ONE_BY_ONE) and dim == _argument(args, named, "dim", 1 if name in _ONE_BY_ONE else 2, 0):
            sizes = [1 if name in _ONE_BY_ONE else one.shape[dim] for one in made]
            return [self._normal(one) for one in torch.split(places, sizes)]
        if name in REDUCTIONS and order is not None and len(order) != self._rows:
            return [Unknown()] * len(made)
        index = self._index(name, args, named, dim)
        if name in ("sort", "argsort", "msort"):
            index = list(made)[-1]
        elif name == "flip" and dim in [one % own.dim() for one in _numbers([args[1:], named.get("dims", ())])]:
            index = torch.arange(len(places)).flip(0)
        elif name == "roll" and dim in (dims := _numbers(named.get("dims", args[2:]))):
            shift = _numbers(named.get("shifts", args[1:2]))[dims.index(dim)]
            index = torch.arange(len(places)).roll(shift)
        taken = _taken(places, index)
        if taken is None:
            return [order] * len(made)
        is_chosen = taken.dim() and not isinstance(index, slice)  # how many there are may be another number elsewhere
        return [taken if is_chosen and len(taken) != self._rows else self._normal(taken)] * len(made)

    @staticmethod
    def _index(name: str, args: Sequence[Any], named: Mapping[str, Any], dim: int | None) -> Any:
        """What a call takes rows by, which are in a dimension; None: it takes none."""
        if dim is None:
            return None
        if name in ("index_select", "select", "narrow") and _argument(args, named, "dim", 1) == dim:
            if name == "narrow":
                first = _argument(args, named, "start", 2)
                return slice(first, first + _argument(args, named, "length", 3))
            return _argument(args, named, "index", 2)
        if name in ("__getitem__", "__setitem__"):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            plain = not any(one is None or one is Ellipsis for one in places)
            return places[dim] if plain and len(places) > dim else None
        return None


def _meeting(one: Order, other: Order, rows: int) -> Order:
    """The order of what is made of rows in two orders."""
    if isinstance(one, Unknown | Differ) or isinstance(other, Unknown | Differ):
        return Differ()
    counts = [rows if its is None else its.numel() for its in (one, other)]
    if counts[0] != counts[1]:
        return Differ() if 1 in counts else Unknown()
    is_same = one is other if one is None or other is None else torch.equal(one.reshape(-1), other.reshape(-1))
    return one if is_same else Differ()


def _argument(args: Sequence[Any], named: Mapping[str, Any], name: str, at: int, otherwise: Any = None) -> Any:
    return named.get(name, args[at] if len(args) > at else otherwise)


def _numbers(given: Any) -> list[int]:
    if isinstance(given, int):
        return [given]
    return [one for part in given for one in _numbers(part)] if isinstance(given, (tuple, list)) else []


def _taken(places: Tensor, index: Any) -> Tensor | None:
    """Of some places those that an index takes; None: it is no index of rows."""
    numbers = _as_numbers(index)
    if numbers is None and isinstance(index, slice | int | np.integer) and not isinstance(index, bool):
        return places[index]
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == places.shape
    chosen = index if numbers is None and is_mask else numbers
    return None if chosen is None else places[chosen.detach().cpu()]


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
