"""A DDP script, unchanged, on unequal shares: the steps of one process with the whole batch.

The noise that a run tells is that of its gradient, whatever the shares and however the script is made.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

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
from hetopt.core.run_spec import Compression
from hetopt.trainer.ddp.comm_hook import SUM, CommState, comm_hook
from hetopt.trainer.ddp.script import _weighing, unequal
from hetopt.trainer.script.batches import Audit
from hetopt.trainer.session import session
from tests.trainer_pieces.runs import run_of

from .cases.scripts import net, points

SAMPLES = 203
EPOCHS = 2
DENSE = Compression()


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


def accumulating(
    batch: int, ddp: Callable[[nn.Module], nn.Module], *, draws: bool = False, **options: Any
) -> nn.Module:
    model = net()
    wrapped: Any = ddp(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = points(SAMPLES)
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, **options), num_workers=1)
    rows = [part[:batch] for part in data.tensors]
    for number, (x, y) in enumerate(6 * [rows] if draws else epochs(loader)):
        if number % 3 < 2:
            with wrapped.no_sync() if hasattr(wrapped, "no_sync") else torch.enable_grad():
                (cross_entropy(wrapped(x), y) / 3).backward()
            continue
        (cross_entropy(wrapped(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def normalising(batch: int, ddp: Callable[[nn.Module], nn.Module], *, audit: Audit) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    wrapped: Any = ddp(model)
    wrapped.register_comm_hook(CommState(wrapped, audit=audit), comm_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = points(SAMPLES)
    for x, y in epochs(DataLoader(data, batch_size=batch, sampler=DistributedSampler(data))):
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return model


def peeking(batch: int, ddp: Callable[[nn.Module], nn.Module], **options: Any) -> nn.Module:
    model = net()
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    data = points(160)
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, **options))
    for _ in range(3):
        assert len(next(iter(loader))[0])  # as torch's tutorial prints the size of a batch
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return model


class Drawn(DistributedSampler[Any]):
    """As scripts write their own: seeded alike on all ranks, it draws its order from Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.sample(range(self.total_size), self.total_size)[self.rank :: self.num_replicas])


def drawing(batch: int, ddp: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Two loaders of unlike sizes, and augmentation that draws once a sample; returns what a worker read."""
    random.seed(0)
    model = nn.Linear(1, 1)
    wrapped, optimizer = ddp(model), torch.optim.SGD(model.parameters(), 0.0)
    sizes = ((160, batch), (40, batch // 4))
    loaders = [DataLoader(range(n), batch_size=size, sampler=Drawn(range(n))) for n, size in sizes]  # type: ignore[arg-type,var-annotated]
    read = []
    for rows, _ in (pair for _ in range(EPOCHS) for pair in zip(*loaders, strict=True)):
        wrapped(rows[:, None].float()).mean().backward()
        optimizer.step()
        read.append(rows)
        random.choices(range(2), k=len(rows))
    model.register_buffer("read", torch.cat(read))
    return model


SCRIPTS: dict[str, Callable[..., nn.Module]] = {
    "plain": plain,
    "accumulating": accumulating,
    "peeking": peeking,
    "drawing": drawing,
    "its own batches": partial(accumulating, draws=True),
    **{audit: partial(normalising, audit=audit) for audit in get_args(Audit)},
}


def worker(rank: int, name: str, shares: Sequence[int], compression: Compression, folder: str) -> None:
    batches = 3 if name == "accumulating" else 1
    plan = run_of(
        *(batches * share for share in shares),
        task="script",
        script=("train.py",),
        batches_per_step=batches,
        compression=compression,
        batch_policy="static",
    )
    store = dist.FileStore(f"{folder}/store", len(shares))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    with unequal(plan, Path(folder)) as run:
        model = SCRIPTS[name](sum(shares) // len(shares), DistributedDataParallel)
    assert run() is not None
    torch.save(model.state_dict(), f"{folder}/{name}-{rank}.pt")


def trained(
    name: str, folder: Path, shares: Sequence[int] = (24, 8), compression: Compression = DENSE
) -> list[dict[str, Tensor]]:
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, (name, shares, compression, str(folder)), nprocs=len(shares), start_method="fork"
    )
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(len(shares))]


def steps_told(folder: Path) -> set[tuple[int, ...]]:
    steps = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "step"]
    return {tuple(event["local_batch_sizes"]) for event in steps}


def whole(name: str, workers: int = 2, batch: int = 32) -> dict[str, Tensor]:
    """Trained by one process, with the samples that all ranks would read."""
    sampler: Any = DistributedSampler
    kept = sampler.__iter__, sampler.__len__

    def every(self: DistributedSampler[Any]) -> Iterator[int]:
        each = [list(kept[0](of_rank(self, rank))) for rank in range(workers)]
        for start in range(0, len(each[0]), batch // workers):
            for samples in each:
                yield from samples[start : start + batch // workers]

    def of_rank(self: DistributedSampler[Any], rank: int) -> DistributedSampler[Any]:
        made = DistributedSampler(self.dataset, num_replicas=workers, rank=rank)
        made.set_epoch(self.epoch)
        return made

    try:
        sampler.__iter__, sampler.__len__ = every, lambda self: workers * kept[1](self)
        return SCRIPTS[name](batch, lambda model: model, num_replicas=workers, rank=0).state_dict()
    finally:
        sampler.__iter__, sampler.__len__ = kept


@pytest.mark.parametrize("name", ["plain", "accumulating"])
def test_shares_of_three_to_one_end_with_the_parameters_of_one_process(name: str, tmp_path: Path) -> None:
    first, second = trained(name, tmp_path)
    for key, value in whole(name).items():
        assert torch.equal(first[key], second[key])
        assert float((first[key] - value).norm()) <= 1e-6 * float(value.norm())
    assert (tmp_path / "model.safetensors").exists()
    assert steps_told(tmp_path) == {(72, 24) if name == "accumulating" else (24, 8)}


@pytest.mark.parametrize(("name", "steps"), [("plain", [1, 2, 4, 8, 16]), ("accumulating", [1, 2, 4])])
def test_audited_steps_are_those_of_one_process(name: str, steps: list[int], tmp_path: Path) -> None:
    """Also where a step is of several batches, all of which the leader computes whole."""
    each = trained(name, tmp_path, (14, 5, 5))
    for key, value in whole(name, 3, 24).items():
        assert all(torch.equal(each[0][key], other[key]) for other in each)
        assert float((each[0][key] - value).norm()) <= 1e-6 * float(value.norm())
    audits = [event for event in read_events(tmp_path / EVENTS_FILE) if event["event"].startswith("audit")]
    assert [event["step"] for event in audits] == steps
    assert all(event["event"] == "audited" and event["distance"] < 1e-5 for event in audits)


def test_audits_of_batch_norm_say_once_that_it_is_as_under_ddp_and_stop_only_if_told_so(tmp_path: Path) -> None:
    told = {}
    for audit in get_args(Audit):
        (tmp_path / audit).mkdir()
        words = "at step 1, and audit_tolerance is 0"
        stops = pytest.raises(Exception, match=words) if audit == "stop" else nullcontext()
        with stops:
            trained(audit, tmp_path / audit, (14, 5, 5))
        events = list(read_events(tmp_path / audit / EVENTS_FILE))
        told[audit] = [event["event"] for event in events if event["event"].startswith("audit")]
    assert told == {"warn": ["audited", "audit_differs", *["audited"] * 4], "stop": ["audited"], "off": []}


def test_epochs_are_passes_over_the_data_however_often_a_loop_begins(tmp_path: Path) -> None:
    trained("peeking", tmp_path)
    end = list(read_events(tmp_path / EVENTS_FILE))[-1]
    assert (end["event"], end["step"], end["epoch"]) == ("session_finished", 15, 3.0)


def test_loaders_of_two_sizes_read_every_sample_once_an_epoch_whatever_else_draws(tmp_path: Path) -> None:
    read = torch.cat([state["read"] for state in trained("drawing", tmp_path)])
    assert torch.equal(torch.bincount(read), torch.full((160,), EPOCHS))


def test_batches_that_hetopt_does_not_cut_and_that_are_not_the_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"The plan steps by 32 samples, and train\.py by 96"):
        trained("its own batches", tmp_path)


@pytest.mark.parametrize("divides", [True, False])
def test_losses_of_a_trainer_are_sums_only_where_the_model_divides_them_by_all_items(divides: bool) -> None:
    told, weights = list[Any](), torch.ones(3, requires_grad=True)
    options = SimpleNamespace(average_tokens_across_devices=True)
    trainer = SimpleNamespace(model_accepts_loss_kwargs=True, compute_loss_func=None, args=options)
    run: Any = SimpleNamespace(divides=None, weigh=told.append)
    for _ in range(2):
        loss = lambda _, num_items_in_batch: weights.sum() / (num_items_in_batch if divides else 3)  # noqa: E731
        _weighing([run], loss, trainer, num_items_in_batch=torch.tensor(6)).backward()
    assert told == 2 * [SUM if divides else None]


def test_everything_that_top_k_keeps_in_whole_is_the_dense_sum(tmp_path: Path) -> None:
    everything = Compression(name="topk", ratio=1.0, memory="error_feedback")
    first, second = trained("plain", tmp_path, compression=everything)
    for key, value in whole("plain").items():
        assert torch.equal(first[key], second[key])
        assert float((first[key] - value).norm()) <= 1e-5 * float(value.norm())


def test_the_log_tells_what_compressed_buckets_sent(tmp_path: Path) -> None:
    trained("plain", tmp_path, (14, 5, 5), Compression(name="int8"))
    exchanges = [event["exchange"] for event in read_events(tmp_path / EVENTS_FILE) if event["event"] == "step"]
    assert exchanges
    assert all(0 < exchange["sent_bytes"] < 0.6 * exchange["dense_bytes"] for exchange in exchanges)


NOISE_SAMPLES, NOISE_EPOCHS, SHARES = 512, 8, (24, 8)


def standing_still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def ddp(folder: Path, plan: Any) -> None:
    with unequal(plan, folder):
        model = DistributedDataParallel(net())
        optimizer, data = standing_still(model), points(NOISE_SAMPLES)
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
        loader = DataLoader(data, batch_size=sum(SHARES) // len(SHARES), sampler=sampler)
        for epoch in range(NOISE_EPOCHS):
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
        batches = run.loader(DataLoader(points(NOISE_SAMPLES), batch_size=sum(SHARES), shuffle=True))
        for _ in range(NOISE_EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                run.backward(cross_entropy(model(x), y))
                optimizer.step()


KINDS: dict[str, Callable[[Path, Any], None]] = {
    "ddp": ddp,
    "session": of_session,
    "accumulating": partial(of_session, accumulate=2),
}


def worker_of_kind(rank: int, kind: str, shares: Sequence[int], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(shares)), "LOCAL_RANK": str(rank)}
    plan = run_of(*shares, task="script", script=("t.py",), batch_policy="static", control_period_steps=2)
    store = dist.FileStore(f"{folder}/store", len(shares))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    KINDS[kind](Path(folder), plan)


def moments() -> tuple[float, float]:
    """Squared norm of the mean gradient over all samples, and summed variance of one sample's."""
    model, data = net(), points(NOISE_SAMPLES)
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
        worker_of_kind, (kind, SHARES, str(tmp_path)), nprocs=len(SHARES), start_method="fork"
    )
    told = [event["noise"] for event in read_events(tmp_path / EVENTS_FILE) if event.get("noise")]
    assert len(told) > NOISE_EPOCHS * NOISE_SAMPLES // sum(SHARES) // 5
    assert steps_told(tmp_path) == {(48, 16) if kind == "accumulating" else SHARES}
    square, variance = moments()
    for name, expected in (("gradient_variance", variance), ("gradient_square", square)):
        assert sum(noise[name] for noise in told) / len(told) == pytest.approx(expected, rel=0.25)
