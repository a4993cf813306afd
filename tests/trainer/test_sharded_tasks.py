"""A task whose model the devices of a machine share takes the steps of one process, in unequal shares."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from hetopt.api.changes import synchronized
from hetopt.api.options import Changes
from hetopt.backends.processes import LocalLauncher
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState
from hetopt.trainer.sharding import block_facts, blocks_of
from tests.integrations.sharded_script import Language
from tests.launched import over, wait_for, worker_processes

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
    "lone": ("lone", {}, "no block that it repeats"),
    "tied": ("tied", {}, "blocks.1.inner.weight is in several blocks"),
    "outside": ("outside", {}, "mixed torch.Tensor and DTensor"),
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


def killed(folder: Path, moments: list[int], draw: random.Random) -> list[Event]:
    """The log of a run of two devices of each of two machines, of which one is killed at these steps."""
    folder.mkdir()
    more = {
        "stop": {"max_steps": 60},
        "checkpoint_every_s": 0.1,
        "control_period_steps": 2,
        "max_restarts": len(moments),
    }
    launcher, log = LocalLauncher(), folder / "events.jsonl"
    handle = launcher.start(RunSpec.model_validate(spec("adam", shard="full", **more)), folder, {})

    def trains(start: int, step: int) -> bool:
        events = [event for event in read_events(log) if event["event"] in ("run_started", "step")]
        begun = sum(event["event"] == "run_started" for event in events)
        return begun == start and events[-1].get("step", 0) >= step

    try:
        for start, moment in enumerate(moments, start=1):
            wait_for(partial(trains, start, moment), folder)
            time.sleep(draw.random() / 10)  # somewhere in a step
            for device in [worker_processes(folder, rank)[-1] for rank in (2, 3)]:
                with suppress(psutil.NoSuchProcess):  # ended with the other
                    device.kill()
        assert over(launcher, folder).state is RunState.FINISHED
    finally:
        launcher.stop(handle)
    return read_events(log)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_machine_that_is_killed_at_random_moments_changes_no_bit(kills: int, tmp_path: Path) -> None:
    """All start again from the newest checkpoint, and so nothing is lost or learned from twice."""
    draw = random.Random(kills)
    calm = killed(tmp_path / "calm", [], draw)
    disturbed = killed(tmp_path / "disturbed", sorted(draw.randint(2, 30) for _ in range(kills)), draw)
    saved = {event["step"] for event in disturbed if event["event"] == "checkpoint_saved"}
    assert {event["resumed_step"] for event in disturbed if event["event"] == "run_started"} <= {0, *saved}
    assert disturbed[-1]["parameters_sha256"] == calm[-1]["parameters_sha256"]


def test_blocks_are_what_a_models_lists_repeat() -> None:
    made = Language("experts")
    assert blocks_of(made) == list(made.blocks)
    words = {"vocab_size": 30_000, "hidden_size": 48, "num_hidden_layers": 3}
    with torch.device("meta"):  # whose outputs are larger than all layers
        decoder = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(intermediate_size=64, num_attention_heads=4, **words)
        )
        encoder = transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=64, **words))
        both = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2, d_model=16, d_ff=32))
    assert blocks_of(decoder) == list(decoder.model.layers)
    assert blocks_of(encoder) == list(encoder.bert.encoder.layer)
    assert blocks_of(both) == [*both.encoder.block, *both.decoder.block]
    stages = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2))
    assert [type(block) for block in blocks_of(nn.Sequential(stages, nn.Linear(2, 1)))] == [nn.Linear] * 4
    pair = nn.Module()
    pair.one, pair.other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert blocks_of(pair) == [pair.one, pair.other], "a model without lists"
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
