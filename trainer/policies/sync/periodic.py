"""Averages after a number of steps that is known beforehand: local SGD and FedAvg."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetopt.core.artifact import Record
from hetopt.trainer.policies.policy import NothingToRemember
from hetopt.trainer.policies.sync.policy import SyncDecision, SyncObservation


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Every H-th step (Stich 2018, 1805.09767). H = 1 is BSP for optimizers that are linear in the gradient.

    Attributes:
        every_steps: H.
    """

    every_steps: int

    votes: ClassVar[bool] = False
    """False: the averaging period is fixed, so workers need no vote."""

    def initial(self) -> NothingToRemember:
        """The empty state: this policy remembers nothing."""
        return NothingToRemember()

    def decide(self, state: NothingToRemember, observation: SyncObservation) -> tuple[NothingToRemember, SyncDecision]:
        """Whether enough steps were local (see `SyncPolicy`)."""
        return state, SyncDecision(synchronise=observation.local_steps >= self.every_steps)


class Rounds(Record):
    """State of a periodic policy: the number of averages so far."""

    done: int = 0


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """Some of the workers, drawn anew each time, enter an average that all receive (McMahan et al. 2017, 1602.05629).

    On devices the others rest. Machines that are paid for train on, and lose what they learned when they are not drawn.

    Attributes:
        every_steps: steps of a round.
        participants: part of the workers, C; at least one.
        workers: how many there are.
        seed: of the draws.
    """

    every_steps: int
    participants: float
    workers: int
    seed: int

    votes: ClassVar[bool] = False
    """False: the averaging period is fixed, so workers need no vote."""

    def initial(self) -> Rounds:
        """The state before the first round."""
        return Rounds()

    def decide(self, state: Rounds, observation: SyncObservation) -> tuple[Rounds, SyncDecision]:
        """Whether the round is over, and whose parameters count (see `SyncPolicy`)."""
        if observation.local_steps < self.every_steps:
            return state, SyncDecision(synchronise=False)
        return Rounds(done=state.done + 1), SyncDecision(synchronise=True, participants=self._drawn(state.done))

    def _drawn(self, number: int) -> tuple[int, ...] | None:
        count = max(1, math.ceil(self.participants * self.workers - 1e-9))
        if count >= self.workers:
            return None
        words = np.random.PCG64(np.random.SeedSequence((self.seed, number))).random_raw(self.workers)
        return tuple(sorted(np.argsort(words, kind="stable")[:count].tolist()))
