"""The best plan for a profile, a catalogue and a goal: the pure function behind `hetopt recommend`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version

import numpy as np

from hetopt.core.comm.options import AVERAGED, IDENTITY
from hetopt.core.errors import BadInput, setting
from hetopt.core.formatting import counted, duration, usd
from hetopt.core.memory import ExchangeMemory, Precision
from hetopt.core.plain_text import known
from hetopt.core.profile import Profile, Provisioned
from hetopt.core.run_spec import CriticalSettings, Settings
from hetopt.core.training_laws import MOST_LOST
from hetopt.optimizer.convergence.convergence import (
    FEWEST_UPDATES,
    LARGEST_BATCH_FACTOR,
    PILOT_BATCH_FACTOR,
    GivenSteps,
    PrecisionLoss,
    StepsModel,
    TargetSteps,
    equal_steps,
    precision_loss,
    surely_best,
    target_steps,
)
from hetopt.optimizer.cost.bill import Billing, data_transfer, terms_of
from hetopt.optimizer.cost.cost import STARTUP_LOG_SD, checkpoint_bytes, checkpoint_pause_s, checkpoint_time_s
from hetopt.optimizer.cost.provisioning import USUAL_JOB_S, Payload, measured_factors
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.offer_filter import Unpriced, narrow
from hetopt.optimizer.plan import AWS, OWN, SURE, Candidate, Goal, Plan, Sensitivity
from hetopt.optimizer.recommendation.candidates import make_candidate, run_spec, stand_ins
from hetopt.optimizer.recommendation.choices import (
    MOST_REASONS,
    choices,
    listed,
    not_worth_renting,
    reasons,
    worth_their_machines,
)
from hetopt.optimizer.recommendation.confidence import Question, confident, remedies, simulate
from hetopt.optimizer.recommendation.explain import batch_note, explain
from hetopt.optimizer.recommendation.infeasible import (
    NOT_COUNTED,
    fits_nowhere,
    larger_quotas,
    memory_table,
    nothing_fits,
    nothing_usable,
)
from hetopt.optimizer.recommendation.options import ADAPTIVE_BATCH, Options, PlanRequest
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.exchange_menu import ExchangeOption, exchange_menu, least_gain
from hetopt.optimizer.search.forecast import JobModel, forecast
from hetopt.optimizer.search.mixes import BOXES, BOXES_OF_THREE
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Effort, SearchResult, proved, search, search_study
from hetopt.optimizer.search.search_space import (
    MachineOption,
    SearchSpace,
    batch_ladder,
    drop_dominated,
    drop_slower_precisions,
    machine_options,
)
from hetopt.optimizer.step_time.local_options import LocalOption, asked_option, is_planned, measured_options
from hetopt.optimizer.step_time.model import RENTED, learned_shape, sampled_machines
from hetopt.optimizer.step_time.posterior import Shape
from hetopt.optimizer.step_time.tiers import SampledMachines
from hetopt.optimizer.step_time.transfer import (
    MENDED_BY_PROFILING,
    TOO_LITTLE_MEMORY,
    ReferenceHost,
    reference_host,
)

__all__ = [
    "Options",
    "PlanRequest",
    "evaluation_period_epochs",
    "job_of",
    "recommend",
    "search_problem",
    "space_of",
    "steps_model",
]

EVALUATIONS_TO_TARGET = 16
"""Number of evaluations in the expected run to a target: a run overshoots by half the time between two."""

EVALUATION_SHARE = 0.1
"""Part of the training time that evaluations take at most, about."""


def recommend(
    request: PlanRequest, *, seed: int, now: datetime, tell: Callable[[str], None] = lambda text: None
) -> Plan:
    """Return the best plan for a goal within its budget and deadline; the same arguments give the same plan.

    Ctrl-C ends the search early, with the best plan so far.

    Args:
        request: profile, catalogue, goal and options.
        seed: seed of the search.
        now: the plan's date.
        tell: is called with a few words on the part of the work that begins.

    Raises:
        BadInput: the goal does not suit profile or options, ``confidence`` is given without a limit, the file of the
            study cannot be used, or nothing in the catalogue can be predicted from the profile.
        NoFeasiblePlan: no memory holds a step, or nothing fits, even at its median; names the cheapest (or quickest)
            plan that would do. A plan that fits at its median and keeps its limits with less than the asked probability
            is returned: see `Plan.risk`.
    """
    catalog, options, limits = request.catalog, request.options, request.limits
    if options.confidence is not None and limits.budget_usd is None and limits.deadline_s is None:
        raise BadInput("`confidence` needs a budget or a deadline to be kept.", hint="give `budget_usd` or `deadline`")
    problem = search_problem(request)
    problem, settings = _first_batch(problem, limits) if options.batch_size == ADAPTIVE_BATCH else (problem, {})
    goal, model, space, job = problem.goal, problem.model, problem.space, problem.job
    result = search(space, job, limits, effort=Effort(types=options.mixed_types), tell=tell)
    if options.trials is not None:
        tell("trials of a study")
        types, trials, kept = options.mixed_types, options.trials, options.study
        result = search_study(space, job, limits, result, seed=seed, types=types, trials=trials, kept=kept)
    # What is asked again is searched with no more boxes than it took: a cluster of one type is one, too.
    most = result.uniform * len(space.exchanges) + (0 if result.proof is None else result.proof.boxes)
    again = Effort(types=options.mixed_types, boxes=min(most, BOXES), boxes_of_three=min(most, BOXES_OF_THREE))
    question = Question(space=space, job=job, confidence=options.confidence, seed=seed, effort=again, gpus=options.gpus)
    if result.chosen is None:
        tell("what would have to be allowed")
        raise nothing_fits(question, result, limits, list(_other_hints(request, quotas=True)))
    tell("what the choice depends on")
    result, seen = _sure(request, question, result)

    def candidate(row: int) -> Candidate:
        return make_candidate(space, job, result.cluster(row), result.forecast, row)

    assert result.chosen is not None
    chosen, front = candidate(result.chosen), tuple(candidate(row) for row in result.front.tolist())
    ways = choices(model, question, result, limits)
    others = [way.candidate for way in ways if way.candidate is not None]
    memory = memory_table(model, (chosen, *others, *front), space.options)
    unpriced = _unpriced(catalog, options)
    return Plan(
        created=now.isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        goal=goal,
        chosen=chosen,
        stand_ins=stand_ins(space, job, limits, result.cluster(result.chosen), chosen),
        pareto=front,
        memory=memory,
        choices=ways,
        advice=not_worth_renting(ways, chosen, goal.deadline_s),
        reasons=(
            *batch_note(model, chosen, priced=goal.ends == "target" or isinstance(options.batch_size, str)),
            *(*_follows_noise(request, problem, result), *reasons(chosen, request.profile.job))[:MOST_REASONS],
        ),
        not_compared=unpriced.in_words if unpriced.is_most else None,
        explanation=(
            *explain(
                model,
                problem.host,
                result,
                chosen,
                limits,
                seen,
                to_target=goal.ends == "target",
                equal_progress=isinstance(options.batch_size, str),
            ),
            *([unpriced.in_words] if unpriced.missing and not unpriced.is_most else []),
            *(() if memory else (NOT_COUNTED,)),
        ),
        searched=_searched(space, result),
        insight=seen,
        run=run_spec(
            model,
            goal,
            chosen,
            seed=seed,
            evaluate_every_epochs=problem.evaluate_every_epochs,
            interval_s=float(result.forecast.interval_s[result.chosen]),
            learning_rate_rule=options.learning_rate_rule,
            equal_progress=isinstance(options.batch_size, str),
            follows_noise=settings,
        ),
        profile=request.profile,
    )


def _follows_noise(request: PlanRequest, problem: SearchProblem, result: SearchResult) -> Iterator[str]:
    """Yield a sentence if a batch that follows the gradient noise should save 5 % or more of the shown time.

    On the plan's machines, with the best batch size for each possible critical batch size. Nothing is yielded for a
    fixed batch size that was asked for, for scripts and targets, and without measured noise.
    """
    job, model, length, chosen = request.profile.job, problem.model, problem.job.steps, result.chosen
    dense = [each for each in problem.space.exchanges if each.compression.name == IDENTITY and not each.sync.is_local]
    asked = request.options.batch_size
    is_open = dense and asked in (None, ADAPTIVE_BATCH) and not job.script and job.learning_rate_rule != "none"
    if not (is_open and model.convergence.noise_scale) or chosen is None or isinstance(length, TargetSteps):
        return
    steps = equal_steps(model.convergence, length, job.batch_size) if isinstance(length, GivenSteps) else length
    sizes = _batch_sizes(model, steps, to_target=False)
    columns = Columns(replace(problem.space, batch_sizes=sizes, exchanges=tuple(dense)))
    rows = ClusterRows.of([replace(result.cluster(chosen), batch=index) for index in range(len(sizes))])
    rows, table = tabulate_rows(columns, rows, replace(problem.job, steps=steps))
    total_s = forecast(table, replace(problem.job, steps=steps)).total_s
    times = steps.curve.least(total_s, columns.batches[rows.batch], job.batch_size) / result.forecast.total_s[chosen]
    most, saved, least = (round(100 * (1 - float(time))) for time in times)
    if least >= 0 and saved >= 100 * CriticalSettings().least_gain:
        yield (
            f"Batches that follow the gradient noise, to about {columns.batches[rows.batch[total_s.argmin()]]:,.0f}, "
            f"would take {saved} % less time than shown ({least} to {most} %) for the same progress, at "
            f"{usd(float(result.forecast.cost_usd[chosen] * times[1]))}"
            + ("." if asked else f": {setting('batch_size', ADAPTIVE_BATCH)}.")
        )


def _first_batch(problem: SearchProblem, limits: Limits) -> tuple[SearchProblem, Settings]:
    """Return the problem with the first batch size of an adaptive batch alone, and that policy's settings.

    The first size is the best, by expectation, of those that surely pay on machines of one type. The settings are those
    of `EqualSteps.following`.
    """
    steps = equal_steps(problem.model.convergence, GivenSteps(amount=1), problem.model.profile.job.batch_size)
    found = search(problem.space, problem.job, limits, effort=Effort(types=1))
    rows, batches = found.rows, np.array(problem.space.batch_sizes)[found.rows.batch]
    scores = np.where(limits.risk(found.forecast) <= 1, limits.expected_score(found.forecast), np.inf)
    log_sds = steps.log_sd(batches, 1.0)
    row = surely_best(scores, log_sds, float(scores[log_sds == log_sds.min()].min()))
    same = ((rows.option == rows.option[row]) & (rows.count == rows.count[row])).all(axis=1)
    settings = steps.following(int(batches[row]), batches[same].tolist(), found.forecast.step_time_s[same].tolist())
    return replace(problem, space=replace(problem.space, batch_sizes=(int(batches[row]),))), settings


def _unpriced(catalog: Catalog, options: Options) -> Unpriced:
    """Return the asked-for types of AWS that have no price; none of own machines and of other clouds."""
    return Unpriced.of([catalog] if catalog.cloud == AWS else [], options)


def _sure(request: PlanRequest, question: Question, result: SearchResult) -> tuple[SearchResult, Sensitivity]:
    """Return the search with the choice and front that keep the limits as surely as asked, and how sure the choice is.

    Of a described job on rented machines, clusters that hardly gain over one machine are left out first. If the choice
    is a risk that was not accepted, hints on what would help are searched.
    """
    options, limits = request.options, request.limits
    if request.profile.is_counted and request.catalog.region != OWN:
        result = worth_their_machines(question, result, limits)
    confidence, most, is_limited = None, None, limits.budget_usd is not None or limits.deadline_s is not None
    if is_limited:
        result, most, by_chance = confident(
            question.space, question.job, result, limits, options.confidence, seed=question.seed
        )
        confidence = question.asked if by_chance else None
    result = listed(question, result, limits)
    assert result.chosen is not None
    runs = simulate(question.space, question.job, result, [result.chosen], limits, seed=question.seed)
    kept = float(runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)[0])
    gap = None
    if result.safe and result.proof is not None and result.proof.complete:
        # Of the choice, which may be dearer to the score than the best by what counts as equal.
        gap = max(0.0, 1 - result.proof.bound / float(limits.expected_score(result.forecast)[result.chosen]))
    seen = Sensitivity(
        gap=gap,
        chance=kept if is_limited else None,
        confidence=confidence,
        asked=question.asked,
        cost_90_usd=float(np.quantile(runs.cost_usd[0], SURE, method="inverted_cdf")),
        total_90_s=float(np.quantile(runs.total_s[0], SURE, method="inverted_cdf")),
    )
    if not seen.is_risk:
        return result, seen
    hints = [] if options.accept_risk else [*_other_hints(request), *remedies(question, limits, most=most)]
    return result, seen.model_copy(update={"remedies": tuple(hints), "risk_accepted": options.accept_risk})


def _other_hints(request: PlanRequest, *, quotas: bool = False) -> Iterator[str]:
    """Yield hints other than on limits: a change of the request with which a cluster of one type keeps the limits.

    Tried are larger quotas (with ``quotas``, if some are set), checkpoints of a job that cannot resume, and machines on
    demand where only spot was asked for; each is searched anew. Errors are as of `search_problem`.
    """
    profile, options = request.profile, request.options
    if quotas and options.quotas and request.catalog.region != OWN:  # of one's own machines there are no more
        wide = search_problem(replace(request, options=replace(options, quotas={})))
        result = search(wide.space, wide.job, request.limits, effort=Effort(types=1))
        if more := larger_quotas(wide.space, result, options.quotas, request.limits):
            yield more
    if not profile.job.resumes:
        job = profile.job.model_copy(update={"resumes": True})
        saving = replace(request, profile=profile.model_copy(update={"job": job}))
        yield from _priced("save checkpoints with `run.checkpoint` and profile again", saving)
    if options.market == "spot":
        both = replace(request, options=replace(options, market="any"))
        yield from _priced(f"rent on demand as well ({setting('market', 'any')})", both)


def _priced(change: str, request: PlanRequest) -> Iterator[str]:
    """Yield ``change``, a phrase, with the best cluster of one type for ``request`` if it surely keeps the limits.

    Errors are as of `search_problem`.
    """
    problem = search_problem(request)
    result = search(problem.space, problem.job, request.limits, effort=Effort(types=1))
    if result.chosen is not None and result.safe:
        best = make_candidate(problem.space, problem.job, result.cluster(result.chosen), result.forecast, result.chosen)
        prediction = best.prediction
        yield (
            f"{change}: {best.in_words} would take {duration(prediction.total_s.value)} and "
            f"{usd(prediction.cost_usd.value)}"
        )


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """Inputs of a plan's search: the fitted model, the space of clusters, the job, and the completed goal.

    Attributes:
        goal: goal of the run, with the task's own target written in.
        model: fits of the profile.
        space: the clusters to choose from.
        job: inputs of a forecast that do not depend on the cluster.
        host: the profiled machine as the catalogue rates it.
        evaluate_every_epochs: epochs between evaluations.
    """

    goal: Goal
    model: FittedModel
    space: SearchSpace
    job: JobModel
    host: ReferenceHost
    evaluate_every_epochs: float


def search_problem(request: PlanRequest) -> SearchProblem:
    """Return what `recommend` searches: the fitted profile, the machines it can predict, and the completed goal.

    Raises:
        BadInput: the goal does not suit profile or options, there is no such region of the data, nothing that is asked
            for is offered, or nothing offered can be predicted from the profile.
        NoFeasiblePlan: no offered machine's memory holds a step.
    """
    profile, catalog, options = request.profile, request.catalog, request.options
    if options.data_region is not None:
        known(options.data_region, catalog.regions, "region")
    goal = _completed(request.goal, profile).model_copy(update={"zone": options.zone})
    model = fit(profile)
    every = evaluation_period_epochs(model, goal)
    sampled = sampled_machines(profile, catalog.instance_types)
    shape = learned_shape(model, sampled)
    job = job_of(model, shape, goal, options, every, terms_of(catalog))
    job = replace(job, transfer=data_transfer(options.data_bytes, options.data_region, catalog.region))
    host = reference_host(model, catalog.instance_types.values())
    space = space_of(model, shape, sampled, catalog, goal, options, host)
    if isinstance(options.batch_size, str) or (options.batch_size is None and goal.ends == "target"):
        sizes = _batch_sizes(model, job.steps, to_target=goal.ends == "target")
        space = replace(space, batch_sizes=sizes)
    if request.open_hours is not None:
        space = replace(space, open_hours=request.open_hours)
        job = replace(job, slots_s=request.open_hours.slots_s)
    return SearchProblem(goal=goal, model=model, space=space, job=job, host=host, evaluate_every_epochs=every)


def _batch_sizes(model: FittedModel, steps: StepsModel, *, to_target: bool) -> tuple[int, ...]:
    """Return the batch sizes whose steps are priced, ascending, without sizes that leave a run too few updates.

    The job's own and smaller ones are never left out; at least one size is returned.
    """
    job, pilots = model.profile.job, model.convergence.pilot_batch_sizes
    # A smaller batch than the task's own leaves what the learning rate was tuned for.
    low, high = job.batch_size, job.batch_size * LARGEST_BATCH_FACTOR
    if to_target and pilots:
        low, high = min(pilots), max(pilots) * PILOT_BATCH_FACTOR
    sizes = batch_ladder(min(low, job.dataset_size), min(high, job.dataset_size), job.batch_size)
    enough = [size for size in sizes if size <= job.batch_size or steps.steps(size, 1.0) >= FEWEST_UPDATES]
    return tuple(enough) or sizes[:1]


def steps_model(
    model: FittedModel, goal: Goal, evaluate_every_epochs: float, *, equal_progress: bool = False
) -> StepsModel:
    """Return the law of optimizer steps that a goal needs, by global batch size and retained gradient energy.

    Args:
        model: fits of the profile.
        goal: goal of the run.
        evaluate_every_epochs: epochs between evaluations, at which a target is noticed.
        equal_progress: whether a given length stands for the progress that it makes at the job's own batch size; False:
            for as many epochs or steps at any batch size. Ignored for a run to a target.

    Raises:
        BadInput: the goal is the target and no pilot of the profile reached it, the goal does not say how many epochs
            or steps, or it counts epochs and the profile does not know the samples of one.
    """
    job = model.profile.job
    dataset_size = job.dataset_size
    if goal.ends == "target":
        return target_steps(model.convergence, check_every_samples=evaluate_every_epochs * dataset_size)
    if goal.amount is None:
        raise BadInput(f"The goal does not say how many {goal.ends}.", hint=f"give `{goal.ends}`")
    length = GivenSteps(amount=math.ceil(goal.amount))
    if goal.ends == "epochs":
        if not job.counts_epochs:
            raise BadInput(
                f"nothing told `hetopt profile` how many samples an epoch of {job.task} has.",
                hint="give `steps` in place of epochs, or profile it again with `epoch_samples`",
            )
        length = GivenSteps(amount=goal.amount, dataset_size=dataset_size, restarts=bool(job.script))
    return equal_steps(model.convergence, length, job.batch_size) if equal_progress else length


def evaluation_period_epochs(model: FittedModel, goal: Goal) -> float:
    """Return the epochs between evaluations: 1, or less where a run to a target would overshoot by much.

    A period is never shorter than one step.

    Raises:
        BadInput: the goal is the target, and no pilot of the profile reached it.
    """
    if goal.ends != "target":
        return 1.0
    job = model.profile.job
    steps = target_steps(model.convergence)
    epochs = float(steps.steps(job.batch_size, 1.0)) * job.batch_size / job.dataset_size
    epoch_s = model.reference.step_time.time_s(job.batch_size) * job.dataset_size / job.batch_size
    cheapest = (model.profile.evaluation_s or 0.0) / (EVALUATION_SHARE * epoch_s)
    return min(1.0, max(epochs / EVALUATIONS_TO_TARGET, cheapest, job.batch_size / job.dataset_size))


def _completed(goal: Goal, profile: Profile) -> Goal:
    """Return the goal with the task's own target written in; a goal of epochs or steps is returned unchanged.

    Raises:
        BadInput: the goal is another target than the profile's.
    """
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
    goal: Goal,
    options: Options,
    every: float,
    billing: Billing,
) -> JobModel:
    """Return the inputs of a forecast that do not depend on the cluster.

    Args:
        model: fits of the profile.
        shape: parameters that steps share on all machines.
        goal: goal of the run.
        options: options of the request; a text as ``batch_size`` means equal progress.
        every: epochs between evaluations.
        billing: terms and prices beside the machines' own.

    Raises:
        BadInput: as of `steps_model`.
    """
    profile = model.profile
    return JobModel(
        steps=steps_model(model, goal, every, equal_progress=isinstance(options.batch_size, str)),
        evaluate_every_samples=every * profile.job.dataset_size,
        shape=shape,
        startup_log_sd=STARTUP_LOG_SD,
        checkpoint_s=checkpoint_pause_s(profile.job.gradient_bytes),
        written_s=checkpoint_time_s(profile.job.gradient_bytes),
        checkpoint_bytes=checkpoint_bytes(profile.job.gradient_bytes) if profile.job.resumes else 0.0,
        billing=billing,
        resumes=profile.job.resumes,
    )


def payload_of(profile: Profile, options: Options, types: Mapping[str, InstanceType]) -> Payload:
    """Return the bytes of data and checkpoint that a run brings to each machine, and start-up times of past launches.

    Args:
        profile: has past launches.
        options: has the size of the data set, and start-up time and disk if they were given.
        types: instance types by name; launches of other types are passed over.
    """
    payload = Payload(
        data_bytes=options.data_bytes,
        checkpoint_bytes=checkpoint_bytes(profile.job.gradient_bytes),
        job_s=USUAL_JOB_S if profile.startup_s is None else profile.startup_s,
        startup_s=options.startup_s,
        disk_gb=options.disk_gb,
    )
    known = [seen for seen in profile.provisioned if types.keys() >= {*seen.types}]
    rented = [seen for seen in known if all(map(RENTED.fullmatch, seen.types))]
    factors = measured_factors((([types[name] for name in seen.types], seen.took_s) for seen in rented), payload)
    return replace(payload, measured=factors, started_s=_started_s(seen for seen in known if seen not in rented))


def _started_s(launches: Iterable[Provisioned]) -> dict[str, float]:
    """Return seconds to start by machine, the mean over its launches with the fewest machines, as these wait least."""
    took_s: dict[str, dict[int, list[float]]] = {}
    for seen in launches:
        for name in seen.types:
            took_s.setdefault(name, {}).setdefault(len(seen.types), []).append(seen.took_s)
    return {name: statistics.fmean(by_count[min(by_count)]) for name, by_count in took_s.items()}


def space_of(
    model: FittedModel,
    shape: Shape,
    sampled: SampledMachines | None,
    catalog: Catalog,
    goal: Goal,
    options: Options,
    host: ReferenceHost,
) -> SearchSpace:
    """Return the search space of a request: machines, batch sizes and gradient exchanges within its options.

    The space has one batch size, the fixed one or the job's own; `search_problem` puts a ladder in its place.

    Args:
        model: fits of the profile.
        shape: parameters that steps share on all machines.
        sampled: machines as step samples predict them; None: there are no samples.
        catalog: machines to choose from.
        goal: goal of the run.
        options: options of the request.
        host: the profiled machine as the catalogue rates it.

    Raises:
        BadInput: nothing that is asked for is offered or can be predicted from this profile, the batch size exceeds the
            training data, or a precision, sync or compression that was asked for cannot be planned.
        NoFeasiblePlan: no offered machine's memory holds a step.
    """
    offered = narrow(catalog, options)
    to_target = goal.ends == "target"
    menu = _menu(model, options, to_target=to_target)
    taken = [option.memory.kept_bytes for option in menu if option.memory is not None]
    kept = ExchangeMemory(kept_bytes=int(max(taken, default=0)))
    payload = payload_of(model.profile, options, catalog.instance_types)
    candidates: list[MachineOption] = []
    left_out: list[Mapping[str, int]] = []
    for precision, loss in computings(model, sampled, options, to_target=to_target).items():
        view = model.computing_in(precision)
        predicted, refused = machine_options(
            view,
            offered,
            host if view is model else reference_host(view, catalog.instance_types.values()),
            shape,
            sampled,
            options.observed,
            options.zone,
            payload,
            kept,
            precision,
            loss,
        )
        candidates += predicted
        left_out.append(refused)
    usable = drop_slower_precisions(candidates) if len(left_out) > 1 else tuple(candidates)
    excluded = left_out[0]
    if not usable:
        if TOO_LITTLE_MEMORY in excluded and not MENDED_BY_PROFILING & excluded.keys():
            raise fits_nowhere(model, catalog, offered)
        by_gpus = bool(set(options.gpus) - {"any"}) and not options.types
        unpriced = _unpriced(catalog, options)
        if unpriced.is_most:
            excluded = {**excluded, unpriced.counted: unpriced.missing}
        raise nothing_usable(catalog.region, offered, excluded, by_gpus=by_gpus)
    job, unbeaten = model.profile.job, drop_dominated(usable, options.quotas)
    fixed = options.batch_size if isinstance(options.batch_size, int) else None
    if fixed is not None and fixed > job.dataset_size:
        raise BadInput(
            f"`batch_size` must be at most {job.dataset_size:,}, the samples of the training data, got {fixed:,}.",
            hint="with all of them, an epoch is one step",
        )
    return SearchSpace(
        options=unbeaten,
        beaten=tuple(option for option in usable if option not in unbeaten),
        batch_sizes=(fixed or min(job.batch_size, job.dataset_size),),  # whoever does not ask keeps the batch size
        exchanges=menu,
        max_machines=min(options.max_machines or options.max_workers, options.max_workers),
        max_workers=options.max_workers,
        max_hourly_usd=options.max_hourly_usd,
        quotas=options.quotas,
        offered=len(offered),
        usable=len({id(option.offer) for option in usable}),
        excluded=excluded,
    )


def computings(
    model: FittedModel, sampled: SampledMachines | None, options: Options, *, to_target: bool
) -> dict[Precision, PrecisionLoss]:
    """Return the precisions to plan with, each with its factor on steps: the one asked for, or all measured that suit.

    The profile's first comes first. In a run of fixed length factors are 1, and precisions that lose more than
    `MOST_LOST` are left out.

    Args:
        model: fits of the profile.
        sampled: step samples of other machines, whose precisions count too; None: there are none.
        options: has the precision and the sync that are asked for, if any.
        to_target: whether the run ends at a target, so that more steps can make up for a loss.

    Raises:
        BadInput: no step was measured in the precision that was asked for, or fp16 is asked for beside averages of
            parameters.
    """
    known = dict.fromkeys((*model.whole.precisions, *(() if sampled is None else sampled.precisions)))
    wanted = options.precision
    if wanted is not None and wanted not in known:
        raise BadInput(
            f"{setting('precision', wanted)} was not measured: the profile has steps in {', '.join(known)}.",
            hint=f"hetopt profile TASK --precision {wanted}, on a machine that has it, or leave `precision` out",
        )
    averages = options.sync is not None and options.sync.name != "bsp"
    if wanted == "fp16" and averages:
        raise BadInput(
            "fp16 needs gradients to be summed in every step, as workers agree on its loss scale there.",
            hint=f"choose {setting('precision', 'bf16')}, or leave `sync` out",
        )
    by_precision: dict[Precision, PrecisionLoss] = {}
    for precision in known if wanted is None else (wanted,):
        loss = precision_loss(model.whole, precision)
        loses = not to_target and loss.stretch > 1 + MOST_LOST  # nothing makes up for it in a run of fixed length
        if wanted is None and (loses or (precision == "fp16" and averages)):
            continue
        by_precision[precision] = loss if to_target else PrecisionLoss()
    return by_precision


def _menu(model: FittedModel, options: Options, *, to_target: bool) -> tuple[ExchangeOption, ...]:
    """Return the gradient exchanges and parameter averages to choose from, by pilots or as asked for.

    Raises:
        BadInput: no method that was named can be priced, or none of them goes with the averages that were asked for.
    """
    gate, asked, most = model.convergence.local, options.sync, options.max_workers
    size, batch = model.profile.job.dataset_size, model.profile.job.batch_size
    batch = options.batch_size if isinstance(options.batch_size, int) else batch
    local: Iterable[LocalOption] = ()
    if asked is None:
        local = measured_options(gate, to_target=to_target, dataset_size=size, batch=batch)
    elif is_planned(asked):
        local = [asked_option(asked, gate, to_target=to_target, dataset_size=size, batch=batch, max_workers=most)]
    menu = exchange_menu(
        model,
        minimum_gain=least_gain(model, to_target=to_target),
        max_workers=most,
        local=tuple(local),
        to_target=to_target,
        names=options.compression,
        ratios=options.ratios,
    )
    if asked is None or not is_planned(asked):
        return menu
    averages = tuple(option for option in menu if option.sync.is_local)
    if not averages:
        pinned = setting("compression", options.compression_in_words)
        raise BadInput(
            f"{pinned} is of gradients; {setting('sync', asked.name)} averages parameters, by {', '.join(AVERAGED)}.",
            hint="keep one of them",
        )
    return averages


def _searched(space: SearchSpace, result: SearchResult) -> str:
    """Return a text on the search: offers and why some were left out, limits, the proof, mixes and trials."""
    refused = (f"{reason}: {count}" for reason, count in sorted(space.excluded.items(), key=lambda item: -item[1]))
    left_out = f" (left out: {'; '.join(refused)})" if space.excluded else ""
    stopped = "; stopped early" if result.stopped else ""
    return (
        f"{space.offered} offers, {space.usable} usable{left_out}, {len(space.options)} not beaten by another in every "
        f"respect; up to {counted(space.max_workers, 'worker')}, {counted(len(space.batch_sizes), 'batch size')} and "
        f"{counted(len(space.exchanges), 'exchange')}: {proved(result)}; {result.mixes:,} mixes priced one by one; "
        f"{result.trials:,} trials of an Optuna study{stopped}"
    )
