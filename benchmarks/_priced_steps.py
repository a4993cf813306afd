"""What a step takes over links of any rate, in units of its computation: bytes as they were sent, times by the law.

A run says of each step what a worker sent, and what it did for that itself (as a part of the computation of the same
run, so that a busy machine changes neither). The rest is `hetopt.core.comm.cost`: with N workers a sum moves
2 (N - 1) / N times its bytes over every link, a gather N - 1 times. A rate r means that a dense sum takes r times as
long as a step computes. Messages are taken to cost nothing, which is true of large gradients.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks._quality import Job
from benchmarks._rehearsal import Log
from hetopt.core.comm.cost import Operation, pipelined_s

BACKWARD = 2 / 3
"""Of a step's computation, under which dense gradients travel."""

BUCKETS = 4
"""That they travel in."""

NOTHING = {"compressor": "identity", "way": "", "collective": "all_reduce", "sent_bytes": 0.0, "dense_bytes": 1.0}
"""What is told of exchanges where no gradients are exchanged."""


@dataclass(frozen=True, kw_only=True)
class PricedStep:
    """Some steps in a row that exchanged alike.

    Attributes:
        steps: how many.
        traffic: over a link, over that of a dense sum.
        own: of the worker itself, over the computation.
        hidden: whether gradients travel while others are made.
    """

    steps: int
    traffic: float
    own: float
    hidden: bool

    def at(self, rate: float) -> float:
        """What one of them takes, over its computation."""
        if self.hidden:
            return 1 - BACKWARD + pipelined_s(BACKWARD + self.own, rate * self.traffic, BUCKETS)
        return 1 + self.own + rate * self.traffic


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """What a run sent and learned.

    Attributes:
        stretches: in order.
        evaluations: steps done, and the quality then; larger is better.
        sent_share: bytes that a worker contributed over those of dense steps.
    """

    stretches: tuple[PricedStep, ...]
    evaluations: tuple[tuple[int, float], ...]
    sent_share: float

    def over(self, rate: float) -> list[tuple[float, float]]:
        """Time until each evaluation, over that of a step's computation, and the quality then."""
        found: list[tuple[float, float]] = []
        done, spent, left = 0, 0.0, list(self.evaluations)
        for stretch in self.stretches:
            while left and left[0][0] <= done + stretch.steps:
                step, quality = left.pop(0)
                found.append((spent + (step - done) * stretch.at(rate), quality))
            done, spent = done + stretch.steps, spent + stretch.steps * stretch.at(rate)
        return found


def priced(log: Log, job: Job, workers: int) -> PricedRun:
    """What a run's log says of it."""
    steps = [event for event in log if event["event"] == "step"]
    told = next((event["exchange"] for event in steps if "exchange" in event), NOTHING)
    own: dict[str, list[float]] = {}
    exchanges = []
    for event in steps:
        told = event.get("exchange", told)
        exchanges.append((int(event["steps"]), told))
        if told.get("compress_s"):
            own.setdefault(told["way"], []).append(told["compress_s"] / max(event["compute_s"]))
    stretches, sent, dense = [], 0.0, 0.0
    for count, told in exchanges:
        hidden = told["compressor"] == "identity"
        ratios = own.get(told["way"], [])
        stretches.append(
            PricedStep(
                steps=count,
                traffic=_traffic(told["collective"], told["sent_bytes"], told["dense_bytes"], workers),
                own=0.0 if hidden or not ratios else statistics.median(ratios),
                hidden=hidden,
            )
        )
        sent, dense = sent + count * told["sent_bytes"], dense + count * told["dense_bytes"]
    evaluations = evaluations_of(log, job)
    return PricedRun(stretches=tuple(stretches), evaluations=evaluations, sent_share=sent / dense)


def evaluations_of(log: Log, job: Job) -> tuple[tuple[int, float], ...]:
    """Steps done at each evaluation, and the quality then; larger is better."""
    sign = 1 if job.higher_is_better else -1
    found = [event for event in log if event["event"] == "evaluated"]
    return tuple((int(event["step"]), sign * float(event["metrics"][job.metric])) for event in found)


def _traffic(collective: str, sent_bytes: float, dense_bytes: float, workers: int) -> float:
    """Over a link, over that of a dense sum. What is no less than everything was summed (`hetopt.trainer.comm.levels`).

    Selections whose indices one worker hands on go out dealt in parts, which moves as much as a sum does.
    """
    gathered = collective == "all_gather" and sent_bytes < dense_bytes
    operation = Operation(
        primitive="all_gather" if gathered else "all_reduce", payload_bytes=sent_bytes, members=workers
    )
    dense = Operation(primitive="all_reduce", payload_bytes=dense_bytes, members=workers)
    return operation.terms().traffic_bytes / dense.terms().traffic_bytes
