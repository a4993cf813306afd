"""Profile, catalogue and goal in, plan out: the pure function behind `hetopt recommend`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from types import MappingProxyType

from hetopt.optimizer.billing import Billing, load_billing
from hetopt.optimizer.candidates import make_candidate
from hetopt.optimizer.catalog import Catalog, offers
from hetopt.optimizer.convergence import EpochSteps, FixedSteps, StepsModel, batch_range, target_steps
from hetopt.optimizer.cost import (
    BOOT_S,
    DETECTION_S,
    SETUP_S,
    STARTUP_LOG_SD,
    Rates,
    checkpoint_time_s,
)
from hetopt.optimizer.explain import describe_machines, explain, usd_at_least
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.forecast import JobModel
from hetopt.optimizer.links import network_log_sd
from hetopt.optimizer.plan import Candidate, Goal, Market, Plan, ScalingRule
from hetopt.optimizer.planned_run import run_spec
from hetopt.optimizer.search import STUDY_TRIALS, Found, Limits, search
from hetopt.optimizer.search_space import SearchSpace, batch_ladder, drop_dominated, exchange_options, machine_options
from hetopt.optimizer.transfer import ReferenceHost, reference_host
from hetopt.optimizer.words import duration, usd
from hetopt.profiler.errors import BadInput, NoFeasiblePlan
from hetopt.profiler.profile import Profile

MINIMUM_GAIN_TARGET = 0.7
MINIMUM_GAIN_FIXED = 0.9
"""Gradient energy that compression must retain: the two thresholds of GraVAC (arXiv 2305.12201). To a target, held-back
gradient is made up for by more steps, which are counted; a run of fixed length has nothing to make up for it with."""

EVALUATIONS_TO_TARGET = 16
"""Looks at the target in the expected run: a run overshoots by half the time between two."""

EVALUATION_SHARE = 0.1
"""Evaluations take at most about this share of the training time."""

MARKETS: Mapping[str, Market | None] = MappingProxyType({"spot": "spot", "on-demand": "on-demand", "any": None})
"""What can be asked for, as the catalogue's filter."""

MAX_MACHINES = 256
"""A ring over more workers is dominated by latency, and the models were never held against one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What narrows the search.

    Attributes:
        market: which prices to use: spot, on-demand or any.
        max_machines: machines in a cluster.
        batch_size: fixes the global batch size.
        minimum_gain: gradient energy that compression must retain; absent: 0.7 to a target, 0.9 otherwise.
        startup_s: from the request to the first step on rented machines.
        trials: of the Optuna study.
        only_types: instance types to choose from; empty for all.
        exclude_types: instance types to leave out.
        learning_rate_rule: how the learning rate follows the batch size; absent: as the task has it.
    """

    market: str = "spot"
    max_machines: int = 16
    batch_size: int | None = None
    minimum_gain: float | None = None
    startup_s: float = BOOT_S + SETUP_S
    trials: int = STUDY_TRIALS
    only_types: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    learning_rate_rule: ScalingRule | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be searched."""
        if self.market not in MARKETS:
            raise BadInput(f"There is no market '{self.market}'.", hint=f"choose {', '.join(MARKETS)}")
        if self.max_machines < 1:
            raise BadInput(f"{self.max_machines} machines are no cluster.", hint="--max-machines must be at least 1")
        if self.max_machines > MAX_MACHINES:
            raise BadInput(
                f"Clusters of {self.max_machines} machines are not planned.",
                hint=f"--max-machines is {MAX_MACHINES} at most",
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise BadInput(f"A batch of {self.batch_size} samples is none.", hint="--batch-size must be at least 1")
        if self.minimum_gain is not None and not 0 < self.minimum_gain <= 1:
            raise BadInput(f"A minimum gain of {self.minimum_gain} cannot be.", hint="choose one above 0, at most 1")
        if not 0 <= self.startup_s < math.inf:
            raise BadInput(f"A start-up time of {self.startup_s} s cannot be.", hint="give seconds, at least 0")


def recommend(
    profile: Profile,
    catalog: Catalog,
    goal: Goal,
    options: Options,
    *,
    seed: int,
    now: datetime,
    billing: Billing | None = None,
) -> Plan:
    """The best plan for the goal within its budget and deadline. The same arguments give the same plan.

    ``billing`` holds the prices beside the machines' own; absent: those of the catalogue's folder.

    Raises:
        BadInput: the goal does not suit the profile, or nothing in the catalogue can be predicted from it.
        NoFeasiblePlan: nothing fits; names the cheapest (or quickest) plan that would do.
    """
    goal = _completed(goal, profile)
    model = fit(profile)
    every = evaluation_period_epochs(model, goal)
    job = _job(model, goal, options, every, Rates.of(billing or load_billing(catalog.directory)))
    host = reference_host(model, catalog.instance_types.values())
    space = _space(model, catalog, goal, options, host)
    limits = Limits(budget_usd=goal.budget_usd, deadline_s=goal.deadline_s)
    found = search(space, job, limits, seed=seed, trials=options.trials)
    if found.chosen is None:
        raise _nothing_fits(space, job, found, limits)

    def candidate(row: int) -> Candidate:
        return make_candidate(space, job, found.cluster(row), found.forecast, row)

    chosen = candidate(found.chosen)
    return Plan(
        created=now.isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        goal=goal,
        chosen=chosen,
        pareto=tuple(candidate(int(row)) for row in found.front),
        explanation=explain(model, host, found, chosen, candidate, limits, catalog),
        searched=_searched(space, found, options),
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
        raise BadInput(f"The goal does not say how many {goal.ends}.", hint=f"give --{goal.ends}")
    if goal.ends == "epochs":
        return EpochSteps(epochs=goal.amount, dataset_size=dataset_size)
    return FixedSteps(count=math.ceil(goal.amount))


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
            hint="change the task's target and profile it again, or give the run's length with --epochs or --steps",
        )
    return goal.model_copy(update={"target_metric": job.target_metric, "target_value": job.target_value})


def _job(model: FittedModel, goal: Goal, options: Options, every: float, rates: Rates) -> JobModel:
    profile = model.profile
    return JobModel(
        steps=steps_model(model, goal, every),
        evaluate_every_samples=every * profile.job.dataset_size,
        jitter=model.reference.step_time.jitter,
        network_log_sd=network_log_sd(model),
        startup_s=options.startup_s,
        startup_log_sd=STARTUP_LOG_SD,
        checkpoint_s=checkpoint_time_s(profile.job.gradient_bytes),
        restart_s=options.startup_s + DETECTION_S,
        rates=rates,
    )


def _space(model: FittedModel, catalog: Catalog, goal: Goal, options: Options, host: ReferenceHost) -> SearchSpace:
    for name in (*options.only_types, *options.exclude_types):
        catalog.instance_type(name)  # refuses a name that does not exist
    offered = tuple(
        offer
        for offer in offers(catalog, MARKETS[options.market])
        if (not options.only_types or offer.instance_type.name in options.only_types)
        and offer.instance_type.name not in options.exclude_types
    )
    if not offered:
        raise BadInput(
            f"None of the types asked for has a {options.market} price in {catalog.region}.",
            hint="choose others, or look at them with `hetopt catalog show TYPE`",
        )
    usable, excluded = machine_options(model, offered, host)
    if not usable:
        raise BadInput(
            f"None of the {len(offered)} offers in {catalog.region} can be predicted from this profile "
            f"({_counted(excluded)}).",
            hint="profile again with a newer hetopt, or on a machine of the kind that you want to rent",
        )
    job = model.profile.job
    to_target = goal.ends == "target"
    if options.batch_size is not None:
        batches: tuple[int, ...] = (options.batch_size,)
    elif goal.ends == "steps":
        batches = (job.batch_size,)
    else:
        smallest, largest = batch_range(model.convergence, job.batch_size, to_target=to_target)
        batches = batch_ladder(min(smallest, job.dataset_size), min(largest, job.dataset_size), job.batch_size)
    default_gain = MINIMUM_GAIN_TARGET if to_target else MINIMUM_GAIN_FIXED
    kept = drop_dominated(usable)
    return SearchSpace(
        options=kept,
        batch_sizes=batches,
        exchanges=exchange_options(
            model,
            minimum_gain=default_gain if options.minimum_gain is None else options.minimum_gain,
            max_workers=options.max_machines * max(option.worker.workers for option in kept),
        ),
        max_machines=options.max_machines,
        offered=len(offered),
        usable=len(usable),
        excluded=excluded,
    )


def _searched(space: SearchSpace, found: Found, options: Options) -> str:
    left_out = f" (left out: {_counted(space.excluded)})" if space.excluded else ""
    return (
        f"{space.offered} offers, {space.usable} usable{left_out}, {len(space.options)} not beaten by another in every "
        f"respect; {len(found.uniform_rows):,} clusters of one type with up to {space.max_machines} machines, "
        f"{len(space.batch_sizes)} batch sizes and {len(space.exchanges)} exchanges; {found.studied} mixes in a study "
        f"of {options.trials} trials, and {found.refined} mixes around the best"
    )


def _counted(excluded: Mapping[str, int]) -> str:
    return "; ".join(f"{reason}: {count}" for reason, count in sorted(excluded.items(), key=lambda item: -item[1]))


def _nothing_fits(space: SearchSpace, job: JobModel, found: Found, limits: Limits) -> NoFeasiblePlan:
    """The error that names the plan that would work: the cheapest, or the quickest where the deadline is too early."""
    forecast = found.forecast
    if len(forecast) == 0:
        return NoFeasiblePlan(
            f"No machine can take any of the batch sizes {', '.join(map(str, space.batch_sizes))}.",
            hint="choose another with --batch-size",
        )
    in_time = forecast.total_s <= (limits.deadline_s or math.inf)
    if in_time.any():
        row = min(in_time.nonzero()[0].tolist(), key=lambda i: (forecast.cost_usd[i], forecast.total_s[i]))
        what, remedy = "cheapest plan", f"raise the budget to {usd_at_least(float(forecast.cost_usd[row]))}"
        if limits.deadline_s is not None:
            what = "cheapest plan that meets the deadline"
    else:
        row = int(forecast.total_s.argmin())
        what, remedy = "quickest plan", f"allow {duration(float(forecast.total_s[row]))}"
    candidate = make_candidate(space, job, found.cluster(row), forecast, row)
    asked = [
        *([f"a budget of {usd(limits.budget_usd)}"] if limits.budget_usd is not None else []),
        *([f"a deadline of {duration(limits.deadline_s)}"] if limits.deadline_s is not None else []),
    ]
    return NoFeasiblePlan(
        f"Nothing fits {' and '.join(asked)}: the {what} is {describe_machines(candidate)}, "
        f"about {usd(candidate.prediction.cost_usd.value)} and {duration(candidate.prediction.total_s.value)}.",
        hint=remedy,
    )
