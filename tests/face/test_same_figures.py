"""A plan says the same in the terminal, as JSON and on its page: times, prices, chances, the bill and the gap."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import hetopt
from hetopt.cli import parse, plan_view
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports.document import document
from hetopt.reports.plan_page import page
from hetopt.reports.plan_plots import front_lines, front_svg

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "resnet20-cifar10.json"
WISHES: tuple[dict[str, Any], ...] = (
    {"budget_usd": 20, "epochs": 200, "types": "c7i.*,c7a.*"},
    {"deadline": "3d", "epochs": 2000, "market": "on-demand", "types": "c7i.*"},
    {"budget_usd": "$40", "deadline": "2d", "epochs": 500, "gpus": "any", "objective": "cheapest"},
)


@pytest.fixture(scope="module", params=WISHES, ids=lambda wish: "-".join(wish))
def plan(request: pytest.FixtureRequest) -> Plan:
    return hetopt.recommend(RECORDED, trials=0, max_workers=8, mixed_types=2, accept_risk=True, **request.param)


@pytest.fixture
def text(plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    plan_view.show(plan, explain=True)
    return capsys.readouterr().out


def on_page(html: str, key: str) -> list[tuple[float, str]]:
    """The figures of that name: value and text."""
    found = re.findall(rf'data-figure="{key}" data-value="([^"]+)">([^<]*)<', html)
    return [(float(value), said) for value, said in found]


def test_figures_are_the_same_everywhere(plan: Plan, text: str) -> None:
    told, html = json.loads(plan.to_json()), page(plan)
    for key, say in (("total_s", formatting.duration), ("cost_usd", formatting.usd)):
        figures = told["chosen"]["prediction"][key]
        for part, name in (("value", key), ("low", f"{key}_low"), ("high", f"{key}_high")):
            [(value, said)] = on_page(html, name)
            assert value == pytest.approx(figures[part], rel=1e-9)
            assert said == say(figures[part])
            assert said in text
    for place, way in enumerate(told["choices"]):
        for key in ("total_s", "cost_usd"):
            value, said = on_page(html, f"way_{key}")[place]
            assert value == pytest.approx(way[key]["value"], rel=1e-9)
            assert said in text
        if way["chance"] is not None:
            assert formatting.chance(way["chance"]) in text
            assert f"{formatting.chance(way['chance'])} within the limits" in html
    for group in told["chosen"]["groups"]:
        price = formatting.usd(group["price_usd_per_hour"])
        assert price in text
        assert price in html


def test_the_gap_is_one_number(plan: Plan, text: str) -> None:
    assert plan.insight is not None
    shown = on_page(page(plan), "gap")
    if plan.insight.gap is None:
        assert shown == []
        return
    [(value, said)] = shown
    assert value == pytest.approx(plan.insight.gap)
    if len(plan.chosen.groups) == 1:
        assert f"better by more than {said}" in text


def test_small_lines_of_the_bill_are_one_and_nothing_is_lost(plan: Plan, text: str) -> None:
    told = plan.chosen.prediction
    whole = sum(term.usd for term in told.cost_terms)
    assert sum(term.usd for term in told.bill) == pytest.approx(whole)
    assert sum(term.usd < 0.01 * whole for term in told.bill) <= 1
    shown = on_page(page(plan), "term_usd")
    assert [said for _, said in shown] == [formatting.usd(term.usd) for term in told.bill]
    assert all(term.name in text for term in told.bill)


def test_the_day_of_a_price_is_said_once(plan: Plan, text: str) -> None:
    for group in plan.chosen.groups:
        [caption] = [line for line in text.splitlines() if line.startswith("USD/h: one machine")]
        assert caption.count(group.price_date) == 1


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
    assert said in made.explanation
    assert said == made.reasons[0], "on the screen, too"
    on_spot = replace(options, market="spot", only_types=("c7i.*",))
    with pytest.raises(BadInput, match=r"spot costs no less than on demand for c7i\.xlarge") as refused:
        recommend(PlanRequest(Profile.load(RECORDED), odd, goal, on_spot), seed=0, now=datetime.now(UTC))
    assert refused.value.hint == 'take `market="on-demand"`'


def test_axes_say_that_they_are_logarithmic(plan: Plan) -> None:
    assert front_svg(plan).count("log scale") == 2
    lines = front_lines(plan, columns=80)
    assert "log scales" in lines[-1]
    assert max(map(len, lines)) <= 80


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
    page.write_text(document(kind="hetopt run", title="mine", about=(), main=(), below=""), encoding="utf-8")
    parse.ready_to_write(page, force=False, replaces="hetopt run")
    for no_page in (page, other):
        with pytest.raises(BadInput, match="exists already"):
            parse.ready_to_write(no_page, force=False, replaces="hetopt plan")
