"""A run's log as columns: one row a ``step`` event, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetopt.optimizer.reports.columns import matrix
from hetopt.profiler.errors import BadInput

Column: TypeAlias = npt.NDArray[np.float64]
"""[rows], or [rows, workers]."""

_NOTHING: Mapping[str, Any] = {}
"""One for all rows: of a hundred thousand new ones Python would look for cycles, among a million objects."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics at a moment; seconds since training began."""

    time_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSeries:
    """Attributes of rows are means of a step over the steps of the row; NaN: not known.

    Attributes:
        hosts: of the workers, in rank order.
        end_s: [rows], seconds since training began.
        step: [rows], steps done.
        steps: [rows], of the row.
        loss: [rows].
        step_time_s: [rows].
        shares: [rows, workers], samples.
        compute_s: [rows, workers].
        wait_s: [rows, workers], for the slowest.
        sync_s: [rows], of the exchange that was not hidden.
        ratio: [rows], fraction of the elements that was sent.
        gain: [rows], part of the gradient's energy that this kept.
        sent_bytes: [rows], by one worker in a step.
        dense_bytes: [rows], where everything is sent in fp32.
        averaged: [rows], part of the steps that ended in an average of models that workers trained for themselves.
        divergence: [rows], how far those had come apart by then, relative to their norm.
        averages_bytes: [rows], that one worker sent for them in a step.
        ways: of each row; empty: nothing was exchanged.
        evaluations: in order.
    """

    hosts: tuple[str, ...]
    end_s: Column
    step: Column
    steps: Column
    loss: Column
    step_time_s: Column
    shares: Column
    compute_s: Column
    wait_s: Column
    sync_s: Column
    ratio: Column
    gain: Column
    sent_bytes: Column
    dense_bytes: Column
    averaged: Column
    divergence: Column
    averages_bytes: Column
    ways: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def duration_s(self) -> float:
        """Of training, as far as it is logged."""
        return float(self.end_s[-1])


def series(events: Iterable[Mapping[str, Any]]) -> RunSeries:
    """The columns of one run.

    Raises:
        BadInput: the log has no step.
    """
    began_s: float | None = None
    hosts: tuple[str, ...] = ()
    rows: list[Mapping[str, Any]] = []
    evaluations = []
    for event in events:
        match event["event"]:
            case "run_started":
                hosts = tuple(worker["host"] for worker in event["workers"])
            case "training_started":
                began_s = float(event["time_s"]) if began_s is None else began_s
            case "step" if began_s is not None:
                rows.append(event)
            case "evaluated" if began_s is not None:
                evaluations.append(Evaluation(time_s=float(event["time_s"]) - began_s, metrics=event["metrics"]))
    if not rows or began_s is None:
        raise BadInput("The run has not logged a step yet.", hint="look at it with `hetopt status`")
    exchanges = [row.get("exchange") or _NOTHING for row in rows]
    brought = [row.get("sync") or _NOTHING for row in rows]

    def together(name: str) -> Column:
        """Of models: means over steps."""
        if not any(brought):
            return np.full(len(rows), np.nan)
        counts = [one.get("synchronised", 0) + one.get("local", 0) for one in brought]
        told = [one.get(name, np.nan) / max(1, count) for one, count in zip(brought, counts, strict=True)]
        return np.array(told, dtype=np.float64)

    def column(name: str) -> Column:
        return np.array([row[name] for row in rows], dtype=np.float64)

    def exchanged(name: str) -> Column:
        return np.array([exchange.get(name, np.nan) for exchange in exchanges], dtype=np.float64)

    return RunSeries(
        hosts=hosts,
        end_s=column("time_s") - began_s,
        step=column("step"),
        steps=column("steps"),
        loss=column("loss"),
        step_time_s=column("step_time_s"),
        shares=_by_worker([row["local_batch_sizes"] for row in rows]),
        compute_s=_by_worker([row["compute_s"] for row in rows]),
        wait_s=_by_worker([row["wait_s"] for row in rows]),
        sync_s=np.array([row["sync_s"][0] for row in rows], dtype=np.float64),
        ratio=exchanged("ratio"),
        gain=exchanged("gain"),
        sent_bytes=exchanged("sent_bytes"),
        dense_bytes=exchanged("dense_bytes"),
        averaged=together("synchronised"),
        divergence=np.array([one.get("divergence", np.nan) for one in brought], dtype=np.float64),
        averages_bytes=together("sent_bytes"),
        ways=tuple(str(exchange.get("way", "")) for exchange in exchanges),
        evaluations=tuple(evaluations),
    )


def _by_worker(rows: Sequence[Sequence[float]]) -> Column:
    """[rows, workers]; NaN where a worker had not come yet, or was gone."""
    counts = set(map(len, rows))
    most = max(counts)
    return matrix(rows if len(counts) == 1 else [[*row, *(np.nan,) * (most - len(row))] for row in rows])
