"""Renting as a person does it: looked at first, confirmed, followed, stopped; and refused with one sentence.

Whatever is wrong with an account, a session, a region or a plan: one sentence, what to do, and nothing is left.
What is planned for a budget is rented with it, and nobody rents a plan that is a risk without having accepted it.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.order import (
    LEAST_LIFETIME_S,
    ORDER_FILE,
    SEEN_FILE,
    ClusterState,
    Order,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.ordering import check_prices
from hetopt.backends.ec2.renter.request import LEDGER_FILE, BotoEdge, Request, read_ledger
from hetopt.core.errors import BudgetStop
from hetopt.core.profile import Profile
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal, Plan, Sensitivity
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.reports.status_document import UNSEEN_END
from tests.disturbance import PATIENCE_S
from tests.ec2.conftest import leftovers, plan_of
from tests.ec2.followed import latest
from tests.face.conftest import RECORDED, Answer, start, until

Hetopt = Callable[..., Answer]


def refused(answer: Answer, code: int, said: str) -> None:
    text = " ".join(answer.err.split())
    assert answer.code == code, text
    assert re.search(said, text), text
    assert "→" in text
    assert "Traceback" not in text


def test_a_dry_run_prints_every_call_and_makes_none(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path, golden: Callable[[str, str], None]
) -> None:
    answer = hetopt("launch", "--on", "ec2", plan_file, "--dry-run")
    assert answer.code == 0, answer.err
    golden("dry-run.txt", answer.out)
    printed = json.loads(hetopt("launch", "--on", "ec2", plan_file, "--dry-run", "--json").out)
    assert [call["call"] for call in printed["calls"]].count("ec2:CreateFleet") == 2
    assert sum(call["worst_usd_per_hour"] for call in printed["calls"]) == pytest.approx(printed["worst_usd_per_hour"])
    assert sum(call["usd_per_hour"] for call in printed["calls"]) == pytest.approx(printed["usd_per_hour"])
    assert leftovers(cloud) == []
    assert not home.exists()


def test_a_run_is_rented_looked_at_and_stopped_from_other_terminals(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach")
    assert answer.code == 0, answer.err
    (folder,) = home.iterdir()
    assert Launch.load(folder / LAUNCH_FILE).on == "ec2"
    status = json.loads(hetopt("status", "--json").out)
    assert status["state"] == "starting"
    assert len(status["rental"]["machines"]) == 4
    assert status["rental"]["budget_usd"] == 5.0
    assert not status["rental"]["not_asked"]
    refused_gc = json.loads(hetopt("gc", "--on", "ec2", "--remove", "--json").out)
    assert all(row["left_alone"].startswith("its run goes on, for up to") for row in refused_gc)
    assert len(leftovers(cloud)) == len(refused_gc)
    # Without a login, what was seen last is told, with its age.
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "")
        answer = hetopt("status")
        assert answer.code == 0
        assert "there are no AWS credentials here" in answer.err
    answer = hetopt("stop", "--json")
    assert json.loads(answer.out)["is"] == "stopped"
    assert leftovers(cloud) == []
    assert json.loads(hetopt("status", "--json").out)["rental"]["everything_is_removed"]
    assert "nothing is left behind in us-east-1" in hetopt("gc", "--on", "ec2").out
    # Of a machine whose end nobody saw before EC2 forgot it, nobody claims to know the bill.
    assert "estimated" not in hetopt("status").out
    seen = ClusterState.load(folder / SEEN_FILE)
    forgotten = (seen.machines[0].model_copy(update={"state": "gone"}), *seen.machines[1:])
    seen.model_copy(update={"machines": forgotten}).save(folder / SEEN_FILE)
    assert UNSEEN_END in " ".join(hetopt("status").out.split())
    rental = json.loads(hetopt("status", "--json").out)["rental"]
    assert rental["spent_is_estimate"]
    assert [machine["usd_is_estimate"] for machine in rental["machines"]] == [True, False, False, False]


@pytest.mark.parametrize(
    "number",
    [  # tests/face/test_signals.py sends each to a launch on this machine
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
    ids=lambda number: number.name,
)
def test_a_launch_that_is_interrupted_gives_everything_back(
    cloud: BotoEdge, plan_file: Path, home: Path, number: signal.Signals
) -> None:
    process = start("launch", "--on", "ec2", plan_file, "--yes")
    folder = until(lambda: next(home.glob(f"*/{SEEN_FILE}"), None)).parent
    assert leftovers(cloud)
    process.send_signal(number)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)  # somebody who is impatient: it waits until everything is given back
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, told
    assert "Traceback" not in told
    assert f"stopping the rented machines of {folder.name}" in " ".join(told.split())
    assert leftovers(cloud) == []
    assert ClusterState.load(folder / SEEN_FILE).cleared


def test_no_boto3(monkeypatch: pytest.MonkeyPatch, hetopt: Hetopt, plan_file: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "boto3", None)
    refused(hetopt("launch", "--on", "ec2", plan_file, "--dry-run"), 2, "needs boto3.*pip install 'boto3")


def test_a_run_is_looked_after_from_another_machine(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    (folder,) = home.iterdir()
    refused(hetopt("attach", folder.name), 2, "is known here")
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "elsewhere"))
    refused(hetopt("attach", "20200101-000000-digits-0000"), 2, "has no order.json of a run")
    refused(hetopt("attach", "../x"), 2, "cannot be the name of a file")
    assert hetopt("attach", folder.name).code == 0
    status = json.loads(hetopt("status", "--json").out)
    assert status["run"] == folder.name
    assert {machine["state"] for machine in status["rental"]["machines"]} == {"running"}
    assert len(status["rental"]["machines"]) == 4
    assert json.loads(hetopt("stop", "--json").out)["is"] == "stopped"
    assert leftovers(cloud) == []


def test_a_launch_is_followed_to_its_end(
    cloud: BotoEdge, hetopt: Hetopt, home: Path, profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    """What machines of a real run wrote, put there as they put it; then they end, as shutting down ends them."""
    plan_of(profile, catalog, (("c7i.large", 1, "spot"),)).save(tmp_path / "one.json")
    process = start("launch", "--on", "ec2", tmp_path / "one.json", "--yes")
    folder = until(lambda: next(home.glob(f"*/{SEEN_FILE}"), None)).parent
    order = Order.load(folder / ORDER_FILE)
    events = [
        json.loads(line) for line in (Path(__file__).parent / "recorded" / "events.jsonl").read_text().splitlines()
    ]
    shift_s = time.time() - events[0]["time_s"]
    text = "".join(json.dumps({**event, "time_s": event["time_s"] + shift_s}) + "\n" for event in events)
    for name, body in ((f"events/{0:015d}.jsonl", text), ("log/h0/run_x/attempt_0/0/stdout.log", "hello from h0\n")):
        cloud(calls.put_object(order, "node", f"{order.prefix}/{name}", body.encode(), "by a machine"))
    ids = [machine.id for machine in ClusterState.load(folder / SEEN_FILE).machines]
    end = {"InstanceIds": ids}
    cloud(Request(step="end", service="ec2", operation="terminate_instances", parameters=end, purpose="they shut down"))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "finished after 40 steps" in out
    assert "the machines are gone; they cost $" in err
    assert leftovers(cloud) == []
    assert "hello from h0" in hetopt("logs").out
    report = hetopt("report")
    assert report.code == 0, report.err
    assert "1 worker on ec2" in report.out
    assert json.loads(hetopt("status", "--json").out)["state"] == "finished"


def test_a_run_that_ended_is_resumed_from_its_checkpoint(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path
) -> None:
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    (folder,) = home.iterdir()
    refused(hetopt("launch", "--on", "ec2", "--resume", folder.name), 2, "is not over yet")
    order = Order.load(folder / ORDER_FILE)
    cloud(calls.put_object(order, "node", f"{order.prefix}/ckpt/LATEST", latest("step-30").encode(), "by a machine"))
    assert hetopt("stop").code == 0
    first = ClusterState.load(folder / SEEN_FILE)
    answer = hetopt("launch", "--on", "ec2", "--resume", folder.name, "--yes", "--detach")
    assert answer.code == 0, answer.err
    again = ClusterState.load(folder / SEEN_FILE)
    assert len(again.alive) == 4
    assert len(again.machines) == 8, "what it has cost counts"
    assert again.spent_usd(time.time()) > first.spent_usd(time.time())
    placement = json.loads(cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"])
    assert placement["generation"] == 1
    assert placement["resume_from"] == "step-30"
    lease = json.loads(cloud(calls.get_object(order, f"{order.prefix}/lease.json"))["Body"])
    assert lease["stop_training_s"] > time.time(), "the wish to end is of its earlier life"
    assert json.loads(hetopt("status", "--json").out)["state"] in ("starting", "running")
    tokens = [entry.token for entry in read_ledger(folder / LEDGER_FILE) if entry.token]
    assert len(tokens) == len(set(tokens)) == 8, "nothing that was asked before is asked again"
    assert hetopt("stop").code == 0
    assert leftovers(cloud) == []


def test_a_script_is_ordered_with_its_files_or_refused_before_anything_is_made(
    cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom hetopt import session\nrun = session(None, None)\n")
    (tmp_path / "small.yaml").write_text("lr: 1\n")
    of_script = plan.model_copy(update={"run": plan.run.model_copy(update={"script": ("train.py",)})})
    of_script.save(tmp_path / "plan.json")
    order = ("launch", "--on", "ec2", tmp_path / "plan.json", "--dry-run")
    config = f"--config={tmp_path / 'small.yaml'}"
    answer = hetopt(*order, "--data", "s3://bucket/data/x", "--", script, config, "{data}")
    assert answer.code == 0, answer.err
    refused(hetopt(*order, "--data", "s3://bucket/data/x", "--", script), 2, r"by \{data\} among its arguments")
    script.write_text("import torch\n")
    refused(hetopt(*order, "--", script), 2, "uses neither DistributedDataParallel nor a session")
    assert leftovers(cloud) == []


SEEN = Sensitivity(gap=None, chance=0.51, asked=0.9, cost_90_usd=50.0, total_90_s=4000.0, remedies=())


@pytest.mark.parametrize("deadline_s", [None, 6 * 3600.0])
@pytest.mark.parametrize("budget", [0.05, 0.2, 0.6, 2.0])
def test_a_plan_for_a_budget_is_ordered_with_it(
    order_for: Callable[..., Order], catalog: Catalog, budget: float, deadline_s: float | None
) -> None:
    """GPU types cost three times as much on demand, so that many a cheap plan could not even boot."""
    profile = Profile.load(RECORDED / "lstm-small.json")
    options = Options(trials=0, max_workers=8, mixed_types=2, accept_risk=True)
    goal = Goal(ends="epochs", amount=3, budget_usd=budget, deadline_s=deadline_s)
    made = recommend(PlanRequest(profile, catalog, goal, options), seed=0, now=datetime(2026, 11, 20, tzinfo=UTC))
    order = order_for(chosen=made)
    assert order.budget_usd == budget
    assert order.volume_gb == made.chosen.disk_gb
    assert order.lifetime_s >= LEAST_LIFETIME_S * (1 - 1e-6)
    assert (budget - order.fixed_usd) / worst_usd_per_hour(order.roles, order.zones) * 3600 >= LEAST_LIFETIME_S * (
        1 - 1e-6
    )
    if all(zone.rates[g.instance_type].usd_per_hour < 1.02 * g.price_usd_per_hour for zone in order.zones[:1]
           for g in made.chosen.groups):  # fmt: skip
        check_prices(made, order)


def test_too_small_a_budget_says_the_least(order_for: Callable[..., Order], plan: Plan) -> None:
    def ordered(budget_usd: float) -> Order:
        goal = plan.goal.model_copy(update={"budget_usd": budget_usd})
        return order_for(chosen=plan.model_copy(update={"goal": goal, "insight": SEEN}))

    with pytest.raises(BudgetStop, match="minutes of this cluster") as caught:
        ordered(0.01)
    assert ordered(float((caught.value.hint or "").split("budget_usd=")[1].split("`")[0]))


def test_a_risk_is_rented_by_nobody_who_has_not_accepted_it(
    cloud: BotoEdge, hetopt: Hetopt, plan: Plan, tmp_path: Path
) -> None:
    def saved(**seen: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        plan.model_copy(update={"insight": SEEN.model_copy(update=seen)}).save(path)
        return path

    refused(hetopt("launch", "--on", "ec2", saved(), "--yes"), 3, "in 49 of 100 cases.*--accept-risk")
    shown = hetopt("launch", "--on", "ec2", saved(), "--dry-run")
    assert shown.code == 0
    assert leftovers(cloud) == []
    told = plan.model_copy(update={"insight": SEEN})
    budget = plan.goal.budget_usd or 0.0
    assert told.risk_with(budget) == told.risk is not None
    assert told.risk_with(50.5) is None, "nine of ten runs cost less than that"
    assert (
        plan.model_copy(update={"insight": SEEN.model_copy(update={"risk_accepted": True})}).risk_with(budget) is None
    )
