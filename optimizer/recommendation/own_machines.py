"""One's own machines or rented ones: a plan is made for each, and the better is returned with a word on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.formatting import duration, usd
from hetopt.core.hosts import Host
from hetopt.optimizer.market.owned import owned
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.recommendation.candidates import expected_score
from hetopt.optimizer.recommendation.options import PlanRequest
from hetopt.optimizer.recommendation.recommend import recommend
from hetopt.optimizer.search.open_hours import OpenHours

STARTUP_S = 20.0
"""Connecting, sending the code and starting processes that import torch, where the profile does not say."""


def on_own_machines(request: PlanRequest, hosts: Sequence[Host], *, seed: int, now: datetime) -> Plan:
    """Return the best plan for some of one's own machines, up to three unlike ones together.

    Args:
        request: what to plan; its options that narrow what is rented do not narrow what one has.
        hosts: of the inventory.
        seed: of the search.
        now: the plan's date.

    Raises:
        BadInput: of a host something is not said that a plan needs.
        NoFeasiblePlan: they do not keep the limits.
    """
    catalog, quotas = owned(request.catalog, hosts, now.date(), measured=request.profile.measured_machines)
    wanted = replace(
        request.options,
        market="any",
        quotas=quotas,
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
    hours = OpenHours.of(hosts, now.astimezone())
    return recommend(replace(request, catalog=catalog, options=wanted, open_hours=hours), seed=seed, now=now)


def better_of(
    request: PlanRequest, hosts: Sequence[Host], rented: Callable[[], Plan], *, seed: int, now: datetime
) -> Plan:
    """Return the better of a plan for one's own machines and one that rents.

    Args:
        request: what to plan.
        hosts: of the inventory.
        rented: makes the other plan.
        seed: of the search.
        now: the plan's date.

    Raises:
        NoFeasiblePlan: neither keeps the limits; what the cloud would need is said.
    """
    plans: dict[str, Plan] = {}
    refused: dict[str, NoFeasiblePlan] = {}
    makers: dict[str, Callable[[], Plan]] = {
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
    best = min(
        plans, key=lambda name: (plans[name].risk is not None, expected_score(plans[name].chosen, request.limits))
    )
    other = next((name for name in plans if name != best), None)
    beside = _beside(best, plans, other)
    return plans[best].model_copy(update={"reasons": (beside, *plans[best].reasons[:2])})


def _beside(best: str, plans: dict[str, Plan], other: str | None) -> str:
    """Return the plan not taken, in a sentence: 'Rented machines (2 × g6.xlarge) would do it in 2 h for $1.40.'"""
    if other is None:
        missing = "Rented machines" if best == "own" else "Your own machines"
        return f"{missing} do not keep these limits."
    plan = plans[other]
    took, cost = plan.chosen.prediction.total_s.value, plan.chosen.prediction.cost_usd.value
    who = "Your own machines" if other == "own" else "Rented machines"
    machines = ", ".join(f"{group.machines} × {group.instance_type}" for group in plan.chosen.groups)
    planned = ': `market="own"` plans for them' if other == "own" else ""
    return f"{who} ({machines}) would do it in {duration(took)} for {usd(cost)}{planned}."
