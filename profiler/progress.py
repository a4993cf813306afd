"""How far a probe has come, told from its event log so far: a line for people and the share that is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetopt.core.run_spec import ProbeSchedule
from hetopt.profiler import records as m
from hetopt.profiler.schedule import LATER_PASSES, PILOT_SHARE, SWEEP_SHARE

Event = Mapping[str, object]

FACTS_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the probe is doing; ``done`` is in [0, 1] and never falls as the log grows."""

    text: str
    done: float


def progress(events: Sequence[Event], schedule: ProbeSchedule) -> Progress:
    """Tell the progress from the events so far. Unknown events are passed over, an empty log is the beginning."""
    text, done = "starting workers", 0.0
    metric, sweep = "metric", 0
    planned_steps = (1 + LATER_PASSES) * sum(len(one.local_batch_sizes) for one in schedule.sweeps)
    finished_sizes = 0
    for event in events:
        match event.get("event"):
            case m.STARTED:
                text = "looking at the model and the host"
            case m.JOB_FACTS:
                metric, done = str(event.get("target_metric", metric)), FACTS_SHARE
            case m.DeviceFacts.EVENT:
                sweep = _whole(event, "sweep")
                # A sweep that was cut short counts as whole once the next begins.
                finished_sizes = sum(len(one.local_batch_sizes) for one in schedule.sweeps[:sweep])
                text = f"step time, {_workers(schedule, sweep)}"
            case m.SweepPoint.EVENT:
                finished_sizes += 1
                text = f"step time, {_workers(schedule, sweep)}, batch {event.get('local_batch_size')}"
                done = max(done, FACTS_SHARE + (SWEEP_SHARE - FACTS_SHARE) * finished_sizes / max(1, planned_steps))
            case m.CompressorPoint.EVENT:
                text = f"compressing with {event.get('name')}"
            case m.EvaluationCost.EVENT:
                text = "evaluation"
            case m.LinkPoint.EVENT:
                text = f"{str(event.get('collective')).replace('_', '-')} of {_whole(event, 'payload_bytes'):,} bytes"
                done = max(done, SWEEP_SHARE + 0.05)
            case m.PilotStarted.EVENT:
                under = f", {event['sync']}" if event.get("sync") else _in(event.get("precision"))
                text = f"pilot at batch {event.get('global_batch_size')}{under}"
                done = max(done, 1 - PILOT_SHARE)
            case m.PilotEvaluation.EVENT:
                batch = schedule.pilots[_whole(event, "pilot")].global_batch_size
                value, epoch = _number(event, "metric"), _number(event, "epoch")
                text = f"pilot at batch {batch}: {metric} {value:.4g} after {epoch:.3g} epochs"
            case m.PilotFinished.EVENT:
                done = max(done, 1 - PILOT_SHARE + PILOT_SHARE * (_whole(event, "pilot") + 1) / len(schedule.pilots))
            case m.FINISHED:
                text, done = "done", 1.0
    return Progress(text=text, done=min(done, 1.0))


def _workers(schedule: ProbeSchedule, sweep: int) -> str:
    workers = schedule.sweeps[sweep].concurrent_workers
    return ("1 worker" if workers == 1 else f"{workers} workers at once") + _in(schedule.sweeps[sweep].precision)


def _in(precision: object) -> str:
    return "" if precision in (None, "fp32") else f" in {precision}"


def _number(event: Event, name: str) -> float:
    value = event[name]
    if not isinstance(value, int | float):
        raise ValueError(f"'{name}' of {event.get('event')} is not a number")
    return float(value)


def _whole(event: Event, name: str) -> int:
    return int(_number(event, name))
