"""The HTML page of a plan: the numbers of the JSON, read back out of a real browser; and nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hetopt.core import formatting
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, recommend
from hetopt.reports.front_plot import front_lines
from hetopt.reports.plan_page import page
from tests.disturbance import PATIENCE_S

RECORDED = Path(__file__).parent.parent / "recorded" / "resnet20-cifar10.json"
FIGURE = re.compile(r'<span data-figure="(\w+)" data-value="([^"]+)">([^<]*)</span>')


@pytest.fixture(scope="module")
def plan() -> Plan:
    return recommend(
        Profile.load(RECORDED),
        load_catalog(),
        Goal(ends="epochs", amount=164, budget_usd=0.5),
        Options(max_workers=8, trials=40),
        seed=0,
        now=datetime(2026, 11, 20, tzinfo=UTC),
    )


class _Outside(HTMLParser):
    """Everything that a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "form"):
            self.found.append(tag)
        self.found += [
            f"{tag} {name}" for name, value in attrs if name in ("src", "href", "xlink:href") or "url(" in (value or "")
        ]


def test_the_page_needs_nothing_else(plan: Plan) -> None:
    text = page(plan)
    seen = _Outside()
    seen.feed(text)
    assert seen.found == []
    assert "http" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).replace("http://www.w3.org", "")
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_what_a_person_wrote_is_no_markup(plan: Plan) -> None:
    group = plan.chosen.groups[0].model_copy(update={"instance_type": "<script>alert(1)</script>"})
    odd = plan.model_copy(
        update={"chosen": plan.chosen.model_copy(update={"groups": (group, *plan.chosen.groups[1:])})}
    )
    assert "<script" not in page(odd)


def _figures(text: str) -> dict[str, list[tuple[float, str]]]:
    found: dict[str, list[tuple[float, str]]] = {}
    for name, value, said in FIGURE.findall(text):
        found.setdefault(name, []).append((float(value), said))
    return found


def test_a_browser_shows_the_numbers_of_the_json(plan: Plan, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    (tmp_path / "plan.html").write_text(page(plan), encoding="utf-8")
    shown = subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "plan.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
    told = json.loads(plan.to_json())
    found = _figures(shown)
    chosen = told["chosen"]["prediction"]
    for name in ("cost_usd", "total_s"):
        assert [value for value, _ in found[name]] == [chosen[name]["value"]]
        assert [value for value, _ in found[f"{name}_low"]] == [chosen[name]["low"]]
        assert [value for value, _ in found[f"{name}_high"]] == [chosen[name]["high"]]
    for name in ("total_s", "cost_usd"):
        assert [value for value, _ in found[f"front_{name}"]] == [
            other["prediction"][name]["value"] for other in told["pareto"]
        ]
        assert [value for value, _ in found.get(f"rejected_{name}", [])] == [
            one["plan"][name] for one in told["insight"]["rejected"]
        ]
    assert [value for value, _ in found["term_usd"]] == [term["usd"] for term in chosen["cost_terms"]]
    assert sum(value for value, _ in found["term_usd"]) == pytest.approx(chosen["cost_usd"]["value"])
    assert [value for value, _ in found["chance"]] == [told["insight"]["chance"]]
    assert [value for value, _ in found["gap"]] == [told["insight"]["gap"]]
    # What a person reads is that number.
    for value, said in found["front_cost_usd"] + found["term_usd"]:
        assert said == formatting.usd(value)
    for value, said in found["front_total_s"]:
        assert said == formatting.duration(value)
    for world in told["insight"]["scenarios"]:
        assert world["change"] in shown


def test_the_front_in_characters_has_every_plan(plan: Plan) -> None:
    lines = front_lines(plan, columns=80)
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.count("●") for line in lines) == 1
    assert 1 <= sum(line.count("·") for line in lines) <= len(plan.pareto)
