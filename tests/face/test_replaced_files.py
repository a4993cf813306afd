"""Spot that costs more than on demand is not taken; files of ours are replaced unasked, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hetopt.cli import parse
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports import html
from hetopt.reports.document import Document

from .test_report import plan

__all__ = ["plan"]

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "resnet20-cifar10.json"


def test_spot_that_costs_more_than_on_demand_is_not_taken_and_that_is_said() -> None:
    catalog = load_catalog()
    listing = catalog.listing("c7i.xlarge")
    assert listing.on_demand is not None
    dear = replace(listing.on_demand, market="spot", usd_per_hour=1.5 * listing.on_demand.usd_per_hour)
    odd = replace(catalog, listings={"c7i.xlarge": replace(listing, spot=dear)})
    goal, options = Goal(budget_usd=50, ends="epochs", amount=200), Options(max_workers=2, trials=0)
    made = recommend(PlanRequest(Profile.load(RECORDED), odd, goal, options), seed=0, now=datetime.now(UTC))
    assert {group.market for group in made.chosen.groups} == {"on-demand"}
    said = "Spot costs no less than on demand for c7i.xlarge: on demand is taken."
    assert said == made.reasons[0]
    on_spot = replace(options, market="spot", only_types=("c7i.*",))
    with pytest.raises(BadInput, match=r"spot costs no less than on demand for c7i\.xlarge") as refused:
        recommend(PlanRequest(Profile.load(RECORDED), odd, goal, on_spot), seed=0, now=datetime.now(UTC))
    assert refused.value.hint == 'take `market="on-demand"`'


def test_a_plan_is_replaced_unasked_and_nothing_else(plan: Plan, tmp_path: Path) -> None:
    mine, other = tmp_path / "plan.json", tmp_path / "notes.json"
    plan.save(mine)
    other.write_text('{"kind": "letters"}', encoding="utf-8")
    parse.ready_to_write(mine, force=False, replaces="plan")
    with pytest.raises(BadInput, match="exists already"):
        parse.ready_to_write(other, force=False, replaces="plan")
    with pytest.raises(BadInput, match="exists already"):
        parse.ready_to_write(mine, force=False)
    page = tmp_path / "run.html"
    page.write_text(html.page(Document(kind="hetopt run", title="mine")), encoding="utf-8")
    parse.ready_to_write(page, force=False, replaces="hetopt run")
    for no_page in (page, other):
        with pytest.raises(BadInput, match="exists already"):
            parse.ready_to_write(no_page, force=False, replaces="hetopt plan")
