"""Plans over several regions, and the better plan of one's own machines and rented ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import get_args

import numpy as np

from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import cluster as cluster_words
from hetopt.core.hosts import Host, placeable
from hetopt.optimizer.market.catalog_filter import has_accelerator
from hetopt.optimizer.market.clouds import owned
from hetopt.optimizer.market.offer_filter import Unpriced
from hetopt.optimizer.plan import AWS, Candidate, ChoiceName, Plan, RegionOffer
from hetopt.optimizer.recommendation.candidates import expected_score, expected_scores
from hetopt.optimizer.recommendation.choices import (
    EXTREMES,
    beats,
    gpus_named,
    on_demand_rows,
    rows_of_gpus,
    truly_named,
)
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS, PlanRequest
from hetopt.optimizer.recommendation.recommend import recommend, search_problem
from hetopt.optimizer.search.objective import best_for_some
from hetopt.optimizer.search.open_hours import OpenHours
from hetopt.optimizer.search.search import Effort, search
from hetopt.optimizer.search.search_space import MAX_TYPES

SHOWN = 3
"""Number of regions that a plan shows: the winner and the next two."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """The best cluster of one type in a region, with scores by which regions are compared; lower is better.

    Attributes:
        request: the region's.
        safe: whether the cluster keeps the limits with the probability `SURE`.
        score: score of the cluster at the request's weight of time.
        by_wish: least scores of the region's clusters: at each of `TIME_WEIGHTS`, then, at the request's weight, on
            demand, and with each GPU that was named; infinite: none.
        offer: the cluster as a plan shows it.
    """

    request: PlanRequest
    safe: bool
    score: float
    by_wish: tuple[float, ...]
    offer: RegionOffer


def plan_in_regions(requests: Sequence[PlanRequest], find: Callable[[PlanRequest], Plan]) -> Plan:
    """Return the best plan over regions, with those of other regions merged in (`merged`).

    Clusters of one type are searched in each region; plans are made in the region that is best for the request, and in
    those that are best for another wish. A region where nothing can be planned is passed over.

    Args:
        requests: one for each region, with that region's catalogue and quotas.
        find: makes the plan in one region.

    Raises:
        NoFeasiblePlan: nothing fits in any region.
        BadInput: ``find`` raised it.
    """
    offers = sorted(filter(None, map(_offer, requests)), key=lambda offer: (not offer.safe, offer.score))
    if not offers:
        names = ", ".join(request.catalog.region for request in requests[:SHOWN])
        raise NoFeasiblePlan(
            f"Nothing fits in any of {len(requests)} regions with prices ({names}, ...).",
            hint="ask for one `region`, which says what would have to be allowed",
        )
    alike = [offer for offer in offers if offer.safe == offers[0].safe]
    winners = [
        offers[0],
        *(min(alike, key=lambda offer: offer.by_wish[wish]) for wish in range(len(offers[0].by_wish))),
    ]
    plans = [find(request) for request in {offer.request.catalog.region: offer.request for offer in winners}.values()]
    unpriced = Unpriced.of(
        [request.catalog for request in requests if request.catalog.cloud == AWS], requests[0].options
    )
    return merged(plans, offers[0].request).model_copy(
        update={
            "regions": tuple(offer.offer for offer in offers[:SHOWN]),
            "not_compared": unpriced.in_words if unpriced.is_most else None,
        }
    )


def _offer(request: PlanRequest) -> _Offer | None:
    """Return a region's best cluster of one type for the request; None: nothing asked for is sold there, or fits."""
    limits = request.limits
    try:
        problem = search_problem(request)
    except (BadInput, NoFeasiblePlan):
        return None
    result = search(problem.space, problem.job, limits, effort=Effort(types=1))
    if result.chosen is None:
        return None
    forecast, row = result.forecast, result.chosen
    machines = (
        (count, f"{problem.space.options[option].name} {problem.space.options[option].offer.price.market}")
        for option, count in result.cluster(row).machines
    )
    front, steady = forecast.take(result.front), forecast.take(on_demand_rows(problem.space, result))
    steady = steady.take(np.flatnonzero(limits.risk(steady) <= 1))
    return _Offer(
        request=request,
        safe=result.safe,
        score=float(limits.expected_score(forecast)[row]),
        by_wish=(
            *(
                float(replace(limits, time_weight=weight).expected_score(front).min())
                for weight in TIME_WEIGHTS.values()
            ),
            float(limits.expected_score(steady).min(initial=math.inf)),
            *(
                float(limits.expected_score(forecast.take(rows)).min(initial=math.inf))
                for rows in rows_of_gpus(problem.space, result, request.options.gpus)
            ),
        ),
        offer=RegionOffer(
            region=request.catalog.region,
            machines=cluster_words(machines),
            total_s=float(forecast.total_s[row]),
            cost_usd=float(forecast.cost_usd[row]),
            data_transfer_usd=problem.job.before_usd,
        ),
    )


def merged(plans: Sequence[Plan], request: PlanRequest) -> Plan:
    """Return the best of ``plans``, with the Pareto fronts and choices of all merged into its own.

    Where some plan keeps the limits as surely as asked, plans that are a risk are left out.

    Args:
        plans: plans of the same job and goal, at least one.
        request: request with the limits, and the catalogue that knows the GPU of every type in the plans.
    """
    limits, types = request.limits, request.catalog.instance_types
    best = min(plans, key=lambda plan: (plan.risk is not None, expected_score(plan.chosen, limits)))
    alike = [plan for plan in plans if (plan.risk is None) == (best.risk is None)]
    candidates = list(dict.fromkeys(candidate for plan in alike for candidate in plan.pareto))
    front = {
        best.chosen,
        *(candidates[place] for place in best_for_some(lambda wish: expected_scores(candidates, wish))),
    }
    ways = [way for plan in (best, *alike) for way in plan.choices if way.candidate is not None]
    names: dict[Candidate, list[ChoiceName]] = {}
    for name in get_args(ChoiceName):
        wish = replace(limits, time_weight=TIME_WEIGHTS.get(name, limits.time_weight))
        alike_names = {name, EXTREMES.get(name)}
        named = [way.candidate for way in ways if alike_names & {*way.names} and way.candidate is not None]
        if named and name in (*TIME_WEIGHTS, "weighed", "safest"):
            is_choice = wish == limits and name != "safest"
            names.setdefault(
                best.chosen if is_choice else min(named, key=lambda candidate: expected_score(candidate, wish)), []
            ).append(name)
    for gpu in gpus_named(request.options.gpus):
        having = [
            way.candidate
            for way in ways
            if way.candidate is not None
            and all(has_accelerator(types[group.instance_type], gpu) for group in way.candidate.groups)
        ]
        if having and not names.keys() & set(having):
            names[min(having, key=lambda candidate: expected_score(candidate, limits))] = ["other GPU"]
    records = {way.candidate: way for way in reversed(ways)}
    rented = [records[candidate].model_copy(update={"names": tuple(labels)}) for candidate, labels in names.items()]
    here = tuple(way for way in best.choices if way.candidate is None)
    return best.model_copy(
        update={
            "pareto": tuple(sorted(front, key=lambda candidate: candidate.prediction.total_s.value)),
            "choices": (*here, *truly_named(rented, best.chosen)),
            "memory": tuple(dict.fromkeys(memory for plan in (best, *alike) for memory in plan.memory)),
        }
    )


STARTUP_S = 20.0
"""Seconds from the launch to the first step on one's own machines, where the profile does not say: connecting, sending
the code and starting processes that import torch."""


def on_own_machines(request: PlanRequest, hosts: Sequence[Host], *, seed: int, now: datetime) -> Plan:
    """Return the best plan on the user's own ``hosts``, none rented; options on what to rent are ignored.

    Args:
        request: profile, goal and options; options that narrow what is rented do not count.
        hosts: hosts of the inventory.
        seed: seed of the search.
        now: the plan's date.

    Raises:
        BadInput: a host lacks a fact that a plan needs (cost, CPUs, network, GPU), or the goal does not suit profile or
            options.
        NoFeasiblePlan: the hosts do not keep the limits, or their memory does not hold a step.
    """
    catalog, quotas = owned(request.catalog, hosts, now.date(), measured=request.profile.measured_machines)
    wanted = replace(
        request.options,
        market="any",
        quotas=quotas,
        # An estimate compares clusters of one type, as there are many to rent: of one's own there are few.
        mixed_types=MAX_TYPES if request.profile.is_counted else request.options.mixed_types,
        types=(),
        exclude=(),
        gpus=(),
        architecture=None,
        zone=None,
        data_region=None,
        startup_s=request.profile.startup_s or STARTUP_S,
        observed=None,
        study=None,
    )
    kinds = placeable(hosts, request.profile.measured_machines)
    hours = OpenHours.of([host for kind in kinds.values() for host in kind], now.astimezone())
    return recommend(replace(request, catalog=catalog, options=wanted, open_hours=hours), seed=seed, now=now)


def better_of(
    request: PlanRequest, hosts: Sequence[Host], rented: Callable[[], Plan], *, seed: int, now: datetime
) -> Plan:
    """Return the better plan of the user's own ``hosts`` and ``rented()``, with the other as one of its choices.

    A plan that is no risk is better; then one that the other does not beat in shown time and cost; then the lower
    score. If own or rented machines have no plan, the first reason says so.

    Args:
        request: profile, catalogue, goal and options.
        hosts: hosts of the inventory.
        rented: makes the plan on rented machines.
        seed: seed of the search.
        now: the plan's date.

    Raises:
        NoFeasiblePlan: neither keeps the limits; raised is the error of the rented machines.
        BadInput: either plan cannot be asked for like that, see `on_own_machines` and `recommend`.
    """
    plans: dict[ChoiceName, Plan] = {}
    refused: dict[ChoiceName, NoFeasiblePlan] = {}
    makers: dict[ChoiceName, Callable[[], Plan]] = {
        "own": partial(on_own_machines, request, hosts, seed=seed, now=now),
        "rented": rented,
    }
    for name, make in makers.items():
        try:
            plans[name] = make()
        except NoFeasiblePlan as none:
            refused[name] = none
    if not plans:
        raise refused["rented"]
    totals = {name: plan.chosen.prediction.medians for name, plan in plans.items()}
    best = min(
        plans,
        key=lambda name: (
            plans[name].risk is not None,
            any(beats(other, totals[name]) for other in totals.values()),
            expected_score(plans[name].chosen, request.limits),
        ),
    )
    other: ChoiceName | None = next((name for name in plans if name != best), None)
    plan, alone = plans[best], list[str]()
    ways = [way for way in plan.choices if way.candidate is not None]
    if other is None:
        reason = next(iter(refused.values())).message.partition(": ")[0].rstrip(".")
        alone = [f"{'Rented' if best == 'own' else 'Your own'} machines: {reason}."]
    else:
        taken = (way for way in plans[other].choices if way.candidate == plans[other].chosen)
        ways += [way.model_copy(update={"names": (other,)}) for way in taken]
    here = (way for way in plan.choices if way.candidate is None)
    listed = (*here, *truly_named(ways, plan.chosen))
    return plan.model_copy(update={"reasons": (*alone, *plan.reasons[:2]), "choices": listed})
