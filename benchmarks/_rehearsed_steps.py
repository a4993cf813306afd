"""Predicted against measured steps of rehearsed clusters, which were never measured: unequal hosts, three link rates.

The profile is of this machine, one worker and two at a time. Four and eight hosts declare their time with 5 % jitter;
three hosts, which is what two cores carry, compute in earnest under CPU quotas. Everything is sent, or 1 % of it, or
what `auto` decides. The baseline adds what the slowest worker computes, as declared or else as predicted, and the bytes
of a ring over the link's rate, as one would by hand. Last, whole runs of four hosts to the job's target, with several
seeds: the time that was predicted for it against the time that it took.

Times are those of the cluster: a miniature that had to slow down, because its computation did not fit into the declared
time, says by how much, and its steps are told in planned time. A shared machine changes its speed by a third from one
second to the next, and what is not declared follows it: all computing under quotas, and what exchanges ask of
processors. Steps are predicted twice, before the case for the machine as it then was, and for the machine as it was on
average while the steps ran, by a yardstick beside them (`SpeedMeanwhile`). Errors are held against the goals
by the second, which is how well the cluster is known; intervals by the first, which is what a person is told.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from benchmarks._demo import run
from benchmarks._rehearsal import Log, launch, need_namespaces, step_time_s
from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.emulation.plan import Rehearsal, rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.machine_speed import at_present, slowed
from hetopt.core.calibration_benchmark import MachineReading, measure_yardstick_s
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Compression, StopRule
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.recommendation.recommend import recommend

RATES = ("25mbit", "100mbit", "400mbit")
JITTER = 0.05
PACED = {
    f"{sum(counts)} paced": "; ".join(
        f"speed={speed},noise={JITTER},rate={{rate}} x{count}"
        for speed, count in zip((1, 0.5, 0.25), counts, strict=True)
    )
    for counts in ((2, 1, 1), (4, 2, 2))
}
QUOTAS = {"3 quota": "; ".join(f"cpu={cores},rate={{rate}}" for cores in (0.8, 0.5, 0.3))}
"""A fifth of two cores is left to what is not the workers'."""

WAYS: dict[str, dict[str, object]] = {
    "dense": {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"},
    "topk 1 %": {"compression": Compression(name="topk", ratio=0.01), "ratio_policy": "fixed"},
    "auto": {"compression": Compression(), "ratio_policy": "auto", "collective_policy": "cheapest"},
}
STEPS, WARM_UP_STEPS = 60, 20
AUTO_STEPS, AUTO_SETTLES = 240, 160
"""`auto` tries its ways first: what is predicted is what it does then."""
SEEDS = 5
TARGET_RATE = "100mbit"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rehearsal.

    Attributes:
        predicted_s: for the machine as it was meanwhile.
        predicted_before_s: for the machine as it was before.
        measured_s: the median step.
        by_hand_s: what adding up gives.
        inside: whether what was measured lies in the interval that was told before.
    """

    predicted_s: float
    predicted_before_s: float
    measured_s: float
    by_hand_s: float
    inside: bool

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def error_before(self) -> float:
        """Of the one before."""
        return self.predicted_before_s / self.measured_s - 1


def rehearsed_steps(*, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and baselines of the rehearsals; quick: one rate, without `auto`, and one run to the target."""
    need_namespaces()
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as folder:
        path = Path(folder) / "profile.json"
        run(Path(folder), "profile", "digits", "-o", str(path))
        profile = Profile.load(path)
    plan = _plan(profile, Goal(ends="steps", amount=STEPS, budget_usd=5.0))
    figures: dict[str, float] = {}
    baselines: dict[str, float] = {}
    every: list[Case] = []
    print("Rehearsed steps: hosts, link, what is sent: predicted, measured, error")
    for part, clusters in (("steps", PACED), ("quota_steps", QUOTAS)):
        cases = [
            _case(plan, cluster, described.format(rate=rate), rate, way)
            for rate in (RATES[1:2] if quick else RATES)
            for cluster, described in clusters.items()
            for way in (list(WAYS)[:2] if quick else WAYS)
        ]
        every += cases
        errors = [abs(one.error) for one in cases]
        figures |= {
            f"rehearsed_{part}_median_error": round(statistics.median(errors), 4),
            f"rehearsed_{part}_p90_error": round(float(np.quantile(errors, 0.9)), 4),
            f"rehearsed_{part}_coverage": _coverage(cases),
        }
        by_hand = [abs(one.by_hand_s / one.measured_s - 1) for one in cases]
        baselines[f"rehearsed_{part}_median_error_by_hand"] = round(statistics.median(by_hand), 4)
        before = [abs(one.error_before) for one in cases]
        figures[f"rehearsed_{part}_median_error_as_told_before"] = round(statistics.median(before), 4)
    figures["rehearsed_coverage"] = _coverage(every)
    return figures | _to_target(profile, seeds=1 if quick else SEEDS), baselines


def _coverage(cases: Sequence[Case]) -> float:
    return round(sum(one.inside for one in cases) / len(cases), 4)


def _plan(profile: Profile, goal: Goal) -> Plan:
    options = Options(batch_size=256, only_types=("c7a.large",))
    return recommend(PlanRequest(profile, load_catalog(), goal, options), seed=0, now=datetime.now(UTC))


def _to_target(profile: Profile, *, seeds: int) -> dict[str, float]:
    """How far the time to the target lies from what was predicted for it, in the median over seeds."""
    job = profile.job
    goal = Goal(ends="target", target_metric=job.target_metric, target_value=job.target_value, budget_usd=5.0)
    plan = _plan(profile, goal)
    described = PACED["4 paced"].format(rate=TARGET_RATE)
    errors = []
    for seed in range(seeds):
        rehearsal = _told(plan, described, {"seed": seed}, measure_yardstick_s())
        predicted_s = rehearsal.prediction.training_s.value
        took_s = float(launch(rehearsal.run)[-1]["training_s"])
        errors.append(predicted_s / took_s - 1)
        print(f"to the target, seed {seed}: {predicted_s:.1f} s predicted, {took_s:.1f} s taken, {errors[-1]:+.1%}")
        sys.stdout.flush()
    return {"rehearsed_target_time_error": round(abs(statistics.median(errors)), 4)}


def _case(plan: Plan, cluster: str, described: str, rate: str, way: str) -> Case:
    steps, settled = (AUTO_STEPS, AUTO_SETTLES) if way == "auto" else (STEPS, WARM_UP_STEPS)
    changes = {"batch_policy": "static", "stop": StopRule(max_steps=steps), **WAYS[way]}
    before_s = measure_yardstick_s()
    before = _told(plan, described, changes, before_s)
    with SpeedMeanwhile() as speed:
        log = launch(before.run)
    measured = step_time_s(in_planned_time(log), from_step=settled)
    meanwhile_s = speed.yardstick_s(since_s=_reached_s(log, settled), until_s=_reached_s(log, steps))
    then_s = plan.profile.yardstick_s
    assert then_s is not None
    meanwhile = plan.model_copy(update={"profile": slowed(plan.profile, meanwhile_s / then_s)})
    rehearsal = _rehearsal(meanwhile, described, changes)
    told, told_before = rehearsal.prediction, before.prediction
    predicted_s = told.step_time_s.value
    paced = before.run.workers[0].declared is not None
    if paced:
        # What workers declare was settled before; only what the machine does by itself follows its speed.
        predicted_s = told_before.compute_s + told.communication_s
    low_s, high_s = told_before.step_time_s.low, told_before.step_time_s.high
    one = Case(
        predicted_s=predicted_s,
        predicted_before_s=told_before.step_time_s.value,
        measured_s=measured,
        by_hand_s=_by_hand_s(before if paced else rehearsal, plan.profile.job.gradient_bytes),
        inside=low_s <= measured <= high_s,
    )
    outside = "" if one.inside else f"  outside {1e3 * low_s:.1f} to {1e3 * high_s:.1f} ms"
    print(
        f"{cluster:8} {rate:8} {way:9} {1e3 * one.predicted_s:8.1f} ms {1e3 * one.measured_s:8.1f} ms "
        f"{one.error:+7.1%} ({one.error_before:+.1%} before, {meanwhile_s / before_s:.2f} x){outside}"
    )
    sys.stdout.flush()
    return one


def _reached_s(log: Log, step: int) -> float:
    """When the last control period up to a step was over, seconds since the epoch."""
    return max(float(event["time_s"]) for event in log if event["event"] == "step" and event["step"] <= step)


def in_planned_time(log: Log) -> Log:
    """The log with steps as long as they would be, had the miniature not been slowed down on the way."""
    factor, found = 1.0, []
    for event in log:
        if event["event"] == "miniature_slowed":
            factor = float(event["factor"])
        if event["event"] == "step":
            event = {**event, "step_time_s": event["step_time_s"] / factor}
        found.append(event)
    return found


def _rehearsal(plan: Plan, described: str, changes: Mapping[str, object]) -> Rehearsal:
    wanted = plan.model_copy(update={"run": plan.run.model_copy(update=dict(changes))})
    return rehearse(wanted, ThisMachine.seen(), parse_hosts(described))


def _told(plan: Plan, described: str, changes: Mapping[str, object], yardstick_s: float) -> Rehearsal:
    """The rehearsal as `hetopt launch` would tell it, where the yardstick takes so long."""
    reading = MachineReading(yardstick_s=yardstick_s, contention=1.0, contention_log_sd=0.0)
    now = at_present(plan, lambda: reading).plan
    return _rehearsal(now, described, changes)


def _by_hand_s(rehearsal: Rehearsal, gradient_bytes: int) -> float:
    run_ = rehearsal.run
    assert run_.miniature is not None
    declared = [
        worker.declared.fixed_s + worker.declared.per_sample_s * worker.local_batch_size
        for worker in run_.workers
        if worker.declared is not None
    ]
    slowest = max(declared, default=rehearsal.prediction.compute_s)
    count = len(run_.workers)
    rate = min(host.rate_bits_per_s or 1e9 for host in run_.miniature.hosts) / 8
    ratio = run_.compression.ratio
    return slowest + 2 * (count - 1) / count * gradient_bytes * ratio / rate


EVERY_S = 0.2
"""A reading takes about 4 ms: a fiftieth of a processor."""


class SpeedMeanwhile:
    """Reads the yardstick in a thread of its own for as long as the ``with`` block takes.

    What a shared machine was before and after a run says little about what it was meanwhile.

    Readings are processor time: waiting for a processor that the run uses is not counted. Beside one or two busy
    processors they say what they say alone (0.99 and 1.05 times as much, medians of 40 turns).
    """

    def __init__(self) -> None:
        self._readings: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="yardstick", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def yardstick_s(self, *, since_s: float, until_s: float) -> float:
        """Mean reading between two times since the epoch; of all readings where none lies between them."""
        within = [reading_s for read_s, reading_s in self._readings if since_s <= read_s <= until_s]
        return statistics.fmean(within or [reading_s for _, reading_s in self._readings])

    def _read(self) -> None:
        while True:
            reading_s = measure_yardstick_s(repeats=1)
            self._readings.append((time.time(), reading_s))
            if self._over.wait(EVERY_S):
                return
