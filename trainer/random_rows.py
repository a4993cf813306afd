"""Random numbers that belong to samples: a sample draws the same ones in a batch and in a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DRAW = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_",
         "random_", "bernoulli", "bernoulli_", "native_dropout", "exponential_", "geometric_", "cauchy_", "log_normal_",
         "multinomial", "poisson", "rrelu_with_noise", "randperm"}  # fmt: skip
"""Operators of torch that draw."""

_SEED = 1_000_003


class RandomRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Inside, whatever is drawn for a batch is drawn sample by sample, from a sequence of the draw and the sample.

    Args:
        first: place of the batch's first sample in the whole batch.
        samples: of the batch.
        whole: samples of the whole batch, after which they repeat; None: they do not.
    """

    def __init__(self, first: int, samples: int, whole: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._first = first
        self._samples = samples
        self._whole = whole or first + samples
        self._draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch operator; one that draws random numbers draws them sample by sample."""
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in _DRAW:
            return func(*args, **kwargs)
        self._draws += 1
        return self._draw(func, args, kwargs)

    def _draw(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        at, rows = _where(args)
        if at is None or rows == 0 or rows % self._samples:
            torch.manual_seed(_SEED * self._draws)
            return func(*args, **kwargs)
        each = rows // self._samples
        drawn = []
        for sample in range(self._samples):
            torch.manual_seed(_SEED * self._draws + 1 + (self._first + sample) % self._whole)
            own = list(args)
            given = own[at]
            if isinstance(given, Tensor):
                own[at] = given[sample * each : (sample + 1) * each]
            else:
                own[at] = [each, *given[1:]]
            drawn.append(func(*own, **kwargs))
        if isinstance(args[at], Tensor) and func.__name__.split(".")[0].endswith("_"):
            return args[at]  # in place, row by row
        if isinstance(drawn[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*drawn, strict=True))
        return torch.cat(drawn)


def _where(args: Sequence[Any]) -> tuple[int | None, int]:
    """Which argument has the rows, a tensor or a size, and how many those are."""
    for at, one in enumerate(args):
        if isinstance(one, Tensor):
            return (at, one.shape[0]) if one.dim() else (None, 0)
        if isinstance(one, (list, tuple)) and one and all(isinstance(size, int) for size in one):
            return at, one[0]
    return None, 0
