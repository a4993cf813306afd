"""Runs with faults: in virtual time by the hundred, and a few with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._faulty_runs import OUTCOME_FILE, RUNS_FILE
from benchmarks._simulated_run import Schedule, Simulation, check, undisturbed
from hetopt.core.events.log import Event, read_events
from tests.disturbance import PATIENCE_S
from tests.forks import all_end_well
from tests.thinned import few

from ..scenarios import toy_spec

STEPS = 40
# Seconds a sample: so that two checkpoints are there, or a worker is back, before the run ends, on a busy machine too.
LONG_ENOUGH = {"TOY_WAIT_S": "0.02"}


@pytest.mark.parametrize("first", few(2, range(0, 300, 50)))
def test_every_schedule_of_faults_ends_with_every_sample_trained_once(first: int) -> None:
    results = [check(seed) for seed in range(first, first + 50)]
    assert sum(result.generations > 1 for result in results) > 10, "nothing happens to them"


@pytest.mark.parametrize("seed", [945, 2159])
def test_what_ten_thousand_schedules_found_stays_mended(seed: int) -> None:
    """All die while the disk has had no room for three checkpoints; who writes is lost just when the next is due."""
    assert max(check(seed).redone) < 10


def test_a_simulated_run_is_the_same_each_time() -> None:
    one, other = (Simulation(Schedule.of(7), 7).run() for _ in range(2))
    assert one == other
    assert one.final[0] == undisturbed(Schedule.of(7).steps)


def run_spec(task: str = "plain", **changes: Any) -> dict[str, Any]:
    usual = {
        "shares": (5, 3, 4),
        "stop": {"max_steps": STEPS},
        "max_restarts": 5,
        "checkpoint_every_s": 0.3,
        "control_period_steps": 5,
        "exchange_timeout_s": 60.0,
    }
    return toy_spec(task, **{**usual, **changes})


RUNS: list[dict[str, Any]] = [
    {"name": "calm", "spec": run_spec(), "faults": []},
    {"name": "leader", "spec": run_spec(), "faults": [{"at_step": 15, "kind": "kill", "place": 0}]},
    {
        "name": "fewer",
        "spec": run_spec(),
        "faults": [{"at_step": 10, "kind": "leave", "place": 2}, {"at_step": 20, "kind": "return"}],
        "environment": LONG_ENOUGH,
    },
    {
        "name": "alone",
        "spec": run_spec(shares=(5, 7)),
        "faults": [{"at_step": 10, "kind": "leave", "place": 1}, {"at_step": 20, "kind": "return"}],
        "environment": LONG_ENOUGH,
    },
    {
        "name": "torn",
        "spec": run_spec(),
        "faults": [{"at_step": 25, "kind": "tear", "byte": 0.4}],
        "environment": LONG_ENOUGH,
    },
    {
        "name": "topk",
        "spec": run_spec(compression={"name": "topk", "ratio": 0.1}),
        "faults": [{"at_step": 15, "kind": "kill", "place": 1}],
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs left behind; one process starts all of them."""
    folder = tmp_path_factory.mktemp("faulty")
    slow = {"TOY_WAIT_S": "0.002", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    entries = [
        {
            **run,
            "within_s": PATIENCE_S / 2,
            "environment": {**slow, **run.get("environment", {}), "TOY_RECORD": str(folder / f"{run['name']}.samples")},
        }
        for run in RUNS
    ]
    (folder / RUNS_FILE).write_text(json.dumps(entries))
    all_end_well(["-m", "benchmarks._faulty_runs", str(folder)])
    return folder


def events(folder: Path, name: str, kind: str) -> list[Event]:
    return [event for event in read_events(folder / name / "events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize("name", [run["name"] for run in RUNS])
def test_every_run_ends_at_its_last_step(folder: Path, name: str) -> None:
    outcome = json.loads((folder / name / OUTCOME_FILE).read_text())
    assert outcome["ended"] == "training_finished"
    assert events(folder, name, "training_finished")[-1]["step"] == STEPS


@pytest.mark.parametrize("name", ["leader", "torn"])
def test_what_was_interrupted_ends_where_the_undisturbed_run_does_to_the_bit(folder: Path, name: str) -> None:
    ends = [events(folder, each, "training_finished")[-1]["parameters_sha256"] for each in ("calm", name)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("name", "place"), [("leader", 0), ("topk", 1)])
def test_survivors_go_on_from_memory(folder: Path, name: str, place: int) -> None:
    (lost,) = events(folder, name, "worker_lost")
    (changed,) = events(folder, name, "workers_changed")
    assert (lost["worker"], lost["host"]) == (place, "here")
    assert "SIGKILL" in lost["reason"]
    assert (changed["from"], changed["new"], changed["lost"]) == ("memory", [place], [])
    again = events(folder, name, "run_started")[-1]
    done = [event["step"] for event in events(folder, name, "step") if event["time_s"] < changed["time_s"]]
    assert again["resumed_step"] >= max(done), "nothing that was told is done again"


@pytest.mark.parametrize(("name", "workers"), [("fewer", 3), ("alone", 2)])
def test_the_others_share_the_batch_of_one_that_leaves(folder: Path, name: str, workers: int) -> None:
    first, *_, last = events(folder, name, "workers_changed")
    assert (first["workers"], first["lost"]) == (list(range(workers - 1)), [workers - 1])
    assert last["workers"] == list(range(workers))
    shares = [event["local_batch_sizes"] for event in events(folder, name, "step")]
    assert {len(each) for each in shares} == {workers - 1, workers}
    assert {sum(each) for each in shares} == {12}


def test_a_torn_checkpoint_is_named(folder: Path) -> None:
    skipped, *_ = events(folder, "torn", "checkpoint_skipped")
    assert "bytes instead of" in skipped["reason"]
    assert events(folder, "torn", "run_started")[-1]["resumed_step"] < skipped["step"]
