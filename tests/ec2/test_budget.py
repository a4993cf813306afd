"""The budget is never passed: whatever prices do below the worst case, whenever somebody looks or nobody does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.node.agent import PLACE_WITHIN_S
from hetopt.backends.ec2.renewal import Stay, spent_usd
from hetopt.backends.ec2.renter.order import LEAST_LIFETIME_S, UNPLACED_S, Guard, Role, lifetime_s
from hetopt.backends.ec2.renter.ordering import Job
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.errors import BadInput, BudgetStop

SPOT = Role(
    name="0-c7i-large",
    instance_types=("c7i.large",),
    hosts=("h0",),
    workers_per_machine=1,
    market="spot",
    image_kind="x86_64-cpu",
)
money = st.floats(0.5, 500)
rates = st.floats(0.01, 100)


@given(budget=money, worst=rates, fixed=st.floats(0, 0.1))
def test_a_lifetime_at_the_worst_price_costs_the_budget(budget: float, worst: float, fixed: float) -> None:
    try:
        life = lifetime_s(budget, fixed_usd=fixed, worst_usd_per_hour=worst)
    except BudgetStop:
        assert (budget - fixed) / worst * 3600 < LEAST_LIFETIME_S
        return
    assert (life + SHUTDOWN_S) / 3600 * worst + fixed == pytest.approx(budget)


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
    now, spent, end = 0.0, 0.0, budget / worst * 3600 - SHUTDOWN_S
    for share, gap in zip(shares * 40, gaps * 40, strict=False):
        if guard.decide(spent, now) == "stop":
            break
        assert now + gap <= guard.stop_training_s(guard.end_s(spent, now)) + 1e-6
        now, spent = now + gap, spent + share * worst * gap / 3600
        assert guard.end_s(spent, now) >= end - 1e-6, "time that was granted is never taken back"
        end = guard.end_s(spent, now)
    # Everything goes on at the worst price until the machines' timers end them, and they are off.
    final = spent + worst * max(0.0, end + SHUTDOWN_S - now) / 3600
    assert final <= budget * (1 + 1e-9)


@given(worst=rates, hours=st.floats(1.0, 100.0), share=st.floats(0.05, 1.0), at=st.floats(0.0, 1.0))
def test_a_move_that_nobody_sees_through_is_paid_by_what_was_kept_for_it(
    worst: float, hours: float, share: float, at: float
) -> None:
    """Both clusters at their worst price: until those end that wait in vain, and until the lease ends."""
    budget = worst * (hours + UNPLACED_S / 3600)
    job = Job(
        roles=(SPOT,),
        budget_usd=budget,
        gradient_bytes=1,
        deadline_s=7e9,
        may_cost_usd=worst * hours * 0.999,
        disk_gb=14,
    )
    kept = job.move_usd(worst)
    assert kept == pytest.approx(worst * UNPLACED_S / 3600)
    guard = Guard(budget_usd=budget, fixed_usd=kept, worst_usd_per_hour=worst, checkpoint_s=30, heartbeat_s=60)
    now_s = at * hours * 3600
    spent = share * worst * now_s / 3600
    lease_end_s = guard.end_s(spent, now_s)
    assert spent + worst * (lease_end_s - now_s) / 3600 + worst * UNPLACED_S / 3600 <= budget * (1 + 1e-9)


def test_nothing_is_kept_for_a_move_that_will_not_be() -> None:
    job = Job(roles=(SPOT,), budget_usd=10.0, gradient_bytes=1, deadline_s=3600.0, may_cost_usd=8.0, disk_gb=14)
    assert job.move_usd(2.4) == pytest.approx(1.0)
    assert replace(job, spent_usd=1.5).move_usd(2.4) == 0.0, "the budget pays for no more than what was planned"
    assert replace(job, deadline_s=None).move_usd(2.4) == 0.0
    assert replace(job, may_cost_usd=None).move_usd(2.4) == 0.0, "probes end before they move"
    held = SPOT.model_copy(update={"market": "on-demand"})
    assert replace(job, roles=(held,)).move_usd(2.4) == 0.0


def test_machines_wait_no_longer_for_a_place_than_a_move_pays_for() -> None:
    assert PLACE_WITHIN_S + 600.0 <= UNPLACED_S


@given(budget=money, worst=rates)
def test_training_ends_before_the_machines_do(budget: float, worst: float) -> None:
    guard = Guard(budget_usd=budget, fixed_usd=0.0, worst_usd_per_hour=worst, checkpoint_s=45, heartbeat_s=15)
    assert guard.stop_training_s(1e6) == 1e6 - 45


def test_the_bill_of_a_machine() -> None:
    assert Stay(since_s=0, until_s=10, usd_per_hour=3.6).usd(1e9) == pytest.approx(0.06), "a minute at least"
    assert Stay(since_s=0, until_s=None, usd_per_hour=3.6).usd(1000) == pytest.approx(1.0)
    stays = [Stay(since_s=0, until_s=None, usd_per_hour=3.6), Stay(since_s=500, until_s=600, usd_per_hour=3.6)]
    assert spent_usd(stays, 1000) == pytest.approx(1.1)


@pytest.mark.parametrize(("budget", "worst"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0), (1, float("nan"))])
def test_what_guards_nothing_is_refused(budget: float, worst: float) -> None:
    with pytest.raises(BadInput):
        Guard(budget_usd=budget, fixed_usd=0, worst_usd_per_hour=worst, checkpoint_s=1, heartbeat_s=1)
