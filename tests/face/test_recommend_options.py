"""What `hetopt recommend` can be asked beside budget and deadline: filters, objectives, confidence, a report."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetopt.optimizer.cost.observed_preemptions import ObservedPool, keep
from hetopt.optimizer.market.catalog import BUNDLED
from tests.disturbance import PATIENCE_S
from tests.face.conftest import RECORDED, Answer, start
from tests.few_types import all_types

pytestmark = pytest.mark.usefixtures("small_catalogue")

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
        (["--gpus", "A10G", "--arch", "arm64"], "fulfils --gpus A10G and --arch arm64"),
        (["--types", "g5.*", "--exclude", "g5.*"], "Nothing that can be rented"),
        (["--zone", "eu-west-1a"], "--zone eu-west-1a and --region us-east-1 exclude each other"),
        (["--zone", "euw1-az1"], "--zone euw1-az1 and --region us-east-1 exclude each other"),
        (["--network-min", "25", "--network-max", "1"], "fulfils --network-min 25 and --network-max 1"),
        (["--max-hourly", "0.0001"], "fulfils --max-hourly 0.0001"),
        (
            ["--objective", "fastest", "--weights", "time=1,cost=1"],
            "--objective fastest and --weights exclude each other",
        ),
        (["--compression", "none", "--ratio", "1%"], "--compression none sends something of every element"),
        (["--compression", "tpok"], "There is no compressor called 'tpok'"),
        (["--compression", "powersgd"], "--compression powersgd cannot be planned: of powersgd, what it keeps"),
        (["--compression", "topk", "--sync", "local-sgd(4)"], "--compression topk is of gradients; --sync local-sgd"),
        (["--ratio", "2"], "--ratio must be above 0 and below 1"),
        (["--data", "5GB", "--data-region", "us-est-1"], "There is no region called 'us-est-1'"),
        (["--objective", "best"], "There is no objective called 'best'"),
        (["--weights", "time=1"], "--weights must be time=W,cost=W"),
        (["--weights", "time=0,cost=0"], "--weights must be time=W,cost=W"),
        (["--arch", "sparc"], "There is no architecture called 'sparc'"),
        (["--quota", "g"], "--quota must be FAMILY=VCPUS"),
        (["--confidence", "1.5"], "--confidence must be above 0 and below 1, got 1.5"),
        (["--confidence", "95"], "for example --confidence 0.95"),
        (["--max-workers", "0"], "--max-workers must be 1 to 4096, got 0"),
        (["--max-workers", "4097"], "--max-workers must be 1 to 4096, got 4097"),
        (["--mixed-types", "4"], "--mixed-types must be 1 to 3, got 4"),
        (["--trials", "-1"], "--trials must be at least 0, got -1"),
        (["--region", "us-esat-1"], "no region called 'us-esat-1'"),
    ],
)
def test_what_contradicts_itself_is_refused(hetopt: Hetopt, options: list[str], said: str) -> None:
    answer = hetopt("recommend", PROFILE, "--budget", 5, *options)
    error = " ".join(answer.err.split())
    assert answer.code == 2, error
    assert said in error
    assert "→" in error
    assert "Traceback" not in error


def test_old_and_missing_prices_are_told(hetopt: Hetopt, tmp_path: Path) -> None:
    folder = tmp_path / "aws"
    shutil.copytree(BUNDLED, folder)
    prices = folder / "regions" / "us-east-1.csv"
    header, *rows = prices.read_text().splitlines()
    asked = ("recommend", PROFILE, *QUICK, "--budget", 5, "--catalog", folder)

    # Without a price a type is not offered; the plan makes do with the others.
    some = [row if row.startswith("g5.xlarge,") else re.sub(r"^([^,]+,[^,]*),.*", r"\1,,,,", row) for row in rows]
    prices.write_text("\n".join([header, *some]) + "\n")
    answer = hetopt(*asked, "--json")
    assert answer.code == 0, answer.err
    assert "days old" in answer.err
    assert {group["instance_type"] for group in _groups(json.loads(answer.out))} == {"g5.xlarge"}

    # Without any, nor without their columns, nothing can be planned.
    none = [re.sub(r"^([^,]+,[^,]*),.*", r"\1,,,,", row) for row in rows]
    column = [re.sub(r"^([^,]+,[^,]*),[^,]*,[^,]*", r"\1", row) for row in [header, *rows]]
    for lines in ([header, *none], column):
        prices.write_text("\n".join(lines) + "\n")
        answer = hetopt(*asked)
        assert answer.code == 2
        assert "The catalogue has no prices for us-east-1" in " ".join(answer.err.split())
        assert "Traceback" not in answer.err


def test_filters_reach_the_plan(hetopt: Hetopt) -> None:
    plan = _plan(hetopt, "--budget", 5, "--types", "g5.*,g6.*", "--exclude", "*.metal,g5.xlarge", "--max-hourly", 2)
    for group in _groups(plan):
        assert group["instance_type"].startswith(("g5.", "g6."))
        assert group["instance_type"] != "g5.xlarge"
    for candidate in plan["pareto"]:
        assert sum(g["machines"] * g["price_usd_per_hour"] for g in candidate["groups"]) <= 2 + 1e-9
    demand = _plan(hetopt, "--budget", 5, "--on-demand", "--quota", "g=8", "--gpus", "any")
    assert {group["market"] for group in _groups(demand)} == {"on-demand"}


def test_ways_to_send_gradients_can_be_pinned(hetopt: Hetopt) -> None:
    """Whatever they are worth: of several the best is taken, and a method that is named comes with the named ratios."""
    pinned = _plan(hetopt, "--budget", 5, "--compression", "topk", "--ratio", "1%", "--ratio", "0.1", "--types", "c5.*")
    free = _plan(hetopt, "--budget", 5, "--types", "c5.*")
    both = _plan(hetopt, "--budget", 5, "--compression", "topk,none", "--types", "c5.*")
    ways = [one["compression"] for one in (pinned["chosen"], *pinned["pareto"])]
    assert {way["name"] for way in ways} == {"topk"}
    assert {way["ratio"] for way in ways} <= {0.01, 0.1}
    assert {one["compression"].get("name", "identity") for one in both["pareto"]} <= {"topk", "identity"}
    assert free["chosen"]["prediction"]["total_s"]["value"] > 0


def test_objectives_differ_as_they_should(hetopt: Hetopt) -> None:
    def figures(*options: object) -> tuple[float, float]:
        told = _plan(hetopt, "--budget", 2, *options)["chosen"]["prediction"]
        return told["total_s"]["value"], told["cost_usd"]["value"]

    quick, cheap, middle = (figures("--objective", name) for name in ("fastest", "cheapest", "balanced"))
    weighed = figures("--weights", "time=1,cost=1")
    assert quick[0] < middle[0] < cheap[0]
    assert quick[1] > middle[1] > cheap[1]
    assert figures() == middle
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


def test_a_plan_that_is_less_sure_than_asked_is_no_success(hetopt: Hetopt, tmp_path: Path) -> None:
    asked = ("recommend", PROFILE, *QUICK, "--budget", 2, "--deadline", "295s", "--confidence", 0.999)
    answer = hetopt(*asked, "-o", tmp_path / "plan.json")
    assert answer.code == 3
    told = " ".join(answer.out.split())
    assert told.split("cluster")[0].count("RISK: it keeps its budget of $2.00 and its deadline of 4 min 55 s"), "on top"
    assert "% of simulated runs keep the budget and the deadline" in told
    assert "take the risk with --accept-risk" in " ".join(answer.err.split())
    assert "--confidence 0." in answer.err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["insight"]["chance"] < 0.999 == plan["insight"]["asked"]
    assert plan["insight"]["remedies"]
    taken = hetopt(*asked, "--accept-risk", "--json")
    assert taken.code == 0
    assert json.loads(taken.out)["insight"]["risk_accepted"] is True


def test_nothing_fits_names_the_nearest_on_each_axis(hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch) -> None:
    all_types(monkeypatch)
    answer = hetopt("recommend", PROFILE, *QUICK, "--budget", 0.06, "--deadline", "190s")
    error = " ".join(answer.err.split())
    assert answer.code == 3
    assert "the cheapest plan that meets the deadline is" in error
    assert "the quickest plan within the budget is" in error
    assert "allow" in error.rpartition("→")[2]
    assert "raise the budget" not in error, "no money is sure to be in time"
    neither = " ".join(hetopt("recommend", PROFILE, *QUICK, "--budget", 0.0001, "--deadline", "1s").err.split())
    assert "the cheapest plan of all is" in neither
    assert "the quickest plan is" in neither


def test_a_report_and_a_journal_are_written(hetopt: Hetopt, tmp_path: Path) -> None:
    journal = tmp_path / "search.journal"
    first = _plan(hetopt, "--budget", 2, "--study", journal, "--report", tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert journal.stat().st_size > 0
    again = _plan(hetopt, "--budget", 2, "--study", journal)
    assert again["chosen"] == first["chosen"]
    assert hetopt("recommend", PROFILE, "--budget", 2, "--report", tmp_path / "plan.html").code == 0, "a page of ours"
    (tmp_path / "own.html").write_text("<!doctype html>\n")
    assert hetopt("recommend", PROFILE, "--budget", 2, "--report", tmp_path / "own.html").code == 2
    assert (tmp_path / "own.html").read_text() == "<!doctype html>\n"
    (tmp_path / "text").write_text("no journal\n")
    answer = hetopt("recommend", PROFILE, *QUICK, "--budget", 2, "--study", tmp_path / "text")
    assert answer.code == 2
    assert "Traceback" not in answer.err


def test_what_launches_have_seen_is_believed_unless_told_otherwise(
    hetopt: Hetopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a launch had watched every type for a day.
    types = ("g5.xlarge", "g6.xlarge", "g4dn.xlarge")
    asked = ("--budget", 2, "--spot", "--types", ",".join(types))
    pools = [ObservedPool(instance_type=name, region="us-east-1", instance_hours=24.0, losses=12) for name in types]
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    keep(tmp_path / "home" / "observed-losses.json", pools, until="2026-11-20T12:00:00+00:00")
    own = _plan(hetopt, *asked)
    assert all(group["watched"]["losses"] == 12 for group in _groups(own))
    explained = hetopt("recommend", PROFILE, *QUICK, *asked, "--explain").out
    assert "12 losses in 24 instance-hours" in " ".join(explained.split())
    prior = _plan(hetopt, *asked, "--observed", "none")
    assert all(group["watched"] is None for group in _groups(prior))
    (tmp_path / "seen.json").write_text("{}")
    answer = hetopt("recommend", PROFILE, *asked, "--observed", tmp_path / "seen.json")
    assert answer.code == 2
    assert "seen.json" in answer.err
    assert hetopt("recommend", PROFILE, *asked, "--observed", tmp_path / "nothing.json").code == 2


def test_an_interrupted_search_keeps_its_best_and_goes_on(
    hetopt: Hetopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a terminal: the plan so far is written, and what was tried is in the journal."""
    journal, plan = tmp_path / "search.journal", tmp_path / "plan.json"
    asked = (PROFILE, "--budget", 2, "--epochs", 100, "--study", journal)
    process = start("recommend", *asked, "--trials", 1_000_000, "-o", plan)
    assert process.stderr is not None
    for line in process.stderr:
        if "trials of a study" in line:
            break
    deadline = time.monotonic() + PATIENCE_S
    while not (journal.exists() and journal.read_text().count("\n") > 500) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    kept = json.loads(plan.read_text())
    assert "stopped early" in kept["searched"]
    tried = int(re.findall(r"([\d,]+) trials", kept["searched"])[0].replace(",", ""))
    assert tried >= 10
    all_types(monkeypatch)  # as in the process
    # As many trials as were done: nothing is tried again, and the answer is as good.
    answer = hetopt("recommend", *asked, "--trials", tried // 2, "--json")
    assert answer.code == 0, answer.err
    again = json.loads(answer.out)
    assert int(re.findall(r"([\d,]+) trials", again["searched"])[0]) >= tried // 2
    assert "stopped early" not in again["searched"]
    told, before = (found["chosen"]["prediction"]["total_s"]["value"] for found in (again, kept))
    assert told <= before * 1.02
