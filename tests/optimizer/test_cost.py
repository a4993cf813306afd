"""Vectors of Daly's model, laws of interruptions, and bills that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.cost.bill import beside_usd_per_hour, billed_hours
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.cost.checkpointing import daly_interval_s, factor_at
from hetopt.optimizer.cost.cost import cluster_hazard, interruptions, planned_interval_s
from hetopt.optimizer.cost.preemption_rate import CALM, SCARCE, PreemptionRatePosterior, scarce_probability

HOUR = 3600.0
works = st.floats(60, 1e6)
rates_per_hour = st.floats(1e-4, 2)


def _hazard(pools: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Of a cluster before anything was seen, given the chance that each pool is scarce."""
    return cluster_hazard(
        (machines, PreemptionRatePosterior(scarce_chance=chance) if chance else None) for machines, chance in pools
    )


def at_dalys_interval(work_s: float, losses_per_hour: float, checkpoint_s: float, restart_s: float) -> float:
    interval_s = daly_interval_s(HOUR / losses_per_hour, checkpoint_s)
    return float(factor_at(work_s, losses_per_hour, interval_s, checkpoint_s, restart_s))


@pytest.mark.parametrize(
    ("theta_h", "checkpoint_s", "restart_s", "best_min", "overhead"),
    [
        (4, 10, 180, 8.83, 0.0513),
        (24, 10, 180, 21.80, 0.0175),
        (300, 10, 180, 77.35, 0.0045),
        (1, 120, 600, 14.19, 0.5472),
    ],
)
def test_daly_vectors(theta_h: float, checkpoint_s: float, restart_s: float, best_min: float, overhead: float) -> None:
    assert float(daly_interval_s(theta_h * HOUR, checkpoint_s)) / 60 == pytest.approx(best_min, rel=2e-3)
    assert at_dalys_interval(1e9, 1 / theta_h, checkpoint_s, restart_s) - 1 == pytest.approx(overhead, rel=2e-2)


@given(works, rates_per_hour, st.floats(0.1, 60), st.floats(1, 600), st.floats(1, 3))
def test_more_losses_slower_restarts_never_help(
    work: float, rate: float, checkpoint: float, restart: float, more: float
) -> None:
    def factor(rate: float, restart: float) -> float:
        return at_dalys_interval(work, rate, checkpoint, restart)

    assert factor(rate, restart) >= 1 - 1e-9
    assert factor(rate, restart * more) >= factor(rate, restart) * (1 - 1e-9)
    assert factor(rate * more, restart) >= factor(rate, restart) * (1 - 1e-3)  # the interval is only nearly optimal


def test_without_losses_nothing_is_added() -> None:
    lost = interruptions(
        1000.0, calm_per_hour=0.0, scarce_per_hour=0.0, scarce_chance=0.0, checkpoint_s=1, restart_s=200
    )
    assert float(lost.expected_factor) == pytest.approx(1)
    assert float(lost.log_sd) == pytest.approx(0)


@given(works, st.integers(1, 16), st.floats(0, 0.5))
def test_expectation_lies_between_calm_and_scarce(work: float, machines: int, chance: float) -> None:
    lost = interruptions(
        work,
        calm_per_hour=machines * CALM.mean_per_hour,
        scarce_per_hour=machines * SCARCE.mean_per_hour,
        scarce_chance=chance,
        checkpoint_s=2,
        restart_s=210,
    )
    assert 1 <= float(lost.expected_factor) <= float(lost.scarce_factor) + 1e-9
    assert float(lost.log_sd) >= 0


def test_bands_rank_and_on_demand_is_safe() -> None:
    bands = ["<5%", "5-10%", "10-15%", "15-20%", ">20%"]
    chances = [scarce_probability("spot", band) for band in bands]
    assert chances == sorted(chances)
    assert chances[0] < scarce_probability("spot", None) < chances[-1]
    assert scarce_probability("on-demand", None) == 0


def test_the_hazard_of_a_cluster_is_that_of_its_pools() -> None:
    assert _hazard([(4, 0.0)]) == (0.0, 0.0, 0.0)
    calm, scarce, chance = _hazard([(1, 0.1)])
    assert (calm, chance) == (CALM.mean_per_hour, pytest.approx(0.1))
    assert scarce == pytest.approx(SCARCE.mean_per_hour + CALM.mean_per_hour)
    both = _hazard([(4, 0.1), (2, 0.0), (3, 0.2)])
    assert both[2] == pytest.approx(1 - 0.9 * 0.8)
    assert _hazard([(8, 0.1)])[0] < 8 * CALM.mean_per_hour


def test_one_interval_for_the_prior_costs_more_than_knowing_and_less_than_any_other() -> None:
    calm, scarce, chance = _hazard([(8, 0.1)])
    prior = {"calm_per_hour": calm, "scarce_per_hour": scarce, "scarce_chance": chance}
    best = interruptions(36000.0, **prior, checkpoint_s=10, restart_s=210)
    assert float(best.expected_factor) > at_dalys_interval(36000.0, calm, 10, 210) * (1 - chance)
    for scale in (0.5, 2.0):
        other = interruptions(36000.0, **prior, checkpoint_s=10, restart_s=210, interval_s=scale * best.interval_s)
        assert float(other.expected_factor) > float(best.expected_factor)


def test_repeated_rows_have_the_interval_of_each_alone() -> None:
    generator = np.random.default_rng(0)
    calm, scarce, chance = (
        generator.choice(values, 1000) for values in ([0.0, 0.001, 0.004], [0.0, 0.5, 2.0], [0.0, 0.1, 0.3])
    )

    def intervals(rows: slice) -> list[float]:
        found = planned_interval_s(
            calm_per_hour=calm[rows],
            scarce_per_hour=scarce[rows],
            scarce_chance=chance[rows],
            checkpoint_s=5.0,
            restart_s=200.0,
        )
        return [float(interval) for interval in found]

    assert intervals(slice(None)) == [intervals(slice(row, row + 1))[0] for row in range(1000)]


def test_machines_are_billed_by_the_second_after_a_minute() -> None:
    billing = load_billing()
    assert float(billed_hours(1, billing)) == pytest.approx(60 / HOUR)
    assert float(billed_hours(61, billing)) == pytest.approx(61 / HOUR)
    assert beside_usd_per_hour(billing, 100) == pytest.approx(0.011 + 0.005, rel=0.01)
