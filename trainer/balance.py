"""The shares in use, and the moments at which the batch policy is asked for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import first_shares, micro_batch_size, within_memory
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.milestones import may_judge_shares
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
