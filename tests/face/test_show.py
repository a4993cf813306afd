"""`hetopt show` and `hetopt compare`: plans read again.

The HTML page of a plan: the numbers of the JSON, read back out of a real browser; and nothing from elsewhere.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hetopt.core import formatting
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports import html, plan_document
from tests.browser import WIDTHS, browser
from tests.face.conftest import RECORDED, hetopt
from tests.few_types import few

__all__ = ["hetopt"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One job's plan on each market."""
    import hetopt

    folder = tmp_path_factory.mktemp("plans")
    paths = {}
    for market in ("spot", "on-demand"):
        plan = hetopt.recommend(RECORDED / "digits.json", budget_usd=5, epochs=20, market=market, types=("c7i.*",))
        paths[market] = folder / f"{market}.json"
        paths[market].write_text(plan.to_json())
    return paths


def test_a_plan_is_shown_as_when_it_was_made(hetopt: Callable[..., Any], tmp_path: Path) -> None:
    again = tmp_path / "plan.json"
    options = ("--budget", "5", "--epochs", "20", "--market", "spot", "--types", "c7i.*")
    made = hetopt("recommend", RECORDED / "digits.json", *options, "-o", again)
    assert hetopt("show", again).out == made.out
    assert hetopt("show", again, "--json").out == again.read_text()
    assert hetopt("show", again, "--explain").out.startswith(made.out)
    assert "branch and bound" in hetopt("show", again, "--explain").out


NEXT = re.compile(r"^(?:next|or): +hetopt (.*)$", re.MULTILINE)


@pytest.mark.parametrize("job", ["--params 110M", "--params 110M --cloud lambda", "--params 7B"])
def test_an_estimate_is_measured_next(
    job: str, hetopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is proposed that would refuse the file: launching, exporting."""
    monkeypatch.chdir(tmp_path)
    made = hetopt("estimate", *job.split(), "--samples", "50k", "-o", "plan.json")
    measured, rehearsed, again = NEXT.findall(made.out + hetopt("show", "plan.json").out)
    assert measured == again
    assert measured.startswith("profile -- train.py")
    assert ("GPUs share the model" in measured) == ("7B" in job)
    assert rehearsed == "launch plan.json --on rehearsal --steps 200"


@pytest.mark.parametrize("usual", [None, 5.0])
def test_a_profile_that_saw_no_target_is_planned_by_its_length(
    usual: float | None, hetopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = Profile.load(RECORDED / "digits.json")
    missed = tuple(pilot.model_copy(update={"steps_to_target": None}) for pilot in seen.pilots)
    job = seen.job.model_copy(update={"usual_epochs": usual})
    seen.model_copy(update={"pilots": missed, "job": job}).save(Path("profile.json"))
    [command] = NEXT.findall(hetopt("show", "profile.json").out)
    assert ("--epochs N" in command) == (usual is None)
    answer = hetopt(*shlex.split(command.replace("--epochs N", "--epochs 5"), comments=True))
    assert answer.code == 0, answer.err


def test_plans_are_held_side_by_side(hetopt: Callable[..., Any], plans: dict[str, Path]) -> None:
    answer = hetopt("compare", plans["spot"], plans["on-demand"])
    words = " ".join(answer.out.split())
    assert answer.code == 0
    assert "on-demand is" in words
    assert "dearer" in words
    assert "batch size" not in words, "what is the same in both is left out"
    back = " ".join(hetopt("compare", plans["on-demand"], plans["spot"]).out.split())
    assert "cheaper" in back


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("spot",), "two plans or more"),
        (("spot", "spot"), "two plans or more"),
        (("spot", RECORDED / "digits.json"), "holds a profile, not a plan"),
        (("spot", "missing.json"), "missing.json"),
    ],
)
def test_what_cannot_be_compared_is_said(
    hetopt: Callable[..., Any], plans: dict[str, Path], names: tuple[Any, ...], says: str
) -> None:
    answer = hetopt("compare", *(plans.get(name, name) for name in names))
    assert (answer.code, says in answer.err) == (2, True)


RESNET20 = Path(__file__).parent.parent / "recorded" / "resnet20-cifar10.json"
FIGURE = re.compile(r'<span data-figure="(\w+)" data-value="([^"]+)">([^<]*)</span>')


def page(plan: Plan) -> str:
    return html.page(plan_document.page(plan))


@pytest.fixture(scope="module")
def drawn() -> Plan:
    return recommend(
        PlanRequest(
            Profile.load(RESNET20),
            few(load_catalog()),
            Goal(ends="epochs", amount=164, budget_usd=0.5),
            Options(max_workers=8, trials=40),
        ),
        seed=0,
        now=datetime(2026, 11, 20, tzinfo=UTC),
    )


def outside(text: str) -> list[str]:
    """Everything that a browser would fetch, by tag and attribute."""
    found: list[str] = []

    class Outside(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("link", "img", "iframe", "object", "embed", "base", "form"):
                found.append(tag)
            for name, value in attrs:
                if name in ("src", "xlink:href") or "url(" in (value or "") or (name == "href" and value[:1] != "#"):
                    found.append(f"{tag} {name}")

    Outside().feed(text)
    return found


def test_the_page_needs_nothing_else(drawn: Plan) -> None:
    text = page(drawn)
    assert outlined(text).count("section") > 5, "a screen reader finds its way"
    assert outside(text) == []
    assert "<script" not in text
    assert "http" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).replace("http://www.w3.org", "")


def test_what_a_person_wrote_is_no_markup(drawn: Plan) -> None:
    group = drawn.chosen.groups[0].model_copy(update={"instance_type": "<script>alert(1)</script>"})
    odd = drawn.model_copy(
        update={"chosen": drawn.chosen.model_copy(update={"groups": (group, *drawn.chosen.groups[1:])})}
    )
    assert "<script" not in page(odd)


def _figures(text: str) -> dict[str, list[tuple[float, str]]]:
    found: dict[str, list[tuple[float, str]]] = {}
    for name, value, said in FIGURE.findall(text):
        found.setdefault(name, []).append((float(value), said))
    return found


def test_a_browser_shows_the_numbers_of_the_json(drawn: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.html").write_text(page(drawn), encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        for width, dark in itertools.product(WIDTHS, (False, True)):
            tab.open((tmp_path / "plan.html").as_uri(), width=width, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.complaints == []
            assert len(tab.fetched) == 1
            assert tab.low_contrast() == {}
        shown = str(tab.value("document.documentElement.outerHTML"))
    told = json.loads(drawn.to_json())
    found = _figures(shown)
    chosen = told["chosen"]["prediction"]
    for name in ("cost_usd", "total_s"):
        assert [value for value, _ in found[name]] == [chosen[name]["value"]]
        assert [value for value, _ in found[f"{name}_low"]] == [chosen[name]["low"]]
        assert [value for value, _ in found[f"{name}_high"]] == [chosen[name]["high"]]
    for name in ("total_s", "cost_usd"):
        assert [value for value, _ in found[f"front_{name}"]] == [
            getattr(other.prediction, name).value for other in drawn.plans
        ]
    assert [value for value, _ in found["term_usd"]] == [term.usd for term in drawn.chosen.prediction.bill]
    assert sum(value for value, _ in found["term_usd"]) == pytest.approx(chosen["cost_usd"]["value"])
    assert [value for value, _ in found["chance"]] == [told["insight"]["chance"]]
    # What a person reads is that number.
    for value, said in found["front_cost_usd"] + found["term_usd"]:
        assert said == formatting.usd(value)
    for value, said in found["front_total_s"]:
        assert said == formatting.duration(value)


class _Outline(HTMLParser):
    """Landmarks, tables and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag == "th" and given.get("scope") not in ("row", "col"):
            self.faults.append("a table header without scope")
        if tag == "td" and not given.get("data-label"):
            self.faults.append("a cell without the name of its column")
        if tag == "svg" and not given.get("aria-label") and "sample" not in (given.get("class") or ""):
            self.faults.append("a drawing without words")


def outlined(text: str) -> list[str]:
    """The tags of a page that has landmarks, headings in order, tables with headers, and drawings with words."""
    seen = _Outline()
    seen.feed(text)
    assert seen.faults == []
    assert [seen.tags.count(one) for one in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    assert seen.tags.count("table") == seen.tags.count("caption") == seen.tags.count("thead")
    levels = [int(tag[1]) for tag in seen.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), "no level is left out"
    return seen.tags
