"""The registry of compression methods: from the name of a compression to the chain that does it, one line a method.

`hetopt.core.comm.composition` says of the same names what they combine with, for who plans without torch. A method of
one's own is one class and one call of `register` (docs/extending/compressor.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetopt.core.comm import composition
from hetopt.core.comm.composition import (
    AR_TOPK,
    GATHER,
    NONE,
    PLAIN,
    STAR,
    VAR,
    Combination,
    Method,
    combine,
)
from hetopt.core.comm.payload_bytes import LARGEST_GATHERED, Shapes, kept_elements, summed_bits
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import checked
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import group_size
from hetopt.trainer.comm.compressor import (
    DEFAULT_MOMENTUM,
    AllReduce,
    Chain,
    Collective,
    Compressor,
    ErrorFeedback,
    Identity,
    MomentumCorrection,
    Residual,
)
from hetopt.trainer.comm.low_precision import LowPrecision, LowPrecisionFloats, ScaledCodes, SlicedAllReduce
from hetopt.trainer.comm.low_rank import LowRank
from hetopt.trainer.comm.quantisation import (
    Packed,
    PackedAllGather,
    Quantised,
    Sign,
)
from hetopt.trainer.comm.topk import (
    AllGather,
    Dgc,
    ElementCoding,
    Levels,
    MsTopK,
    RandomElements,
    RedSync,
    Selection,
    SharedSelection,
    TopK,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Arguments that a compressor is made from: compression, gradient size, parameter shapes, seed, workers, device.

    Attributes:
        compression: compression as it was asked for.
        chosen: compressor, memory and collective that it means, with the defaults filled in.
        numel: elements of the gradient.
        shapes: shapes of the parameters; None: they are not known.
        seed: seed of all randomness, the same on every worker.
        workers: number of workers in the group.
        device: device where the gradient lies; None: the CPU.
    """

    compression: Compression
    chosen: Combination
    numel: int
    shapes: Shapes | None = None
    seed: int = 0
    workers: int = 1
    device: torch.device | None = None

    @property
    def ratio(self) -> float:
        """The fraction of the elements to send."""
        return self.compression.ratio


def _quantised(scales: int, asked: Asked) -> Compressor[Any]:
    """Return the compressor of codes on a grid: summed on the way, or gathered.

    Raises:
        BadInput: as of `summed_bits`, for codes that are summed.
    """
    bits, levels, at_random = asked.compression.bits, asked.compression.levels, asked.chosen.memory == NONE
    if asked.chosen.collective == GATHER:
        width, fitting = summed_bits(1, bits=bits, levels=levels, largest=LARGEST_GATHERED)
        return Packed(bits=width, levels=fitting, at_random=at_random)
    summed_bits(asked.workers, bits=bits, levels=levels)  # refuses what cannot be, before the first step
    return Quantised(scales=scales, bits=bits, levels=levels, at_random=at_random)


COMPRESSORS: dict[str, Callable[[Asked], Compressor[Any]]] = {
    "identity": lambda asked: Identity(),
    "fp16": lambda asked: LowPrecision(LowPrecisionFloats(torch.float16)),
    "bf16": lambda asked: LowPrecision(LowPrecisionFloats(torch.bfloat16)),
    "int8": lambda asked: LowPrecision(ScaledCodes(8)),
    "int4": lambda asked: LowPrecision(ScaledCodes(4)),
    "topk": lambda asked: TopK(asked.ratio),
    "mstopk": lambda asked: MsTopK(asked.ratio),
    "dgc": lambda asked: Dgc(asked.ratio),
    "redsync": lambda asked: RedSync(asked.ratio),
    "randomk": lambda asked: Identity(),  # of elements that were chosen before
    "qsgd_maxnorm": partial(_quantised, 1),
    "qsgd_two_scale": partial(_quantised, 2),
    "qsgd_multi_scale": partial(_quantised, 3),
    "global_randomk_maxnorm": partial(_quantised, 1),
    "global_randomk_two_scale": partial(_quantised, 2),
    "sign": lambda asked: Sign(),
    "powersgd": lambda asked: LowRank(
        asked.shapes or (), rank=asked.compression.rank or 1, seed=asked.seed, device=asked.device
    ),
}

_ROTATING = ("global_randomk_maxnorm", "global_randomk_two_scale")


def register(name: str, method: Method, make: Callable[[Asked], Compressor[Any]]) -> None:
    """Register a compression method: its name in options, what it combines with, and the factory of its compressor.

    Changes the registries of this process for good.

    Args:
        name: as people write it.
        method: what it combines with.
        make: makes the compressor.

    Raises:
        ValueError: a method of this name is registered already.
    """
    composition.register(name, method)
    COMPRESSORS[name] = make


def make_residual(
    compression: Compression,
    numel: int,
    *,
    device: torch.device | None = None,
) -> Residual:
    """Return a new error feedback as a compression names it, zero at first, for a gradient of ``numel`` elements.

    Args:
        compression: compression whose error feedback is made.
        numel: elements of the gradient.
        device: device where the gradient lies; None: the CPU.

    Raises:
        BadInput: unknown name, or parts of the compression that do not go together.
    """
    match combine(compression.name, memory=compression.memory, collective=compression.collective).memory:
        case "error_feedback":
            return ErrorFeedback(numel, device=device)
        case "momentum_correction":
            momentum = compression.momentum if compression.momentum is not None else DEFAULT_MOMENTUM
            return MomentumCorrection(numel, momentum=momentum, clip_norm=compression.clip_norm, device=device)
        case _:
            return Residual()


def make_chain(
    compression: Compression,
    numel: int,
    *,
    shapes: Shapes | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Chain:
    """Return a new chain from a gradient of ``numel`` elements to all workers' sum, by a compression, without residual.

    Arguments mean what they mean in `hetopt.trainer.comm.exchange.Exchange`: ``device`` is where the gradient lies,
    ``seed`` the same on every worker. ``shapes`` None: none are known; ``device`` None: the CPU.

    Raises:
        BadInput: unknown name, parts of the compression that do not go together, one that needs ``shapes``, or codes
            too narrow for the sum over the workers.
    """
    chosen, ratio = checked_for(compression, shapes), compression.ratio
    asked = Asked(
        compression=compression,
        chosen=chosen,
        numel=numel,
        shapes=shapes,
        seed=seed,
        workers=group_size(None),
        device=device,
    )
    compressor = COMPRESSORS[chosen.name](asked)
    coding = ElementCoding(compression.coding or PLAIN)
    if compression.least_gain is not None or compression.floor_ratio is not None:
        gather, floor_ratio = AllGather(coding, same_size=chosen.method.same_size), compression.floor_ratio or ratio
        least_gain = compression.least_gain or 0.0
        assert isinstance(compressor, Selection), "the rules of compressions see to it"
        return Levels(type(compressor), ratio, floor_ratio, gather, least_gain=least_gain, seed=seed)
    if chosen.collective in (AR_TOPK, STAR, VAR):
        count = kept_elements(numel, ratio)
        choice = SharedSelection(chosen.collective, compressor, count=count, coding=coding).choose
        if coding.values == torch.float32:
            return Chain(Identity(), AllReduce(), choice=choice, seed=seed)
        return Chain(LowPrecision(LowPrecisionFloats(coding.values)), SlicedAllReduce(), choice=choice, seed=seed)
    if chosen.name == "randomk" or chosen.name in _ROTATING:
        # Without a residual values are scaled up, which makes them unbiased.
        scale = numel / kept_elements(numel, ratio) if chosen.memory == NONE else 1.0
        choice = RandomElements(ratio, rotates=chosen.name in _ROTATING).choose
        return Chain(compressor, AllReduce(), choice=choice, scale=scale, seed=seed)
    return Chain(compressor, _collective(chosen, compressor, coding), seed=seed)


def _collective(chosen: Combination, compressor: Compressor[Any], coding: ElementCoding) -> Collective:
    """Return the collective that ends the chain."""
    if chosen.collective == GATHER:
        is_packed = isinstance(compressor, Packed | Sign)
        return PackedAllGather() if is_packed else AllGather(coding, same_size=chosen.method.same_size)
    return SlicedAllReduce() if isinstance(compressor, LowPrecision) else AllReduce()


def checked_for(compression: Compression, shapes: Shapes | None) -> Combination:
    """Return the compressor, memory and collective that a compression means, with defaults filled in.

    Args:
        compression: compression to check.
        shapes: shapes of the parameters; None: not known.

    Raises:
        BadInput: unknown name, parts that do not go together, or a compression that works layer by layer without
            ``shapes``.
    """
    chosen = checked(compression)
    if chosen.method.by_shape and shapes is None:
        raise BadInput(f"{chosen.name} works layer by layer, and no layers are known here.", hint="use topk")
    return chosen
