"""One of two workers that train `digits` densely and note who called the collective: ``RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetopt.core.events.log import EventLog
from hetopt.core.run_folder import read_spec
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.loop import train

COLLECTIVES = ("all_reduce", "all_to_all_single")


def note(found: list[dict[str, Any]], name: str) -> None:
    """Have a collective of torch note the functions that are on the stack when it is called."""
    real = getattr(dist, name)

    def noting(*args: Any, **keywords: Any) -> Any:
        stack = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_stack()[:-1]]
        elements = max(part.numel() for part in args if isinstance(part, torch.Tensor))
        found.append({"collective": name, "elements": elements, "stack": stack})
        return real(*args, **keywords)

    setattr(dist, name, noting)


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name in COLLECTIVES:
        note(found, name)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size)
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
    (folder / f"stacks-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
