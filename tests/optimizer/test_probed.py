"""A guess is not paid for unless that is said."""

from __future__ import annotations

import pytest

from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.exploring import check_probed, unprobed_types
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .conftest import NOW
from .profiles import make_device, make_profile


def _plan(catalog: Catalog, profile: Profile, *types: str) -> Plan:
    options = Options(trials=20, only_types=types)
    return recommend(
        PlanRequest(profile, catalog, Goal(ends="epochs", amount=1, budget_usd=9), options), seed=0, now=NOW
    )


def test_an_extrapolated_type_is_refused_by_name(catalog: Catalog) -> None:
    plan = _plan(catalog, make_profile(), "c7a.2xlarge")
    assert unprobed_types(plan) == ("c7a.2xlarge",)
    with pytest.raises(BadInput, match=r"c7a\.2xlarge") as caught:
        check_probed(plan, unprobed=False)
    assert caught.value.hint is not None
    assert "`unprobed=True`" in caught.value.hint
    check_probed(plan, unprobed=True)


@pytest.mark.parametrize("measured", ["c7a.2xlarge", "c7a.4xlarge"])
def test_a_measured_type_and_its_family_are_let_through(catalog: Catalog, measured: str) -> None:
    plan = _plan(catalog, make_profile(devices=[make_device(type=measured)]), "c7a.2xlarge")
    assert unprobed_types(plan) == ()
    check_probed(plan, unprobed=False)
