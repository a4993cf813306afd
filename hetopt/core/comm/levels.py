"""How many levels a quantiser may use, and how wide its codes are, so that no sum over the workers can overflow.

Codes are integers in -s..s for s levels, and N workers' codes sum to at most N s in magnitude. Standard library only.
"""

from __future__ import annotations

import math

from hetopt.core.errors import BadInput
from hetopt.core.names import either

LARGEST_SUM = {4: 7, 8: 127, 16: 32_767, 32: 2**31 - 1}
"""What a sum of codes may come to, by the bits that a code takes on the wire where codes are summed on the way."""

GATHERED_BITS = (2, 4, 8)
"""The widths where codes are gathered: nothing is summed, so s = 2^(bits - 1) - 1 for any number of workers."""

DEFAULT_BITS = 8
MOST_LEVELS = 2**22
"""More would be finer than the rounding of the fp32 values themselves."""

SCALE_STEP = 16
"""Several scales: each has so many times the levels of the one before; four bits, as in most pairs of 2109.12497."""


def summed_bits(workers: int, *, bits: int | None = None, levels: int | None = None) -> tuple[int, int]:
    """Bits of a code and levels s for codes that are summed on the way: ``workers * s`` fits, always.

    Levels that are given get the narrowest code that holds them; a width that is given gets the most levels that fit;
    neither: 8 bits, or more where 8 bits cannot even hold one level a worker.

    Raises:
        BadInput: both are given and do not fit, or the width is none that can be summed.
    """
    if bits is not None and bits not in LARGEST_SUM:
        raise BadInput(
            f"the codes of a sum must have {either(LARGEST_SUM)} bits, got {bits}.",
            hint="leave the width open to have it chosen",
        )
    if levels is None:
        width = bits or next(b for b, most in LARGEST_SUM.items() if b >= DEFAULT_BITS and most >= workers)
        if LARGEST_SUM[width] < workers:
            raise BadInput(
                f"Codes of {width} bits overflow when {workers} workers sum even a single level.",
                hint="use wider codes, or leave the width open",
            )
        return width, min(MOST_LEVELS, LARGEST_SUM[width] // workers)
    fitting = [b for b, largest in LARGEST_SUM.items() if workers * levels <= largest and levels <= MOST_LEVELS]
    if not fitting or (bits is not None and bits not in fitting):
        most = min(MOST_LEVELS, LARGEST_SUM[bits or 32] // workers)
        raise BadInput(
            f"{levels} levels of {workers} workers overflow a sum of {bits or 32} bits.",
            hint=f"use at most {most} levels, or leave them open" if most else "use wider codes",
        )
    return bits or fitting[0], levels


def gathered_bits(*, bits: int | None = None, levels: int | None = None) -> tuple[int, int]:
    """Bits of a code and levels s for codes that are gathered, packed.

    Raises:
        BadInput: there is no such width, or the levels do not fit.
    """
    if bits is not None and bits not in GATHERED_BITS:
        raise BadInput(
            f"gathered codes must have {either(GATHERED_BITS)} bits, got {bits}.",
            hint="leave the width open to have it chosen",
        )
    if levels is None:
        width = bits or DEFAULT_BITS
        return width, 2 ** (width - 1) - 1
    width = bits or next((b for b in GATHERED_BITS if levels <= 2 ** (b - 1) - 1), GATHERED_BITS[-1])
    if levels > 2 ** (width - 1) - 1:
        raise BadInput(
            f"{levels} levels do not fit into gathered codes of {width} bits.",
            hint=f"use at most {2 ** (width - 1) - 1} levels",
        )
    return width, levels


def summed_code_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` codes where they are summed: two of 4 bits share a byte, two of 16 bits a 32-bit word."""
    if bits == 4:
        return math.ceil(numel / 2)
    return 4 * math.ceil(numel / 2) if bits == 16 else numel * bits // 8


def gathered_code_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` packed codes where they are gathered."""
    return math.ceil(numel * bits / 8)
