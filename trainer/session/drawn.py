"""What a script draws by torch for the whole batch (a coin, a size, an order of columns): one on one machine, and
another on each worker, as torch draws each worker's own numbers for its samples.

    if torch.rand(1).item() < 0.5:                  # teacher forcing, a layer that is left out
    size = int(torch.randint(6, 14, (1,)))          # images of several sizes
    keep = torch.randperm(64)[:48]                  # columns, heads, experts

What is drawn for each sample is as long as a worker has samples, which differs between unequal workers, or several
times that. What has the same shape on all workers is of the batch, and then all must draw it from the same state of the
generator (values of a coin are alike by chance). Dropout is left out: nobody counts on one mask for all, and a table
of positions has one in many models.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.trainer.session.given_numbers import MOST_VALUES, figure_of, marked, unmarked
from hetopt.trainer.session.listening import tensors_in, unwrapped

_DRAWS = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "binomial", "gumbel_softmax", "normal_", "uniform_", "random_", "bernoulli_",
    "exponential_", "geometric_", "log_normal_", "cauchy_", "_sample_dirichlet", "_standard_gamma",
}  # fmt: skip
_COMPARISONS = {"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"}
_SHAPES = 2**20  # kinds of a mark


class Drawn:
    """Of one worker, from loss to loss."""

    def __init__(self) -> None:
        self._rows, self._is_even = 0, False
        self._found: list[tuple[tuple[int, ...], float]] = []
        self._scalars = WeakTensorKeyDictionary()  # and that nothing was done with yet
        self._place = ""

    def begin(self, rows: int, *, is_even: bool) -> None:
        """A batch begins: what was drawn before is in its samples.

        Args:
            rows: of this worker.
            is_even: whether all have as many.
        """
        self._rows, self._is_even = rows, is_even
        self.take()

    def hear(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any, place: Callable[[], str | None]
    ) -> None:
        """The script has called torch.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            result: of it.
            place: tells the line.
        """
        if self._scalars:
            self._hear_use(name, args, named, place)
        if name not in _DRAWS or not isinstance(result, Tensor) or not _is_of_training():
            return
        if result.numel() == 1:
            self._scalars[result] = _drawn_from(result, named)
        elif not self._is_of_samples(result.shape):
            self._note(result.shape, _drawn_from(result, named), place)

    def take(self) -> tuple[float, str]:
        """A mark of what was drawn since the last loss (0: nothing), and where that was first."""
        found, place = self._found, self._place
        self._found, self._place, self._scalars = [], "", WeakTensorKeyDictionary()
        if self._is_even:  # one for each sample, as a loop over them draws
            ones = [one for one in found if not one[0]]
            found = [one for one in found if one[0]] if len(ones) % max(2, self._rows) == 0 else found
        if not found:
            return 0.0, ""
        shapes, values = zip(*found, strict=True)
        told = zlib.crc32(repr(shapes).encode()) % (_SHAPES - 1) + 1
        return marked(told, values), place

    def _hear_use(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any], place: Callable[[], str | None]
    ) -> None:
        """Something is done with one number; `rand() < 0` is the same whatever it is."""
        for one in tensors_in([args, named]):
            source: float | None = self._scalars.get(one)  # type: ignore[no-untyped-call]  # torch's gap
            if source is None:
                continue
            others = [other for other in args if isinstance(other, float | int)]
            if name.strip("_") in _COMPARISONS and others and not 0 < others[0] < 1:
                continue
            del self._scalars[one]
            self._note((), source, place)

    def _note(self, shape: Sequence[int], source: float, place: Callable[[], str | None]) -> None:
        self._found.append((tuple(shape), source))
        self._place = self._place or place() or ""

    def _is_of_samples(self, shape: Sequence[int]) -> bool:
        """Several for each where all workers have as many; else the shape tells, as others have another."""
        return any(size == self._rows or (self._is_even and size % self._rows == 0) for size in shape)


def draws_differ(marks: Sequence[float], rows: Sequence[int]) -> bool:
    """Whether two workers have drawn as much for the whole batch, and something else.

    Args:
        marks: of the workers.
        rows: that they have.
    """
    is_even = len(set(rows)) == 1
    known = [(*unmarked(mark), count) for mark, count in zip(marks, rows, strict=True) if mark]
    return any(
        shapes == other and values != others and (is_even or count != its)
        for shapes, values, count in known
        for other, others, its in known
    )


def _drawn_from(drawn: Tensor, named: Mapping[str, Any]) -> float:
    """A figure of the state of the generator; of one of the script's own, or a device's, of the values that it gave."""
    if named.get("generator") is None and drawn.device.type == "cpu":
        return float(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
    return figure_of(unwrapped(drawn).detach().flatten()[:MOST_VALUES])


def _is_of_training() -> bool:
    """Whether a loss may be of what is drawn: not of what draws an order of samples or their seeds, as loaders of
    evaluation do in the loop, nor without gradients, but for torch's distributions, which always draw so."""
    frame: FrameType | None = sys._getframe(2)
    for_loss = torch.is_grad_enabled()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.utils.data"):
            return False
        for_loss |= module.startswith("torch.distributions")
        frame = frame.f_back
    return for_loss
