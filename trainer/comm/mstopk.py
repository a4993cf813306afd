"""Approximate Top-k of exactly k elements by bisecting a threshold, as MSTopk does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.threshold import Magnitudes, ThresholdSearch
from hetopt.trainer.comm.topk import TopKCompressor, select

ROUNDS = 25


@dataclass(frozen=True, slots=True)
class MsTopKCompressor:
    """Sends all that is above the upper of two thresholds, and fills up to k from between the two.

    Both thresholds close in on k elements in 25 rounds of bisecting ``mean + r (max - mean)``. What fills up is a run
    of neighbours at a random place, which never reaches past the end (it does in the released code). (Shi et al.,
    "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458.)
    """

    name: ClassVar[str] = "mstopk"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep k elements, in ascending order of index; what fills up is up to the generator."""
        k, scale = kept_elements(flat.numel(), ratio), Magnitudes.of(flat)
        if not scale.spread or k == flat.numel():
            return TopKCompressor().compress(flat, ratio, generator)
        low, high = 0.0, 1.0
        lower, upper = 0.0, math.inf  # at least k elements pass the one, fewer than k the other
        search = ThresholdSearch(flat)
        for _ in range(ROUNDS):
            r = (low + high) / 2
            threshold = scale.mean + r * (scale.largest - scale.mean)
            passing = search.count(threshold)
            if passing == k:
                return search.take(threshold).payload(flat)
            if passing < k:
                high, upper = r, threshold
            else:
                low, lower = r, threshold
                search.never_below(threshold, passing)
        if lower == 0.0:  # k elements are more than lie above the mean
            return TopKCompressor().compress(flat, ratio, generator)
        plenty = search.take(lower)
        sure = ~(plenty.magnitudes < upper)
        between = plenty.indices[~sure]
        missing = k - int(sure.sum())
        start = int(torch.randint(len(between) - missing + 1, (1,), generator=generator, device=flat.device))
        return select(flat, torch.cat((plenty.indices[sure], between[start : start + missing])).sort().values)
