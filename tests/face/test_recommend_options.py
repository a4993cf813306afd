"""What `hetopt recommend` can be asked beside budget and deadline: filters, objectives, confidence, a report."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetopt.core.profile import Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.cost.preemption_rate import ObservedPool, keep
from hetopt.optimizer.market.catalog import BUNDLED
from tests.disturbance import PATIENCE_S
from tests.face.conftest import RECORDED, Answer, start, until
from tests.few_types import all_types

from .described import BERT, GPT2, NCF, RESNET101

pytestmark = pytest.mark.usefixtures("small_catalogue")

Hetopt = Callable[..., Answer]
PROFILE = RECORDED / "resnet20-cifar10.json"
QUICK = ("--max-workers", 6)


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
        (["--gpus", "A10G", "--arch", "arm64"], "fulfils --gpus A10G and --arch arm64"),
        (["--types", "g5.*", "--exclude", "g5.*"], "Nothing that can be rented"),
        (["--zone", "us-east-1z"], "--zone must be a region and a letter from a to f"),
        (["--data", "1000TB"], "--data must be at most 16.384 TB, got 1000TB"),
        (["--zone", "eu-west-1a"], "--zone eu-west-1a and --region us-east-1 exclude each other"),
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
        (["--confidence", "95"], "--confidence must be at most 0.9999, got 95"),
        (["--max-workers", "0"], "--max-workers must be at least 1, got 0"),
        (["--max-workers", "4097"], "--max-workers must be at most 4,096, got 4097"),
        (["--mixed-types", "4"], "--mixed-types must be at most 3, got 4"),
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


def test_old_and_missing_prices_are_told(hetopt: Hetopt, tmp_path: Path) -> None:
    folder = tmp_path / "aws"
    shutil.copytree(BUNDLED, folder)
    prices = folder / "regions" / "us-east-1.csv"
    header, *rows = prices.read_text().splitlines()
    asked = ("recommend", PROFILE, *QUICK, "--budget", 5, "--catalog", folder)
    # Without a price a type is not offered; the plan makes do with the others. Without any, nothing can be planned.
    some = [row if row.startswith("g5.xlarge,") else re.sub(r"^([^,]+,[^,]*),.*", r"\1,,,,", row) for row in rows]
    for lines, code, said in ((some, 0, "days old"), ([], 2, "The catalogue has no prices for us-east-1")):
        prices.write_text("\n".join([header, *lines]) + "\n")
        answer = hetopt(*asked, "--json")
        assert (answer.code, said in " ".join(answer.err.split())) == (code, True), answer.err
        assert code or {group["instance_type"] for group in _groups(json.loads(answer.out))} == {"g5.xlarge"}


def test_a_plan_that_is_less_sure_than_asked_is_no_success(hetopt: Hetopt, tmp_path: Path) -> None:
    asked = ("recommend", PROFILE, *QUICK, "--budget", 2, "--deadline", "295s", "--confidence", 0.999)
    answer = hetopt(*asked, "-o", tmp_path / "plan.json")
    assert answer.code == 3
    told = " ".join(answer.out.split())
    assert told.split("cluster")[0].count("RISK: a run exceeds the budget of $2.00 or the deadline of 4 min 55 s"), (
        "on top"
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["insight"]["chance"] < 0.999 == plan["insight"]["asked"]
    taken = hetopt(*asked, "--accept-risk", "--json")
    assert taken.code == 0
    assert json.loads(taken.out)["insight"]["risk_accepted"] is True


def test_nothing_fits_names_the_nearest_on_each_axis(hetopt: Hetopt) -> None:
    answer = hetopt("recommend", PROFILE, *QUICK, "--budget", 0.06, "--deadline", "190s")
    error = " ".join(answer.err.split())
    assert answer.code == 3
    assert "the cheapest plan that meets the deadline is" in error
    assert "the quickest plan within the budget is" in error
    neither = " ".join(hetopt("recommend", PROFILE, *QUICK, "--budget", 0.0001, "--deadline", "1s").err.split())
    assert "the cheapest plan of all is" in neither
    assert "the quickest plan is" in neither


def test_a_report_and_a_journal_are_written(hetopt: Hetopt, tmp_path: Path) -> None:
    journal = tmp_path / "search.journal"
    seed = ("--trials", 20, "--seed", 2**63 - 1)  # which is more than Optuna's generator takes
    first = _plan(hetopt, *seed, "--budget", 2, "--study", journal, "--report", tmp_path / "plan.html")
    again = _plan(hetopt, *seed, "--budget", 2, "--study", journal)
    assert again["chosen"] == first["chosen"]
    (tmp_path / "own.html").write_text("<!doctype html>\n")
    assert hetopt("recommend", PROFILE, "--budget", 2, "--report", tmp_path / "own.html").code == 2
    assert (tmp_path / "own.html").read_text() == "<!doctype html>\n"


def test_what_launches_have_seen_is_believed_unless_told_otherwise(
    hetopt: Hetopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a launch had watched every type for a day.
    types = ("g5.xlarge", "g6.xlarge", "g4dn.xlarge")
    asked = ("--budget", 2, "--market", "spot", "--types", ",".join(types))
    pools = [ObservedPool(instance_type=name, region="us-east-1", instance_hours=24.0, losses=12) for name in types]
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    keep(tmp_path / "home" / "observed-losses.json", pools, until="2026-11-20T12:00:00+00:00")
    own = _plan(hetopt, *asked)
    assert all(group["watched"]["losses"] == 12 for group in _groups(own))
    prior = _plan(hetopt, *asked, "--observed", "none")
    assert all(group["watched"] is None for group in _groups(prior))
    assert hetopt("recommend", PROFILE, *asked, "--observed", tmp_path / "nothing.json").code == 2


def test_an_interrupted_search_keeps_its_best_and_goes_on(hetopt: Hetopt, tmp_path: Path) -> None:
    """Ctrl-C in a terminal: the plan so far is written, and what was tried is in the journal."""
    journal, plan = tmp_path / "search.journal", tmp_path / "plan.json"
    asked = (PROFILE, "--budget", 2, "--epochs", 100, "--types", "c7i.*,g4dn.*,g5.*,g6.*", "--study", journal)
    asked += ("--mixed-types", 1)
    process = start("recommend", *asked, "--trials", 1_000_000, "-o", plan)
    for line in process.stderr:
        if "trials of a study" in line:
            break
    until(lambda: journal.exists() and journal.read_text().count("\n") > 100, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    kept = json.loads(plan.read_text())
    assert "stopped early" in kept["searched"]
    tried = int(re.findall(r"([\d,]+) trials", kept["searched"])[0].replace(",", ""))
    # As many trials as were done: nothing is tried again, and the answer is as good.
    answer = hetopt("recommend", *asked, "--trials", tried // 2, "--json")
    assert answer.code == 0, answer.err
    again = json.loads(answer.out)
    assert int(re.findall(r"([\d,]+) trials", again["searched"])[0]) >= tried // 2
    told, before = (found["chosen"]["prediction"]["total_s"]["value"] for found in (again, kept))
    assert told <= before * 1.02


def test_a_profile_that_ships_is_planned_by_its_name(hetopt: Callable[..., Answer]) -> None:
    asked = (*QUICK, "--budget", 5)
    named = hetopt("recommend", PROFILE.stem, *asked)
    assert "ships with hetopt" in named.err
    assert (named.code, named.out) == (0, hetopt("recommend", PROFILE, *asked).out)


# Questions that people ask, as `hetopt recommend` answers them: each on one screen of 80 columns.

MOST_LINES, COLUMNS = 23, 80
"""A terminal of 24 lines, less the one that is typed."""

QUESTIONS: dict[str, tuple[str | Profile, str, int]] = {
    "a-second": ("digits", "--budget 5", 0),
    "hours": ("resnet20-cifar10", "--epochs 2000 --budget 5", 0),
    "cpu-only": ("resnet20-cifar10", "--epochs 2000 --deadline 1h --gpus none", 0),
    "arm": ("lstm-small", "--epochs 400 --deadline 2h --arch arm64", 0),
    "gpu": (BERT, "--epochs 3 --budget 20", 0),
    "out-of-stock": (BERT, "--epochs 3 --budget 4 --objective cheapest", 0),
    "on-demand": (BERT, "--epochs 3 --deadline 2h --market on-demand", 0),
    "new-account": (BERT, "--epochs 3 --budget 20 --quota default", 3),
    "days": (GPT2, "--epochs 10 --budget 300 --deadline 3d --quota p=0 --quota g=64", 0),
    "thousand-workers": (RESNET101, "--epochs 90 --deadline 6h --gpus any --max-workers 1024", 3),
    "sure": (BERT, "--epochs 3 --budget 4 --confidence 0.99", 0),
    "one-worker": (GPT2, "--epochs 10 --budget 200 --max-workers 1", 0),
    "far-data": (RESNET101, "--epochs 90 --budget 900 --region eu-central-1 --data 150GB --data-region us-east-1", 0),
    "any-region": ("resnet20-cifar10", "--epochs 20000 --budget 20 --region any --data 9GB --data-region us-east-1", 0),
    "minutes": (NCF, "--epochs 20 --budget 10 --deadline 20m", 0),
}
"""By name: the job, what is asked, and the exit code."""

QUICK_QUESTIONS = ("a-second", "gpu", "new-account", "days", "sure")
"""Those that are asked in every run of the tests; each is a whole search."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_QUESTIONS)) for name in QUESTIONS]
)
def test_an_answer_is_one_screen_and_has_not_changed(
    name: str,
    hetopt: Callable[..., Answer],
    golden: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    all_types(monkeypatch)
    job, asked, code = QUESTIONS[name]
    file = RECORDED / f"{job}.json"
    if isinstance(job, Profile):
        file = tmp_path / "profile.json"
        job.save(file)
    told = hetopt("recommend", file, *asked.split())
    assert told.code == code, told.err
    lines = [line.rstrip() for line in told.out.splitlines()]
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines), default=0) <= COLUMNS
    refused = "" if code == 0 else told.err[told.err.index("error:") :]
    golden(f"question-{name}.txt", "\n".join([f"$ hetopt recommend PROFILE {asked}", *lines, refused]).rstrip() + "\n")


# Steps that cannot all be true, typed by hand: each is one sentence with its next step, and counts for what it is.

GOAL = ("--budget", 20, "--epochs", 2, "--types", "g5.*,g6.*,g4dn.*")


def planned(hetopt: Callable[..., Any], tmp_path: Path, **changes: object) -> Any:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(BERT.to_json()), **changes}), encoding="utf-8")
    return hetopt("recommend", path, *GOAL)


def rows(type_: str, times: Mapping[int, tuple[float, ...]]) -> list[dict[str, Any]]:
    return [
        StepSample(nodes=(Node(type=type_, workers=1),), local_batch_size=size, step_time_s=time_s).model_dump()
        for size, several in times.items()
        for time_s in several
    ]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (rows("g5.xlarge", {4: (5.0,), 8: (9.0,)}), "times longer than g4dn.xlarge foretells. A power limit"),
        (rows("p9.xlarge", {4: (0.2,), 8: (0.4,)}), "p9.xlarge is not in the catalogue"),
    ],
)
def test_a_plan_says_which_of_its_steps_contradict_each_other(
    samples: list[dict[str, Any]], words: str, hetopt: Callable[..., Any], tmp_path: Path
) -> None:
    answer = planned(hetopt, tmp_path, samples=samples)
    assert answer.code in (0, 3)
    assert words in " ".join(answer.err.split())
    alone = planned(hetopt, tmp_path)
    assert words not in " ".join(alone.err.split())


def test_a_profile_of_before_that_names_no_precision_is_planned_and_one_on_an_unknown_gpu_is_refused(
    hetopt: Callable[..., Any], tmp_path: Path
) -> None:
    device = json.loads(BERT.to_json())["devices"][0]
    old = {key: value for key, value in device.items() if key != "precision"}
    assert planned(hetopt, tmp_path, devices=[old]).code == 0
    refused = planned(hetopt, tmp_path, devices=[{**device, "type": "my-box"}])
    assert refused.code == 2
    told = " ".join(refused.err.split())
    assert "my-box" in told
    assert "accelerators.csv" in told
