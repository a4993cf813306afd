"""Whether a script's collate function brings the samples of a batch together, or pads them: asked of the first batches.

    collate_fn=lambda samples: mixup(*default_collate(samples))     # each image meets another one of its list

A worker collates its own samples, so they would meet each other alone. One sample is turned round, and all are collated
again with the same random numbers: the rows of the others stay, or they are of several samples. Padding may be longer,
and rows sorted by their length. A sample that is collated alone has no padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hetopt.trainer.session.padding import Padding, tensors_in
from hetopt.trainer.session.random_state import States

_FEWEST = 3
"""Samples of which two may meet, and one does not."""

_ALONE = 8
"""Samples that are collated by themselves: of some the largest value over time is in no padding."""

_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Of a collate function that does not take a sample, or of a sample that cannot be copied."""

_ASKED = 3
"""Batches of each process that reads: a random mixup may leave one as it is."""


@dataclass(frozen=True)
class Noted:
    """A batch of which something is known.

    Attributes:
        batch: as the script gets it.
        mixed_by: the collate function that made its rows of several samples; empty: none did.
        padding: of some samples.
    """

    batch: Any
    mixed_by: str = ""
    padding: tuple[Padding, ...] = ()


class CheckedCollate:
    """A collate function, whose first batches are `Noted` where it brings samples together or pads them.

    Args:
        collate: the script's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._left = 0 if collate is default_collate else _ASKED

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of some samples."""
        if self._left == 0 or len(samples) < _FEWEST:
            return self._collate(samples)
        self._left -= 1
        try:
            again = copy.deepcopy(samples)
            alone = [copy.deepcopy(one) for one in samples[:_ALONE]]
            turned = _turned(again[-1])
        except _REFUSALS:  # of samples that cannot be copied nothing can be told
            return self._collate(samples)
        before = States.now()
        made = self._collate(samples)
        after = States.now()
        before.use()
        try:
            with torch._C.DisableTorchFunction():  # nobody hears what the script has not called
                other = None if turned is None else self._collate([*again[:-1], turned])
                lone = [self._collate([one]) for one in alone]
        except _REFUSALS:  # it does not take such a sample, or one alone
            return made
        finally:
            after.use()
        dims = _row_dims(made, lone, len(samples))
        mixes = other is not None and _changed(_rows(made, dims), _rows(other, dims)) > 1
        paddings = [found for one in lone if (found := _padding(_rows(made, dims), _rows(one, dims))) is not None]
        if not paddings and not mixes:
            return made
        name = self._name()
        return Noted(made, name if mixes else "", tuple(Padding(*one, name) for one in paddings))

    def _name(self) -> str:
        code = getattr(self._collate, "__code__", None)
        name = getattr(self._collate, "__qualname__", type(self._collate).__name__)
        return name if code is None else f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


_Row: TypeAlias = list[Tensor]


def _padding(rows: Sequence[_Row], alone: Sequence[_Row]) -> tuple[int, int, int, Tensor] | None:
    """The row of a sample that is longer in a batch than alone, both lengths, and what it is alone; None: it is not, or
    is not found."""
    places = [at for at, row in enumerate(rows) if alone and _same(row, alone[0])]
    if len(places) != 1:
        return None
    pairs = zip(rows[places[0]], alone[0], strict=True)
    return next(
        (
            (places[0], long, short, its)
            for row, its in pairs
            for long, short in zip(row.shape, its.shape, strict=True)
            if long > short > 0
        ),
        None,
    )


def _turned(sample: Any) -> Any:
    """The same values in another order, as far as there are arrays; None: there is none."""
    if isinstance(sample, (Tensor, np.ndarray)) and sample.ndim:
        return sample.flip(0) if isinstance(sample, Tensor) else np.ascontiguousarray(sample[::-1])
    if isinstance(sample, dict):
        parts = {key: _turned(one) for key, one in sample.items()}
        some = any(one is not None for one in parts.values())
        return {key: sample[key] if one is None else one for key, one in parts.items()} if some else None
    if type(sample) in (tuple, list):
        turned = [_turned(one) for one in sample]
        if all(one is None for one in turned):
            is_list = isinstance(sample, list) and all(isinstance(one, (int, float)) for one in sample)
            return sample[::-1] if is_list and sample else None
        return type(sample)(mine if one is None else one for mine, one in zip(sample, turned, strict=True))
    return None


def _changed(rows: Sequence[_Row], others: Sequence[_Row]) -> int:
    """Rows of a batch that another does not have."""
    left = [row for row, other in zip(rows, others, strict=False) if not _same(row, other)]
    return sum(not any(_same(row, other) for other in others) for row in left)


def _row_dims(made: Any, alone: Sequence[Any], samples: int) -> list[int | None]:
    """For each tensor of a batch the dimension in which its samples are: one long where a sample is collated alone."""
    leaves, lone = _tensors(made), [_tensors(one) for one in alone]
    if any(len(one) != len(leaves) for one in lone):
        return [None for _ in leaves]
    return [
        next(
            (
                dim
                for dim, size in enumerate(leaf.shape[:2])
                if size == samples and all(one.dim() == leaf.dim() and one.shape[dim] == 1 for one in ones)
            ),
            None,
        )
        for leaf, *ones in zip(leaves, *lone, strict=True)
    ]


def _rows(batch: Any, dims: Sequence[int | None]) -> list[_Row]:
    """What a batch has of each sample."""
    leaves = [one.unbind(dim) for one, dim in zip(_tensors(batch), dims, strict=False) if dim is not None]
    return [list(row) for row in zip(*leaves, strict=False)]


def _tensors(batch: Any) -> list[Tensor]:
    return [one for one in tensors_in(batch) if one.layout == torch.strided]


def _same(row: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether rows hold the same values, as far as both go."""
    for mine, its in zip(row, other, strict=True):
        both = tuple(slice(min(sizes)) for sizes in zip(mine.shape, its.shape, strict=True))
        if mine.dim() != its.dim() or not torch.equal(mine[both], its[both]):
            return False
    return True
