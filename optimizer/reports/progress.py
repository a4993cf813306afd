"""Where a run is, read from its events: a pure fold over the log that `status`, `launch` and `report` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from hetopt.optimizer.reports.columns import matrix


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """One worker's totals over the steps that were logged."""

    host: str
    type: str
    pace: float
    local_batch_size: int
    compute_s: float = 0.0
    wait_s: float = 0.0
    sync_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one worker (the mean of all) contributed to the exchanges of gradients so far.

    Attributes:
        way: of the newest steps: compressor, ratio and collective.
        steps: in each way, in the order of first use.
        sent_bytes: altogether.
        dense_bytes: what everything in fp32 would have come to.
    """

    way: str
    steps: Mapping[str, int]
    sent_bytes: float
    dense_bytes: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """How often workers that train for themselves were brought together so far.

    Attributes:
        policy: by which.
        synchronised, local: steps that averaged parameters, and that did not.
        sent_bytes: by one worker.
        divergence: sum over the averages of how far apart workers were, relative to the norm of the parameters.
        told: averages that told how far.
    """

    policy: str
    synchronised: int = 0
    local: int = 0
    sent_bytes: float = 0.0
    divergence: float = 0.0
    told: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run so far. Times in seconds; ``stepping_s`` leaves evaluations and checkpoints out."""

    task: str = ""
    workers: tuple[WorkerProgress, ...] = ()
    global_batch_size: int = 0
    started_s: float | None = None
    training_started_s: float | None = None
    last_event_s: float | None = None
    first_step: int = 0
    step: int = 0
    epoch: float = 0.0
    samples_seen: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged_steps: int = 0
    stepping_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    share_changes: int = 0
    exchange_changes: int = 0
    traffic: Traffic | None = None
    together: Together | None = None
    restarts: int = 0
    finish_reason: str | None = None
    training_s: float | None = None

    @property
    def step_time_s(self) -> float | None:
        """Mean time of a step over everything logged."""
        return self.stepping_s / self.logged_steps if self.logged_steps else None

    @property
    def startup_s(self) -> float | None:
        """From the first process's start to the first step."""
        if self.started_s is None or self.training_started_s is None:
            return None
        return self.training_started_s - self.started_s

    @property
    def steps_done(self) -> int:
        """Steps of this run alone, without those of the checkpoint it resumed from."""
        return self.step - self.first_step


def follow(events: Iterable[Mapping[str, Any]], launched_s: float | None = None) -> Progress:
    """Fold the events of one run. ``launched_s`` is when the launcher was asked, where it is known."""
    progress = Progress(started_s=launched_s)
    # Those of as many workers: others may come and go.
    for workers, together in groupby(events, key=_workers_of_step):
        if workers:
            progress = _stepped(progress, list(together))
        else:
            for event in together:
                progress = advance(progress, event)
    return progress


def _workers_of_step(event: Mapping[str, Any]) -> int:
    """0 for events that are no steps."""
    return len(event["compute_s"]) if event["event"] == "step" else 0


def advance(progress: Progress, event: Mapping[str, Any]) -> Progress:
    """The progress once ``event`` has happened; events of other names change nothing but the time."""
    name, now = event["event"], float(event["time_s"])
    progress = replace(progress, last_event_s=now)
    match name:
        case "run_started":
            again = bool(progress.workers)
            return replace(
                progress,
                task=event["task"],
                workers=tuple(
                    WorkerProgress(
                        host=worker["host"],
                        type=worker["type"],
                        pace=worker["pace"],
                        local_batch_size=worker["local_batch_size"],
                    )
                    for worker in event["workers"]
                ),
                global_batch_size=event["global_batch_size"],
                started_s=now if progress.started_s is None else progress.started_s,
                restarts=progress.restarts + again,
                first_step=progress.first_step if again else event.get("resumed_step") or 0,
            )
        case "training_started":
            first = progress.training_started_s
            return replace(progress, training_started_s=now if first is None else first, step=event["step"])
        case "step":
            return _stepped(progress, [event])
        case "shares_changed":
            workers = tuple(
                replace(worker, local_batch_size=share)
                for worker, share in zip(progress.workers, event["after"], strict=True)
            )
            return replace(progress, workers=workers, share_changes=progress.share_changes + 1)
        case "exchange_changed":
            return replace(progress, exchange_changes=progress.exchange_changes + 1)
        case "evaluated":
            return replace(
                progress,
                metrics=event["metrics"],
                epoch=event["epoch"],
                step=event["step"],
                evaluation_s=progress.evaluation_s + event["evaluation_s"],
            )
        case "checkpoint_saved":
            return replace(progress, checkpoint_s=progress.checkpoint_s + event["save_s"])
        case "training_finished":
            return replace(
                progress,
                step=event["step"],
                epoch=event["epoch"],
                finish_reason=event["reason"],
                training_s=event["training_s"],
                metrics=event["metrics"] or progress.metrics,
            )
    return progress


def _stepped(progress: Progress, events: Sequence[Mapping[str, Any]]) -> Progress:
    """The progress after successive ``step`` events: long logs hold little else, so their sums are taken at once."""
    last = events[-1]
    steps = np.array([event["steps"] for event in events], dtype=np.float64)
    sums = {
        name: (steps @ matrix([event[name] for event in events])).tolist() for name in ("compute_s", "wait_s", "sync_s")
    }
    workers = tuple(
        replace(
            worker,
            local_batch_size=share,
            compute_s=worker.compute_s + compute,
            wait_s=worker.wait_s + wait,
            sync_s=worker.sync_s + sync,
        )
        for worker, share, compute, wait, sync in zip(
            progress.workers,
            last["local_batch_sizes"],
            sums["compute_s"],
            sums["wait_s"],
            sums["sync_s"],
            strict=True,
        )
    )
    return replace(
        progress,
        workers=workers,
        last_event_s=float(last["time_s"]),
        step=last["step"],
        epoch=last["epoch"],
        samples_seen=last["samples_seen"],
        loss=last["loss"],
        logged_steps=progress.logged_steps + sum(event["steps"] for event in events),
        stepping_s=progress.stepping_s + sum(event["steps"] * event["step_time_s"] for event in events),
        traffic=_exchanged(progress.traffic, events),
        together=_brought_together(progress.together, events),
    )


def _brought_together(before: Together | None, events: Sequence[Mapping[str, Any]]) -> Together | None:
    """The same after ``step`` events; None: gradients are exchanged in every step."""
    found = before
    for told in (event["sync"] for event in events if event.get("sync")):
        found = found if found is not None else Together(policy=str(told["policy"]))
        apart = told.get("divergence")
        found = replace(
            found,
            synchronised=found.synchronised + told["synchronised"],
            local=found.local + told["local"],
            sent_bytes=found.sent_bytes + told["sent_bytes"],
            divergence=found.divergence + (0.0 if apart is None else apart * told["synchronised"]),
            told=found.told + (0 if apart is None else told["synchronised"]),
        )
    return found


def _exchanged(before: Traffic | None, events: Sequence[Mapping[str, Any]]) -> Traffic | None:
    """The traffic after ``step`` events; a single worker has none, nor have the logs of older versions."""
    ways = dict(before.steps) if before is not None else {}
    sent_bytes = before.sent_bytes if before is not None else 0.0
    dense_bytes = before.dense_bytes if before is not None else 0.0
    last = None
    for event in events:
        exchange = event.get("exchange")
        if not exchange:
            continue
        last, steps = str(exchange["way"]), event["steps"]
        ways[last] = ways.get(last, 0) + steps
        sent_bytes += steps * exchange["sent_bytes"]
        dense_bytes += steps * exchange["dense_bytes"]
    if last is None:
        return before
    return Traffic(way=last, steps=ways, sent_bytes=sent_bytes, dense_bytes=dense_bytes)
