"""A plan is a contract: whatever runs a `RunSpec` applies each field of it, or refuses it in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hetopt
from hetopt.backends.ec2.renter.backend import _as_machines_read_it
from hetopt.backends.emulation.plan import parse_hosts as described_hosts, rehearse
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.on_this_machine import _mapped, spec_on
from hetopt.backends.prediction import predict_on_local
from hetopt.backends.ssh.checking import Inventory
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EventLog, read_events
from hetopt.core.hosts import parse_hosts
from hetopt.core.run_folder import write_spec
from hetopt.core.run_rules import check_for_script, left_to_script
from hetopt.core.run_spec import DATA_PLACE, RunSpec
from hetopt.optimizer.plan import Plan
from hetopt.trainer import worker
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.host.agent import torchrun_arguments
from hetopt.trainer.loop import Material
from hetopt.trainer.session import begin, session
from hetopt.trainer.training import make_feed
from tests.forks import all_end_well

from .run_fields import FIELDS, Hosted, Refused, Told
from .scenarios import TOY, run_crew, toy_spec

ROOT = Path(__file__).resolve().parents[2]
SHARES = (36, 20, 8)
"""Of four times the batch that the toy task is tuned at."""
USUAL = {"stop": {"max_steps": 16}}
LOGGED = [name for name, field in FIELDS.items() if isinstance(field.task, str)]
SCRIPTED = [name for name, field in FIELDS.items() if isinstance(field.script, str)]


def specs(name: str, workers: int, **always: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs that differ in one field."""
    field = FIELDS[name]
    shares = (*SHARES[: workers - 1], sum(SHARES[workers - 1 :]))
    beside, value = {**USUAL, **field.beside, **always}, field.value
    if name == "workers":
        return toy_spec(shares=shares, **beside), toy_spec(
            shares=(*value[: workers - 1], sum(value[workers - 1 :])), **beside
        )
    if name == "stream":
        value = {"rates": value["rates"][:workers]}
    return toy_spec(shares=shares, **beside), toy_spec(shares=shares, **{**beside, name: value})


def seen(folder: Path) -> dict[str, object]:
    """What a run's log says, but for times."""
    events = read_events(folder / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    return {
        "parameters": [event["parameters_sha256"] for event in events if event.get("parameters_sha256")],
        "shares": steps[0]["local_batch_sizes"],
        "ways": [
            [step["exchange"].get(key) for key in ("way", "ratio", "slowdown_coefficient")]
            for step in steps
            if step.get("exchange")
        ],
        "evaluations": [event["step"] for event in events if event["event"] == "evaluated"],
        "saves": len([event for event in events if event["event"] == "checkpoint_saved"]),
        "network": [event["event"] for event in events if event["event"] == "network_measured"],
        "periods": [step["steps"] for step in steps],
        "averages": [bool(step.get("sync")) for step in steps],
    }


Runs = dict[str, list[Path]]


def each_once(folder: Path, pairs: Mapping[str, Sequence[dict[str, Any]]]) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Return where the two runs of every field are, and the run in each place: fields share the usual one."""
    texts = dict.fromkeys(json.dumps(spec) for pair in pairs.values() for spec in pair)
    names = {text: f"run-{number}" for number, text in enumerate(texts)}
    places = {name: [folder / names[json.dumps(spec)] for spec in pair] for name, pair in pairs.items()}
    places["compression"].append(folder / "again")
    return places, {**{name: json.loads(text) for text, name in names.items()}, "again": pairs["compression"][0]}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of a toy task on three workers, two for each field, and the first once more."""
    folder = tmp_path_factory.mktemp("tasks")
    places, runs = each_once(folder, {name: specs(name, 3) for name in LOGGED})
    run_crew(folder, [{"name": name, "spec": spec} for name, spec in runs.items()], [])
    return places


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of a script on two workers, likewise, and one of another batch than the script's."""
    planned = {"script": ["train.py", "--batch-size", "64"]}
    folder = tmp_path_factory.mktemp("scripts")
    places, runs = each_once(folder, {name: specs(name, 2, **planned) for name in SCRIPTED})
    for name, spec in {**runs, "larger": toy_spec(shares=(80, 48), **USUAL, **planned)}.items():
        (folder / name).mkdir()
        (folder / name / "spec.json").write_text(json.dumps(spec))
    program = str(Path(__file__).with_name("script_fields_program.py"))
    all_end_well(*([program, str(rank), str(folder)] for rank in range(2)))
    return places


def test_every_field_is_decided() -> None:
    assert FIELDS.keys() == RunSpec.model_fields.keys(), "decide what tasks and scripts do with a new field"
    for field in FIELDS.values():
        for decided in (field.task, field.script):
            if isinstance(decided, Hosted):
                path, _, function = decided.test.partition("::")
                assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LOGGED)
def test_a_task_trains_as_planned(name: str, tasks: Runs) -> None:
    usual, other = map(seen, tasks[name][:2])
    assert usual[FIELDS[name].task] != other[FIELDS[name].task]


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_script_trains_as_planned(name: str, scripts: Runs) -> None:
    usual, other = map(seen, scripts[name][:2])
    assert usual[FIELDS[name].script] != other[FIELDS[name].script]


def test_runs_that_are_planned_alike_are_alike(tasks: Runs, scripts: Runs) -> None:
    """Guards the comparison itself."""
    for runs in (tasks, scripts):
        first, _, again = map(seen, runs["compression"])
        for key in ("parameters", "shares", "ways", "evaluations", "averages"):
            assert first[key] == again[key]


def test_a_script_of_another_batch_than_planned_is_refused_before_a_step(scripts: Runs) -> None:
    refusals = sorted(scripts["compression"][0].parent.glob("*/refused-*"))
    assert [(path.parent.name, path.name) for path in refusals] == [("larger", f"refused-{rank}") for rank in range(2)]
    assert all("steps by 128 samples, and train.py by 64" in path.read_text() for path in refusals)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if isinstance(field.script, Refused)])
def test_what_a_script_cannot_apply_is_refused_in_a_sentence(name: str) -> None:
    usual, other = (RunSpec.model_validate(spec) for spec in specs(name, 1, script=["train.py"]))
    decided, model = FIELDS[name].script, torch.nn.Linear(1, 1)
    assert isinstance(decided, Refused)
    if not FIELDS[name].beside:
        check_for_script(usual)
    with pytest.raises(BadInput, match=decided.sentence) as raised:
        session(model, torch.optim.SGD(model.parameters(), lr=0.1), spec=other)
    assert raised.value.hint


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if isinstance(field.script, Told)])
def test_what_is_left_to_a_script_is_told(name: str) -> None:
    usual, other = (RunSpec.model_validate(spec) for spec in specs(name, 1, script=["train.py"]))
    decided = FIELDS[name].script
    assert isinstance(decided, Told)
    assert decided.sentence not in left_to_script(usual)
    assert decided.sentence in left_to_script(other)


def test_what_starts_workers_follows_the_run(tmp_path: Path) -> None:
    def program(**changes: Any) -> list[str]:
        return torchrun_arguments(RunSpec.model_validate(toy_spec(shares=SHARES, **changes)), tmp_path)

    assert "hetopt.trainer.worker" in program()
    assert "hetopt.profiler.worker" in program(probe=FIELDS["probe"].value)
    assert "--max-restarts=3" in program(max_restarts=3)
    code = tmp_path / "own.py"
    code.write_text(
        "from dataclasses import replace\n"
        f"import sys\nsys.path.insert(0, {str(TOY.parent)!r})\nimport toy_task\n"
        "def own():\n    return replace(toy_task.plain(), name='own', data=lambda folder: folder)\n"
    )
    material = Material.load(RunSpec.model_validate({**toy_spec(), "task": f"{code}:own", "data_dir": "/data"}))
    assert (material.task.name, str(material.data)) == ("own", "/data")
    told = RunSpec.model_validate(toy_spec(script=["train.py", f"--data={DATA_PLACE}"], data_dir="/data"))
    assert told.script_command == ("train.py", "--data=/data")


def test_a_task_reads_its_samples_as_planned(tmp_path: Path) -> None:
    for changes, expected in (
        ({}, (None, False)),
        ({"micro_batch_size": 2}, (2, False)),
        ({"prefetch": "on"}, (None, True)),
        ({"prefetch": "off"}, (None, False)),
    ):
        spec = RunSpec.model_validate(toy_spec(shares=(16,), **changes))
        context = WorkerContext(
            spec=spec,
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
            run_dir=tmp_path,
            events=EventLog(None),
            stop_requested=lambda: False,
        )
        feed = make_feed(context, Material.load(spec).data.train)
        assert (feed._reader.unit, feed._ahead is not None) == expected


def test_workers_wait_for_each_other_as_long_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def refuse(*arguments: object) -> None:
        raise Asked(arguments[-1])

    spec = RunSpec.model_validate(toy_spec(shares=(16,), exchange_timeout_s=17.0))
    monkeypatch.setattr(worker, "_process_group", refuse)
    monkeypatch.setattr(begin, "join", refuse)
    write_spec(tmp_path, spec)
    with pytest.raises(Asked, match=r"17\.0"):
        worker._work(tmp_path, spec, worker.Place(rank=0, local_rank=0, world_size=1), None, worker.training)
    model = torch.nn.Linear(1, 1)
    for own, waits_s in ((None, "17"), (3.0, "3")):
        with pytest.raises(Asked, match=waits_s):
            session(model, torch.optim.SGD(model.parameters(), lr=0.1), spec=spec, timeout_s=own)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two workers on one type."""
    recorded = ROOT / "tests" / "recorded" / "digits.json"
    return hetopt.recommend(recorded, budget_usd=2, epochs=20, types="c7i.large", max_workers=2, trials=0)


BUNDLE = Bundle(data=b"", task="in the bundle", script=("in-the-bundle.py",))
MAPPED: Mapping[str, set[str]] = {
    "local": {"workers"},
    "rehearsal": {"workers", "miniature"},
    "ssh": {"workers", "task", "script"},
    "ec2": {"task", "script", "data_dir"},
}
"""What each backend says itself, of its machines or of where the code is on them; all else it hands on."""


def mapped(plan: Plan, on: str) -> RunSpec:
    """The run as a backend's workers read it."""
    if on == "local":
        return predict_on_local(plan, (1.0, 2.0)).run
    if on == "rehearsal":
        return rehearse(plan, 2, described_hosts("speed=1; speed=1")).run
    if on == "ec2":
        return _as_machines_read_it(plan.run, BUNDLE, "s3://bucket/data")
    run, hosts = _mapped(plan, parse_hosts("a@box1,a@box2"))
    there = tuple(host.model_copy(update={"private": f"10.0.0.{number}"}) for number, host in enumerate(hosts, start=1))
    return spec_on(run.run, Inventory(hosts=there, bundle_sha256=BUNDLE.sha256), BUNDLE, None)


@pytest.mark.parametrize("on", MAPPED)
def test_backends_hand_on_every_field_that_is_not_theirs(on: str, plan: Plan) -> None:
    for name in RunSpec.model_fields:
        # A stream is put into the run once its workers are known.
        names = [name, *FIELDS[name].beside] if name not in ("workers", "miniature", "stream") else []
        other = RunSpec.model_validate(specs(name, 2)[1]) if names else plan.run
        planned = plan.model_copy(
            update={"run": plan.run.model_copy(update={key: getattr(other, key) for key in names})}
        )
        run = RunSpec.model_validate_json(mapped(planned, on).model_dump_json())
        if name not in MAPPED[on]:
            assert getattr(run, name) == getattr(planned.run, name), name
        assert run.global_batch_size == plan.run.global_batch_size
        if on in ("ssh", "ec2"):
            assert (run.task, run.script) == (BUNDLE.task, BUNDLE.script)
