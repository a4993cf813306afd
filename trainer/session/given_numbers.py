"""Numbers that a script brings from outside torch to samples: they are the same on all workers, or each one's own.

    baseline = 0.9 * baseline + 0.1 * reward.mean().item()          # met by the rewards of the next batch
    weight = torch.tensor(len(labels) / np.bincount(labels))        # met by the losses of this one

What became a Python number or an array is nobody's any more, but what comes back can be compared: constants and
schedules are alike on all workers, and what was computed of a worker's own share is not. Numbers that only some workers
need (of a branch that the others do not take) say nothing, and neither do those that a script may have drawn.

    keep = torch.from_numpy(each.numpy() > np.median(each.numpy()))     # where is each cut on the workers?

What has a number for each sample is the sample's, but where it cuts in two what had left torch before, the cut is one
number: it lies between the largest value below and the smallest above, and on no two workers may these be apart.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.session.listening import unwrapped

_FROM_OUTSIDE = {"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor", "full", "new_full", "full_like"}
_NORMALISES = {"batch_norm", "instance_norm"}
"""They are given statistics of their own share that they do not use, and that are named elsewhere."""

MOST_VALUES = 2**16
"""Of larger arrays, as frozen weights are, reading all of the values takes too long."""

_MARK = 2**32
"""Figures become one of so many; a float64 has room for 2**21 kinds beside them."""


def figure_of(values: Tensor) -> float:
    """One number of all values: of others, or in another order, it is another one."""
    flat = values.detach().double().cpu().flatten()
    return float(flat @ (1.5 + torch.arange(len(flat), dtype=torch.float64).cos()))


def marked(kind: int, figures: Sequence[float]) -> float:
    """Of what kind figures are, and which, as one number that workers can gather."""
    return float(kind * _MARK + zlib.crc32(struct.pack(f"{len(figures)}d", *figures)))


def unmarked(mark: float) -> tuple[int, int]:
    """The kind, and what is the same of the same figures."""
    return divmod(int(mark), _MARK)


LEAVES = {"numpy", "tolist", "__array__"}
"""Values are outside torch from there on."""

_CHANCE = 1000
"""Of as many ways in which two workers may choose samples one has those of both on one side of a value: of fewer it may
be chance."""


class Cut(NamedTuple):
    """Samples that were told apart by a value of theirs.

    Attributes:
        which: number of the choice, the values and the side, or of the way in which weights were made of values;
            0: there was none.
        lowest: the value that they were told apart by, or a figure of that way, is not below this.
        highest: nor above this.
        ways: to choose as many samples of as many.
    """

    which: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    ways: float = 0.0


NO_CUT = Cut()


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
        self._left: list[np.ndarray[Any, Any]] = []  # a value for each sample that left torch, since the last loss
        self._choices, self._cut, self._cut_at = 0, NO_CUT, ""

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

    def note_shared(self, whole: Tensor, place: str | None) -> None:
        """This worker's rows are taken of what must be the same on all workers.

        Args:
            whole: that.
            place: the line.
        """
        self._note_values(whole.double() if whole.numel() <= MOST_VALUES else whole, f"{place} (rows by run.split)")

    @property
    def have_left(self) -> bool:
        """Whether values of samples have left torch since the last loss."""
        return bool(self._left)

    def note_left(self, values: Tensor) -> None:
        """Torch gives values of samples away.

        Args:
            values: [samples] or [samples, classes].
        """
        if values.dtype.is_floating_point and values.dim() and len(self._left) < _MOST_LEFT:
            told = values.detach().double().cpu().reshape(len(values), -1)
            self._left.append((told.amax(1) if told.numel() else told).numpy())

    def note_chosen(self, chosen: Any, rows: int, place: str | None) -> None:
        """Samples meet something from outside torch that may have a number for each.

        Args:
            chosen: a tensor, array or list of these, or of which rows are taken.
            rows: samples.
            place: the line.
        """
        if self._cut.which:
            return
        is_in = _as_choice(chosen, rows)
        weights = _as_weights(chosen, rows) if is_in is None else None
        if is_in is None and weights is None:
            return
        self._choices += 1
        for number, values in enumerate(self._left):
            if len(values) != rows:
                continue
            if is_in is None:
                if (found := _made_of(weights, values)) is not None:
                    kind, lowest, highest = found
                    which = 1 + kind + _KINDS * (number + _MOST_LEFT * self._choices)
                    self._cut, self._cut_at = Cut(-which, lowest, highest, _CHANCE), place or ""
                    return
                continue
            ways = min(math.comb(rows, int(is_in.sum())), _CHANCE)
            one, other = values[is_in], values[~is_in]
            for side, below, above in ((0, other, one), (1, one, other)):
                if below.max() <= above.min():
                    which = 1 + side + 2 * (number + _MOST_LEFT * self._choices)
                    self._cut, self._cut_at = Cut(which, below.max(), above.min(), ways), place or ""
                    return

    def _note_values(self, tensor: Tensor, place: str | None) -> None:
        if not tensor.dtype.is_floating_point or tensor.numel() > MOST_VALUES:
            return
        flat = tensor.detach().double().cpu().flatten()
        is_one = len(flat) > 0 and bool((flat == flat[0]).all())  # however many there are of it
        told = flat[0] if is_one else figure_of(flat)
        self._values.setdefault(float(told), place or "")

    def take(self) -> tuple[float, Cut, str]:
        """How many numbers there were since the last loss, and which (0: none that could be compared); how samples were
        told apart; and where that was, or the number came in that is least like one that somebody wrote."""
        cut, at = self._cut, self._cut_at
        self._left, self._choices, self._cut = [], 0, NO_CUT
        mark, place = self._taken()
        return mark, cut, at if cut.which else place

    def _taken(self) -> tuple[float, str]:
        values, self._values = self._values, {}
        now, before = _drawn(), self._drawn
        self._drawn = now
        if not values or now != before:
            return 0.0, ""
        ordered = sorted(values)
        return marked(len(ordered), ordered), max(values.items(), key=lambda item: len(repr(item[0])))[1]

    def _is_given(self, tensor: Tensor) -> bool:
        """Whether it is of numbers from outside: torch has not made it while there was somebody to hear it."""
        one = unwrapped(tensor)
        if one.requires_grad or one is not tensor:  # what torch.func wraps it has made
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


_MOST_LEFT = 8
_KINDS = 4
_FIT = 1e-4
"""Of the spread of weights that may be left of rounding where they are a function of other values."""


def _as_weights(chosen: Any, rows: int) -> np.ndarray[Any, Any] | None:
    """[rows] a number for each, most of them different; None: it has none."""
    given = chosen.detach().cpu().numpy() if isinstance(chosen, Tensor) else np.asarray(chosen)
    given = given.reshape(-1)
    is_one = given.dtype.kind == "f" and len(given) == rows > 3 and np.isfinite(given).all()
    return given.astype(np.float64) if is_one and 2 * len(np.unique(given)) > rows else None


def _made_of(weights: Any, values: np.ndarray[Any, Any]) -> tuple[int, float, float] | None:
    """How weights are made of values where a statistic of these may be in it, and between what a figure of that lies:
    a line (a score of each, a part of their sum), an exponential (softmax), a power, or a line of their ranks, which
    are each share's own; None: in none of these ways."""
    ranks = values.argsort().argsort().astype(np.float64)
    ways = [(0, values, weights, 1.0)]
    if (weights > 0).all():
        ways.append((1, values, np.log(weights), 0.0))
        ways += [(2, np.log(values), np.log(weights), 0.0)] if (values > 0).all() else []
    for kind, x, y, at in [*ways, (3, ranks, weights, 0.0)]:
        x_spread, y_spread = np.ptp(x), np.ptp(y)
        if not (x_spread > 0 and y_spread > 0):
            continue
        slope, start = np.polyfit(x, y, 1)
        if np.abs(slope * x + start - y).max() <= _FIT * y_spread:
            figure, off = slope * at + start, 10 * _FIT * (abs(slope) + abs(start))
            return (kind, 1.0, 0.0) if kind == 3 else (kind, figure - off, figure + off)
    return None


def _as_choice(chosen: Any, rows: int) -> np.ndarray[Any, Any] | None:
    """[rows] whether each is taken, or has the larger of two numbers; None: it says no such thing."""
    given = chosen.detach().cpu().numpy() if isinstance(chosen, Tensor) else np.asarray(chosen)
    given = given.reshape(-1)
    if given.dtype.kind not in "bif" or not 1 < len(given) <= rows:
        return None
    if given.dtype.kind == "i" and (len(given) < rows or len(np.unique(given)) == rows):
        is_in = np.zeros(rows, dtype=bool)
        if given.min() < 0 or given.max() >= rows:
            return None
        is_in[given] = True
        return is_in if 0 < is_in.sum() < rows else None
    return given == given.max() if len(given) == rows and len(np.unique(given)) == 2 else None


def differ(marks: Sequence[float], cuts: Sequence[Cut] = ()) -> bool:
    """Whether two workers met as many numbers, and others, or told samples apart by values that cannot be the same."""
    known = [unmarked(mark) for mark in marks if mark]
    apart = any(
        one.which == other.which != 0 and one.lowest > other.highest and one.ways * other.ways >= _CHANCE
        for one in cuts
        for other in cuts
    )
    return apart or any(count == other and which != that for count, which in known for other, that in known)


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
