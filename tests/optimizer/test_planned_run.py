"""What the machines of a plan are told about convergence."""

from __future__ import annotations

from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, recommend

from .conftest import NOW
from .profiles import make_profile


def test_a_plan_tells_its_run(catalog: Catalog) -> None:
    options = Options(trials=20, batch_size=256, only_types=("c7a.large",))
    goal = Goal(ends="epochs", amount=1, budget_usd=9.0)
    plan = recommend(make_profile(), catalog, goal, options, seed=0, now=NOW)
    assert plan.run.slowdown_coefficient == CAUTIOUS_COEFFICIENT
