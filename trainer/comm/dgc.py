"""Selection by a sampled threshold, as Deep Gradient Compression does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.threshold import Survivors
from hetopt.trainer.comm.topk import TopKCompressor

SAMPLED_PART = 0.01
LEAST_SAMPLE = 1024
CORRECTIONS = 10
RAISE, LOWER = 1.3, 0.7


@dataclass(frozen=True, slots=True)
class DgcCompressor:
    """Sends what is not below a threshold read off a sample of 1 % (drawn with replacement), corrected until it fits.

    While more than 1.3 k elements pass, the threshold is raised by 1.3, and lowered by 0.7 while fewer than 0.7 k do;
    after ten corrections (where many magnitudes are equal, or not finite) Top-k decides. So a payload has between
    0.7 k and 1.3 k elements, and another number on every worker. The released code does so layer by layer; here it is
    the whole gradient, for the reason that Top-k has. (Lin et al., arXiv 1712.01887; momentum is the memory's.)
    """

    name: ClassVar[str] = "dgc"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep what passes; which elements are sampled is up to the generator."""
        numel = flat.numel()
        k = kept_elements(numel, ratio)
        sample = min(numel, max(LEAST_SAMPLE, math.ceil(SAMPLED_PART * numel)))
        if sample == numel or k == numel:
            return TopKCompressor().compress(flat, ratio, generator)
        places = torch.randint(numel, (sample,), generator=generator, device=flat.device)
        rank = max(1, round(k / numel * sample))
        threshold = float(torch.topk(flat.index_select(0, places).abs_(), rank).values[-1])
        found = Survivors.of(flat, threshold)
        for _ in range(CORRECTIONS):
            if len(found) > RAISE * k:
                threshold *= RAISE
                found = found.above(threshold)
            elif len(found) < LOWER * k:
                threshold *= LOWER
                found = Survivors.of(flat, threshold)
            else:
                return found.payload(flat)
        return TopKCompressor().compress(flat, ratio, generator)
