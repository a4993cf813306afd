"""A script that is killed and started again ends, bit by bit, where it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import read_events
from hetopt.trainer.session import session
from tests.forks import all_end_well
from tests.thinned import few, running

from .resume_program import CASES, EPOCHS, STEPS

FEW = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """What became of the scripts, whole, and killed and resumed."""
    folder = tmp_path_factory.mktemp("resume")
    all_end_well(["-m", "tests.trainer.resume_program", str(folder), *running(pytestconfig, FEW, CASES)])
    return folder


@pytest.mark.parametrize("name", few(FEW, CASES))
def test_a_killed_script_ends_where_it_would_have(name: str, folder: Path) -> None:
    case = CASES[name]
    for rank in range(case.workers):
        assert not [path.read_text() for path in (folder / name).glob("*.txt")]
        assert not (folder / name / f"killed-{rank}.pt").exists()
        whole, resumed = (torch.load(folder / name / f"{label}-{rank}.pt") for label in ("whole", "resumed"))
        left = len(resumed["losses"])
        assert EPOCHS * STEPS - case.killed_at <= left < EPOCHS * STEPS, "it went on in the middle"
        assert resumed["losses"] == whole["losses"][-left:]
        assert torch.equal(resumed["state"], whole["state"])
        assert all(resumed[key] == whole[key] for key in ("rates", "scale", "epochs", "drawn"))
    events = read_events(folder / name / "cut" / "events.jsonl")
    begun = [event["resumed_step"] for event in events if event["event"] == "run_started"]
    assert begun == [0, EPOCHS * STEPS - left]


def test_one_worker_goes_on_with_what_two_have_left(folder: Path) -> None:
    """What they held back is its own now, and the rest of the epoch is all that it reads of it."""
    alone, together = (torch.load(folder / "held back" / f"{label}-0.pt") for label in ("fewer", "resumed"))
    assert len(alone["losses"]) == len(together["losses"])
    assert (alone["rates"], alone["epochs"]) == (together["rates"], together["epochs"])
    assert bool(torch.isfinite(alone["state"]).all())
    assert not torch.equal(alone["state"], together["state"])


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)


def test_what_cannot_be_saved_or_resumed_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with session(model, optimizer, folder=tmp_path) as run:
        batches = run.loader(loader())
        with pytest.raises(BadInput, match="has best of type float"):
            run.resume({"schedule": schedule, "best": 0.5})  # type: ignore[dict-item]  # what is to be refused
        assert run.resume() == 0
        for x, y in batches:
            with pytest.raises(RunFailed, match="in the middle of step"):
                run.checkpoint({"schedule": schedule})
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            run.checkpoint({"schedule": schedule})
    with session(model, optimizer, folder=tmp_path) as run:
        run.loader(loader())
        with pytest.raises(BadInput, match="has schedule as `extra`"):
            run.resume()
    wider = nn.Linear(3, 1)
    with session(wider, torch.optim.SGD(wider.parameters(), lr=0.1), folder=tmp_path) as run:
        run.loader(loader())
        with pytest.raises(BadInput, match="does not fit the script's model"):
            run.resume({"schedule": schedule})
