"""What a compressor is: a gradient in, a payload out, and how the payloads of all workers combine to their sum."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.vectors import kept_energy, take_out

MemoryState = dict[str, Tensor]


class Payload(Protocol):
    """What one worker sent, in the units of its gradient."""

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        ...

    def subtract_from(self, flat: Tensor) -> float:
        """Subtract the payload from the dense vector x that it was made of, in place.

        Returns:
            The energy that this takes away, ``||x||^2 - ||x - sent||^2``; of a selection, and of any other projection,
            that is ``||sent||^2``.
        """
        ...

    def dense(self) -> Tensor:
        """The dense vector that the payload stands for, 1-D fp32; may be the payload's own memory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePayload:
    """Every element of a flat gradient: ``values`` is 1-D fp32 and may share memory with what was compressed."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.values.nbytes

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.add_(self.values)

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        return take_out(flat, self.values)

    def dense(self) -> Tensor:
        """The values themselves."""
        return self.values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparsePayload:
    """Some elements of a flat gradient of ``numel``: distinct int32 ``indices`` and their fp32 ``values``."""

    indices: Tensor
    values: Tensor
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.indices.nbytes + self.values.nbytes

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        kept = kept_energy(flat.index_select(0, self.indices), self.values)
        flat.index_add_(0, self.indices, self.values, alpha=-1)
        return kept

    def dense(self) -> Tensor:
        """Zeros but for the sent elements."""
        flat = torch.zeros(self.numel, dtype=self.values.dtype, device=self.values.device)
        self.add_to(flat)
        return flat


PayloadT_contra = TypeVar("PayloadT_contra", bound=Payload, contravariant=True)


class SumCollective(Protocol[PayloadT_contra]):
    """Adds up the payloads of all workers. SUM, never a mean: gradients come weighted by their share of the batch."""

    def run(self, payload: PayloadT_contra, out: Tensor, channel: Channel) -> None:
        """Write the dense sum over all workers into ``out``.

        Args:
            payload: this worker's part.
            out: 1-D fp32, overwritten; may be the memory that the payload's values lie in.
            channel: to the other workers.
        """
        ...


PayloadT_co = TypeVar("PayloadT_co", bound=Payload, covariant=True)


class Compressor(Protocol[PayloadT_co]):
    """Makes a gradient small, with no communication inside.

    What was left out is the memory's business, how payloads meet is the collective's.
    """

    @property
    def name(self) -> str:
        """The name that plans and `wire_bytes` know it by."""
        ...

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> PayloadT_co:
        """The payload for a flat fp32 gradient.

        Args:
            flat: 1-D fp32, not empty; left as it is.
            ratio: fraction of the elements to send, in (0, 1]; compressors of everything ignore it.
            generator: the private source of randomness, on the gradient's device; in the same state it gives the same
                payload.
        """
        ...


@dataclass(frozen=True, slots=True)
class IdentityCompressor:
    """Sends the gradient itself, whatever the ratio."""

    name: ClassVar[str] = "identity"

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> DensePayload:
        """The gradient, not copied."""
        return DensePayload(values=flat)


PayloadT = TypeVar("PayloadT", bound=Payload)


class Carries(Protocol):
    """Has something that goes on from step to step: alike on all workers, or any worker's will do for another."""

    def state(self) -> MemoryState:
        """A copy of it."""
        ...

    def load_state(self, state: MemoryState) -> None:
        """Go on from what `state` gave; keys and shapes have been checked."""
        ...


class Aggregation(Carries, Protocol):
    """Compresses, communicates and decompresses; what was not sent is the memory's business."""

    @property
    def counts_steps(self) -> bool:
        """Whether a step's number matters to it."""
        ...

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum over all workers into ``out``, the same bits on each.

        A NaN or an infinity on one worker makes some of the result NaN or infinite on all.

        Args:
            prepared: 1-D fp32, not empty; what to send of. Left as it is, unless it shares memory with ``out``.
            out: as long; overwritten.
            channel: to the other workers.
            step: counted from 0, the same on all workers.

        Returns:
            what this worker has sent, in units of ``prepared``; valid until the next step.
        """
        ...


class Stateless:
    """Of an aggregation that begins every step anew."""

    def state(self) -> MemoryState:
        """Nothing."""
        return {}

    def load_state(self, state: MemoryState) -> None:
        """Nothing to take over."""


class CompressedSum(Generic[PayloadT]):
    """A compressor and a collective that fit together: each worker compresses for itself, then payloads are summed.

    Args:
        compressor: of this worker.
        ratio: fraction of the elements to send.
        collective: that carries its payloads; None: they are dense, and added up on the way.
        seed: of the compressor's randomness, which differs between workers and steps.
        counts_steps: whether the compressor uses randomness.
        carried: what goes on from step to step, where the compressor has such.
    """

    def __init__(
        self,
        *,
        compressor: Compressor[PayloadT],
        ratio: float,
        collective: SumCollective[PayloadT] | None,
        seed: int = 0,
        counts_steps: bool = False,
        carried: Carries | None = None,
    ) -> None:
        self._compressor: Compressor[PayloadT] = compressor
        self._ratio = ratio
        self._collective: SumCollective[PayloadT] | None = collective
        self._seed = seed
        self.counts_steps = counts_steps
        self._carried: Carries = carried if carried is not None else Stateless()

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Compress, then sum (see `Aggregation`)."""
        generator = None
        if self.counts_steps:
            generator = private_generator(self._seed, channel.rank, step, prepared.device)
        payload = self._compressor.compress(prepared, self._ratio, generator)
        if self._collective is not None:
            self._collective.run(payload, out, channel)
            return payload
        assert isinstance(payload, DensePayload)
        if out.data_ptr() != payload.values.data_ptr():
            out.copy_(payload.values)
        channel.all_reduce(out)
        return payload

    def state(self) -> MemoryState:
        """The compressor's."""
        return self._carried.state()

    def load_state(self, state: MemoryState) -> None:
        """The compressor's."""
        self._carried.load_state(state)


def private_generator(seed: int, rank: int, step: int, device: torch.device | None = None) -> Generator:
    """A source of randomness that no other worker or step has, whatever else is drawn in the process.

    On the CPU unless a device is given.
    """
    return torch.Generator(device or "cpu").manual_seed(_mixed(seed, rank, step))


def shared_generator(seed: int, step: int) -> Generator:
    """A source of randomness that all workers have in the same step; on the CPU, where all machines draw alike."""
    return torch.Generator().manual_seed(_mixed(seed, -1, step))


def _mixed(seed: int, rank: int, step: int) -> int:
    # Neighbouring seeds of a Mersenne Twister give sequences that resemble each other at first.
    digest = hashlib.blake2b(struct.pack("<qqq", seed, rank, step), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
