"""What the audit steps of a run with three workers measure stands in its log, status, report and page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.reports.timeline import RunLog, audited
from hetopt.trainer.session import session

Loss = Callable[[Tensor, Tensor], Tensor]


def contrastive(rows: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


LOSSES: dict[str, Loss] = {"apart": functional.cross_entropy, "contrastive": contrastive}


def worker(rank: int, name: str, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 4, (96,)))
    workers = (WorkerSpec(host=f"h{n}", type="local", local_batch_size=n + 2) for n in range(3))
    spec = RunSpec(task="session", workers=tuple(workers), batch_policy="static", stop=StopRule(max_steps=1))
    with session(model, optimizer, spec=spec, folder=folder) as run:
        for x, y in run.loader(DataLoader(data, batch_size=12)):
            optimizer.zero_grad()
            run.backward(LOSSES[name](model(x), y))
            optimizer.step()


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_of_three_says_how_far_it_is_from_one_machine(name: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, (name, str(tmp_path)), nprocs=3, start_method="fork"
    )
    log = read_log(tmp_path / EVENTS_FILE)
    assert not log.unread.lines
    assert [event.step for event in log.events if event.event == "audited"] == [1, 2, 4, 8]
    sentence = audited(RunFold.of(log.events))
    lines = [line for event in log.events for line in RunLog(None).lines(event)]
    if name == "apart":
        assert sentence.startswith("Audited 4 times: shares differ from one machine by ")
        assert sentence.endswith(("e-8.", "e-7.", "e-6."))
        assert not any("shares differ" in line for line in lines)
    else:
        assert "% at step 1: the loss couples samples" in sentence
        assert any("shares differ from one machine" in line for line in lines)
