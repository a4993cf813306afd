"""Selected elements on the wire: gathered with their indices, or summed at indices that all workers share.

Indices are shared where all workers draw them from one seed (random-k), or where one worker's Top-k is everyone's
choice (AR-Topk, arXiv 2312.02493): in turn (STAR), by the energy of the choice (VAR), or whichever of the two the
gradients call for. Then values can be summed on the way, and every worker's residual keeps what the *shared* indices
left out of its own gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hetopt.core.comm.composition import STAR, VAR
from hetopt.core.comm.payload_bytes import INDEX_BYTES, MANY_WORKERS, kept_elements, low_index_bits, packed_index_bytes
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Compressor, IndexChoice, SparsePayload, State, Turn, shared_generator
from hetopt.trainer.comm.vectors import Workspace, bit_values, energy, look_up, pack_codes, pack_flags, unpack_flags


@dataclass(frozen=True, slots=True)
class PlainIndices:
    """Indices as int32, four bytes each."""

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` indices: four each."""
        return INDEX_BYTES * count

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Copy the indices unchanged (see `IndexCoding`)."""
        out.copy_(indices.view(torch.uint8))

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """The bytes as int32 indices (see `IndexCoding`)."""
        return data.view(torch.int32)


@dataclass(frozen=True, slots=True)
class PackedIndices:
    """Elias and Fano's code of an ascending sequence: about ``2 + log2(n / k)`` bits each instead of 32.

    The lower bits of every index are stored as they are. The upper parts only ever grow: a string of bits has a 1 for
    every index and a 0 wherever the upper part grows by one. At 1 % of the elements that is 9.4 bits an index, at 10 %
    5.6, within a bit of what any code could do for a random choice. (Elias 1974, Fano 1971.)
    """

    def nbytes(self, numel: int, count: int) -> int:
        """See `wire.packed_index_bytes`."""
        return packed_index_bytes(numel, count)

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Lower parts, then the string of upper ones (see `IndexCoding`)."""
        count, low = indices.numel(), low_index_bits(numel, indices.numel())
        split = -(-count * low // 8)
        if low:
            pack_codes(indices.bitwise_and(2**low - 1).to(torch.uint8), low, out[:split])
        flags = torch.zeros(count + (numel >> low) + 1, dtype=torch.bool, device=indices.device)
        flags[(indices >> low) + torch.arange(count, device=indices.device)] = True
        pack_flags(flags, out[split:])

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """Count the zeros before every one (see `IndexCoding`)."""
        low = low_index_bits(numel, count)
        split = -(-count * low // 8)
        ones = unpack_flags(data[split:], count + (numel >> low) + 1).nonzero().squeeze(1)
        upper = ones.sub_(torch.arange(count, device=data.device)).to(torch.int32)
        if not low:
            return upper
        lower = look_up(data[:split], bit_values(torch.arange(2**low, dtype=torch.int32), low).to(data.device), count)
        return upper.bitwise_left_shift_(low).bitwise_or_(lower)


IndexCoding: TypeAlias = PlainIndices | PackedIndices
"""Writes ascending indices into bytes, and reads them back; both sides know how many there are, of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementCoding:
    """Writes a sparse payload into bytes: values first, so that they lie at a multiple of four bytes, then indices."""

    indices: IndexCoding
    values: torch.dtype

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` elements of a gradient of ``numel``, in whole words of four."""
        return -(-(count * self.values.itemsize + self.indices.nbytes(numel, count)) // 4) * 4

    def rounded(self, payload: SparsePayload) -> SparsePayload:
        """Round values to their type: then this is what was sent, and the rest is the residual.

        An infinity may come of the largest numbers of fp32.
        """
        return replace(payload, values=payload.values.to(self.values).float())

    def write(self, payload: SparsePayload, out: Tensor) -> None:
        """Into ``out``, uint8 of at least `nbytes`; values must fit their type, as `rounded` makes them."""
        count = payload.values.numel()
        split = count * self.values.itemsize
        out[:split].view(self.values).copy_(payload.values)
        self.indices.write(
            payload.indices, payload.numel, out[split : split + self.indices.nbytes(payload.numel, count)]
        )

    def read(self, data: Tensor, numel: int, count: int) -> SparsePayload:
        """The payload of ``count`` elements that ``data`` begins with; it may share memory with it."""
        split = count * self.values.itemsize
        indices = self.indices.read(data[split : split + self.indices.nbytes(numel, count)], numel, count)
        return SparsePayload(indices=indices, values=data[:split].view(self.values).float(), numel=numel)


PLAIN = ElementCoding(indices=PlainIndices(), values=torch.float32)


class AllGather:
    """One all-gather of elements with their indices; payloads are accumulated in rank order.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.

    Args:
        coding: of the elements in the message.
        same_size: whether all payloads have the same number of elements. Otherwise lengths are gathered first, and all
            are padded to the longest; nothing of the padding is read.
    """

    def __init__(self, coding: ElementCoding = PLAIN, *, same_size: bool = True) -> None:
        self._coding = coding
        self._same_size = same_size
        self._workspace = Workspace()

    def run(self, compressor: Compressor[SparsePayload], flat: Tensor, out: Tensor, turn: Turn) -> SparsePayload:
        """Compress, gather, and sum on arrival (see `Collective`)."""
        return self.gather(compressor.encode(flat, turn), out, turn)

    def gather(self, payload: SparsePayload, out: Tensor, turn: Turn) -> SparsePayload:
        """Write the sum of all workers' payloads into ``out``; returns what this one sent."""
        channel, coding = turn.channel, self._coding
        payload = coding.rounded(payload)
        count, numel, device = payload.indices.numel(), payload.numel, payload.indices.device
        lengths = [count] * channel.workers
        if not self._same_size:
            own = torch.tensor([count], dtype=torch.int32, device=device)
            lengths = [int(each) for each in channel.all_gather(own).flatten().tolist()]
        size = coding.nbytes(numel, max(lengths))
        message = self._workspace.take("message", size, torch.uint8, device)
        coding.write(payload, message)
        gathered = self._workspace.take("received", channel.workers * size, torch.uint8, device)
        received = channel.all_gather(message, gathered)
        out.zero_()
        for data, length in zip(received, lengths, strict=True):
            coding.read(data, numel, length).add_to(out)
        return payload


class RandomElements(IndexChoice):
    """k of n elements at random, without replacement; each is as likely as any other, k / n.

    The vector is cut into k strata whose sizes differ by one at most, each gives one element, and the whole is turned
    by a random number of places so that members of small strata have no advantage. Drawing is then O(k); a permutation
    of n indices would cost more than the exchange it is for.

    In rotation each stratum is walked through from a random place instead: every element comes once in each
    ``ceil(n / k)`` steps or one less, as Global Random-k of arXiv 2109.12497 consumes a permutation, but without
    keeping one.

    Args:
        ratio: fraction of the elements.
        rotates: whether elements come in turn.
    """

    def __init__(self, ratio: float, *, rotates: bool = False) -> None:
        self._ratio = ratio
        self._rotates = rotates

    def choose(self, flat: Tensor, turn: Turn) -> Tensor:
        """Drawn anew for each step, or the next element of each stratum (see `IndexChoice`)."""
        numel = flat.numel()
        starts, sizes = strata(numel, kept_elements(numel, self._ratio))
        generator = shared_generator(turn.seed, -1 if self._rotates else turn.step)  # no exchange has the step -1
        first = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        if self._rotates:
            places = starts + (first + turn.step) % sizes
        else:
            places = (starts + first + torch.randint(numel, (1,), generator=generator)) % numel
        return places.to(device=flat.device, dtype=torch.int32)


def strata(numel: int, count: int) -> tuple[Tensor, Tensor]:
    """Where ``count`` neighbouring strata of ``numel`` elements start, and their sizes, int64."""
    bounds = torch.arange(count + 1) * numel // count
    return bounds[:-1], bounds.diff()


LOOK_EVERY_STEPS = 16
SKEWED, EVEN = 2.0, 1.5
_WEIGHT = 0.5


class SharedSelection(IndexChoice):
    """Selects with a compressor of fixed size, and hands indices on: one worker's choice is that of all.

    STAR: workers choose in turn; only one of them selects, and each waits N steps for its turn. VAR: the worker chooses
    whose selection holds most energy, which takes a gather of four bytes in every step. Else turns while the workers'
    gradients are alike, elections while they are not, or where turns come too rarely: the skew, largest over mean
    energy of the workers' selections, is 1 where all are alike and N where one has it all. It is known in steps with an
    election, and every 16th step has one. Smoothed, it starts elections at 2 and ends them at 1.5. Above 32 workers
    there are only elections. (The paper conjectures both conditions and leaves switching to future work; the numbers
    are ours.)

    Args:
        collective: who chooses: `STAR`, `VAR` or `AR_TOPK`.
        compressor: selects ``count`` elements, always.
        count: how many that is.
        coding: of the indices on their way.
    """

    def __init__(
        self, collective: str, compressor: Compressor[SparsePayload], *, count: int, coding: IndexCoding
    ) -> None:
        self._collective = collective
        self._compressor = compressor
        self._count = count
        self._coding = coding
        self._workspace = Workspace()
        self._skew = 1.0
        self._electing = False

    def choose(self, flat: Tensor, turn: Turn) -> Tensor:
        """By turn or by election (see `IndexChoice`)."""
        looks = turn.step % LOOK_EVERY_STEPS == LOOK_EVERY_STEPS - 1
        asks = self._electing or looks or turn.channel.workers > MANY_WORKERS
        if self._collective == VAR or (self._collective != STAR and asks):
            return self._elected(flat, turn)
        source = turn.step % turn.channel.workers
        own = self._compressor.encode(flat, turn) if turn.channel.rank == source else None
        return self._hand_on(own, flat, turn.channel, source)

    def _elected(self, flat: Tensor, turn: Turn) -> Tensor:
        """The indices of the worker whose selection holds most energy.

        Norms are gathered rather than energies, whose range may exceed that of fp32. Of equals the lowest rank wins;
        a NaN wins over everything, and is seen by all.
        """
        own = self._compressor.encode(flat, turn)
        norms = turn.channel.all_gather(flat.new_tensor([math.sqrt(energy(own.values))])).flatten().cpu()
        source = int(norms.argmax())
        energies = norms.double().square()
        mean = float(energies.mean())
        skew = float(energies[source]) / mean if mean > 0 else 1.0
        if math.isfinite(skew):
            self._skew += _WEIGHT * (skew - self._skew)
        self._electing = self._skew > (EVEN if self._electing else SKEWED)
        return self._hand_on(own, flat, turn.channel, source)

    def _hand_on(self, own: SparsePayload | None, flat: Tensor, channel: Channel, source: int) -> Tensor:
        numel = flat.numel()
        size = self._coding.nbytes(numel, self._count)
        message = self._workspace.take("message", size, torch.uint8, flat.device)
        if own is not None and channel.rank == source:
            self._coding.write(own.indices, numel, message)
        channel.broadcast(message, source)
        return self._coding.read(message, numel, self._count)

    def state(self) -> State:
        """The smoothed skew, and whether elections are on; nothing where who chooses is settled."""
        if self._collective in (STAR, VAR):
            return {}
        return {"skew": torch.tensor(self._skew, dtype=torch.float64), "electing": torch.tensor(self._electing)}

    def load_state(self, state: State) -> None:
        """Go on with the saved skew and election."""
        if state:
            self._skew, self._electing = float(state["skew"]), bool(state["electing"])
