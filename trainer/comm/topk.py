"""Exact Top-k: the elements of largest magnitude, found without sorting all of them, and the energy that they hold.

Selection by a threshold: sampled (DGC) or bisected (RedSync, MSTopk).

What a step sends, decided by what it would keep: a selection, the floor that it was selected from, or everything.

GraVAC's payload (Tyagi and Swany, arXiv 2305.12201, algorithm 1). The floor's selection looks at the whole gradient,
and the candidate's at the floor's elements alone:

    g_min = C(g, theta_min)                 the floor, factor theta_min
    g_c   = C(g_min, theta_s)               the candidate, factor theta_s theta_min
    d     = sum_r ||g_x,r||^2 / sum_r ||g_r||^2          for x in {c, min}, over all workers r
    send    g_c where d_c >= eps, else g_min where d_min >= eps, else g

Departure: gains are those of the step itself and of all workers, so that all of them decide alike, and nothing is ever
sent that keeps less than eps. The paper smooths each worker's own gains (by N/100): what a step sends may keep less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import MAX_INDEXED_ELEMENTS, kept_elements
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import (
    AllReduce,
    Compressor,
    Identity,
    Payload,
    SparsePayload,
    State,
    Turn,
)
from hetopt.trainer.comm.elements import AllGather
from hetopt.trainer.comm.vectors import blocks, energy, largest_magnitude, mean_magnitude

SAMPLE_SIZE = 65_536

_WORD = 8
_ALL_TRUE = 0x0101010101010101  # eight of torch's one-byte truths


class Selection(Compressor[SparsePayload]):
    """Selects elements of a gradient, as they are; each worker gathers those of all, or one worker's choice is shared.

    Args:
        ratio: fraction of the elements, in (0, 1].
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio


class TopK(Selection):
    """Sends the ``kept_elements(numel, ratio)`` largest magnitudes of the fused gradient, in ascending order of index.

    One selection over all parameters, not one a layer: a per-layer k starves layers with large gradients (arXiv
    2312.02493).
    """

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep the largest magnitudes; the same gradient always gives the same payload."""
        return select(flat, largest_magnitudes(flat, kept_elements(flat.numel(), self.ratio)))


def select(flat: Tensor, indices: Tensor) -> SparsePayload:
    """The payload of these elements, as they are."""
    return SparsePayload(indices=indices.to(torch.int32), values=flat.index_select(0, indices), numel=flat.numel())


def largest_magnitudes(flat: Tensor, k: int) -> Tensor:
    """Ascending int64 indices of k elements with the largest ``|value|``: the same magnitudes that `torch.topk` finds.

    `torch.topk` on a CPU carries an index along with every element. Instead, a threshold that about k elements and a
    safety margin should pass is read off a sample; one pass keeps the elements that do pass, and `torch.topk` chooses
    among those few. The number of survivors is checked: when the sample misled, `torch.topk` sees everything after
    all. A GPU selects fast enough on its own.
    """
    numel = flat.numel()
    if not 1 <= k <= numel <= MAX_INDEXED_ELEMENTS:
        raise ValueError(f"between 1 and {numel} elements can be kept, of at most {MAX_INDEXED_ELEMENTS}, not {k}")
    if flat.device.type == "cpu" and numel > 2 * SAMPLE_SIZE and k <= numel // 4:
        survivors, magnitudes = not_below(flat, sampled_threshold(flat, k))
        if len(survivors) >= k:
            return survivors[top_mask(magnitudes, k)]
    return top_mask(flat.abs(), k).nonzero().squeeze(1)


def sampled_threshold(flat: Tensor, k: int) -> float:
    """A magnitude that k elements exceed in all likelihood, though not many more than k.

    Among m sampled elements the number that belongs to the k largest is nearly Poisson with mean k m / n; five standard
    deviations above it leave one failure in about three million. Places are pseudo-random, since a stride could fall in
    step with the layout of a layer, and drawn from a generator of their own: the same gradient, the same selection.
    """
    numel = flat.numel()
    generator = torch.Generator().manual_seed(numel)
    places = torch.randint(numel, (SAMPLE_SIZE,), generator=generator)
    expected = k * SAMPLE_SIZE / numel
    rank = min(SAMPLE_SIZE, math.ceil(expected + 5.0 * math.sqrt(expected) + 5.0))
    return float(torch.topk(flat.index_select(0, places).abs_(), rank).values[-1])


def not_below(flat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending indices and magnitudes of all elements not below the threshold (NaN included), in one pass."""
    indices, magnitudes = [], []
    crowded = flat.device.type != "cpu"
    for block in blocks(flat.numel(), flat.device):
        chunk = flat[block].abs()
        below = chunk.lt(threshold)
        passed = below.logical_not_().nonzero().squeeze(1) if crowded else _few_false(below)
        if flat.device.type == "cpu":
            crowded = passed.numel() * _WORD * 3 > chunk.numel()
        magnitudes.append(chunk.index_select(0, passed))
        indices.append(passed.add_(block.start))
    return torch.cat(indices), torch.cat(magnitudes)


def _few_false(flags: Tensor) -> Tensor:
    """Indices of the False among many True: eight at a time, a word that is all True is passed over with one look."""
    whole = flags.numel() // _WORD * _WORD
    words = flags[:whole].view(torch.int64).bitwise_xor_(_ALL_TRUE)
    hit = words.nonzero().squeeze(1)
    inside = flags[:whole].view(torch.uint8).view(-1, _WORD).index_select(0, hit).view(-1).nonzero().squeeze(1)
    found = hit.index_select(0, inside >> 3).mul_(_WORD).add_(inside.bitwise_and_(7))
    if whole == flags.numel():
        return found
    return torch.cat((found, flags[whole:].logical_not().nonzero().squeeze(1).add_(whole)))


def top_mask(magnitudes: Tensor, k: int) -> Tensor:
    """True at the k largest magnitudes; a NaN counts as the largest, so that it is sent and seen."""
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[torch.topk(magnitudes, k, sorted=False).indices] = True
    return mask


class ThresholdSelection(Selection):
    """Sends what is not below a threshold, mostly another number of elements on every worker."""

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes; Top-k decides where no threshold is found, and where everything is to be sent."""
        k = kept_elements(flat.numel(), self.ratio)
        indices = None if k == flat.numel() else self.search(flat, k, turn)
        return TopK(self.ratio).encode(flat, turn) if indices is None else select(flat, indices)

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return the ascending indices of about k elements, less than all; None: there is no such threshold."""
        raise NotImplementedError


def bisect(flat: Tensor, k: int, most: int, rounds: int) -> tuple[float | None, float | None]:
    """Bisect r until k to ``most`` elements are not below ``mean + r (max - mean)``.

    Returns:
        That threshold, and None. Where no such r is found in so many rounds: the highest threshold that more elements
        pass (None: k elements are more than lie above the mean), and the lowest that fewer than k pass.
    """
    mean, largest = mean_magnitude(flat), largest_magnitude(flat)
    if not (math.isfinite(largest) and largest > mean * (1 + 1e-6)):
        return None, None  # no threshold between them tells elements apart
    magnitudes, lower, upper = flat.abs(), None, math.inf
    low, high = 0.0, 1.0
    for _ in range(rounds):
        r = (low + high) / 2
        threshold = mean + r * (largest - mean)
        passing = int(torch.count_nonzero(magnitudes >= threshold))
        if k <= passing <= most:
            return threshold, None
        if passing < k:
            high, upper = r, threshold
        else:
            low, lower = r, threshold
    return lower, upper


SAMPLED_PART = 0.01
LEAST_SAMPLE = 1024
CORRECTIONS = 10
RAISE, LOWER = 1.3, 0.7


class Dgc(ThresholdSelection):
    """Sends what is not below a threshold read off a sample of 1 % (drawn with replacement), corrected until it fits.

    While more than 1.3 k elements pass, the threshold is raised by 1.3, and lowered by 0.7 while fewer than 0.7 k do;
    after ten corrections (where many magnitudes are equal, or not finite) Top-k decides. So a payload has between
    0.7 k and 1.3 k elements. The released code does so layer by layer; here it is the whole gradient, for the reason
    that Top-k has. (Lin et al., arXiv 1712.01887; momentum is the residual's.)
    """

    counts_steps = True

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Keep what passes (see `ThresholdSelection`); which elements are sampled is up to the turn."""
        numel = flat.numel()
        sample = min(numel, max(LEAST_SAMPLE, math.ceil(SAMPLED_PART * numel)))
        if sample == numel:
            return None
        places = torch.randint(numel, (sample,), generator=turn.private(flat.device), device=flat.device)
        rank = max(1, round(k / numel * sample))
        threshold = float(torch.topk(flat.index_select(0, places).abs_(), rank).values[-1])
        for _ in range(CORRECTIONS):
            indices, _ = not_below(flat, threshold)
            if LOWER * k <= len(indices) <= RAISE * k:
                return indices
            threshold *= RAISE if len(indices) > RAISE * k else LOWER
        return None


REDSYNC_ROUNDS = 20


class RedSync(ThresholdSelection):
    """Sends what is not below ``mean + r (max - mean)``, where r is bisected until k to 2 k elements pass.

    Where no such r is found in twenty rounds, or k elements are more than lie above the mean, Top-k decides: the
    released code stops after three rounds, with any number of elements. (Fang et al., arXiv 1808.04357.)
    """

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Keep what passes (see `ThresholdSelection`); the same gradient always gives the same elements."""
        lower, upper = bisect(flat, k, 2 * k, REDSYNC_ROUNDS)
        return None if lower is None or upper is not None else not_below(flat, lower)[0]


MSTOPK_ROUNDS = 25


class MsTopK(ThresholdSelection):
    """Sends all that is above the upper of two thresholds, and fills up to k from between the two.

    Both thresholds close in on k elements in 25 rounds of bisecting ``mean + r (max - mean)``. What fills up is a run
    of neighbours at a random place, which never reaches past the end (it does in the released code). (Shi et al.,
    "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458.)
    """

    counts_steps = True

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Keep exactly k elements (see `ThresholdSelection`); what fills up is up to the turn."""
        lower, upper = bisect(flat, k, k, MSTOPK_ROUNDS)
        if lower is None:
            return None
        plenty, magnitudes = not_below(flat, lower)
        if upper is None:
            return plenty
        sure = magnitudes >= upper
        between, missing = plenty[~sure], k - int(sure.sum())
        generator = turn.private(flat.device)
        start = int(torch.randint(len(between) - missing + 1, (1,), generator=generator, device=flat.device))
        return torch.cat((plenty[sure], between[start : start + missing])).sort().values


def kept_energies(flat: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """Return the energy of the k largest magnitudes of ``flat``, for each k in ``counts``.

    One sort serves all counts: Top-k is an orthogonal projection, so energies of nested selections are prefix sums.

    Args:
        flat: 1-D fp32, finite.
        counts: each between 1 and the number of elements.
    """
    whole = energy(flat)
    most = max((count for count in counts if count < flat.numel()), default=1)
    largest = flat.index_select(0, largest_magnitudes(flat, most)).abs().sort(descending=True).values
    prefixes = largest.double().square_().cumsum_(0)
    return tuple(whole if count >= flat.numel() else min(whole, float(prefixes[count - 1])) for count in counts)


class Levels:
    """A chain (see `hetopt.trainer.comm.compressor.Chain`) that chooses between three payloads in every step.

    The candidate is selected from a first, larger selection, the floor: so only that looks at the whole gradient. Of
    nested selections such as Top-k this gives what selecting at once would. What is sent is the first of candidate and
    floor that keeps enough energy, of all workers, else everything. (GraVAC: Tyagi and Swany, arXiv 2305.12201.)

    Args:
        select: makes the selection of a ratio.
        ratio: of the candidate, of the whole gradient; above the floor it is selected at once.
        floor_ratio: of the floor.
        gather: carries either.
        least_gain: eps.
        seed: of all randomness, the same on every worker.

    Attributes:
        gains: of the candidate and of the floor in the step before, of all workers; absent before the first.
    """

    def __init__(
        self,
        select: Callable[[float], Selection],
        ratio: float,
        floor_ratio: float,
        gather: AllGather,
        *,
        least_gain: float,
        seed: int = 0,
    ) -> None:
        self._select = select
        self._ratio = ratio
        self._first = select(max(ratio, floor_ratio))
        self._is_direct = ratio >= floor_ratio
        self._gather = gather
        self._least_gain = least_gain
        self._seed = seed
        self.counts_steps = self._first.counts_steps
        self.gains: tuple[float, float] | None = None

    def run(self, flat: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum over all workers into ``out``, the same bits on each (see `Chain.run`).

        A NaN keeps nothing, so everything is sent and seen.
        """
        turn = Turn(channel, step, self._seed)
        floor = candidate = self._first.encode(flat, turn)
        if not self._is_direct:
            # Of the elements that are there, which may be a few more or less than the floor's fraction.
            part = min(1.0, self._ratio * flat.numel() / floor.values.numel())
            chosen = self._select(part).encode(floor.values, turn)
            indices = floor.indices.index_select(0, chosen.indices)
            candidate = SparsePayload(indices=indices, values=chosen.values, numel=flat.numel())
        there = flat.new_tensor([energy(candidate.values), energy(floor.values), energy(flat)])
        channel.all_reduce(there)
        kept, kept_by_floor, whole = there.tolist()
        self.gains = (1.0, 1.0) if whole == 0 else (kept / whole, kept_by_floor / whole)
        for payload, gain in zip((candidate, floor), self.gains, strict=True):
            if gain >= self._least_gain:
                return self._gather.gather(payload, out, turn)
        return AllReduce().run(Identity(), flat, out, turn)

    def state(self) -> State:
        """Nothing goes on from step to step."""
        return {}

    def load_state(self, state: State) -> None:
        """There is nothing."""
