"""Selection by a threshold: sampled (DGC), bisected (RedSync, MSTopk), fitted (SIDCo), or kept from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.core.comm.composition import GATHER
from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.compressor import SparsePayload, State, Turn
from hetopt.trainer.comm.topk import Selection, TopK, not_below, select
from hetopt.trainer.comm.vectors import BLOCK_ELEMENTS, blocks

_FEW = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Ascending indices and magnitudes of the elements whose magnitude is not below some threshold; NaN never is."""

    indices: Tensor
    magnitudes: Tensor

    @classmethod
    def of(cls, flat: Tensor, threshold: float) -> Survivors:
        """The survivors of a whole gradient."""
        return cls(*not_below(flat, threshold))

    def above(self, threshold: float) -> Survivors:
        """Those that are left at a higher threshold."""
        stay = self.magnitudes.lt(threshold).logical_not_()
        return Survivors(self.indices[stay], self.magnitudes[stay])

    def payload(self, flat: Tensor) -> SparsePayload:
        """The surviving elements of ``flat`` as a sparse payload."""
        return select(flat, self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class ThresholdSearch:
    """Answers how many elements are not below a threshold, again and again.

    Counting is one pass over a gradient, taking elements out is several. So a search counts, and takes out only what it
    ends with, or once they are few, those that all thresholds to come must choose among.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._few: Survivors | None = None

    def count(self, threshold: float) -> int:
        """Elements not below the threshold."""
        return count_not_below(self._flat if self._few is None else self._few.magnitudes, threshold)

    def take(self, threshold: float) -> Survivors:
        """The elements not below the threshold."""
        return Survivors.of(self._flat, threshold) if self._few is None else self._few.above(threshold)

    def never_below(self, threshold: float, count: int) -> None:
        """From now on only higher thresholds are asked for than this one, which ``count`` elements pass."""
        among = self._flat.numel() if self._few is None else len(self._few)
        if count <= _FEW * among:
            self._few = self.take(threshold)


def count_not_below(flat: Tensor, threshold: float) -> int:
    """How many elements of 1-D fp32 have a magnitude that is not below the threshold."""
    if flat.device.type != "cpu":
        return int(flat.abs().lt(threshold).logical_not_().sum())
    # A CPU compares into fp32 several times as fast as into truths; a block's sum of ones is exact in fp32.
    ones, below = torch.empty(min(BLOCK_ELEMENTS, flat.numel())), 0
    for block in blocks(flat.numel(), flat.device):
        below += int(torch.lt(flat[block].abs(), threshold, out=ones[: block.stop - block.start]).sum())
    return flat.numel() - below


def excess(flat: Tensor, threshold: float) -> float:
    """Sum of ``max(0, |x| - threshold)`` over 1-D fp32. Blocks are summed in fp32, block sums in double precision."""
    sums = [flat[block].abs().sub_(threshold).clamp_(min=0).sum() for block in blocks(flat.numel(), flat.device)]
    return float(torch.stack(sums).double().sum())


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Mean and largest magnitude of a gradient; NaN or infinite if an element is."""

    mean: float
    largest: float

    @classmethod
    def of(cls, flat: Tensor) -> Magnitudes:
        """Mean excess and largest magnitude of a 1-D fp32 tensor that is not empty."""
        return cls(mean=excess(flat, 0.0) / flat.numel(), largest=largest_magnitude(flat))

    @property
    def spread(self) -> bool:
        """Whether a threshold between the two can tell elements apart: all are finite, and they differ."""
        return math.isfinite(self.largest) and self.largest > self.mean * (1 + 1e-6)


def largest_magnitude(flat: Tensor) -> float:
    """``max |x|`` of 1-D fp32, not empty; NaN if an element is."""
    low, high = torch.aminmax(flat)
    # max() of Python would take either side of a comparison with NaN; torch keeps the NaN.
    return float(torch.maximum(-low, high))


MOST = 2.0
"""At most so many times the elements that the ratio allows."""

_FOLLOW = 0.5
_LARGEST_STEP = 1.5


class ThresholdTopK(Selection):
    """Sends whatever is not below its threshold: more in steps with much to learn, less in those with little.

    The first step sets the threshold where Top-k would; each later one moves it half way to where the number would have
    been right, had the magnitudes beyond it an exponential tail, and by at most 1.5. Never more than twice the ratio's
    elements are sent, the largest; then, and where none passes and Top-k decides, the threshold is set anew, to the
    least that is sent. A fixed absolute threshold minimises the error that error feedback accumulates over a run at a
    given volume (Sahu et al., arXiv 2108.00951); following the ratio keeps that volume without their sweep.
    """

    name = "topk_threshold"
    combines = (GATHER,)

    def __init__(self, ratio: float) -> None:
        super().__init__(ratio)
        self._threshold = 0.0

    def state(self) -> State:
        """The threshold; 0 before the first step."""
        return {"threshold": torch.tensor(self._threshold, dtype=torch.float64)}

    def load_state(self, state: State) -> None:
        """Go on with a threshold that `state` gave, of this worker or another."""
        self._threshold = float(state["threshold"])

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes, and move the threshold."""
        k = kept_elements(flat.numel(), self.ratio)
        if k == flat.numel():
            return TopK(self.ratio).encode(flat, turn)
        found = Survivors.of(flat, self._threshold) if self._threshold > 0 else None
        if found is None or not len(found):
            chosen = TopK(self.ratio).encode(flat, turn)
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


SAMPLED_PART = 0.01
LEAST_SAMPLE = 1024
CORRECTIONS = 10
RAISE, LOWER = 1.3, 0.7


class Dgc(Selection):
    """Sends what is not below a threshold read off a sample of 1 % (drawn with replacement), corrected until it fits.

    While more than 1.3 k elements pass, the threshold is raised by 1.3, and lowered by 0.7 while fewer than 0.7 k do;
    after ten corrections (where many magnitudes are equal, or not finite) Top-k decides. So a payload has between
    0.7 k and 1.3 k elements, and another number on every worker. The released code does so layer by layer; here it is
    the whole gradient, for the reason that Top-k has. (Lin et al., arXiv 1712.01887; momentum is the residual's.)
    """

    name = "dgc"
    combines = (GATHER,)
    counts_steps = True

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes; which elements are sampled is up to the turn."""
        numel = flat.numel()
        k = kept_elements(numel, self.ratio)
        sample = min(numel, max(LEAST_SAMPLE, math.ceil(SAMPLED_PART * numel)))
        if sample == numel or k == numel:
            return TopK(self.ratio).encode(flat, turn)
        places = torch.randint(numel, (sample,), generator=turn.private(flat.device), device=flat.device)
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
        return TopK(self.ratio).encode(flat, turn)


REDSYNC_ROUNDS = 20


class RedSync(Selection):
    """Sends what is not below ``mean + r (max - mean)``, where r is bisected until k to 2 k elements pass.

    Where no such r is found in twenty rounds, or k elements are more than lie above the mean, Top-k decides: the
    released code stops after three rounds, with any number of elements. (Fang et al., arXiv 1808.04357.)
    """

    name = "redsync"
    combines = (GATHER,)

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes; the same gradient always gives the same payload."""
        k, scale = kept_elements(flat.numel(), self.ratio), Magnitudes.of(flat)
        low, high = 0.0, 1.0
        search = ThresholdSearch(flat)
        for _ in range(REDSYNC_ROUNDS if scale.spread else 0):
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
        return TopK(self.ratio).encode(flat, turn)


STAGE = 0.25
"""What a stage leaves, so that the next one is fitted to the tail alone."""
MOST_STAGES = 12
"""Down to a few elements of the longest gradient there can be."""


class Sidco(Selection):
    """Sends what is not below a threshold that about k elements should pass.

    Magnitudes are taken to be exponential with mean mu, so that a part d of them exceeds ``mu ln(1 / d)``. Gradients
    have heavier tails, hence stages: each fits the excess over the threshold of the one before, where an exponential
    is a better likeness, and aims at k of those that have really passed, or at a quarter of them if that is more.
    Nothing is sorted. Stages end with at most 2 k elements; with fewer than k / 2, Top-k decides. (After Abdelmoniem et
    al., arXiv 2101.10761, who let the number of stages follow from earlier steps instead of from what has passed.)
    """

    name = "sidco"
    combines = (GATHER,)

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes; the same gradient always gives the same payload."""
        k, scale = kept_elements(flat.numel(), self.ratio), Magnitudes.of(flat)
        if not scale.spread or k == flat.numel():
            return TopK(self.ratio).encode(flat, turn)
        threshold, beyond, passing = 0.0, scale.mean, flat.numel()
        for _ in range(MOST_STAGES):
            if passing <= 2 * k or beyond <= 0:
                break
            threshold += beyond * math.log(1 / max(k / passing, STAGE))
            passing = count_not_below(flat, threshold)
            beyond = excess(flat, threshold) / max(1, passing)
        if not k / 2 <= passing <= 2 * k:
            return TopK(self.ratio).encode(flat, turn)
        return Survivors.of(flat, threshold).payload(flat)


MSTOPK_ROUNDS = 25


class MsTopK(Selection):
    """Sends all that is above the upper of two thresholds, and fills up to k from between the two.

    Both thresholds close in on k elements in 25 rounds of bisecting ``mean + r (max - mean)``. What fills up is a run
    of neighbours at a random place, which never reaches past the end (it does in the released code). (Shi et al.,
    "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458.)
    """

    name = "mstopk"
    counts_steps = True

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep k elements, in ascending order of index; what fills up is up to the turn."""
        k, scale = kept_elements(flat.numel(), self.ratio), Magnitudes.of(flat)
        if not scale.spread or k == flat.numel():
            return TopK(self.ratio).encode(flat, turn)
        low, high = 0.0, 1.0
        lower, upper = 0.0, math.inf  # at least k elements pass the one, fewer than k the other
        search = ThresholdSearch(flat)
        for _ in range(MSTOPK_ROUNDS):
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
            return TopK(self.ratio).encode(flat, turn)
        plenty = search.take(lower)
        sure = ~(plenty.magnitudes < upper)
        between = plenty.indices[~sure]
        missing = k - int(sure.sum())
        generator = turn.private(flat.device)
        start = int(torch.randint(len(between) - missing + 1, (1,), generator=generator, device=flat.device))
        return select(flat, torch.cat((plenty.indices[sure], between[start : start + missing])).sort().values)
