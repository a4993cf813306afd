"""One of two workers that train densely and note who called the collective: ``task|session RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetopt.core.events.log import EventLog
from hetopt.core.run_folder import read_spec
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.loop import train
from hetopt.trainer.session import session
from tests.trainer.joining import join, leave

COLLECTIVES = ((dist, "all_reduce"), (dist, "all_to_all_single"), (dist.ProcessGroup, "alltoall_base"))
STEPS, WIDE = 6, 1000


def note(found: list[dict[str, Any]], owner: Any, name: str) -> None:
    """Have a collective of torch note which functions of ours are on the stack when it is called."""
    real = getattr(owner, name)

    def noting(*args: Any, **keywords: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack()[:-1] if "site-packages" not in frame.filename]
        stack = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
        elements = max(part.numel() for part in args if isinstance(part, torch.Tensor))
        found.append({"collective": name, "elements": elements, "stack": stack})
        return real(*args, **keywords)

    setattr(owner, name, noting)


def task(rank: int, world_size: int, folder: Path) -> None:
    """Train `digits`."""
    train(
        WorkerContext(
            spec=read_spec(folder),
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            run_dir=folder,
            events=EventLog(folder / "events.jsonl" if rank == 0 else None),
            stop_requested=lambda: False,
        )
    )


def script(rank: int, world_size: int, folder: Path) -> None:
    """Train a small model, and one whose gradient has parts that can be sent before all of it is there."""
    data = TensorDataset(torch.randn(4 * STEPS, 8), torch.randn(4 * STEPS, 1))
    for width in (16, WIDE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with session(model, optimizer) as run:
            for x, y in run.loader(DataLoader(data, batch_size=4)):
                optimizer.zero_grad()
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()


WAYS: dict[str, Callable[[int, int, Path], None]] = {"task": task, "session": script}


def main(way: str, rank: int, world_size: int, folder: Path) -> None:
    found: list[dict[str, Any]] = []
    for owner, name in COLLECTIVES:
        note(found, owner, name)
    join(rank, world_size, folder)
    WAYS[way](rank, world_size, folder)
    (folder / f"stacks-{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
