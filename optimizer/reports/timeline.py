"""A run over time, read from its events: each worker's share, computing and waiting, what all of them exchanged, and
what happened on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.optimizer import words
from hetopt.optimizer.reports.columns import matrix
from hetopt.optimizer.supervisor.decision_log import gain_in_words
from hetopt.profiler.artifact import Record, Told

MOST_MOMENTS = 400
"""More than a chart of any width shows; longer runs are kept in coarser steps of time."""

AT_ONCE_S = 0.5
"""Changes of conditions that follow each other so closely were asked for together."""

Kind = Literal[
    "condition_changed",
    "miniature_slowed",
    "shares_changed",
    "exchange_changed",
    "twins_tried",
    "sync_settled",
    "memory_bound_learned",
    "worker_lost",
    "workers_changed",
    "checkpoint_failed",
    "checkpoint_skipped",
    "clock_jumped",
    "supervisor_acted",
    "supervisor_measured",
]
ROUTINE: tuple[Kind, ...] = ("shares_changed", "exchange_changed")
"""What happens as a matter of course, and often."""


_DONE = {
    "drop": "dropped",
    "replace": "another machine takes its place",
    "on-demand": "moving to on-demand machines",
    "add": "more machines like it",
    "switch": "leaving for another zone",
}


class Exchanged(Record):
    """The exchanges of gradients in a stretch of the run: means of one exchange, where not said otherwise."""

    way: Told = Field(description="compressor, ratio and collective; the last, where they changed")
    ratio: float = Field(gt=0, le=1, description="fraction of the elements that was sent")
    gain: NonNegativeFloat = Field(description="gradient energy that this retained")
    sent_bytes: NonNegativeFloat = Field(description="contributed by one worker")
    dense_bytes: PositiveFloat = Field(description="what it contributes where everything is sent in fp32")
    compress_s: NonNegativeFloat = Field(description="of the slowest worker")
    sync_s: NonNegativeFloat = Field(description="of the worker that waited least")

    @property
    def time_s(self) -> float:
        """Of the whole exchange."""
        return self.compress_s + self.sync_s

    @property
    def sent_share(self) -> float:
        """Of the dense bytes."""
        return self.sent_bytes / self.dense_bytes


class Moment(Record):
    """A stretch of the run over one set of shares (in long runs: over a few). One figure a worker, in rank order."""

    step: NonNegativeInt = Field(description="the last step of it")
    steps: PositiveInt
    begin_s: float = Field(description="seconds since training began")
    end_s: float
    local_batch_sizes: tuple[PositiveInt, ...] = Field(description="samples of a step; the last, where they changed")
    compute_s: tuple[NonNegativeFloat, ...] = Field(description="mean of a step")
    wait_s: tuple[NonNegativeFloat, ...] = Field(description="for the slowest worker, mean of a step")
    exchange: Exchanged | None = Field(default=None, description="absent for a single worker, and in old logs")


class Happening(Record):
    """Something that explains a bend in the curves."""

    kind: Kind
    time_s: float = Field(description="seconds since training began")
    step: NonNegativeInt | None
    hosts: tuple[Told, ...] = Field(default=(), description="where; none for what concerns all")
    text: Told

    @property
    def sentence(self) -> str:
        """What happened, and where."""
        return f"{', '.join(self.hosts)}: {self.text}" if self.hosts else self.text

    @property
    def is_routine(self) -> bool:
        """Whether it is no news to a person who watches."""
        return self.kind in ROUTINE


class Timeline(Record):
    """All of a run so far."""

    moments: tuple[Moment, ...] = ()
    happenings: tuple[Happening, ...] = ()


def timeline(events: Iterable[Mapping[str, Any]], *, time_factor: float = 1.0, most: int = MOST_MOMENTS) -> Timeline:
    """The timeline of one run.

    Args:
        events: its log.
        time_factor: of its miniature, so that link rates are told as those of the rehearsed cluster.
        most: moments to keep.
    """
    began_s: float | None = None
    steps: list[Mapping[str, Any]] = []
    happenings: list[Happening] = []
    hosts: tuple[str, ...] = ()
    for event in events:
        match event["event"]:
            case "run_started":
                hosts = tuple(worker["host"] for worker in event["workers"])
            case "training_started":
                began_s = float(event["time_s"]) if began_s is None else began_s
            case "step" if began_s is not None:
                steps.append(event)
            case _:
                found = happening(event, hosts, began_s=began_s or float(event["time_s"]), time_factor=time_factor)
                if found is not None:
                    happenings.append(found if found.step is not None else _placed(found, steps))
    return Timeline(moments=tuple(_coarser(steps, most, began_s or 0.0)), happenings=tuple(_joined(happenings)))


def happening(
    event: Mapping[str, Any], hosts: Sequence[str], *, began_s: float = 0.0, time_factor: float = 1.0
) -> Happening | None:
    """What an event of the log tells a person who watches the run; absent for the events of every day.

    Args:
        event: any event.
        hosts: where the workers are, in rank order.
        began_s: when training began, seconds since the epoch.
        time_factor: see `timeline`.
    """
    kind: Kind
    where: tuple[str, ...] = ()
    match event["event"]:
        case "condition_changed":
            kind, where = "condition_changed", (str(event["host"]),)
            text = _conditions(event, time_factor)
        case "miniature_slowed":
            kind, text = "miniature_slowed", str(event["reason"])
        case "memory_bound_learned":
            rank = event["rank"]
            kind, where = "memory_bound_learned", (hosts[rank] if rank < len(hosts) else f"worker {rank}",)
            text = f"holds no more than {event['samples']} samples at a time"
        case "worker_lost":
            kind, where, text = "worker_lost", (str(event["host"]),), str(event["reason"])
        case "workers_changed":
            kind, text = "workers_changed", _who_trains(event)
        case "checkpoint_failed":
            kind, text = "checkpoint_failed", f"no checkpoint: {event['reason']}; tried again when the next is due"
        case "checkpoint_skipped":
            kind, text = "checkpoint_skipped", f"passed over a checkpoint: {event['reason']}"
        case "clock_jumped":
            by_s = float(event["by_s"])
            kind = "clock_jumped"
            text = f"the clock went {'forward' if by_s > 0 else 'back'} by {words.duration(abs(by_s))}"
        case "supervisor_acted":
            done, all_of_it = _DONE[event["action"]], event["action"] in ("on-demand", "switch")
            where = () if all_of_it else (str(event["host"]),)
            kind, text = "supervisor_acted", f"{done}: {event['reason']}"
        case "supervisor_measured":
            kind, text = (
                "supervisor_measured",
                gain_in_words(event, "a step takes {measured} {how}; {expected} was expected, {before} before"),
            )
        case "shares_changed":
            after = ", ".join(map(str, event["after"]))
            kind, text = "shares_changed", f"now {after} ({event['reason']})"
        case "twins_tried":
            kind, text = "twins_tried", _tried(event)
        case "sync_settled":
            averages = f"averaged every {event['every_steps']} steps, in {event['compressor']}"
            if event.get("fragments", 1) > 1:
                averages += f", a fragment of {event['fragments']} at a time"
            kind, text = "sync_settled", f"from now on parameters are {averages} ({event['reason']})"
        case "exchange_changed":
            # Who weighs whole ways names them in the reason; who decides on a ratio does not.
            way, reason = str(event["after"]), str(event["reason"])
            kind, text = "exchange_changed", reason if way in reason else f"now {way} ({reason})"
        case _:
            return None
    return Happening(
        kind=kind,
        time_s=round(float(event["time_s"]) - began_s, 3),
        step=event.get("step"),
        hosts=where,
        text=text,
    )


def _who_trains(event: Mapping[str, Any]) -> str:
    """What is told of another generation of workers."""
    took = f" after {event['recovery_s']:.1f} s" if "recovery_s" in event else ""
    parts = [
        *([f"without worker {', '.join(map(str, event['lost']))}"] if event["lost"] else []),
        *([f"with worker {', '.join(map(str, event['new']))} anew"] if event["new"] else []),
    ]
    return f"goes on from {event['from']}{took}{', ' if parts else ''}{' and '.join(parts)}"


def _tried(event: Mapping[str, Any]) -> str:
    """What training twins has shown."""
    shown = {
        "harmless": "learns as fast as all of it: sent where that saves time",
        "harmful": "falls behind: what is sent keeps nearly everything",
    }
    found = shown.get(event["says"], "cannot be judged yet, for little is learned: tried again later")
    took, part = words.duration(event["took_s"]), words.share(event["ratio"])
    return f"twins, trained for {took}: {part} of the gradient {found}"


def _conditions(event: Mapping[str, Any], time_factor: float) -> str:
    if event.get("dies"):
        return "dead"
    if event.get("returns"):
        return "there again"
    if event.get("notice"):
        return "has notice"
    if event.get("cut"):
        return "cut off"
    if event.get("heals"):
        return "reached again"
    speed, rate = event.get("speed"), event.get("rate_bits_per_s")
    parts = [
        *([f"speed {speed:g}"] if speed is not None else []),
        *([f"link {words.bit_rate(rate * time_factor)}"] if rate is not None else []),
    ]
    return ", ".join(parts)


def _placed(happening: Happening, steps: Sequence[Mapping[str, Any]]) -> Happening:
    """With the step that the log had come to."""
    return happening.model_copy(update={"step": steps[-1]["step"] if steps else 0})


def _joined(happenings: Iterable[Happening]) -> list[Happening]:
    """What happened to several hosts at once is one thing."""
    joined: list[Happening] = []
    for one in happenings:
        last = joined[-1] if joined else None
        if (
            last is not None
            and one.kind == last.kind == "condition_changed"
            and one.text == last.text
            and one.time_s - last.time_s < AT_ONCE_S
        ):
            joined[-1] = last.model_copy(update={"hosts": last.hosts + one.hosts})
        else:
            joined.append(one)
    return joined


def _coarser(events: Sequence[Mapping[str, Any]], most: int, began_s: float) -> list[Moment]:
    """No more than ``most`` moments: as many ``step`` events as that takes become one."""
    together = -(-len(events) // most)
    return [_moment(events[start : start + together], began_s) for start in range(0, len(events), max(1, together))]


def _moment(events: Sequence[Mapping[str, Any]], began_s: float) -> Moment:
    first, last = events[0], events[-1]
    begin_s = float(first["time_s"]) - began_s - first["steps"] * first["step_time_s"]
    # Of as many workers as there were at the end: others may have come and gone.
    alike = [event for event in events if len(event["compute_s"]) == len(last["compute_s"])]
    counts = np.array([event["steps"] for event in alike], dtype=np.float64)

    def mean(name: str) -> tuple[float, ...]:
        if len(alike) == 1:
            return tuple(last[name])
        means = counts @ matrix([event[name] for event in alike]) / counts.sum()
        return tuple(round(one, 7) for one in means.tolist())

    return Moment(
        step=last["step"],
        steps=sum(event["steps"] for event in events),
        begin_s=round(max(0.0, begin_s), 3),
        end_s=round(float(last["time_s"]) - began_s, 3),
        local_batch_sizes=tuple(last["local_batch_sizes"]),
        compute_s=mean("compute_s"),
        wait_s=mean("wait_s"),
        exchange=_one_exchange(events),
    )


def exchanged(event: Mapping[str, Any]) -> Exchanged | None:
    """What a ``step`` event tells of its exchanges."""
    told = event.get("exchange")
    return Exchanged(**{name: told[name] for name in Exchanged.model_fields}) if told else None


def _one_exchange(events: Sequence[Mapping[str, Any]]) -> Exchanged | None:
    """The exchanges of several ``step`` events: means over their steps, the last way."""
    known = [(event["steps"], event["exchange"]) for event in events if event.get("exchange")]
    if not known:
        return None
    last = known[-1][1]
    if len(known) == 1:
        return exchanged({"exchange": last})
    steps = sum(count for count, _ in known)
    means = {
        name: float(sum(count * one[name] for count, one in known) / steps)
        for name in Exchanged.model_fields
        if name != "way"
    }
    return Exchanged(way=last["way"], **{**means, "ratio": min(1.0, means["ratio"])})
