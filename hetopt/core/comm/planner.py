"""One way to exchange a gradient, with what it sends, keeps and takes: what planner and trainer choose from."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetopt.core.comm.composition import METHODS, PLAIN
from hetopt.core.comm.cost import Operation, pipelined_s
from hetopt.core.comm.payload_bytes import Shapes, operations
from hetopt.core.plain_text import known

COMPRESS_SD = 0.05
"""Relative standard deviation of a measured time to compress."""

KEPT: Mapping[str, float] = MappingProxyType({"identity": 1.0, "fp16": 1.0, "bf16": 1.0, "int8": 0.9998, "int4": 0.975})
"""Gradient energy that rounding keeps. Of whole codes: of values as heavy-tailed as cubes of normal ones; of normal
ones, and of rows of an embedding most of which are zero, it is more."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to exchange the gradient, for the workers there are.

    Attributes:
        compressor: its name; ``identity`` sends everything.
        collective: the name of the form it travels in.
        ratio: fraction of the elements that is sent.
        operations: of one exchange, of one bucket where there are several.
        compress_s: to compress and decompress the whole gradient, measured on the slowest worker.
        gain: retained gradient energy where it needs no measurement: 1 of what loses nothing to speak of, the ratio of
            a random choice. Absent: read off the gain curve that Top-k gives.
        buckets: 1: the whole gradient at once, after the backward pass; more: beside it.
        coding: of selected elements.

    Raises:
        ValueError: a ratio or gain outside (0, 1], a negative time, or no bucket.
    """

    compressor: str
    collective: str
    ratio: float
    operations: tuple[Operation, ...]
    compress_s: float = 0.0
    gain: float | None = None
    buckets: int = 1
    coding: str = PLAIN

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or (self.gain is not None and not 0 < self.gain <= 1):
            raise ValueError(f"ratio and gain are in (0, 1], not {self.ratio}, {self.gain}")
        if not 0 <= self.compress_s < math.inf or self.buckets < 1:
            raise ValueError(
                f"compress_s must be at least 0 and buckets at least 1, got {self.compress_s}, {self.buckets}"
            )

    @functools.cached_property
    def key(self) -> str:
        """Names the option among its peers; asked for a hundred times in every decision."""
        overlap = f" in {self.buckets} buckets" if self.buckets > 1 else ""
        coded = "" if self.coding == PLAIN else f", {self.coding}"
        method = METHODS.get(self.compressor)
        amount = "" if method is not None and not method.by_ratio else f" {self.ratio:g}"
        return f"{self.compressor}{amount} by {self.collective}{coded}{overlap}"

    def step_s(self, *, compute_s: float, backward_s: float, compress_s: float, exchange_s: float) -> float:
        """Seconds of a step: buckets travel while the rest of the backward pass computes and compresses.

        Args:
            compute_s: of the slowest worker, its backward pass included.
            backward_s: the part of it that makes gradients.
            compress_s: see the attribute; another value where it was measured since.
            exchange_s: of all buckets.
        """
        return compute_s - backward_s + pipelined_s(backward_s + compress_s, exchange_s, self.buckets)


def make_option(
    name: str,
    collective: str,
    ratio: float,
    *,
    numel: int,
    workers: int,
    compress_s: float,
    shapes: Shapes | None = None,
    coding: str = PLAIN,
) -> Option:
    """The option of a compressor as the trainer exchanges it, a gradient of ``numel`` elements at once.

    Args:
        name: of the compressor.
        collective: of those that can carry it.
        ratio: fraction of the elements that is sent, 1 for those that send something of all of them.
        numel: elements of the gradient.
        workers: in the group.
        compress_s: as measured.
        shapes: of the parameters, for compressors that work by layer.
        coding: of selected elements.

    Raises:
        BadInput: no such compressor, or it cannot travel so.
        ValueError: nothing is known of the gain, and no Top-k curve tells it.
    """
    gain = ratio if name == "randomk" else KEPT.get(name)  # of what is rounded, and of a random choice
    if gain is None and not METHODS[known(name, METHODS, "compressor")].by_ratio:
        raise ValueError(f"how much of a gradient {name} keeps is not known")
    return Option(
        compressor=name,
        collective=collective,
        ratio=ratio,
        operations=operations(name, numel, ratio, workers=workers, collective=collective, shapes=shapes, coding=coding),
        compress_s=compress_s,
        gain=gain,
        coding=coding,
    )
