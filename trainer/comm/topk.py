"""Compressors that send some elements of a gradient: exact Top-k, thresholds, GraVAC's levels; and their wire format.

Top-k is found without sorting; thresholds are sampled (DGC) or bisected (RedSync, MSTopk).

**GraVAC** (`Levels`; Tyagi and Swany, arXiv 2305.12201, algorithm 1) sends a selection, the floor that it was selected
from, or everything, by the energy that each keeps. The floor's selection looks at the whole gradient,
and the candidate's at the floor's elements alone:

    g_min = C(g, theta_min)                 the floor, factor theta_min
    g_c   = C(g_min, theta_s)               the candidate, factor theta_s theta_min
    d     = sum_r ||g_x,r||^2 / sum_r ||g_r||^2          for x in {c, min}, over all workers r
    send    g_c where d_c >= eps, else g_min where d_min >= eps, else g

Departure: gains are those of the step itself and of all workers, so that all of them decide alike, and nothing is ever
sent that keeps less than eps. The paper smooths each worker's own gains (by N/100): what a step sends may keep less.

**On the wire** selected elements are gathered with their indices, or summed at indices that all workers share. Those
are shared where all workers draw them from one seed (random-k), or where one worker's Top-k is everyone's choice
(AR-Topk, arXiv 2312.02493): in turn (STAR), or by the energy of the choice (VAR). Then values can be summed on the way,
and every worker's residual keeps what the *shared* indices left out of its own gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetopt.core.comm.composition import PACKED_BF16, PLAIN, STAR, VAR
from hetopt.core.comm.payload_bytes import (
    MANY_WORKERS,
    MAX_INDEXED_ELEMENTS,
    element_bytes,
    index_bytes,
    kept_elements,
    low_index_bits,
)
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import (
    AllReduce,
    Chain,
    Compressor,
    Identity,
    Payload,
    SparsePayload,
    Turn,
    shared_generator,
)
from hetopt.trainer.comm.vectors import (
    Workspace,
    bit_values,
    blocks,
    energy,
    largest_magnitude,
    look_up,
    mean_magnitude,
    pack_codes,
    pack_flags,
    unpack_flags,
)


@dataclass(frozen=True, slots=True)
class ElementCoding:
    """Byte format of a sparse payload: the values, fp32 or bf16, then the indices, int32 or packed.

    Both sides know how many ascending indices there are, of how many elements. Plain ones are int32. Packed ones are
    Elias and Fano's code of an ascending sequence: about ``2 + log2(n / k)`` bits each instead of 32. The lower bits of
    every index are stored as they are. The upper parts only ever grow: a string of bits has a 1 for every index and a 0
    wherever the upper part grows by one. At 1 % of the elements that is 9.4 bits an index, at 10 % 5.6, within a bit of
    what any code could do for a random choice. (Elias 1974, Fano 1971.)

    Attributes:
        name: plain, or packed with fp32 or bf16 values: one of `composition.CODINGS`.
    """

    name: str = PLAIN

    @property
    def values(self) -> torch.dtype:
        """The type of values on the wire."""
        return torch.bfloat16 if self.name == PACKED_BF16 else torch.float32

    def rounded(self, payload: SparsePayload) -> SparsePayload:
        """Return a payload with values rounded to the type that is sent, stored as fp32; the residual keeps the rest.

        An infinity may come of the largest numbers of fp32.
        """
        return replace(payload, values=payload.values.to(self.values).float())

    def write(self, payload: SparsePayload, out: Tensor) -> None:
        """Write a payload into ``out``, uint8 of at least `element_bytes`; its values must be `rounded` already."""
        split = payload.values.numel() * self.values.itemsize
        out[:split].view(self.values).copy_(payload.values)
        self.write_indices(payload.indices, payload.numel, out[split:])

    def read(self, data: Tensor, numel: int, count: int) -> SparsePayload:
        """Return the payload of ``count`` of ``numel`` elements at the start of ``data``, uint8; may share memory."""
        split = count * self.values.itemsize
        indices = self.read_indices(data[split:], numel, count)
        return SparsePayload(indices=indices, values=data[:split].view(self.values).float(), numel=numel)

    def write_indices(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Write ascending int32 indices below ``numel`` to the start of ``out``, uint8, as they are or packed.

        The first `index_bytes` bytes of ``out`` are written.
        """
        count, low = indices.numel(), low_index_bits(numel, indices.numel())
        out = out[: index_bytes(numel, count, self.name)]
        if self.name == PLAIN:
            out.copy_(indices.view(torch.uint8))
            return
        split = -(-count * low // 8)
        if low:
            pack_codes(indices.bitwise_and(2**low - 1).to(torch.uint8), low, out[:split])
        flags = torch.zeros(count + (numel >> low) + 1, dtype=torch.bool, device=indices.device)
        flags[(indices >> low) + torch.arange(count, device=indices.device)] = True
        pack_flags(flags, out[split:])

    def read_indices(self, data: Tensor, numel: int, count: int) -> Tensor:
        """Return the ``count`` int32 indices below ``numel`` that `write_indices` wrote at the start of ``data``."""
        data = data[: index_bytes(numel, count, self.name)]
        if self.name == PLAIN:
            return data.view(torch.int32)
        low = low_index_bits(numel, count)
        split = -(-count * low // 8)
        places = unpack_flags(data[split:], count + (numel >> low) + 1).nonzero().squeeze(1)
        upper = places.sub_(torch.arange(count, device=data.device)).to(torch.int32)
        if not low:
            return upper
        lower = look_up(data[:split], bit_values(torch.arange(2**low, dtype=torch.int32), low).to(data.device), count)
        return upper.bitwise_left_shift_(low).bitwise_or_(lower)


class AllGather:
    """Collective that gathers all workers' sparse payloads and adds them in rank order, to the same bits on each.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.

    Args:
        coding: coding of the elements in the message.
        same_size: whether all payloads have the same number of elements. Otherwise lengths are gathered first, and all
            are padded to the longest; nothing of the padding is read.
    """

    def __init__(self, coding: ElementCoding = ElementCoding(), *, same_size: bool = True) -> None:
        self._coding = coding
        self._same_size = same_size
        self._workspace = Workspace()

    def run(self, compressor: Compressor[SparsePayload], flat: Tensor, out: Tensor, turn: Turn) -> SparsePayload:
        """Compress ``flat``, gather, write the sum into ``out``; return this worker's payload. All must call it.

        Args:
            compressor: a selection of elements.
            flat: 1-D fp32, not empty; left as it is.
            out: 1-D fp32, as long; overwritten.
            turn: this worker's channel, step and seed.
        """
        return self.gather(compressor.encode(flat, turn), out, turn)

    def gather(self, payload: SparsePayload, out: Tensor, turn: Turn) -> SparsePayload:
        """Write the sum of all workers' payloads into ``out``; all must call it.

        Returns:
            This worker's payload, with its values rounded as they were sent.
        """
        channel, coding = turn.channel, self._coding
        payload = coding.rounded(payload)
        count, numel, device = payload.indices.numel(), payload.numel, payload.indices.device
        lengths = [count] * channel.workers
        if not self._same_size:
            count_tensor = torch.tensor([count], dtype=torch.int32, device=device)
            lengths = [int(each) for each in channel.all_gather(count_tensor).flatten().tolist()]
        size = element_bytes(numel, max(lengths), coding.name)
        message = self._workspace.take("message", size, torch.uint8, device)
        coding.write(payload, message)
        gathered = self._workspace.take("received", channel.workers * size, torch.uint8, device)
        received = channel.all_gather(message, gathered)
        out.zero_()
        for data, length in zip(received, lengths, strict=True):
            coding.read(data, numel, length).add_to(out)
        return payload


class RandomElements:
    """Choice of k of n elements at random, the same on all workers; each is as likely as any other, k / n.

    The vector is cut into k strata whose sizes differ by one at most, each gives one element, and the whole is turned
    by a random number of places so that members of small strata have no advantage. Drawing is then O(k); a permutation
    of n indices would cost more than the exchange it is for.

    In rotation each stratum is walked through from a random place instead: every element comes once in each
    ``ceil(n / k)`` steps or one less, as Global Random-k of arXiv 2109.12497 consumes a permutation, but without
    keeping one.

    Args:
        ratio: fraction of the elements, in (0, 1].
        rotates: whether elements come in turn, so that none is missed for long; else each step draws anew.
    """

    def __init__(self, ratio: float, *, rotates: bool = False) -> None:
        self._ratio = ratio
        self._rotates = rotates

    def choose(self, flat: Tensor, turn: Turn) -> Tensor:
        """Return this step's random int32 indices, the same on all workers; if it rotates, the next of each stratum."""
        numel = flat.numel()
        count = kept_elements(numel, self._ratio)
        bounds = torch.arange(count + 1) * numel // count
        starts, sizes = bounds[:-1], bounds.diff()
        generator = shared_generator(turn.seed, -1 if self._rotates else turn.step)  # no exchange has the step -1
        first = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        if self._rotates:
            places = starts + (first + turn.step) % sizes
        else:
            places = (starts + first + torch.randint(numel, (1,), generator=generator)) % numel
        return places.to(device=flat.device, dtype=torch.int32)


class SharedSelection:
    """Choice of the elements that one worker's compressor selects for all: in turn, or by most energy (AR-Topk).

    STAR: workers choose in turn; only one of them selects, and each waits N steps for its turn. VAR: the worker chooses
    whose selection holds most energy, which takes a gather of four bytes in every step. Else in turn, but above 32
    workers, where turns come too rarely, by most energy.

    Args:
        collective: rule for who chooses: `STAR`, `VAR` or `AR_TOPK`.
        compressor: selects ``count`` elements, always.
        count: number of elements that the compressor selects.
        coding: byte format of the indices on their way.
    """

    def __init__(
        self, collective: str, compressor: Compressor[SparsePayload], *, count: int, coding: ElementCoding
    ) -> None:
        self._collective = collective
        self._compressor = compressor
        self._count = count
        self._coding = coding
        self._workspace = Workspace()

    def choose(self, flat: Tensor, turn: Turn) -> Tensor:
        """Return the int32 indices that one worker selects and broadcasts in this step; all workers must call it.

        In an election norms are gathered rather than energies, whose range may exceed that of fp32. Of equals the
        lowest rank wins; a NaN wins over everything, and is seen by all. The selecting worker is rank ``step mod
        workers``; with `VAR`, or without `STAR` among more than `MANY_WORKERS`, the one whose selection has the largest
        norm is elected.
        """
        channel, numel, coding = turn.channel, flat.numel(), self._coding
        is_elected = self._collective == VAR or (self._collective != STAR and channel.workers > MANY_WORKERS)
        source, selection = turn.step % channel.workers, None
        if is_elected or channel.rank == source:
            selection = self._compressor.encode(flat, turn)
        if is_elected and selection is not None:
            source = int(channel.all_gather(flat.new_tensor([math.sqrt(energy(selection.values))])).argmax())
        message = self._workspace.take(
            "message", index_bytes(numel, self._count, coding.name), torch.uint8, flat.device
        )
        if selection is not None and channel.rank == source:
            coding.write_indices(selection.indices, numel, message)
        channel.broadcast(message, source)
        return coding.read_indices(message, numel, self._count)


SAMPLE_SIZE = 65_536


class Selection(Compressor[SparsePayload]):
    """Base of compressors that send a fraction of the gradient's elements as they are, with their indices.

    Args:
        ratio: fraction of the elements, in (0, 1].
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio


class TopK(Selection):
    """Compressor to the ``kept_elements(numel, ratio)`` elements of largest magnitude of the whole gradient.

    One selection over all parameters, not one a layer: a per-layer k starves layers with large gradients (arXiv
    2312.02493).
    """

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Return the elements of largest magnitude, in ascending order of index; the same for the same gradient.

        Raises:
            ValueError: the gradient has more elements than an int32 index can count.
        """
        return select(flat, largest_magnitudes(flat, kept_elements(flat.numel(), self.ratio)))


def select(flat: Tensor, indices: Tensor) -> SparsePayload:
    """Return the payload of a gradient's elements at these indices, unchanged."""
    return SparsePayload(indices=indices.to(torch.int32), values=flat.index_select(0, indices), numel=flat.numel())


def largest_magnitudes(flat: Tensor, k: int) -> Tensor:
    """Return ascending int64 indices of the k elements of largest ``|value|``; a NaN counts as the largest.

    `torch.topk` on a CPU carries an index along with every element. Instead, a threshold that about k elements and a
    safety margin should pass is read off a sample; one pass keeps the elements that do pass, and `torch.topk` chooses
    among those few. The number of survivors is checked: when the sample misled, `torch.topk` sees everything after
    all. A GPU selects fast enough on its own.

    Raises:
        ValueError: k is not between 1 and the number of elements, or there are more than an int32 index can count.
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
    """Return a magnitude, estimated from a sample, that k elements very likely exceed, though not many more than k.

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
    """Return ascending indices and magnitudes of the elements of ``|value| >= threshold``, NaN included.

    Empty where none is.
    """
    indices, magnitudes = [], []
    for block in blocks(flat.numel(), flat.device):
        chunk = flat[block].abs()
        passed = chunk.lt(threshold).logical_not_().nonzero().squeeze(1)
        magnitudes.append(chunk.index_select(0, passed))
        indices.append(passed.add_(block.start))
    return torch.cat(indices), torch.cat(magnitudes)


def top_mask(magnitudes: Tensor, k: int) -> Tensor:
    """Return a bool mask of the k largest of 1-D magnitudes; a NaN counts as the largest."""
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[torch.topk(magnitudes, k, sorted=False).indices] = True
    return mask


class ThresholdSelection(Selection):
    """Base of selections of the elements not below a threshold; their number may differ between workers."""

    def encode(self, flat: Tensor, turn: Turn) -> SparsePayload:
        """Return the elements not below a searched threshold; those of Top-k if none is found or all are sent."""
        k = kept_elements(flat.numel(), self.ratio)
        indices = None if k == flat.numel() else self.search(flat, k, turn)
        return TopK(self.ratio).encode(flat, turn) if indices is None else select(flat, indices)

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return ascending indices of about k elements, fewer than all; None: Top-k decides. Subclasses define it.

        Args:
            flat: gradient, 1-D fp32.
            k: number of elements that are asked for, below all.
            turn: this worker's step and seed.

        Raises:
            NotImplementedError: the subclass has none.
        """
        raise NotImplementedError


def bisect(flat: Tensor, k: int, most: int, rounds: int) -> tuple[float | None, float | None]:
    """Search by bisection a threshold that k to ``most`` magnitudes reach; return it and None, or two bounds.

    Args:
        flat: 1-D fp32.
        k: fewest magnitudes that are to reach the threshold.
        most: most magnitudes that may reach it.
        rounds: bisections before giving up.

    Returns:
        (threshold, None) where one is found. Else two bounds: the highest threshold tried that more than ``most``
        elements reach (None: none was tried), and the lowest that fewer than k reach (infinity: none was tried). (None,
        None): magnitudes are all alike, or not finite, and nothing was tried.
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
    """Selection of DGC: the elements not below a threshold estimated from 1 %, corrected until 0.7 k to 1.3 k pass.

    While more than 1.3 k elements pass, the threshold is raised by 1.3, and lowered by 0.7 while fewer than 0.7 k do;
    after ten corrections (where many magnitudes are equal, or not finite) Top-k decides. So a payload has between
    0.7 k and 1.3 k elements. The released code does so layer by layer; here it is the whole gradient, for the reason
    that Top-k has. (Lin et al., arXiv 1712.01887; momentum is the residual's.)
    """

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return the indices of 0.7 k to 1.3 k elements not below a sampled threshold; None: Top-k decides.

        Args:
            flat: gradient, 1-D fp32.
            k: number of elements that are asked for.
            turn: this worker's step and seed, by which the sample is drawn.
        """
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
    """Selection of RedSync: the elements not below ``mean + r (max - mean)``, r bisected until k to 2 k pass.

    Where no such r is found in twenty rounds, or k elements are more than lie above the mean, Top-k decides: the
    released code stops after three rounds, with any number of elements. (Fang et al., arXiv 1808.04357.)
    """

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return the indices of k to 2 k elements not below a bisected threshold; None: Top-k decides.

        Args:
            flat: gradient, 1-D fp32.
            k: number of elements that are asked for.
            turn: not used.
        """
        lower, upper = bisect(flat, k, 2 * k, REDSYNC_ROUNDS)
        return None if lower is None or upper is not None else not_below(flat, lower)[0]


MSTOPK_ROUNDS = 25


class MsTopK(ThresholdSelection):
    """Selection of MSTopk: the elements above the upper of two thresholds, filled up to k from between them.

    Both thresholds close in on k elements in 25 rounds of bisecting ``mean + r (max - mean)``. What fills up is a run
    of neighbours at a random place, which never reaches past the end (it does in the released code). (Shi et al.,
    "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458.)
    """

    def search(self, flat: Tensor, k: int, turn: Turn) -> Tensor | None:
        """Return the ascending indices of exactly k elements, the last ones at random; None: Top-k decides.

        Args:
            flat: gradient, 1-D fp32.
            k: number of elements that are asked for.
            turn: this worker's step and seed, by which the last ones are drawn.
        """
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
    """Return the sum of squares of the k elements of largest magnitude of ``flat``, for each k in ``counts``.

    One sort serves all counts: Top-k is an orthogonal projection, so energies of nested selections are prefix sums.

    Args:
        flat: 1-D fp32, finite.
        counts: each between 1 and the number of elements.

    Raises:
        ValueError: a count is below 1, or there are more elements than an int32 index can count.
    """
    whole = energy(flat)
    most = max((count for count in counts if count < flat.numel()), default=1)
    largest = flat.index_select(0, largest_magnitudes(flat, most)).abs().sort(descending=True).values
    prefixes = largest.double().square_().cumsum_(0)
    return tuple(whole if count >= flat.numel() else min(whole, float(prefixes[count - 1])) for count in counts)


class Levels(Chain):
    """Compression that sends a strong selection, a weaker one or everything, by the energy that each keeps (GraVAC).

    The candidate is selected from a first, larger selection, the floor: so only that looks at the whole gradient. Of
    nested selections such as Top-k this gives what selecting at once would. What is sent is the first of candidate and
    floor that keeps enough energy, of all workers, else everything. (GraVAC: Tyagi and Swany, arXiv 2305.12201.)

    Args:
        select: makes the compressor of a ratio.
        ratio: fraction of the elements that the candidate keeps; at or above the floor's, the candidate is selected at
            once.
        floor_ratio: fraction of the elements that the floor keeps.
        gather: collective that carries either.
        least_gain: fraction of all workers' energy that must be kept (eps).
        seed: seed of all randomness, the same on every worker.

    Attributes:
        gains: fractions of all workers' energy that candidate and floor kept in the step before; None before the first.
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
        self._first, self._gather = select(max(ratio, floor_ratio)), gather
        super().__init__(self._first, gather, seed=seed)
        self._select = select
        self._ratio = ratio
        self._is_direct = ratio >= floor_ratio
        self._least_gain = least_gain
        self.gains: tuple[float, float] | None = None

    def run(self, flat: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum of all workers' ``flat`` into ``out``; return what this worker sent. All must call it.

        Sent is the first of the ratio's selection, the floor's and the whole gradient that keeps at least
        ``least_gain`` of the energy of all workers; `gains` says afterwards what the first two kept. With a NaN
        everything is sent.

        Args:
            flat: 1-D fp32, not empty, this worker's gradient with its residual.
            out: 1-D fp32, as long; overwritten.
            channel: channel to the other workers.
            step: number of the step, the same on all workers.
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
