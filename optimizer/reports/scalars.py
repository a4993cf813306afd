"""The figures of a run that other tools draw: one list of names for TensorBoard and Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One figure at one moment.

    Attributes:
        name: such as ``step_time_seconds``; units end it, as Prometheus has it.
        value: in SI units.
        labels: what it is of.
        step: steps done.
        time_s: seconds since the epoch.
    """

    name: str
    value: float
    step: int
    time_s: float
    labels: tuple[tuple[str, str], ...] = ()


HELP: Mapping[str, str] = {
    "loss": "Mean training loss of the latest control period.",
    "steps_total": "Optimizer steps done.",
    "epochs": "Passes over the training data, with fractions.",
    "step_time_seconds": "Mean time of a step of the latest control period.",
    "local_batch_size": "Samples of a step that a worker computes.",
    "compute_seconds": "Mean time of a step that a worker computes.",
    "wait_seconds": "Mean time of a step that a worker waits for the slowest.",
    "exchange_ratio": "Fraction of the gradient's elements that is sent.",
    "exchange_gain": "Part of the gradient's energy that this retains.",
    "sent_bytes": "Contributed by one worker in a step.",
    "metric": "A metric of the latest evaluation.",
}
"""What each name means."""


def scalars(events: Iterable[Mapping[str, Any]]) -> Iterator[Scalar]:
    """The figures of a run's events, in order; those that are not finite are left out."""
    hosts: tuple[str, ...] = ()
    for event in events:
        if event["event"] == "run_started":
            hosts = tuple(worker["host"] for worker in event["workers"])
        yield from (one for one in _of(event, hosts) if math.isfinite(one.value))


def _of(event: Mapping[str, Any], hosts: tuple[str, ...]) -> Iterator[Scalar]:
    at = {"step": int(event.get("step") or 0), "time_s": float(event["time_s"])}

    def scalar(name: str, value: float, /, **labels: str) -> Scalar:
        return Scalar(name=name, value=float(value), labels=tuple(labels.items()), **at)  # type: ignore[arg-type]

    match event["event"]:
        case "step":
            yield scalar("loss", event["loss"])
            yield scalar("steps_total", event["step"])
            yield scalar("epochs", event["epoch"])
            yield scalar("step_time_seconds", event["step_time_s"])
            for name, key in (
                ("local_batch_size", "local_batch_sizes"),
                ("compute_seconds", "compute_s"),
                ("wait_seconds", "wait_s"),
            ):
                for rank, value in enumerate(event[key]):
                    yield scalar(name, value, worker=str(rank), host=hosts[rank] if rank < len(hosts) else "")
            exchange = event.get("exchange")
            if exchange:
                yield scalar("exchange_ratio", exchange["ratio"])
                yield scalar("exchange_gain", exchange["gain"])
                yield scalar("sent_bytes", exchange["sent_bytes"])
        case "evaluated":
            for name, value in event["metrics"].items():
                yield scalar("metric", value, name=name)
