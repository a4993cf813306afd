"""Selected elements on the wire: gathered with their indices, or summed at indices that all workers share.

Indices are shared where all workers draw them from one seed (random-k), or where one worker's Top-k is everyone's
choice (AR-Topk, arXiv 2312.02493): in turn (STAR), by the energy of the choice (VAR), or whichever of the two the
gradients call for. Then values can be summed on the way, and every worker's residual keeps what the *shared* indices
left out of its own gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from hetopt.core.comm.payload_bytes import INDEX_BYTES, MANY_WORKERS, kept_elements, low_index_bits, packed_index_bytes
from hetopt.trainer.comm.bits import bit_values, look_up, pack_codes, pack_flags, unpack_flags
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import (
    Aggregation,
    Carries,
    Compressor,
    DensePayload,
    MemoryState,
    Payload,
    SparsePayload,
    Stateless,
    private_generator,
    shared_generator,
)
from hetopt.trainer.comm.vectors import Workspace, energy


class IndexCoding(Protocol):
    """Writes ascending indices into bytes, and reads them back; both sides know how many there are, of how many."""

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` indices below ``numel``."""
        ...

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """Into ``out``, uint8 of `nbytes`."""
        ...

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """The int32 indices in ``data``, uint8 of `nbytes`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainIndices:
    """Four bytes each."""

    def nbytes(self, numel: int, count: int) -> int:
        """Four times the count."""
        return INDEX_BYTES * count

    def write(self, indices: Tensor, numel: int, out: Tensor) -> None:
        """As they are (see `IndexCoding`)."""
        out.copy_(indices.view(torch.uint8))

    def read(self, data: Tensor, numel: int, count: int) -> Tensor:
        """As they are (see `IndexCoding`)."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementCoding:
    """Writes a sparse payload into bytes: values first, so that they lie at a multiple of four bytes, then indices."""

    indices: IndexCoding
    values: torch.dtype

    def nbytes(self, numel: int, count: int) -> int:
        """Bytes of ``count`` elements of a gradient of ``numel``, in whole words of four."""
        return -(-(count * self.values.itemsize + self.indices.nbytes(numel, count)) // 4) * 4

    def write(self, payload: SparsePayload, out: Tensor) -> None:
        """Into ``out``, uint8 of at least `nbytes`; values must fit their type, as `NarrowValues` makes them."""
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


class NarrowValues:
    """Rounds what a compressor selects to a narrower type: then this is what was sent, and the rest is remembered."""

    def __init__(self, inner: Compressor[SparsePayload], dtype: torch.dtype) -> None:
        self._inner = inner
        self._dtype = dtype

    @property
    def name(self) -> str:
        """The inner compressor's."""
        return self._inner.name

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """The inner compressor's choice, rounded; an infinity may come of the largest numbers of fp32."""
        chosen = self._inner.compress(flat, ratio, generator)
        return SparsePayload(indices=chosen.indices, values=chosen.values.to(self._dtype).float(), numel=chosen.numel)


PLAIN = ElementCoding(indices=PlainIndices(), values=torch.float32)


class SparseAllGather:
    """One all-gather of elements with their indices; payloads are accumulated in rank order.

    Workers choose different elements, so payloads overlap in places that only the receiver knows. Floating-point sums
    depend on their order: every worker adds rank 0's payload first, then rank 1's, ..., and all hold the same bits.
    All payloads have the same number of elements; `PaddedSparseAllGather` is for those that do not.

    Args:
        coding: of the elements in the message.
    """

    def __init__(self, coding: ElementCoding = PLAIN) -> None:
        self._coding = coding
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        lengths = [payload.indices.numel()] * channel.workers
        _gather_and_sum(payload, lengths, out, channel, self._coding, self._workspace)


class PaddedSparseAllGather:
    """The same for payloads of any length: lengths are gathered first, and all are padded to the longest.

    Nothing of the padding is read, so no element is met by zeros that somebody made up.

    Args:
        coding: of the elements in the message.
    """

    def __init__(self, coding: ElementCoding = PLAIN) -> None:
        self._coding = coding
        self._workspace = Workspace()

    def run(self, payload: SparsePayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        length = torch.tensor([payload.indices.numel()], dtype=torch.int32, device=payload.indices.device)
        lengths = [int(count) for count in channel.all_gather(length).flatten().tolist()]
        _gather_and_sum(payload, lengths, out, channel, self._coding, self._workspace)


def _gather_and_sum(
    payload: SparsePayload,
    lengths: list[int],
    out: Tensor,
    channel: Channel,
    coding: ElementCoding,
    workspace: Workspace,
) -> None:
    size, device = coding.nbytes(payload.numel, max(lengths)), payload.indices.device
    message = workspace.take("message", size, torch.uint8, device)
    coding.write(payload, message)
    received = channel.all_gather(message, workspace.take("received", channel.workers * size, torch.uint8, device))
    out.zero_()
    for data, length in zip(received, lengths, strict=True):
        coding.read(data, payload.numel, length).add_to(out)


class IndexChoice(Carries, Protocol):
    """Says which elements are exchanged in this step."""

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """Distinct int32 indices, the same on every worker, as many in every step."""
        ...


class IndexedSum:
    """Exchanges the values at chosen indices through another aggregation; all other elements of the sum are zero.

    Args:
        choice: of the indices.
        values: how the values at them are summed.
        scale: of what is sent: the inverse of the chance to be chosen, where nothing remembers what was not.
    """

    counts_steps = True

    def __init__(self, *, choice: IndexChoice, values: Aggregation, scale: float = 1.0) -> None:
        self._choice = choice
        self._values = values
        self._scale = scale
        self._workspace = Workspace()

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Choose, sum the values (see `Aggregation`)."""
        indices = self._choice.choose(prepared, channel, step)
        values = prepared.index_select(0, indices)
        if self._scale != 1.0:
            values.mul_(self._scale)
        summed = self._workspace.take("summed", values.numel(), torch.float32, values.device)
        sent = self._values.run(values, summed, channel, step)
        out.zero_().index_add_(0, indices, summed)
        return SparsePayload(
            indices=indices,
            values=values if isinstance(sent, DensePayload) else sent.dense(),
            numel=prepared.numel(),
        )

    def state(self) -> MemoryState:
        """The choice's; values are summed anew in every step."""
        return self._choice.state()

    def load_state(self, state: MemoryState) -> None:
        """The choice's."""
        self._choice.load_state(state)


_ROTATION = -1  # the step that offsets of a rotation are drawn for; no exchange has it


class RandomElements(Stateless):
    """k of n elements at random, without replacement; each is as likely as any other, k / n.

    The vector is cut into k strata whose sizes differ by one at most, each gives one element, and the whole is turned
    by a random number of places so that members of small strata have no advantage. Drawing is then O(k); a permutation
    of n indices would cost more than the exchange it is for.

    Args:
        ratio: fraction of the elements.
        seed: the same on every worker.
    """

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._seed = seed

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """Drawn anew for each step (see `IndexChoice`)."""
        numel = prepared.numel()
        starts, sizes = strata(numel, kept_elements(numel, self._ratio))
        generator = shared_generator(self._seed, step)
        places = starts + (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        turn = torch.randint(numel, (1,), generator=generator)
        return ((places + turn) % numel).to(device=prepared.device, dtype=torch.int32)


class RotatingElements(Stateless):
    """k of n elements in turn: every element comes once in each ``ceil(n / k)`` steps or one less, at a random time.

    Without replacement over steps, as Global Random-k of arXiv 2109.12497 consumes a permutation, but without keeping
    one: each of k strata is walked through from a random place.

    Args:
        ratio: fraction of the elements.
        seed: the same on every worker.
    """

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._seed = seed

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """The next element of each stratum (see `IndexChoice`)."""
        numel = prepared.numel()
        starts, sizes = strata(numel, kept_elements(numel, self._ratio))
        generator = shared_generator(self._seed, _ROTATION)
        first = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        return (starts + (first + step) % sizes).to(device=prepared.device, dtype=torch.int32)


def strata(numel: int, count: int) -> tuple[Tensor, Tensor]:
    """Where ``count`` neighbouring strata of ``numel`` elements start, and their sizes, int64."""
    bounds = torch.arange(count + 1) * numel // count
    return bounds[:-1], bounds.diff()


LOOK_EVERY_STEPS = 16
SKEWED, EVEN = 2.0, 1.5
_WEIGHT = 0.5


class SharedSelection:
    """Selects with a compressor of fixed size, and hands indices on.

    Args:
        compressor: selects ``count`` elements, always.
        ratio: fraction of the elements.
        count: how many that is.
        seed: of the compressor's randomness, if it has any.
        coding: of the indices on their way.
    """

    def __init__(
        self,
        compressor: Compressor[SparsePayload],
        *,
        ratio: float,
        count: int,
        seed: int = 0,
        coding: IndexCoding | None = None,
    ) -> None:
        self._compressor = compressor
        self._ratio = ratio
        self._count = count
        self._seed = seed
        self._coding: IndexCoding = coding if coding is not None else PlainIndices()
        self._workspace = Workspace()

    def in_turn(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """The indices of the worker whose turn it is; nobody else selects."""
        source = step % channel.workers
        own = self._select(prepared, channel, step) if channel.rank == source else None
        return self._hand_on(own, prepared, channel, source)

    def elected(self, prepared: Tensor, channel: Channel, step: int) -> tuple[Tensor, float]:
        """The indices of the worker whose selection holds most energy, and the skew: its energy over the mean.

        Norms are gathered rather than energies, whose range may exceed that of fp32. Of equals the lowest rank wins;
        a NaN wins over everything, and is seen by all.
        """
        own = self._select(prepared, channel, step)
        norms = channel.all_gather(prepared.new_tensor([math.sqrt(energy(own.values))])).flatten().cpu()
        source = int(norms.argmax())
        energies = norms.double().square()
        mean = float(energies.mean())
        skew = float(energies[source]) / mean if mean > 0 else 1.0
        return self._hand_on(own, prepared, channel, source), skew

    def _select(self, prepared: Tensor, channel: Channel, step: int) -> SparsePayload:
        """This worker's own choice."""
        generator = private_generator(self._seed, channel.rank, step, prepared.device)
        return self._compressor.compress(prepared, self._ratio, generator)

    def _hand_on(self, own: SparsePayload | None, prepared: Tensor, channel: Channel, source: int) -> Tensor:
        numel = prepared.numel()
        size = self._coding.nbytes(numel, self._count)
        message = self._workspace.take("message", size, torch.uint8, prepared.device)
        if own is not None and channel.rank == source:
            self._coding.write(own.indices, numel, message)
        channel.broadcast(message, source)
        return self._coding.read(message, numel, self._count)


class Star(Stateless):
    """Workers choose in turn: no election, and only one of them selects; each waits N steps for its turn."""

    def __init__(self, shared: SharedSelection) -> None:
        self._shared = shared

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """Step modulo workers (see `IndexChoice`)."""
        return self._shared.in_turn(prepared, channel, step)


class Var(Stateless):
    """The worker chooses whose selection holds most energy: a gather of four bytes in every step."""

    def __init__(self, shared: SharedSelection) -> None:
        self._shared = shared

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """By election (see `IndexChoice`)."""
        return self._shared.elected(prepared, channel, step)[0]


class StarOrVar:
    """Turns while the workers' gradients are alike, elections while they are not, or where turns come too rarely.

    The skew, largest over mean energy of the workers' selections, is 1 where all are alike and N where one has it all.
    It is known in steps with an election, and every 16th step has one. Smoothed, it starts elections at 2 and ends them
    at 1.5. Above 32 workers there are only elections. (The paper conjectures both conditions and leaves switching to
    future work; the numbers are ours.)
    """

    def __init__(self, shared: SharedSelection) -> None:
        self._shared = shared
        self._skew = 1.0
        self._electing = False

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """By turn or by election (see `IndexChoice`)."""
        many = channel.workers > MANY_WORKERS
        if not (many or self._electing or step % LOOK_EVERY_STEPS == LOOK_EVERY_STEPS - 1):
            return self._shared.in_turn(prepared, channel, step)
        indices, skew = self._shared.elected(prepared, channel, step)
        if math.isfinite(skew):
            self._skew += _WEIGHT * (skew - self._skew)
        self._electing = self._skew > (EVEN if self._electing else SKEWED)
        return indices

    def state(self) -> MemoryState:
        """The smoothed skew, and whether elections are on."""
        return {
            "skew": torch.tensor(self._skew, dtype=torch.float64),
            "electing": torch.tensor(self._electing),
        }

    def load_state(self, state: MemoryState) -> None:
        """Both."""
        self._skew, self._electing = float(state["skew"]), bool(state["electing"])
