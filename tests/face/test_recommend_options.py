"""What `hetopt recommend` can be asked beside budget and deadline: filters, objectives, confidence, a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.face.conftest import RECORDED, Answer

Hetopt = Callable[..., Answer]
PROFILE = RECORDED / "resnet20-cifar10.json"
QUICK = ("--trials", 20, "--max-workers", 6)


def _plan(hetopt: Hetopt, *options: object) -> dict[str, Any]:
    answer = hetopt("recommend", PROFILE, *QUICK, *options, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def _groups(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for candidate in (plan["chosen"], *plan["pareto"]) for group in candidate["groups"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--spot", "--on-demand"], "--spot and --on-demand exclude each other"),
        (["--market", "any", "--spot"], "--spot and --market any exclude each other"),
        (["--gpus", "A10G", "--arch", "arm64"], "--gpus A10G and --arch arm64 exclude each other"),
        (["--types", "g5.*", "--exclude", "g5.*"], "exclude each other"),
        (["--zone", "eu-west-1a"], "--zone eu-west-1a and --region us-east-1 exclude each other"),
        (["--zone", "euw1-az1"], "--zone euw1-az1 and --region us-east-1 exclude each other"),
        (["--max-hourly", "0.0001"], "--max-hourly 0.0001 leaves nothing"),
        (["--objective", "knee", "--weights", "time=1,cost=1"], "--objective knee and --weights exclude each other"),
        (["--objective", "best"], "there is no objective 'best'"),
        (["--weights", "time=1"], "--weights must be time=W,cost=W"),
        (["--weights", "time=0,cost=0"], "--weights must be time=W,cost=W"),
        (["--arch", "sparc"], "there is no architecture 'sparc'"),
        (["--quota", "g"], "--quota must be FAMILY=VCPUS"),
        (["--confidence", "1.5"], "A confidence of 1.5 cannot be"),
        (["--max-workers", "0"], "0 workers are no cluster"),
        (["--max-workers", "1000"], "Clusters of 1000 workers are not planned"),
        (["--mixed-types", "4"], "Clusters of 4 types are not planned"),
        (["--trials", "-1"], "-1 trials cannot be"),
        (["--region", "us-esat-1"], "no region 'us-esat-1'"),
    ],
)
def test_what_contradicts_itself_is_refused(hetopt: Hetopt, options: list[str], said: str) -> None:
    answer = hetopt("recommend", PROFILE, "--budget", 5, *options)
    error = " ".join(answer.err.split())
    assert answer.code == 2, error
    assert said in error
    assert "→" in error
    assert "Traceback" not in error


def test_filters_reach_the_plan(hetopt: Hetopt) -> None:
    plan = _plan(hetopt, "--budget", 5, "--types", "g5.*,g6.*", "--exclude", "*.metal,g5.xlarge", "--max-hourly", 2)
    for group in _groups(plan):
        assert group["instance_type"].startswith(("g5.", "g6."))
        assert group["instance_type"] != "g5.xlarge"
    for candidate in plan["pareto"]:
        assert sum(g["machines"] * g["price_usd_per_hour"] for g in candidate["groups"]) <= 2 + 1e-9
    demand = _plan(hetopt, "--budget", 5, "--on-demand", "--quota", "g=8", "--gpus", "any")
    assert {group["market"] for group in _groups(demand)} == {"on-demand"}


def test_objectives_differ_as_they_should(hetopt: Hetopt) -> None:
    def figures(*options: object) -> tuple[float, float]:
        told = _plan(hetopt, "--budget", 2, *options)["chosen"]["prediction"]
        return told["total_s"]["value"], told["cost_usd"]["value"]

    quick, cheap, knee = figures(), figures("--objective", "cost"), figures("--objective", "knee")
    weighed = figures("--weights", "time=1,cost=1")
    assert quick[0] < knee[0] < cheap[0]
    assert quick[1] > knee[1] > cheap[1]
    assert quick[0] <= weighed[0] <= cheap[0]
    assert cheap[1] <= weighed[1] <= quick[1]


def test_more_confidence_is_never_riskier(hetopt: Hetopt) -> None:
    chances = []
    for confidence in (0.6, 0.9, 0.98):
        plan = _plan(hetopt, "--budget", 0.12, "--confidence", confidence)
        assert plan["insight"]["confidence"] == confidence
        assert plan["insight"]["chance"] >= confidence
        assert "with a probability of" in plan["explanation"][0]
        chances.append(plan["chosen"]["prediction"]["total_s"]["value"])
    assert chances == sorted(chances)


def test_nothing_fits_names_the_nearest_on_each_axis(hetopt: Hetopt) -> None:
    answer = hetopt("recommend", PROFILE, *QUICK, "--budget", 0.06, "--deadline", "290s")
    error = " ".join(answer.err.split())
    assert answer.code == 3
    assert "the cheapest plan that meets the deadline is" in error
    assert "the quickest plan within the budget is" in error
    assert "raise the budget to $" in error
    assert "or allow" in error
    neither = " ".join(hetopt("recommend", PROFILE, *QUICK, "--budget", 0.0001, "--deadline", "1s").err.split())
    assert "the cheapest plan of all is" in neither
    assert "the quickest plan is" in neither


def test_a_report_and_a_journal_are_written(hetopt: Hetopt, tmp_path: Path) -> None:
    journal = tmp_path / "search.journal"
    first = _plan(hetopt, "--budget", 2, "--resume", journal, "--report", tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert journal.stat().st_size > 0
    again = _plan(hetopt, "--budget", 2, "--resume", journal)
    assert again["chosen"] == first["chosen"]
    assert hetopt("recommend", PROFILE, "--budget", 2, "--report", tmp_path / "plan.html").code == 2
    (tmp_path / "text").write_text("no journal\n")
    answer = hetopt("recommend", PROFILE, *QUICK, "--budget", 2, "--resume", tmp_path / "text")
    assert answer.code == 2
    assert "Traceback" not in answer.err
