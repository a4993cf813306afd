"""A loop over a model that `fully_shard` shards over all workers, as scripts of torch do it.

``sharded_script.py transformer|experts|adapters|frozen|mesh BATCH``: of all workers together. ``session`` does it by a
session, which saves after each step, goes on from there, and after STEPS steps ends as if it were killed.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORDS, WIDTH, LENGTH = 19, 12, 6


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return torch.stack([gates[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts)]).sum(0)


class Adapted(nn.Module):
    """A frozen layer beside which a small one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = {"experts": Experts, "adapters": Adapted}.get(kind, lambda: nn.Linear(WIDTH, WIDTH))()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + gelu(self.inner(self.norm(x)))


class Language(nn.Module):
    """Its output is tied to its embedding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_session(model: nn.Module, data: TensorDataset, batch: int) -> None:
    """The same steps, clipped and in two micro-batches, by the loop of one process."""
    from hetopt.trainer.session import session
    from tests.integrations.worker import spec

    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    folder, steps = Path(os.environ["FOLDER"]), int(os.environ.get("STEPS", "-1"))
    options = {"shard": os.environ["SHARD"], "accumulate": 2}
    with session(model, optimizer, spec=spec(__file__), folder=folder, **options) as run:
        loader = run.loader(DataLoader(data, batch_size=batch // 2))
        for _ in range(run.resume(), 1):
            for number, (texts,) in enumerate(loader):
                loss = cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
                run.backward(loss / 2)
                if number % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    run.checkpoint()
                if number + 1 == 2 * steps:
                    return


def main() -> None:
    kind, batch = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    workers = dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (batch * 6, LENGTH + 1))
    model = Language(kind)
    if kind == "session":
        by_session(model, TensorDataset(tokens), batch)
        return
    if kind == "frozen":
        model.blocks[0].requires_grad_(requires_grad=False)
    mesh = init_device_mesh("cpu", (workers,)) if kind == "mesh" else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh) if mesh else fully_shard(block)
    fully_shard(model, mesh=mesh) if mesh else fully_shard(model)
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), 0.5, momentum=0.9)
    data = TensorDataset(tokens)
    loader = DataLoader(data, batch_size=batch // workers, sampler=DistributedSampler(data, shuffle=False))
    for (texts,) in loader:
        optimizer.zero_grad()
        cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
