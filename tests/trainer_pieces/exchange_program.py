"""One worker of a real process group: runs the exchange in several situations and saves what it holds afterwards.

python exchange_program.py RANK WORLD_SIZE FOLDER DEVICE
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import BucketExchange, Exchange
from tests.trainer.joining import join, leave

SAMPLES, FEATURES, CLASSES = 203, 12, 5
DENSE, SPARSE = Compression(), Compression(name="topk", ratio=0.02)
LENGTHS = (1, 2, 5, 1000, 100_003)
STEPS = 8
BUCKETED = ("identity", "topk", "dgc", "qsgd_maxnorm", "bf16")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Separable classes with noise; the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    return centres[targets] + 0.5 * torch.randn(SAMPLES, FEATURES, generator=generator), targets


def larger_network() -> nn.Module:
    """One that DistributedDataParallel cuts into several buckets: its first takes a megabyte."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(FEATURES, 500), nn.Tanh(), nn.Linear(500, 700), nn.Linear(700, CLASSES))


def vector(rank: int, length: int) -> torch.Tensor:
    """What this rank brings to a sum: magnitudes over six orders, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(length, generator=generator) * 10 ** torch.empty(length).uniform_(-3, 3, generator=generator)


def train_in_buckets(rank: int, exchange: BucketExchange, model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank put into the exchange and what it got out of it, over some steps of DistributedDataParallel."""
    samples, targets = data()
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    brought = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    layouts: set[int] = set()
    begun, sent_bytes = list[tuple[torch.Tensor, torch.futures.Future]](), list[int]()

    def hook(state, bucket):  # DistributedDataParallel wants to see types, and cannot read them as text
        layouts.add(bucket.buffer().numel())
        places = {id(p): i for i, p in enumerate(model.parameters())}
        starts = [0, *itertools.accumulate(p.numel() for p in model.parameters())]
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            i = places[id(parameter)]
            brought[starts[i] : starts[i + 1]] += gradient.flatten().double()
        begun.append((bucket.buffer(), promise := torch.futures.Future()))
        exchange.begin(bucket.parameters(), bucket.buffer(), last=bucket.is_last())
        if bucket.is_last():
            sent_bytes.append(exchange.wait().sent_bytes)
            for summed, future in begun:
                future.set_result(summed)
            begun.clear()
        return promise

    parallel.register_comm_hook(None, hook)
    received = torch.zeros_like(brought)
    for step in range(6):
        mine = list(range(step * 8 + rank, step * 8 + 8))
        parallel.zero_grad()
        (nn.functional.cross_entropy(parallel(samples[mine]), targets[mine]) * (len(mine) / 8)).backward()
        received += torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    return {
        "brought": brought,
        "received": received,
        "layouts": torch.tensor(len(layouts)),
        "bytes": torch.tensor(sum(sent_bytes)),
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        **exchange.state(),
    }


def main(rank: int, world_size: int, folder: Path, device: torch.device) -> None:
    """Join the group, run every situation, save the results for the test to judge."""
    join(rank, world_size, folder)
    results: dict[str, torch.Tensor] = {}
    for length in LENGTHS:
        for name, compression in (("dense", DENSE), ("sparse", SPARSE)):
            exchange = Exchange(compression, length, device=device)
            flat = vector(rank, length).to(device)
            stats = exchange.run(flat)
            results[f"{name} sum {length}"] = flat.cpu()
            results[f"{name} bytes {length}"] = torch.tensor(stats.sent_bytes)
            for key, value in exchange.state().items():
                results[f"{name} {key} {length}"] = value.cpu()

    for name in BUCKETED if device.type == "cpu" else ():
        model = larger_network()
        wanted = Compression(name=name, ratio=0.1 if name in ("topk", "dgc") else 1.0)
        in_buckets = BucketExchange(wanted, list(model.parameters()), seed=5)
        for key, value in train_in_buckets(rank, in_buckets, model).items():
            results[f"{name} in buckets: {key}"] = value
    torch.save(results, folder / f"rank-{rank}.pt")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), torch.device(sys.argv[4]))
