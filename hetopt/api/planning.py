"""`hetopt.recommend`: the best cluster for a profiled job within a budget, a deadline, or both."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from hetopt.api import sync_options
from hetopt.api.catalogs import in_use
from hetopt.api.sample_remarks import contradictions
from hetopt.api.values import (
    LARGEST_SEED,
    MOST_EPOCHS,
    MOST_STEPS,
    chosen,
    compressors,
    duration_s,
    metric_target,
    names,
    positive,
    ratios,
    size_bytes,
    within,
)
from hetopt.core.artifact import kind_in
from hetopt.core.errors import BadInput, setting
from hetopt.core.hosts import read_hosts
from hetopt.core.precision import Precision
from hetopt.core.profile import Profile
from hetopt.core.reading import opened_file
from hetopt.core.reporter import Reporter
from hetopt.core.script_rules import check_for_script
from hetopt.core.step_samples import StepSamples
from hetopt.core.synchronization_text import parse_sync
from hetopt.optimizer.cost.observed_preemptions import ObservedPreemptions, observed_file
from hetopt.optimizer.market.account_quotas import AccountQuotas, account_quotas_file
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_choice import ANY_REGION, age_note, regional_catalogs
from hetopt.optimizer.market.catalog_filter import AnyMarket
from hetopt.optimizer.market.instance_type import Architecture
from hetopt.optimizer.market.quota import read_quotas
from hetopt.optimizer.plan import Goal, Objective, Plan, ScalingRule
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.recommendation.own_machines import better_of, on_own_machines
from hetopt.optimizer.recommendation.ranking import Ranking, compare
from hetopt.optimizer.recommendation.recommend import recommend as find_plan
from hetopt.optimizer.recommendation.regions import Compared, Market, compare_regions
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, earlier_runs_file, kept

PRECISIONS = ("auto", *get_args(Precision))

Names = Sequence[str] | str
"""Names, or a text with commas between them."""


def recommend(
    profile: Profile | Path | str,
    *,
    budget_usd: float | None = None,
    deadline: str | float | None = None,
    target: str | float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    objective: Objective = "balanced",
    time_weight: float | None = None,
    confidence: float | None = None,
    accept_risk: bool = False,
    market: AnyMarket | Literal["own"] = "any",
    region: str = "us-east-1",
    zone: str | None = None,
    types: Names = (),
    exclude: Names = (),
    gpus: Names = (),
    architecture: Architecture | None = None,
    network_min_gbps: float | None = None,
    network_max_gbps: float | None = None,
    max_hourly_usd: float | None = None,
    max_workers: int = 64,
    max_machines: int | None = None,
    mixed_types: int = 3,
    quotas: Sequence[str] = (),
    data: str | float | None = None,
    data_region: str | None = None,
    disk_gb: int | None = None,
    provisioning: str | float | None = None,
    batch_size: int | None = None,
    learning_rate_rule: ScalingRule | None = None,
    sync: str | None = None,
    precision: Precision | Literal["auto"] = "auto",
    compression: Names = (),
    ratio: Sequence[float | str] | float | str = (),
    catalog: Path | str | None = None,
    observed: Path | str | Literal["none"] | None = None,
    inventory: Path | str | None = None,
    trials: int | None = None,
    journal: Path | str | None = None,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> Plan:
    """Find the best cluster for a profiled job: machines, local batch sizes, batch size and compression.

    Of the plans that keep budget and deadline the balanced one wins; `Plan.choices` has the cheapest, the fastest and
    the safest one beside it. A plan that keeps its limits with less than the probability that is asked for has a
    `Plan.risk`. Works offline, from the bundled catalogue, without credentials and without torch.

    Args:
        profile: made by `hetopt.profile`, or its file.
        budget_usd: a hard cap on the whole bill, USD.
        deadline: longest total time: ``"6h"``, ``"1h30m"``, or seconds.
        target: the value that the task's own metric has to reach, alone or as ``"accuracy=0.97"``. Absent: the task's
            own target, or its usual epochs where no pilot run says how many steps that takes.
        epochs: train so many epochs instead of to a target.
        steps: train so many steps instead.
        objective: within the limits: ``"balanced"`` (stop paying where a tenth less time would cost over a fifth
            more), ``"fastest"`` or ``"cheapest"``.
        time_weight: the part of time (0 to 1) where time and cost are weighed instead.
        confidence: keep the limits with this probability, by simulated runs. Absent: 0.9.
        accept_risk: take a plan that keeps them with less.
        market: ``"spot"``, ``"on-demand"`` or ``"any"``; ``"own"``: nothing is rented, and the plan is for machines of
            the ``inventory``.
        region: of AWS; ``"any"``: the best of all that have prices, with the data set's transfer.
        zone: availability zone of all machines.
        types: names or patterns of instance types to choose from. Absent: all.
        exclude: names or patterns of those to leave out.
        gpus: only machines with these: ``"A10G"``, ``"L4:4"`` (so many a machine), ``"L4:4+"`` (so many or more),
            ``"any"``, ``"none"``.
        architecture: ``"x86_64"`` or ``"arm64"``.
        network_min_gbps: sustained rate of a machine's network in Gbit/s, at least.
        network_max_gbps: the same, at most.
        max_hourly_usd: of all machines together.
        max_workers: of a cluster, up to 4,096.
        max_machines: of a cluster. Absent: as many as workers.
        mixed_types: instance types of a cluster, 1 to 3.
        quotas: vCPUs that may run at once: ``"g=8"``, ``"spot:standard=32"``; ``"default"``: those of a new account;
            ``"none"``: no limit. Absent: your account's, as `hetopt doctor` read them last, or no limit.
        data: size of the data set, which each machine reads first: ``"150GB"``, or bytes. Absent: not counted.
        data_region: where the data set is. Absent: where the machines are; elsewhere its transfer is paid for.
        disk_gb: of each machine. Absent: what image, packages, data and checkpoints need.
        provisioning: from the request for machines to the first step: ``"4m"``, or seconds. Absent: by what each
            machine has to boot and fetch.
        batch_size: fixes the global batch size, samples.
        learning_rate_rule: how the learning rate follows the batch size: none, linear, sqrt or adascale.
        sync: when workers are synchronized, as of `hetopt.launch`. Absent: the best of what was measured.
        precision: that workers compute in: ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, or ``"auto"``: the best of
            those that the profile has steps of.
        compression: names of the methods that gradients may travel by, such as ``"topk"`` or ``"none"``. Absent: all
            whose price the profile tells.
        ratio: the part of the gradient that is sent by those which send a part: ``0.01``, ``"1%"``, ``"100x"``, or
            several. Absent: those that pilots looked at.
        catalog: folder of another catalogue than the bundled one.
        observed: file of what was seen of spot pools; absent: what your launches have seen; ``"none"``: nothing.
        inventory: file of machines of your own, such as ``"hosts.toml"``: a plan for some of them is made as well, and
            the better of the two is returned, with a word on the other.
        trials: of an Optuna study of the whole space, which starts from the best that exact search found. Absent: 400
            with a ``journal``, and none without.
        journal: file that keeps the study's trials; it goes on from those in it, and optuna-dashboard shows them.
        seed: the same seed gives the same plan.
        reporter: told what goes on.

    Raises:
        BadInput: a value cannot be, or the options exclude each other.
        NoFeasiblePlan: nothing fits; the hint says what would.
    """
    told = reporter or Reporter()
    within(seed, "seed", 0, LARGEST_SEED, example="1")
    budget_usd = positive(budget_usd, "budget_usd", "USD")
    deadline_s = duration_s(deadline, "deadline")
    if budget_usd is None and deadline_s is None:
        raise BadInput("give `budget_usd`, `deadline` or both.", hint="for example `budget_usd=5`")
    chosen(market, (*get_args(AnyMarket), "own"), "market")
    if market == "own" and (inventory is None or region == ANY_REGION):
        raise BadInput(
            '`market="own"` plans for machines of your own, in no region.',
            hint='name them with `inventory="hosts.toml"`, and leave `region="any"` out',
        )
    sync_wish = sync_options.parse_wish(sync, None, None)
    options = search_options(
        market="any" if market == "own" else market,
        max_machines=max_machines,
        max_workers=max_workers,
        mixed_types=mixed_types,
        batch_size=batch_size,
        types=types,
        exclude=exclude,
        gpus=gpus,
        architecture=architecture,
        network_min_gbps=network_min_gbps,
        network_max_gbps=network_max_gbps,
        zone=zone,
        max_hourly_usd=max_hourly_usd,
        quotas=() if region == ANY_REGION else _quotas(quotas, region, told),
        data=data,
        data_region=data_region,
        disk_gb=disk_gb,
        provisioning=provisioning,
        objective=objective,
        time_weight=time_weight,
        confidence=confidence,
        accept_risk=accept_risk,
        trials=trials,
        journal=journal,
        observed=_observed(observed, told),
        learning_rate_rule=learning_rate_rule,
        sync=sync,
        precision=precision,
        compression=compression,
        ratio=ratio,
    )
    options = replace(options, earlier=_earlier(told))
    measured = profile_of(profile)
    if measured.job.script and options.batch_size is None:
        # A script's batch size is its own: its learning rate goes with it, and its loader says it.
        options = replace(options, batch_size=measured.job.batch_size)
    goal = _goal(measured, budget_usd, deadline_s, target, positive(epochs, "epochs", "epochs"), steps, told)
    told("the catalogue")
    compared = compared_regions(measured, goal, options, quotas, catalog, seed, told) if region == ANY_REGION else None
    if compared is None:
        loaded = catalog_of(region, catalog)
    else:
        loaded, options = compared.best[0].catalog, replace(options, quotas=compared.best[0].quotas)
    for remark in contradictions(measured, loaded.instance_types):
        told.note(remark)
    now = datetime.datetime.now(datetime.UTC)
    request = PlanRequest(measured, loaded, goal, options)

    def found(request: PlanRequest) -> Plan:
        return find_plan(request, seed=seed, now=now, tell=lambda text: told(text, None))

    def rented() -> Plan:
        return found(request) if compared is None else compared.planned(request, found)

    if inventory is None:
        plan = rented()
    else:
        hosts = read_hosts(Path(inventory))
        told("your own machines")
        if market == "own":
            plan = on_own_machines(request, hosts, seed=seed, now=now)
            plan = plan.model_copy(update={"advice": None})  # which is whether to rent
        else:
            plan = better_of(request, hosts, rented, seed=seed, now=now)
    if compared is None:
        tell_price_ages(plan, loaded, told)
    plan = sync_options.into_plan(sync_wish, plan)
    if plan.run.script:
        check_for_script(plan.run)
    return plan


def rank_clusters(
    profile: Profile | Path | str,
    options: Options,
    *,
    region: str = "us-east-1",
    catalog: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Ranking:
    """Only compare clusters, where no pilot says how many steps the target takes. No budget is needed.

    Args:
        profile: made by `hetopt.profile`, or its file.
        options: what narrows the search, see `search_options`.
        region: as of `recommend`.
        catalog: as of `recommend`.
        reporter: told what goes on.
    """
    told = reporter or Reporter()
    options = replace(options, earlier=_earlier(told))
    found = in_use(region, None if catalog is None else Path(catalog))
    if found.note:
        told.note(found.note)
    return compare(profile_of(profile), found.catalog, options)


def search_options(
    *,
    market: AnyMarket = "any",
    max_machines: int | None = None,
    max_workers: int = 64,
    mixed_types: int = 3,
    batch_size: int | None = None,
    types: Names = (),
    exclude: Names = (),
    gpus: Names = (),
    architecture: Architecture | None = None,
    network_min_gbps: float | None = None,
    network_max_gbps: float | None = None,
    zone: str | None = None,
    max_hourly_usd: float | None = None,
    quotas: Sequence[str] = (),
    data: str | float | None = None,
    data_region: str | None = None,
    disk_gb: int | None = None,
    provisioning: str | float | None = None,
    objective: Objective = "balanced",
    time_weight: float | None = None,
    confidence: float | None = None,
    accept_risk: bool = False,
    trials: int | None = None,
    journal: Path | str | None = None,
    observed: ObservedPreemptions | None = None,
    learning_rate_rule: ScalingRule | None = None,
    sync: str | None = None,
    precision: Precision | Literal["auto"] = "auto",
    compression: Names = (),
    ratio: Sequence[float | str] | float | str = (),
) -> Options:
    """What narrows a search, from the values that people give; see `recommend` for each of them.

    Raises:
        BadInput: a value cannot be.
    """
    return Options(
        market=chosen(market, get_args(AnyMarket), "market") or "any",
        max_machines=max_machines,
        max_workers=max_workers,
        mixed_types=mixed_types,
        batch_size=batch_size,
        only_types=names(types, "types"),
        exclude_types=names(exclude, "exclude"),
        gpus=names(gpus, "gpus"),
        architecture=chosen(architecture, get_args(Architecture), "architecture"),
        network_min_gbps=positive(network_min_gbps, "network_min_gbps", "Gbit/s"),
        network_max_gbps=positive(network_max_gbps, "network_max_gbps", "Gbit/s"),
        zone=zone,
        max_hourly_usd=positive(max_hourly_usd, "max_hourly_usd", "USD an hour"),
        quotas=read_quotas(quotas),
        data_bytes=size_bytes(data, "data"),
        data_region=data_region,
        disk_gb=disk_gb,
        startup_s=duration_s(provisioning, "provisioning"),
        objective=chosen(objective, get_args(Objective), "objective") or "balanced",
        time_weight=time_weight,
        confidence=confidence,
        accept_risk=accept_risk,
        trials=trials,
        journal=None if journal is None else _journal(Path(journal)),
        observed=observed,
        learning_rate_rule=chosen(learning_rate_rule, get_args(ScalingRule), "learning rate rule"),
        sync=None if sync is None else parse_sync(sync),
        precision=None if precision == "auto" else chosen(precision, PRECISIONS, "precision"),
        compression=compressors(compression),
        ratios=ratios(ratio),
    )


def _journal(path: Path) -> Path:
    """The file that a study goes on in, looked at before a search that would be lost.

    Raises:
        BadInput: it holds something else, or cannot be read or made.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"{path} cannot be the journal of a search.", hint="name a file in a folder as `journal`")
    if path.exists():
        with opened_file(path, hint=_NO_JOURNAL) as stream:
            first = stream.readline(_MOST_OF_AN_ENTRY)
        # Optuna's journal is JSON Lines, each with the code of what was done.
        if first and not (first.startswith(b"{") and b'"op_code"' in first):
            raise BadInput(f"{path} is not the journal of a search.", hint=_NO_JOURNAL)
    return path


_NO_JOURNAL = "name another file as `journal`, one that it made or that is not there yet"
_MOST_OF_AN_ENTRY = 100_000
"""Bytes."""


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


def catalog_of(region: str, folder: Path | str | None) -> Catalog:
    """The catalogue that is planned with."""
    return in_use(region, None if folder is None else Path(folder)).catalog


def tell_price_ages(plan: Plan, catalog: Catalog, told: Reporter) -> None:
    """Note how old the prices are that a plan shows; nothing of those that it does not."""
    shown = [plan.chosen, *(way.candidate for way in plan.choices if way.candidate is not None)]
    dates = {group.price_date for one in shown for group in one.groups if not group.is_own}
    note = age_note(catalog, map(datetime.date.fromisoformat, dates), today=datetime.datetime.now(datetime.UTC).date())
    if note is not None:
        told.note(note)


def compared_regions(
    profile: Profile,
    goal: Goal,
    options: Options,
    quotas: Sequence[str],
    folder: Path | str | None,
    seed: int,
    told: Reporter,
) -> Compared:
    """The regions side by side."""
    today = datetime.datetime.now(datetime.UTC).date()
    regional = regional_catalogs(None if folder is None else Path(folder), today=today)
    days = [one.day for one in regional if one.day is not None]
    told.note(f"prices of {len(regional)} regions, the oldest of {min(days)}: `hetopt catalog refresh --region all`")
    markets = [
        Market(catalog=one.catalog, quotas=read_quotas(_quotas(quotas, one.catalog.region, told))) for one in regional
    ]
    return compare_regions(profile, markets, goal, options, seed=seed)


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


def _goal(
    profile: Profile,
    budget_usd: float | None,
    deadline_s: float | None,
    target: str | float | None,
    epochs: float | None,
    steps: int | None,
    told: Reporter,
) -> Goal:
    """What ends the training, and within which limits."""
    if sum(option is not None for option in (target, epochs, steps)) > 1:
        raise BadInput(
            "`target`, `epochs` and `steps` exclude each other.", hint="keep the one that ends your training"
        )
    if steps is not None:
        within(steps, "steps", 1, MOST_STEPS, example="10000")
    if epochs is not None:
        within(epochs, "epochs", 0.0, MOST_EPOCHS, example="5")
    job = profile.job
    if epochs is not None or steps is not None:
        ends: Literal["epochs", "steps"] = "epochs" if epochs is not None else "steps"
        amount = epochs if epochs is not None else steps
        return Goal(budget_usd=budget_usd, deadline_s=deadline_s, ends=ends, amount=amount)
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
        return Goal(budget_usd=budget_usd, deadline_s=deadline_s, ends="epochs", amount=job.usual_epochs)
    return Goal(
        budget_usd=budget_usd,
        deadline_s=deadline_s,
        ends="target",
        target_metric=job.target_metric,
        target_value=value,
    )


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
