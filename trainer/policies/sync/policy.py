"""What a synchronisation policy is: a pure function from what all workers know to whether they average now.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, as of the batch policies. Asked
after every step; the state is a small plain record, and travels in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from hetopt.core.artifact import Record

StateT = TypeVar("StateT", bound=Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncObservation:
    """What is known after a step.

    Attributes:
        step: steps done since the run began, this one included.
        local_steps: of them, those since the last synchronisation, this one included.
        changes: relative change of the norm of each worker's gradient, in rank order, of this step or of the one
            before (`Synchronization.vote_lag`); None: nobody asked, or there is none yet. Not a number: taken as
            infinite, for whoever meets that had better say so.
    """

    step: int
    local_steps: int
    changes: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncDecision:
    """What to do after this step.

    Attributes:
        synchronise: average parameters now.
        participants: ranks whose parameters enter the average; None: all of them. Everyone receives it.
    """

    synchronise: bool
    participants: tuple[int, ...] | None = None


class SyncPolicy(Protocol, Generic[StateT]):
    """Decides after every step, with the same arguments on every rank."""

    votes: ClassVar[bool]
    """Whether it goes by how gradients change, which the workers then have to tell each other."""

    def initial(self) -> StateT:
        """The state before the first step; its type reads a checkpoint's back (`Record.model_validate`)."""

    def decide(self, state: StateT, observation: SyncObservation) -> tuple[StateT, SyncDecision]:
        """The next state, and what to do now."""
