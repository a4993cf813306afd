"""What a plan says it depends on: other worlds follow the forecast, and rejected plans really break a limit."""

from __future__ import annotations

import pytest

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .conftest import NOW
from .profiles import make_profile

LARGE = make_profile(parameters=5_000_000, per_sample_s=0.02, minimum_steps=2000, minimum_samples=3e6)
SMALL = Options(trials=20, max_workers=8, only_types=("c7a.*", "g5.xlarge", "g4dn.xlarge"))


def _plan(catalog: Catalog, budget: float, options: Options = SMALL) -> Plan:
    return recommend(PlanRequest(LARGE, catalog, Goal(ends="target", budget_usd=budget), options), seed=0, now=NOW)


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return _plan(catalog, 1.0)


def test_every_world_has_a_verdict(plan: Plan) -> None:
    seen = plan.insight
    assert seen is not None
    worlds = {world.change: world for world in seen.scenarios}
    assert len(worlds) >= 6
    for world in worlds.values():
        assert world.verdict
        assert not world.same or world.best is not None
    dearer, cheaper = worlds["spot prices 20 % higher"].best, worlds["spot prices 20 % lower"].best
    assert dearer is not None
    assert cheaper is not None
    told = plan.chosen.prediction
    # A score never gets worse as prices fall; its time may, by as little as the fastest plan gives away for money.
    assert cheaper.total_s <= 1.02 * told.total_s.value
    assert dearer.total_s >= told.total_s.value / 1.02
    least = next(world for change, world in worlds.items() if change.startswith("a budget below"))
    assert least.best is not None
    assert least.best.cost_usd == pytest.approx(min(c.prediction.cost_usd.value for c in plan.pareto))


def test_rejected_plans_are_better_and_break_a_limit(plan: Plan) -> None:
    assert plan.insight is not None
    assert plan.insight.rejected
    for one in plan.insight.rejected:
        assert one.plan.total_s < plan.chosen.prediction.total_s.value
        assert "budget of $1.00" in one.reason


def test_more_money_makes_the_same_plan_surer(catalog: Catalog, plan: Plan) -> None:
    assert plan.insight is not None
    assert plan.insight.chance is not None
    assert plan.insight.chance > 0.9
    told = plan.chosen.prediction.cost_usd
    assert told.value < plan.insight.cost_90_usd < 1.5 * told.high
    assert plan.insight.gap is not None
    assert plan.insight.gap < 0.03


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_a_confidence_is_kept(catalog: Catalog, confidence: float) -> None:
    options = Options(trials=20, max_workers=8, only_types=("c7a.*", "g5.xlarge", "g4dn.xlarge"), confidence=confidence)
    seen = _plan(catalog, 1.0, options).insight
    assert seen is not None
    assert seen.chance is not None
    assert seen.chance >= confidence
    assert seen.confidence == confidence


def test_a_confidence_in_nothing_is_refused(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="needs a budget or a deadline"):
        recommend(PlanRequest(LARGE, catalog, Goal(ends="epochs", amount=1), Options(confidence=0.9)), seed=0, now=NOW)
