"""The noise that a run tells is that of its gradient, whatever the shares and however the script is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.trainer.ddp.script import unequal
from hetopt.trainer.script.batches import SessionPlan
from hetopt.trainer.session import session
from tests.trainer_pieces.runs import run_of

from .cases.scripts import net, points

SAMPLES, EPOCHS, SHARES = 512, 8, (24, 8)


def standing_still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def ddp(folder: Path, plan: Any) -> None:
    with unequal(SessionPlan(spec=plan), folder):
        model = DistributedDataParallel(net())
        optimizer, data = standing_still(model), points(SAMPLES)
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
        loader = DataLoader(data, batch_size=sum(SHARES) // len(SHARES), sampler=sampler)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()


def of_session(folder: Path, plan: Any, *, accumulate: int = 1) -> None:
    model = net()
    optimizer = standing_still(model)
    with session(model, optimizer, spec=plan, folder=folder, accumulate=accumulate) as run:
        torch.manual_seed(1)
        batches = run.loader(DataLoader(points(SAMPLES), batch_size=sum(SHARES), shuffle=True))
        for _ in range(EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                run.backward(cross_entropy(model(x), y))
                optimizer.step()


KINDS: dict[str, Callable[[Path, Any], None]] = {
    "ddp": ddp,
    "session": of_session,
    "accumulating": partial(of_session, accumulate=2),
}


def worker(rank: int, kind: str, shares: Sequence[int], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(shares)), "LOCAL_RANK": str(rank)}
    plan = run_of(*shares, task="script", script=("t.py",), batch_policy="static", control_period_steps=2)
    store = dist.FileStore(f"{folder}/store", len(shares))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    KINDS[kind](Path(folder), plan)


def moments() -> tuple[float, float]:
    """Squared norm of the mean gradient over all samples, and summed variance of one sample's."""
    model, data = net(), points(SAMPLES)
    each = []
    for x, y in data:
        model.zero_grad()
        cross_entropy(model(x[None]), y[None]).backward()
        each.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).double())
    gradients = torch.stack(each)
    return float(gradients.mean(0).square().sum()), float(gradients.var(0).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_that_a_run_tells_is_that_of_single_samples(kind: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, (kind, SHARES, str(tmp_path)), nprocs=len(SHARES), start_method="fork"
    )
    told = [event["noise"] for event in read_events(tmp_path / EVENTS_FILE) if event.get("noise")]
    assert len(told) > EPOCHS * SAMPLES // sum(SHARES) // 5
    square, variance = moments()
    for name, expected in (("gradient_variance", variance), ("gradient_square", square)):
        assert sum(noise[name] for noise in told) / len(told) == pytest.approx(expected, rel=0.25)
