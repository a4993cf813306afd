"""Selection by a threshold that exponential distributions predict, fitted in stages, as SIDCo does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.threshold import Magnitudes, Survivors, count_not_below, excess
from hetopt.trainer.comm.topk import TopKCompressor

STAGE = 0.25
"""What a stage leaves, so that the next one is fitted to the tail alone."""
MOST_STAGES = 12
"""Down to a few elements of the longest gradient there can be."""


@dataclass(frozen=True, slots=True)
class SidcoCompressor:
    """Sends what is not below a threshold that about k elements should pass.

    Magnitudes are taken to be exponential with mean mu, so that a part d of them exceeds ``mu ln(1 / d)``. Gradients
    have heavier tails, hence stages: each fits the excess over the threshold of the one before, where an exponential
    is a better likeness, and aims at k of those that have really passed, or at a quarter of them if that is more.
    Nothing is sorted. Stages end with at most 2 k elements; with fewer than k / 2, Top-k decides. (After Abdelmoniem et
    al., arXiv 2101.10761, who let the number of stages follow from earlier steps instead of from what has passed.)
    """

    name: ClassVar[str] = "sidco"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep what passes; the same gradient always gives the same payload."""
        k, scale = kept_elements(flat.numel(), ratio), Magnitudes.of(flat)
        if not scale.spread or k == flat.numel():
            return TopKCompressor().compress(flat, ratio, generator)
        threshold, beyond, passing = 0.0, scale.mean, flat.numel()
        for _ in range(MOST_STAGES):
            if passing <= 2 * k or beyond <= 0:
                break
            threshold += beyond * math.log(1 / max(k / passing, STAGE))
            passing = count_not_below(flat, threshold)
            beyond = excess(flat, threshold) / max(1, passing)
        if not k / 2 <= passing <= 2 * k:
            return TopKCompressor().compress(flat, ratio, generator)
        return Survivors.of(flat, threshold).payload(flat)
