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
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.script_lines import Lines
from hetopt.trainer.session.listening import CHOICES, REDUCTIONS, SHAPED, Listener, tensors_in

_EXTREMES = {"max", "min", "amax", "amin", "aminmax"}
"""Of whole numbers these are lengths, to pad or to pack by."""


class _Of(IntEnum):
    ROWS = 1
    STATISTIC = 2
    MIXED = 3


class RowStatistics(Listener):
    """Listens to what torch is called with, from one batch to the next.

    Args:
        rows: samples that the script was given, at least two.
        storages: where they lie.
    """

    def __init__(self, rows: int, storages: frozenset[StorageWeakRef]) -> None:
        super().__init__(rows)
        self._storages = storages
        self._lines = Lines(sys.argv[0] if sys.argv else "")
        self._tags = WeakTensorKeyDictionary()
        self._place: str | None = None

    def problem(self, loss: Tensor) -> str | None:
        """Where a statistic came back to the samples of a loss; None: nowhere, or the lines are not the script's."""
        return self._place or "some line" if self._tag(loss) == _Of.MIXED else None

    def hear(self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """See `Listener`."""
        given = list(tensors_in([args[:1], named] if name in SHAPED else [args, named]))
        tags = {tag for one in given if (tag := self._tag(one)) is not None}
        if name == "grad":  # of a sum over the samples by each of them
            tags.discard(_Of.STATISTIC)
        made: _Of | None = max(tags, default=None)
        if name == "__getitem__" and made is None:
            made = _Of.ROWS if self.selects_rows(args) else None
        if made is None or name.endswith("_like") or name.startswith("new_"):
            return
        if made == _Of.STATISTIC and _Of.ROWS in tags:
            made = _Of.MIXED
        elif made == _Of.ROWS and name in {*REDUCTIONS, *CHOICES} and self.is_over_rows(name, args, named):
            is_length = not (args or [named["input"]])[0].dtype.is_floating_point
            if name in REDUCTIONS:
                if is_length and name in _EXTREMES:
                    return
                made = _Of.STATISTIC
            elif not is_length:
                made = _Of.MIXED
        if made == _Of.MIXED:
            self._place = self._place or self._lines.now()
        for one in tensors_in([result]):
            # Losses reduce over the samples as well.
            self._tags[one] = _Of.STATISTIC if made == _Of.ROWS and not one.dim() else made

    def _tag(self, tensor: Tensor) -> _Of | None:
        found: _Of | None = self._tags.get(tensor)  # type: ignore[no-untyped-call]  # torch's gap
        if found is None and self._storages and tensor.layout == torch.strided and self.row_dims(tensor):
            try:
                lies = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's gap
            except RuntimeError:
                return None  # of a tensor that only pretends to have a storage
            return _Of.ROWS if lies in self._storages else None
        return found
