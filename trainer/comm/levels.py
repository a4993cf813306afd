"""What a step sends, decided by what it would keep: a selection, the floor that it was selected from, or everything.

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

import torch
from torch import Tensor

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
from hetopt.trainer.comm.topk import MultiLevel, Selection, select
from hetopt.trainer.comm.vectors import Workspace, energy


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
