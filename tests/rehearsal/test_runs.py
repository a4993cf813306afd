"""Real rehearsals: little clusters that train, change, lose hosts and are interrupted, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetopt.backends.backend import RunHandle
from hetopt.backends.emulation.conductor import RehearsalLauncher, ask_for_change
from hetopt.backends.emulation.namespaces import find_leftovers, find_networks, host_address
from hetopt.backends.emulation.plan import parse_change, parse_changes, parse_hosts
from hetopt.backends.processes import LocalLauncher
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event, read_events
from hetopt.core.run_folder import ConditionsReader
from hetopt.core.run_spec import DeclaredTime, RunSpec, ScaledEmulation, StopRule, WorkerSpec
from hetopt.core.run_status import RunState, RunStatus
from tests.face.conftest import until
from tests.listeners import watched

TOY = Path(__file__).resolve().parent.parent / "trainer" / "toy_task.py"
START = """
import sys, time
from pathlib import Path
from hetopt.backends.emulation.conductor import RehearsalLauncher
from hetopt.core.run_spec import RunSpec
run_dir = Path(sys.argv[1])
RehearsalLauncher().start(RunSpec.model_validate_json((run_dir / "wish.json").read_text()), run_dir, {})
time.sleep(600)
"""


def rehearsed(
    hosts: str, *, schedule: str = "", declared: DeclaredTime | None = None, steps: int = 1_000_000
) -> RunSpec:
    """A toy run on described hosts."""
    described = parse_hosts(hosts)
    return RunSpec(
        task=f"{TOY}:plain",
        workers=tuple(
            WorkerSpec(
                host=host.name,
                type="toy",
                local_batch_size=4,
                declared=declared
                and DeclaredTime(fixed_s=declared.fixed_s, per_sample_s=declared.per_sample_s / host.speed),
            )
            for host in described
            for _ in range(host.workers)
        ),
        batch_policy="static",
        stop=StopRule(max_steps=steps),
        control_period_steps=5,
        miniature=ScaledEmulation(
            hosts=tuple(described), changes=parse_changes(schedule, [host.name for host in described])
        ),
    )


def events(run_dir: Path, name: str | None = None) -> list[Event]:
    return [event for event in read_events(run_dir / "events.jsonl") if name in (None, event["event"])]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status", "ppid"]):
        line = process.info["cmdline"] or []
        if str(run_dir) in line and "-c" not in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def network_of(run_dir: Path) -> list[str]:
    return [network.id for network in find_networks() if network.purpose == str(run_dir)]


def conductor_of(run_dir: Path) -> psutil.Process:
    # As they were when they were found: some have ended since. A child that has not begun its own program yet still
    # has the name of the conductor that forked it.
    found = {
        one.pid: one for one in processes_of(run_dir) if "hetopt.backends.emulation.conductor" in one.info["cmdline"]
    }
    [conductor] = [one for one in found.values() if one.info["ppid"] not in found]
    return conductor


def has_hosts(run_dir: Path, count: int) -> bool:
    return sum("hetopt.trainer.host.agent" in process.info["cmdline"] for process in processes_of(run_dir)) == count


def wait_for(what: Callable[[], object], run_dir: Path) -> None:
    try:
        until(what)
    except AssertionError as error:
        logs = "\n".join(f"{path}:\n{path.read_text()}" for path in run_dir.rglob("*.log"))
        raise AssertionError(f"{find_networks()}\n{processes_of(run_dir)}\n{events(run_dir)}\n{logs}") from error


def over(run_dir: Path) -> RunStatus:
    launcher = RehearsalLauncher()
    wait_for(lambda: launcher.poll(RunHandle(run_dir=run_dir)).state.is_over, run_dir)
    return launcher.poll(RunHandle(run_dir=run_dir))


def nothing_is_left(run_dir: Path) -> bool:
    return not processes_of(run_dir) and not network_of(run_dir)


def test_a_cluster_trains_changes_as_told_and_fails_when_a_host_dies(box: None, tmp_path: Path) -> None:
    spec = rehearsed(
        "speed=4,rate=200mbit; speed=2,rate=100mbit,workers=2; speed=1,rate=50mbit",
        schedule="step 20 h1 speed=1\nstep 30 * rate=10mbit\nstep 60 h2 dies",
        declared=DeclaredTime(fixed_s=0.002, per_sample_s=0.02),
    )
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, tmp_path, {})
    try:
        assert launcher.poll(handle) == RunStatus(state=RunState.STARTING)
        with pytest.raises(BadInput, match="is alive"):
            launcher.start(spec, tmp_path, {})
        wait_for(lambda: events(tmp_path, "step"), tmp_path)
        assert len(network_of(tmp_path)) == 1
        # Any terminal can look, and ask for a change.
        assert LocalLauncher().poll(RunHandle(run_dir=tmp_path)).state == RunState.RUNNING
        ask_for_change(tmp_path, parse_change("h0 speed=8", ["h0", "h1", "h2"]))
        status = over(tmp_path)
    finally:
        launcher.stop(handle)
    assert status == RunStatus(
        state=RunState.FAILED,
        reason=events(tmp_path, "run_failed")[0]["reason"],
    )
    assert re.fullmatch(r"host h2 died at step 6\d, as scheduled", status.reason or "")
    [started] = events(tmp_path, "run_started")
    assert [worker["host"] for worker in started["workers"]] == ["h0", "h1", "h1", "h2"]  # ranked as described
    changed: dict[str, list[tuple[float, float, bool]]] = {"h0": [], "h1": [], "h2": []}
    for event in events(tmp_path, "condition_changed"):
        changed[event["host"]].append((event["speed"], event["rate_bits_per_s"], event["dies"]))
    # A change asked by hand falls before or after a scheduled one of step 20 or 30, as the machine is busy.
    assert len(changed["h0"]) == 2
    assert changed["h0"][-1] == (8, 1e7, False)
    assert changed["h1"] == [(1, 1e8, False), (1, 1e7, False)]
    assert changed["h2"] == [(1, 1e7, False), (1, 1e7, True)]
    assert ConditionsReader(tmp_path).now().speed_factors == {"h0": 2, "h1": 0.5}
    assert nothing_is_left(tmp_path)
    with pytest.raises(BadInput, match="is over"):
        ask_for_change(tmp_path, parse_change("h0 speed=8", ["h0"]))


def test_what_does_not_fit_slows_the_whole_miniature_and_the_run_finishes(box: None, tmp_path: Path) -> None:
    spec = rehearsed("speed=1,rate=100mbit,workers=2", declared=DeclaredTime(per_sample_s=0.001), steps=60)
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, tmp_path, {"TOY_SAMPLE_S": "0.004"})
    status = over(tmp_path)
    launcher.stop(handle)
    assert status == RunStatus(state=RunState.FINISHED)
    slowed = events(tmp_path, "miniature_slowed")
    assert slowed
    assert slowed[0]["factor"] > 4
    assert "does not fit" in slowed[0]["reason"]
    assert ConditionsReader(tmp_path).now().slowdown == slowed[-1]["factor"]
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_a_conductor_that_is_asked_to_end_leaves_nothing(box: None, tmp_path: Path, number: int) -> None:
    """Its workers save what they have, and say so; before they train there is nothing to save."""
    RehearsalLauncher().start(rehearsed("speed=1 x2", steps=100_000), tmp_path, {})
    wait_for(lambda: events(tmp_path, "step"), tmp_path)
    assert network_of(tmp_path)
    os.kill(conductor_of(tmp_path).pid, number)
    wait_for(lambda: nothing_is_left(tmp_path), tmp_path)
    assert over(tmp_path).state == RunState.STOPPED
    assert events(tmp_path)[-1]["event"] == "training_finished"


def test_stopping_a_run_leaves_nothing_and_stopping_it_again_is_no_harm(box: None, tmp_path: Path) -> None:
    launcher = RehearsalLauncher()
    handle = launcher.start(rehearsed("speed=1 x2", steps=10), tmp_path, {})
    RehearsalLauncher().stop(handle)
    assert nothing_is_left(tmp_path)
    assert launcher.poll(handle) == RunStatus(state=RunState.STOPPED)
    RehearsalLauncher().stop(handle)


def test_a_launching_process_that_is_killed_takes_its_rehearsal_along(box: None, tmp_path: Path) -> None:
    (tmp_path / "wish.json").write_text(rehearsed("speed=1 x2").model_dump_json())
    launching = subprocess.Popen([sys.executable, "-c", START, str(tmp_path)])
    try:
        wait_for(lambda: has_hosts(tmp_path, 2), tmp_path)
        launching.kill()
        launching.wait()
        wait_for(lambda: nothing_is_left(tmp_path), tmp_path)
    finally:
        launching.kill()
        RehearsalLauncher().stop(RunHandle(run_dir=tmp_path))


@pytest.mark.usefixtures("own_leftovers")
def test_a_conductor_that_is_killed_takes_its_hosts_along_and_its_network_is_found(box: None, tmp_path: Path) -> None:
    launcher = RehearsalLauncher()
    handle = launcher.start(rehearsed("speed=1 x2"), tmp_path, {})
    wait_for(lambda: has_hosts(tmp_path, 2), tmp_path)
    left = network_of(tmp_path)
    assert left
    conductor_of(tmp_path).kill()
    # A killed process has no command line any more some time before it is a zombie: on a busy machine both are seen.
    wait_for(lambda: not processes_of(tmp_path), tmp_path)
    # Its hosts end as if somebody had asked them to: those that train by then say so.
    wait_for(lambda: launcher.poll(handle).state in (RunState.FAILED, RunState.STOPPED), tmp_path)
    wait_for(lambda: left == [network.id for network in find_leftovers() if network.id in left], tmp_path)
    launcher.stop(handle)
    assert nothing_is_left(tmp_path)


def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(box: None, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="this run ends with the first that dies"):
        RehearsalLauncher().start(rehearsed("speed=1 x2", schedule="5s h1 returns"), tmp_path, {})
    assert list(tmp_path.iterdir()) == []


# What a rehearsed cluster listens with is on the addresses of its own hosts, inside their namespaces.


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_hosts_listen_on_their_own_addresses_alone(box: None, tmp_path: Path, restarts: int) -> None:
    """torchrun's hosts, whose store is behind a gate, and hosts that come and go, each with a store."""
    spec = rehearsed("speed=1,rate=1gbit x2").model_copy(update={"max_restarts": restarts})
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, tmp_path, {})
    addresses = {host_address(place) for place in range(2)}
    try:
        with watched(conductor_of(tmp_path).pid) as listeners:
            wait_for(lambda: events(tmp_path, "step") and addresses <= listeners.addresses, tmp_path)
    finally:
        launcher.stop(handle)
    assert not listeners.outside_of("127.", *addresses)
    assert nothing_is_left(tmp_path)
