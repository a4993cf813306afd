"""Numbers that a script brings from outside torch to samples: they are the same on all workers, or each one's own.

    baseline = 0.9 * baseline + 0.1 * reward.mean().item()          # met by the rewards of the next batch
    weight = torch.tensor(len(labels) / np.bincount(labels))        # met by the losses of this one

What became a Python number or an array is nobody's any more, but what comes back can be compared: constants and
schedules are alike on all workers, and what was computed of a worker's own share is not. Numbers that only some workers
need (of a branch that the others do not take) say nothing, and neither do those that a script may have drawn.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.session.listening import unwrapped

_FROM_OUTSIDE = {"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor", "full", "new_full", "full_like"}
_NORMALISES = {"batch_norm", "instance_norm"}
"""They are given statistics of their own share that they do not use, and that are named elsewhere."""

_MOST_VALUES = 2**16
"""Of larger arrays, as frozen weights are, reading all of the values takes too long."""

_MARK = 2**32


class GivenNumbers:
    """Of one worker, batch by batch.

    Args:
        knows_tensors: whether what torch has made unheard was there before the first batch; else it may be of samples.
    """

    def __init__(self, *, knows_tensors: bool = True) -> None:
        self._knows_tensors = knows_tensors
        self._values: dict[float, str] = {}
        self._known = WeakTensorKeyDictionary()  # what torch made, and whether of numbers from outside
        self._drawn: object = None

    def begin(self, origins: Iterable[object] = ()) -> None:
        """A batch begins: what was drawn before is in its samples.

        Args:
            origins: what it comes from: a data set, whose numbers are in its samples, and samplers, which choose by
                theirs.
        """
        now = _drawn()
        if now != self._drawn:
            self._values, self._drawn = {}, now
        for origin in origins:
            for name, value in list(getattr(origin, "__dict__", {}).items()):
                place = f"{type(origin).__name__}.{name} of the loader"
                if isinstance(value, float):
                    self._values.setdefault(value, place)
                elif isinstance(origin, Sampler) and (values := _weights(value)) is not None:
                    self._note_values(values, place)

    def note_made(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Torch has made tensors of no samples."""
        for one in made:
            like = [self._is_given(each) for each in given if each.shape == one.shape or not each.dim()]
            self._known[unwrapped(one)] = name in _FROM_OUTSIDE or any(like)

    def note_met(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], of_none: Sequence[Tensor], place: str | None
    ) -> None:
        """Samples meet the numbers in a call.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            of_none: tensors among them that are of no samples.
            place: the line.
        """
        if name in _NORMALISES:
            return
        for one in _numbers([args, named]):
            self._values.setdefault(float(one), place or "")
        for each in of_none:
            if self._is_given(each):
                self._note_values(unwrapped(each), place)

    def _note_values(self, tensor: Tensor, place: str | None) -> None:
        if not tensor.dtype.is_floating_point or tensor.numel() > _MOST_VALUES:
            return
        flat = tensor.detach().double().cpu().flatten()
        is_one = len(flat) > 0 and bool((flat == flat[0]).all())  # however many there are of it
        told = flat[0] if is_one else flat @ (1.5 + torch.arange(len(flat), dtype=torch.float64).cos())
        self._values.setdefault(float(told), place or "")

    def take(self) -> tuple[float, str]:
        """How many numbers there were since the last loss, and which; and where the one came in that is least like one
        that somebody wrote. 0: none that could be compared."""
        values, self._values = self._values, {}
        now, before = _drawn(), self._drawn
        self._drawn = now
        if not values or now != before:
            return 0.0, ""
        ordered = sorted(values)
        mark = len(ordered) * _MARK + zlib.crc32(struct.pack(f"{len(ordered)}d", *ordered))
        return float(mark), max(values.items(), key=lambda item: len(repr(item[0])))[1]

    def _is_given(self, tensor: Tensor) -> bool:
        """Whether it is of numbers from outside: torch has not made it while there was somebody to hear it."""
        one = unwrapped(tensor)
        if one.requires_grad:
            return False
        known: bool = self._known.get(one, self._knows_tensors)  # type: ignore[no-untyped-call]  # torch's gap
        return known


def origins_of(loader: object) -> tuple[object, ...]:
    """What the batches of a loader come from: its data set, those inside that, and its samplers."""
    found: list[object] = []
    waiting = [loader]
    while waiting and len(found) < _MOST_ORIGINS:
        has: dict[str, object] = getattr(waiting.pop(), "__dict__", {})
        several = has.get("datasets")
        inside = [has.get("dataset"), has.get("batch_sampler"), has.get("sampler")]
        inside += several if isinstance(several, list) else []
        new = [one for one in inside if one is not None and not any(one is other for other in found)]
        found += new
        waiting += new
    return tuple(found)


_MOST_ORIGINS = 16


def _weights(value: object) -> Tensor | None:
    """Of samples, as samplers have them."""
    if isinstance(value, list) and value and all(isinstance(one, (float, np.floating)) for one in value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(value.astype(np.float64))
    return value if isinstance(value, Tensor) else None


def differ(marks: Sequence[float]) -> bool:
    """Whether two workers met as many numbers, and others."""
    known = [divmod(int(mark), _MARK) for mark in marks if mark]
    return any(count == other and which != that for count, which in known for other, that in known)


def _numbers(given: Any) -> Iterator[float]:
    if isinstance(given, (float, np.floating)) and math.isfinite(given):
        yield float(given)
    elif isinstance(given, Mapping):
        yield from _numbers(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _numbers(one)


def _drawn() -> object:
    """Changes where Python or NumPy have drawn random numbers."""
    kind, keys, at, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, zlib.crc32(np.asarray(keys).tobytes()), at, rest
