"""What the machines of a candidate are told to do: the run behind a plan."""

from __future__ import annotations

import math

from hetopt.core.comm.composition import METHODS
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.training_laws import learning_rate_scale
from hetopt.optimizer.cost.checkpointing import CHECKPOINT_INTERVAL_S
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.plan import Candidate, Goal, ScalingRule

STEPS_MARGIN = 2.0
"""A run that has not reached its target after this times the upper end of its steps ends."""


def run_spec(
    model: FittedModel,
    goal: Goal,
    chosen: Candidate,
    *,
    seed: int,
    evaluate_every_epochs: float,
    interval_s: float = math.inf,
    learning_rate_rule: ScalingRule | None = None,
    equal_progress: bool = False,
) -> RunSpec:
    """Return the run of a candidate: the record by which its machines train.

    Args:
        model: what the profile says.
        goal: of the run.
        chosen: the candidate.
        seed: of the run.
        evaluate_every_epochs: epochs between evaluations.
        interval_s: work between checkpoints that its forecast was made with; infinite where no machine is taken back,
            which saves now and then, too.
        learning_rate_rule: absent: the task's.
        equal_progress: whether the run ends with the steps that its batch size needs for what was asked for.
    """
    profile = model.profile
    job = profile.job
    workers = [
        WorkerSpec(
            host=f"{group.instance_type}-{'own' if group.is_own else group.market}-{machine}",
            type=group.instance_type,
            local_batch_size=group.local_batch_sizes[machine * group.workers_per_machine + place],
            max_local_batch_size=None if group.assumed is None else group.assumed.together,
        )
        for group in chosen.groups
        for machine in range(group.machines)
        for place in range(group.workers_per_machine)
    ]
    rule = learning_rate_rule or job.learning_rate_rule
    # A plan that sends a part says where to begin; the run knows better how much. One that does not leaves it at that:
    # nobody's gradient is thinned out who was not told so.
    selects = len(workers) > 1 and METHODS[chosen.compression.name].by_ratio
    return RunSpec(
        task=job.task,
        script=job.script,
        resumes=job.resumes,
        data_dir=profile.data_dir,
        seed=seed,
        workers=tuple(workers),
        compression=chosen.compression,
        ratio_policy="auto" if selects else "fixed",
        collective_policy="cheapest" if selects else "fixed",
        sync=chosen.sync,
        precision=chosen.precision,
        slowdown_coefficient=round(model.convergence.penalty.cautious_coefficient, 2),
        learning_rate_scale=learning_rate_scale(rule, chosen.global_batch_size, job.batch_size),
        stop=_stop(goal, chosen, as_many=equal_progress and chosen.global_batch_size != job.batch_size),
        evaluate_every_epochs=evaluate_every_epochs,
        checkpoint_every_s=round(interval_s) if math.isfinite(interval_s) else CHECKPOINT_INTERVAL_S[1],
    )


def _stop(goal: Goal, chosen: Candidate, *, as_many: bool) -> StopRule:
    if goal.ends == "target":
        return StopRule(target=True, max_steps=math.ceil(STEPS_MARGIN * chosen.prediction.steps.high))
    if as_many:
        return StopRule(max_steps=math.ceil(chosen.prediction.steps.value))
    if goal.ends == "epochs":
        return StopRule(max_epochs=goal.amount)
    return StopRule(max_steps=math.ceil(goal.amount or 1))
