"""Whether a loss depends on samples of an earlier batch by what a script keeps: asked of the first batches.

    center = 0.9 * center + 0.1 * teacher_out.mean(0)      # in the loss of the next batch

On one machine that is of the whole batch, on a worker of its share alone, and so is every later loss. What torch is
called with tells: what is made of a batch's samples is of that batch, and what is made of this is, too. Gradients are
not heard, so parameters are of no batch, and neither is what `run.gather` gives. Of two kinds of memory one may stay:

- a tensor that still has a place for each row of the share (the hidden state of texts that go on in the next batch): on
  one machine a row's state meets the same row;
- anything else (means, queues, banks by number of the sample), which makes a loss that it reaches another one.

It does not hear compiled code or functions with a backward of their own. Of what went through Python numbers or NumPy
it hears where that comes back (`GivenNumbers`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.core.errors import BadInput
from hetopt.trainer.script_lines import Lines
from hetopt.trainer.session.drawn import Drawn
from hetopt.trainer.session.given_numbers import LEAVES, GivenNumbers
from hetopt.trainer.session.listening import CHOICES, REDUCTIONS, SHAPED, Listener, tensors_in, unwrapped

_OF_CLASSES = {"cross_entropy", "nll_loss", "multi_margin_loss"}
"""Their ``weight`` has a number for each class."""

_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_JOINS = {"cat", "concat", "concatenate", "hstack", "vstack"}
_PRODUCTS = {"matmul", "__matmul__", "mm", "bmm"}


class _Of(NamedTuple):
    """What a tensor is made of.

    Attributes:
        oldest: turn of the first samples; a turn goes from the first batch that is given after a loss to the next loss.
        newest: of the last.
        is_rows: whether it has a place for each of this worker's rows; then only the last samples count.
    """

    oldest: int
    newest: int
    is_rows: bool

    @property
    def together(self) -> _Of:
        """The rows have lost their places."""
        return self._replace(is_rows=False)


def _of_all(tags: Sequence[_Of]) -> _Of | None:
    """What is made of several tensors."""
    if not tags:
        return None
    newest = max(one.newest for one in tags)
    rows = [one.newest for one in tags if one.is_rows]
    oldest = [one.oldest for one in tags if not one.is_rows]
    return _Of(min([*oldest, *([max(rows)] if rows else [])]), newest, not oldest)


class Kept(Listener):
    """Hears what becomes of the samples of the first batches.

    Args:
        model: of the script, whose parameters may be of no samples but by gradients.
        is_first: whether nothing was computed before.

    Attributes:
        numbers: that met samples, or what is of all workers, from outside torch.
        drawn: by torch for the whole batch.
        has_hook: whether the script has put one on a tensor.
        values: scalars of this turn that may be terms of a loss, by their operators.
        changed: the lines where the script has changed gradients since they were summed, by names of parameters.
    """

    def __init__(self, model: nn.Module, *, is_first: bool = True) -> None:
        super().__init__(0)
        self._model = model
        self._parameters = {_storage(one): name for name, one in model.named_parameters()}
        self.numbers = GivenNumbers(knows_tensors=is_first)
        self.drawn = Drawn()
        self._lines = Lines(sys.argv[0] if sys.argv else "")
        self._given: dict[StorageWeakRef, _Of] = {}  # where batches lie
        self._made = WeakTensorKeyDictionary()  # what torch gave back
        self._written: dict[StorageWeakRef, _Of] = {}  # what was written into, all views of it
        self._places = WeakTensorKeyDictionary()  # where what is of earlier samples was used
        self._was_asked = False  # whether there was a loss in this turn
        self._is_own = False  # whether the script made gradients itself that are not summed
        self.has_hook = False
        self.values: dict[Any, Tensor] = {}
        self.changed: dict[str, str] = {}
        self._is_summed = False
        self._turn = 0

    def take(
        self, rows: int, storages: frozenset[StorageWeakRef], origins: Sequence[object] = (), *, is_even: bool = False
    ) -> None:
        """The script is given a batch.

        Args:
            rows: of this worker's share.
            storages: where its tensors lie.
            origins: data sets and samplers that it comes from.
            is_even: whether all workers have as many rows.
        """
        if self._was_asked:
            self._was_asked, self._turn = False, self._turn + 1
            self._places = WeakTensorKeyDictionary()
        self.rows, self._is_own, self._is_summed, self.values = rows, False, False, {}
        self.numbers.begin(origins)
        self.drawn.begin(rows, is_even=is_even)
        self._given.update(dict.fromkeys(storages, self._rows_now))

    @property
    def _rows_now(self) -> _Of:
        return _Of(self._turn, self._turn, True)

    def problem(self, loss: Tensor) -> str | None:
        """What of earlier samples a loss depends on, and where; None: on nothing."""
        self._was_asked = True
        tag = self._tag(loss)
        if tag is None or tag.oldest == tag.newest:
            return None
        place: str | None = self._places.get(loss)  # type: ignore[no-untyped-call]  # torch's gap
        return place or "a tensor"

    def hear(self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """See `Listener`.

        Raises:
            BadInput: the call changes a parameter by samples.
        """
        if isinstance(result, Tensor) and result.requires_grad and not result.dim() and result.grad_fn is not None:
            self.values[result.grad_fn] = result
        if self.rows < 2:
            return
        self.drawn.hear(name, args, named, result, self._lines.now)
        if name.endswith("_like") or name.startswith("new_"):
            return
        if name == "__set__":
            self._set(*args[:2])
            return
        self.has_hook |= name == "register_hook"
        if name in LEAVES and args[0].shape[:1] == (self.rows,) and self._tag(args[0]) is not None:
            self.numbers.note_left(args[0])
        if name == "backward":
            self._is_own = self._tag(args[0]) is not None
            return
        target = _target(name, args, named)
        if target is not None and self._is_summed:
            self._note_changed(target)
        covers = target is not None and _covers(name, args, target)
        given = list(tensors_in([args[:1], named] if name in SHAPED else [args[covers:], named]))
        tags = [self._tag(one) for one in given]
        made = _of_all([one for one in tags if one is not None])
        if name == "__getitem__" and made is None and self.selects_rows(args):
            made = self._rows_now
            self.numbers.note_shared(args[0], self._lines.now())
        if made is not None and (
            (name in {*REDUCTIONS, *CHOICES} and self.is_over_rows(name, args, named)) or self._is_product(name, args)
        ):
            made = made.together
        if made is not None and name in _JOINS and self.rows not in result.shape[:2]:  # a queue of several batches
            made = _Of(min(one.oldest for one in tags if one is not None), made.newest, False)
        # A number for each row is the row's; a weight of each class is not, where there are as many.
        of_classes = named.get("weight") if name in _OF_CLASSES else None
        of_none = [
            one
            for one, tag in zip(given, tags, strict=True)
            if tag is None and one is not target and (one is of_classes or one.shape[:1] != (self.rows,))
        ]
        if made is None and target is None:
            self.numbers.note_made(name, given, list(tensors_in([result])))
        elif any(tag is not None and tag.is_rows for tag in tags) or (
            target is not None and self._trained(target) is not None
        ):
            self.numbers.note_met(name, args, named, of_none, self._lines.now())
            for one in self._chosen(name, args, given, tags) if self.numbers.have_left else ():
                self.numbers.note_chosen(one, self.rows, self._lines.now())
        if target is not None:
            self._write(target, made, covers=covers)
        elif made is not None:
            for one in tensors_in([result]):
                self._made[unwrapped(one)] = made if self.row_dims(one) else made.together
        if made is not None and made.oldest < made.newest:
            self._note_place(given, tags, made, result if target is None else target)

    def _chosen(self, name: str, args: Sequence[Any], given: Sequence[Tensor], tags: Sequence[_Of | None]) -> list[Any]:
        """What meets the samples from outside torch and may have a number for each, or numbers of them."""
        if name in ("__getitem__", "index_select", "__setitem__"):
            index = args[2] if name == "index_select" and len(args) > 2 else args[1] if len(args) > 1 else None
            index = index[0] if isinstance(index, tuple) and index else index
            is_own = isinstance(index, Tensor) and self._tag(index) is not None
            return [index] if isinstance(index, Tensor | np.ndarray | list) and not is_own else []
        return [
            one
            for one, tag in zip(given, tags, strict=True)
            if tag is None and one.numel() == self.rows and one.shape[:1] == (self.rows,)
        ]

    def _is_product(self, name: str, args: Sequence[Any]) -> bool:
        """Whether rows are summed over by a product of matrices."""
        if name not in _PRODUCTS or any(self._tag(one) is None for one in args[:2]):
            return False
        return bool(args[0].shape[-1:] == (self.rows,))

    def _write(self, target: Tensor, made: _Of | None, *, covers: bool) -> None:
        at = _storage(target)
        if at is None:
            return
        if covers:
            self._written.pop(at, None)
            self._made.pop(target, None)  # type: ignore[no-untyped-call]  # torch's gap
        if made is not None and (trained := self._trained(target)) is not None:
            raise BadInput(
                f"{self._lines.now() or 'The script'} changes {trained} by this worker's samples alone, and the others "
                "by theirs.",
                hint="let run.backward(loss) make the gradient, which is of all workers in .grad then, and step by "
                "that; or compute what is written of run.gather(rows.detach())",
            )
        if made is not None:
            made = made if self.rows in target.shape[:2] else made.together
            before = self._written.get(at)
            self._written[at] = made if before is None or made.is_rows else _of_all([before, made]) or made

    def _trained(self, target: Tensor) -> str | None:
        """What a tensor is of a parameter, in words; None: nothing."""
        at = _storage(target)
        if at is None:
            return None
        if at in self._parameters:
            return f"parameter {self._parameters[at]}"
        named = self._model.named_parameters()
        name = next((name for name, one in named if one.grad is not None and _storage(one.grad) == at), None)
        return None if name is None or self._is_own else f"the gradient of {name}, which is of all workers,"

    def _set(self, target: Tensor, value: Any) -> None:
        """Of ``data``, or of ``grad``, which all workers sum."""
        if not isinstance(value, Tensor):
            return
        if self._is_summed and _storage(target) in self._parameters and target.grad is value:
            self._note_changed(value)
        tag = self._tag(value)
        if _storage(target) != _storage(value):
            self._made.pop(value, None)  # type: ignore[no-untyped-call]  # torch's gap
        elif tag is not None:
            self._made[target] = tag

    def _note_place(self, given: Sequence[Tensor], tags: Sequence[_Of | None], made: _Of, result: Any) -> None:
        """Where what is of earlier samples meets newer ones."""
        earlier = [one for one, tag in zip(given, tags, strict=True) if tag is not None and tag.oldest == made.oldest]
        place = next((place for one in earlier if (place := self._places.get(one))), None)  # type: ignore[no-untyped-call]
        place = place or (
            f"a tensor of shape {tuple(earlier[0].shape)} that is used at {self._lines.now() or 'some line'}"
            if earlier
            else "a tensor"
        )
        for one in tensors_in([result]):
            self._places[one] = place

    def _note_changed(self, target: Tensor) -> None:
        """Something is written that may be a gradient."""
        at = _storage(target)
        for name, one in self._model.named_parameters():
            if one.grad is not None and at is not None and _storage(one.grad) == at:
                self.changed[name] = self._lines.now() or "some line"

    def summed(self) -> None:
        """Gradients are of all workers."""
        self._is_own, self._is_summed, self.changed = False, True, {}

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self._model.parameters() if one.grad is not None]

    def _tag(self, tensor: Any) -> _Of | None:
        if not isinstance(tensor, Tensor):
            return None
        tensor = unwrapped(tensor)
        at = _storage(tensor)
        if self._is_own and at is not None and any(_storage(one) == at for one in self._gradients()):
            return _Of(self._turn, self._turn, False)
        found = [
            self._made.get(tensor),  # type: ignore[no-untyped-call]  # torch's gap
            None if at is None else self._written.get(at, self._given.get(at)),
        ]
        return _of_all([one for one in found if one is not None])


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """Where a tensor lies; None: in no one place."""
    if tensor.layout != torch.strided:
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's gap
    except RuntimeError:
        return None  # of a tensor that only pretends to have a storage


def _target(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """What a call writes into."""
    if isinstance(named.get("out"), Tensor):
        return named["out"]  # type: ignore[no-any-return]  # just looked at
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
    return args[0] if writes and args and isinstance(args[0], Tensor) else None


_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def _covers(name: str, args: Sequence[Any], target: Tensor) -> bool:
    """Whether nothing is left of what was there."""
    index = args[1] if name == "__setitem__" else None
    is_all = name in _OVERWRITES or index is Ellipsis or index == slice(None)
    is_somewhere = is_all and _storage(target) is not None
    return is_somewhere and target.numel() * target.element_size() == target.untyped_storage().nbytes()
