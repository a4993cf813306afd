"""Predicted against measured steps of rehearsed clusters, which were never measured: four and eight unequal hosts.

The profile is of this machine, one worker and two at a time. Hosts declare their time with 5 % jitter; links have three
rates; everything is sent, or 1 % of it, or what `auto` decides. The baseline adds what the slowest worker declares and
the bytes of a ring over the link's rate, as one would by hand.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks._demo import run
from benchmarks._rehearsal import launch, need_namespaces, step_time_s
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.places.hosting import ThisMachine
from hetopt.optimizer.places.rehearsal import Rehearsal, rehearse
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.recommend import recommend
from hetopt.profiler.profile import Profile
from hetopt.trainer.launch.description import parse_hosts
from hetopt.trainer.spec import Compression

RATES = ("25mbit", "100mbit", "400mbit")
HOSTS = {4: (2, 1, 1), 8: (4, 2, 2)}
"""How many hosts at speed 1, 0.5 and 0.25."""

WAYS: dict[str, dict[str, object]] = {
    "dense": {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"},
    "topk 1 %": {"compression": Compression(name="topk", ratio=0.01), "ratio_policy": "fixed"},
    "auto": {"compression": Compression(), "ratio_policy": "auto", "collective_policy": "cheapest"},
}
STEPS = 60
WARM_UP_STEPS = 20
JITTER = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rehearsal."""

    predicted_s: float
    measured_s: float
    by_hand_s: float
    inside: bool

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1


def rehearsed_steps(*, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and baselines of the rehearsals; quick: one rate, without `auto`."""
    need_namespaces()
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as folder:
        path = Path(folder) / "profile.json"
        run(Path(folder), "profile", "digits", "--time-budget", "20", "-o", str(path))
        profile = Profile.load(path)
    goal = Goal(ends="steps", amount=STEPS, budget_usd=5.0)
    options = Options(batch_size=256, only_types=("c7a.large",))
    plan = recommend(profile, load_catalog(), goal, options, seed=0, now=datetime.now(UTC))
    cases: list[Case] = []
    print("Rehearsed steps: hosts, link, what is sent: predicted, measured, error")
    for rate in RATES[1:2] if quick else RATES:
        for hosts, speeds in HOSTS.items():
            for way in list(WAYS)[:2] if quick else WAYS:
                one = _case(plan, rate, speeds, way)
                cases.append(one)
                print(
                    f"{hosts:2} {rate:8} {way:9} {1e3 * one.predicted_s:8.1f} ms {1e3 * one.measured_s:8.1f} ms "
                    f"{one.error:+7.1%}{'' if one.inside else '  outside its interval'}"
                )
                sys.stdout.flush()
    errors = [abs(one.error) for one in cases]
    by_hand = [abs(one.by_hand_s / one.measured_s - 1) for one in cases]
    figures = {
        "rehearsed_steps_median_error": round(statistics.median(errors), 4),
        "rehearsed_steps_p90_error": round(float(np.quantile(errors, 0.9)), 4),
        "rehearsed_steps_coverage": round(sum(one.inside for one in cases) / len(cases), 4),
    }
    return figures, {"rehearsed_steps_median_error_by_hand": round(statistics.median(by_hand), 4)}


def _case(plan: Plan, rate: str, speeds: tuple[int, ...], way: str) -> Case:
    described = "; ".join(
        f"speed={speed},rate={rate},noise={JITTER} x{count}"
        for speed, count in zip((1, 0.5, 0.25), speeds, strict=True)
    )
    here = ThisMachine(
        processors=len(os.sched_getaffinity(0)), operating_system=f"{platform.system()} {platform.release()}"
    )
    wanted = plan.model_copy(update={"run": plan.run.model_copy(update={"batch_policy": "static", **WAYS[way]})})
    rehearsal = rehearse(wanted, here, parse_hosts(described))
    told = rehearsal.prediction.step_time_s
    measured = step_time_s(launch(rehearsal.run), from_step=WARM_UP_STEPS)
    return Case(
        predicted_s=told.value,
        measured_s=measured,
        by_hand_s=_by_hand_s(rehearsal, plan.profile.job.gradient_bytes),
        inside=told.low <= measured <= told.high,
    )


def _by_hand_s(rehearsal: Rehearsal, gradient_bytes: int) -> float:
    run_ = rehearsal.run
    assert run_.miniature is not None
    slowest = max(
        worker.declared.fixed_s + worker.declared.per_sample_s * worker.local_batch_size
        for worker in run_.workers
        if worker.declared is not None
    )
    count = len(run_.workers)
    rate = min(host.rate_bits_per_s or 1e9 for host in run_.miniature.hosts) / 8
    ratio = run_.compression.ratio
    return slowest + 2 * (count - 1) / count * gradient_bytes * ratio / rate
