"""Scripts are profiled in the world that they run in by themselves: their terminal, their place, batches of any type.

What fails by itself is told as the script's own; what fails only while it is watched, as hetopt's fault.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetopt.api.profiling_script import profile_script
from hetopt.core.errors import RunFailed
from hetopt.core.interruption import Reporter
from hetopt.core.profile import Profile
from tests.face.conftest import on_a_terminal

HEAD = """import os, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def step(x, y):
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    opt.step()
"""
LOOP = """
for epoch in range(1000):
    for x, y in loader:
        step(x, y)
"""
LOADER = "loader = DataLoader(data, batch_size=32, shuffle=True)\n"

PLACE_MEANS_DDP = """
if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("nccl")
"""
FOR_TORCHRUN = """
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
init_process_group("gloo")
assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"]) == 1
model = DistributedDataParallel(model)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
"""
PENALTY = """
def step(x, y):
    opt.zero_grad()
    x.requires_grad_(True)
    out = model(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    ((out - y).square().mean() + slope.square().mean()).backward()
    opt.step()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, opt, loader = accelerator.prepare(model, opt, loader)
"""
FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
model, opt = fabric.setup(model, opt)
loader = fabric.setup_dataloaders(loader)
"""
STREAM_OF_OBJECTS = """
from collections import UserDict
from dataclasses import dataclass
@dataclass
class Pair:
    name: str
    inner: UserDict
class Rows(IterableDataset):
    def __iter__(self):
        yield from (data[i] for i in range(512))
def collate(rows):
    xs, ys = zip(*rows)
    return Pair("a name", UserDict(x=(torch.stack(xs), 1), y=torch.stack(ys)))
while True:
    for pair in DataLoader(Rows(), batch_size=32, collate_fn=collate):
        step(pair.inner["x"][0], pair.inner["y"])
"""
BY_NEXT = """
batches = iter(loader)
while True:
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        continue
    step(x, y)
"""
BY_HAND = """
while True:
    step(*data[torch.randint(0, 512, (32,))])
"""


def profiled(folder: Path, text: str, dataset_size: int | None = None) -> tuple[Profile, str]:
    """Profile a script of a text alone; the profile, and what was told beside it."""
    path = folder / "train.py"
    path.write_text(text)
    notes: list[str] = []
    profile = profile_script(
        path,
        dataset_size=dataset_size,
        workers=1,
        accelerators=0,
        time_budget_s=0.5,
        seed=0,
        machine_type="local",
        reporter=Reporter(note=notes.append),
    )
    return profile, " ".join(notes)


def sizes(profile: Profile) -> list[int]:
    return [point.local_batch_size for point in profile.devices[0].step_times]


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        pytest.param(LOADER + PLACE_MEANS_DDP + LOOP, "", id="a place among workers means DDP"),
        pytest.param(FOR_TORCHRUN + LOOP, "", id="written for torchrun"),
        pytest.param(LOADER + PENALTY + LOOP, "", id="gradients of inputs"),
        pytest.param(LOADER + ACCELERATE + LOOP, "accelerate", id="Accelerate"),
        pytest.param(LOADER + FABRIC + LOOP, "lightning", id="Fabric", marks=pytest.mark.slow),
        pytest.param(STREAM_OF_OBJECTS, "", id="objects"),
        pytest.param(LOADER + BY_NEXT, "", id="next", marks=pytest.mark.slow),
        pytest.param(BY_HAND, "", id="no loader"),
    ],
)
def test_what_runs_by_itself_is_measured_at_its_own_batch_size(text: str, needs: str, tmp_path: Path) -> None:
    if needs:
        pytest.importorskip(needs)
    profile, told = profiled(tmp_path, HEAD + text, 512)
    assert profile.job.batch_size == 32
    assert 32 in sizes(profile)
    assert (len(sizes(profile)) > 1) == (text != BY_HAND)
    assert profile.gain
    assert "fault" not in told


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("torch.zeros(2) @ torch.zeros(3)\n", r"train\.py, line 10: RuntimeError: "),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--foo'])\n", "unrecognized arguments: --foo"),
        ("raise ValueError('\\x1b[1mmine\\x1b[0m')\n", r"train\.py, line 10: ValueError: mine"),
        ("print(os.environ['WORLD_SIZE'])\nraise ValueError('mine')\n", "KeyError: 'WORLD_SIZE'; .*ValueError: mine"),
    ],
)
def test_what_fails_by_itself_is_told_as_the_scripts_own(end: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=f"The script fails by itself, not watched by hetopt: .*{said}"):
        profiled(tmp_path, HEAD + end)


def test_what_fails_where_it_is_watched_is_a_fault_of_hetopts_and_its_steps_are_timed(tmp_path: Path) -> None:
    unwatched = 'if DataLoader.__iter__.__module__.startswith("hetopt"):\n    raise TypeError("not mine")\n'
    profile, told = profiled(tmp_path, HEAD + unwatched + LOADER + LOOP)
    assert "It runs by itself, and fails where hetopt watches it, which is a fault of hetopt: " in told
    assert (profile.job.batch_size, profile.job.dataset_size, profile.job.parameters) == (32, 512, 145)
    assert sizes(profile) == [32]
    assert not profile.noise


def test_a_script_of_one_batch_size_is_measured_at_that_one(tmp_path: Path) -> None:
    profile, told = profiled(tmp_path, HEAD + LOADER + LOOP.replace("step(x, y)", "step(x.reshape(32, 16), y)"))
    assert "It is measured with batches of its own size alone: " in told
    assert sizes(profile) == [32]
    assert profile.gain


def test_a_script_has_the_terminal_that_the_person_has(tmp_path: Path) -> None:
    text = f"""import os
rows, columns = os.popen("stty size").read().split()
open({str(tmp_path / "seen")!r}, "w").write(f"{{rows}} {{columns}}")
raise ValueError("enough")
"""
    (tmp_path / "train.py").write_text(text)
    typed = ("profile", "--workers", 1, "--", "train.py")
    said = on_a_terminal(
        *typed, environment=os.environ, folder=tmp_path, columns=97, code=RunFailed.exit_code, forks=True
    )
    assert (tmp_path / "seen").read_text() == "24 97", said
    assert "line 4: ValueError: enough" in " ".join(said.split())
