"""What an aggregation is: the way from every worker's vector to a sum that all of them hold."""

from __future__ import annotations

import hashlib
import struct
from typing import Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.collective import SumCollective
from hetopt.trainer.comm.compressor import Compressor
from hetopt.trainer.comm.error_feedback import MemoryState
from hetopt.trainer.comm.payload import DensePayload, Payload

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
