"""`hetopt.recommend`: the best cluster for a profiled job within a budget, a deadline, or both."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from hetopt.api.catalogs import in_use
from hetopt.api.changes import into_plan
from hetopt.api.options import Search, Sought
from hetopt.api.sample_remarks import contradictions
from hetopt.core.artifact import kind_in
from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import NUMBER, arguments, quantity
from hetopt.core.hosts import read_hosts
from hetopt.core.interruption import Reporter
from hetopt.core.option import options_of, takes
from hetopt.core.profile import Profile
from hetopt.core.run_rules import check_for_script
from hetopt.core.step_samples import StepSamples
from hetopt.optimizer.cost.observed_preemptions import ObservedPreemptions, observed_file
from hetopt.optimizer.market.account_quotas import AccountQuotas, account_quotas_file
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_choice import ANY_REGION, age_note, regional_catalogs
from hetopt.optimizer.market.quota import read_quotas
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.recommendation.own_machines import better_of, on_own_machines
from hetopt.optimizer.recommendation.recommend import recommend as find_plan
from hetopt.optimizer.recommendation.regions import Compared, Market, compare_regions
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, earlier_runs_file, kept


@takes(Search)
def recommend(profile: Profile | Path | str, *, reporter: Reporter | None = None, **options: Any) -> Plan:
    """Find the best cluster for a profiled job: machines, local batch sizes, batch size and compression.

    Of the plans that keep budget and deadline the balanced one wins; `Plan.choices` has the cheapest, the fastest and
    the safest one beside it. A plan that keeps its limits with less than the probability that is asked for has a
    `Plan.risk`. Works offline, from the bundled catalogue, without credentials and without torch.

    Args:
        profile: made by `hetopt.profile`, or its file.
        reporter: told what goes on.
        **options: what is wanted.

    Raises:
        BadInput: a value cannot be, or the options exclude each other.
        NoFeasiblePlan: nothing fits; the hint says what would.
    """
    asked, told = Search(**options), reporter or Reporter()
    if asked.budget_usd is None and asked.deadline is None:
        raise BadInput("give `budget_usd`, `deadline` or both.", hint="for example `budget_usd=5`")
    if asked.market == "own" and (asked.inventory is None or asked.region == ANY_REGION):
        raise BadInput(
            '`market="own"` plans for machines of your own, in no region.',
            hint='name them with `inventory="hosts.toml"`, and leave `region="any"` out',
        )
    limits = search_options(
        asked,
        quotas=read_quotas(() if asked.region == ANY_REGION else _quotas(asked.quotas, asked.region, told)),
        observed=_observed(asked.observed, told),
        earlier=_earlier(told),
    )
    measured = profile_of(profile)
    if measured.job.script and limits.batch_size is None:
        # A script's batch size is its own: its learning rate goes with it, and its loader says it.
        limits = replace(limits, batch_size=measured.job.batch_size)
    goal = _goal(measured, asked, told)
    told("the catalogue")
    compared = compared_regions(measured, goal, limits, asked, told) if asked.region == ANY_REGION else None
    if compared is None:
        loaded = in_use(asked.region, asked.catalog).catalog
    else:
        loaded, limits = compared.best[0].catalog, replace(limits, quotas=compared.best[0].quotas)
    for remark in contradictions(measured, loaded.instance_types):
        told.note(remark)
    now = datetime.datetime.now(datetime.UTC)
    request = PlanRequest(measured, loaded, goal, limits)

    def found(request: PlanRequest) -> Plan:
        return find_plan(request, seed=asked.seed, now=now, tell=lambda text: told(text, None))

    def rented() -> Plan:
        return found(request) if compared is None else compared.planned(request, found)

    if asked.inventory is None:
        plan = rented()
    else:
        hosts = read_hosts(asked.inventory)
        told("your own machines")
        if asked.market == "own":
            plan = on_own_machines(request, hosts, seed=asked.seed, now=now)
            plan = plan.model_copy(update={"advice": None})  # which is whether to rent
        else:
            plan = better_of(request, hosts, rented, seed=asked.seed, now=now)
    if compared is None:
        tell_price_ages(plan, loaded, told)
    plan = into_plan(asked.sync, plan)
    if plan.run.script:
        check_for_script(plan.run)
    return plan


_CALLED = {
    "types": "only_types",
    "exclude": "exclude_types",
    "data": "data_bytes",
    "provisioning": "startup_s",
    "ratio": "ratios",
}
"""Fields of `Options` that are called otherwise than the option."""


def search_options(asked: Sought, **instead: Any) -> Options:
    """Return what narrows a search.

    Args:
        asked: options of a verb.
        instead: fields that take the place of its.
    """
    values = {_CALLED.get(name, name): getattr(asked, name) for name in options_of(type(asked))}
    values |= {"data_bytes": values.get("data_bytes") or 0.0, "quotas": read_quotas(asked.quotas), "observed": None}
    values["market"] = "any" if asked.market == "own" else asked.market
    values["precision"] = None if values["precision"] == "auto" else values["precision"]
    known = {one.name for one in fields(Options)}
    return Options(**{name: value for name, value in (values | instead).items() if name in known})


def profile_of(given: Profile | Path | str) -> Profile:
    """The profile, or what is missing where the file holds step samples alone.

    Raises:
        BadInput: it is no profile.
    """
    if isinstance(given, Profile):
        return given
    path = Path(given)
    if kind_in(path) == StepSamples.KIND:
        raise BadInput(
            f"{path} holds step times alone. A plan also needs what is trained: the task and its data set, the size of "
            "the gradient, the memory that a sample takes, and how many steps the target needs.",
            hint="measure the task here and keep the samples beside it: "
            "`hetopt profile TASK --from-samples FILE -o profile.json`",
        )
    return Profile.load(path)


def tell_price_ages(plan: Plan, catalog: Catalog, told: Reporter) -> None:
    """Note how old the prices are that a plan shows; nothing of those that it does not."""
    shown = [plan.chosen, *(way.candidate for way in plan.choices if way.candidate is not None)]
    dates = {group.price_date for one in shown for group in one.groups if not group.is_own}
    note = age_note(catalog, map(datetime.date.fromisoformat, dates), today=datetime.datetime.now(datetime.UTC).date())
    if note is not None:
        told.note(note)


def compared_regions(profile: Profile, goal: Goal, limits: Options, asked: Sought, told: Reporter) -> Compared:
    """Return the regions side by side."""
    today = datetime.datetime.now(datetime.UTC).date()
    regional = regional_catalogs(asked.catalog, today=today)
    days = [one.day for one in regional if one.day is not None]
    told.note(f"prices of {len(regional)} regions, the oldest of {min(days)}: `hetopt catalog refresh --region all`")
    markets = [
        Market(catalog=one.catalog, quotas=read_quotas(_quotas(asked.quotas, one.catalog.region, told)))
        for one in regional
    ]
    return compare_regions(profile, markets, goal, limits)


def _earlier(told: Reporter) -> EarlierRuns | None:
    """What runs of other jobs found in machine types, as `hetopt.reports.learn` keeps it; None: nothing."""
    found = kept()
    if found is not None:
        told.note(f"machine types as {len(found.runs)} earlier runs found them, of {earlier_runs_file()}, count in")
    return found


def _observed(named: Path | str | None, told: Reporter) -> ObservedPreemptions | None:
    """The file that was named, or else the one that launches keep, if there is one."""
    if named is not None:
        return None if str(named) == "none" else ObservedPreemptions.load(Path(named))
    path = observed_file()
    if not path.exists():
        return None
    found = ObservedPreemptions.load(path)
    hours = sum(pool.instance_hours for pool in found.pools)
    told.note(
        f'preemption rates of spot: the prior, updated by {hours:.0f} instance-hours in {path} (`observed="none"`: not)'
    )
    return found


def _quotas(given: Sequence[str], region: str, told: Reporter) -> Sequence[str]:
    """The quotas that were given, or else those of the account, if its own were ever read."""
    path = account_quotas_file()
    if given or not path.exists():
        return given
    known = AccountQuotas.load(path)
    if region not in known.regions:
        return given
    age = known.age_in_words(region, datetime.datetime.now(datetime.UTC))
    told.note(f'quotas of account {known.account_id} in {region}, {age} (`quotas="none"`: not counted)')
    return (known.regions[region].quotas,)


def _goal(profile: Profile, asked: Search, told: Reporter) -> Goal:
    """Return what ends the training, and within which limits."""
    target, epochs, steps = asked.target, asked.epochs, asked.steps
    limits: dict[str, Any] = {"budget_usd": asked.budget_usd, "deadline_s": asked.deadline}
    if sum(option is not None for option in (target, epochs, steps)) > 1:
        raise BadInput(
            "`target`, `epochs` and `steps` exclude each other.", hint="keep the one that ends your training"
        )
    job = profile.job
    if epochs is not None or steps is not None:
        ends: Literal["epochs", "steps"] = "epochs" if epochs is not None else "steps"
        amount = epochs if epochs is not None else steps
        return Goal(**limits, ends=ends, amount=amount)
    if job.script:
        raise BadInput(
            f"hetopt cannot see how long the script {job.task} trains.",
            hint="give `epochs` or `steps`",
        )
    value = _target_value(target, job.target_metric, job.target_value, job.task)
    if target is None and job.usual_epochs is not None and not any(one.steps_to_target for one in profile.pilots):
        told.note(
            f"No pilot run reached {job.target_metric} {job.target_value:g}, so nothing says how many steps it takes: "
            f"this plan is for the {job.usual_epochs:g} epochs that {job.task} is usually trained. "
            "Choose otherwise with `epochs` or `steps`."
        )
        return Goal(**limits, ends="epochs", amount=job.usual_epochs)
    return Goal(**limits, ends="target", target_metric=job.target_metric, target_value=value)


def _target_value(target: str | float | None, metric: str, usual: float, task: str) -> float:
    if target is None:
        return usual
    if not isinstance(target, str):
        return float(target)
    name, value = metric_target(target)
    if name != metric:
        raise BadInput(
            f"{task} was profiled for {metric}, not {name}.",
            hint=f"for example {setting('target', f'{metric}={usual:g}')}",
        )
    return value


def metric_target(text: str) -> tuple[str, float]:
    """Return 'accuracy=0.97' as its name and value.

    Raises:
        BadInput: it is none.
    """
    pairs = list(arguments(text, "`target`").pairs.items())
    if len(pairs) != 1:
        raise BadInput(
            f"`target` must be METRIC=VALUE, got {text!r}.", hint=f"for example {setting('target', 'accuracy=0.97')}"
        )
    [(name, value)] = pairs
    return name, quantity(value, NUMBER, f"`target` of {name}")
