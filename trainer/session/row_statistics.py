"""Whether a script brings a statistic over its samples back to the samples: asked of the first batches.

    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    weight = (labels == 0).sum() / (labels == 1).sum()

On one machine these are of the whole batch, on a worker of its part. Second derivatives do not tell, as nothing of it
needs a gradient. What torch is called with does: a tensor with a row for each sample is reduced over them, and the
result is combined with such tensors again; or samples are chosen by comparing them. A statistic that is only logged, or
that a sum is divided by, is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.script_lines import Lines

_REDUCTIONS = {
    "mean", "std", "var", "sum", "nansum", "nanmean", "median", "quantile", "norm", "vector_norm", "var_mean",
    "std_mean", "logsumexp", "prod", "bincount", "histc", "count_nonzero", "max", "min", "amax", "amin", "aminmax",
}  # fmt: skip
_EXTREMES = {"max", "min", "amax", "amin", "aminmax"}
"""Of whole numbers these are lengths, to pad or to pack by."""

_CHOICES = {"topk": 2, "kthvalue": 2, "sort": 1, "argsort": 1, "msort": 1}
"""They compare values along a dimension, the last unless their argument at this place says another."""

_MULTIPLES = 2
"""Of so few rows almost everything has a multiple."""

_SHAPED = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
"""They take no value of their second tensor."""

_DIM_AT = {"norm": 2, "quantile": 2, "vector_norm": 2}
"""Place of the dimension among the arguments, where it is not the second."""


class _Of(IntEnum):
    ROWS = 1
    STATISTIC = 2
    MIXED = 3


class RowStatistics(TorchFunctionMode):
    """Listens to what torch is called with, from one batch to the next.

    Args:
        rows: samples that the script was given, at least two.
        storages: where they lie.

    Attributes:
        is_listening: whether the calls are the script's.
    """

    def __init__(self, rows: int, storages: frozenset[StorageWeakRef]) -> None:
        super().__init__()
        self._rows = rows
        self._storages = storages
        self._lines = Lines(sys.argv[0] if sys.argv else "")
        self._tags = WeakTensorKeyDictionary()
        self._place: str | None = None
        self.is_listening = True

    @staticmethod
    def can_listen(model: nn.Module) -> bool:
        """Whether nothing is compiled, which would be compiled anew for it."""
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        compiles = any(one is not None for one in getattr(frames, "cached_backends", {}).values())
        return not compiles and not any(
            hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
            for one in model.modules()
        )

    def begin(self) -> None:
        """Listen from here on."""
        _push_mode(self)  # type: ignore[no-untyped-call]  # torch's gap

    def end(self) -> bool:
        """Listen no more.

        Returns:
            Whether it is out of torch's way; the script may have put something above it meanwhile.
        """
        self.is_listening = False
        if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]  # torch's gap
            return False
        _pop_mode()  # type: ignore[no-untyped-call]  # likewise
        return True

    def problem(self, loss: Tensor) -> str | None:
        """Where a statistic came back to the samples of a loss; None: nowhere, or the lines are not the script's."""
        return self._place or "some line" if self._tag(loss) == _Of.MIXED else None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See torch: every call of the script comes by here."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        if self.is_listening:
            self._hear(getattr(func, "__name__", ""), args, named, result)
        return result

    def _hear(self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        given = list(_tensors([args[:1], named] if name in _SHAPED else [args, named]))
        tags = {tag for one in given if (tag := self._tag(one)) is not None}
        if name == "grad":  # of a sum over the samples by each of them
            tags.discard(_Of.STATISTIC)
        made: _Of | None = max(tags, default=None)
        if name == "__getitem__" and made is None:
            made = _Of.ROWS if self._selects_rows(args) else None
        if made is None or name.endswith("_like") or name.startswith("new_"):
            return
        if made == _Of.STATISTIC and _Of.ROWS in tags:
            made = _Of.MIXED
        elif made == _Of.ROWS and name in {*_REDUCTIONS, *_CHOICES} and self._is_over_rows(name, args, named):
            is_length = not (args or [named["input"]])[0].dtype.is_floating_point
            if name in _REDUCTIONS:
                if is_length and name in _EXTREMES:
                    return
                made = _Of.STATISTIC
            elif not is_length:
                made = _Of.MIXED
        if made == _Of.MIXED:
            self._place = self._place or self._lines.now()
        for one in _tensors([result]):
            # Losses reduce over the samples as well.
            self._tags[one] = _Of.STATISTIC if made == _Of.ROWS and not one.dim() else made

    def _tag(self, tensor: Tensor) -> _Of | None:
        found: _Of | None = self._tags.get(tensor)  # type: ignore[no-untyped-call]  # torch's gap
        if found is None and self._storages and tensor.layout == torch.strided and self._row_dims(tensor):
            try:
                lies = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's gap
            except RuntimeError:
                return None  # of a tensor that only pretends to have a storage
            return _Of.ROWS if lies in self._storages else None
        return found

    def _row_dims(self, tensor: Tensor) -> list[int]:
        """Dimensions in which the samples may be: the first or, of sequences that come first, the second. Where none
        is as long as they are many, each may have several rows (its tokens)."""
        sizes = tensor.shape[:2]
        exact = [dim for dim, size in enumerate(sizes) if size == self._rows]
        if exact or self._rows <= _MULTIPLES:
            return exact
        return [dim for dim, size in enumerate(sizes) if size % self._rows == 0][:1]

    def _selects_rows(self, args: Sequence[Any]) -> bool:
        """Whether this worker's rows are taken of what all have: by `split`."""
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if isinstance(index, slice) and isinstance(index.start, int) and isinstance(index.stop, int):
            return index.step is None and index.stop - index.start == self._rows
        return isinstance(index, Tensor) and index.dtype == torch.int64 and index.shape[:1] == (self._rows,)

    def _is_over_rows(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        own = args[0] if args else named.get("input")
        if not isinstance(own, Tensor):
            return False
        rows = self._row_dims(own)
        if not rows:
            return False
        at = _CHOICES.get(name, _DIM_AT.get(name, 1))
        dim = named.get("dim", named.get("axis", args[at] if len(args) > at else -1 if name in _CHOICES else None))
        if isinstance(dim, Tensor):  # the larger of two
            return False
        dims = range(own.dim()) if dim is None else dim if isinstance(dim, (list, tuple)) else [dim]
        return set(rows) <= {one % own.dim() for one in dims}


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _tensors(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
