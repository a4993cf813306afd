"""Two workers train where memory really runs out: ``memory_program.py RANK FOLDER``, one run after another.

The first worker may use only so much more memory than it does when it starts to train; its share does not fit.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import read_spec
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.fetch import TensorPairs, inputs_and_targets
from hetopt.trainer.loop import train
from hetopt.trainer.task import Target, Task, TaskData
from tests.trainer.joining import join, leave

WORLD_SIZE = 2
SAMPLES = 300
M_MMAP_THRESHOLD = -3  # <malloc.h>


class Spread(nn.Module):
    """Few parameters, and 80 or 160 kB of activations a sample at each of four layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = nn.Linear(width, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).tanh().sigmoid().tanh()).mean(1, keepdim=True)


def _task(width: int) -> Task:
    def data(folder: Path | None) -> TaskData:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 8, generator=generator)
        pairs = TensorPairs(inputs, inputs.sum(dim=1, keepdim=True).tanh())
        return TaskData(train=pairs, evaluation=TensorPairs(pairs.inputs[:4], pairs.targets[:4]))

    def loss(model: nn.Module, batch: object) -> Tensor:
        inputs, targets = inputs_and_targets(batch)
        return nn.functional.mse_loss(model(inputs), targets)

    def evaluate(model: nn.Module, batch: object) -> dict[str, Tensor]:
        inputs, targets = inputs_and_targets(batch)
        return {"square": (model(inputs) - targets).square().sum()}

    return Task(
        name="spread",
        model=lambda: Spread(width),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        evaluate=evaluate,
        metrics=lambda sums, count: {"mse": sums["square"] / count},
        target=Target(metric="mse", value=0.0, higher_is_better=False),
        batch_size=16,
    )


def fused() -> Task:
    """1.4 MB of gradient, in one bucket."""
    return _task(20_000)


def bucketed() -> Task:
    """2.7 MB of gradient, in two buckets."""
    return _task(40_000)


def used_bytes() -> int:
    """What counts against the limit of data."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return int(line.split()[1]) * 1024


def main(rank: int, folder: Path) -> None:
    # Large blocks go back to the system when they are freed: what was used before is no reserve.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    join(rank, WORLD_SIZE, folder)
    for run_dir in json.loads((folder / "runs.json").read_text()):
        spec = read_spec(Path(run_dir["folder"]))
        allowed = run_dir["allowed_bytes"]
        if allowed is not None and rank == 0:
            # What the task and the threads of backward need is small; what its samples need is not.
            resource.setrlimit(resource.RLIMIT_DATA, (used_bytes() + allowed, resource.RLIM_INFINITY))
        events = EventLog(Path(run_dir["folder"]) / EVENTS_FILE if rank == 0 else None)
        train(
            WorkerContext(
                spec=spec,
                rank=rank,
                world_size=WORLD_SIZE,
                device=torch.device("cpu"),
                run_dir=Path(run_dir["folder"]),
                events=events,
                stop_requested=lambda: False,
            )
        )
        events.close()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
