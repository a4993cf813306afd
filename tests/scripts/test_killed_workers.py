"""A script's workers are killed at random moments; each run ends, bit by bit, where the undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import LocalLauncher
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from tests.face.conftest import until

SCRIPT = str(Path(__file__).with_name("resumable.py"))
DDP = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 4))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler, path, first = DistributedSampler(data), sys.argv[1], 0
loader = DataLoader(data, 16, sampler=sampler)
if os.path.exists(path):
    first, weights, rates = torch.load(path)
    model.load_state_dict(weights)
    opt.load_state_dict(rates)
for epoch in range(first, 6):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        time.sleep(0.02)
    if dist.get_rank() == 0:
        torch.save((epoch + 1, model.state_dict(), opt.state_dict()), path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()
"""
EPOCHS, EPOCH_STEPS = 6, 10
MOMENTS = 20


def spec() -> RunSpec:
    """Unequal shares that stay, and the gradient as it is."""
    return RunSpec(
        task="resumable.py",
        script=(SCRIPT, "--epochs", str(EPOCHS), "--wait", "0.02"),
        workers=tuple(
            WorkerSpec(host=host, type="local", local_batch_size=share, threads=1)
            for host, share in (("h0", 20), ("h1", 12))
        ),
        batch_policy="static",
        control_period_steps=5,
        stop=StopRule(max_epochs=EPOCHS),
        max_restarts=1,
    )


def log(run_dir: Path, name: str) -> list[Event]:
    path = run_dir / EVENTS_FILE
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def until_step(launcher: LocalLauncher, handle: RunHandle, step: int) -> None:
    """A step is logged, or the run is over."""
    until(
        lambda: (
            launcher.poll(handle).state.is_over or any(event["step"] >= step for event in log(handle.run_dir, "step"))
        )
    )


def kill(run_dir: Path, rank: int) -> None:
    """The worker, as the kernel does where memory runs out."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "hetopt.trainer.worker" in line and str(run_dir) in line and process.environ()["RANK"] == str(rank):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no worker {rank}")


def trained(run_dir: Path, draw: random.Random | None, script: tuple[str, ...] = (), *, ends: bool = False) -> str:
    """Return the hash of the parameters; a worker is killed on the way, at a moment that is drawn, or all ends."""
    launcher, run = LocalLauncher(), spec()
    handle = launcher.start(run.model_copy(update={"script": script or run.script}), run_dir, {})
    try:
        if draw is not None:
            until_step(launcher, handle, draw.randint(0, (EPOCHS - 1) * EPOCH_STEPS))
            time.sleep(draw.uniform(0.0, 0.1))
            if ends:
                os.kill(json.loads((run_dir / "process.json").read_text())["pid"], signal.SIGKILL)
                until(lambda: launcher.poll(handle).state.is_over)
                launcher.start(run.model_copy(update={"script": script or run.script}), run_dir, {})
            else:
                kill(run_dir, draw.randint(0, 1))
        until_step(launcher, handle, 10**9)
        assert launcher.poll(handle).state is RunState.FINISHED, launcher.poll(handle).reason
    finally:
        launcher.stop(handle)
    assert len(log(run_dir, "run_started")) == 1 + (draw is not None)
    assert script or log(run_dir, "training_finished")[-1]["step"] == EPOCHS * EPOCH_STEPS
    return str(log(run_dir, "session_finished")[-1]["parameters_sha256"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("undisturbed"), None)


@pytest.mark.parametrize(
    "moment", [*range(2), *(pytest.param(later, marks=pytest.mark.slow) for later in range(2, MOMENTS))]
)
def test_a_killed_worker_changes_nothing(moment: int, undisturbed: str, tmp_path: Path) -> None:
    assert trained(tmp_path, random.Random(moment)) == undisturbed


def test_a_ddp_script_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DDP)
    hashes = []
    for name, draw in (("undisturbed", None), ("killed", random.Random(0)), ("ended", random.Random(1))):
        (tmp_path / name).mkdir()
        hashes.append(trained(tmp_path / name, draw, (str(path), str(tmp_path / f"{name}.pt")), ends=name == "ended"))
    assert hashes[0] == hashes[1] == hashes[2]
