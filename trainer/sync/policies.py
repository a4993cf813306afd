"""When workers that train for themselves average their parameters: pure functions of what all of them know.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, as of the batch policies. Asked
after every step; the state is a small plain record, and travels in checkpoints. Local SGD and FedAvg average after a
number of steps that is known beforehand; SelSync while gradients change (2307.07950).

**SelSync.** A worker votes for a synchronisation where the relative change of its gradient's moving squared norm
reaches delta; as many as it takes decide for all. Asking whether at least m workers reach delta is asking whether the
m-th largest of their changes does: one number per step, and delta can be steered by it.

Where delta is steered (``auto``), only *when* is left to the votes, and *how often* is not. Left alone, large changes
come in bursts: averages right after an average bring next to nothing, and long stretches without one let workers drift
apart, most of all early, when gradients turn quickly (Lin et al. 2020, 1808.07217: early averages count most). So the
distance between two averages grows with the steps done, from one step to the wished mean, and is then kept between half
and twice of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from hetopt.core.artifact import Record
from hetopt.core.run_rules import steps_of_round
from hetopt.core.synchronization import Synchronization

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


class Rounds(Record):
    """State of a periodic policy: the number of averages so far."""

    done: int = 0


@dataclass(frozen=True, kw_only=True)
class Periodic:
    """Every H-th step: local SGD (Stich 2018, 1805.09767), or FedAvg (McMahan et al. 2017, 1602.05629).

    H = 1 is BSP for optimizers that are linear in the gradient. In FedAvg some of the workers, drawn anew each time,
    enter an average that all receive. On devices the others rest. Machines that are paid for train on, and lose what
    they learned when they are not drawn.

    Attributes:
        every_steps: H, steps of a round.
        participants: part of the workers, C; at least one worker.
        workers: how many there are.
        seed: of the draws.
    """

    every_steps: int
    participants: float = 1.0
    workers: int = 1
    seed: int = 0

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


STEERING_GAIN = 0.5
"""How fast ``auto`` moves the log of delta: two synchronisations that were not wished for raise it by a factor of e,
which at a share of 0.05 forty steps without one take back."""

LEAST_GAP, MOST_GAP = 0.5, 2.0
"""``auto``: steps from one average to the next, over the wished mean."""

GROWTH = 0.5
"""``auto``: that distance over the steps done, at most, until the wished mean is reached: each stretch of local steps
is as long as the run before it."""


@dataclass(frozen=True, kw_only=True)
class GradientChange:
    """How much a worker's gradient changes: one worker's own; not the same on all ranks.

        m_t = (1 - a) m_{t-1} + a |g_t|^2,    change_t = |m_t - m_{t-1}| / m_{t-1}        (SelSync, 2307.07950)

    The published weight of the newest, a, is a hundredth of the number of workers, 0.16 in its experiments. Here it is
    that number whatever the workers, so that a delta means the same on every cluster.

    Attributes:
        smoothing: weight of the newest squared norm, a.
        mean: moving mean of the squared norm; None: there was none yet.
        change: at the last step; 0 at the first.
    """

    smoothing: float
    mean: float | None = None
    change: float = 0.0

    def after(self, square_norm: float) -> GradientChange:
        """With one more step's. One that is not finite is a change without bound, and is not remembered."""
        if not math.isfinite(square_norm):
            return replace(self, change=math.inf)
        if self.mean is None:
            return replace(self, mean=square_norm, change=0.0)
        mean = (1 - self.smoothing) * self.mean + self.smoothing * square_norm
        if self.mean == 0:
            return replace(self, mean=mean, change=0.0 if mean == 0 else math.inf)
        return replace(self, mean=mean, change=abs(mean - self.mean) / self.mean)


class SelSyncState(Record):
    """What is remembered.

    Attributes:
        log_delta: where delta is steered; None: it is not, or no change was seen yet.
    """

    log_delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class SelSync:
    """Synchronises where enough workers meet a large enough change, and in each of the first steps.

    Attributes:
        delta: change from which a worker votes; infinite: votes are counted in vain. None: steered.
        synchronised_share: of the steps, where delta is steered.
        needed: workers that have to vote for it.
        window: first steps, each of which synchronises while the moving norm settles; where delta is fixed.
        max_local_steps: most steps in a row without; None: any number.
    """

    delta: float | None
    synchronised_share: float
    needed: int
    window: int
    max_local_steps: int | None = None

    votes: ClassVar[bool] = True
    """True: in every step the workers vote whether to synchronize."""

    def initial(self) -> SelSyncState:
        """The state before the first vote."""
        return SelSyncState()

    def threshold(self, state: SelSyncState) -> float | None:
        """Delta as it is now; None: it is steered, and no change was seen yet."""
        if self.delta is not None:
            return self.delta
        return None if state.log_delta is None else math.exp(state.log_delta)

    def decide(self, state: SelSyncState, observation: SyncObservation) -> tuple[SelSyncState, SyncDecision]:
        """Count the votes (see `SyncPolicy`)."""
        change = None if observation.changes is None else self._decisive(observation.changes)
        threshold = self.threshold(state)
        voted = change is not None and threshold is not None and threshold < math.inf and change >= threshold
        overdue = self.max_local_steps is not None and observation.local_steps > self.max_local_steps
        if self.delta is None:
            return self._paced(state, observation, change, voted=voted, overdue=overdue)
        in_window = observation.step <= self.window and threshold != math.inf
        return state, SyncDecision(synchronise=voted or overdue or in_window)

    def _paced(
        self, state: SelSyncState, observation: SyncObservation, change: float | None, *, voted: bool, overdue: bool
    ) -> tuple[SelSyncState, SyncDecision]:
        """Where delta is steered: not too soon after the last average, nor too late."""
        mean, gap = 1 / self.synchronised_share, observation.local_steps
        early = 1 + GROWTH * observation.step
        if early < mean:
            return self._begun(state, change), SyncDecision(synchronise=overdue or gap >= early)
        due = gap >= MOST_GAP * mean
        synchronise = overdue or due or (voted and gap >= LEAST_GAP * mean)
        return self._steered(state, change, synchronised=synchronise), SyncDecision(synchronise=synchronise)

    def _decisive(self, changes: tuple[float, ...]) -> float:
        """The change that the last of the needed votes depends on."""
        told = sorted((math.inf if math.isnan(change) else change for change in changes), reverse=True)
        return told[min(self.needed, len(told)) - 1]

    def _begun(self, state: SelSyncState, change: float | None) -> SelSyncState:
        """Delta begins at the first change that is one."""
        if state.log_delta is not None or change is None or not 0 < change < math.inf:
            return state
        return SelSyncState(log_delta=math.log(change))

    def _steered(self, state: SelSyncState, change: float | None, *, synchronised: bool) -> SelSyncState:
        """Move delta to where the wished share of the steps synchronises (Robbins and Monro 1951).

        ``log delta += gain (synchronised - share)`` is at rest where a step does so with the wished probability,
        whatever the scale of the changes, and follows them.
        """
        state = self._begun(state, change)
        if state.log_delta is None:
            return state
        return SelSyncState(log_delta=state.log_delta + STEERING_GAIN * (synchronised - self.synchronised_share))


def votes_needed(votes: str, quorum: float, workers: int) -> int:
    """How many of the workers have to vote for a synchronisation: one, more than half, or a part of them."""
    match votes:
        case "any":
            return 1
        case "majority":
            return workers // 2 + 1
        case _:
            return max(1, math.ceil(quorum * workers - 1e-9))


def choose_sync_policy(
    sync: Synchronization, *, workers: int, seed: int, dataset_size: int, global_batch_size: int
) -> SyncPolicy[Any] | None:
    """The policy that says when parameters are averaged; None: nobody asks (``bsp``).

    Args:
        sync: the choice.
        workers: of the run.
        seed: of draws.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
    """
    match sync.name:
        case "local-sgd":
            return Periodic(every_steps=sync.every_steps)
        case "fedavg":
            return Periodic(
                every_steps=steps_of_round(sync.every_epochs, dataset_size, global_batch_size),
                participants=sync.participants,
                workers=workers,
                seed=seed,
            )
        case "selsync":
            deltas = {"auto": None, "never": math.inf}
            return SelSync(
                delta=deltas[sync.delta] if isinstance(sync.delta, str) else sync.delta,
                synchronised_share=sync.synchronised_share,
                needed=votes_needed(sync.votes, sync.quorum, workers),
                window=sync.window,
                max_local_steps=sync.max_local_steps,
            )
        case _:
            return None
