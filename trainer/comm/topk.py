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
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hetopt.core.comm.composition import AR_TOPK, GATHER, STAR, VAR
from hetopt.core.comm.payload_bytes import MAX_INDEXED_ELEMENTS, kept_elements
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import (
    AllReduce,
    Collective,
    Compressor,
    Identity,
    IndexChoice,
    Payload,
    SparsePayload,
    State,
    Turn,
)
from hetopt.trainer.comm.vectors import BLOCK_ELEMENTS, Workspace, blocks, energy, largest_magnitude, mean_magnitude

SAMPLE_SIZE = 65_536

_WORD = 8
_ALL_TRUE = 0x0101010101010101  # eight of torch's one-byte truths


class Selection(Compressor[SparsePayload]):
    """Selects elements of a gradient, as they are; each worker gathers those of all, or one worker's choice is shared.

    Args:
        ratio: fraction of the elements, in (0, 1].
    """

    combines: ClassVar[tuple[str, ...]] = (GATHER, AR_TOPK, STAR, VAR)

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio


class TopK(Selection):
    """Sends the ``kept_elements(numel, ratio)`` largest magnitudes of the fused gradient, in ascending order of index.

    One selection over all parameters, not one a layer: a per-layer k starves layers with large gradients (arXiv
    2312.02493).
    """

    name = "topk"

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

    combines: ClassVar[tuple[str, ...]] = (GATHER,)

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what passes; Top-k decides where no threshold is found, and where everything is to be sent."""
        k = kept_elements(flat.numel(), self.ratio)
        indices = None if k == flat.numel() else self.search(flat, k, turn)
        return TopK(self.ratio).encode(flat, turn) if indices is None else select(flat, indices)

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return the ascending indices of about k elements, less than all; None: there is no such threshold."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Ascending indices and magnitudes of the elements whose magnitude is not below some threshold; NaN never is."""

    indices: Tensor
    magnitudes: Tensor

    @classmethod
    def of(cls, flat: Tensor, threshold: float) -> Survivors:
        """Return the survivors of a whole gradient."""
        return cls(*not_below(flat, threshold))

    def above(self, threshold: float) -> Survivors:
        """Return those that are left at a higher threshold."""
        stay = self.magnitudes.lt(threshold).logical_not_()
        return Survivors(self.indices[stay], self.magnitudes[stay])

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
        """Return the number of elements not below the threshold."""
        return count_not_below(self._flat if self._few is None else self._few.magnitudes, threshold)

    def take(self, threshold: float) -> Survivors:
        """Return the elements not below the threshold."""
        return Survivors.of(self._flat, threshold) if self._few is None else self._few.above(threshold)

    def never_below(self, threshold: float, count: int) -> None:
        """Ask only for higher thresholds from now on than this one, which ``count`` elements pass."""
        among = self._flat.numel() if self._few is None else len(self._few)
        if count <= _FEW * among:
            self._few = self.take(threshold)


_FEW = 1 / 16


def count_not_below(flat: Tensor, threshold: float) -> int:
    """Return how many elements of 1-D fp32 have a magnitude that is not below the threshold."""
    if flat.device.type != "cpu":
        return int(flat.abs().lt(threshold).logical_not_().sum())
    # A CPU compares into fp32 several times as fast as into truths; a block's sum of ones is exact in fp32.
    ones, below = torch.empty(min(BLOCK_ELEMENTS, flat.numel())), 0
    for block in blocks(flat.numel(), flat.device):
        below += int(torch.lt(flat[block].abs(), threshold, out=ones[: block.stop - block.start]).sum())
    return flat.numel() - below


def bisect(flat: Tensor, k: int, most: int, rounds: int) -> tuple[Survivors | None, float | None]:
    """Bisect r until k to ``most`` elements are not below ``mean + r (max - mean)``.

    Returns:
        These elements, and None. Where no such r is found in so many rounds: the fewest elements that were more (None:
        k elements are more than lie above the mean), and a threshold that fewer than k pass.
    """
    mean, largest = mean_magnitude(flat), largest_magnitude(flat)
    if not (math.isfinite(largest) and largest > mean * (1 + 1e-6)):
        return None, None  # no threshold between them tells elements apart
    low, high, upper, search = 0.0, 1.0, math.inf, ThresholdSearch(flat)
    for _ in range(rounds):
        r = (low + high) / 2
        threshold = mean + r * (largest - mean)
        passing = search.count(threshold)
        if k <= passing <= most:
            return search.take(threshold), None
        if passing < k:
            high, upper = r, threshold
        else:
            low = r
            search.never_below(threshold, passing)
    return search.take(mean + low * (largest - mean)) if low else None, upper


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

    name = "dgc"
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
        found = Survivors.of(flat, threshold)
        for _ in range(CORRECTIONS):
            if LOWER * k <= len(found) <= RAISE * k:
                return found.indices
            is_raised = len(found) > RAISE * k
            threshold *= RAISE if is_raised else LOWER
            found = found.above(threshold) if is_raised else Survivors.of(flat, threshold)
        return None


REDSYNC_ROUNDS = 20


class RedSync(ThresholdSelection):
    """Sends what is not below ``mean + r (max - mean)``, where r is bisected until k to 2 k elements pass.

    Where no such r is found in twenty rounds, or k elements are more than lie above the mean, Top-k decides: the
    released code stops after three rounds, with any number of elements. (Fang et al., arXiv 1808.04357.)
    """

    name = "redsync"

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Keep what passes (see `ThresholdSelection`); the same gradient always gives the same elements."""
        found, upper = bisect(flat, k, 2 * k, REDSYNC_ROUNDS)
        return None if found is None or upper is not None else found.indices


MSTOPK_ROUNDS = 25


class MsTopK(ThresholdSelection):
    """Sends all that is above the upper of two thresholds, and fills up to k from between the two.

    Both thresholds close in on k elements in 25 rounds of bisecting ``mean + r (max - mean)``. What fills up is a run
    of neighbours at a random place, which never reaches past the end (it does in the released code). (Shi et al.,
    "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458.)
    """

    name = "mstopk"
    combines = Selection.combines
    counts_steps = True

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Keep exactly k elements (see `ThresholdSelection`); what fills up is up to the turn."""
        plenty, upper = bisect(flat, k, k, MSTOPK_ROUNDS)
        if plenty is None or upper is None:
            return None if plenty is None else plenty.indices
        sure = ~(plenty.magnitudes < upper)
        between, missing = plenty.indices[~sure], k - int(sure.sum())
        generator = turn.private(flat.device)
        start = int(torch.randint(len(between) - missing + 1, (1,), generator=generator, device=flat.device))
        return torch.cat((plenty.indices[sure], between[start : start + missing])).sort().values


class MultiLevel(Selection):
    """Compresses the compressed, as GraVAC does: selects ``floor_ratio``, and of that as much as makes ``ratio``.

    While a controller tries smaller and smaller ratios, only the floor's selection looks at the whole gradient. Of
    nested selections such as Top-k this gives what selecting at once would. A ratio above the floor is selected at
    once. (Tyagi and Swany, arXiv 2305.12201.)

    Args:
        select: makes the selection of a ratio.
        ratio: of the whole, in the end.
        floor_ratio: fraction of the elements that the first selection keeps.
    """

    def __init__(self, select: Callable[[float], Selection], ratio: float, floor_ratio: float) -> None:
        super().__init__(ratio)
        self._select = select
        self._first = select(max(ratio, floor_ratio))
        self._is_direct = ratio >= floor_ratio
        self.name = self._first.name
        self.counts_steps = self._first.counts_steps

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Select twice; as deterministic as the inner selection."""
        return self.both(flat, turn)[1]

    def both(self, flat: Tensor, turn: Turn) -> tuple[SparsePayload, SparsePayload]:
        """The first selection, and the second, which is the same where the ratio is above the floor."""
        floor = self._first.encode(flat, turn)
        if self._is_direct:
            return floor, floor
        # Of the elements that are there, which may be a few more or less than the floor's fraction.
        part = min(1.0, self.ratio * flat.numel() / floor.values.numel())
        chosen = self._select(part).encode(floor.values, turn)
        indices = floor.indices.index_select(0, chosen.indices)
        return floor, SparsePayload(indices=indices, values=chosen.values, numel=flat.numel())


_SAMPLE = 65_536
_EXACT_UP_TO = 4 * _SAMPLE
_SELECTED_PART = 0.02


def kept_energies(flat: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """Energy of the k largest magnitudes of ``flat``, for each k in ``counts``.

    One sort serves all counts: Top-k is an orthogonal projection, so energies of nested selections are prefix sums. Of
    a long vector only the largest elements are sorted; those below them are all small, and a random sample tells how
    their energy is spread to within a percent of it.

    Args:
        flat: 1-D fp32, finite.
        counts: each between 0 and the number of elements.
    """
    numel = flat.numel()
    if numel <= _EXACT_UP_TO:
        kept = flat
    else:
        exact = [count for count in counts if 0 < count <= _SELECTED_PART * numel]
        kept = flat.index_select(0, largest_magnitudes(flat, max(exact))) if exact else flat.new_empty(0)
    whole, known = energy(flat), kept.numel()
    top = _prefix(kept.abs())
    top_energy = float(top[-1]) if known else 0.0
    tail = _prefix(_sample_below(flat, kept)) if any(known < count < numel for count in counts) else top
    energies: list[float] = []
    for count in counts:
        if count >= numel:
            energies.append(whole)
        elif count <= known:
            energies.append(min(whole, float(top[count - 1]) if count else 0.0))
        else:
            # Of the sampled elements the same part is among the ``count`` largest as of all that are not in ``kept``.
            place = max(1, round((count - known) / (numel - known) * tail.numel()))
            part = float(tail[place - 1] / tail[-1]) if tail[-1] > 0 else 1.0
            energies.append(min(whole, top_energy + part * max(0.0, whole - top_energy)))
    return tuple(energies)


def _prefix(magnitudes: Tensor) -> Tensor:
    """Energies of the largest 1, 2, ... magnitudes, in double precision."""
    return magnitudes.sort(descending=True).values.double().square_().cumsum_(0)


def _sample_below(flat: Tensor, kept: Tensor) -> Tensor:
    """Magnitudes of a random sample of the elements that are not in ``kept``."""
    places = torch.randint(flat.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(flat.numel()))
    sample = flat.index_select(0, places.to(flat.device)).abs_()
    below = sample[sample < kept.abs().min()] if kept.numel() else sample
    return below if below.numel() else sample


class RandomSelection(Selection):
    """Random elements as a selection of its own: the same on every worker in a step, and of any vector.

    Args:
        ratio: fraction of the elements.
        choice: draws them.
    """

    name = "randomk"
    counts_steps = True

    def __init__(self, ratio: float, choice: IndexChoice) -> None:
        super().__init__(ratio)
        self._choice = choice

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Keep what was drawn (see `Compressor`)."""
        return select(flat, self._choice.choose(flat, turn).sort().values)


class SharedValues:
    """Sums values of elements that are the same on every worker: indices do not travel."""

    name = AllReduce.name

    def __init__(self) -> None:
        self._workspace = Workspace()

    def run(self, compressor: Compressor[SparsePayload], flat: Tensor, out: Tensor, turn: Turn) -> SparsePayload:
        """Sum on the way (see `Collective`)."""
        payload = compressor.encode(flat, turn)
        summed = self._workspace.take("summed", payload.values.numel(), torch.float32, flat.device)
        turn.channel.all_reduce(summed.copy_(payload.values))
        out.zero_().index_add_(0, payload.indices, summed)
        return payload


class Selected(Compressor[SparsePayload]):
    """Hands a selection on that was made before."""

    def __init__(self, payload: SparsePayload) -> None:
        self._payload = payload

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """That selection (see `Compressor`)."""
        return self._payload


class Levels:
    """A chain (see `hetopt.trainer.comm.compressor.Chain`) that chooses between three payloads in every step.

    Args:
        nested: makes the floor's selection, and the candidate's of it.
        collective: that carries either.
        least_gain: eps.
        seed: of all randomness, the same on every worker.

    Attributes:
        gains: of the candidate and of the floor in the step before, of all workers; absent before the first.
    """

    def __init__(self, nested: MultiLevel, collective: Collective, *, least_gain: float, seed: int = 0) -> None:
        self._nested = nested
        self._collective = collective
        self._least_gain = least_gain
        self._seed = seed
        self.counts_steps = nested.counts_steps
        self.gains: tuple[float, float] | None = None

    def run(self, flat: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum over all workers into ``out``, the same bits on each (see `Chain.run`).

        A NaN keeps nothing, so everything is sent and seen.
        """
        turn = Turn(channel, step, self._seed)
        floor, candidate = self._nested.both(flat, turn)
        there = flat.new_tensor([energy(candidate.values), energy(floor.values), energy(flat)])
        channel.all_reduce(there)
        kept, kept_by_floor, whole = there.tolist()
        self.gains = (1.0, 1.0) if whole == 0 else (kept / whole, kept_by_floor / whole)
        for payload, gain in zip((candidate, floor), self.gains, strict=True):
            if gain >= self._least_gain:
                return self._collective.run(Selected(payload), flat, out, turn)
        return AllReduce().run(Identity(), flat, out, turn)

    def state(self) -> State:
        """Nothing goes on from step to step."""
        return {}

    def load_state(self, state: State) -> None:
        """There is nothing."""
