"""What a ratio policy is: a pure function from what all workers measured to what is sent in the next steps.

``(state, observation) -> (state, decision)`` over values that all ranks hold alike, so all ranks decide the same
without another message. The state is a small plain record, and travels in checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hetopt.core.artifact import Record
from hetopt.core.comm.network_state import NetworkState
from hetopt.trainer.policies.ratio.gain_curve import GainCurve, gain_of
from hetopt.trainer.policies.ratio.paired_trial import Verdict

StateT = TypeVar("StateT", bound=Record)

DENSE = 1.0
"""The ratio at which everything is sent, uncompressed and with nothing held back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioObservation:
    """What one control period was like. All its steps were exchanged in the same way.

    Attributes:
        step: steps done when the period ended.
        steps: of them, in the period.
        epoch: passes over the data completed, with fractions.
        workers: in the group.
        ratio: fraction of the elements that was sent; 1: dense.
        compute_s: median time of a step's computation on the slowest worker, the backward pass included.
        backward_s: the part of it that makes gradients; 0 where nothing overlaps it.
        compress_s: median time to compress and decompress, on the slowest worker.
        sync_s: median time of the exchange on the worker that waited least.
        sent_bytes: that one worker contributes to one exchange.
        kept_energy, energy: of gradient and residual, in rank order: what was sent and what there was, means over the
            period. Equal where everything is sent. The first is negative where rounding the sum of a slice, which
            counts against whoever sums it, was more than that worker had itself.
        gradient_norm: of the gradient without residuals, root of the mean square over workers and steps.
        gain_curve: absent in periods in which no step looked.
        network: as tracked, this period included; absent where nothing tracks it.
        changes: how often something has changed, the time of a step or the network (`NetworkWatch.changes`).
        is_suspect: the period may be a first sign of that, or was disturbed.
        whole_s: median time of a step from begin to end; absent where only its parts were timed.
        option: `Option.key` of the exchange that was in use; absent where nothing plans.
        learning_rate: of the first parameter group; absent where nobody asks.
        steps_left: until the run ends by its own rules; absent where that is not known.
        loss: mean over the samples of the period; absent where nobody asks.
        verdict: of a trial that was made since the last decision; absent: none was.
        level_gains: means of what the candidate and the floor would have kept, where steps chose between them.

    Raises:
        ValueError: the parts do not match, or a number is impossible or not finite.
    """

    step: int
    steps: int
    epoch: float
    workers: int
    ratio: float
    compute_s: float
    compress_s: float
    sync_s: float
    sent_bytes: int
    kept_energy: tuple[float, ...]
    energy: tuple[float, ...]
    gradient_norm: float
    gain_curve: GainCurve | None = None
    backward_s: float = 0.0
    network: NetworkState | None = None
    changes: int = 0
    is_suspect: bool = False
    whole_s: float | None = None
    option: str | None = None
    learning_rate: float | None = None
    steps_left: int | None = None
    loss: float | None = None
    verdict: Verdict | None = None
    level_gains: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.step or not 0 <= self.epoch < math.inf:
            raise ValueError(f"impossible period: {self.steps} of {self.step} steps, epoch {self.epoch}")
        if self.workers < 1 or len(self.kept_energy) != self.workers or len(self.energy) != self.workers:
            raise ValueError("kept_energy and energy have an entry for each worker")
        if not 0 < self.ratio <= 1 or self.sent_bytes < 0:
            raise ValueError(f"impossible exchange: ratio {self.ratio}, {self.sent_bytes} bytes")
        times = (self.compute_s, self.backward_s, self.compress_s, self.sync_s)
        numbers = (*times, self.gradient_norm, *self.energy)
        if any(not 0 <= number < math.inf for number in (*numbers, self.whole_s or 0.0)):
            raise ValueError(f"times, norms and energies must be finite and not negative, not {numbers}")
        if not all(map(math.isfinite, self.kept_energy)):
            raise ValueError(f"kept energies must be finite, not {self.kept_energy}")
        if not self.step_time_s > 0 or self.backward_s > self.compute_s:
            raise ValueError(f"impossible times of a step: {times}")

    @property
    def step_time_s(self) -> float:
        """Seconds of a step: as timed, or all of its parts that were."""
        return self.parts_s if self.whole_s is None else max(self.whole_s, self.compute_s)

    @property
    def parts_s(self) -> float:
        """Seconds of a step's parts, which are medians of the worker that matters for each.

        Where workers share cores a step takes longer: another one is the slowest every time, and each may have to wait
        before it can begin the next part.
        """
        return self.compute_s + self.compress_s + self.sync_s

    @property
    def gain(self) -> float:
        """Energy sent over energy there was, of all workers, in [0, 1]; 1 where there was none."""
        return gain_of(sum(self.kept_energy), sum(self.energy))

    @property
    def gains(self) -> tuple[float, ...]:
        """Retained energy of each worker, as a share."""
        return tuple(map(gain_of, self.kept_energy, self.energy))

    def gains_at(self, ratio: float) -> tuple[float, ...] | None:
        """Each worker's gain at a ratio: off the curve, or as sent if that was the ratio; None where nobody looked."""
        if self.gain_curve is not None:
            return self.gain_curve.gains(ratio)
        return self.gains if ratio == self.ratio else None

    def gain_at(self, ratio: float) -> float | None:
        """The gain over all workers at a ratio, likewise."""
        if self.gain_curve is not None:
            return self.gain_curve.gain(ratio)
        return self.gain if ratio == self.ratio else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioDecision:
    """What is sent from now on.

    Attributes:
        ratio: fraction of the elements; 1: dense, nothing held back, and what was held back goes first.
        reason: in words why, if something changed; absent if not.
        option: `Option.key` of the exchange to use; absent: the planner chooses among those of this ratio.
        measure_gain: the last step of the next period yields a gain curve, even a dense one.
        look_after_steps: end the next period after so many steps; absent: the run's control period.
        try_ratio: before anything else is exchanged, twins are to tell whether this ratio holds training back.
        floor_ratio, least_gain: of a selection from a selection, that each step sends what keeps so much; absent: it
            sends the ratio (`hetopt.trainer.comm.levels`).
    """

    ratio: float
    reason: str | None = None
    option: str | None = None
    measure_gain: bool = False
    look_after_steps: int | None = None
    try_ratio: float | None = None
    floor_ratio: float | None = None
    least_gain: float | None = None

    @property
    def changed(self) -> bool:
        """Whether something else is sent than before."""
        return self.reason is not None


class RatioPolicy(Protocol, Generic[StateT]):
    """Says how much of the gradient is sent: asked once a control period, with the same arguments on every rank."""

    def initial(self) -> StateT:
        """The state before the first observation; its type reads a checkpoint's back (`Record.model_validate`)."""
        ...

    def first(self, network: NetworkState | None) -> RatioDecision:
        """What to send before anything was observed.

        Args:
            network: as measured between the workers; absent where it was not.
        """
        ...

    def decide(self, state: StateT, observation: RatioObservation) -> tuple[StateT, RatioDecision]:
        """The next state, and what to send from now on."""
        ...


def percent(ratio: float) -> str:
    """A ratio for people: how much is sent, and how many times less that is."""
    return "everything" if ratio >= 1 else f"{100 * ratio:.3g} % ({1 / ratio:.4g}x)"
