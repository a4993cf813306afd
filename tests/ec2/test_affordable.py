"""What is planned for a budget is rented with it, and nobody rents a plan that is a risk without having accepted it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.order import LEAST_LIFETIME_S, Order
from hetopt.backends.ec2.renter.ordering import check_prices
from hetopt.core.errors import BudgetStop
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan, Sensitivity
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.face.conftest import RECORDED

from .conftest import leftovers
from .test_command import Hetopt, refused

SEEN = Sensitivity(gap=None, chance=0.51, asked=0.9, cost_90_usd=50.0, total_90_s=4000.0, remedies=())


@pytest.mark.parametrize("deadline_s", [None, 6 * 3600.0])
@pytest.mark.parametrize("budget", [0.05, 0.2, 0.6, 2.0])
def test_a_plan_for_a_budget_is_ordered_with_it(
    order_for: Callable[..., Order], catalog: Catalog, budget: float, deadline_s: float | None
) -> None:
    """GPU types cost three times as much on demand, so that many a cheap plan could not even boot."""
    profile = Profile.load(RECORDED / "lstm-small.json")
    options = Options(trials=0, max_workers=8, mixed_types=2, accept_risk=True)
    goal = Goal(ends="epochs", amount=3, budget_usd=budget, deadline_s=deadline_s)
    made = recommend(PlanRequest(profile, catalog, goal, options), seed=0, now=datetime(2026, 11, 20, tzinfo=UTC))
    order = order_for(chosen=made)
    assert order.budget_usd == budget
    assert order.volume_gb == made.chosen.disk_gb
    assert order.lifetime_s >= LEAST_LIFETIME_S * (1 - 1e-6)
    assert (budget - order.fixed_usd) / order.worst_usd_per_hour() * 3600 >= LEAST_LIFETIME_S * (1 - 1e-6)
    if all(zone.rates[g.instance_type].usd_per_hour < 1.02 * g.price_usd_per_hour for zone in order.zones[:1]
           for g in made.chosen.groups):  # fmt: skip
        check_prices(made, order)


def test_too_small_a_budget_says_the_least(order_for: Callable[..., Order], plan: Plan) -> None:
    def ordered(budget_usd: float) -> Order:
        goal = plan.goal.model_copy(update={"budget_usd": budget_usd})
        return order_for(chosen=plan.model_copy(update={"goal": goal, "insight": SEEN}))

    with pytest.raises(BudgetStop, match="minutes of this cluster") as caught:
        ordered(0.01)
    assert ordered(float((caught.value.hint or "").split("budget_usd=")[1].split("`")[0]))


def test_a_risk_is_rented_by_nobody_who_has_not_accepted_it(
    cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path
) -> None:
    def saved(**seen: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        plan.model_copy(update={"insight": SEEN.model_copy(update=seen)}).save(path)
        return path

    refused(hetopt("launch", "--on", "ec2", saved(), "--yes"), 3, "with a probability of 51 % only.*--accept-risk")
    refused(hetopt("launch", saved(), "--on", "local", "--accept-risk"), 2, "--accept-risk is for --on ec2")
    shown = hetopt("launch", "--on", "ec2", saved(), "--dry-run")
    assert shown.code == 0
    assert "RISK: it keeps its budget of" in " ".join(shown.out.split())
    assert "51 %" in " ".join(shown.out.split())
    here = hetopt("launch", saved(), "--on", "local", "--dry-run")
    assert "51 %" in " ".join(here.out.split())
    assert leftovers(cloud) == []
    told = plan.model_copy(update={"insight": SEEN})
    budget = plan.goal.budget_usd or 0.0
    assert told.risk_with(budget) == told.risk is not None
    assert told.risk_with(50.5) is None, "nine of ten runs cost less than that"
    assert (
        plan.model_copy(update={"insight": SEEN.model_copy(update={"risk_accepted": True})}).risk_with(budget) is None
    )
    assert plan.model_copy(update={"insight": SEEN.model_copy(update={"chance": 0.9})}).risk is None
    assert plan.risk is None, "plans of versions that did not look say nothing"
