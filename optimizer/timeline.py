"""A run over time, read from its events: each worker's share, computing and waiting, what all of them exchanged, and
what happened on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.optimizer import words
from hetopt.profiler.artifact import Record

MOST_MOMENTS = 400
"""More than a chart of any width shows; longer runs are kept in coarser steps of time."""

AT_ONCE_S = 0.5
"""Changes of conditions that follow each other so closely were asked for together."""

Kind = Literal["condition_changed", "miniature_slowed", "shares_changed", "exchange_changed", "memory_bound_learned"]
ROUTINE: tuple[Kind, ...] = ("shares_changed", "exchange_changed")
"""What happens as a matter of course, and often."""


class Exchanged(Record):
    """The exchanges of gradients in a stretch of the run: means of one exchange, where not said otherwise."""

    way: str = Field(description="compressor, ratio and collective; the last, where they changed")
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
    hosts: tuple[str, ...] = Field(default=(), description="where; none for what concerns all")
    text: str

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
    moments: list[Moment] = []
    happenings: list[Happening] = []
    hosts: tuple[str, ...] = ()
    for event in events:
        match event["event"]:
            case "run_started":
                hosts = tuple(worker["host"] for worker in event["workers"])
            case "training_started":
                began_s = float(event["time_s"]) if began_s is None else began_s
            case "step" if began_s is not None:
                moments.append(_moment(event, began_s))
            case _:
                found = happening(event, hosts, began_s=began_s or float(event["time_s"]), time_factor=time_factor)
                if found is not None:
                    happenings.append(found if found.step is not None else _placed(found, moments))
    return Timeline(moments=tuple(_coarser(moments, most)), happenings=tuple(_joined(happenings)))


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
        case "shares_changed":
            after = ", ".join(map(str, event["after"]))
            kind, text = "shares_changed", f"now {after} ({event['reason']})"
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


def _conditions(event: Mapping[str, Any], time_factor: float) -> str:
    if event.get("dies"):
        return "dead"
    speed, rate = event.get("speed"), event.get("rate_bits_per_s")
    parts = [
        *([f"speed {speed:g}"] if speed is not None else []),
        *([f"link {words.bit_rate(rate * time_factor)}"] if rate is not None else []),
    ]
    return ", ".join(parts)


def _placed(happening: Happening, moments: Sequence[Moment]) -> Happening:
    """With the step that the log had come to."""
    return happening.model_copy(update={"step": moments[-1].step if moments else 0})


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


def _moment(event: Mapping[str, Any], began_s: float) -> Moment:
    end_s = float(event["time_s"]) - began_s
    return Moment(
        step=event["step"],
        steps=event["steps"],
        begin_s=round(max(0.0, end_s - event["steps"] * event["step_time_s"]), 3),
        end_s=round(end_s, 3),
        local_batch_sizes=tuple(event["local_batch_sizes"]),
        compute_s=tuple(event["compute_s"]),
        wait_s=tuple(event["wait_s"]),
        exchange=exchanged(event),
    )


def exchanged(event: Mapping[str, Any]) -> Exchanged | None:
    """What a ``step`` event tells of its exchanges."""
    told = event.get("exchange")
    return Exchanged(**{name: told[name] for name in Exchanged.model_fields}) if told else None


def _coarser(moments: Sequence[Moment], most: int) -> list[Moment]:
    """No more than ``most`` moments: as many neighbours as that takes become one."""
    together = -(-len(moments) // most)
    return [_one(moments[start : start + together]) for start in range(0, len(moments), max(1, together))]


def _one(moments: Sequence[Moment]) -> Moment:
    steps = sum(moment.steps for moment in moments)

    def mean(times_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
        weighed = [[moment.steps * one for one in each] for moment, each in zip(moments, times_s, strict=True)]
        return tuple(round(sum(column) / steps, 7) for column in zip(*weighed, strict=True))

    return Moment(
        step=moments[-1].step,
        steps=steps,
        begin_s=moments[0].begin_s,
        end_s=moments[-1].end_s,
        local_batch_sizes=moments[-1].local_batch_sizes,
        compute_s=mean([moment.compute_s for moment in moments]),
        wait_s=mean([moment.wait_s for moment in moments]),
        exchange=_one_exchange(moments),
    )


def _one_exchange(moments: Sequence[Moment]) -> Exchanged | None:
    """The exchanges of several moments: means over their steps, the last way."""
    known = [(moment.steps, moment.exchange) for moment in moments if moment.exchange is not None]
    if not known:
        return None
    steps = sum(count for count, _ in known)

    def mean(name: str) -> float:
        return float(sum(count * getattr(one, name) for count, one in known) / steps)

    last = known[-1][1]
    means = {name: mean(name) for name in Exchanged.model_fields if name != "way"}
    return Exchanged(way=last.way, **{**means, "ratio": min(1.0, means["ratio"])})
