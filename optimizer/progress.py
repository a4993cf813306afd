"""Where a run is, read from its events: a pure fold over the log that `status`, `launch` and `report` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


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
    for event in events:
        progress = advance(progress, event)
    return progress


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
            return _stepped(progress, event)
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


def _stepped(progress: Progress, event: Mapping[str, Any]) -> Progress:
    steps = event["steps"]
    workers = tuple(
        replace(
            worker,
            local_batch_size=share,
            compute_s=worker.compute_s + steps * compute,
            wait_s=worker.wait_s + steps * wait,
            sync_s=worker.sync_s + steps * sync,
        )
        for worker, share, compute, wait, sync in zip(
            progress.workers,
            event["local_batch_sizes"],
            event["compute_s"],
            event["wait_s"],
            event["sync_s"],
            strict=True,
        )
    )
    return replace(
        progress,
        workers=workers,
        step=event["step"],
        epoch=event["epoch"],
        samples_seen=event["samples_seen"],
        loss=event["loss"],
        logged_steps=progress.logged_steps + steps,
        stepping_s=progress.stepping_s + steps * event["step_time_s"],
        traffic=_exchanged(progress.traffic, event),
    )


def _exchanged(before: Traffic | None, event: Mapping[str, Any]) -> Traffic | None:
    """The traffic after a ``step`` event; a single worker has none, nor have the logs of older versions."""
    told = event.get("exchange")
    if not told:
        return before
    way, steps = str(told["way"]), event["steps"]
    ways = dict(before.steps) if before is not None else {}
    ways[way] = ways.get(way, 0) + steps
    return Traffic(
        way=way,
        steps=ways,
        sent_bytes=(before.sent_bytes if before is not None else 0.0) + steps * told["sent_bytes"],
        dense_bytes=(before.dense_bytes if before is not None else 0.0) + steps * told["dense_bytes"],
    )
