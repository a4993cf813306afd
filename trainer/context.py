"""What a worker process knows about itself and the run: its rank, device, pace, event log and the wish to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.trainer.agreement import Store


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """One worker's place in the run. The default process group is initialised whenever ``world_size > 1``.

    ``store`` is what the group met through; absent: nobody can be asked who is missing when the group falls apart.
    """

    spec: RunSpec
    rank: int
    world_size: int
    device: torch.device
    run_dir: Path
    events: EventLog
    stop_requested: Callable[[], bool]
    store: Store | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def worker(self) -> WorkerSpec:
        """This worker's part of the spec."""
        return self.spec.workers[self.rank]

    @property
    def is_leader(self) -> bool:
        """Rank 0 writes events, checkpoints and results."""
        return self.rank == 0
