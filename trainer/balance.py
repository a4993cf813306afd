"""The shares in use, and the moments at which the batch policy is asked for others.

When things are due in a run: its end, the next evaluation, the next look at the gathered statistics.

Progress is counted in samples, so that it means the same when the global batch differs between attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import first_shares, micro_batch_size, within_memory
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec, StopRule
from hetopt.trainer.policies.policy import BatchPolicy
from hetopt.trainer.statistics import Period


class Balance:
    """The same on every rank: what changes it is what all ranks read.

    Args:
        spec: of the run.
        policy: decides.
        minimum: least share of a worker, in samples.
    """

    def __init__(self, spec: RunSpec, policy: BatchPolicy[Any], *, minimum: int = 1) -> None:
        self._spec = spec
        self._policy = policy
        self._state: Record = policy.initial()
        self._unjudged_steps = 0
        self._unjudged_s = 0.0
        self.shares = first_shares(spec, minimum=minimum)

    def is_due(self, period: Period) -> bool:
        """Whether shares are to be judged now, after one more period."""
        self._unjudged_steps += period.steps
        self._unjudged_s += period.steps * period.step_time_s
        if not may_judge_shares(self._unjudged_steps, self._unjudged_s, self._spec.control_period_steps):
            return False
        self._unjudged_steps, self._unjudged_s = 0, 0.0
        return True

    def judge(self, period: Period, epoch: int) -> Event | None:
        """Let the policy decide; what changed, if anything did.

        Args:
            period: the last one, whose medians are over all steps since shares were last judged.
            epoch: completed epochs.
        """
        self._state, decision = self._policy.decide(self._state, period.observation(epoch))
        if not decision.changed:
            return None
        before, self.shares = self.shares, within_memory(self._spec, decision.local_batch_sizes)
        if self.shares == before:
            return None
        return {"before": list(before), "after": list(self.shares), "reason": decision.reason}

    def state(self) -> Mapping[str, object]:
        """What the policy remembers, as plain JSON."""
        return self._state.model_dump(mode="json")

    def resume(self, *, policy: str, shares: tuple[int, ...], state: Mapping[str, object]) -> None:
        """Continue with what a checkpoint holds, where it suits the cluster and the policy that the run has now.

        Raises:
            BadInput: the state is damaged.
        """
        spec = self._spec
        if policy != spec.batch_policy or len(shares) != len(spec.workers):
            return
        if policy != "rate" and sum(shares) != spec.global_batch_size:
            return
        if spec.batch_policy == "allocation" and any(share % (micro_batch_size(spec) or 1) for share in shares):
            return
        try:
            self._state = type(self._policy.initial()).model_validate(state)
        except ValidationError:
            raise BadInput(
                f"The checkpoint's state of the batch policy '{policy}' is damaged.", hint="use an older checkpoint"
            ) from None
        self.shares = shares


LONGEST_PERIOD_S = 2.0
"""A control period takes no longer than this (unless a single step does), so that wishes to stop are heard in time."""

_STEPS_TO_JUDGE = 10
"""Shares are judged by this many steps, or by as many as `LONGEST_PERIOD_S` holds."""

# Products of a decimal number of epochs and a dataset size may miss the integer they mean by rounding.
_ROUNDING = 1e-9


def may_judge_shares(steps: int, period_s: float, control_period_steps: int) -> bool:
    """Whether so many steps, which took so long, are enough to judge shares by (a period may be very short)."""
    return steps >= min(_STEPS_TO_JUDGE, control_period_steps) or period_s >= LONGEST_PERIOD_S / 2


@dataclass(frozen=True, kw_only=True)
class Milestones:
    """The fixed points of one run.

    Attributes:
        stop: when it ends.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
        evaluate_every_epochs: epochs between evaluations.
        control_period_steps: most steps between looks at the statistics.
    """

    stop: StopRule
    dataset_size: int
    global_batch_size: int
    evaluate_every_epochs: float
    control_period_steps: int

    def ended_by(self, step: int, samples_seen: int) -> str | None:
        """Which limit has been reached: "steps", "epochs" or none."""
        if self.stop.max_steps is not None and step >= self.stop.max_steps:
            return "steps"
        if self.stop.max_epochs is not None and samples_seen >= self._samples(self.stop.max_epochs):
            return "epochs"
        return None

    def steps_left(self, step: int, samples_seen: int) -> int | None:
        """Steps until a limit is reached, at least 1; None where a target may end the run before."""
        if self.stop.target:
            return None
        limits = []
        if self.stop.max_steps is not None:
            limits.append(self.stop.max_steps - step)
        if self.stop.max_epochs is not None:
            limits.append(self._steps_to(self._samples(self.stop.max_epochs), samples_seen))
        return max(1, min(limits)) if limits else None

    def evaluation_due(self, samples_before: int, samples_seen: int) -> bool:
        """Whether an evaluation point was passed between two positions."""
        return self._evaluations(samples_seen) > self._evaluations(samples_before)

    def all_meet(self, step: int, samples_seen: int, steps: int) -> bool:
        """Whether the run ends or is evaluated after so many more steps: then all workers meet there anyway."""
        seen = samples_seen + steps * self.global_batch_size
        return self.ended_by(step + steps, seen) is not None or self.evaluation_due(samples_seen, seen)

    def period_steps(self, step: int, samples_seen: int, step_time_s: float | None) -> int:
        """Steps until the next look at the statistics: never beyond the end of the run or an evaluation point.

        Args:
            step: steps done.
            samples_seen: samples done.
            step_time_s: time of a recent step; None: unknown, so look after the first.
        """
        steps = 1 if step_time_s is None else self.control_period_steps
        if step_time_s is not None and steps * step_time_s > LONGEST_PERIOD_S:
            steps = int(LONGEST_PERIOD_S / step_time_s)
        next_evaluation = self._samples((self._evaluations(samples_seen) + 1) * self.evaluate_every_epochs)
        steps = min(steps, self._steps_to(next_evaluation, samples_seen))
        if self.stop.max_epochs is not None:
            steps = min(steps, self._steps_to(self._samples(self.stop.max_epochs), samples_seen))
        if self.stop.max_steps is not None:
            steps = min(steps, self.stop.max_steps - step)
        return max(1, steps)

    def _samples(self, epochs: float) -> int:
        return math.ceil(epochs * self.dataset_size * (1 - _ROUNDING))

    def _evaluations(self, samples_seen: int) -> int:
        """Evaluation points up to a position."""
        return int(samples_seen / (self.evaluate_every_epochs * self.dataset_size) * (1 + _ROUNDING))

    def _steps_to(self, samples: int, samples_seen: int) -> int:
        return -(-(samples - samples_seen) // self.global_batch_size)
