"""The few plans that a person chooses among: this machine, the cheapest, balanced and fastest, and the safest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import NormalDist
from types import MappingProxyType
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from hetopt.core.formatting import duration, share, usd
from hetopt.core.profile import Job
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.market.catalog_filter import has_accelerator
from hetopt.optimizer.market.quota import named_quota, needed
from hetopt.optimizer.plan import AWS, Candidate, Choice, ChoiceName, QuotaNeed, Range, cloud_of
from hetopt.optimizer.recommendation.candidates import make_candidate, spread
from hetopt.optimizer.recommendation.confidence import AS_LIKELY, Question, confident, simulate
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS
from hetopt.optimizer.search.forecast import evaluations
from hetopt.optimizer.search.objective import Limits, best_rows, choose, plan_front
from hetopt.optimizer.search.search import SearchResult, choice
from hetopt.optimizer.search.search_space import MachineOption, SearchSpace
from hetopt.optimizer.step_time.model import contention_reach

COMPARED = 2000
"""Number of the best on-demand clusters among which the safest is chosen."""

MOST_REASONS = 2

EQUALLY_LIKELY = (np.arange(20) + 0.5) / 20
"""Quantiles of which each stands for as many runs as any other: a person can count what 95 % is."""

MUCH = 0.2
"""Part of a step from which on communication is what holds a plan back."""


def listed(question: Question, result: SearchResult, limits: Limits) -> SearchResult:
    """Return ``result`` with the plans to show as its front: best for some weight of time, and as sure as asked.

    Plans count that keep the limits in simulated runs as surely as asked, or at least as the choice does (see
    `plan_front`). The choice is among them; a plan that beats the choice in both medians, but is less certain, is not.

    Args:
        question: the request's search, with the asked probability and the seed of the simulated runs.
        result: result of the search; with a choice.
        limits: budget, deadline, and the weight of time.
    """
    assert result.chosen is not None
    wishes = [limits, *(replace(limits, time_weight=weight) for weight in TIME_WEIGHTS.values())]
    wished = [result.chosen if wish == limits else _chosen(question, result, wish) for wish in wishes]
    rows = list(dict.fromkeys([*(row for row in wished if row is not None), *result.front.tolist()]))
    runs = simulate(question.space, question.job, result, rows, limits, seed=question.seed)
    chance = runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)
    sure = np.array(rows)[chance >= min(question.asked, chance[0] - AS_LIKELY)]
    front = {result.chosen, *sure[plan_front(result.forecast.take(sure))].tolist()}
    medians = list(zip(result.forecast.total_s.tolist(), result.forecast.cost_usd.tolist(), strict=True))
    front = {row for row in front if not beats(medians[row], medians[result.chosen])}
    return replace(result, front=np.array(sorted(front, key=result.forecast.total_s.__getitem__), dtype=np.intp))


def choices(model: FittedModel, question: Question, result: SearchResult, limits: Limits) -> tuple[Choice, ...]:
    """Return the named plans that people choose among ('fastest', 'safest', ...): this machine first, then by cost.

    A plan that is the best for several wishes is one entry with several names. This machine is an entry only if the
    profile was measured on it and it holds the batch; if it keeps the deadline, slower clusters are left out, but for
    the choice.

    Args:
        model: fits of the profile.
        question: the request's search, with the asked probability and the seed of the simulated runs.
        result: the search, with its choice and the front of plans to show (see `listed`).
        limits: budget, deadline, and the weight of time.
    """
    names: dict[int, list[ChoiceName]] = {}
    for name, row in _named(question, result, limits):
        names.setdefault(row, []).append(name)
    for row in _of_each_gpu(question, result, limits, list(names)):
        names.setdefault(row, []).append("other GPU")
    rows = list(names)
    runs = simulate(question.space, question.job, result, rows, limits, seed=question.seed)
    kept = runs.chance(budget_usd=limits.budget_usd, deadline_s=limits.deadline_s)
    times_s = np.quantile(runs.total_s, EQUALLY_LIKELY, axis=1).T
    costs_usd = np.quantile(runs.cost_usd, EQUALLY_LIKELY, axis=1).T
    limited = limits.budget_usd is not None or limits.deadline_s is not None
    assert result.chosen is not None
    like = question.space.options[result.cluster(result.chosen).machines[0][0]]
    here = list(_here(model, question, limits, like))
    # Who has this machine has no use for what is both dearer and slower, unless it is what was asked for.
    in_time = [choice.total_s.value for choice in here if choice.total_s.high <= (limits.deadline_s or math.inf)]
    rented: list[Choice] = []
    for place, (row, chance) in enumerate(zip(rows, kept.tolist(), strict=True)):
        candidate = make_candidate(question.space, question.job, result.cluster(row), result.forecast, row)
        took = candidate.prediction.total_s
        if row != result.chosen and any(took.value >= here_s for here_s in in_time):
            continue
        rented.append(
            Choice(
                names=tuple(names[row]),
                candidate=candidate,
                total_s=took,
                cost_usd=candidate.prediction.cost_usd,
                chance=chance if limited else None,
                times_s=_short(times_s[place]),
                costs_usd=_short(costs_usd[place]),
                quotas=_quotas(question.space, result, row),
            )
        )
    chosen = make_candidate(question.space, question.job, result.cluster(result.chosen), result.forecast, result.chosen)
    return (*here, *truly_named(rented, chosen))


def beats(plan: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether (seconds, USD) ``plan`` beats ``other`` as shown, rounded: less in one figure, more in neither."""
    lower, higher = (
        any(first < second and say(first) != say(second) for first, second, say in zip(*pair, FIGURES, strict=True))
        for pair in ((plan, other), (other, plan))
    )
    return lower and not higher


FIGURES = (duration, usd)
"""Functions that format a choice's time and its cost, in this order, as people are shown them."""

EXTREMES: Mapping[ChoiceName, ChoiceName] = MappingProxyType({"fastest": "fast", "cheapest": "cheap"})
"""Name of the best plan for a wish, and the name in its place where another shown plan has less of that figure."""


def truly_named(ways: Sequence[Choice], chosen: Candidate) -> tuple[Choice, ...]:
    """Return the choices that do not beat the chosen plan, cheapest first, renamed to be true of shown medians.

    'Fastest' becomes 'fast' where another choice has a lower median time, and 'cheapest' 'cheap', as plans are ranked
    by expectations. Left out are choices that beat the plan in both medians, unless their GPU was named, and choices
    that are only 'fast' or 'cheap' and beaten by another.

    Args:
        ways: the choices, each with a candidate.
        chosen: the plan's cluster, one of them.
    """
    totals = {way.candidate: (way.total_s.value, way.cost_usd.value) for way in ways}
    ways = [way for way in ways if "other GPU" in way.names or not beats(totals[way.candidate], totals[chosen])]
    names = {way.candidate: list(way.names) for way in sorted(ways, key=lambda way: way.cost_usd.value)}
    for figure, (most, near) in enumerate(EXTREMES.items()):
        shown = {candidate: FIGURES[figure](totals[candidate][figure]) for candidate in names}
        best = min(names, key=lambda candidate: (totals[candidate][figure], totals[candidate][1 - figure]))
        least = [candidate for candidate in names if shown[candidate] == shown[best]]
        holders = {candidate for candidate in names if most in names[candidate]}
        if holders and not holders & set(least):
            names[best].append(most)
        for candidate in names.keys() - set(least):
            names[candidate] = [near if name == most else name for name in names[candidate]]
    return tuple(
        way.model_copy(update={"names": tuple(sorted(names[way.candidate], key=get_args(ChoiceName).index))})
        for way in sorted(ways, key=lambda way: way.cost_usd.value)
        if way.candidate == chosen
        or not set(names[way.candidate]) <= set(EXTREMES.values())
        or not any(beats(totals[other], totals[way.candidate]) for other in names)
    )


def _named(question: Question, result: SearchResult, limits: Limits) -> Iterator[tuple[ChoiceName, int]]:
    """Yield (name, row) pairs: the best of the front for each of `TIME_WEIGHTS`, and 'safest', the best on demand.

    The choice is 'weighed' if its weight of time is none of those. Nothing is 'safest' without clusters on demand.
    """
    assert result.chosen is not None
    if limits.time_weight not in TIME_WEIGHTS.values():
        yield "weighed", result.chosen
    on_list = result.forecast.take(result.front)
    for name, weight in TIME_WEIGHTS.items():
        best = int(result.front[replace(limits, time_weight=weight).expected_score(on_list).argmin()])
        yield name, result.chosen if weight == limits.time_weight else best
    steady = on_demand_rows(question.space, result)
    if steady.size:
        row = _safest(question, result, steady[best_rows(result.forecast.take(steady), limits, COMPARED)], limits)
        if row is not None:
            yield "safest", row


def gpus_named(texts: Sequence[str]) -> list[str]:
    """Return the GPU names in texts such as 'L4:4', counts left out, if several were asked for.

    Empty for one or none.
    """
    return [text.partition(":")[0] for text in texts] if len(texts) > 1 else []


def rows_of_gpus(space: SearchSpace, result: SearchResult, texts: Sequence[str]) -> Iterator[NDArray[np.intp]]:
    """Yield for each of several GPUs named in ``texts`` the rows of ``result`` whose machines all have that GPU.

    Yields:
        Row indices, [rows], in ascending order; empty where no cluster has that GPU. Nothing for one text or none.
    """
    for name in gpus_named(texts):
        has = np.array([has_accelerator(option.offer.instance_type, name) for option in space.options])
        yield np.flatnonzero(((result.rows.count == 0) | has[result.rows.option]).all(axis=1))


def _of_each_gpu(question: Question, result: SearchResult, limits: Limits, shown: Sequence[int]) -> Iterator[int]:
    """Yield the best row of each of several GPUs that were named, if none of the GPU's rows is in ``shown``."""
    for rows in rows_of_gpus(question.space, result, question.gpus):
        if rows.size and not set(shown) & set(rows.tolist()):
            yield int(rows[best_rows(result.forecast.take(rows), limits, 1)[0]])


def _chosen(question: Question, result: SearchResult, limits: Limits) -> int | None:
    """Return the row that a search would choose under ``limits``, by simulated runs if any is set; None: none fits."""
    row, safe = choose(result.forecast, limits)
    if row is None:
        return None
    if limits.budget_usd is None and limits.deadline_s is None:
        return row
    asked = replace(result, chosen=row, safe=safe)
    best, _, _ = confident(question.space, question.job, asked, limits, question.confidence, seed=question.seed)
    return best.chosen


def on_demand_rows(space: SearchSpace, result: SearchResult) -> NDArray[np.intp]:
    """Return the row indices, ascending, of clusters without spot machines, so that none can be taken back."""
    spot = np.array([option.offer.price.market == "spot" for option in space.options])
    return np.flatnonzero(~((result.rows.count > 0) & spot[result.rows.option]).any(axis=1))


def _safest(question: Question, result: SearchResult, rows: NDArray[np.intp], limits: Limits) -> int | None:
    """Return the row, among ``rows``, that a search of these alone would choose; None: none of them fits."""
    part = replace(
        result,
        rows=result.rows.take(rows),
        forecast=result.forecast.take(rows),
        front=np.array([], dtype=np.intp),
    )
    row = _chosen(question, part, limits)
    return None if row is None else int(rows[row])


def worth_their_machines(question: Question, result: SearchResult, limits: Limits) -> SearchResult:
    """Return ``result``, chosen anew, without clusters that gain less over one machine than their 90 % intervals.

    One machine is easier to get, and has no network to be wrong about. It replaces clusters, of the same GPU where
    several were named, only if it surely keeps the limits and is on demand where they are. Waiting for spot machines
    does not count, as both wait alike.

    Rows, forecast, choice and front of the returned result are of the clusters that are left.
    """
    rows, forecast = result.rows, result.forecast
    is_one, is_idle = rows.count.sum(axis=1) == 1, np.zeros(len(forecast), dtype=np.bool_)
    took_s = forecast.startup_s + forecast.work_s
    is_steady = np.isin(np.arange(len(forecast)), on_demand_rows(question.space, result))
    is_safe = limits.risk(forecast) <= 1
    kinds = [*rows_of_gpus(question.space, result, question.gpus)] or [np.arange(len(forecast))]
    for kind, steady in product(kinds, (False, True)):
        ones = kind[is_one[kind] & (is_steady[kind] | (not steady)) & is_safe[kind]]
        ones = ones[np.argsort(took_s[ones], kind="stable")]
        clusters = kind[~is_one[kind] & (is_steady[kind] == steady)]
        least_usd = np.minimum.accumulate(np.array([np.inf, *forecast.cost_usd[ones]]))  # of the quickest so many
        late_s = took_s[clusters] * np.exp(Z90 * forecast.work_log_sd[clusters])
        in_time = np.searchsorted(took_s[ones], late_s, side="right")
        is_idle[clusters] = least_usd[in_time] <= forecast.cost_high_usd[clusters]
    worth = np.flatnonzero(~is_idle)
    part = forecast.take(worth)
    return replace(result, rows=rows.take(worth), forecast=part, **choice(part, limits))


def _quotas(space: SearchSpace, result: SearchResult, row: int) -> tuple[QuotaNeed, ...]:
    """Return the vCPUs that the cluster in ``row`` takes of each AWS quota, beside what the account is granted."""
    took = needed(
        (offer.instance_type, offer.price.market, count)
        for offer, count in ((space.options[index].offer, count) for index, count in result.cluster(row).machines)
        if offer.is_of_aws
    )
    return tuple(
        QuotaNeed(
            bucket=str(bucket),
            code=quota.code,
            name=quota.name,
            vcpus=vcpus,
            new_account=quota.default,
            granted=space.quotas.get(bucket),
        )
        for bucket, vcpus in took.items()
        for quota in [named_quota(bucket)]
    )


def _here(model: FittedModel, question: Question, limits: Limits, like: MachineOption) -> Iterator[Choice]:
    """Yield the choice 'here': to train alone on the profiled machine, in ``like``'s precision, free and at once.

    Nothing is yielded where that machine is rented or does not hold the batch.
    """
    model = model.computing_in(like.precision)
    device, usual = model.whole_host, model.profile.job.batch_size
    batch = min(question.space.batch_sizes, key=lambda size: abs(size - usual))
    most = device.largest_batch
    if device.device.type != "local" or (most is not None and batch > most):
        return
    job = question.job
    steps = float(job.steps.steps(batch, 1.0)) * like.stretch
    looks = float(evaluations(steps, batch, job.evaluate_every_samples)) * (model.profile.evaluation_s or 0.0)
    log_sd = math.hypot(device.step_time.log_sd, float(job.steps.log_sd(batch, 1.0)), like.stretch_log_sd)
    total = spread(steps * device.time_s(batch) + looks, log_sd)  # its median
    contended = log_sd + math.log(contention_reach(model.profile)) / Z90  # above the median
    chance = None
    if limits.deadline_s is not None:
        late = math.log(limits.deadline_s / total.value)
        chance = NormalDist().cdf(late / max(contended if late > 0 else log_sd, 1e-9))
    elif limits.budget_usd is not None:
        chance = 1.0
    apart = [NormalDist().inv_cdf(q) for q in EQUALLY_LIKELY.tolist()]
    times_s = _short(total.value * np.exp([z * (contended if z > 0 else log_sd) for z in apart]))
    none = Range(value=0, low=0, high=0)
    reach = total.model_copy(update={"high": total.value * math.exp(Z90 * contended)})
    yield Choice(names=("here",), total_s=reach, cost_usd=none, chance=chance, times_s=times_s)


def _short(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return figures rounded to four significant digits."""
    return tuple(float(f"{value:.4g}") for value in values.tolist())


def not_worth_renting(ways: Sequence[Choice], chosen: Candidate, deadline_s: float | None) -> str | None:
    """Return a sentence if ``chosen`` saves less time over this machine than its start-up takes; None: it saves more.

    None also where this machine cannot train the job, or may miss the deadline.

    Args:
        ways: the choices of a plan, this machine among them if it can train the job.
        chosen: the plan's cluster.
        deadline_s: seconds that the run may take; None: any number.
    """
    here = next((way for way in ways if way.names == ("here",)), None)
    prediction = chosen.prediction
    if here is None or here.total_s.value >= prediction.total_s.value + prediction.startup_s:
        return None
    if deadline_s is not None and here.total_s.high > deadline_s:
        return None
    others, begin = ("your own ones", "start-up") if _is_own(chosen) else ("rented ones", "provisioning")
    verdict = "Not worth a launch elsewhere" if _is_own(chosen) else "Not worth renting"
    return (
        f"{verdict}: this machine needs {duration(here.total_s.value)} and $0. Of "
        f"{duration(prediction.total_s.value)} on {others}, "
        f"{share(prediction.startup_s / prediction.total_s.value)} is {begin}."
    )


def _is_own(chosen: Candidate) -> bool:
    """Return whether all machines of a candidate are one's own, and none rented."""
    return all(group.is_own for group in chosen.groups)


def reasons(chosen: Candidate, job: Job) -> Iterator[str]:
    """Yield sentences on what holds the chosen plan back or makes its prediction unsure, most important first.

    Args:
        chosen: the plan's cluster.
        job: facts of the profile's job.
    """
    prediction = chosen.prediction
    workers = sum(len(group.local_batch_sizes) for group in chosen.groups)
    lost = prediction.communication_s / prediction.step_time_s.value
    if prediction.startup_s > prediction.training_s.value:
        begin = "Start-up" if _is_own(chosen) else "Provisioning"
        yield f"{begin} takes {duration(prediction.startup_s)}, longer than the training itself."
    elif workers > 1 and lost > MUCH:
        yield f"Workers spend {share(lost)} of each step on communication: more of them would gain little."
    late, slow = (figure.high / figure.value for figure in (prediction.total_s, prediction.training_s))
    if prediction.unavailable_s and late > slow ** math.sqrt(2):  # more than half of the log's variance
        yield "Spot machines may be out of stock for hours: most of the doubt about the time is waiting for them."
    reach = prediction.step_time_s.high / prediction.step_time_s.value
    if any(group.evidence == "counted" for group in chosen.groups):
        yield f"FLOPs were counted, nothing was measured: its step time may be {reach:.1f}x longer or shorter."
    unlike = sorted({group.instance_type for group in chosen.groups if group.evidence == "extrapolated"})
    if unlike:
        who = "was not profiled: its" if len(unlike) == 1 else "were not profiled: their"
        probe = f"`hetopt profile {job.task} --explore --on ec2 --types {','.join(unlike)}` measures it"
        rented = all(cloud_of(group.region) == AWS and not group.is_own for group in chosen.groups)
        known = f"; {probe}" if rented and not job.script else ""
        yield f"{' and '.join(unlike)} {who} step time may be {reach:.1f}x longer or shorter{known}."
