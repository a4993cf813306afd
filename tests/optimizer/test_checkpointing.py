"""The expected time with losses: formula, discrete-event simulation and closed forms agree within 1 %."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.cost.checkpointing import (
    daly_interval_s,
    factor_at,
    interval_under_belief_s,
    young_interval_s,
)
from hetopt.optimizer.cost.cost import interruptions
from hetopt.optimizer.cost.monte_carlo import Finalist, RentedPool, RunTerms, losses, possible_runs
from hetopt.optimizer.cost.preemption_rate import CALM, SCARCE, SHOCKS, PreemptionRatePosterior

HOUR = 3600.0


def best_interval_s(mean_time_between_losses_s: ArrayLike, checkpoint_s: float) -> NDArray[np.float64]:
    """The root of 1 - t / Theta = e^(-(t + C) / Theta), by Newton's method from Daly's approximation."""
    theta = np.asarray(mean_time_between_losses_s, dtype=np.float64)
    x, c = daly_interval_s(theta, checkpoint_s) / theta, checkpoint_s / theta
    x = np.clip(x, 1e-12, 1 - 1e-12)
    for _ in range(6):
        decay = np.exp(-(x + c))
        x = np.clip(x - (1 - x - decay) / (decay - 1), x / 10, 1.0)
    return np.asarray(x * theta, dtype=np.float64)


CASES = [
    # Theta in hours, checkpoint, restart
    (0.5, 20.0, 120.0),
    (1.0, 120.0, 600.0),
    (4.0, 10.0, 180.0),
    (24.0, 30.0, 300.0),
]


def simulated_s(
    work_s: float, theta_s: float, interval_s: float, checkpoint_s: float, restart_s: float, draw: random.Random
) -> float:
    """One run, event by event: segments of work and a checkpoint, each broken off by a loss or not, and restarts."""
    now = done = 0.0
    next_loss = draw.expovariate(1 / theta_s)
    while done < work_s:
        segment = min(interval_s, work_s - done) + checkpoint_s
        if now + segment <= next_loss:
            now += segment
            done += segment - checkpoint_s
            continue
        now = next_loss
        next_loss = now + draw.expovariate(1 / theta_s)
        while now + restart_s > next_loss:
            now = next_loss
            next_loss = now + draw.expovariate(1 / theta_s)
        now += restart_s
    return now


@pytest.mark.parametrize(("theta_h", "checkpoint_s", "restart_s"), CASES)
def test_formula_events_and_draws_agree_within_a_percent(theta_h: float, checkpoint_s: float, restart_s: float) -> None:
    theta = theta_h * HOUR
    interval = float(best_interval_s(theta, checkpoint_s))
    work = 200 * interval
    formula = float(factor_at(work, 1 / theta_h, interval, checkpoint_s, restart_s))
    draw = random.Random(7)
    runs = [simulated_s(work, theta, interval, checkpoint_s, restart_s, draw) / work for _ in range(400)]
    assert np.mean(runs) == pytest.approx(formula, rel=0.01)
    drawn = losses(
        np.full(4000, work),
        np.full(4000, 1 / theta_h),
        interval,
        checkpoint_s,
        restart_s,
        np.random.default_rng(3),
    )
    factors = 1 + drawn.added_s / work
    assert float(factors.mean()) == pytest.approx(formula, rel=0.01)
    # The spread is that of the events too: what a promise of 90 % rests on.
    assert float(np.quantile(factors, 0.9)) == pytest.approx(float(np.quantile(runs, 0.9)), rel=0.01)


@pytest.mark.parametrize(("theta_h", "checkpoint_s", "restart_s"), CASES)
def test_closed_forms_are_within_a_percent_of_the_best_interval(
    theta_h: float, checkpoint_s: float, restart_s: float
) -> None:
    """Young's and Daly's intervals cost at most a percent more time than the root; a scan finds none that is better."""
    theta = theta_h * HOUR
    best = float(best_interval_s(theta, checkpoint_s))

    def factor(interval: float) -> float:
        return float(factor_at(1e9, 1 / theta_h, interval, checkpoint_s, restart_s))

    assert float(daly_interval_s(theta, checkpoint_s)) == pytest.approx(best, rel=0.01)
    assert factor(float(young_interval_s(theta, checkpoint_s))) <= 1.01 * factor(best)
    assert factor(best) <= min(factor(best * scale) for scale in np.geomspace(0.2, 5, 201)) * (1 + 1e-6)


@given(st.floats(100, 1e7), st.floats(0.1, 1000))
def test_the_best_interval_solves_its_equation(theta: float, checkpoint: float) -> None:
    x = float(best_interval_s(theta, checkpoint)) / theta
    assert 1 - x == pytest.approx(np.exp(-(x + checkpoint / theta)), abs=1e-6)


@given(st.floats(60, 1e6), st.floats(1e-3, 2), st.floats(1, 60), st.floats(1, 600))
def test_time_is_at_least_work_and_checkpoints(work: float, hazard: float, checkpoint: float, restart: float) -> None:
    interval = float(best_interval_s(HOUR / hazard, checkpoint))
    factor = float(factor_at(work, hazard, interval, checkpoint, restart))
    assert factor >= (1.0 if work <= interval else 1 + checkpoint / interval) - 1e-9
    assert float(factor_at(work, 0.0, interval, checkpoint, restart)) == pytest.approx(
        1.0 if work <= interval else 1 + checkpoint / interval
    )


@pytest.mark.parametrize("machines", [1, 4, 16])
@pytest.mark.parametrize("checkpoint_s", [1.0, 10.0, 100.0])
def test_an_uncertain_hazard_has_the_interval_that_a_scan_finds(machines: int, checkpoint_s: float) -> None:
    hazards = PreemptionRatePosterior.prior(None).sample(4000, np.random.default_rng(0))[None, :] * machines
    best = float(interval_under_belief_s(hazards, 1 / 4000, checkpoint_s, 210.0)[0])

    def factor(interval: float) -> float:
        return float(factor_at(1e9, hazards, interval, checkpoint_s, 210.0).mean())

    assert factor(best) <= min(factor(best * scale) for scale in np.geomspace(0.2, 5, 61)) * 1.002


def test_a_known_hazard_has_the_interval_of_its_equation() -> None:
    rates = np.array([0.001, 0.05, 1.0])
    found = interval_under_belief_s(rates[:, None], 1.0, 30.0, 240.0)
    assert found == pytest.approx(best_interval_s(HOUR / rates, 30.0), rel=0.01)


@pytest.mark.parametrize("machines", [1, 4, 16])
def test_the_forecast_over_the_prior_is_the_mean_of_possible_runs(machines: int) -> None:
    """The formula that prices clusters against draws of runs whose hazard nobody knows: within 1 %."""
    belief = PreemptionRatePosterior.prior(None)
    effective = float(SHOCKS.effective_machines(machines))
    formula = interruptions(
        8 * HOUR,
        calm_per_hour=effective * CALM.mean_per_hour,
        scarce_per_hour=effective * SCARCE.mean_per_hour,
        scarce_chance=belief.scarce_chance,
        checkpoint_s=10.0,
        restart_s=210.0,
    )
    run = Finalist(pools=(RentedPool(machines=machines, usd_per_hour=1.0, belief=belief),), work_s=8 * HOUR)
    terms = RunTerms(billing=load_billing(), start_up_s=0.0, restart_s=210.0, checkpoint_s=10.0)
    drawn = possible_runs([run], terms, seed=0, draws=20_000)
    assert float(drawn.total_s.mean()) / (8 * HOUR) == pytest.approx(float(formula.expected_factor), rel=0.01)


def test_what_saves_nothing_loses_all_that_was_done() -> None:
    """The formula with no interval against draws of runs that begin again, and against the equation of one segment."""
    belief = PreemptionRatePosterior.prior(None)
    hazard = {
        "calm_per_hour": CALM.mean_per_hour,
        "scarce_per_hour": SCARCE.mean_per_hour,
        "scarce_chance": belief.scarce_chance,
        "checkpoint_s": 10.0,
        "restart_s": 210.0,
    }
    formula = interruptions(HOUR / 2, interval_s=np.inf, **hazard)
    run = Finalist(pools=(RentedPool(machines=1, usd_per_hour=1.0, belief=belief),), work_s=HOUR / 2)
    terms = RunTerms(billing=load_billing(), start_up_s=0.0, restart_s=210.0, checkpoint_s=10.0, resumes=False)
    drawn = possible_runs([run], terms, seed=0, draws=20_000)
    assert float(drawn.total_s.mean()) / (HOUR / 2) == pytest.approx(float(formula.expected_factor), rel=0.01)
    rate = 0.4 / HOUR
    whole = float(factor_at(8 * HOUR, 0.4, np.inf, 10.0, 0.0))
    assert whole == pytest.approx(math.expm1(8 * HOUR * rate) / (8 * HOUR * rate))
    assert interruptions(8 * HOUR, interval_s=np.inf, **hazard).expected_factor > 2 * formula.expected_factor
