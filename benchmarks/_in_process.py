"""Trains in this process, as one of a run's workers: no launcher, no agent; nothing but the loop itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from hetopt.core.events.log import EVENTS_FILE, Event, EventLog, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.loop import Material, train


def train_here(
    spec: RunSpec,
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    stop_requested: Callable[[], bool] = lambda: False,
    material: Material | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Event]:
    """Train on the CPU in this process; return the events of the run, where this is the worker that writes them.

    Args:
        spec: run spec.
        run_dir: folder of the run.
        rank: number of this worker; several meet in the default process group.
        world_size: number of workers.
        stop_requested: returns whether the run is to end; called after every control period.
        material: task and data; None: those that the spec names.
        clock: returns seconds.
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
            clock=clock,
        ),
        material=material,
    )
    events.close()
    return [] if log is None else read_events(log)
