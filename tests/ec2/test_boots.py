"""A machine whose boot fails says why, and what fails before a step again and again is not rented for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.backend import MOST_IDLE
from hetopt.backends.ec2.renter.bundle import Bundle
from hetopt.backends.ec2.renter.cluster_state import (
    BOOT_FOLDER,
    SEEN_FILE,
    ClusterState,
    MachineState,
    failed,
    hopeless_hosts,
    last_words,
)
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.reconcile import ASK_AGAIN_S
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, be_unkind, leftovers
from tests.ec2.followed import Followed, put

Make = Callable[..., Order]
LOG = "Collecting torch\nERROR: No space left on device\nboot failed in line 42\n"


@pytest.fixture
def run_dir(tmp_path: Path, order_for: Make, plan: Plan, bundle: Bundle) -> Path:
    folder = tmp_path / "runs" / "a-run"
    folder.mkdir(parents=True)
    order_for().save(folder / ORDER_FILE)
    plan.save(folder / PLAN_OBJECT)
    (folder / BUNDLE_FILE).write_bytes(bundle.data)
    return folder


def fails_to_boot(run: Followed, machine: MachineState) -> None:
    """As the boot script does it: it leaves its log under its host's name, and shuts the machine down."""
    put(run.cloud, run.order, f"{BOOT_FOLDER}/ip-{machine.address.replace('.', '-')}.ec2.internal.log", LOG)
    be_unkind(shut_down=[machine.id])


def machine(host: str, name: str, ended: str | None, beat: bool, stepped: bool = False, life: int = 0) -> MachineState:
    return MachineState(
        id=f"i-{host}",
        host=host,
        instance_type=name,
        state="running" if ended is None else "terminated",
        since_s=10.0,
        life=life,
        until_s=None if ended is None else 210.0,
        ending=ended,
        heartbeat_s=70.0 if beat else None,
        has_stepped=stepped,
        usd_per_hour=1.0,
        extras_usd_per_hour=0.1,
    )


def test_a_host_whose_machines_fail_before_a_step_is_given_up(
    cloud: BotoEdge, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    told: list[str] = []
    launcher = Ec2Launcher(
        home=tmp_path, inner=cloud, tell=told.append, clock=patience.clock, sleep=patience.sleep, patience_s=3.0
    )
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    run.boots(*(one.id for one in run.before.machines))
    run.look()
    lost = next(one for one in run.seen.machines if one.instance_type == "c7g.xlarge")
    be_unkind(shut_down=[lost.id])  # it had booted, and no step was done with it
    run.look()
    asked = [run.seen.machines[-1]]
    assert asked[0].host == lost.host
    for _ in range(4):
        fails_to_boot(run, run.seen.machines[-1])
        patience.now_s += ASK_AGAIN_S
        run.look()
        if run.seen.machines[-1] is not asked[-1] and run.seen.machines[-1].id != asked[-1].id:
            asked.append(run.seen.machines[-1])
    assert len(asked) == MOST_IDLE - 1, "each try costs minutes of a machine"
    assert run.seen.given_up == (lost.host,)
    assert not run.seen.absent, "nobody waits for it"
    (words,) = [line for line in told if "no machine is rented" in line]
    assert f"{lost.host} (c7g.xlarge) ended before it had booted" in words
    assert "ERROR: No space left on device | boot failed in line 42" in words
    assert sum(run.shares()) == plan.run.global_batch_size, "the others go on with all of it"
    launcher.stop(run.handle)
    assert leftovers(cloud) == []


def test_machines_that_did_a_step_have_not_failed_however_they_end(
    cloud: BotoEdge, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    launcher = Ec2Launcher(home=tmp_path, inner=cloud, clock=patience.clock, sleep=patience.sleep, patience_s=3.0)
    run = Followed(cloud, launcher, run_dir, plan.run, patience)
    run.boots(*(one.id for one in run.before.machines))
    run.look()
    assert not any(one.has_stepped for one in run.seen.machines)
    run.happens("checkpoint_saved", step=40)
    run.look()
    assert all(one.has_stepped for one in run.seen.serving)
    be_unkind(shut_down=[run.seen.serving[0].id])
    run.look()
    assert not failed(run.seen.machines)
    launcher.stop(run.handle)


def test_a_run_whose_machines_all_fail_to_boot_says_why(
    cloud: BotoEdge, run_dir: Path, plan: Plan, patience: Patience, tmp_path: Path
) -> None:
    launcher = Ec2Launcher(home=tmp_path, inner=cloud, clock=patience.clock, sleep=patience.sleep, patience_s=3.0)
    handle = launcher.start(plan.run, run_dir, {})
    order, seen = Order.load(run_dir / ORDER_FILE), ClusterState.load(run_dir / SEEN_FILE)
    for one in seen.machines:
        name = f"{BOOT_FOLDER}/ip-{one.address.replace('.', '-')}.ec2.internal.log"
        put(cloud, order, name, LOG)
    be_unkind(shut_down=[one.id for one in seen.machines])
    patience.now_s += 120
    status = launcher.poll(handle)
    assert status.state is RunState.FAILED
    assert "ended before it had booted; its boot log ends" in str(status.reason)
    assert "No space left on device" in str(status.reason)
    assert ClusterState.load(run_dir / SEEN_FILE).cleared
    assert leftovers(cloud) == []


@given(
    machines=st.lists(
        st.builds(
            machine,
            host=st.sampled_from(["c7i.large-spot-0", "c7i.large-spot-1", "c7g.xlarge-on-demand-0"]),
            name=st.sampled_from(["c7i.large", "c7g.xlarge"]),
            ended=st.sampled_from([None, "finished", "unknown", "interrupted", "stopped by us"]),
            beat=st.booleans(),
            stepped=st.booleans(),
            life=st.sampled_from([0, 1]),
        ),
        max_size=6,
    )
)
def test_only_failures_before_a_step_count_and_only_of_this_life(machines: list[MachineState]) -> None:
    class Ordered:
        life = 1
        roles = ()

    hosts = sorted({one.host for one in machines})
    order: Order = Ordered()  # type: ignore[assignment]  # all that is asked of it here
    given_up = hopeless_hosts(order, ClusterState(time_s=500.0, machines=tuple(machines)), hosts)
    for host in hosts:
        mine = [one for one in machines if one.host == host]
        failures = [
            one
            for one in mine
            if one.ending in ("finished", "unknown") and not one.has_stepped and one.life == Ordered.life
        ]
        assert (host in given_up) == (len(failures) >= MOST_IDLE)


def test_the_log_is_that_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / BOOT_FOLDER
    folder.mkdir()
    (folder / "ip-10-0-0-7.ec2.internal.log").write_text("mine\n")
    (folder / "ip-10-0-0-77.ec2.internal.log").write_text("another's\n")
    one = machine("h0", "c7i.large", "finished", beat=False).model_copy(update={"address": "10.0.0.7"})
    assert last_words(tmp_path, [one]) == "mine"
    assert last_words(tmp_path / "none", [one]) is None
