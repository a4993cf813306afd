"""Real rehearsals: little clusters that train, change, lose hosts and are interrupted, and leave nothing behind.

A rehearsed cluster whose hosts die and return while the run goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetopt.backends.backend import RunHandle
from hetopt.backends.emulation.conductor import NETWORK_FILE, RehearsalLauncher, ask_for_change, check_change
from hetopt.backends.emulation.namespaces import find_leftovers, find_networks, host_address
from hetopt.backends.emulation.plan import parse_change, parse_changes, parse_hosts
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_folder import conditions_in
from hetopt.core.run_spec import Change, DeclaredTime, RunSpec, ScaledEmulation, StopRule, WorkerSpec
from hetopt.core.run_status import RunState, RunStatus
from tests.disturbance import CoreTime, note
from tests.face.conftest import until
from tests.launched import over, processes_of, start_elsewhere, wait_for
from tests.listeners import watched

TOY = Path(__file__).resolve().parent.parent / "trainer" / "toy_task.py"


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


def network_of(run_dir: Path) -> list[str]:
    built = run_dir / NETWORK_FILE
    return [id_ for id_ in find_networks() if built.exists() and built.read_text() == id_]


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
        wait_for(lambda: events(tmp_path, "step"), tmp_path)
        ask_for_change(tmp_path, parse_change("h0 speed=8", ["h0", "h1", "h2"]))
        status = over(launcher, tmp_path)
    finally:
        launcher.stop(handle)  # of a run that is over: no harm
    assert re.fullmatch(r"host h2 died at step 6\d, as scheduled", status.reason or "")
    [started] = events(tmp_path, "run_started")
    assert [worker["host"] for worker in started["workers"]] == ["h0", "h1", "h1", "h2"]  # ranked as described
    changed: dict[str, list[tuple[float, float, bool]]] = {"h0": [], "h1": [], "h2": []}
    for event in events(tmp_path, "condition_changed"):
        changed[event["host"]].append((event["speed"], event["rate_bits_per_s"], event["dies"]))
    # A change asked by hand falls before or after a scheduled one of step 20 or 30, as the machine is busy.
    assert changed["h0"][-1] == (8, 1e7, False)
    assert changed["h1"] == [(1, 1e8, False), (1, 1e7, False)]
    assert changed["h2"] == [(1, 1e7, False), (1, 1e7, True)]
    assert conditions_in(tmp_path)().speed_factors == {"h0": 2, "h1": 0.5}
    assert nothing_is_left(tmp_path)


def test_what_does_not_fit_slows_the_whole_miniature_and_the_run_finishes(box: None, tmp_path: Path) -> None:
    spec = rehearsed("speed=1,rate=100mbit,workers=2", declared=DeclaredTime(per_sample_s=0.001), steps=60)
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, tmp_path, {"TOY_SAMPLE_S": "0.004"})
    status = over(launcher, tmp_path)
    launcher.stop(handle)
    assert status == RunStatus(state=RunState.FINISHED)
    slowed = events(tmp_path, "miniature_slowed")
    assert slowed
    assert slowed[0]["factor"] > 4
    assert "does not fit" in slowed[0]["reason"]
    assert conditions_in(tmp_path)().slowdown == slowed[-1]["factor"]
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_a_conductor_that_is_asked_to_end_leaves_nothing(box: None, tmp_path: Path, number: int) -> None:
    """Its workers save what they have, and say so; before they train there is nothing to save."""
    launcher = RehearsalLauncher()
    launcher.start(rehearsed("speed=1 x2", steps=100_000), tmp_path, {})
    wait_for(lambda: events(tmp_path, "step"), tmp_path)
    assert network_of(tmp_path)
    os.kill(conductor_of(tmp_path).pid, number)
    wait_for(lambda: nothing_is_left(tmp_path), tmp_path)
    assert over(launcher, tmp_path).state == RunState.STOPPED
    assert events(tmp_path)[-1]["event"] == "training_finished"


def test_a_launching_process_that_is_killed_takes_its_rehearsal_along(box: None, tmp_path: Path) -> None:
    launching = start_elsewhere(RehearsalLauncher, rehearsed("speed=1 x2"), tmp_path)
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
    wait_for(lambda: set(left) <= set(find_leftovers()), tmp_path)
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


TASK = f"{Path(__file__).resolve().parents[2] / 'benchmarks' / '_toy.py'}:noise"
NAMES = ["h0", "h1", "h2"]


def spec(schedule: str, **changes: Any) -> RunSpec:
    worker = {"type": "spot", "local_batch_size": 32, "declared": {"fixed_s": 0.02, "per_sample_s": 0.001}}
    usual = {
        "task": TASK,
        "workers": [{"host": name, **worker} for name in NAMES],
        "stop": {"max_steps": 10**6},
        "batch_policy": "static",
        "evaluate_every_epochs": 1e5,
        "max_restarts": 5,
        "checkpoint_every_s": 2.0,
        "control_period_steps": 5,
        "exchange_timeout_s": 8.0,
        "miniature": {
            "hosts": [{"name": name} for name in NAMES],
            "changes": [json.loads(change.model_dump_json()) for change in parse_changes(schedule, NAMES)],
        },
    }
    return RunSpec.model_validate_json(json.dumps({**usual, **changes}))


@pytest.fixture(scope="module")
def run_dir(_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run: a host dies and returns, so does the first, then all die and one returns."""
    run_dir, begun = tmp_path_factory.mktemp("coming-and-going"), CoreTime.now()
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(spec("step 20 h1 dies\nstep 21 h1 returns"), run_dir, {})

    def starts(log: list[Event]) -> list[int]:
        return [len(start["workers"]) for start in told(log, "run_started")]

    def seen(what: Callable[[list[Event]], bool]) -> None:
        until(lambda: what(read_events(run_dir / EVENTS_FILE)), lambda: not launcher.poll(handle).state.is_over)

    try:
        seen(lambda log: any(1 in change["new"] for change in told(log, "workers_changed")))
        seen(lambda log: bool(told(log, "checkpoint_saved")))
        ask_for_change(run_dir, parse_change("h0 dies", NAMES))
        seen(lambda log: starts(log) == [3, 2, 3, 2])
        ask_for_change(run_dir, parse_change("h0 returns", NAMES))
        seen(lambda log: starts(log) == [3, 2, 3, 2, 3] and log[-1]["event"] == "step")
        began_s = told(read_events(run_dir / EVENTS_FILE), "training_started")[0]["time_s"]
        ask_for_change(run_dir, Change(host="h1", at_s=time.time() - began_s + 1.0, returns=True))
        ask_for_change(run_dir, parse_change("* dies", NAMES))
        seen(lambda log: log[-1]["event"] == "step" and len(log[-1]["local_batch_sizes"]) == 1)
    finally:
        launcher.stop(handle)
    assert launcher.poll(handle).state is RunState.STOPPED
    note(run_dir, begun)
    return run_dir


@pytest.fixture(scope="module")
def course(run_dir: Path) -> list[Event]:
    """The log of that run."""
    return read_events(run_dir / EVENTS_FILE)


def told(course: list[Event], kind: str) -> list[Event]:
    return [event for event in course if event["event"] == kind]


def test_a_host_dies_and_returns(course: list[Event]) -> None:
    lost, back, *_ = told(course, "workers_changed")
    assert (lost["workers"], lost["lost"], lost["from"]) == ([0, 2], [1], "memory")
    assert (back["workers"], back["new"], back["from"]) == ([0, 1, 2], [1], "memory")
    assert "left in the middle of an exchange" in lost["reason"]
    steps = [event for event in told(course, "step") if event["time_s"] < back["time_s"]]
    assert [event["step"] for event in steps] == sorted(event["step"] for event in steps), "nothing is done again"
    assert all(sum(event["local_batch_sizes"]) == 96 for event in told(course, "step"))


def test_without_the_first_host_all_start_again_from_a_checkpoint(course: list[Event]) -> None:
    """The others meet at it, and it has the log."""
    died_s = next(event["time_s"] for event in told(course, "condition_changed") if event["host"] == "h0")
    without, *_ = (start for start in told(course, "run_started") if start["time_s"] > died_s)
    assert [worker["host"] for worker in without["workers"]] == ["h1", "h2"]
    saved = [event["step"] for event in told(course, "checkpoint_saved") if event["time_s"] < without["time_s"]]
    assert without["resumed_step"] == max(saved)


def test_when_nobody_is_left_who_returns_begins_with_the_newest_checkpoint(course: list[Event]) -> None:
    last = told(course, "run_started")[-1]
    assert [worker["host"] for worker in last["workers"]] == ["h1"]
    saved = [event["step"] for event in told(course, "checkpoint_saved") if event["time_s"] < last["time_s"]]
    assert last["resumed_step"] == max(saved)


@pytest.mark.usefixtures("_possible")
def test_a_host_that_is_cut_off_stands_still_until_it_reaches_the_others_again(tmp_path: Path) -> None:
    """The others go on without it; it trains nothing of its own meanwhile."""
    launcher = RehearsalLauncher(grace_s=10.0)
    handle = launcher.start(spec("step 20 h1 cut"), tmp_path, {})

    def changes_until(workers: list[int]) -> list[Event]:
        def seen() -> list[Event]:
            return told(read_events(tmp_path / EVENTS_FILE), "workers_changed")

        until(
            lambda: workers in [change["workers"] for change in seen()], lambda: not launcher.poll(handle).state.is_over
        )
        return seen()

    try:
        (without,) = changes_until([0, 2])
        assert (without["lost"], without["from"]) == ([1], "memory")
        time.sleep(1.0)
        ask_for_change(tmp_path, parse_change("h1 heals", NAMES))
        # Who is slow to register (a busy machine) is left out of one generation, and asks for the next.
        _, *back = changes_until([0, 1, 2])
        assert all((change["new"], change["from"]) == ([], "memory") for change in back), "its worker is the same"
        time.sleep(1.0)
    finally:
        launcher.stop(handle)
    log = read_events(tmp_path / EVENTS_FILE)
    cut, healed = told(log, "condition_changed")
    assert (cut["cut"], healed["heals"]) == (True, True)
    assert without["time_s"] - cut["time_s"] < 60, "a quarter of an hour is what the kernel would wait"
    steps = [event["step"] for event in told(log, "step")]
    assert steps == sorted(set(steps)), "one line of training, and nothing is done again"
    assert {len(event["local_batch_sizes"]) for event in told(log, "step")} == {2, 3}


# What may happen to the hosts of a rehearsed script, whose workers start again with whoever is there.

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
TWO = ["h0", "h1"]
EPOCHS = 30


def spec_of_script(schedule: str, **changes: Any) -> RunSpec:
    worker = {"type": "spot", "local_batch_size": 16, "declared": {"fixed_s": 0.02, "per_sample_s": 0.001}}
    usual = {
        "task": "resumable.py",
        "script": [str(SCRIPTS / "resumable.py"), "--epochs", str(EPOCHS)],
        "workers": [{"host": name, **worker} for name in TWO],
        "stop": {"max_epochs": EPOCHS},
        "batch_policy": "static",
        "max_restarts": 1,
        "control_period_steps": 5,
        "miniature": {
            "hosts": [{"name": name} for name in TWO],
            "changes": [json.loads(change.model_dump_json()) for change in parse_changes(schedule, TWO)],
        },
    }
    return RunSpec.model_validate_json(json.dumps({**usual, **changes}))


def test_a_host_of_a_script_is_not_cut_off() -> None:
    with pytest.raises(BadInput, match="cannot be cut off for a while: its workers would wait for it"):
        check_change(spec_of_script(""), parse_change("h1 cut", TWO))


@pytest.mark.parametrize(
    ("of", "changes"), [(spec, ("h1 returns", "h1 notice", "h1 cut")), (spec_of_script, ("h1 returns", "h1 notice"))]
)
def test_a_run_that_cannot_do_without_a_host_takes_none_back(of: Callable[..., RunSpec], changes: tuple[str]) -> None:
    for change in changes:
        with pytest.raises(BadInput, match="this run ends with the first that dies"):
            check_change(of("", max_restarts=0), parse_change(change, TWO))
        check_change(of(""), parse_change(change, TWO))
