"""A script's workers are killed at random moments; each run ends, bit by bit, where the undisturbed one does.

What a script does wrong on some of its workers is one sentence with its line, and nobody waits for nothing.

The workers are forked from a process that has imported torch, so that a case costs what its script does.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from benchmarks._ports import own_port
from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import LocalLauncher
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from tests.disturbance import PATIENCE_S
from tests.face.conftest import until
from tests.forks import server
from tests.launched import worker_processes

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
                worker_processes(run_dir, draw.randint(0, 1))[0].kill()  # as the kernel does where memory runs out
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


HEAD = """import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hetopt import session
rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.ones(96, 4)), batch_size=8)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
"""
STEP = """        opt.zero_grad()
        run.backward(model(x).square().mean())
        opt.step()
"""
CLOSURE = """        def closure():
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        opt.step(closure)
"""
LOOP = "with session(model, opt) as run:\n    for number, (x,) in enumerate(run.loader(loader)):\n"
BARE = "run = session(model, opt)\nif True:\n    for number, (x,) in enumerate(run.loader(loader)):\n"


def ran(folder: Path, text: str, batches: int = 1) -> tuple[list[int | None], list[str]]:
    """Exit codes of two workers of a script, and why it failed, as the log has it.

    As torchrun does, a worker that fails ends the other, a second later.
    """
    script = folder / "train.py"
    script.write_text(text)
    workers = tuple(WorkerSpec(host=f"h{n}", type="local", local_batch_size=4 * batches, threads=1) for n in range(2))
    write_spec(
        folder,
        RunSpec(
            task="train.py",
            script=(str(script),),
            workers=workers,
            batches_per_step=batches,
            stop=StopRule(max_steps=12),
        ),
    )
    address, port = own_port()
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    processes = []
    for rank in range(2):
        environment = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), "DISPLAY": ":0"}
        with (folder / f"said-{rank}").open("w") as said:
            command = ["-m", "hetopt.trainer.worker", str(folder)]
            processes.append(server().start(command, environment=environment, stdout=said))
    end_s = time.monotonic() + PATIENCE_S
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end_s:
        if any(codes):
            end_s = min(end_s, time.monotonic() + 1.0)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.wait()
    path = folder / EVENTS_FILE
    events = read_events(path) if path.exists() else []
    return [process.returncode for process in processes], [
        str(one["reason"]) for one in events if one["event"] == "run_failed"
    ]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        pytest.param(
            HEAD + LOOP + "        if rank == 1 and number == 3:\n            sys.exit()\n" + STEP,
            6,
            r"train\.py, line \d+: worker 1 ended its session at step 4 .* while worker 0",
            id="exits early",
        ),
        pytest.param(
            HEAD + BARE + "        if rank == 1 and number == 3:\n            break\n" + STEP,
            6,
            "worker 1 ended its session at step 4 .* while worker 0",
            id="leaves a loop without a with",
        ),
        pytest.param(
            HEAD + "if rank == 1:\n    sys.exit()\n" + LOOP + STEP,
            6,
            r"worker 1, \S*train\.py, line 9: the script ended here without a step of DistributedDataParallel",
            id="exits before the session",
        ),
        pytest.param(
            HEAD + LOOP + "        if rank == 1 and number == 3:\n            raise ValueError('no')\n" + STEP,
            6,
            r"^worker 1, \S*train\.py, line 11: ValueError: no$",
            id="fails on one",
        ),
        pytest.param(
            HEAD + "name = input('which? ') if rank == 1 else ''\n" + LOOP + STEP,
            6,
            r"^worker 1, \S*train\.py, line 8: EOFError: EOF when reading a line$",
            id="asks",
        ),
        pytest.param(
            "import os\nraise RuntimeError('no display: ' + os.environ.get('DISPLAY', 'unset'))\n",
            6,
            r"train\.py, line 2: RuntimeError: no display: unset$",
            id="display",
        ),
        pytest.param(
            HEAD + "open('/dev/full', 'w').write('x' * 9999)\n" + LOOP + STEP,
            6,
            r"^worker \d, \S*train\.py, line 8: OSError: \[Errno 28\] No space left on device$",
            id="a full disk of its own",
        ),
        pytest.param(
            HEAD + LOOP + STEP + "sys.exit(3)\n",
            3,
            r"train\.py, line 13: the script exits here with code 3",
            id="its own exit code",
        ),
        pytest.param(
            HEAD + LOOP.replace("run.loader(loader)", "loader") + STEP,
            2,
            r"train\.py, line 11: A gradient came before any batch of this session's loader",
            id="refused by the session",
        ),
    ],
)
def test_it_is_named_with_worker_and_line(text: str, code: int, said: str, tmp_path: Path) -> None:
    codes, reasons = ran(tmp_path, text)
    assert code in codes
    assert re.search(said, reasons[0]), reasons


@pytest.mark.parametrize(
    ("text", "batches", "diverges"),
    [
        pytest.param(BARE + STEP, 1, False, id="without a with"),
        pytest.param(
            2 * (LOOP.replace("run.loader", "kept := run.loader") + STEP)
            + "assert sum(len(x) for (x,) in kept) == 96\n",
            1,
            False,
            id="trains twice, evaluates",
        ),
        pytest.param(
            LOOP
            + STEP.replace("opt.z", "if number % 3 == 0: opt.z")
            .replace("opt.s", "if number % 3 == 2: opt.s")
            .replace("square().mean()", "mean() * 0 + 1 / 3"),
            3,
            False,
            id="accumulates as in its profile",
        ),
        pytest.param(LOOP + STEP.replace("mean()", "mean() / (1 - rank)"), 1, True, id="a mean over nothing on one"),
        pytest.param(
            "opt = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)\n" + LOOP + CLOSURE,
            1,
            False,
            id="a closure",
        ),
    ],
)
def test_a_script_ends_as_it_would_alone(text: str, batches: int, diverges: bool, tmp_path: Path) -> None:
    assert ran(tmp_path, HEAD + text, batches) == ([0, 0], [])
    events = read_events(tmp_path / EVENTS_FILE)
    assert all(
        min(event["compute_s"]) > 0 and (batches == 1 or event["loss"] == pytest.approx(1))
        for event in events
        if event["event"] == "step"
    )
    kinds = [event["event"] for event in events]
    assert kinds[-2:] == ["session_finished", "training_finished"]
    assert kinds.count("loss_diverged") == diverges
    assert events[-1]["step"] == 12 / batches
    assert (tmp_path / "model.safetensors").is_file()
