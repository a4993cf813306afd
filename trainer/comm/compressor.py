"""The algebra of communication: what a compressor is, how payloads combine, and the chain from a gradient to its sum.

    init    the constructor; `state` is what goes on from step to step, alike on all workers or any worker's
    encode  gradient -> payload; what workers must have alike (a grid, indices, a basis) they agree on here
    decode  what came of them -> the sum of all workers' gradients, the same bits on every worker

A chain is a compressor and a collective, ``Chain(TopK(0.01), AllGather())``, perhaps of shared indices
(`hetopt.trainer.comm.topk`). Sending everything is a compressor like any other: ``Chain(Identity(), AllReduce())``.
What is not sent is kept by the residual before it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from hetopt.core.comm.composition import CORRECTION, combine, why_not_optimised
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel, group_size
from hetopt.trainer.comm.vectors import Workspace, energy

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Turn:
    """Context of one worker's compression in one step: the channel to other workers, the step number, the run's seed.

    Attributes:
        channel: channel to the other workers.
        step: counted from 0, the same on all workers.
        seed: the same on all workers.
    """

    channel: Channel
    step: int = 0
    seed: int = 0

    def private(self, device: torch.device | None = None) -> Generator:
        """Return a random generator seeded for this worker and step alone; on the CPU if no device is given."""
        return Generator(device or "cpu").manual_seed(_mixed(self.seed, self.channel.rank, self.step))


class Payload:
    """A worker's compressed gradient as it was sent, read as values in the units of that gradient.

    Attributes:
        numel: elements of the gradient that it stands for.
    """

    numel: int
    """Elements of that gradient."""

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the flat gradient, 1-D fp32 values sent for it) in order; elements in no slice are zero.

        Raises:
            NotImplementedError: the class has neither this method nor its own `add_to`; an instance of this base has
                none.
        """
        raise NotImplementedError

    def add_to(self, flat: Tensor, sign: int = 1) -> None:
        """Add the values sent to a flat vector as long as the gradient, in place; ``sign`` -1 subtracts them."""
        for place, values in self.parts():
            flat[place].add_(values, alpha=sign)

    def dense(self) -> Tensor:
        """Return the gradient as sent, 1-D fp32, [numel], zero where nothing was sent; may be the payload's memory."""
        device = next(value.device for value in vars(self).values() if isinstance(value, Tensor))
        flat = torch.zeros(self.numel, device=device)
        self.add_to(flat)
        return flat


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, kw_only=True, eq=False)
class DensePayload(Payload):
    """Payload of every element: ``values`` is 1-D fp32, and may share memory with the vector that was compressed.

    Attributes:
        values: values of all elements, 1-D fp32.
    """

    values: Tensor

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield one pair: the slice of the whole gradient, and all values."""
        yield slice(None), self.values

    def dense(self) -> Tensor:
        """Return the payload's values, [numel], not copied."""
        return self.values


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePayload(Payload):
    """Payload of some of ``numel`` gradient elements: distinct int32 ``indices`` and the fp32 ``values`` there.

    Attributes:
        indices: places of the elements, distinct, int32.
        values: fp32, of these places.
        numel: elements of the whole gradient.
    """

    indices: Tensor
    values: Tensor
    numel: int

    def add_to(self, flat: Tensor, sign: int = 1) -> None:
        """Add the elements sent to a flat vector at their indices, in place; ``sign`` -1 subtracts them."""
        flat.index_add_(0, self.indices, self.values, alpha=sign)


class Compressor(Generic[PayloadT]):
    """Base of compressors of a flat gradient into a payload; what is left out is for the residual to keep."""

    def encode(self, flat: Tensor, turn: Turn) -> PayloadT:
        """Return a flat gradient compressed for one step; some compressors communicate with all workers here.

        The same gradient, state and turn give the same payload. NaN and infinity are sent, not hidden.

        Args:
            flat: 1-D fp32, not empty; left as it is.
            turn: turn of this worker.

        Raises:
            NotImplementedError: the subclass has none.
            BadInput: of compressors to codes, no code of the asked width holds the sum over so many workers.
        """
        raise NotImplementedError

    def state(self) -> State:
        """Return a copy of the tensors that go on from step to step, by name, for a checkpoint; none by default."""
        return {}

    def load_state(self, state: State) -> None:
        """Restore the tensors that `state` returned, on any worker, unchecked; does nothing by default."""


class Summed(Compressor[PayloadT]):
    """Base of compressors whose payloads are summed element by element in an all-reduce."""

    def wire(self, payload: PayloadT, out: Tensor) -> Tensor:
        """Return the tensor to all-reduce, in place, for a payload; it is ``out``, or memory of the compressor.

        Raises:
            NotImplementedError: the subclass has none.
        """
        raise NotImplementedError

    def decode(self, payload: PayloadT, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Write the sum of all workers' gradients into ``out``, read from ``total``, the all-reduced `wire`.

        Args:
            payload: what this worker sent, as `encode` returned it.
            total: the tensor that `wire` returned, summed over the workers.
            out: 1-D fp32, [numel]; overwritten.
            turn: this worker's channel, step and seed.

        Raises:
            NotImplementedError: the subclass has none.
        """
        raise NotImplementedError


class Identity(Summed[DensePayload]):
    """Compressor that sends the gradient uncompressed, without a copy."""

    def encode(self, flat: Tensor, turn: Turn) -> DensePayload:
        """Return the gradient itself as a payload, not copied."""
        return DensePayload(values=flat)

    def wire(self, payload: DensePayload, out: Tensor) -> Tensor:
        """Copy the gradient into ``out`` unless it lies there, and return ``out``, to be all-reduced in place."""
        return out if out.data_ptr() == payload.values.data_ptr() else out.copy_(payload.values)

    def decode(self, payload: DensePayload, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Do nothing: the all-reduce has left the sum in ``out``.

        Args:
            payload: not used.
            total: not used.
            out: holds the sum.
            turn: not used.
        """


class Collective(Protocol):
    """Protocol of what compresses, exchanges and adds up all workers' weighted gradients: a sum, never a mean."""

    def run(self, compressor: Any, flat: Tensor, out: Tensor, turn: Turn) -> Payload:
        """Compress ``flat``, exchange it, write all workers' sum into ``out``; return what was sent here. All call it.

        Args:
            compressor: compressor whose payloads this collective can combine.
            flat: 1-D fp32, not empty; left as it is, unless it shares memory with ``out``.
            out: 1-D fp32, as long as ``flat``; overwritten with the sum.
            turn: this worker's channel, step and seed.


        Returns:
            Payload that this worker has sent, in units of ``flat``; valid until the next step.
        """


class AllReduce:
    """Collective that sums all workers' payloads in one all-reduce, to the same bits on each."""

    def run(self, compressor: Summed[PayloadT], flat: Tensor, out: Tensor, turn: Turn) -> PayloadT:
        """Compress ``flat``, all-reduce, write the sum into ``out``; return this worker's payload. All must call it.

        Args:
            compressor: one whose payloads are summed.
            flat: 1-D fp32, not empty; left as it is, unless it shares memory with ``out``.
            out: 1-D fp32, as long; overwritten.
            turn: this worker's channel, step and seed.
        """
        payload = compressor.encode(flat, turn)
        total = compressor.wire(payload, out)
        turn.channel.all_reduce(total)
        compressor.decode(payload, total, out, turn)
        return payload


class Residual:
    """Base of error feedback, which adds what was not sent before to a new gradient; this class keeps nothing.

    What is not sent is lost, which is right where everything is sent.
    """

    def prepare(self, gradient: Tensor) -> Tensor:
        """Return the vector to compress, gradient plus what was not sent before; no state changes until `commit`.

        Valid until the next `prepare`.

        Args:
            gradient: the flat fp32 gradient, already weighted by the worker's part of the batch.
        """
        return gradient

    def commit(self, sent: Payload) -> float | None:
        """Keep what was prepared, less what was sent; return the kept sum of squares, None where nothing is kept.

        Args:
            sent: exactly what the other workers received.
        """

    def kept(self) -> State:
        """Return the tensors that go on from step to step, by name, not copied; empty where nothing is kept."""
        return {}

    def state(self) -> State:
        """Return a copy of the tensors that go on from step to step, by name, for a checkpoint."""
        return {key: value.clone() for key, value in self.kept().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the kept tensors, in place, with the tensors that `state` returned.

        Raises:
            BadInput: names or shapes differ from those of this residual, as of another compression or model.
        """
        kept = self.kept()
        check_state(state, kept)
        for key, value in kept.items():
            value.copy_(state[key])


class Chain:
    """A compression without its error feedback: a choice of elements, a compressor and a collective.

    Args:
        compressor: compressor of the gradient, or of the values of chosen elements.
        collective: carries the compressor's payloads.
        choice: returns distinct int32 indices of the elements to exchange, the same on every worker, as many each step;
            all must call it. None: all elements.
        scale: factor of the values of chosen elements: where there is no residual, the inverse of the chance to be
            chosen.
        seed: seed of all randomness, the same on every worker.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        collective: Collective,
        *,
        choice: Callable[[Tensor, Turn], Tensor] | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._compressor = compressor
        self._collective = collective
        self._choice = choice
        self._scale = scale
        self._seed = seed
        self._workspace = Workspace()

    def run(self, flat: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Write the sum of all workers' ``flat`` into ``out``; return what this worker sent. All must call it.

        A NaN or an infinity on one worker makes some of the result NaN or infinite on all.

        Args:
            flat: 1-D fp32, not empty, this worker's gradient with its residual.
            out: 1-D fp32, as long; overwritten.
            channel: channel to the other workers.
            step: number of the step, the same on all workers.
        """
        turn = Turn(channel, step, self._seed)
        if self._choice is None:
            return self._collective.run(self._compressor, flat, out, turn)
        return self._at(self._choice(flat, turn), flat, out, turn)

    def state(self) -> State:
        """Return a copy of the compressor's state, by name, for a checkpoint."""
        return self._compressor.state()

    def load_state(self, state: State) -> None:
        """Restore the compressor's state that `state` returned."""
        self._compressor.load_state(state)

    def _at(self, indices: Tensor, flat: Tensor, out: Tensor, turn: Turn) -> SparsePayload:
        """Write the sum of the values at ``indices`` into ``out``, zero elsewhere; return what this worker sent.

        Only the values travel: the indices are the same on all workers.
        """
        values = flat.index_select(0, indices)
        if self._scale != 1.0:
            values.mul_(self._scale)
        summed = self._workspace.take("summed", values.numel(), torch.float32, values.device)
        sent = self._collective.run(self._compressor, values, summed, turn)
        out.zero_().index_add_(0, indices, summed)
        return SparsePayload(
            indices=indices,
            values=values if isinstance(sent, DensePayload) else sent.dense(),
            numel=flat.numel(),
        )


def shared_generator(seed: int, step: int) -> Generator:
    """Return a CPU random generator seeded by the run's seed and the step, which draws alike on all workers."""
    return torch.Generator().manual_seed(_mixed(seed, -1, step))


def _mixed(seed: int, rank: int, step: int) -> int:
    # Neighbouring seeds of a Mersenne Twister give sequences that resemble each other at first.
    digest = hashlib.blake2b(struct.pack("<qqq", seed, rank, step), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


ALIKE = "alike."
"""Beginning of the keys of a state that is the same for all workers: a new worker gets a copy, where the rest is shared
out."""


class ErrorFeedback(Residual):
    """Error feedback: what was not sent is added to the next gradient, ``residual <- (gradient + residual) - sent``.

    The residual starts at zero and is in units of the weighted sum over workers, so a sample keeps the weight of the
    step that computed it. Eight bytes a parameter: the residual, and the buffer it swaps places with.

    Args:
        numel: elements of the gradient.
        device: device where the gradient lies; None: the CPU.
    """

    def __init__(self, numel: int, *, device: torch.device | None = None) -> None:
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._prepared = torch.zeros_like(self._residual)

    def prepare(self, gradient: Tensor) -> Tensor:
        """Return gradient plus residual, to be compressed; the residual changes only at `commit`."""
        return torch.add(gradient, self._residual, out=self._prepared)

    def commit(self, sent: Payload) -> float:
        """Keep what was prepared, less what was sent, as the residual; return the residual's sum of squares."""
        sent.add_to(self._prepared, -1)
        self._residual, self._prepared = self._prepared, self._residual
        return energy(self._residual)

    def kept(self) -> State:
        """Return the residual as ``{"residual": [numel]}``, not copied."""
        return {"residual": self._residual}


def redistribute(states: Sequence[State], workers: int, *, in_parts: bool = False) -> list[State]:
    """Return ``workers`` residuals whose sum is that of the old workers' ``states``; nothing given is changed.

    Old worker i hands its residual to new worker ``i mod workers``; residuals that meet add up, and additional workers
    start from zero. So the sum over workers, which is all that training can ever see, stays; and as many workers as
    before keep their residuals unchanged. What all workers have alike (`ALIKE`) is copied.

    Args:
        states: residuals of the old workers, in rank order; at least one.
        workers: number of new workers.
        in_parts: whether each state is of a device's part of a sharded model.

    Raises:
        BadInput: there is a residual, and it is in parts (``in_parts``, or the states differ in size).
    """
    sizes = {tuple(value.numel() for key, value in state.items() if not key.startswith(ALIKE)) for state in states}
    if sizes != {()} and (in_parts or len(sizes) > 1):
        raise BadInput(
            f"What compression held back lies in parts on {len(states)} devices of a sharded model; now there are "
            f"{workers}.",
            hint="go on with as many devices, or start over in another folder",
        )
    new = [
        {key: value.clone() if key.startswith(ALIKE) else torch.zeros_like(value) for key, value in states[0].items()}
        for _ in range(workers)
    ]
    for i, state in enumerate(states):
        for key, value in state.items():
            if not key.startswith(ALIKE):
                new[i % workers][key] += value
    return new


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that a saved state, tensors by name, has the keys and shapes of ``expected``.

    Raises:
        BadInput: it has not.
    """
    saved = {key: tuple(value.shape) for key, value in state.items()}
    wanted = {key: tuple(value.shape) for key, value in expected.items()}
    if saved != wanted:
        raise BadInput(
            f"The saved residual holds {saved or 'nothing'}, but this run needs {wanted or 'none'}.",
            hint="resume with the model and the compression that the checkpoint was written with",
        )


DEFAULT_MOMENTUM = 0.9


class MomentumCorrection(ErrorFeedback):
    """Error feedback of momentum that each worker keeps (DGC): velocity and unsent velocity, 16 bytes a parameter.

    Both are cleared where they were sent.

    Momentum is accumulated before the gradient is sparsified, so that what is sent late is not stale:

        u <- m u + g            velocity, of the local gradient
        v <- v + u              what there is to send
        send some of v;  u, v <- 0 where it was sent

    With plain error feedback and momentum in the optimizer, an element that is sent after t steps weighs as if its
    gradients had all come at once; here it carries the discounting they would have had. Setting u to zero where
    elements were sent (factor masking) keeps stale momentum from being applied after the fact. Where everything is sent
    nothing is stale: then u goes on, and the whole is momentum SGD. (Lin et al., "Deep Gradient Compression", arXiv
    1712.01887, sections 3.1 to 3.3; their released successors kept the name without these.)

    The optimizer must then have no momentum of its own (see `take_momentum`); with ``momentum`` 0 this is error
    feedback.

    Args:
        numel: elements of the gradient.
        momentum: m, in [0, 1).
        clip_norm: the norm that the *summed* gradient may have; None: any. Each gradient is clipped before it is
            accumulated, to ``clip_norm / sqrt(workers)``: what a worker may contribute when the parts of all are
            independent and alike.
        device: device where the gradient lies; None: the CPU.
    """

    def __init__(
        self,
        numel: int,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        clip_norm: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(numel, device=device)
        self._momentum = momentum
        self._clip_norm = clip_norm
        self._velocity = torch.zeros_like(self._residual)
        self._next_velocity = torch.zeros_like(self._residual)

    def prepare(self, gradient: Tensor) -> Tensor:
        """Return the velocity not yet sent, this (clipped) gradient's included; no state changes until `commit`.

        With ``clip_norm`` the gradient is first scaled to a norm of at most ``clip_norm / sqrt(workers)``.
        """
        if self._clip_norm is not None:
            scale = self._clip_norm / math.sqrt(group_size(None)) / max(math.sqrt(energy(gradient)), 1e-38)
            gradient = gradient * scale if scale < 1 else gradient
        torch.add(gradient, self._velocity, alpha=self._momentum, out=self._next_velocity)
        return super().prepare(self._next_velocity)

    def commit(self, sent: Payload) -> float:
        """Keep what was not sent, clear the velocity of elements that were; return the kept sum of squares."""
        if isinstance(sent, SparsePayload) and sent.indices.numel() < sent.numel:
            self._next_velocity.index_fill_(0, sent.indices.long(), 0.0)
        self._velocity, self._next_velocity = self._next_velocity, self._velocity
        return super().commit(sent)

    def kept(self) -> State:
        """Return ``{"velocity": [numel], "unsent": [numel]}``, not copied."""
        return {"velocity": self._velocity, "unsent": self._residual}


def keeps_momentum(asked: Compression) -> bool:
    """Return whether a compression has each worker apply the momentum, so that the optimizer must have none.

    Raises:
        BadInput: unknown name, or compressor, memory and collective do not go together.
    """
    return combine(asked.name, memory=asked.memory, collective=asked.collective).memory == CORRECTION


def take_momentum(asked: Compression, optimizer: Optimizer) -> Compression:
    """Return the compression with the optimizer's momentum, and set that to 0 there, if workers apply it themselves.

    Otherwise the compression is returned as it is, and the optimizer is left alone. A momentum that the compression
    already names stays.

    Weight decay stays in the optimizer and then has no momentum, which is the one difference to momentum SGD that is
    left where everything is sent.

    Raises:
        BadInput: parts of the compression do not go together, or the optimizer's momentum is not one number that can be
            taken out (groups with different ones, Nesterov's, or an optimizer without).
    """
    if not keeps_momentum(asked):
        return asked
    momenta = {float(group.get("momentum", math.nan)) for group in optimizer.param_groups}
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    if len(momenta) != 1 or nesterov or any(math.isnan(momentum) for momentum in momenta):
        reason = why_not_optimised(CORRECTION, optimizer_momentum=math.nan)
        raise BadInput(
            f"{reason} It can be taken out of plain SGD with one momentum, but not out of this optimizer.",
            hint="write memory=error_feedback, which leaves the momentum in the optimizer",
        )
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    return asked if asked.momentum is not None else asked.model_copy(update={"momentum": momenta.pop()})
