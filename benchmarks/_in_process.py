"""Trains in this process, as one of a run's workers: no launcher, no agent; nothing but the loop itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hetopt.core.events.log import EVENTS_FILE, Event, EventLog, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.loop import train


def train_here(
    spec: RunSpec,
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[Event]:
    """Train on the CPU in this process; return the events of the run, where this is the worker that writes them.

    Args:
        spec: of the run.
        run_dir: its folder.
        rank: of this worker; of several, all meet in the default process group.
        world_size: how many there are.
        stop_requested: asked after every control period.
    """
    log = run_dir / EVENTS_FILE if rank == 0 else None
    events = EventLog(log)
    train(
        WorkerContext(
            spec=spec,
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            run_dir=run_dir,
            events=events,
            stop_requested=stop_requested,
        )
    )
    events.close()
    return [] if log is None else read_events(log)
