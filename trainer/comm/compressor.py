"""The algebra of communication: what a compressor is, how payloads combine, and the chain from a gradient to its sum.

    init      the constructor; `state` is what goes on from step to step, alike on all workers or any worker's
    encode    gradient -> payload; what workers must have alike (a grid, indices, a basis) they agree on here
    combines  how the payloads of all workers become one: the collectives that can carry them
    decode    what came of them -> the sum of all workers' gradients, the same bits on every worker

A chain is a residual (`hetopt.trainer.comm.error_feedback`), perhaps shared indices (`hetopt.trainer.comm.elements`), a
compressor and a collective, in this order: ``chain(ErrorFeedback(n), TopK(0.01), AllGather())``. Sending everything is
a compressor like any other: ``chain(Identity(), AllReduce())``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
from torch import Generator, Tensor

from hetopt.core.comm.composition import DENSE
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.vectors import Workspace, kept_energy, take_out

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one worker: the channel to the others, the number of the step, and randomness.

    Attributes:
        channel: to the other workers.
        step: counted from 0, the same on all workers.
        seed: the same on all workers.
    """

    channel: Channel
    step: int = 0
    seed: int = 0

    def private(self, device: torch.device | None = None) -> Generator:
        """A source of randomness that no other worker or step has."""
        return private_generator(self.seed, self.channel.rank, self.step, device)


class Payload:
    """What one worker sent, in the units of its gradient."""

    numel: int
    """Elements of that gradient."""

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield what was sent, 1-D fp32, part of the gradient after part; what is left out is zero."""
        raise NotImplementedError

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        for place, values in self.parts():
            flat[place].add_(values)

    def subtract_from(self, flat: Tensor) -> float:
        """Subtract the payload from the dense vector x that it was made of, in place.

        Returns:
            The energy that this takes away, ``||x||^2 - ||x - sent||^2``; of a selection, and of any other projection,
            that is ``||sent||^2``.
        """
        return sum(take_out(flat[place], values) for place, values in self.parts())

    def dense(self) -> Tensor:
        """The dense vector that the payload stands for, 1-D fp32; may be the payload's own memory."""
        device = next(value.device for value in vars(self).values() if isinstance(value, Tensor))
        flat = torch.zeros(self.numel, device=device)
        self.add_to(flat)
        return flat


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, kw_only=True, eq=False)
class DensePayload(Payload):
    """Every element of a flat gradient: ``values`` is 1-D fp32 and may share memory with what was compressed."""

    values: Tensor

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all values at once (see `Payload`)."""
        yield slice(None), self.values

    def dense(self) -> Tensor:
        """The payload as a dense vector: the values, not copied."""
        return self.values


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePayload(Payload):
    """Some elements of a flat gradient of ``numel``: distinct int32 ``indices`` and their fp32 ``values``."""

    indices: Tensor
    values: Tensor
    numel: int

    def add_to(self, flat: Tensor) -> None:
        """Add the payload to a dense vector, in place."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: Tensor) -> float:
        """See `Payload`."""
        kept = kept_energy(flat.index_select(0, self.indices), self.values)
        flat.index_add_(0, self.indices, self.values, alpha=-1)
        return kept


class Stateful:
    """What goes on from step to step; by default nothing does."""

    counts_steps: bool = False
    """Whether a step's number matters, as it does where something is drawn at random."""

    def state(self) -> State:
        """A copy of what goes on from step to step; empty by default."""
        return {}

    def load_state(self, state: State) -> None:
        """Go on from what `state` gave, of this worker or another; keys and shapes have been checked."""


class Compressor(Stateful, Generic[PayloadT]):
    """Makes a gradient small. What was left out is the residual's business."""

    name: str
    """That plans and `wire_bytes` know it by."""

    combines: ClassVar[tuple[str, ...]]
    """Collectives that carry its payloads, see `composition.COLLECTIVES`."""

    def encode(self, flat: Tensor, turn: Turn) -> PayloadT:
        """The payload for a flat gradient.

        The same gradient, state and turn give the same payload. NaN and infinity are sent, not hidden.

        Args:
            flat: 1-D fp32, not empty; left as it is.
            turn: of this worker.
        """
        raise NotImplementedError


class Summed(Compressor[PayloadT]):
    """A compressor whose payloads are added up element by element on the way."""

    combines: ClassVar[tuple[str, ...]] = (DENSE,)

    def wire(self, payload: PayloadT, out: Tensor) -> Tensor:
        """What travels: replaced by its sum over all workers, in place. May be ``out``, or any memory of its own."""
        raise NotImplementedError

    def decode(self, payload: PayloadT, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Write the sum of all workers' gradients into ``out``, from the sum of what travelled."""
        raise NotImplementedError


class Identity(Summed[DensePayload]):
    """Sends the gradient itself, without a copy."""

    name = "identity"

    def encode(self, flat: Tensor, turn: Turn) -> DensePayload:
        """The gradient (see `Compressor`)."""
        return DensePayload(values=flat)

    def wire(self, payload: DensePayload, out: Tensor) -> Tensor:
        """Where the sum is wanted (see `Summed`)."""
        return out if out.data_ptr() == payload.values.data_ptr() else out.copy_(payload.values)

    def decode(self, payload: DensePayload, total: Tensor, out: Tensor, turn: Turn) -> None:
        """It is there already (see `Summed`)."""


class Collective(Protocol):
    """The last link of a chain: adds up the payloads of all workers. SUM, never a mean: gradients come weighted."""

    @property
    def name(self) -> str:
        """Name of the collective, one of `composition.COLLECTIVES`."""

    def run(self, compressor: Any, flat: Tensor, out: Tensor, turn: Turn) -> Payload:
        """Compress, communicate, and write the sum over all workers into ``out``, the same bits on each.

        Args:
            compressor: one whose payloads combine so.
            flat: 1-D fp32, not empty; left as it is, unless it shares memory with ``out``.
            out: as long; overwritten.
            turn: of this worker.

        Returns:
            what this worker has sent, in units of ``flat``; valid until the next step.
        """


class AllReduce:
    """Each element is summed in one place and handed out, so all workers hold the same bits."""

    name = DENSE

    def run(self, compressor: Summed[PayloadT], flat: Tensor, out: Tensor, turn: Turn) -> PayloadT:
        """Sum on the way (see `Collective`)."""
        payload = compressor.encode(flat, turn)
        total = compressor.wire(payload, out)
        turn.channel.all_reduce(total)
        compressor.decode(payload, total, out, turn)
        return payload


class IndexChoice(Stateful):
    """Says which elements are exchanged in a step."""

    def choose(self, flat: Tensor, turn: Turn) -> Tensor:
        """Distinct int32 indices, the same on every worker, as many in every step."""
        raise NotImplementedError


class Resumable(Protocol):
    """What has to be saved with a run."""

    def state(self) -> State:
        """A copy of what is kept."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises:
            BadInput: the state belongs to another residual or to another model.
        """


class Residual(Resumable, Protocol):
    """The first link of a chain: adds what was withheld before to a new gradient, and keeps what is withheld now."""

    def prepare(self, gradient: Tensor) -> Tensor:
        """The vector to compress. No side effects: candidates may be tried on it; valid until the next `prepare`.

        Args:
            gradient: the flat fp32 gradient, already weighted by the worker's part of the batch.
        """

    def commit(self, prepared: Tensor, sent: Payload) -> float | None:
        """Keep ``prepared - sent``, where ``sent`` is exactly what the other workers received.

        Returns:
            The energy that this took away (see `Payload.subtract_from`); None where nothing is kept.
        """


class Chain:
    """From every worker's gradient to the sum that all of them hold; made by `chain`.

    Args:
        residual: what was withheld before; None: what is not sent is forgotten.
        choice: of the elements that are exchanged; None: all.
        compressor: of the gradient, or of the values of those elements.
        collective: that carries its payloads.
        scale: of the values of chosen elements: the inverse of the chance to be chosen, where there is no residual.
        seed: of all randomness, the same on every worker.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        collective: Collective,
        *,
        choice: IndexChoice | None = None,
        residual: Residual | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._compressor = compressor
        self._collective = collective
        self._choice = choice
        self._residual = residual
        self._scale = scale
        self._seed = seed
        self._workspace = Workspace()
        self.counts_steps = choice is not None or compressor.counts_steps

    def run(self, flat: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum over all workers into ``out``, the same bits on each (see `Collective`).

        A NaN or an infinity on one worker makes some of the result NaN or infinite on all. If a collective fails,
        nothing has been committed: the residual is that of the step before.
        """
        turn = Turn(channel, step, self._seed)
        prepared = flat if self._residual is None else self._residual.prepare(flat)
        if self._choice is None:
            sent = self._collective.run(self._compressor, prepared, out, turn)
        else:
            sent = self._at(self._choice.choose(prepared, turn), prepared, out, turn)
        if self._residual is not None:
            self._residual.commit(prepared, sent)
        return sent

    def state(self) -> State:
        """What the compressor and the choice carry from step to step; the residual's state is its own."""
        return {**self._compressor.state(), **({} if self._choice is None else self._choice.state())}

    def load_state(self, state: State) -> None:
        """Go on from what `state` gave."""
        self._compressor.load_state(state)
        if self._choice is not None:
            self._choice.load_state(state)

    def _at(self, indices: Tensor, prepared: Tensor, out: Tensor, turn: Turn) -> SparsePayload:
        """Sum the values at these indices; all other elements of the sum are zero."""
        values = prepared.index_select(0, indices)
        if self._scale != 1.0:
            values.mul_(self._scale)
        summed = self._workspace.take("summed", values.numel(), torch.float32, values.device)
        sent = self._collective.run(self._compressor, values, summed, turn)
        out.zero_().index_add_(0, indices, summed)
        return SparsePayload(
            indices=indices,
            values=values if isinstance(sent, DensePayload) else sent.dense(),
            numel=prepared.numel(),
        )


Link = Residual | IndexChoice | Compressor[Any] | Collective


def chain(*links: Link, scale: float = 1.0, seed: int = 0) -> Chain:
    """``chain([residual,] [choice of indices,] compressor, collective)``; other arguments as of `Chain`.

    Raises:
        ValueError: no compressor comes before the collective, or its payloads do not combine so.
    """
    *before, collective = links
    compressor = before.pop() if before else None
    choice = before.pop() if before and isinstance(before[-1], IndexChoice) else None
    residual = before.pop() if before else None
    if before or not isinstance(compressor, Compressor) or isinstance(residual, Compressor | IndexChoice):
        raise ValueError("a chain is a residual, a choice of indices, a compressor and a collective, in this order")
    # What is left has been told apart by its place.
    last = cast(Collective, collective)
    first, second = cast(Residual | None, residual), cast(IndexChoice | None, choice)
    if last.name not in compressor.combines:
        able = " or ".join(compressor.combines)
        raise ValueError(f"payloads of {type(compressor).__name__} combine by {able}, not by {last.name}")
    return Chain(compressor, last, choice=second, residual=first, scale=scale, seed=seed)


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
