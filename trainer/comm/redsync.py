"""Selection by bisecting the threshold between the mean and the largest magnitude, as RedSync does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.threshold import Magnitudes, ThresholdSearch
from hetopt.trainer.comm.topk import TopKCompressor

ROUNDS = 20


@dataclass(frozen=True, slots=True)
class RedSyncCompressor:
    """Sends what is not below ``mean + r (max - mean)``, where r is bisected until k to 2 k elements pass.

    Where no such r is found in twenty rounds, or k elements are more than lie above the mean, Top-k decides: the
    released code stops after three rounds, with any number of elements. (Fang et al., arXiv 1808.04357.)
    """

    name: ClassVar[str] = "redsync"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep what passes; the same gradient always gives the same payload."""
        k, scale = kept_elements(flat.numel(), ratio), Magnitudes.of(flat)
        low, high = 0.0, 1.0
        search = ThresholdSearch(flat)
        for _ in range(ROUNDS if scale.spread else 0):
            r = (low + high) / 2
            threshold = scale.mean + r * (scale.largest - scale.mean)
            passing = search.count(threshold)
            if k <= passing <= 2 * k:
                return search.take(threshold).payload(flat)
            if passing < k:
                high = r
            else:
                low = r
                search.never_below(threshold, passing)
        return TopKCompressor().compress(flat, ratio, generator)
