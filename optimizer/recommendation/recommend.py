"""Profile, catalogue and goal in, plan out: the pure function behind `hetopt recommend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version

from hetopt.core.compression_slowdown import LEAST_GAIN, MOST_LOST
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.convergence.convergence import (
    Convergence,
    EpochSteps,
    FixedSteps,
    StepsModel,
    batch_range,
    target_steps,
)
from hetopt.optimizer.cost.billing import Billing, load_billing
from hetopt.optimizer.cost.cost import DETECTION_S, STARTUP_LOG_SD, Rates, checkpoint_bytes, checkpoint_time_s
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.offer_filter import narrow
from hetopt.optimizer.plan import Candidate, Goal, Plan
from hetopt.optimizer.recommendation.candidates import make_candidate
from hetopt.optimizer.recommendation.choices import choices, not_worth_renting, reasons
from hetopt.optimizer.recommendation.confidence import confident
from hetopt.optimizer.recommendation.explain import explain
from hetopt.optimizer.recommendation.infeasible import larger_quotas, nothing_fits, nothing_usable
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.planned_run import run_spec
from hetopt.optimizer.recommendation.remedies import Question, remedies
from hetopt.optimizer.recommendation.sensitivity import insight
from hetopt.optimizer.search.forecast import JobModel
from hetopt.optimizer.search.search import Effort, Found, search
from hetopt.optimizer.search.search_space import (
    ExchangeOption,
    SearchSpace,
    batch_ladder,
    drop_dominated,
    exchange_options,
    local_exchange,
    machine_options,
)
from hetopt.optimizer.step_time.links import network_log_sd
from hetopt.optimizer.step_time.local_options import asked_option, is_planned, measured_options
from hetopt.optimizer.step_time.profiled import learned_shape, sampled_machines
from hetopt.optimizer.step_time.sampled import SampledMachines
from hetopt.optimizer.step_time.shape import Shape
from hetopt.optimizer.step_time.transfer import ReferenceHost, reference_host

__all__ = ["Options", "evaluation_period_epochs", "job_of", "minimum_gain", "recommend", "space_of", "steps_model"]

EVALUATIONS_TO_TARGET = 16
"""Looks at the target in the expected run: a run overshoots by half the time between two."""

EVALUATION_SHARE = 0.1
"""Evaluations take at most about this share of the training time."""


def recommend(
    profile: Profile,
    catalog: Catalog,
    goal: Goal,
    options: Options,
    *,
    seed: int,
    now: datetime,
    billing: Billing | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The best plan for the goal within its budget and deadline. The same arguments give the same plan.

    Ctrl-C ends the search early, with the best plan so far.

    Args:
        profile: what was measured of the job.
        catalog: what can be rented.
        goal: what the run is for, and its limits.
        options: what narrows the search.
        seed: of the search.
        now: the plan's date.
        billing: the prices beside the machines' own; absent: those of the catalogue's folder.
        tell: is called with what is going on.

    Raises:
        BadInput: the goal does not suit the profile, or nothing in the catalogue can be predicted from it.
        NoFeasiblePlan: nothing fits, even on expectation; names the cheapest (or quickest) plan that would do. A plan
            that fits on expectation and keeps its limits with less than the asked probability is returned: see
            `Plan.risk`.
    """
    goal = _completed(goal, profile).model_copy(update={"zone": options.zone, "zones": options.zones})
    model = fit(profile)
    every = evaluation_period_epochs(model, goal)
    shape, sampled = learned_shape(model), sampled_machines(profile, catalog.instance_types)
    job = job_of(model, shape, sampled, goal, options, every, Rates.of(billing or load_billing(catalog.directory)))
    host = reference_host(model, catalog.instance_types.values())
    space = space_of(model, shape, sampled, catalog, goal, options, host)
    limits = options.limits(goal)
    found = search(space, job, limits, seed=seed, effort=options.effort, tell=tell)
    # Hints are found by searching again: quietly, and without the trials of the journal.
    again = replace(options.effort, journal=None)
    question = Question(
        space=space,
        job=job,
        confidence=options.confidence,
        seed=seed,
        search=lambda other: search(space, job, other, seed=seed, effort=again),
    )
    if found.chosen is None:
        tell("what would have to be allowed")
        more = None
        if options.quotas:
            wide = space_of(model, shape, sampled, catalog, goal, replace(options, quotas={}), host)
            more = larger_quotas(
                wide, search(wide, job, limits, seed=seed, effort=Effort(types=1)), options.quotas, limits
            )
        raise nothing_fits(question, found, limits, more)
    if limits.budget_usd is not None or limits.deadline_s is not None:
        told = confident(space, job, found, limits, options.confidence, seed=seed)
        found = told.found
        tell("what the choice depends on")
        seen = insight(question, found, limits, confidence=question.asked if told.by_chance else None)
        if seen.is_risk:
            tell("what would have to be allowed")
            hints = () if options.accept_risk else tuple(remedies(question, limits, most=told.most).in_words())
            seen = seen.model_copy(update={"remedies": hints, "risk_accepted": options.accept_risk})
    else:
        seen = insight(question, found, limits)

    def candidate(row: int) -> Candidate:
        return make_candidate(space, job, found.cluster(row), found.forecast, row)

    assert found.chosen is not None
    chosen = candidate(found.chosen)
    ways = choices(model, question, found, limits)
    return Plan(
        created=now.isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        goal=goal,
        chosen=chosen,
        pareto=tuple(candidate(int(row)) for row in found.front),
        choices=ways,
        advice=not_worth_renting(ways, chosen, goal.deadline_s),
        reasons=reasons(ways, chosen),
        explanation=explain(
            model, host, found, chosen, candidate, limits, catalog, seen, to_target=goal.ends == "target"
        ),
        searched=_searched(space, found),
        insight=seen,
        run=run_spec(
            model, goal, chosen, seed=seed, evaluate_every_epochs=every, learning_rate_rule=options.learning_rate_rule
        ),
        profile=profile,
    )


def steps_model(model: FittedModel, goal: Goal, evaluate_every_epochs: float) -> StepsModel:
    """Steps that a goal needs.

    Raises:
        BadInput: the goal is the target, and no pilot of the profile reached it.
    """
    dataset_size = model.profile.job.dataset_size
    if goal.ends == "target":
        return target_steps(model.convergence, check_every_samples=evaluate_every_epochs * dataset_size)
    if goal.amount is None:
        raise BadInput(f"The goal does not say how many {goal.ends}.", hint=f"give `{goal.ends}`")
    if goal.ends == "epochs":
        return EpochSteps(epochs=goal.amount, dataset_size=dataset_size)
    return FixedSteps(count=math.ceil(goal.amount))


def minimum_gain(convergence: Convergence, *, to_target: bool) -> float:
    """Gradient energy that compression must retain.

    To a target, gradient that is held back is made up for by more steps, which are counted. A run of fixed length has
    nothing to make up for it with: there it may lose little, even at the law's upper end.
    """
    return LEAST_GAIN if to_target else convergence.penalty.least_gain(1 + MOST_LOST)


def evaluation_period_epochs(model: FittedModel, goal: Goal) -> float:
    """Epochs between evaluations: one, or less where a run to a target would overshoot by much of its own length."""
    if goal.ends != "target":
        return 1.0
    job = model.profile.job
    steps = target_steps(model.convergence)
    epochs = float(steps.steps(job.batch_size, 1.0)) * job.batch_size / job.dataset_size
    epoch_s = model.reference.step_time.time_s(job.batch_size) * job.dataset_size / job.batch_size
    cheapest = (model.profile.evaluation_s or 0.0) / (EVALUATION_SHARE * epoch_s)
    return min(1.0, max(epochs / EVALUATIONS_TO_TARGET, cheapest, job.batch_size / job.dataset_size))


def _completed(goal: Goal, profile: Profile) -> Goal:
    """The goal with the task's own target written in. Pilots tell nothing about another one."""
    job = profile.job
    if goal.ends != "target":
        return goal
    if (goal.target_metric or job.target_metric) != job.target_metric or (
        goal.target_value is not None and goal.target_value != job.target_value
    ):
        raise BadInput(
            f"The profile was taken towards {job.target_metric}={job.target_value:g}, not "
            f"{goal.target_metric or job.target_metric}={goal.target_value}.",
            hint="change the task's target and profile it again, or give the run's length with `epochs` or `steps`",
        )
    return goal.model_copy(update={"target_metric": job.target_metric, "target_value": job.target_value})


def job_of(
    model: FittedModel,
    shape: Shape,
    sampled: SampledMachines | None,
    goal: Goal,
    options: Options,
    every: float,
    rates: Rates,
) -> JobModel:
    """What does not depend on the cluster, for a run that evaluates ``every`` so many epochs."""
    profile = model.profile
    return JobModel(
        steps=steps_model(model, goal, every),
        evaluate_every_samples=every * profile.job.dataset_size,
        shape=shape,
        network_log_sd=(sampled.network_log_sd if sampled is not None else None) or network_log_sd(model),
        startup_s=options.startup_s,
        startup_log_sd=STARTUP_LOG_SD,
        checkpoint_s=checkpoint_time_s(profile.job.gradient_bytes),
        checkpoint_bytes=checkpoint_bytes(profile.job.gradient_bytes) if profile.job.resumes else 0.0,
        restart_s=options.startup_s + DETECTION_S,
        rates=rates,
        zones=options.zones,
        resumes=profile.job.resumes,
    )


def space_of(
    model: FittedModel,
    shape: Shape,
    sampled: SampledMachines | None,
    catalog: Catalog,
    goal: Goal,
    options: Options,
    host: ReferenceHost,
) -> SearchSpace:
    """What a search may choose from.

    Raises:
        BadInput: nothing that is asked for is offered, or can be predicted from this profile.
    """
    offered = narrow(catalog, options.wishes)
    usable, excluded = machine_options(model, offered, host, shape, sampled, options.observed, options.zone)
    if not usable:
        raise nothing_usable(catalog.region, offered, excluded)
    job = model.profile.job
    to_target = goal.ends == "target"
    if options.batch_size is not None and options.batch_size > job.dataset_size:
        raise BadInput(
            f"`batch_size` must be at most {job.dataset_size:,}, the samples of the training data, "
            f"got {options.batch_size:,}.",
            hint="with all of them, an epoch is one step",
        )
    if options.batch_size is not None:
        batches: tuple[int, ...] = (options.batch_size,)
    elif goal.ends == "steps":
        batches = (min(job.batch_size, job.dataset_size),)
    else:
        smallest, largest = batch_range(model.convergence, job.batch_size, to_target=to_target)
        batches = batch_ladder(min(smallest, job.dataset_size), min(largest, job.dataset_size), job.batch_size)
    kept = drop_dominated(usable)
    return SearchSpace(
        options=kept,
        batch_sizes=batches,
        exchanges=_exchanges(model, options, to_target=to_target),
        max_machines=min(options.max_machines or options.max_workers, options.max_workers),
        max_workers=options.max_workers,
        max_hourly_usd=options.max_hourly_usd,
        quotas=options.quotas,
        offered=len(offered),
        usable=len(usable),
        excluded=excluded,
    )


def _exchanges(model: FittedModel, options: Options, *, to_target: bool) -> tuple[ExchangeOption, ...]:
    """Gradients compressed or not, and what pilots say of workers that train for themselves; or what was asked for."""
    job, gate, asked = model.profile.job, model.convergence.local, options.sync
    size, batch = job.dataset_size, options.batch_size or job.batch_size
    if asked is not None and is_planned(asked):
        option = asked_option(
            asked, gate, to_target=to_target, dataset_size=size, batch=batch, max_workers=options.max_workers
        )
        return (local_exchange(option, job.parameters, options.max_workers),)
    local = measured_options(gate, to_target=to_target, dataset_size=size, batch=batch) if asked is None else ()
    return exchange_options(
        model,
        minimum_gain=options.minimum_gain or minimum_gain(model.convergence, to_target=to_target),
        max_workers=options.max_workers,
        local=tuple(local),
    )


def _searched(space: SearchSpace, found: Found) -> str:
    left_out = f" (left out: {_counted(space.excluded)})" if space.excluded else ""
    proof = found.proof
    shown = ""
    if proof is not None and proof.complete:
        types = "two" if proof.types == 2 else "up to three"
        shown = f"; mixes of {types} types by branch and bound over {proof.boxes:,} boxes"
    study = f" ({found.trials} trials of a study)" if found.trials else ""
    stopped = "; stopped early" if found.stopped else ""
    return (
        f"{space.offered} offers, {space.usable} usable{left_out}, {len(space.options)} not beaten by another in every "
        f"respect; {found.uniform:,} clusters of one type with up to {space.max_workers} workers, "
        f"{len(space.batch_sizes)} batch sizes and {len(space.exchanges)} exchanges, and {found.mixes:,} mixes priced "
        f"one by one{study}{shown}{stopped}"
    )


def _counted(excluded: Mapping[str, int]) -> str:
    return "; ".join(f"{reason}: {count}" for reason, count in sorted(excluded.items(), key=lambda item: -item[1]))
