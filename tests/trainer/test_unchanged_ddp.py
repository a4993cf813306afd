"""A DDP script, unchanged, on unequal shares: the steps of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.ddp.script import unequal
from hetopt.trainer.script.plan import SessionPlan
from tests.trainer_pieces.runs import run_of

from .cases.scripts import net, points

SAMPLES = 203
EPOCHS = 2


def epochs(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def plain(batch: int, ddp: Callable[[nn.Module], nn.Module], **options: Any) -> nn.Module:
    model = net()
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    data = points(SAMPLES)
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, **options))
    for x, y in epochs(loader):
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return model


def accumulating(batch: int, ddp: Callable[[nn.Module], nn.Module], **options: Any) -> nn.Module:
    model = net()
    wrapped: Any = ddp(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = points(SAMPLES)
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, **options), num_workers=1)
    for number, (x, y) in enumerate(epochs(loader)):
        if number % 3 < 2:
            with wrapped.no_sync() if hasattr(wrapped, "no_sync") else torch.enable_grad():
                (cross_entropy(wrapped(x), y) / 3).backward()
            continue
        (cross_entropy(wrapped(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


SCRIPTS = {"plain": plain, "accumulating": accumulating}


def spec(compression: Compression) -> RunSpec:
    return run_of(24, 8, task="script", script=("train.py",), compression=compression, batch_policy="static")


def worker(rank: int, name: str, compression: Compression, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with unequal(SessionPlan(spec=spec(compression)), Path(folder)) as run:
        model = SCRIPTS[name](16, DistributedDataParallel)
    assert run() is not None
    torch.save(model.state_dict(), f"{folder}/{name}-{rank}.pt")


def trained(name: str, folder: Path, compression: Compression) -> list[dict[str, Tensor]]:
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, (name, compression, str(folder)), nprocs=2, start_method="fork"
    )
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


def whole(name: str) -> dict[str, Tensor]:
    """Trained by one process, with the samples that both ranks would read."""
    sampler: Any = DistributedSampler
    kept = sampler.__iter__, sampler.__len__

    def both(self: DistributedSampler[Any]) -> Iterator[int]:
        each = [list(kept[0](of_rank(self, rank))) for rank in range(2)]
        for start in range(0, len(each[0]), 16):
            yield from [*each[0][start : start + 16], *each[1][start : start + 16]]

    def of_rank(self: DistributedSampler[Any], rank: int) -> DistributedSampler[Any]:
        made = DistributedSampler(self.dataset, num_replicas=2, rank=rank)
        made.set_epoch(self.epoch)
        return made

    try:
        sampler.__iter__, sampler.__len__ = both, lambda self: 2 * kept[1](self)
        return SCRIPTS[name](32, lambda model: model, num_replicas=2, rank=0).state_dict()
    finally:
        sampler.__iter__, sampler.__len__ = kept


@pytest.mark.parametrize("name", SCRIPTS)
def test_shares_of_three_to_one_end_with_the_parameters_of_one_process(name: str, tmp_path: Path) -> None:
    first, second = trained(name, tmp_path, Compression())
    for key, value in whole(name).items():
        assert torch.equal(first[key], second[key])
        assert float((first[key] - value).norm()) <= 1e-6 * float(value.norm())
    assert (tmp_path / "model.safetensors").exists()


def test_everything_that_top_k_keeps_in_whole_is_the_dense_sum(tmp_path: Path) -> None:
    first, second = trained("plain", tmp_path, Compression(name="topk", ratio=1.0, memory="error_feedback"))
    for key, value in whole("plain").items():
        assert torch.equal(first[key], second[key])
        assert float((first[key] - value).norm()) <= 1e-5 * float(value.norm())
