"""EC2 in a box: instances boot by their own user data, train together, are taken away, and are paid for as recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.box.box import Box
from benchmarks.box.story import Act, Stage, meeting_host, timeline, trained
from hetopt.backends.backend import RunHandle
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.emulation.namespaces import why_not
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.profile import Profile
from hetopt.core.run_status import RunState
from hetopt.optimizer.market.catalog import Catalog
from tests.ec2.conftest import plan_of
from tests.strangers import SAID, script_among_strangers

STAND_IN = ("--substitute", "c7i.large=m7i.large", "--substitute", "c7i.xlarge=m7i.xlarge")


@pytest.fixture
def stage(tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "home").mkdir()
    with Box(folder=tmp_path / "box", catalog=catalog) as box:
        for name, value in box.environment.items():
            monkeypatch.setenv(name, value)
        stage = Stage(box=box, home=tmp_path / "home")
        stage.hetopt("setup", "--create-bucket", "--yes")
        yield stage


def nothing_is_left(stage: Stage) -> None:
    assert json.loads(stage.hetopt("gc", "--on", "ec2", "--json").stdout) == []
    assert not [one for one in stage.box.instances() if one.runs]


def lose_the_meeting_host(stage: Stage) -> None:
    """Its type is not to be had again."""
    victim = meeting_host(stage.box)
    stage.box.exhaust([victim.instance.type])
    stage.box.lose(victim)


def stop_from_elsewhere(stage: Stage) -> None:
    """Another terminal that knows nothing but the credentials."""
    elsewhere = Stage(box=stage.box, home=stage.home.parent / "elsewhere")
    elsewhere.home.mkdir()
    folder = stage.folder()
    assert folder is not None
    elsewhere.hetopt("attach", folder.name)
    elsewhere.hetopt("stop")


def begun(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "training_started"]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_meeting_host_is_lost_another_joins_and_the_run_is_stopped_from_elsewhere(
    stage: Stage, profile: Profile, catalog: Catalog
) -> None:
    plan, box = stage.home / "plan.json", stage.box
    plan_of(profile, catalog, (("c7i.large", 1, "spot"), ("c7i.xlarge", 1, "spot"))).save(plan)
    acts = (
        Act(when=trained(10), do=lose_the_meeting_host),
        Act(when=trained(10, generation=2), do=stop_from_elsewhere),
    )
    played = stage.play((plan, "--steps", "100000", "--yes", "--unprobed", *STAND_IN), acts, within_s=800)
    told = "\n".join(f"{one.time_s:.1f} {one.what}" for one in timeline(box, played))
    assert played.code == 7, told + played.err
    assert "stopped after" in played.out
    types = [one.type for one in box.instances()]
    assert len(types) == 3, told
    assert any(name.startswith("m7i.") for name in types), "the next best pool gave what the first had not"
    assert {worker.host for worker in played.seen.absent} == set()
    started = begun(played.events)
    assert started == sorted(started)
    assert started[-1] > 0, "the last generation went on from a checkpoint"
    assert "joins" in played.err
    assert "interrupted" in {machine.ending for machine in played.seen.machines}
    assert played.ledger_usd() == pytest.approx(box.bill_usd(played.order.extras_usd_per_hour), rel=0.01)
    nothing_is_left(stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_budget_ends_a_run_with_a_checkpoint(stage: Stage, profile: Profile, catalog: Catalog) -> None:
    """The clock of whoever follows is moved, so that the budget is used up at once."""
    plan, box = stage.home / "plan.json", stage.box
    plan_of(profile, catalog, (("c7i.large", 1, "spot"),)).save(plan)
    stage.hetopt(
        "launch", "--on", "ec2", plan, "--yes", "--unprobed", "--detach", "--steps", "100000", "--budget", "0.5"
    )
    until(stage, trained(10))
    folder = stage.folder()
    assert folder is not None
    ahead_s = [0.0]
    launcher = Ec2Launcher(home=stage.home, clock=lambda: time.time() + ahead_s[0])
    handle = RunHandle(run_dir=folder)
    assert launcher.poll(handle).state in (RunState.STARTING, RunState.RUNNING)
    spent = ClusterState.load(folder / SEEN_FILE).spent_usd(time.time())
    # All but a minute of what the budget pays for at the price of now.
    hourly = ClusterState.load(folder / SEEN_FILE).machines[0].usd_per_hour
    ahead_s[0] = (0.5 - spent) / hourly * 3600 - 60
    deadline = time.monotonic() + 300
    while not launcher.look(handle).state.is_over:
        box.check()
        assert time.monotonic() < deadline
        time.sleep(0.5)
    status = launcher.look(handle)
    assert status.state is RunState.STOPPED
    assert "budget" in str(status.reason)
    assert read_events(folder / EVENTS_FILE)[-1]["reason"] == "stopped"
    (machine,) = box.instances()
    assert machine.reason == "Client.InstanceInitiatedShutdown", "it ended by itself, its checkpoint saved"
    nothing_is_left(stage)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_loses_machines_with_and_without_notice_and_reaches_its_end(
    stage: Stage, profile: Profile, catalog: Catalog
) -> None:
    plan, box = stage.home / "plan.json", stage.box
    plan_of(profile, catalog, (("c7i.large", 2, "spot"), ("c7i.xlarge", 2, "spot"))).save(plan)
    acts = (
        Act(when=trained(20), do=lambda stage: box.interrupt(box.living()[-1], notice_s=60)),
        Act(when=trained(20, generation=2), do=lose_the_meeting_host),
    )
    played = stage.play((plan, "--steps", "2500", "--yes", "--unprobed", *STAND_IN), acts, within_s=1100)
    told = "\n".join(f"{one.time_s:.1f} {one.what}" for one in timeline(box, played))
    assert played.code == 0, told + played.err
    started = begun(played.events)
    assert started[0] == 0
    assert 20 in range(started[1] + 1), "a notice costs no step"
    assert played.events[-1]["event"] == "training_finished", told
    assert "finished after 2,500 steps" in played.out
    assert played.seen.generation >= 3, told
    assert played.ledger_usd() == pytest.approx(box.bill_usd(played.order.extras_usd_per_hour), rel=0.01)
    nothing_is_left(stage)


def until(stage: Stage, reached: Callable[[Stage], bool], within_s: float = 400.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached(stage):
        stage.box.check()
        assert time.monotonic() < deadline, [one.what for one in stage.box.happenings]
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_stranger_that_travels_with_a_script_is_imported_for_ours(
    stage: Stage, profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    plan, box = stage.home / "plan.json", stage.box
    made = plan_of(profile, catalog, (("c7i.large", 1, "spot"),))
    (tmp_path / "mine").mkdir()
    script = (str(script_among_strangers(tmp_path / "mine")), "--epochs", "2")
    made.model_copy(update={"run": made.run.model_copy(update={"script": script})}).save(plan)
    played = stage.play((plan, "--yes", "--unprobed"), (), within_s=800)
    logs = [*box.folder.rglob("*.log"), *played.folder.rglob("*.log")]
    said = "\n".join(log.read_text(errors="replace") for log in logs)
    assert SAID not in said
    assert played.code == 0, said + played.err
    assert "epoch 1 is over" in said
    nothing_is_left(stage)
