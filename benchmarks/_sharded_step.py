"""Step time of a session whose devices share its model, over that of plain FSDP2: in one run, in turns.

``python -m hetopt.trainer.torchrun --nproc-per-node 4 --module benchmarks._sharded_step``: one worker of four devices.
Both are loops of the same model over the same batches, in equal shares. Processor time is told, too: waits take none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hetopt.trainer.session import session

ROUNDS, STEPS, EACH, WIDTH = 5, 16, 4, 192
"""Turns of each way; steps of a turn, of which the last ten count; samples of a device; width of the four layers."""


def step_s(*, shares: bool) -> Tensor:
    """Return the median wall and processor time of a step, [2] seconds, by a session (``shares``) or torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(4)))
    data = TensorDataset(torch.randn(STEPS * EACH * dist.get_world_size(), 32, WIDTH))
    for module in () if shares else (*model, model):
        fully_shard(module)
    optimizer, begun_s = torch.optim.AdamW(model.parameters()), list[tuple[float, float]]()

    def train(batches: Iterable[Sequence[Tensor]], backward: Callable[..., None]) -> None:
        for (x,) in batches:
            begun_s.append((time.perf_counter(), time.process_time()))
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    if shares:
        with session(model, optimizer, shard="full", policy="static") as run:
            train(run.loader(DataLoader(data, EACH * run.world_size)), run.backward)
    else:
        train(DataLoader(data, EACH, sampler=DistributedSampler(data)), Tensor.backward)
    return torch.tensor(begun_s, dtype=torch.float64).diff(dim=0)[-10:].median(0).values


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(
        "a session's step over FSDP2's, in wall and processor time, by rounds:",
        [(step_s(shares=True) / step_s(shares=False)).tolist() for _ in range(ROUNDS)],
    )
