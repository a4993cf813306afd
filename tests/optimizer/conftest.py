from __future__ import annotations

from datetime import UTC, datetime

import pytest

from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .profiles import make_profile

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="session")
def plan(catalog: Catalog) -> Plan:
    """A plan of two epochs of the usual profile, on machines without a GPU."""
    options = Options(trials=0, batch_size=128, types=("c7a.large", "c7a.xlarge"))
    goal = Goal(ends="epochs", amount=2, budget_usd=5.0)
    return recommend(PlanRequest(make_profile(), catalog, goal, options), seed=0, now=NOW)
