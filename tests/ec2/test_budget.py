"""The budget is never passed: whatever prices do below the worst case, whenever somebody looks or nobody does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.ec2.budget import LEAST_LIFETIME_S, SHUTDOWN_S, Guard, Stay, lifetime_s, spent_usd
from hetopt.profiler.errors import BadInput, BudgetStop

money = st.floats(0.5, 500)
rates = st.floats(0.01, 100)


@given(budget=money, worst=rates, fixed=st.floats(0, 0.1))
def test_a_lifetime_at_the_worst_price_costs_the_budget(budget: float, worst: float, fixed: float) -> None:
    try:
        life = lifetime_s(budget, fixed_usd=fixed, worst_usd_per_hour=worst)
    except BudgetStop:
        assert (budget - fixed) / worst * 3600 < LEAST_LIFETIME_S
        return
    assert life / 3600 * worst + fixed == pytest.approx(budget)


@given(
    budget=money,
    worst=rates,
    shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=40),
    gaps=st.lists(st.floats(1.0, 60.0), min_size=1, max_size=40),
)
def test_nobody_spends_more_than_the_budget(
    budget: float, worst: float, shares: list[float], gaps: list[float]
) -> None:
    """Prices move as they like below the worst, looks come when they come: what is left always pays for the end."""
    guard = Guard(budget_usd=budget, fixed_usd=0.0, worst_usd_per_hour=worst, checkpoint_s=30, heartbeat_s=60)
    now, spent, end = 0.0, 0.0, budget / worst * 3600
    for share, gap in zip(shares * 40, gaps * 40, strict=False):
        if guard.decide(spent, now) == "stop":
            break
        assert now + gap <= guard.stop_training_s(guard.end_s(spent, now)) + 1e-6
        now, spent = now + gap, spent + share * worst * gap / 3600
        assert guard.end_s(spent, now) >= end - 1e-6, "time that was granted is never taken back"
        end = guard.end_s(spent, now)
    # Everything goes on at the worst price until the machines end by themselves.
    final = spent + worst * max(0.0, end - now) / 3600
    assert final <= budget * (1 + 1e-9)


@given(budget=money, worst=rates)
def test_training_ends_before_the_machines_do(budget: float, worst: float) -> None:
    guard = Guard(budget_usd=budget, fixed_usd=0.0, worst_usd_per_hour=worst, checkpoint_s=45, heartbeat_s=15)
    assert guard.stop_training_s(1e6) == 1e6 - 45 - SHUTDOWN_S


def test_the_bill_of_a_machine() -> None:
    assert Stay(since_s=0, until_s=10, usd_per_hour=3.6).usd(1e9) == pytest.approx(0.06), "a minute at least"
    assert Stay(since_s=0, until_s=None, usd_per_hour=3.6).usd(1000) == pytest.approx(1.0)
    stays = [Stay(since_s=0, until_s=None, usd_per_hour=3.6), Stay(since_s=500, until_s=600, usd_per_hour=3.6)]
    assert spent_usd(stays, 1000) == pytest.approx(1.1)


@pytest.mark.parametrize(("budget", "worst"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0), (1, float("nan"))])
def test_what_guards_nothing_is_refused(budget: float, worst: float) -> None:
    with pytest.raises(BadInput):
        Guard(budget_usd=budget, fixed_usd=0, worst_usd_per_hour=worst, checkpoint_s=1, heartbeat_s=1)
