"""Regions side by side: the best one wins, a far data set pays its way, and a budget holds that too."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from hetopt.core.errors import NoFeasiblePlan
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.candidates import expected_scores
from hetopt.optimizer.recommendation.options import TIME_WEIGHTS
from hetopt.optimizer.recommendation.places import plan_in_regions
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.search.objective import Limits
from tests.face.conftest import RECORDED

HERE = load_catalog("us-west-2")
CATALOGS = [HERE.in_region(name) for name in ("us-west-2", "eu-west-1", "sa-east-1")]
PROFILE = Profile.load(RECORDED / "resnet20-cifar10.json")
NOW = datetime(2026, 11, 26, tzinfo=UTC)
GOAL = Goal(ends="epochs", amount=200, budget_usd=20)


def find(request: PlanRequest) -> Plan:
    return recommend(request, seed=0, now=NOW)


@pytest.mark.parametrize("gpus", [(), ("A10G",)])
def test_no_region_alone_has_a_better_way(gpus: tuple[str, ...]) -> None:
    options = Options(trials=0, mixed_types=1, max_workers=8, gpus=gpus)

    regions = ("us-east-1", "eu-west-1", "ap-southeast-3")
    requests = [PlanRequest(PROFILE, load_catalog(name), GOAL, options) for name in regions]
    anywhere = plan_in_regions(requests, find)
    ways = {name: way.candidate for way in anywhere.choices for name in way.names if way.candidate is not None}
    assert not gpus or len({candidate.groups[0].region for candidate in anywhere.plans}) > 1
    assert {way for name, way in ways.items() if name != "safest"} <= set(anywhere.pareto)
    assert anywhere.chosen == ways["balanced"]
    for request in requests:
        for way in find(request).choices:
            for name in way.names if way.candidate is not None else ():
                wish = Limits(time_weight=TIME_WEIGHTS.get(name, request.limits.time_weight))
                ours, theirs = expected_scores([ways[name], way.candidate], wish)
                assert ours <= theirs * (1 + 1e-9), f"{name} of {request.catalog.region}"


def test_each_gpu_that_is_named_has_a_way_as_good_as_any_regions() -> None:
    """To a hundredth: the region with its best cluster may show a cheaper one with that GPU instead."""
    names = ("A10G", "T4", "V100", "L40S")
    options = Options(trials=0, mixed_types=1, max_workers=8, gpus=names)

    def best(plans: list[Plan], name: str) -> float:
        ways = [way.candidate for plan in plans for way in plan.choices if way.candidate is not None]
        own = [way for way in ways if all(group.hardware and group.hardware.gpu == name for group in way.groups)]
        return float(expected_scores(own, requests[0].limits).min(initial=math.inf))

    regions = ("ap-southeast-3", "us-east-1", "eu-west-1")
    requests = [PlanRequest(PROFILE, load_catalog(name), GOAL, options) for name in regions]
    anywhere = plan_in_regions(requests, find)
    alone = [find(request) for request in requests]
    for name in names:
        assert best([anywhere], name) <= best(alone, name) * 1.01, name


def test_far_data_pays_its_way() -> None:
    """90 GB from Ireland cost more than the training anywhere."""
    options = Options(objective="cheapest", trials=0, mixed_types=1, data_bytes=90e9, data_region="eu-west-1")
    best, *others = plan_in_regions(
        [PlanRequest(PROFILE, catalog, GOAL, options) for catalog in CATALOGS], find
    ).regions
    assert (best.region, best.data_transfer_usd) == ("eu-west-1", 0)
    assert [offer.data_transfer_usd for offer in others] == pytest.approx([1.8, 1.8])


def test_what_is_paid_before_is_in_the_bill_and_in_the_budget() -> None:
    options = Options(trials=0, mixed_types=1, data_bytes=90e9, data_region="eu-west-1")
    made = recommend(PlanRequest(PROFILE, HERE, GOAL, options), seed=0, now=NOW).chosen.prediction
    line = next(term for term in made.cost_terms if term.name.startswith("data set"))
    assert line.usd == made.data_transfer_usd == pytest.approx(1.8)
    assert "eu-west-1 to us-west-2" in line.basis
    assert sum(term.usd for term in made.cost_terms) == pytest.approx(made.cost_usd.value)
    with pytest.raises(NoFeasiblePlan):
        recommend(
            PlanRequest(PROFILE, HERE, GOAL.model_copy(update={"budget_usd": 1.7}), options),
            seed=0,
            now=NOW,
        )
