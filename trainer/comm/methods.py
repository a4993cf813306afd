"""From the name of a compression to its parts: what is composed of what."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from hetopt.core.comm.checked import checked
from hetopt.core.comm.composition import (
    AR_TOPK,
    GATHER,
    MAJORITY,
    NONE,
    PACKED,
    PACKED_BF16,
    PLAIN,
    STAR,
    VAR,
    Combination,
    combine,
)
from hetopt.core.comm.levels import gathered_bits, summed_bits
from hetopt.core.comm.payload_bytes import SCALED_BITS, Shapes, kept_elements
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import group_size
from hetopt.trainer.comm.compressor import Aggregation, CompressedSum, Compressor, IdentityCompressor, SparsePayload
from hetopt.trainer.comm.elements import (
    ElementCoding,
    IndexChoice,
    IndexedSum,
    NarrowValues,
    PackedIndices,
    PaddedSparseAllGather,
    PlainIndices,
    RandomElements,
    RotatingElements,
    SharedSelection,
    SparseAllGather,
    Star,
    StarOrVar,
    Var,
)
from hetopt.trainer.comm.error_feedback import DEFAULT_MOMENTUM, ErrorFeedback, Memory, MomentumCorrection, NoMemory
from hetopt.trainer.comm.low_precision import NarrowFloats, NarrowSum, ScaledCodes
from hetopt.trainer.comm.low_rank import LowRankSum
from hetopt.trainer.comm.quantisation import (
    AtRandom,
    MajorityVote,
    MaxNorm,
    MultiScale,
    PackedAllGather,
    PackedQuantiser,
    QuantisedSum,
    Quantiser,
    SignCompressor,
    TernGrad,
    ToNearest,
)
from hetopt.trainer.comm.threshold import (
    DgcCompressor,
    MsTopKCompressor,
    RedSyncCompressor,
    SidcoCompressor,
    ThresholdCompressor,
)
from hetopt.trainer.comm.topk import MultiLevelCompressor, PerLayerTopKCompressor, TopKCompressor

SELECTORS: Mapping[str, Callable[[], Compressor[SparsePayload]]] = MappingProxyType(
    {
        "topk": TopKCompressor,
        "mstopk": MsTopKCompressor,
        "dgc": DgcCompressor,
        "redsync": RedSyncCompressor,
        "sidco": SidcoCompressor,
    }
)
"""The compressors that select elements of a whole gradient and carry nothing from step to step."""

_CODINGS: Mapping[str, ElementCoding] = MappingProxyType(
    {
        PLAIN: ElementCoding(indices=PlainIndices(), values=torch.float32),
        PACKED: ElementCoding(indices=PackedIndices(), values=torch.float32),
        PACKED_BF16: ElementCoding(indices=PackedIndices(), values=torch.bfloat16),
    }
)

_RANDOM_SELECTORS = ("mstopk", "dgc")


def make_memory(
    compression: Compression,
    numel: int,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> Memory:
    """The memory that goes with ``compression``.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """
    match combine(compression.name, memory=compression.memory, collective=compression.collective).memory:
        case "error_feedback":
            return ErrorFeedback(numel, device=device)
        case "momentum_correction":
            momentum = compression.momentum if compression.momentum is not None else DEFAULT_MOMENTUM
            return MomentumCorrection(
                numel, momentum=momentum, clip_norm=compression.clip_norm, device=device, group=group
            )
        case _:
            return NoMemory()


def make_aggregation(
    compression: Compression,
    numel: int,
    *,
    shapes: Shapes | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> Aggregation:
    """The way from gradients to their sum that ``compression`` names; arguments as of `Exchange`.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """
    chosen = checked_for(compression, numel, shapes)
    job = _Job(
        compression=compression,
        chosen=chosen,
        numel=numel,
        sizes=[math.prod(shape) for shape in shapes] if shapes is not None else [numel],
        seed=seed,
        workers=group_size(group),
    )
    match chosen.name:
        case "identity":
            return _dense()
        case "fp16" | "bf16":
            return NarrowSum(NarrowFloats(torch.float16 if chosen.name == "fp16" else torch.bfloat16))
        case "int8" | "int4":
            return NarrowSum(ScaledCodes(SCALED_BITS[chosen.name]))
        case "qsgd_maxnorm":
            return job.quantised(MaxNorm())
        case "terngrad":
            return job.quantised(TernGrad(job.sizes), levels=1)
        case "qsgd_two_scale":
            return job.quantised(MultiScale(2))
        case "qsgd_multi_scale":
            return job.quantised(MultiScale(3))
        case "randomk":
            return job.indexed(RandomElements(compression.ratio, seed), _dense())
        case "global_randomk_maxnorm":
            return job.indexed(RotatingElements(compression.ratio, seed), job.quantised(MaxNorm()))
        case "global_randomk_two_scale":
            return job.indexed(RotatingElements(compression.ratio, seed), job.quantised(MultiScale(2)))
        case "sign":
            collective = MajorityVote() if chosen.collective == MAJORITY else PackedAllGather()
            return CompressedSum(compressor=SignCompressor(), ratio=1.0, collective=collective)
        case "powersgd":
            assert shapes is not None
            return LowRankSum(shapes, rank=compression.rank or 1, seed=seed, device=device)
        case _:
            return job.selected()


def make_selector(compression: Compression, sizes: list[int]) -> Compressor[SparsePayload]:
    """The compressor that selects elements as ``compression`` says, of layers of these sizes."""
    match compression.name:
        case "topk_per_layer":
            return PerLayerTopKCompressor(sizes)
        case "topk_threshold":
            return ThresholdCompressor()
        case _:
            selector = SELECTORS[compression.name]()
            floor = compression.floor_ratio
            return selector if floor is None else MultiLevelCompressor(selector, floor)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be composed."""

    compression: Compression
    chosen: Combination
    numel: int
    sizes: list[int]
    seed: int
    workers: int

    def quantised(self, quantiser: Quantiser, levels: int | None = None) -> Aggregation:
        """Codes on a grid: summed on the way, or gathered.

        Rounding at random makes sums unbiased where nothing is remembered. It also errs by more than the value where
        that is small against the grid, and a memory of such errors grows without end. With a memory, values are
        rounded to nearest: that never errs by more than the value, as error feedback requires.
        """
        asked, levels = self.compression, levels or self.compression.levels
        if self.chosen.collective != GATHER:
            summed_bits(self.workers, bits=asked.bits, levels=levels)  # refuses what cannot be, before the first step
            rounding = AtRandom(self.seed) if self.chosen.memory == NONE else ToNearest()
            return QuantisedSum(quantiser, bits=asked.bits, levels=levels, rounding=rounding)
        bits, levels = gathered_bits(bits=asked.bits, levels=levels)
        sizes = self.sizes if self.chosen.name == "terngrad" else [self.numel]
        packer = PackedQuantiser(self.chosen.name, quantiser, sizes=sizes, bits=bits, levels=levels)
        at_random = self.chosen.memory == NONE
        return CompressedSum(
            compressor=packer, ratio=1.0, collective=PackedAllGather(), seed=self.seed, counts_steps=at_random
        )

    def indexed(self, choice: IndexChoice, values: Aggregation) -> Aggregation:
        """Elements that all workers know; without a memory their values are scaled up, which makes them unbiased."""
        kept = kept_elements(self.numel, self.compression.ratio)
        scale = self.numel / kept if self.chosen.memory == NONE else 1.0
        return IndexedSum(choice=choice, values=values, scale=scale)

    def selected(self) -> Aggregation:
        """Elements that each worker selects for itself, or one for all."""
        ratio = self.compression.ratio
        selector = make_selector(self.compression, self.sizes)
        coding = _CODINGS[self.compression.coding or PLAIN]
        if self.chosen.collective in (STAR, VAR, AR_TOPK):
            by_layer = self.chosen.name == "topk_per_layer"
            count = sum(kept_elements(size, ratio) for size in (self.sizes if by_layer else [self.numel]))
            shared = SharedSelection(selector, ratio=ratio, count=count, seed=self.seed, coding=coding.indices)
            choices: dict[str, Callable[[SharedSelection], IndexChoice]] = {STAR: Star, VAR: Var, AR_TOPK: StarOrVar}
            values = _dense() if coding.values == torch.float32 else NarrowSum(NarrowFloats(coding.values))
            return IndexedSum(choice=choices[self.chosen.collective](shared), values=values)
        return CompressedSum(
            compressor=selector if coding.values == torch.float32 else NarrowValues(selector, coding.values),
            ratio=ratio,
            collective=(SparseAllGather if self.chosen.method.same_size else PaddedSparseAllGather)(coding),
            seed=self.seed,
            counts_steps=self.chosen.name in _RANDOM_SELECTORS,
            carried=selector if isinstance(selector, ThresholdCompressor) else None,
        )


def _dense() -> Aggregation:
    return CompressedSum(compressor=IdentityCompressor(), ratio=1.0, collective=None)


def checked_for(compression: Compression, numel: int, shapes: Shapes | None) -> Combination:
    """The combination that ``compression`` means.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """
    chosen = checked(compression)
    if chosen.method.by_shape and shapes is None:
        raise BadInput(f"{chosen.name} works layer by layer, and no layers are known here.", hint="use topk")
    if shapes is not None and sum(math.prod(shape) for shape in shapes) != numel:
        raise ValueError(f"the shapes do not add up to {numel} elements")
    return chosen
