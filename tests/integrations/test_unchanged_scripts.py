"""Scripts of frameworks and of DDP itself, unchanged, on shares of 2:1: the steps that they take on equal shares."""

from __future__ import annotations

import json
import os
import socket
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from hetopt.core.events.log import EVENTS_FILE, read_log
from tests.disturbance import PATIENCE_S
from tests.forks import Forked

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "frameworks"
DDP = Path(__file__).with_name("ddp_script.py")


def start(folder: Path, way: str, script: Path, *arguments: str, ranks: int = 2, **more: str) -> list[tuple[int, str]]:
    """Run a script on workers, with more in their environment; each one's exit code, and what it wrote to stderr."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = ["-m", "tests.integrations.worker", str(folder), way, str(script), *arguments]
    with Forked(program, shared, REPOSITORY) as workers:
        said = workers.communicate(timeout=4 * PATIENCE_S)[1]
    assert workers.returncode == 0, said
    codes = json.loads((folder / "codes.json").read_text())
    return [(code, (folder / f"said-{rank}").read_text()) for rank, code in enumerate(codes)]


def trained(
    folder: Path, way: str, script: Path, *arguments: str, ranks: int = 2, **more: str
) -> tuple[list[Tensor], str]:
    outcomes = start(folder, way, script, *arguments, ranks=ranks, **more)
    assert not any(code for code, _ in outcomes), "".join(said for _, said in outcomes)
    return [torch.load(folder / f"{way}-{rank}.pt") for rank in range(ranks)], outcomes[0][1]


def samples(folder: Path) -> list[int]:
    started = next(event for event in read_log(folder / EVENTS_FILE) if event.event == "run_started")
    return [worker.local_batch_size for worker in started.workers]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("with_accelerate", ("--batch-size", "24")),
        ("with_lightning", ("--batch-size", "24")),
        ("with_transformers", ("--batch-size", "24", "--samples", "203", "--epochs", "2")),
    ],
)
def test_a_framework_takes_on_unequal_shares_the_steps_of_equal_ones(
    name: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip(name.removeprefix("with_"))
    steps = {}
    for way in ("plain", "shares"):
        output = () if name == "with_accelerate" else ("--output", str(tmp_path / f"{way}-output"))
        # Each steps once in two batches of its loader, which are the plan's batch.
        steps[way], _ = trained(
            tmp_path / way, way, EXAMPLES / f"{name}.py", *arguments, *output, SHARES="a:64,b:32", BATCHES="2"
        )
    assert samples(tmp_path / "shares") == [64, 32]
    assert torch.equal(*steps["shares"])
    assert torch.allclose(steps["shares"][0], steps["plain"][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["with_accelerate", "with_lightning", "with_transformers"])
def test_a_framework_takes_on_two_workers_as_many_steps_as_on_one(name: str, tmp_path: Path) -> None:
    """With the arguments that it was profiled with: each epoch is of all samples, in steps of the plan's batch."""
    pytest.importorskip(name.removeprefix("with_"))
    asked = ["--batch-size=24", "--epochs=2", f"--output={tmp_path}"][: 2 if name == "with_accelerate" else 3]
    [one], _ = trained(tmp_path / "one", "plain", EXAMPLES / f"{name}.py", *asked, ranks=1)
    two, _ = trained(tmp_path / "two", "shares", EXAMPLES / f"{name}.py", *asked, SHARES="a:32,b:16", BATCHES="2")
    assert torch.equal(two[0][:, -1], one[:, -1]), "by the same learning rates"


@cache
def plain(batches: str) -> Tensor:
    """Steps of the loop with DDP by itself, which are those of each way to run it that reads the same batches."""
    with TemporaryDirectory() as folder:
        return trained(Path(folder) / "plain", "plain", DDP, batches)[0][0]


@pytest.mark.parametrize(
    ("way", "shares", "words"),
    [
        ("usual", [32, 16], ""),
        ("compiled", [32, 16], ""),
        ("accumulates", [32, 16], ""),
        ("public_hook", [32, 16], ""),
        ("own_hook", [32, 16], "registers a communication hook of its own, which is kept"),
        ("no_rank", [24, 24], "keeps equal shares: nothing in its sampler is of one rank"),
    ],
)
def test_what_is_not_as_usual_is_said_and_runs_on(way: str, shares: list[int], words: str, tmp_path: Path) -> None:
    own, said = trained(tmp_path / "shares", "shares", DDP, way, BATCHES=str(1 + (way == "accumulates")))
    assert samples(tmp_path / "shares") == shares
    assert said.count("hetopt:") == bool(words)
    assert words in said
    assert torch.equal(*own)
    assert torch.allclose(own[0], plain("no_rank" if way == "no_rank" else "usual"), rtol=1e-4, atol=1e-6)


@cache
def last_loss(way: str) -> float:
    """The loss of the last step, as the log has it."""
    with TemporaryDirectory() as folder:
        trained(Path(folder) / "shares", "shares", DDP, way, BATCHES=str(1 + (way == "accumulates")))
        return next(event.loss for event in read_log(Path(folder) / "shares" / EVENTS_FILE) if event.event == "step")


@pytest.mark.parametrize("way", ["accumulates", "scaled", "sum"])
def test_the_loss_that_is_logged_is_that_whose_gradient_is_stepped_by(way: str) -> None:
    """In micro-batches, scaled against underflow, or divided by a count of the whole batch as a loss over tokens is."""
    assert last_loss(way) == pytest.approx(last_loss("usual"), rel=1e-6)


def test_a_sharded_model_is_refused_at_its_first_step(tmp_path: Path) -> None:
    outcomes = start(tmp_path / "shares", "shares", DDP, "sharded")
    assert all(code and "shards its model over the workers" in said for code, said in outcomes)
