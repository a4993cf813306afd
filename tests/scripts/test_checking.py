"""`hetopt check` of a script: how far unequal shares are from one machine, measured and not guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hetopt.api.exactness import DIFFERS, check_script, first_check
from hetopt.core.errors import RunFailed
from hetopt.trainer.failure import Lines, explain
from hetopt.trainer.worker import surroundings
from tests.face.conftest import hetopt

__all__ = ["hetopt"]

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
"""

DDP = (
    HEAD
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
for x, y in loader:
    opt.zero_grad()
    out = model(x)
    LOSS.backward()
    opt.step()
"""
)

SESSION = (
    HEAD
    + """
from hetopt import session

opt = torch.optim.SGD(model.parameters(), lr=0.1)
with session(model, opt) as run:
    for x, y in run.loader(DataLoader(data, batch_size=32, shuffle=True)):
        opt.zero_grad()
        out = model(x)
        run.backward(LOSS)
        opt.step()
"""
)

APART = "nn.functional.cross_entropy(out, y)"
COUPLED = "nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))"


PLACED = "import os\nrank = int(os.environ['LOCAL_RANK'])\n" + DDP
"""It does not run without torchrun, as most of those that the world has."""


INSISTING = DDP.replace("model = Dist", "assert dist.get_world_size() == 2\nmodel = Dist")
"""It does not run on one worker, as Lightning's with `devices=2`."""


DIVIDING = DDP.replace("batch_size=16", "batch_size=32 // dist.get_world_size()")
"""Its batch is that of all workers together."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("form", "is_ddp"),
    [(DDP, True), (PLACED, True), (INSISTING, True), (DIVIDING, True), (SESSION, False)],
    ids=["ddp", "placed", "insisting", "dividing", "session"],
)
def test_shares_are_held_against_one_machine(form: str, is_ddp: bool, script: Path) -> None:
    """The rate of the DDP script is that of two workers, so that one machine's later steps are others."""
    script.write_text(form.replace("LOSS", APART))
    found = check_script(script)
    assert found.is_ddp == is_ddp
    assert len(found.shares) == (1 if is_ddp and form != INSISTING else 3)
    assert not found.cause
    assert max(*found.shares, *found.equal) < 1e-5
    if form not in (DDP, SESSION):
        return
    script.write_text(form.replace("LOSS", COUPLED))
    found = check_script(script)
    assert found.step == 1
    assert found.equal[0] > DIFFERS
    assert "the loss couples samples" in str(found)


@pytest.mark.parametrize(
    ("schedule", "rates", "said"),
    [
        (
            "StepLR(opt, 500 // int(__import__('os').environ.get('WORLD_SIZE', 1)))",
            (1e-3, 1e-5),
            "the learning rate is 1e-05 in shares and 0.001 else",
        ),
        ("ReduceLROnPlateau(opt)", None, ""),
    ],
    ids=["of other steps", "follows a metric"],
)
def test_a_schedule_is_followed_without_training_so_long(
    schedule: str, rates: tuple[float, float] | None, said: str, script: Path
) -> None:
    """One that follows a metric is left alone."""
    schedule = f"schedule = torch.optim.lr_scheduler.{schedule}\n"
    script.write_text(SESSION.replace("LOSS", APART).replace("with session", f"{schedule}with session"))
    found = check_script(script)
    assert found.step is None
    assert found.rates == pytest.approx(rates)
    assert bool(found.cause) == (rates is not None)
    assert said in str(found)


def test_a_script_that_changed_is_checked_once_and_a_failure_is_said(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    script.write_text("raise LookupError('no data here')\n")
    checked, is_new = first_check(script, ())
    assert checked.sentence.startswith("How far shares are from one machine is not known: ")
    assert "LookupError: no data here" in checked.sentence
    assert (is_new, checked.needs_equal_shares) == (True, False)
    assert first_check(script, ()) == (checked, False)
    assert first_check(script, ("--other",))[1]


REMEMBERED = """
state = 0.0
for x, y in loader:
    opt.zero_grad()
    out = model(x) + state
    state = out.detach()
    nn.functional.cross_entropy(out, y).backward()
    opt.step()
"""
"""Hidden states are of the rows of the batch before, however large that was."""


SCRIPT = """
import os
import torch
from torch import nn
from hetopt import session

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), 8)
with session(model, opt) as run:
    for x in run.loader(loader):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LookupError("only where there are two")
        run.backward(model(x).sum(1).mean())
        opt.step()
        opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        (DDP.replace("LOSS", "(out[:, 0] - torch.arange(16)).square().mean()"), True),
        (DDP[: DDP.index("for x, y")] + REMEMBERED, True),
        (SCRIPT.replace('raise LookupError("only where there are two")', "opt.param_groups[0]['lr'] /= len(x)"), False),
    ],
    ids=["labels of its own", "hidden states", "a rate by the samples of a part"],
)
def test_a_script_that_runs_as_it_should_in_equal_shares_alone_is_known(
    text: str, needs: bool, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    script.write_text(text)
    checked, _ = first_check(script, ())
    assert checked.needs_equal_shares == needs
    assert first_check(script, ()) == (checked, False)


def test_a_script_for_one_process_is_sent_to_convert(script: Path, hetopt: Callable[..., Any]) -> None:
    script.write_text(
        HEAD
        + "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + "for x, y in DataLoader(data, 16):\n    model(x).square().mean().backward()\n    opt.step()\n"
    )
    answer = hetopt("check", "--", script)
    assert answer.code == 2
    assert "uses neither DistributedDataParallel nor a session" in " ".join(answer.err.split())


# What is said of a script that failed is what it failed with, and the line of it.


def test_a_failure_on_two_workers_is_told_by_what_was_raised(script: Path) -> None:
    script.write_text(SCRIPT)
    with pytest.raises(RunFailed, match=r"train\.py failed: LookupError: only where there are two:"):
        check_script(script)


class Pictures(Dataset[torch.Tensor]):
    """Has none that can be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise LookupError(f"picture {index} is\ntorn: {'x' * 500} {'y' * 9}")

    def __len__(self) -> int:
        return 4


def test_an_error_of_a_reader_process_is_told_by_its_own_line_and_words() -> None:
    """Torch's loader passes it on as text, which begins with its own words and ends with those of the error."""
    with pytest.raises(LookupError) as caught:
        next(iter(DataLoader(Pictures(), num_workers=1, multiprocessing_context="spawn")))
    assert str(caught.value).startswith("Caught LookupError in DataLoader worker process")
    code = Pictures.__getitem__.__code__
    told = explain(caught.value, "worker 1", Lines(__file__))
    assert told.message == f"worker 1, {__file__}, line {code.co_firstlineno + 1}: LookupError: picture 0 is torn: ..."


# What a script finds around it on a machine: one device, and a local rank that goes with it.


def test_of_a_script_that_draws_its_batches_itself_shares_stay_equal(script: Path) -> None:
    drawn = "for x, y in (data[torch.randint(256, (16,))] for _ in range(4)):"
    script.write_text(DDP.replace("for x, y in loader:", drawn).replace("LOSS", COUPLED))
    found = check_script(script)
    assert not found.cause
    assert str(found) == "The script draws its batches itself: shares stay equal, as under DDP."


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({"LOCAL_RANK": "1"}, "cpu", {"CUDA_VISIBLE_DEVICES": ""}),
        ({"LOCAL_RANK": "1"}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "6", "LOCAL_RANK": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1a", "LOCAL_RANK": "0"}),
    ],
)
def test_a_worker_sees_its_own_device_as_the_first(
    environment: dict[str, str], device: str, expected: dict[str, str]
) -> None:
    """`cuda`, `cuda:0` and the device of its local rank are the same one; without one its local rank is torchrun's."""
    assert surroundings(environment, device) == {**expected, "MPLBACKEND": "Agg"}
