"""AR-Topk: one worker's Top-k is everyone's choice of elements, so that values can be summed on the way.

Three ways to say whose (arXiv 2312.02493): in turn (STAR), by the energy of the choice (VAR), or whichever of the two
the gradients call for. Every worker's residual keeps what the *shared* indices left out of its own gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import MANY_WORKERS
from hetopt.trainer.comm.aggregation import Stateless, private_generator
from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.coding import IndexCoding, PlainIndices
from hetopt.trainer.comm.compressor import Compressor
from hetopt.trainer.comm.energy import energy
from hetopt.trainer.comm.error_feedback import MemoryState
from hetopt.trainer.comm.payload import SparsePayload

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
