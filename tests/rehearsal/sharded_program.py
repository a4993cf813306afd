"""One of two devices of each of two hosts that sum the gradient of a sharded model: how long its exchange takes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hetopt.trainer.ddp.comm_hook import ShardedState
from hetopt.trainer.sharding import Shards
from tests.trainer_pieces.runs import run_of

WIDTH, BLOCKS = 256, 8
BYTES = 4 * BLOCKS * (WIDTH + 1) * WIDTH
"""Of the whole gradient."""


def main(rank: int, folder: Path) -> None:
    """Keep the least of three steps' times in ``folder/took-RANK``."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    shards = Shards.of(model, list(model), ("a", "a", "b", "b"), torch.device("cpu"), whole=True)
    state = ShardedState(model, spec=run_of(1, 1, 1, 1), replicas=shards.counterparts, reach=lambda done: None)
    steps = [state.backward(model(torch.ones(2, WIDTH)).sum(), sums=True) for _ in range(4)]
    took_s = [sum(each.sync_s for each in stats) for stats in steps]
    (folder / f"took-{rank}").write_text(str(min(took_s[1:])))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
