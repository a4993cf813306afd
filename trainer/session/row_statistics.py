"""Whether a script brings a statistic over its samples back to the samples: asked of the first batches.

    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    weight = (labels == 0).sum() / (labels == 1).sum()

On one machine these are of the whole batch, on a worker of its part. Second derivatives do not tell, as nothing of it
needs a gradient. What torch is called with does: a tensor with a row for each sample is reduced over them, and the
result is combined with such tensors again; or samples are chosen by comparing them. A statistic that is only logged, or
that a sum is divided by, is not. Two others are of this kind:

    fast = weight - rate * torch.autograd.grad(loss, weight)[0]     # a gradient is a statistic of the samples
    mixed = 0.7 * inputs + 0.3 * inputs.flip(0)                     # samples meet others, as in mixup
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.loss_reading import read_loss
from hetopt.trainer.script_lines import Lines
from hetopt.trainer.session.listening import CHOICES, MAKERS, REDUCTIONS, SHAPED, Listener, tensors_in, unwrapped
from hetopt.trainer.session.row_order import JOINS, Differ, Order, RowOrders, Unknown

_EXTREMES = {"max", "min", "amax", "amin", "aminmax"}
"""Of whole numbers these are lengths, to pad or to pack by."""


_PRODUCTS = {
    "mul", "multiply", "rmul", "imul", "div", "divide", "true_divide", "truediv", "rtruediv", "rdiv", "matmul", "mm",
    "mv", "dot", "vdot", "inner", "outer", "einsum", "cosine_similarity", "mse_loss",
}  # fmt: skip
"""Of two statistics they are none of the samples' means."""

_DIVISIONS = {"div", "divide", "true_divide", "truediv", "itruediv"}
_UNSCALED = {"sign", "sgn", "normalize", "gt", "lt", "ge", "le", "argmax", "argmin", "cosine_similarity"}
"""Of values divided by anything they make the same."""


_ADDITIONS = {"add", "radd", "iadd", "sub", "rsub", "isub"}
_NEGLIGIBLE = 1e-6
"""Of values, what does not change them in fp32."""


class _Of(IntEnum):
    SAMPLE = 1  # one of them
    ROWS = 2
    STATISTIC = 3
    SCALED = 4  # rows that are divided by how many a worker has
    MIXED = 5


class RowStatistics(Listener):
    """Listens to what torch is called with, from one batch to the next.

    Args:
        rows: samples that the script was given, at least two.
        storages: where they lie.
        singles: tensors of one sample, and its place.
        is_sure: whether samples are only where a dimension is as long as they are many.

    Attributes:
        of_one: the operators that gave scalars of one sample alone, and the place of the sample.
    """

    def __init__(
        self,
        rows: int,
        storages: frozenset[StorageWeakRef],
        singles: Mapping[Tensor, int] | WeakTensorKeyDictionary,
        *,
        is_sure: bool = False,
    ) -> None:
        super().__init__(rows, is_sure=is_sure)
        self._storages = storages
        self._lines = Lines(sys.argv[0] if sys.argv else "")
        self._tags = WeakTensorKeyDictionary()
        self._means = WeakTensorKeyDictionary()  # scalars that are divided by what they are of
        self._orders = RowOrders(rows, lambda tag: tag in (_Of.SAMPLE, _Of.ROWS))
        self._place: str | None = None
        self.of_one: dict[Any, int] = {}
        for one, place in list(singles.items()):
            self._tags[one] = _Of.SAMPLE
            self._orders.note(one, torch.tensor(place))

    def places(self, tensor: Tensor) -> tuple[int | None, Tensor] | None:
        """See `RowOrders`."""
        return self._orders.places(tensor)

    def problem(self, loss: Tensor) -> str | None:
        """Where a statistic came back to the samples of a loss; None: nowhere, or the lines are not the script's."""
        return self._place or "some line" if self._tag(loss) in (_Of.SCALED, _Of.MIXED) else None

    def hear(self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """See `Listener`."""
        if name.endswith("_like") or name.startswith("new_") or name in MAKERS:
            return
        if name == "grad":
            self._hear_gradient(args, named, result)
            return
        given = list(tensors_in([args[:1], named] if name in SHAPED else [args, named]))
        tags = [self._tag(one) for one in given]
        made: _Of | None = max((tag for tag in tags if tag is not None), default=None)
        if name == "__getitem__" and made is None:
            made = _Of.ROWS if self.selects_rows(args) else None
        if made is None:
            return
        results = list(tensors_in([args[0] if name == "__setitem__" else result]))
        orders = self._orders.of_results(name, args, named, given, tags, results)
        differ = any(isinstance(one, Differ) for one in orders)
        of_batch = [one for one, tag in zip(given, tags, strict=True) if tag is not None]
        of_samples = [one for one, tag in zip(given, tags, strict=True) if tag in (_Of.SAMPLE, _Of.ROWS)]
        if made == _Of.STATISTIC and any(unwrapped(one).dim() for one in of_samples):
            made = _Of.MIXED
        elif made == _Of.STATISTIC and name.strip("_") in _PRODUCTS:
            several = [one for one, tag in zip(given, tags, strict=True) if tag == made and one.dim()]
            made = _Of.MIXED if len(several) > 1 else made
        elif (made == _Of.SAMPLE and differ and name in JOINS) or (
            made == _Of.ROWS and (differ or self._orders.chooses(name, args, named, of_batch))
        ):
            made = _Of.MIXED
        elif made == _Of.SCALED and (name in _UNSCALED or _is_ratio(name, tags)):
            made = _Of.ROWS
        elif made == _Of.SCALED and _shifts(name, args):
            made = _Of.MIXED
        elif (
            made in (_Of.ROWS, _Of.SCALED) and name in {*REDUCTIONS, *CHOICES} and self.is_over_rows(name, args, named)
        ):
            is_length = not (args or [named["input"]])[0].dtype.is_floating_point
            if name in REDUCTIONS:
                if is_length and name in _EXTREMES:
                    return
                made = _Of.STATISTIC if made == _Of.ROWS else _Of.MIXED
            elif not is_length:
                made = _Of.MIXED
        if made in (_Of.SCALED, _Of.MIXED):
            self._place = self._place or self._lines.now()
        for one, order in zip(results, orders, strict=True):
            tag = self._tags[unwrapped(one)] = self._of_one(made, name, args, one, order)
            self._orders.note(one, order)
            if one.requires_grad and not unwrapped(one).dim():
                self._means[one] = self._is_mean(one)
                if tag == _Of.SAMPLE and isinstance(order, Tensor) and one.grad_fn is not None:
                    self.of_one[one.grad_fn] = int(order)

    def _is_mean(self, scalar: Tensor) -> bool:
        """Also of a sum that is divided by the samples."""
        try:
            reading = read_loss(scalar, self.rows)
        except RuntimeError:  # made of losses after their backward pass, which keeps no values: for the log
            return False
        is_divided = reading.kind == "sum" and (reading.denominator == self.rows or reading.may_be_counted)
        return is_divided or reading.kind in ("samples", "counted", "lengths")

    def _of_one(self, made: _Of, name: str, args: Sequence[Any], one: Tensor, order: Order) -> _Of:
        """What a result is of: losses reduce over the samples, of rows one may be taken, and single ones joined."""
        if made not in (_Of.SAMPLE, _Of.ROWS):
            return made
        if isinstance(order, Tensor):
            made = _Of.ROWS if order.dim() else _Of.SAMPLE
        elif self._takes_one(name, args):
            made = _Of.SAMPLE
        elif order is None:  # all of them
            made = _Of.ROWS
        return _Of.STATISTIC if made == _Of.ROWS and not unwrapped(one).dim() else made

    def row_dims(self, tensor: Tensor) -> list[int]:
        """See `Listener`; also of some of the rows."""
        part = self._orders.part_dim(tensor)
        return super().row_dims(tensor) if part is None else [part]

    def _takes_one(self, name: str, args: Sequence[Any]) -> bool:
        """Whether a call gives rows one by one."""
        if not args or not isinstance(args[0], Tensor) or 0 not in self.row_dims(args[0]):
            return False
        if name == "__getitem__":
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            return isinstance(first, int) and not isinstance(first, bool)
        return name in ("unbind", "__iter__", "select") and not any(args[1:2])

    def _hear_gradient(self, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """By the samples a gradient has rows as they have; by anything else it is a sum over them."""
        of = max((tag for one in tensors_in([args[:1], named.get("outputs")]) if (tag := self._tag(one))), default=None)
        if of is None:
            return
        outputs = list(tensors_in([args[:1], named.get("outputs")]))
        is_mean = any(self._means.get(one, False) for one in outputs)  # type: ignore[no-untyped-call]  # torch's gap
        by = tensors_in([named.get("inputs", args[1] if len(args) > 1 else ())])
        for one, made in zip(by, result, strict=True):
            if made is None:
                continue
            tag = self._tag(one)
            has_rows = not isinstance(unwrapped(one), nn.Parameter) and bool(self.row_dims(one))
            own = _Of.STATISTIC
            if unwrapped(made).dim() > made.dim():
                own = _Of.ROWS
            elif tag in (_Of.ROWS, _Of.SCALED) or (tag is None and has_rows):
                own = _Of.SCALED if is_mean else _Of.ROWS
            self._tags[unwrapped(made)] = of if of in (_Of.SAMPLE, _Of.MIXED) else own
            if of == _Of.SAMPLE:
                self._orders.note(made, Unknown())

    def _tag(self, tensor: Tensor) -> _Of | None:
        tensor = unwrapped(tensor)
        found: _Of | None = self._tags.get(tensor)  # type: ignore[no-untyped-call]  # torch's gap
        if found is None and self._storages and tensor.layout == torch.strided and self.row_dims(tensor):
            try:
                lies = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's gap
            except RuntimeError:
                return None  # of a tensor that only pretends to have a storage
            if lies not in self._storages:
                return None
            self._orders.is_first = self._orders.is_first and 0 in self.row_dims(tensor)
            return _Of.ROWS
        return found


def _shifts(name: str, args: Sequence[Any]) -> bool:
    """Whether a number is added (``norm + 1e-8``) beside which values that are divided by how many there are matter."""
    numbers = [one for one in args if isinstance(one, float | int)]
    values = [one for one in args if isinstance(one, Tensor)]
    if name.strip("_") not in _ADDITIONS or not numbers or not values or not values[0].numel():
        return False
    return bool(abs(numbers[0]) > _NEGLIGIBLE * values[0].detach().abs().max())


def _is_ratio(name: str, tags: Sequence[_Of | None]) -> bool:
    """Whether a value is divided by one that has the same divisor."""
    return name.strip("_") in _DIVISIONS and [tag for tag in tags if tag is not None].count(_Of.SCALED) > 1
