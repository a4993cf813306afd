"""A task whose model the devices of a machine share takes the steps of one process, in unequal shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from hetopt.api.changes import synchronized
from hetopt.api.options import Changes
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.sharding import block_facts, blocks_of
from tests.integrations.sharded_script import Language

from .scenarios import Crew, run_crew, toy_spec

TASKS = Path(__file__).with_name("sharded_tasks.py")
HOSTS, SHARES, STEPS = ("a", "a", "b", "b"), (12, 12, 4, 4), 6


def spec(task: str, *, shares: tuple[int, ...] = SHARES, hosts: tuple[str, ...] = HOSTS, **changes: Any) -> Any:
    made = toy_spec(shares=shares, **{"stop": {"max_steps": STEPS}, "control_period_steps": 3, **changes})
    made["task"] = f"{TASKS}:{task}"
    for worker, host in zip(made["workers"], hosts, strict=True):
        worker["host"] = host
    return made


LAWFUL = ("transformer", "experts", "adapters", "recomputed")
TOPK = {"compression": {"name": "topk", "ratio": 0.25}}
HALF = {"stop": {"max_steps": STEPS // 2}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "averaged": ("transformer", {"sync": {"name": "local-sgd"}}, "in every step, which local-sgd leaves out"),
    "steered": ("transformer", {"ratio_policy": "auto"}, "is not steered"),
    "by shape": ("transformer", {"compression": {"name": "powersgd"}}, "powersgd works on whole matrices"),
    "partitioned": ("transformer", {"partition": {"name": "shards"}}, "read one stream of samples"),
    "kept whole": ("kept_whole", {}, "Whole keeps kept of whole parameters"),
    "lone": ("lone", {}, "no block that occurs twice"),
}
RUNS: dict[str, Any] = {
    **{task: spec(task) for task in LAWFUL},
    **{name: spec(task, **more) for name, (task, more, _) in REFUSED.items()},
    "normalised": spec("normalised"),
    "normalised whole": spec("normalised", shard="none"),
    "micro": spec("transformer", max_local_batch_size=(5, None, None, None)),
    "fits": spec("fitting"),
    "overridden": spec("fitting", shard="full"),
    "int8": spec("transformer", compression={"name": "int8"}),
    "topk": spec("transformer", **TOPK),
    "adam": spec("adam"),
    **{name: spec("adam", **HALF) for name in ("here", "on one machine", "on whole ones")},
    "here again": spec("adam"),
    "held back": spec("transformer", **TOPK, **HALF),
}
ALONE = {task: spec(task, shares=(32,), hosts=("a",)) for task in (*LAWFUL, "adam")}
ELSEWHERE = {
    "on one machine": spec("adam", shares=(24, 8), hosts=("a", "a")),
    "on whole ones": spec("adam", shares=(24, 8), hosts=("a", "b")),
    "held back": spec("transformer", shares=(24, 8), hosts=("a", "a"), **TOPK),
}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """Two devices of each of two machines; then two devices, of one machine or two, go on with some of the runs."""
    folder = tmp_path_factory.mktemp("sharded")
    for runs, workers in ((RUNS, 4), (ELSEWHERE, 2)):
        (folder / "store").unlink(missing_ok=True)
        run_crew(folder, [{"name": name.removesuffix(" again"), "spec": runs[name]} for name in runs], [], workers)
    return Crew(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    return run_crew(
        tmp_path_factory.mktemp("alone"), [{"name": name, "spec": each} for name, each in ALONE.items()], [], 1
    )


def model(crew: Crew, name: str) -> dict[str, Tensor]:
    crew.finished(name)
    return load_file(crew.folder / name / "model.safetensors")


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("task", [*LAWFUL, "adam"])
def test_devices_that_share_a_model_take_the_steps_of_one_process(task: str, crew: Crew, alone: Crew) -> None:
    assert apart(model(crew, task), model(alone, task)) < 1e-6
    metrics = [each.finished(task)["metrics"]["loss"] for each in (crew, alone)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "other"),
    [("micro", "transformer"), ("fits", "transformer"), ("normalised", "normalised whole")],
    ids=["micro-batches of unequal number", "whole where that fits", "statistics as of whole models"],
)
def test_how_a_model_is_computed_changes_nothing(name: str, other: str, crew: Crew) -> None:
    assert apart(model(crew, name), model(crew, other)) < 1e-6


def test_a_run_decides_what_devices_share(crew: Crew) -> None:
    sent = [crew.events(name, "run_started")[0]["gradient_bytes"] for name in ("fits", "overridden")]
    assert 0.4 < sent[1] / sent[0] < 0.6
    assert apart(model(crew, "overridden"), model(crew, "transformer")) == 0


@pytest.mark.parametrize("compressed", ["int8", "topk"])
def test_counterparts_exchange_compressed(compressed: str, crew: Crew) -> None:
    """Rounding and selections follow the layout of shards, so that only dense sums are those of whole models."""
    assert 0 < apart(model(crew, compressed), model(crew, "transformer")) < 0.2


@pytest.mark.parametrize(("name", "most"), [("here", 0.0), ("on one machine", 1e-6), ("on whole ones", 1e-6)])
def test_a_run_goes_on_with_other_devices(name: str, most: float, crew: Crew) -> None:
    assert crew.events(name, "run_started")[1]["resumed_step"] == STEPS // 2
    assert apart(model(crew, name), model(crew, "adam")) <= most


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("held back", "lies in parts on 4 devices of a sharded model; now there are 2"),
        *((n, r[2]) for n, r in REFUSED.items()),
    ],
)
def test_what_does_not_go_with_shards_is_refused(name: str, sentence: str, crew: Crew) -> None:
    last = crew.events(name)[-1]
    assert last["event"] == "run_failed"
    assert sentence in last["reason"]
    assert last["hint"]


def test_blocks_are_the_largest_class_that_repeats() -> None:
    made = Language("experts")
    assert blocks_of(made) == list(made.blocks)
    assert blocks_of(made, nn.MultiheadAttention) == [block.attention for block in made.blocks]
    assert blocks_of(nested := nn.Sequential(nn.Sequential(made), nn.Sequential(made)), nn.Sequential) == [*nested]
    with pytest.raises(BadInput, match="no block of class Conv2d"):
        blocks_of(made, nn.Conv2d)
    facts = block_facts(made)
    assert facts["blocks"] == len(made.blocks)
    assert 0.4 < facts["block_share"] < 0.5
    assert block_facts(nn.Linear(2, 2)) == {}


def test_a_launch_says_what_is_shared() -> None:
    run = RunSpec.model_validate(spec("transformer"))
    assert synchronized(Changes(shard="grads"), run).shard == "grads"
    with pytest.raises(BadInput, match="local-sgd leaves out"):
        synchronized(Changes(shard="full", sync="local-sgd(4)"), run)
