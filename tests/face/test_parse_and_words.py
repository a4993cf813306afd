"""What people type becomes SI numbers; numbers become what people read."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.cli import parse
from hetopt.core import formatting, option
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports import html
from hetopt.reports.document import Document


@pytest.mark.parametrize("text", ["3", "0.5", " 12 "])
def test_what_is_typed_without_a_unit_is_asked_for_one(text: str) -> None:
    """A budget in dollars has one unit; three could be seconds, hours or days."""
    with pytest.raises(BadInput, match="`deadline` needs a unit"):
        option.duration_s(text, "deadline")


@given(st.floats(min_value=1e-6, max_value=1e7))
def test_a_printed_duration_is_within_one_percent(seconds: float) -> None:
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = formatting.duration(seconds).split()
    read = sum(float(number) * units[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
    assert read == pytest.approx(seconds, rel=0.011, abs=6e-7)


@given(st.floats(min_value=0, max_value=1e7) | st.sampled_from((0.9996, 999.6e-6, 59.96, 3599.7, 172799.0)))
def test_a_printed_duration_is_of_its_own_unit(seconds: float) -> None:
    """Not 1,000 ms, 1e+03 ms or 60 s; and zero is zero seconds."""
    said = formatting.duration(seconds)
    assert "e+" not in said
    assert seconds or said == "0 s"
    full = {"µs": 1000, "ms": 1000, "s": 60, "min": 60, "h": 48}
    parts = said.split()
    assert all(float(number) < full.get(unit, math.inf) for number, unit in zip(parts[::2], parts[1::2], strict=True))


@given(st.floats(-1e9, 1e9), st.sampled_from(["worker", "batch", "epoch", "launch"]))
def test_one_is_one_and_everything_else_is_many(number: float, noun: str) -> None:
    amount, said = formatting.counted(number, noun).split(" ")
    assert (said == noun) == (amount == "1")
    assert float(amount.replace(",", "")) == pytest.approx(number, rel=0.051, abs=1e-300)


@given(st.floats(-1e-3, 1e-3))
def test_no_difference_is_minus_nothing(share: float) -> None:
    assert "-0.0 %" not in formatting.percent(share)


@given(st.floats(min_value=1e-4, max_value=1e6))
def test_printed_dollars_are_within_a_few_percent(amount: float) -> None:
    assert float(formatting.usd(amount).replace("$", "").replace(",", "")) == pytest.approx(amount, rel=0.051)


@given(st.floats(1e-6, 1))
def test_a_printed_share_is_within_a_twentieth(part: float) -> None:
    assert float(formatting.share(part).removesuffix(" %")) / 100 == pytest.approx(part, rel=0.051)


# Spot that costs more than on demand is not taken; files of ours are replaced unasked, and nothing else is.

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "resnet20-cifar10.json"


def test_spot_that_costs_more_than_on_demand_is_not_taken() -> None:
    catalog = load_catalog()
    listing = catalog.listing("c7i.xlarge")
    assert listing.on_demand is not None
    dear = replace(listing.on_demand, market="spot", usd_per_hour=1.5 * listing.on_demand.usd_per_hour)
    odd = replace(catalog, listings={"c7i.xlarge": replace(listing, spot=dear)})
    goal, options = Goal(budget_usd=50, ends="epochs", amount=200), Options(max_workers=2, trials=0)
    made = recommend(PlanRequest(Profile.load(RECORDED), odd, goal, options), seed=0, now=datetime.now(UTC))
    assert {group.market for group in made.chosen.groups} == {"on-demand"}
    on_spot = replace(options, market="spot", types=("c7i.*",))
    with pytest.raises(BadInput, match="1 would without `market"):
        recommend(PlanRequest(Profile.load(RECORDED), odd, goal, on_spot), seed=0, now=datetime.now(UTC))


@pytest.mark.parametrize(
    ("file", "replaces", "is_replaced"),
    [
        ("plan.json", "plan", True),
        ("plan.json", None, False),
        ("notes.json", "plan", False),
        ("run.html", "hetopt run", True),
        ("run.html", "hetopt plan", False),
        ("notes.json", "hetopt plan", False),
    ],
)
def test_a_file_of_ours_is_replaced_unasked_and_nothing_else(
    plan: Plan, tmp_path: Path, file: str, replaces: str | None, is_replaced: bool
) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "notes.json").write_text('{"kind": "letters"}', encoding="utf-8")
    (tmp_path / "run.html").write_text(html.page(Document(kind="hetopt run", title="mine")), encoding="utf-8")
    with nullcontext() if is_replaced else pytest.raises(BadInput, match="exists already"):
        parse.ready_to_write(tmp_path / file, force=False, replaces=replaces)
