"""The script of the peer in `spot_rehearsal`: DistributedDataParallel that saves a snapshot now and then, and loads it.

As in torch's tutorial on fault tolerance: ``torchrun ... --module benchmarks._spot_script RUN_DIR EVERY_S``. torchrun
starts all workers again whenever one is lost or comes; they go on from the last snapshot. Equal shares; the batches,
the model and the declared times are hetopt's.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._plain_ddp import StretchedBackward
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import conditions_in, read_spec
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import fetch
from hetopt.trainer.steps.stopwatch import make_pace
from hetopt.trainer.task import mean_of
from hetopt.trainer.tasks.load import load_task

SNAPSHOT = "snapshot.pt"


def main(run_dir: Path, every_s: float) -> None:
    """Train, save a snapshot every ``every_s`` seconds, and never return: whoever started the process kills it.

    The training goes on from the snapshot of the run directory, where there is one. Rank 0 alone writes.
    """
    spec = read_spec(run_dir)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=spec.exchange_timeout_s))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    task = load_task(spec.task)
    data = task.data(None)
    torch.manual_seed(spec.seed)
    model = task.model()
    optimizer = task.optimizer(model)
    step = _load(run_dir, model, optimizer)
    local = spec.global_batch_size // world_size
    cursor = SampleCursor(len(data.train), spec.seed, position=step * local * world_size)
    conditions = conditions_in(run_dir)
    pace = make_pace(spec.workers[rank], torch.device("cpu"), conditions=conditions, own_core=False)
    StretchedBackward(task, model, fetch(data.train, range(local)), pace)
    parallel = DistributedDataParallel(model)
    events = EventLog(run_dir / EVENTS_FILE if rank == 0 else None)
    events.write("training_started", step=step)
    begun_s = saved_s = time.perf_counter()
    while True:
        indices = cursor.take([local] * world_size).slice(rank).copy()
        pace.begin(local)
        optimizer.zero_grad()
        mean_of(task.loss(parallel, fetch(data.train, indices))).backward()  # type: ignore[no-untyped-call]  # torch's gap
        optimizer.step()
        step += 1
        now_s = time.perf_counter()
        events.write("step", step=step, steps=1, step_time_s=now_s - begun_s, local_batch_sizes=[local] * world_size)
        begun_s = now_s
        if rank == 0 and now_s - saved_s >= every_s:
            saved_s = now_s
            _save(run_dir, model, optimizer, step)


def _load(run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot, and return the steps it has done; 0 where there is none."""
    path = run_dir / SNAPSHOT
    if not path.exists():
        return 0
    snapshot = torch.load(path, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["step"])


def _save(run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the snapshot of the run directory at once, so that a process that is killed never leaves half of one."""
    unfinished = run_dir / f"{SNAPSHOT}.{os.getpid()}"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    unfinished.replace(run_dir / SNAPSHOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
