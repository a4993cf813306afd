"""One worker of a real process group: runs the exchange in several situations and saves what it holds afterwards.

python exchange_program.py RANK WORLD_SIZE FOLDER DEVICE
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hetopt.core.comm.composition import CODINGS, Combination, combinations
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.buckets import BucketExchange
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.data.cursor import SampleCursor

SAMPLES, FEATURES, CLASSES = 203, 12, 5
DENSE, SPARSE = Compression(), Compression(name="topk", ratio=0.02)
LENGTHS = (1, 2, 5, 1000, 100_003)
STEPS = 100
BUCKETED = ("identity", "topk", "dgc", "qsgd_maxnorm", "bf16")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Separable classes with noise; the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    return centres[targets] + 0.5 * torch.randn(SAMPLES, FEATURES, generator=generator), targets


def network() -> nn.Module:
    """A small network, the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, CLASSES))


def splits(world_size: int) -> list[tuple[int, ...]]:
    """Ways to share 32 samples: nearly equal, lopsided to either side, and in between."""
    rest = world_size - 1
    even = [32 // world_size + (i < 32 % world_size) for i in range(world_size)]
    uneven = [2 ** (i + 1) for i in range(rest)]
    return [tuple(even), (32 - rest, *[1] * rest), (*[1] * rest, 32 - rest), (*uneven, 32 - sum(uneven))]


def vector(rank: int, length: int) -> torch.Tensor:
    """What this rank brings to a sum: magnitudes over six orders, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(length, generator=generator) * 10 ** torch.empty(length).uniform_(-3, 3, generator=generator)


def weighted_gradient(
    model: nn.Module, samples: torch.Tensor, targets: torch.Tensor, global_batch_size: int
) -> torch.Tensor:
    """Flat gradient of the local mean loss, weighted by the share of the batch."""
    loss = nn.functional.cross_entropy(model(samples), targets) * (len(targets) / global_batch_size)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def train(
    rank: int, shares: tuple[int, ...], exchange: Exchange, device: torch.device, steps: int = STEPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat parameters, and the global loss of every step, after SGD with momentum on unequal shares."""
    model, (samples, targets) = network().to(device), (part.to(device) for part in data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cursor = SampleCursor(SAMPLES, seed=3)
    losses = torch.zeros(steps)
    for step in range(steps):
        mine = list(cursor.take(shares).slices[rank])
        with torch.no_grad():
            losses[step] = nn.functional.cross_entropy(model(samples), targets)
        flat = weighted_gradient(model, samples[mine], targets[mine], sum(shares))
        exchange.run(flat)
        for parameter, gradient in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu(), losses


def shapes() -> list[tuple[int, ...]]:
    """Of the network's parameters."""
    return [tuple(parameter.shape) for parameter in network().parameters()]


def compression_of(combination: Combination) -> Compression:
    """The combination at a ratio where there is one, with narrow codes and rank 2 where those mean something."""
    options = combination.method.options
    return Compression(
        name=combination.name,
        ratio=0.05 if combination.method.by_ratio else 1.0,
        memory=combination.memory,
        collective=combination.collective,
        rank=2 if "rank" in options else None,
        bits=4 if "bits" in options else None,
    )


def sum_in_buckets(rank: int, wanted: Compression) -> dict[str, torch.Tensor]:
    """What this rank put into the exchange and what it got out of it, over some steps; then in other buckets."""
    numel, step = 4000, 0
    brought, received = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    state: dict[str, torch.Tensor] = {}
    for stops in ((4000, 3500, 1200), (4000, 2000)):
        spans = list(zip((*stops[1:], 0), stops, strict=True))
        exchange = BucketExchange(wanted, spans, seed=5)
        if state:
            exchange.load_state(state)
        for _ in range(3):
            step += 1
            flat = torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + step))
            brought += flat
            for bucket, (start, stop) in enumerate(spans):
                exchange.begin(bucket, flat[start:stop])
            stats = exchange.wait()
            received += flat
        state = exchange.state()
    return {"brought": brought, "received": received, "bytes": torch.tensor(stats.sent_bytes), **state}


def main(rank: int, world_size: int, folder: Path, device: torch.device) -> None:
    """Join the group, run every situation, save the results for the test to judge."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    results: dict[str, torch.Tensor] = {}
    try:
        for length in LENGTHS:
            for name, compression in (("dense", DENSE), ("sparse", SPARSE)):
                exchange = Exchange(compression, length, device=device)
                flat = vector(rank, length).to(device)
                stats = exchange.run(flat)
                results[f"{name} sum {length}"] = flat.cpu()
                results[f"{name} bytes {length}"] = torch.tensor(stats.sent_bytes)
                for key, value in exchange.state().items():
                    results[f"{name} {key} {length}"] = value.cpu()

        samples, targets = data()
        for i, shares in enumerate(splits(world_size)):
            mine = list(SampleCursor(SAMPLES, seed=i).take(shares).slices[rank])
            flat = weighted_gradient(network(), samples[mine], targets[mine], sum(shares)).to(device)
            Exchange(DENSE, flat.numel(), device=device).run(flat)
            results[f"gradient {i}"] = flat.cpu()

        shares = splits(world_size)[-1]
        numel = sum(p.numel() for p in network().parameters())
        for name, compression in (("dense", DENSE), ("sparse", SPARSE)):
            exchange = Exchange(compression, numel, device=device)
            results[f"{name} parameters"], results[f"{name} losses"] = train(rank, shares, exchange, device)

        for combination in combinations() if device.type == "cpu" else ():
            wanted = compression_of(combination)
            exchange = Exchange(wanted, numel, shapes=shapes(), seed=5)
            key = f"{combination.name} {combination.collective} {combination.memory}"
            results[f"{key} parameters"], _ = train(rank, shares, exchange, device, steps=8)
            stats = exchange.run(vector(rank, numel), look_at=(0.01, 0.1, 1.0))
            results[f"{key} bytes"] = torch.tensor(stats.sent_bytes)

        for coding in CODINGS if device.type == "cpu" else ():
            for collective in ("all_gather", "ar_topk_star"):
                wanted = Compression(name="topk", ratio=0.05, coding=coding, collective=collective)
                exchange = Exchange(wanted, numel)
                results[f"{coding} {collective} parameters"], _ = train(rank, shares, exchange, device, steps=8)

        for name in BUCKETED if device.type == "cpu" else ():
            wanted = Compression(name=name, ratio=0.1 if name in ("topk", "dgc") else 1.0)
            for key, value in sum_in_buckets(rank, wanted).items():
                results[f"{name} in buckets: {key}"] = value
    finally:
        dist.destroy_process_group()
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), torch.device(sys.argv[4]))
