"""The simulation beside which headlines are held: exact where nothing is uncertain, as Daly's law where machines go."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from benchmarks.chance import Pool, Stated, measure, run_once
from hetopt.optimizer.cost.checkpointing import factor_at
from hetopt.optimizer.cost.preemption_rate import SHOCKS, HazardComponent, PreemptionRatePosterior

SURE = Stated(
    pools=(Pool(machines=2, usd_per_hour=1.0, price_log_sd=0.0, belief=None),),
    work_s=3500.0,
    step_time_log_sd=0.0,
    steps_log_sd=0.0,
    startup_s=100.0,
    startup_log_sd=0.0,
    detection_s=30.0,
    checkpoint_s=5.0,
    interval_s=1000.0,
    resumes=True,
    beside_usd_per_hour=0.5,
    fixed_usd=0.25,
    minimum_s=60.0,
)


def known(per_hour: float) -> PreemptionRatePosterior:
    part = HazardComponent(shape=1e8, rate_h=1e8 / per_hour)
    return PreemptionRatePosterior(calm=part, scarce=part, scarce_chance=0.5)


def test_without_uncertainty_a_run_is_its_plan() -> None:
    total_s, usd = run_once(SURE, random.Random(0))
    assert total_s == 100.0 + 3500.0 + 3 * 5.0
    assert usd == pytest.approx(0.25 + 2.5 * total_s / 3600)


@pytest.mark.parametrize("machines", [1, 4])
def test_losses_stretch_a_run_as_dalys_law_says(machines: int) -> None:
    """A law for the mean, over machines that go together as the planner believes."""
    pool = Pool(machines=machines, usd_per_hour=1.0, price_log_sd=0.0, belief=known(0.5))
    plan, draw = replace(SURE, pools=(pool,)), random.Random(1)
    rate = 0.5 * float(SHOCKS.effective_machines(machines))
    mean = statistics.fmean(run_once(plan, draw)[0] for _ in range(4000)) - 100.0
    assert mean / 3500.0 == pytest.approx(float(factor_at(3500.0, rate, 1000.0, 5.0, 130.0)), rel=0.02)


def test_headlines_are_kept() -> None:
    told = measure(6, 300, seed=3)
    assert len(told) == 6
    assert statistics.fmean(one.said - one.kept for one in told) <= 0.03
    assert max(one.said - one.kept for one in told) <= 0.08, "300 runs scatter by 3 points"
