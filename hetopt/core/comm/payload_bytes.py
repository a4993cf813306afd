"""The payload bytes of each collective operation of a compressed exchange, for planner and trainer alike.

With the bits and levels of quantised codes, such that no sum over the workers overflows: codes are integers in -s..s
for s levels, and N workers' codes sum to at most N s in magnitude. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hetopt.core.comm import cost
from hetopt.core.comm.composition import AR_TOPK, AUTO, GATHER, PACKED_BF16, PLAIN, VAR, combine
from hetopt.core.comm.cost import Operation
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import either

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Collective = Literal["all_reduce", "all_gather"]
SCALES: Mapping[str, int] = MappingProxyType(
    {
        "qsgd_maxnorm": 1,
        "qsgd_two_scale": 2,
        "qsgd_multi_scale": 3,
        "global_randomk_maxnorm": 1,
        "global_randomk_two_scale": 2,
    }
)
"""Number of scales of each quantiser whose codes are summed; with several, masks tell which an element has."""
Shapes = Sequence[Sequence[int]]
"""Shapes of a model's parameters, in the order of the gradient."""

VALUE_BYTES = 4  # fp32
INDEX_BYTES = 4  # int32, hence fewer than 2**31 elements
LENGTH_BYTES = 4
LOW_PRECISION_BYTES = 2
SCALED_BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4})
"""Bits of a code, by compressor."""

SCALED_ELEMENTS = 64
"""Number of codes that share a scale."""

MAX_INDEXED_ELEMENTS = 2**31 - 1
MANY_WORKERS = 32
"""Number of workers above which automatic AR-Topk elects a worker: taking turns leaves a worker's own choice waiting
too long."""


Whole = TypeVar("Whole", int, "NDArray[np.int64]")
"""A whole number, or many."""


def slice_elements(numel: int, workers: Whole, *, group: int = 1) -> Whole:
    """Return the elements of each worker's slice of a gradient, rounded up to a multiple of ``group``.

    The slices of the last workers may be shorter, or empty.

    Args:
        numel: elements of the gradient.
        workers: number of workers.
        group: elements that stay together.
    """
    elements = -(-numel // workers)
    return -(-elements // group) * group


def scaled_code_bytes(numel: Whole, bits: int) -> Whole:
    """Return the bytes of ``numel`` codes of ``bits`` with their bf16 scales, in whole groups of `SCALED_ELEMENTS`."""
    return -(-numel // SCALED_ELEMENTS) * (2 + SCALED_ELEMENTS * bits // 8)


def sliced_bytes(name: str, numel: int, workers: Whole) -> Whole:
    """Return one worker's payload bytes of an all-reduce in which each worker sums a slice and returns the sum.

    Args:
        name: name of the compressor; one that selects sends values in bf16.
        numel: number of elements that are summed.
        workers: number of workers that take part.
    """
    elements = slice_elements(numel, workers)
    if name in SCALED_BITS:
        return workers * scaled_code_bytes(elements, SCALED_BITS[name])
    return workers * LOW_PRECISION_BYTES * (elements + (name == "fp16"))  # in fp16 with its exponent


def kept_elements(numel: int, ratio: float) -> int:
    """Return the number of elements a sparse compressor keeps of ``numel``: ``max(1, floor(numel * ratio))``.

    Never more than ``numel``. The product is nudged up by a millionth of an element, so that 0.29 of 100 is 29 although
    ``100 * 0.29 < 29`` in binary.
    """
    return min(numel, max(1, int(numel * ratio + 1e-6)))


def wire_bytes(name: str, numel: int, ratio: float, *, workers: int = 2, **options: Any) -> int:
    """Return the bytes that one worker contributes to one exchange of ``numel`` elements by compressor ``name``.

    Args:
        name: name of the compressor.
        numel: elements of the gradient.
        ratio: fraction of the elements to send; dense compressors ignore it.
        workers: number of workers that take part.
        options: further arguments of `operations`.

    Raises:
        BadInput: there is no such compressor, or the options do not go together.
    """
    return sum(int(part.payload_bytes) for part in operations(name, numel, ratio, workers=workers, **options))


def operations(
    name: str,
    numel: int,
    ratio: float,
    *,
    workers: int,
    collective: str = AUTO,
    bits: int | None = None,
    levels: int | None = None,
    rank: int = 1,
    coding: str = PLAIN,
    shapes: Shapes | None = None,
) -> tuple[Operation, ...]:
    """Return the collective operations, in order, of one exchange by compressor ``name``, payloads to the byte.

    Where workers select different numbers of elements, the payload is that of the number aimed at.

    Args:
        name: name of the compressor.
        numel: elements of the gradient.
        ratio: fraction of the elements to send; dense compressors ignore it.
        workers: number of workers that take part.
        collective: name, as in `composition.COLLECTIVES`; ``auto``: the compressor's default.
        bits: width of a quantiser's codes on the wire; None: 8, or more where needed.
        levels: levels of a quantiser; None: as many as its codes hold.
        rank: rank of PowerSGD's factors.
        coding: coding of selected elements, as in `composition.CODINGS`.
        shapes: shapes of the parameters, for compressors that work by layer; None: one vector.

    Raises:
        BadInput: there is no such compressor, it does not travel by the collective, or bits, levels and workers
            overflow.
    """
    combination = combine(name, collective=collective)
    chosen, method = combination.collective, combination.method
    if method.wire_bytes is not None:
        primitive: cost.Primitive = "all_gather" if chosen == GATHER else "all_reduce"
        return (Operation(primitive=primitive, payload_bytes=method.wire_bytes(numel, ratio), members=workers),)
    sent = kept_elements(numel, ratio) if method.by_ratio else numel
    match name:
        case "identity" | "randomk":
            parts: list[_Part] = [("all_reduce", VALUE_BYTES * sent)]
        case "fp16" | "bf16" | "int8" | "int4":
            parts = [("sliced", sliced_bytes(name, numel, workers))]
        case "qsgd_maxnorm" if chosen == GATHER:
            width, _ = summed_bits(1, bits=bits, levels=levels, largest=LARGEST_GATHERED)
            parts = [("all_gather", VALUE_BYTES + math.ceil(numel * width / 8))]
        case _ if name in SCALES:
            width, _ = summed_bits(workers, bits=bits, levels=levels)
            masks: list[_Part] = [("all_reduce", (SCALES[name] - 1) * math.ceil(sent / 8))] if SCALES[name] > 1 else []
            parts = [("all_reduce", VALUE_BYTES), *masks, ("all_reduce", summed_code_bytes(sent, width))]
        case "sign":
            parts = [("all_gather", VALUE_BYTES + math.ceil(numel / 8))]
        case "powersgd":
            left, right = low_rank_elements(shapes if shapes is not None else [(numel,)], rank)
            parts = [("all_reduce", VALUE_BYTES * left), ("all_reduce", VALUE_BYTES * right)]
        case _:
            parts = _selected(chosen, numel, sent, workers, method.same_size, coding)
    return tuple(
        Operation(
            primitive="all_reduce" if kind == "sliced" else kind,
            payload_bytes=size,
            members=workers,
            sliced=kind == "sliced",
        )
        for kind, size in parts
    )


def low_rank_elements(shapes: Shapes, rank: int) -> tuple[int, int]:
    """Return the fp32 elements of PowerSGD's two sums: left factors and dense parameters, then right factors.

    Args:
        shapes: shapes of the parameters, in the order of the gradient.
        rank: most columns of a factor.
    """
    left = right = 0
    for shape in shapes:
        rows, columns = matrix_shape(shape)
        used = low_rank(rows, columns, rank)
        left += rows * (used or columns)
        right += columns * used
    return left, right


def packed_index_bytes(numel: int, count: int) -> int:
    """Return the bytes of ``count`` ascending indices below ``numel`` in packed coding: lower bits, then a bit map."""
    low = low_index_bits(numel, count)
    return math.ceil(count * low / 8) + math.ceil((count + (numel >> low) + 1) / 8)


def low_index_bits(numel: int, count: int) -> int:
    """Return how many lower bits of each index the packed coding stores as they are to be shortest: 0, 2, 4 or 8."""
    return min((0, 2, 4, 8), key=lambda low: count * low + (numel >> low))


def element_bytes(numel: int, count: int, coding: str = PLAIN) -> int:
    """Return the bytes of ``count`` selected values with their indices among ``numel``, rounded up to 4 bytes."""
    value_bytes = LOW_PRECISION_BYTES if coding == PACKED_BF16 else VALUE_BYTES
    return 4 * math.ceil((index_bytes(numel, count, coding) + count * value_bytes) / 4)


def index_bytes(numel: int, count: int, coding: str) -> int:
    """Return the bytes of the indices of ``count`` selected elements of a gradient of ``numel``, in a coding."""
    return INDEX_BYTES * count if coding == PLAIN else packed_index_bytes(numel, count)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's shape as a matrix: first dimension by the product of the others; a vector is one row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def low_rank(rows: int, columns: int, rank: int) -> int:
    """Return the rank with which PowerSGD sends a matrix, at most ``rank``; 0: dense, as factors are no smaller."""
    used = min(rank, rows, columns)
    return used if used * (rows + columns) < rows * columns else 0


_Part = tuple[cost.Primitive | Literal["sliced"], int]
"""A primitive, or a sliced all-reduce, and its payload in bytes."""


def _selected(collective: str, numel: int, kept: int, workers: int, same_size: bool, coding: str) -> list[_Part]:
    """Return the parts of an exchange of ``kept`` selected elements: each operation with its payload bytes, in order.

    Args:
        collective: name, as in `composition.COLLECTIVES`.
        numel: elements of the gradient.
        kept: elements that are sent.
        workers: number of workers that take part.
        same_size: whether all workers select equally many; else a gather tells their numbers first.
        coding: coding of the selected elements, as in `composition.CODINGS`.
    """
    if collective == GATHER:
        lengths: list[_Part] = [] if same_size else [("all_gather", LENGTH_BYTES)]
        return [*lengths, ("all_gather", element_bytes(numel, kept, coding))]
    elected = collective == VAR or (collective == AR_TOPK and workers > MANY_WORKERS)
    election: list[_Part] = [("all_gather", VALUE_BYTES)] if elected else []
    values: _Part = ("all_reduce", kept * VALUE_BYTES)
    if coding == PACKED_BF16:
        values = ("sliced", sliced_bytes(PACKED_BF16, kept, workers))
    return [*election, ("broadcast", index_bytes(numel, kept, coding)), values]


LARGEST_SUM: Mapping[int, int] = MappingProxyType({4: 7, 8: 127, 16: 32_767, 32: 2**31 - 1})
"""Largest magnitude of a sum of codes, by the bits that a code takes on the wire where codes are summed on the way."""

LARGEST_GATHERED: Mapping[int, int] = MappingProxyType({2: 1, 4: 7, 8: 127})
"""Largest magnitude of one code, by its bits, where codes are gathered and nothing is summed."""

DEFAULT_BITS = 8
"""Least bits of a summed code where neither bits nor levels are given."""
MOST_LEVELS = 2**22
"""Most levels of a quantiser: more would be finer than the rounding of the fp32 values themselves."""

SCALE_STEP = 16
"""Levels of each scale over those of the scale before, where there are several; four bits, as in most pairs of
2109.12497."""


def summed_bits(
    workers: int, *, bits: int | None = None, levels: int | None = None, largest: Mapping[int, int] = LARGEST_SUM
) -> tuple[int, int]:
    """Return a quantiser's bits per code and levels for codes summed over ``workers`` without overflow.

    Levels that are given get the narrowest code that holds them; a width that is given gets the most levels that fit;
    neither: 8 bits, or more where 8 bits cannot even hold one level a worker.

    Args:
        workers: number of workers whose codes are summed; 1 where codes are gathered.
        bits: width of a code; None: chosen.
        levels: levels of the quantiser; None: chosen.
        largest: largest magnitude of a sum, by the width.

    Raises:
        BadInput: there is no such width, even one level overflows, or levels and width are given and do not fit.
    """
    if bits is not None and bits not in largest:
        raise BadInput(f"codes must have {either(largest)} bits, got {bits}.", hint="leave the width open")
    if levels is None:
        width = bits or next(b for b, most in largest.items() if b >= DEFAULT_BITS and most >= workers)
        if largest[width] < workers:
            raise BadInput(
                f"Codes of {width} bits overflow when {workers} workers sum even a single level.",
                hint="use wider codes, or leave the width open",
            )
        return width, min(MOST_LEVELS, largest[width] // workers)
    fitting = [b for b, most in largest.items() if workers * levels <= most and levels <= MOST_LEVELS]
    if not fitting or (bits is not None and bits not in fitting):
        width = bits or max(largest)
        most = min(MOST_LEVELS, largest[width] // workers)
        raise BadInput(
            f"{levels} levels, summed over {workers}, overflow codes of {width} bits.",
            hint=f"use at most {most} levels, or leave them open" if most else "use wider codes",
        )
    return bits or fitting[0], levels


def summed_code_bytes(numel: int, bits: int) -> int:
    """Return the bytes of ``numel`` summed codes: two of 4 bits share a byte, two of 16 bits a 32-bit word."""
    if bits == 4:
        return math.ceil(numel / 2)
    return 4 * math.ceil(numel / 2) if bits == 16 else numel * bits // 8
