"""One's own machines or rented ones: a plan is made for each, and the better is returned with a word on the other.

Clusters of both together are not planned: no backend runs one, as rented machines do not reach a private network. So
the plan is never worse than the better of either alone, and names both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import partial

import numpy as np

from hetopt.core.errors import HetoptError, NoFeasiblePlan
from hetopt.core.formatting import duration, usd
from hetopt.core.hosts import Host
from hetopt.core.profile import Profile
from hetopt.optimizer.cost.billing import Billing, load_billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.owned import owned
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.recommend import recommend

STARTUP_S = 20.0
"""Connecting, sending the code and starting processes that import torch, where the profile does not say."""


def nothing_beside(billing: Billing) -> Billing:
    """The terms of one's own machines: beside their hours nothing is paid, and these by the second."""
    free = {
        one.name: replace(getattr(billing, one.name), value=0.0)
        for one in fields(billing)
        if one.name not in ("region", "hours_per_month") and "_free_" not in one.name
    }
    return replace(billing, **free)


def on_own_machines(
    profile: Profile, catalog: Catalog, hosts: Sequence[Host], goal: Goal, options: Options, *, seed: int, now: datetime
) -> Plan:
    """The best plan for some of one's own machines, up to three unlike ones together.

    Args:
        profile: what was measured of the job.
        catalog: of what can be rented, which knows GPUs and CPUs.
        hosts: of the inventory.
        goal: what the run is for, and its limits.
        options: those that say what is wanted; those that narrow what is rented do not narrow what one has.
        seed: of the search.
        now: the plan's date.

    Raises:
        BadInput: of a host something is not said that a plan needs.
        NoFeasiblePlan: they do not keep the limits.
    """
    own = owned(catalog, hosts, now.date())
    wanted = replace(
        options,
        market="any",
        quotas=own.quotas,
        only_types=(),
        exclude_types=(),
        gpus=(),
        architecture=None,
        zone=None,
        zones=1,
        data_region=None,
        startup_s=profile.startup_s or STARTUP_S,
        observed=None,
        journal=None,
    )
    billing = nothing_beside(load_billing(catalog.directory))
    return recommend(profile, own.catalog, goal, wanted, seed=seed, now=now, billing=billing)


def better_of(
    profile: Profile,
    catalog: Catalog,
    hosts: Sequence[Host],
    goal: Goal,
    options: Options,
    rented: Callable[[], Plan],
    *,
    seed: int,
    now: datetime,
) -> Plan:
    """The better of a plan for one's own machines and one that rents.

    Args:
        profile: what was measured of the job.
        catalog: of what can be rented.
        hosts: of the inventory.
        goal: what the run is for, and its limits.
        options: what narrows the search.
        rented: makes the other plan.
        seed: of the search.
        now: the plan's date.

    Raises:
        NoFeasiblePlan: neither keeps the limits; what the cloud would need is said.
    """
    made: dict[str, Plan] = {}
    refused: dict[str, HetoptError] = {}
    makers: dict[str, Callable[[], Plan]] = {
        "own": partial(on_own_machines, profile, catalog, hosts, goal, options, seed=seed, now=now),
        "rented": rented,
    }
    for name, make in makers.items():
        try:
            made[name] = make()
        except NoFeasiblePlan as none:
            refused[name] = none
    if not made:
        raise refused["rented"]
    best = min(made, key=lambda name: (made[name].risk is not None, _score(made[name], goal, options)))
    other = next((name for name in made if name != best), None)
    return made[best].model_copy(update={"reasons": (_beside(best, made, refused, other), *made[best].reasons[:2])})


def _score(plan: Plan, goal: Goal, options: Options) -> float:
    took, cost = plan.chosen.prediction.total_s.value, plan.chosen.prediction.cost_usd.value
    return float(options.limits(goal).score(np.array(took), np.array(cost)))


def _beside(best: str, made: dict[str, Plan], refused: dict[str, HetoptError], other: str | None) -> str:
    """'Your own machines: 6 h for $0.90. Rented: 2 × g6.xlarge, 2 h for $1.40.'"""
    if other is None:
        missing = "Rented machines" if best == "own" else "Your own machines"
        return f"{missing} do not keep these limits."
    found = made[other]
    took, cost = found.chosen.prediction.total_s.value, found.chosen.prediction.cost_usd.value
    who = "Your own machines" if other == "own" else "Rented machines"
    machines = ", ".join(f"{group.machines} × {group.instance_type}" for group in found.chosen.groups)
    return f"{who} ({machines}) would do it in {duration(took)} for {usd(cost)}."
