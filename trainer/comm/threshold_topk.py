"""Selection by one absolute threshold that stays from step to step and only slowly follows the ratio."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.error_feedback import MemoryState
from hetopt.trainer.comm.payload import SparsePayload
from hetopt.trainer.comm.threshold import Survivors
from hetopt.trainer.comm.topk import TopKCompressor, select

MOST = 2.0
"""At most so many times the elements that the ratio allows."""

_FOLLOW = 0.5
_LARGEST_STEP = 1.5


class ThresholdCompressor:
    """Sends whatever is not below its threshold: more in steps with much to learn, less in those with little.

    The first step sets the threshold where Top-k would; each later one moves it half way to where the number would have
    been right, had the magnitudes beyond it an exponential tail, and by at most 1.5. Never more than twice the ratio's
    elements are sent, the largest; then, and where none passes and Top-k decides, the threshold is set anew, to the
    least that is sent. A fixed absolute threshold minimises the error that error feedback accumulates over a run at a
    given volume (Sahu et al., arXiv 2108.00951); following the ratio keeps that volume without their sweep.
    """

    name: ClassVar[str] = "topk_threshold"

    def __init__(self) -> None:
        self._threshold = 0.0

    def state(self) -> MemoryState:
        """The threshold; 0 before the first step."""
        return {"threshold": torch.tensor(self._threshold, dtype=torch.float64)}

    def load_state(self, state: MemoryState) -> None:
        """Go on with a threshold that `state` gave, of this worker or another."""
        self._threshold = float(state["threshold"])

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Keep what passes, and move the threshold."""
        k = kept_elements(flat.numel(), ratio)
        if k == flat.numel():
            return TopKCompressor().compress(flat, ratio, generator)
        found = Survivors.of(flat, self._threshold) if self._threshold > 0 else None
        if found is None or not len(found):
            chosen = TopKCompressor().compress(flat, ratio, generator)
            self._threshold = _finite(float(chosen.values.abs().min()))
            return chosen
        if len(found) > MOST * k:
            largest = torch.topk(found.magnitudes, int(MOST * k), sorted=False)
            self._threshold = _finite(float(largest.values.min()))
            return select(flat, found.indices[largest.indices].sort().values)
        excess = float(found.magnitudes.double().mean()) - self._threshold
        moved = 1 + _FOLLOW * excess * math.log(len(found) / k) / self._threshold
        if math.isfinite(moved):
            self._threshold *= min(_LARGEST_STEP, max(1 / _LARGEST_STEP, moved))
        return found.payload(flat)


def _finite(threshold: float) -> float:
    return threshold if threshold < float("inf") else 0.0
