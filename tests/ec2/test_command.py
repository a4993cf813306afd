"""Renting as a person does it: looked at first, confirmed, followed, stopped; and refused with one sentence."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.api.dashboard import KnownRuns
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.edge import LEDGER_FILE, BotoEdge, read_ledger
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.request import Request
from hetopt.core.profile import Profile
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from hetopt.reports.live_run import RunSummary
from tests.disturbance import PATIENCE_S
from tests.ec2.conftest import leftovers, plan_of
from tests.face.conftest import Answer, start

Hetopt = Callable[..., Answer]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "runs"


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def edited(plan_file: Path, change: Callable[[dict[str, object]], None]) -> Path:
    data = json.loads(plan_file.read_text())
    change(data)
    path = plan_file.with_name("edited.json")
    path.write_text(json.dumps(data))
    return path


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
    answer = hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach", "--substitute", "c7i.large=c6i.large")
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
        assert "4 of 4 machines up" in answer.out
        assert "starting" in hetopt("status", "--all").out
    answer = hetopt("stop", "--json")
    assert json.loads(answer.out)["is"] == "stopped"
    assert leftovers(cloud) == []
    assert json.loads(hetopt("status", "--json").out)["rental"]["everything_is_removed"]
    assert "nothing is left behind in us-east-1" in hetopt("gc", "--on", "ec2").out
    # Its objects tell other machines with the same credentials what was ordered.
    order = Order.load(folder / ORDER_FILE)
    assert order.roles[0].instance_types == ("c7i.large", "c6i.large")
    # Of a machine whose end nobody saw before EC2 forgot it, nobody claims to know the bill.
    assert "estimated" not in hetopt("status").out
    assert summary_of(folder).usd_is_estimate is False
    seen = ClusterState.load(folder / SEEN_FILE)
    forgotten = (seen.machines[0].model_copy(update={"state": "gone"}), *seen.machines[1:])
    seen.model_copy(update={"machines": forgotten}).save(folder / SEEN_FILE)
    assert "estimated" in hetopt("status").out
    rental = json.loads(hetopt("status", "--json").out)["rental"]
    assert rental["spent_is_estimate"]
    assert [machine["usd_is_estimate"] for machine in rental["machines"]] == [True, False, False, False]
    assert summary_of(folder).usd_is_estimate


def summary_of(folder: Path) -> RunSummary:
    """The only run under a home, as the dashboard has it."""
    return KnownRuns(home=folder.parent).summaries(within_s=60.0)[0]


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
    deadline = time.monotonic() + PATIENCE_S
    while not list(home.glob(f"*/{SEEN_FILE}")) and time.monotonic() < deadline:
        time.sleep(0.2)
    (folder,) = home.iterdir()
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


def test_leftovers_of_a_run_that_nobody_knows_are_found_and_removed(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path
) -> None:
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    (folder,) = home.iterdir()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()
    answer = hetopt("gc", "--on", "ec2")
    assert "its run goes on, for up to" in " ".join(answer.out.split()), "its lease says until when"
    assert leftovers(cloud)
    assert hetopt("gc", "--on", "ec2", "--remove", "--run", folder.name).code == 0
    assert leftovers(cloud) == []


def test_what_cannot_be_rented(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path, profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    refused(hetopt("launch", "--on", "ec2", plan_file), 2, "nobody is there to say yes")
    refused(hetopt("launch", "--on", "ec2", plan_file, "--yes", "--budget", "0.01"), 5, "the budget is \\$0.01")
    refused(hetopt("launch", "--on", "ec2", plan_file, "--yes", "--zone", "us-east-1z"), 2, "does not have all types")
    refused(
        hetopt("launch", "--on", "ec2", plan_file, "--bucket", "not-there", "--yes"),
        4,
        "bucket not-there does not exist",
    )
    refused(hetopt("launch", "--on", "ec2", plan_file, "--substitute", "c7i.large"), 2, "TYPE=OTHER")
    refused(
        hetopt("launch", "--on", "ec2", plan_file, "--substitute", "c7i.large=g5.xlarge", "--yes"),
        2,
        "different images",
    )
    refused(
        hetopt("launch", "--on", "ec2", plan_file, "--image", "cpu=ami-1"), 2, "a kind of x86_64-cpu.*got cpu=ami-1"
    )
    refused(hetopt("launch", "--on", "ec2", plan_file, "--data", "/data/x", "--yes"), 2, "/data/x on this machine")
    refused(hetopt("launch", "--on", "ec2", plan_file, "--slowdown", "1,2"), 2, "--slowdown is for --on local")
    refused(hetopt("launch", plan_file, "--on", "local", "--budget", "3"), 2, "--budget is for --on ec2")
    refused(hetopt("launch", "--on", "ec2", plan_file, "--resume", "x"), 2, "leave PLAN")
    refused(hetopt("launch", "--on", "ec2", "--resume", "x"), 2, "no runs in")
    refused(hetopt("gc", "--remove"), 2, "--on ec2")
    refused(hetopt("gc", "--on", "moon"), 2, "nothing to find on 'moon'")

    plan_of(profile, catalog, (("c7i.large", 2, "spot"),), budget_usd=None).save(tmp_path / "free.json")
    refused(hetopt("launch", "--on", "ec2", tmp_path / "free.json", "--yes"), 2, "no budget")
    plan_of(profile, catalog, (("g5.xlarge", 2, "spot"),)).save(tmp_path / "gpu.json")
    assert hetopt("launch", "--on", "ec2", tmp_path / "gpu.json", "--dry-run").code == 0, "its image is found"
    refused(
        hetopt("launch", "--on", "ec2", tmp_path / "gpu.json", "--yes", "--image", "x86_64-gpu=ami-1"),
        4,
        "no such machine image",
    )
    assert leftovers(cloud) == []
    assert not home.exists() or not list(home.iterdir())


@pytest.mark.parametrize(
    ("path", "value", "code", "said"),
    [
        (("chosen", "prediction", "cost_usd", "high"), 50.0, 5, "may cost up to \\$50.00"),
        (("chosen", "groups", 0, "region"), "eu-west-1", 2, "one region"),
        (("chosen", "groups", 0, "instance_type"), "c99.large", 2, "no instance type called 'c99.large'"),
        (("run", "task"), "mine.module:task", 2, "in a module"),
        (("run", "data_dir"), "/data", 2, "aws s3 sync /data"),
        (("goal", "budget_usd"), 0.05, 5, "minutes of this cluster|may cost up to"),
    ],
)
def test_a_plan_that_was_edited(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, path: tuple[str | int, ...], value: object, code: int, said: str
) -> None:
    def change(data: dict[str, object]) -> None:
        place: object = data
        for key in path[:-1]:
            place = place[key]  # type: ignore[index]
        place[path[-1]] = value  # type: ignore[index]

    refused(hetopt("launch", "--on", "ec2", edited(plan_file, change), "--yes"), code, said)
    assert leftovers(cloud) == []


def test_a_plan_whose_prices_have_moved(cloud: BotoEdge, hetopt: Hetopt, plan_file: Path) -> None:
    """Cheap in the plan, dear now: the difference is shown, and what may pass the budget is not begun."""

    def change(data: dict[str, object]) -> None:
        group = data["chosen"]["groups"][1]  # type: ignore[index]
        group["price_usd_per_hour"] = 0.01
        data["goal"]["budget_usd"] = 0.081  # type: ignore[index]
        data["chosen"]["prediction"]["cost_usd"] = {"value": 0.02, "low": 0.01, "high": 0.03}  # type: ignore[index]

    path = edited(plan_file, change)
    assert "has become more expensive" in " ".join(hetopt("launch", "--on", "ec2", path, "--dry-run").out.split())
    refused(
        hetopt("launch", "--on", "ec2", path, "--yes"),
        5,
        r"at the prices of now the plan may cost .*c7g\.xlarge was planned at",
    )


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
    refused(hetopt("attach", "../x"), 2, "cannot be the name of a run")
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
    deadline = time.monotonic() + PATIENCE_S
    while not list(home.glob(f"*/{SEEN_FILE}")) and time.monotonic() < deadline:
        time.sleep(0.2)
    (folder,) = home.iterdir()
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
    assert "1 worker on EC2" in report.out
    assert json.loads(hetopt("status", "--json").out)["state"] == "finished"


def test_a_run_that_ended_is_resumed_from_its_checkpoint(
    cloud: BotoEdge, hetopt: Hetopt, plan_file: Path, home: Path
) -> None:
    assert hetopt("launch", "--on", "ec2", plan_file, "--yes", "--detach").code == 0
    (folder,) = home.iterdir()
    refused(hetopt("launch", "--on", "ec2", "--resume", folder.name), 2, "is not over yet")
    order = Order.load(folder / ORDER_FILE)
    cloud(calls.put_object(order, "node", f"{order.prefix}/ckpt/LATEST", b"step-30\n", "by a machine"))
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
