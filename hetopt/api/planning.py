"""`hetopt.recommend`: the best cluster for a profiled job; `hetopt.estimate`: the same by counting, unmeasured."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetopt import catalogs
from hetopt.api.catalogs import in_regions
from hetopt.api.changes import synchronized
from hetopt.api.options import Changes, Described, Search, Sought
from hetopt.core.artifact import kind_in
from hetopt.core.comm.compression_text import IDENTITY
from hetopt.core.errors import BadInput, setting
from hetopt.core.formatting import bytes_, duration
from hetopt.core.grammar import NUMBER, arguments, quantity
from hetopt.core.hosts import Host, read_hosts
from hetopt.core.interruption import Reporter
from hetopt.core.memory import TrainingMemory
from hetopt.core.option import options_of, takes
from hetopt.core.paths import read_json
from hetopt.core.plain_text import known
from hetopt.core.profile import LOCAL, Profile
from hetopt.core.run_rules import check_follows_noise, check_for_script
from hetopt.core.run_spec import Synchronization
from hetopt.core.step_samples import Node, StepSample, StepSamples
from hetopt.optimizer.cost.preemption_rate import ObservedPreemptions, observed_file
from hetopt.optimizer.described_profile import Timed, described_profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_filter import has_accelerator
from hetopt.optimizer.market.catalog_folder import ANY_REGION, NOT_RENTED, age_note, price_days
from hetopt.optimizer.market.clouds import (
    ANY_CLOUD,
    GPUS_OBTAINABLE,
    MACHINES_OBTAINABLE,
    gpu_named,
    obtainable_gpus,
    owned,
)
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.quota import AccountQuotas, Quotas, account_quotas_file, obtainable, read_quotas
from hetopt.optimizer.model_counts import ADAPTER_SHARE, CONTRIBUTION, ModelCount, Recipe, of_flops, of_parameters
from hetopt.optimizer.plan import AWS, UNLIKE, Goal, Plan
from hetopt.optimizer.recommendation.options import ADAPTIVE_BATCH, Options, PlanRequest
from hetopt.optimizer.recommendation.places import better_of, on_own_machines, plan_in_regions
from hetopt.optimizer.recommendation.recommend import recommend as find_plan
from hetopt.optimizer.step_time.gpu_transfer import Precision
from hetopt.optimizer.step_time.model import RENTED
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import fit
from hetopt.optimizer.step_time.tiers import measured_steps
from hetopt.optimizer.step_time.transfer import quickest_precision

if TYPE_CHECKING:
    from hetopt.reports.document import Document


PROFILES = catalogs.FOLDER / "profiles"
"""Folder of the recorded profiles that ship, so that planning can be tried where nothing was measured yet."""


@takes(Search)
def recommend(profile: Profile | Path | str, *, reporter: Reporter | None = None, **options: Any) -> Plan:
    """Find the best cluster for a profiled job: machines, local batch sizes, batch size and compression.

    Of the plans that keep budget and deadline the balanced one wins; `Plan.choices` has the cheapest, the fastest and
    the safest one beside it. A plan that keeps its limits with less than the probability that is asked for has a
    `Plan.risk`. Works offline, from the bundled catalogue, without credentials and without torch; no file is written
    but a ``study``.

    Args:
        profile: made by `hetopt.profile`, its file, or the name of one that ships, such as ``bert-base``.
        reporter: receives progress and remarks; None: nothing is reported.
        **options: what is wanted.

    Raises:
        BadInput: neither budget nor deadline is given, an option is invalid or contradicts another, or the profile
            cannot be read or does not tell what the options need.
        NoFeasiblePlan: no cluster keeps the limits; the hint says what would help.
    """
    asked, report = Search(**options), reporter or Reporter()
    if asked.budget_usd is None and asked.deadline is None:
        raise BadInput("give `budget_usd`, `deadline` or both.", hint="for example `budget_usd=5`")
    places = Places.of(asked)
    limits = search_options(asked, quotas=places.quotas(asked, report), observed=_observed(asked.observed, report))
    measured = profile_of(profile, report)
    if measured.job.script and isinstance(limits.batch_size, str):
        raise BadInput(
            "a script says its batch size and its length itself, so hetopt cannot choose them.",
            hint="give `batch_size` as a number, and the script the same",
        )
    if limits.batch_size == ADAPTIVE_BATCH:
        if limits.learning_rate_rule is not None:
            raise BadInput(
                f"with {setting('batch_size', ADAPTIVE_BATCH)} the learning rate follows the noise.",
                hint="leave out `learning_rate_rule`",
            )
        # How gradients travel while their noise is measured: whole, in every step.
        limits = replace(limits, compression=limits.compression or (IDENTITY,), sync=limits.sync or Synchronization())
    goal = _goal(measured, asked, report)
    for remark in contradictions(measured, places.catalogs[0].instance_types):
        report.note(remark)
    plan = _planned(measured, goal, limits, asked, places, report, seed=asked.seed)
    if asked.sync not in (None, plan.run.sync):  # one that no search weighs
        plan = plan.model_copy(update={"run": synchronized(Changes(sync=asked.sync), plan.run)})
    if plan.run.script:
        check_for_script(plan.run)
    if plan.run.batch_policy == "critical":
        check_follows_noise(plan.run, rule=measured.job.learning_rate_rule)
    return plan


@dataclass(frozen=True, kw_only=True)
class Places:
    """The machines that a plan may use: catalogues of rentable ones, and the user's own hosts.

    Attributes:
        catalogs: in use, of the region that was asked for or of each region that has prices; at least one.
        hosts: machines of the user's inventory; empty: none was named.
    """

    catalogs: tuple[Catalog, ...]
    hosts: tuple[Host, ...] = ()

    @classmethod
    def of(cls, asked: Sought) -> Places:
        """Return the regions' catalogues, with the user's own prices put in, and the hosts that the options ask for.

        Raises:
            BadInput: there is no such region or cloud, a catalogue or the inventory cannot be read, or ``market="own"``
                comes without an inventory or with ``region="any"``.
        """
        if asked.market == "own" and (asked.inventory is None or asked.region == ANY_REGION):
            raise BadInput(
                '`market="own"` plans for machines of your own, in no region.',
                hint="leave `region` out" if asked.inventory else 'name them with `inventory="hosts.toml"`',
            )
        hosts = () if asked.inventory is None else read_hosts(asked.inventory)
        today = datetime.datetime.now(datetime.UTC).date()
        return cls(
            catalogs=tuple(catalog.priced(asked.prices, today=today) for catalog in in_regions(asked)), hosts=hosts
        )

    @property
    def several(self) -> bool:
        """Return whether catalogues of several regions are compared."""
        return len(self.catalogs) > 1

    def quotas(self, asked: Sought, reporter: Reporter) -> Quotas:
        """Return the vCPU quotas to plan with: those given, else, in a single region, those kept by `checks`.

        Args:
            asked: options with the quotas given.
            reporter: receives a remark where the account's quotas are used.

        Returns:
            The quotas by market and family; empty: no limit is known.

        Raises:
            BadInput: a quota given cannot be parsed, or the file of kept quotas cannot be read.
        """
        return read_quotas(asked.quotas if self.several else _quotas(asked.quotas, self.catalogs[0].region, reporter))


def _planned(
    profile: Profile, goal: Goal, limits: Options, asked: Sought, places: Places, reporter: Reporter, *, seed: int = 0
) -> Plan:
    """Return the best plan of all places: rented machines, the user's own, or the better of both.

    Without hosts only rented machines are planned with, and with ``market="own"`` only the hosts. In a single region
    the age of the prices is reported.

    Raises:
        BadInput: the profile or a host does not tell what the options need.
        NoFeasiblePlan: no cluster keeps the limits.
    """
    now = datetime.datetime.now(datetime.UTC)
    reporter("the catalogue")

    def search(request: PlanRequest) -> Plan:
        return find_plan(request, seed=seed, now=now, tell=lambda text: reporter(text, None))

    request = PlanRequest(profile, places.catalogs[0], goal, limits)
    rented = partial(search, request)
    if places.several:
        rented = partial(plan_in_regions, _in_each_region(request, asked, places, reporter), search)
    if not places.hosts:
        plan = rented()
    elif asked.market == "own":
        reporter("your own machines")
        plan = on_own_machines(request, places.hosts, seed=seed, now=now)
        plan = plan.model_copy(update={"advice": None})  # which is whether to rent
    else:
        reporter("your own machines")
        plan = better_of(request, places.hosts, rented, seed=seed, now=now)
    if not places.several:
        _tell_price_ages(plan, request.catalog, reporter)
    return plan


_CALLED = {
    "data": "data_bytes",
    "provisioning": "startup_s",
    "ratio": "ratios",
}
"""Fields of `Options` that are called otherwise than the option."""


def search_options(asked: Sought, **instead: Any) -> Options:
    """Return the planner's options from those of `recommend` or `estimate`, with the fields ``instead`` replaced.

    Args:
        asked: options of `recommend` or `estimate`; fields that the planner does not have are left out.
        instead: planner's fields with the values that replace those of ``asked``.

    Raises:
        BadInput: a quota in ``asked`` cannot be parsed.
    """
    values = {_CALLED.get(name, name): getattr(asked, name) for name in options_of(type(asked))}
    values |= {"data_bytes": values.get("data_bytes") or 0.0, "quotas": read_quotas(asked.quotas), "observed": None}
    values["market"] = "any" if asked.market == "own" else asked.market
    values["precision"] = None if values["precision"] == "auto" else values["precision"]
    known = {option.name for option in fields(Options)}
    return Options(**{name: value for name, value in (values | instead).items() if name in known})


def profile_of(given: Profile | Path | str, reporter: Reporter | None = None) -> Profile:
    """Return a profile: a record as it is, a file's, or one that ships with hetopt, by name (`bert-base`).

    Args:
        given: the profile, its file, or the name of one that ships.
        reporter: receives a remark where a shipped profile is used; None: nothing is reported.

    Raises:
        BadInput: there is no such file or shipped profile, the file is no profile, or it holds step samples alone; then
            the message says what is missing.
    """
    if isinstance(given, Profile):
        return given
    path = Path(given)
    if not path.exists() and not path.suffix and path.name == str(given):
        shipped = {file.stem: file for file in PROFILES.glob("*.json")}
        path = shipped[
            known(
                path.name,
                shipped,
                "profile",
                hint=f"{' and '.join(sorted(shipped))} ship; make your own with `hetopt profile TASK -o FILE`",
            )
        ]
        (reporter or Reporter()).note(f"{given} ships with hetopt; `here` is where it was measured.")
    if kind_in(path) == StepSamples.KIND:
        raise BadInput(
            f"{path} holds step times alone. A plan also needs what is trained: the task and its data set, the size of "
            "the gradient, the memory that a sample takes, and how many steps the target needs.",
            hint="measure the task here and keep the samples beside it: "
            "`hetopt profile TASK --from-samples FILE -o profile.json`",
        )
    return Profile.load(path)


def _tell_price_ages(plan: Plan, catalog: Catalog, reporter: Reporter) -> None:
    """Report the age of the prices that a plan shows, where that is worth a remark."""
    shown = [plan.chosen, *(way.candidate for way in plan.choices if way.candidate is not None)]
    dates = {group.price_date for candidate in shown for group in candidate.groups if not group.is_own}
    note = age_note(catalog, map(datetime.date.fromisoformat, dates), today=datetime.datetime.now(datetime.UTC).date())
    if note is not None:
        reporter.note(note)


def _in_each_region(request: PlanRequest, asked: Sought, places: Places, reporter: Reporter) -> list[PlanRequest]:
    """Return the request for each region, with the quotas kept for the account there, else the request's own.

    The age of the prices and the quotas that are used are reported.

    Raises:
        BadInput: the file of kept quotas cannot be read.
    """
    renewal = ": `hetopt catalog refresh --region all`" if asked.cloud == AWS else NOT_RENTED
    reporter.note(f"prices of {len(places.catalogs)} regions, {price_days(places.catalogs)}{renewal}")
    quotas = [read_quotas(_quotas(asked.quotas, catalog.region, reporter)) for catalog in places.catalogs]
    return [
        replace(request, catalog=catalog, options=replace(request.options, quotas=there or request.options.quotas))
        for catalog, there in zip(places.catalogs, quotas, strict=True)
    ]


def _observed(named: Path | str | None, reporter: Reporter) -> ObservedPreemptions | None:
    """Return the preemptions in the file named, else in the one that launches keep; None: no file, or ``none`` named.

    Raises:
        BadInput: the file named is not there, or the file cannot be read.
    """
    if named is not None:
        return None if str(named) == "none" else ObservedPreemptions.load(Path(named))
    path = observed_file()
    if not path.exists():
        return None
    preemptions = ObservedPreemptions.load(path)
    hours = sum(pool.instance_hours for pool in preemptions.pools)
    reporter.note(
        f'preemption rates of spot: the prior, updated by {hours:.0f} instance-hours in {path} (`observed="none"`: not)'
    )
    return preemptions


def _quotas(given: Sequence[str], region: str, reporter: Reporter) -> Sequence[str]:
    """Return the quotas that were given, else the account's kept for the region; neither: empty, as given.

    Raises:
        BadInput: the file of kept quotas cannot be read.
    """
    path = account_quotas_file()
    if given or not path.exists():
        return given
    known = AccountQuotas.load(path)
    if region not in known.regions:
        return given
    reporter.note(
        f"quotas of account {known.account_id} in {region}, read {known.regions[region].read:%Y-%m-%d} by "
        '`hetopt doctor` (`quotas="none"`: not counted)'
    )
    return (known.regions[region].quotas,)


def _goal(profile: Profile, asked: Search, reporter: Reporter) -> Goal:
    """Return the goal of a training: a target, epochs or steps, and limits on its time and cost.

    Without any, the goal is the target of the profile; where none of its pilots reached that, the usual epochs of the
    task are the goal, and a remark says so.

    Raises:
        BadInput: two goals are given, a script's goal is no number of epochs or steps, or the target has another metric
            than the profile.
    """
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
    metric, value = job.target_metric, job.target_value
    if isinstance(target, str):
        metric, value = metric_target(target)
    elif target is not None:
        value = float(target)
    if metric != job.target_metric:
        raise BadInput(
            f"{job.task} was profiled for {job.target_metric}, not {metric}.",
            hint=f"for example {setting('target', f'{job.target_metric}={job.target_value:g}')}",
        )
    if target is None and job.usual_epochs is not None and not any(pilot.steps_to_target for pilot in profile.pilots):
        reporter.note(
            f"No pilot run reached {job.target_metric} {job.target_value:g}, so nothing says how many steps it takes: "
            f"this plan is for the {job.usual_epochs:g} epochs that {job.task} is usually trained. "
            "Choose otherwise with `epochs` or `steps`."
        )
        return Goal(**limits, ends="epochs", amount=job.usual_epochs)
    return Goal(**limits, ends="target", target_metric=job.target_metric, target_value=value)


def metric_target(text: str) -> tuple[str, float]:
    """Parse a target such as 'accuracy=0.97' into the metric's name and its value.

    Raises:
        BadInput: the text is not ``METRIC=VALUE``, or the value is no number.
    """
    pairs = list(arguments(text, "`target`").pairs.items())
    if len(pairs) != 1:
        raise BadInput(
            f"`target` must be METRIC=VALUE, got {text!r}.", hint=f"for example {setting('target', 'accuracy=0.97')}"
        )
    [(name, value)] = pairs
    return name, quantity(value, NUMBER, f"`target` of {name}")


TOKENS = 1024
"""Tokens of a sample where nothing says how many: GPT-2's."""

BATCH_SIZE = 256
"""Samples of a step where nothing says how many: those of BERT (Devlin et al. 2019, appendix A.2) and of ResNet-50."""

CONFIG_BYTES = 1_000_000
"""Largest size of a model's configuration file that is read; usual ones have a few kilobytes."""

MOST_GPUS = 100_000
"""Most GPUs of one training that ``on`` may name: as many as the largest published trainings used."""

LEAST_PARAMETERS = 1000
"""Fewest parameters of a described model: fewer is a slip, such as a 5 for 5B; a layer that is 16 wide has 3,000."""

MOST_PARAMETERS = 1e15
MOST_SAMPLES = 1e15
"""Most parameters and samples of a described job, beyond any that were ever trained (1e12 and 1e13): more is a slip,
and integers of it would lose digits as floats."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The most samples that a GPU type holds at once in training.

    Attributes:
        gpu: name of the GPU type.
        memory_gib: memory of one such GPU, in GiB.
        samples: the most samples of a micro-batch; None: any number fits.
        shards: GPUs of a machine that share one replica of the model; 1: each holds a replica.
        recomputes: whether activations are recomputed in the backward pass.
    """

    gpu: str
    memory_gib: float
    samples: int | None
    shards: int = 1
    recomputes: bool = False

    def __str__(self) -> str:
        """Return the GPU and the samples, as in '4 on H100 80 GiB (8 share the model)'."""
        samples = "any number" if self.samples is None else f"{self.samples:,}"
        how = [f"{self.shards} share the model"] if self.shards > 1 else []
        how += ["activations recomputed"] if self.recomputes else []
        together = ", ".join(how)
        memory = "" if UNLIKE in self.gpu else f" {self.memory_gib:.0f} GiB"
        return f"{samples} on {self.gpu}{memory}{together and f' ({together})'}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time and cost of a described job: the planner's answer, and what it was counted from.

    Printed, it is a document for people (`document`).

    Attributes:
        plan: the planner's answer. It can be rehearsed, with a stand-in for the job, but not launched elsewhere.
        job: the job with its counted operations, bytes and samples.
        fits: samples that fit at once on each GPU type of the plan's choices; empty where no type has known memory.
        presumed: True if nothing is known of what the account may rent, so that usual quotas were assumed.
        timed: phrase about the past training that the time is scaled from, such as 'a training of 3 d on 1 x A10G';
            None: operations alone.
        beside: sentence that the user's own machines, or rented ones, do not keep the limits, where both were searched;
            None: both keep them, or only one kind was searched.
    """

    plan: Plan
    job: DescribedJob
    fits: tuple[Fit, ...]
    presumed: bool = False
    timed: str | None = None
    beside: str | None = None

    @property
    def document(self) -> Document:
        """Return the document for people: what was counted, the ways to go, and what both rest on."""
        from hetopt.reports.document import Document, Line, Remarks
        from hetopt.reports.plan_document import choices, in_a_sentence, limits_of, quota_notes, warnings

        job = self.job
        counted = f"{job.model.in_words}, {job.samples:,} x {job.model.sample}, {job.flops:.2g} FLOPs"
        title = ", ".join([counted, *limits_of(self.plan.goal)])
        blocks = [*choices(self.plan), Line(""), Remarks(list(self._sentences()))]
        lacking = [Line(text, "warning") for text in quota_notes(self.plan, presumed=True) if self.presumed]
        remarks = [Line(text, "warning") for text in job.remarks]
        about = [*warnings(self.plan), *lacking, *in_a_sentence(self.plan), *remarks]
        return Document(kind="hetopt estimate", title=title, about=about, blocks=blocks)

    def _sentences(self) -> Iterator[str]:
        """Yield the sentences below the choices: basis and interval, assumptions, memory, and machines beside these.

        Sharing of a model, and other regions, are spoken of where there are any.
        """
        from hetopt.reports.plan_document import region_notes

        job, trains = self.job, self.plan.chosen.prediction.training_s
        basis = "Counted FLOPs, not measured" if self.timed is None else f"By {self.timed}"
        yield (
            f"{basis}: training may take {trains.low / trains.value:.2g} to {trains.high / trains.value:.2g} "
            "times as long as in these figures (90 %); profiling narrows that."
        )
        if job.assumed:
            yield f"Assumed: {', '.join(job.assumed)}."
        yield (
            f"Memory: {bytes_(job.memory.kept_bytes)} for weights, gradients and {job.recipe.optimizer}, "
            f"{bytes_(job.sample_bytes)} a sample; samples that fit at once: {', '.join(map(str, self.fits))}."
        )
        if any(fit.shards > 1 for fit in self.fits):
            yield (
                "Sharing a model is FSDP's: `hetopt launch` runs a script that calls torch's `fully_shard`, and a task "
                "with `shard`."
            )
        if self.beside is not None:
            yield self.beside
        yield from region_notes(self.plan)

    def __str__(self) -> str:
        """Return the document as `hetopt estimate` prints it."""
        from hetopt.reports.text import whole

        return whole(self.document)

    def __repr__(self) -> str:
        return f"<Estimate of {self.job.model.name}, {self.job.samples:,} samples: {self.plan!r}>"

    def _repr_html_(self) -> str:
        """Return the document as notebooks show it."""
        from hetopt.reports import html

        return html.notebook(self.document)


@dataclass(frozen=True, kw_only=True)
class DescribedJob:
    """A job that was described and counted, not measured.

    Attributes:
        model: size and operations of the model.
        recipe: how it is trained: method, trained share of the parameters, and optimizer.
        samples: trained on in total, epochs included.
        batch_size: global batch size, in samples.
        profile: counted stand-in for a measured profile, which the planner reads.
        assumed: phrases on what was taken for granted, with the option to change each.
        remarks: sentences on the past training that the time is scaled from; empty: there is none.
    """

    model: ModelCount
    recipe: Recipe
    samples: int
    batch_size: int
    profile: Profile
    assumed: list[str]
    remarks: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Return the floating-point operations of the whole training."""
        return self.recipe.passes * self.model.forward_flops * self.samples

    @property
    def memory(self) -> TrainingMemory:
        """Return the memory of one replica in bytes: weights, gradients, optimizer state and activations."""
        memory = self.profile.devices[0].memory
        assert memory is not None
        return memory

    @property
    def sample_bytes(self) -> float:
        """Return the bytes of one sample's activations: peak memory at 2 samples less that at 1."""
        return self.memory.peak_bytes(2) - self.memory.peak_bytes(1)


def described(
    asked: Described, catalogs: Sequence[Catalog], hosts: Sequence[Host] = (), *, now: datetime.datetime
) -> DescribedJob:
    """Return a described job with its operations, bytes and samples counted.

    Args:
        asked: what is known of the job.
        catalogs: catalogs of the regions where the job may run, at least one; their GPUs decide the precision ``auto``.
        hosts: the user's own machines where the job may run as well.
        now: date of the counted profile.

    Raises:
        BadInput: model size or training length is missing, given twice or out of range, the configuration cannot be
            read, ``took`` and ``on`` are not both given, or ``trainable`` comes without adapters.
    """
    assumed: list[str] = []
    timed = _timed(asked, catalogs[0])
    model, samples = _counted(asked, timed, assumed)
    batch = min(asked.batch_size or BATCH_SIZE, samples)
    if asked.batch_size is None:
        assumed.append(f"{batch} samples a step (`batch_size`)")
    recipe, precisions = _recipe(asked, assumed), _precisions(asked, catalogs, hosts, now)
    profile = described_profile(
        model, samples=samples, batch_size=batch, precisions=precisions, now=now, recipe=recipe, timed=timed
    )
    remarks = () if timed is None else timed.remarks(model, recipe, samples, precisions[0])
    return DescribedJob(
        model=model,
        recipe=recipe,
        samples=samples,
        batch_size=batch,
        profile=profile,
        assumed=assumed,
        remarks=tuple(remarks),
    )


def _precisions(
    asked: Described, catalogs: Sequence[Catalog], hosts: Sequence[Host], now: datetime.datetime
) -> tuple[Precision, ...]:
    """Return the precisions to count a job in: the one asked for; with ``auto`` bf16 and what some machines need.

    A machine that is named, or the user's own, and has no units for bf16 adds the precision that is quickest on it.

    Raises:
        BadInput: of a host something is unknown that a plan needs.
    """
    if asked.precision != "auto":
        return (asked.precision,)
    gpus = [text.partition(":")[0] for text in asked.gpus]
    named = [
        instance
        for catalog in catalogs
        for instance in catalog.instance_types.values()
        if any(fnmatch(instance.name, pattern) for pattern in asked.types)
        or any(has_accelerator(instance, name) for name in gpus)
    ]
    if hosts:
        named += [listing.instance_type for listing in owned(catalogs[0], hosts, now.date())[0].listings.values()]
    return tuple(dict.fromkeys(["bf16", *map(quickest_precision, named)]))


_ON = re.compile(r"(?:(-?\d{1,9})\s*[x×*]\s*)?([^\s:][^:]*?)\s*(?::\s*(-?\d{1,9}))?")
"""As in '8 x A100', or as `gpus` has it, 'A100:8'."""


def _timed(asked: Described, catalog: Catalog) -> Timed | None:
    """Return the training that was timed, on the GPUs that are named; None: none was.

    Raises:
        BadInput: only the time or only the GPUs are given, or no GPUs are known by that name.
    """
    if asked.took is None and asked.on is None:
        return None
    if asked.took is None or asked.on is None:
        raise BadInput("`took` and `on` belong together.", hint='for example `took="3d"` and `on="1 x A10G"`')
    written = _ON.fullmatch(asked.on.strip())
    count = int(written[1] or written[3] or 1) if written else 0
    if written is None or not 1 <= count <= MOST_GPUS:
        raise BadInput(f"`on` must be 1 to {MOST_GPUS:,} GPUs, got {asked.on!r}.", hint='for example `on="8 x H100"`')
    return Timed(took_s=asked.took, gpus=replace(gpu_named(catalog, written[2]), count=count))


def _recipe(asked: Described, assumed: list[str]) -> Recipe:
    """Return the recipe by which the job trains; an assumed share of adapters is added to ``assumed`` in words.

    Raises:
        BadInput: a share of adapters is given for a training of all parameters.
    """
    trained = asked.trainable
    if asked.method == "full":
        if trained is not None:
            raise BadInput(
                '`trainable` is of adapters, and `method="full"` trains all of a model.',
                hint='add `method="lora"`, or leave `trainable` out',
            )
        return Recipe(optimizer=asked.optimizer)
    if trained is None:
        trained = ADAPTER_SHARE
        assumed.append(f"adapters of {100 * trained:g} % of the parameters (`trainable`)")
    return Recipe(method=asked.method, trained=float(trained), optimizer=asked.optimizer)


@takes(Described)
def estimate(*, reporter: Reporter | None = None, **options: Any) -> Estimate:
    """Estimate the time and cost of training from a model's operations, with nothing measured and without torch.

    Clusters are searched, priced and compared as by `recommend`, but of one type each, on GPUs, and with dense
    gradients; the time of a step follows from its operations and what public measurements say of how well GPUs are
    used, with a wide interval. Without ``budget_usd`` and ``deadline``, nothing is held against limits. Without quotas,
    given or kept, modest ones are assumed, and the result says so.

    Args:
        reporter: receives progress and remarks; None: nothing is reported.
        **options: what is known of the job, and wanted.

    Raises:
        BadInput: model size or training length is missing, or an option is invalid or contradicts another.
        NoFeasiblePlan: no cluster holds the job or keeps the limits; the hint says what would help.
    """
    asked, report = Described(**options), reporter or Reporter()
    places = Places.of(asked)
    job = described(asked, places.catalogs, places.hosts, now=datetime.datetime.now(datetime.UTC))
    quotas, exclude = places.quotas(asked, report), asked.exclude
    presumed = not quotas and not asked.quotas and asked.market != "own"
    if presumed:
        quotas, patterns = obtainable()
        amounts = [f"{max(quotas.values())} vCPUs of each kind"] * (asked.cloud in (AWS, ANY_CLOUD))
        amounts += [f"{GPUS_OBTAINABLE} GPUs of a type of another cloud"] * (asked.cloud != AWS)
        yours = setting("quotas", "p5=96")
        job.assumed.append(f"you may rent up to {' and '.join(amounts)} (yours: {yours})")
        quotas = {**quotas, **obtainable_gpus(places.catalogs)}
        if not (asked.gpus or asked.types):
            names = {name for catalog in places.catalogs for name in catalog.instance_types}
            exclude = (*exclude, *(pattern for pattern in patterns if any(fnmatch(name, pattern) for name in names)))
    limits = search_options(
        asked,
        gpus=asked.gpus or ("any",),
        quotas=quotas,
        exclude=exclude,
        mixed_types=1,
        max_machines=max(MACHINES_OBTAINABLE, len(places.hosts)) if presumed else None,
        batch_size=job.batch_size,
        precision=None,
        trials=None,
        compression=(IDENTITY,),
    )
    steps = math.ceil(job.samples / job.batch_size)
    goal = Goal(budget_usd=asked.budget_usd, deadline_s=asked.deadline, ends="steps", amount=steps)
    plan = _planned(job.profile, goal, limits, asked, places, report)
    is_beside = any({"own", "rented"} & {*way.names} for way in plan.choices)
    return Estimate(
        plan=plan,
        job=job,
        fits=tuple(_fits(plan)),
        presumed=presumed,
        beside=None if not places.hosts or asked.market == "own" or is_beside else plan.reasons[0],
        timed=None if asked.took is None else f"a training of {duration(asked.took)} on {asked.on}",
    )


def _fits(plan: Plan) -> Iterator[Fit]:
    """Yield the most samples that each GPU among the plan's choices holds, once for each GPU and memory scheme."""
    ways = [way.candidate for way in plan.choices if way.candidate is not None]
    fits: dict[Fit, None] = {}
    for group in (group for way in ways for group in way.groups):
        has, assumed = group.hardware, group.assumed
        assert assumed is not None
        if has is not None and has.gpu is not None and has.gpu_memory_gib is not None:
            shards = 1 if assumed.shard == "none" else group.workers_per_machine
            fit = Fit(
                gpu=has.gpu,
                memory_gib=has.gpu_memory_gib,
                samples=assumed.together,
                shards=shards,
                recomputes=assumed.recomputes,
            )
            fits[fit] = None
    yield from fits


def _counted(asked: Described, timed: Timed | None, assumed: list[str]) -> tuple[ModelCount, int]:
    """Return the model, and on how many samples it is trained; assumptions are added to ``assumed``.

    A training that was timed, and of which nothing else is known, has the operations that most do in that time.

    Raises:
        BadInput: the model or the length of training is missing, given twice or out of range, or the configuration
            cannot be read.
    """
    params, config, flops, samples = asked.params, asked.config, asked.flops, asked.samples
    if timed is not None and {params, config, flops, samples} == {None}:
        flops = timed.usual_flops("bf16" if asked.precision == "auto" else asked.precision)
    tokens = asked.tokens
    if params is not None and config is not None:
        raise BadInput("`params` and `config` exclude each other.", hint="keep the one that describes your model")
    if params is None and config is None and flops is None:
        raise BadInput(
            "give `params` or `config`: what the model is.", hint='for example `params="110M"` and `samples="3M"`'
        )
    if (samples is None) == (flops is None):
        raise BadInput(
            "give `samples` or `flops`: how long the training is."
            if samples is None
            else "`samples` and `flops` exclude each other.",
            hint="for example `samples=3e6`",
        )
    if config is not None:
        from hetopt.optimizer.model_families import of_config

        hint = "name the config.json of a model"
        read = read_json(config, most_bytes=CONFIG_BYTES, hint=hint)
        if not isinstance(read, dict):
            raise BadInput(f"{config} is no configuration: it holds no fields.", hint=hint)
        model = of_config(read, tokens, whole=asked.method == "full")
        assumed += [f"{model.sample} a sample (`tokens`)"] * (tokens is None and "tokens" in model.sample)
        assumed += ["images are loaded as fast as they are computed"] * model.sample.startswith("an image")
    else:
        if tokens is None:
            tokens = TOKENS
            assumed.append(f"{TOKENS:,} tokens a sample (`tokens`)")
        if params is not None and not LEAST_PARAMETERS <= params <= MOST_PARAMETERS:
            raise BadInput(
                f"`params` must be from {LEAST_PARAMETERS:,} to {MOST_PARAMETERS:g}, got {params:g}: no transformer "
                "has fewer, or more.",
                hint="with its unit: `params=70M` or `params=7B`",
            )
        model = of_parameters(max(1.0, of_flops(flops or 0.0) if params is None else params), tokens)
        if params is None:
            assumed.append(f"a model of {model.name}, as suits so many FLOPs (`params`)")
    if model.parameters > MOST_PARAMETERS:
        raise BadInput(
            f"the model has {model.parameters:.3g} parameters, and no more than {MOST_PARAMETERS:.0e} can be.",
            hint="correct the number, or give `params`",
        )
    count = samples if samples is not None else (flops or 0.0) / (CONTRIBUTION * model.forward_flops)
    if count > MOST_SAMPLES:
        raise BadInput(
            f"the training has {count:.3g} samples, and no more than {MOST_SAMPLES:.0e} can be.",
            hint="for example `samples=3M`",
        )
    return model, max(1, math.ceil(count))


def contradictions(profile: Profile, types: Mapping[str, InstanceType]) -> tuple[str, ...]:
    """Return a sentence for each contradiction among a profile's step times, such as a GPU far off the others.

    A GPU that the catalogue lacks and whose speed is unknown gets a sentence, too. Samples on the user's own machines
    are not judged.

    Args:
        profile: profile of one job.
        types: instance types of the catalogue, by name.

    Returns:
        The sentences; empty: nothing contradicts.

    Raises:
        BadInput: as of `type_remarks`.
    """
    nameless = [
        device.type
        for device in profile.devices
        if device.kind == "cuda" and device.type not in (*types, LOCAL) and device.matmul_flops_per_s is None
    ]
    profiled = [
        StepSample(
            nodes=(Node(type=device.type, workers=1),),
            local_batch_size=point.local_batch_size,
            step_time_s=point.step_time_s,
            model_kind=profile.job.model_kind,
            flops_per_sample=profile.job.flops_per_sample,
        )
        for device in profile.devices
        if device.type in types
        for point in device.step_times
    ]
    rented = [
        sample.model_copy(update={"model_kind": None})
        for sample in profile.samples
        if all(RENTED.fullmatch(node.type) for node in sample.nodes)
    ]
    samples = [*rented, *profiled]
    asked = [_not_in_the_catalogue(nameless)] if nameless else []
    return (*asked, *type_remarks(samples, types)) if samples else tuple(asked)


def _not_in_the_catalogue(names: Sequence[str]) -> str:
    return (
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not in the catalogue, so no other type is "
        "predicted from there. Name samples after the type that has the same GPU (`hetopt catalog list`), or write "
        "the GPU's peak rates and memory bandwidth into accelerators.csv."
    )


def type_remarks(samples: Sequence[StepSample], types: Mapping[str, InstanceType]) -> list[str]:
    """Return a sentence on sampled machine types that the catalogue lacks, and one for each GPU far off the others.

    Args:
        samples: step samples of one job, on any machines.
        types: instance types of the catalogue, by name.

    Returns:
        The sentences; empty: every type is known and none is far off.

    Raises:
        BadInput: the samples are of different jobs, or an unknown compressor.
    """
    named = sorted({node.type for sample in samples for node in sample.nodes})
    unknown = [name for name in named if name not in types]
    remarks = []
    if unknown:
        remarks.append(_not_in_the_catalogue(unknown))
    seen = measured_steps(fit(observe(samples)), types) if len(unknown) < len(named) else ()
    remarks += [
        f"Steps on {gpu.name} are {math.exp(abs(gpu.off)):.1f} times {'longer' if gpu.off > 0 else 'shorter'} than "
        f"{' and '.join(other.name for other in seen if other is not gpu)} foretells. A power limit, heat, another "
        "job beside it, or another type's name? It counts little for types that were not measured."
        for gpu in seen
        if gpu.off is not None
    ]
    return remarks
