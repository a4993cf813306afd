"""When nothing fits: the plans that come nearest, one on each axis, and what would have to be allowed for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import duration, round_up_usd, usd
from hetopt.optimizer.market.catalog import Offer
from hetopt.optimizer.market.quota import Quotas, bucket_of, raised
from hetopt.optimizer.plan import OWN, limits_in_words
from hetopt.optimizer.recommendation.candidates import make_candidate
from hetopt.optimizer.recommendation.confidence import NEVER, Question, remedies
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Found
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.optimizer.step_time.transfer import MENDED_BY_PROFILING, TOO_LITTLE_MEMORY

MOST_NAMED = 3


def nothing_usable(
    region: str,
    offered: Sequence[Offer],
    excluded: Mapping[str, int],
    *,
    by_gpus: bool = False,
) -> BadInput:
    """Return the error where machines are offered and none can be planned with: says why, and what can change that.

    Args:
        region: where they are offered.
        offered: what was asked for.
        excluded: how many of them were left out, for each reason.
        by_gpus: whether they were asked for by their GPUs, and not by type.
    """
    names = sorted({offer.instance_type.name for offer in offered})
    who = f"None of the {len(names)} instance types" if len(names) > MOST_NAMED else " and ".join(names)
    verb = "can" if len(names) > MOST_NAMED else "cannot"
    place = "of the inventory" if region == OWN else f"in {region}"
    named, listing = ("gpus", "gpus") if by_gpus else ("types", "catalog list")
    others = f"name other `{named}`, or leave it out; `hetopt {listing} --region {region}` shows what there is"
    if region == OWN:
        others = "measure a step there (`hetopt profile` on it), or leave it out of the inventory"
    changes = [
        *(["profile on a machine of the kind that you want to rent"] if MENDED_BY_PROFILING & excluded.keys() else []),
        *(["choose a smaller `batch_size` or larger machines"] if TOO_LITTLE_MEMORY in excluded else []),
    ]
    why = "; ".join(sorted(excluded, key=lambda reason: -excluded[reason]))
    return BadInput(f"{who} {place} {verb} be planned with: {why}.", hint=", or ".join(changes) or others)


def _no_cluster(space: SearchSpace, otherwise: Sequence[str]) -> NoFeasiblePlan:
    """Return the error where no cluster of the machines is allowed, at any cost: names the limit that leaves none."""
    beyond = (
        space.quotas.get(bucket_of(option.offer), math.inf) < option.offer.instance_type.vcpus
        for option in space.options
    )
    if all(beyond):
        return NoFeasiblePlan(
            "The quotas hold none of the machines that this job can be planned on.",
            hint=", or ".join(otherwise) or "raise `quotas`",
        )
    small = min(space.options, key=lambda option: option.worker.workers)
    return NoFeasiblePlan(
        f"No cluster within the limits of workers ({space.max_workers:,}), machines ({space.max_machines:,}), quotas "
        f"and dollars an hour can take any of the batch sizes {', '.join(map(str, space.batch_sizes))}: the smallest "
        f"machine, {small.name}, has {small.worker.workers:,} workers, a sample each at least.",
        hint=", or ".join(otherwise)
        or "raise `max_workers`, `max_hourly_usd` or `quotas`, or choose another `batch_size` or machines",
    )


def larger_quotas(space: SearchSpace, found: Found, quotas: Quotas, limits: Limits) -> str | None:
    """Return the least increase of quotas with which a cluster keeps the limits, as a phrase; absent: none helps.

    Args:
        space: without quotas.
        found: what was searched in it.
        quotas: that nothing fits in.
        limits: that are to be kept.
    """
    forecast = found.forecast
    rows = np.flatnonzero(limits.risk(forecast) <= 1)
    if not rows.size:
        rows = np.flatnonzero(limits.overrun(forecast) <= 1)
    if not rows.size:
        return None
    option, count = found.rows.option[rows], found.rows.count[rows]
    offers = [machine.offer for machine in space.options]
    vcpus = np.array([offer.instance_type.vcpus for offer in offers])
    taken = {
        bucket: (count * vcpus[option] * np.array([bucket_of(offer) == bucket for offer in offers])[option]).sum(axis=1)
        for bucket in quotas
    }
    over = sum(np.maximum(0, used - quotas[bucket]) for bucket, used in taken.items())
    best = int(np.lexsort((limits.expected_score(forecast)[rows], over))[0])
    asked = [raised(bucket, int(used[best])) for bucket, used in taken.items() if used[best] > quotas[bucket]]
    return f"ask AWS to raise {' and '.join(asked)}" if asked else None


def nothing_fits(question: Question, found: Found, limits: Limits, otherwise: Sequence[str] = ()) -> NoFeasiblePlan:
    """Return the error that names the nearest plans: the cheapest that is in time, the quickest that can be paid.

    Args:
        question: that no plan answers.
        found: what was searched.
        limits: that none keeps.
        otherwise: what else than a limit would help: an increase of quotas, checkpoints.
    """
    forecast, space, job = found.forecast, question.space, question.job
    if len(forecast) == 0:
        return _no_cluster(space, otherwise)

    def described(result: Found, row: int) -> str:
        candidate = make_candidate(space, job, result.cluster(row), result.forecast, row)
        prediction = candidate.prediction
        least = float(result.forecast.least_budget_usd[row])
        rent = ""
        if least > max(prediction.cost_usd.value, limits.budget_usd or math.inf):
            rent = f" (rented for {usd(round_up_usd(least))} or more: ten minutes at on-demand prices)"
        machines = candidate.in_words
        return f"{machines}, about {usd(prediction.cost_usd.value)} and {duration(prediction.total_s.value)}{rent}"

    took_s, cost_usd = forecast.total_s, forecast.cost_usd
    needed_usd = np.maximum(cost_usd, forecast.least_budget_usd)
    paid = np.flatnonzero(needed_usd <= (limits.budget_usd or math.inf))
    nearest: list[str] = []
    # The search within these limits need not have kept what is cheapest: that is another question.
    sparing = question.search(replace(limits, budget_usd=None, time_weight=0.0))
    took, cost = sparing.forecast.total_s, sparing.forecast.cost_usd
    needed = np.maximum(cost, sparing.forecast.least_budget_usd)
    in_time = np.flatnonzero(took <= (limits.deadline_s or math.inf))
    rows = in_time if in_time.size or paid.size or limits.budget_usd is None else np.arange(len(cost))
    if rows.size:
        of_all = "" if limits.deadline_s is None else " that meets the deadline" if in_time.size else " of all"
        cheapest = int(rows[np.lexsort((took[rows], needed[rows], cost[rows]))[0]])
        if max(took[cheapest], cost[cheapest]) < NEVER:
            nearest.append(f"the cheapest plan{of_all} is {described(sparing, cheapest)}")
        else:
            nearest.append("every loss of a spot machine begins the run again, and none is likely to end before one")
    if limits.deadline_s is not None:
        rows = paid if paid.size and limits.budget_usd is not None else np.arange(len(forecast))
        row = int(rows[np.lexsort((cost_usd[rows], took_s[rows]))[0]])
        if took_s[row] > limits.deadline_s:
            that = " within the budget" if paid.size and limits.budget_usd is not None else ""
            nearest.append(f"the quickest plan{that} is {described(found, row)}")
    asked = limits_in_words("a", limits.budget_usd, limits.deadline_s)
    return NoFeasiblePlan(
        f"Nothing fits {asked}: {'; '.join(nearest)}.",
        hint=", or ".join([*otherwise, *remedies(question, limits)]) or None,
    )
