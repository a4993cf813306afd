"""What the machines of a candidate are told to do: the run behind a plan."""

from __future__ import annotations

import math

from hetopt.optimizer.convergence import SEED_LOG_SD, Convergence
from hetopt.optimizer.cost import checkpoint_time_s, daly_interval_s, scarce_probability
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.plan import Candidate, Goal, ScalingRule
from hetopt.profiler.inflation import deterministic_share
from hetopt.profiler.profile import Profile
from hetopt.trainer.control.learning_rate import adascale_gain, learning_rate_scale
from hetopt.trainer.spec import RunSpec, StopRule, WorkerSpec

CHECKPOINT_INTERVAL_S = (60.0, 1800.0)

STEPS_MARGIN = 2.0
"""A run that has not reached its target after this times the upper end of its steps ends."""

LEAST_DETERMINISTIC_SHARE = SEED_LOG_SD
"""Steps to a target scatter by that much between seeds. Pilots that show less of a share cannot tell it from none, and
compression that costs no steps at all would always look good."""


def run_spec(
    model: FittedModel,
    goal: Goal,
    chosen: Candidate,
    *,
    seed: int,
    evaluate_every_epochs: float,
    learning_rate_rule: ScalingRule | None = None,
) -> RunSpec:
    """What the machines of a candidate are told to do. The learning rate follows the task's rule, or the one given."""
    profile = model.profile
    job = profile.job
    workers = [
        WorkerSpec(
            host=f"{group.instance_type}-{group.market}-{machine}",
            type=group.instance_type,
            local_batch_size=group.local_batch_sizes[machine * group.workers_per_machine + place],
        )
        for group in chosen.groups
        for machine in range(group.machines)
        for place in range(group.workers_per_machine)
    ]
    rule = learning_rate_rule or job.learning_rate_rule
    # A plan that compresses says where to begin; the run knows better how much. One that does not leaves it at that:
    # nobody's gradient is thinned out who was not told so.
    compresses = len(workers) > 1 and chosen.compression.name != "identity"
    return RunSpec(
        task=job.task,
        data_dir=profile.data_dir,
        seed=seed,
        workers=tuple(workers),
        compression=chosen.compression,
        ratio_policy="auto" if compresses else "fixed",
        collective_policy="cheapest" if compresses else "fixed",
        deterministic_share=share_beyond_noise(model.convergence, chosen.global_batch_size),
        learning_rate_scale=_learning_rate_scale(model, rule, chosen.global_batch_size),
        learning_rate_rule="adascale" if rule == "adascale" else "fixed",
        stop=_stop(goal, chosen),
        evaluate_every_epochs=evaluate_every_epochs,
        checkpoint_every_s=_checkpoint_interval_s(profile, chosen),
    )


def share_beyond_noise(convergence: Convergence, batch_size: int) -> float:
    """The share of the steps to the target that compression stretches, see `hetopt.profiler.inflation`.

    1, the cautious end, where no pilot says how steps depend on the batch size.
    """
    steps, samples = convergence.minimum_steps, convergence.minimum_samples
    if steps is None or samples is None:
        return 1.0
    critical = samples / steps if steps > 0 else math.inf
    return max(LEAST_DETERMINISTIC_SHARE, round(deterministic_share(batch_size, critical), 4))


def _learning_rate_scale(model: FittedModel, rule: ScalingRule, batch_size: int) -> float:
    """The factor on the learning rate that the task was tuned with.

    AdaScale begins with the gain that the noise of the pilots promises, or by the square root where it is not known.
    """
    tuned, noise_scale = model.profile.job.batch_size, model.convergence.noise_scale
    if rule != "adascale":
        return learning_rate_scale(rule, batch_size, tuned)
    if noise_scale is None:
        return learning_rate_scale("sqrt", batch_size, tuned)
    return adascale_gain(noise_scale, batch_size, tuned)


def _stop(goal: Goal, chosen: Candidate) -> StopRule:
    if goal.ends == "target":
        return StopRule(target=True, max_steps=math.ceil(STEPS_MARGIN * chosen.prediction.steps.high))
    if goal.ends == "epochs":
        return StopRule(max_epochs=goal.amount)
    return StopRule(max_steps=math.ceil(goal.amount or 1))


def _checkpoint_interval_s(profile: Profile, chosen: Candidate) -> float:
    """Daly's interval at the cluster's mean hazard, within bounds that keep both loss and overhead small."""
    per_hour = sum(
        group.machines * scarce_probability(group.market, group.interruption_band) / 2 for group in chosen.groups
    )
    low, high = CHECKPOINT_INTERVAL_S
    if per_hour == 0:
        return high
    interval = float(daly_interval_s(3600 / per_hour, checkpoint_time_s(profile.job.gradient_bytes)))
    return min(high, max(low, round(interval)))
