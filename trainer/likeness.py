"""Short marks of what has to be the same on all workers: equal where it is, bit for bit, on whatever device it lies."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

LARGEST = 2**52
"""Whole numbers below it travel as they are."""

CLOSE = 1e-9
"""Relative distance of numbers that count as equal."""

_OF_NOTHING = -1000.0

_WORD = {4: torch.int32, 8: torch.int64}


class Groups(Protocol):
    """An optimizer, or several: parameters in groups with options."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of ``torch.optim.Optimizer``."""


class Marks(NamedTuple):
    """Of one worker's training: the optimizer's numbers, which parameters are trained, and their values."""

    options: float
    structure: int
    model: int


def marks_of(optimizer: Groups, *, models_are_alike: bool) -> Marks:
    """As they are now.

    Args:
        optimizer: of the parameters.
        models_are_alike: whether the workers' parameters are the same at every step.
    """
    model = tensors_mark(parameters_of(optimizer)) if models_are_alike else 0
    return Marks(options=options_mark(optimizer), structure=structure_mark(optimizer), model=model)


def tensors_mark(tensors: Iterable[Tensor]) -> int:
    """A checksum of some tensors in their order, for comparison between workers."""
    total: Tensor | None = None
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            words = flat.view(_WORD.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64) * (2 * index + 1)
            total = words if total is None else total + words.to(total.device)
    return 0 if total is None else int(total) % LARGEST


def is_option(value: object) -> bool:
    """Whether a value of a parameter group is a number, a text or a few of them."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(isinstance(one, (bool, int, float)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))


def options_of(optimizer: Groups) -> list[tuple[str, float]]:
    """The optimizer's numbers by name: learning rates, momenta and so on of every group."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            value = group[key]
            if key == "params" or not is_option(value) or value is None or isinstance(value, str):
                continue
            for one in value if isinstance(value, (tuple, list)) else (value,):
                found.append((f"{key} of parameter group {index}", float(one)))
    return found


def options_mark(optimizer: Groups) -> float:
    """Of the optimizer's numbers: close where they are, as machines may compute a schedule's last bit differently."""
    values = [value for _, value in options_of(optimizer)]
    return sum((index + 1) * _magnitude(value) for index, value in enumerate(values))


def _magnitude(value: float) -> float:
    return _OF_NOTHING if not value or not math.isfinite(value) else math.log(abs(value)) + (value < 0)


def structure_mark(optimizer: Groups) -> int:
    """A checksum of which parameters are trained, for comparison between workers."""
    return zlib.crc32(bytes(one.requires_grad for one in parameters_of(optimizer)))


def parameters_of(optimizer: Groups) -> list[nn.Parameter]:
    """All that it has, in the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]
