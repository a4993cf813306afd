"""The budget is never passed: whatever prices do below the worst case, whenever somebody looks or nobody does.

What machines cost follows the prices that are seen: piece by piece, never beyond the worst, and never downwards.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.ec2.renter.order import (
    LEAST_ROOM,
    UNPLACED_S,
    ClusterState,
    MachineState,
    Order,
    Rate,
    Role,
    Zone,
    lifetime_s,
    rebilled,
    usd_per_hour,
    with_highest_prices,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.ordering import move_usd
from hetopt.backends.ec2.renter.request import Answer
from hetopt.backends.host.agent import PLACE_WITHIN_S
from hetopt.core import budget_law
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.errors import BudgetStop
from hetopt.optimizer.cost.bill import LEAST_LIFETIME_S, least_budget_usd

SPOT = Role(
    name="0-c7i-large",
    instance_types=("c7i.large",),
    hosts=("h0",),
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
    now, spent, end = 0.0, 0.0, budget / worst * 3600 - SHUTDOWN_S
    for share, gap in zip(shares * 40, gaps * 40, strict=False):
        if now + gap > end - 30:  # training must end before the next look
            break
        now, spent = now + gap, spent + share * worst * gap / 3600
        assert budget_law.end_s(now, budget - spent, worst) >= end - 1e-6, "time that was granted is never taken back"
        end = budget_law.end_s(now, budget - spent, worst)
    # Everything goes on at the worst price until the machines' timers end them, and they are off.
    final = spent + worst * max(0.0, end + SHUTDOWN_S - now) / 3600
    assert final <= budget * (1 + 1e-9)


@given(worst=rates, hours=st.floats(1.0, 100.0), share=st.floats(0.05, 1.0), at=st.floats(0.0, 1.0))
def test_a_move_that_nobody_sees_through_is_paid_by_what_was_kept_for_it(
    worst: float, hours: float, share: float, at: float
) -> None:
    """Both clusters at their worst price: until those end that wait in vain, and until the lease ends."""
    budget = worst * (hours + UNPLACED_S / 3600)
    kept = move_usd(worst, roles=(SPOT,), budget_usd=budget, deadline_s=7e9, may_cost_usd=worst * hours * 0.999)
    assert kept == pytest.approx(worst * UNPLACED_S / 3600)
    now_s = at * hours * 3600
    spent = share * worst * now_s / 3600
    lease_end_s = budget_law.end_s(now_s, budget - kept - spent, worst)
    assert spent + worst * (lease_end_s - now_s) / 3600 + worst * UNPLACED_S / 3600 <= budget * (1 + 1e-9)


def test_nothing_is_kept_for_a_move_that_will_not_be() -> None:
    move = partial(move_usd, 2.4, roles=(SPOT,), budget_usd=10.0, deadline_s=3600.0, may_cost_usd=8.0)
    assert move() == pytest.approx(1.0)
    assert move(spent_usd=1.5) == 0.0, "the budget pays for no more than what was planned"
    assert move(deadline_s=None) == 0.0
    assert move(may_cost_usd=None) == 0.0, "probes end before they move"
    held = SPOT.model_copy(update={"market": "on-demand"})
    assert move(roles=(held,)) == 0.0


def test_machines_wait_no_longer_for_a_place_than_a_move_pays_for() -> None:
    assert PLACE_WITHIN_S + 600.0 <= UNPLACED_S


@given(
    pools=st.lists(st.tuples(st.integers(1, 8), st.floats(0.05, 1.0), st.floats(0.1, 40.0)), min_size=1, max_size=3),
    budget=money,
    takes_s=st.floats(600.0, 1e6),
)
def test_highest_prices_are_what_the_budget_pays_until_the_run_has_ended(
    pools: list[tuple[int, float, float]], budget: float, takes_s: float
) -> None:
    roles = [
        SPOT.model_copy(update={"instance_types": (f"t{number}",), "hosts": tuple(f"h{n}" for n in range(count))})
        for number, (count, _, _) in enumerate(pools)
    ]
    rates = {
        f"t{number}": Rate(usd_per_hour=share * usd, worst_usd_per_hour=usd, on_demand_usd_per_hour=usd)
        for number, (_, share, usd) in enumerate(pools)
    }
    zone = Zone(name="a", zone_id="a", subnet_id="s", vpc_id="v", rates=rates)
    affordable = budget / (takes_s + SHUTDOWN_S) * 3600
    capped = with_highest_prices(zone, roles, affordable)
    for name, rate in capped.rates.items():
        on_demand = rates[name].on_demand_usd_per_hour
        assert min(on_demand, LEAST_ROOM * rate.usd_per_hour) <= rate.worst_usd_per_hour <= on_demand
        assert rate.usd_per_hour == rates[name].usd_per_hour
    worst, now = worst_usd_per_hour(roles, [capped]), usd_per_hour(roles, zone)
    if affordable >= LEAST_ROOM * now:
        assert budget_law.end_s(0.0, budget, worst) >= takes_s * (1 - 1e-9), "the run may end unfollowed"
    else:
        assert worst <= LEAST_ROOM * now * (1 + 1e-9)
    assert worst_usd_per_hour(roles, [capped], on_demand=True) == pytest.approx(worst_usd_per_hour(roles, [zone]))


@given(budget=st.floats(0.5, 500), worst=st.floats(0.01, 100))
def test_planner_and_follower_have_one_law(budget: float, worst: float) -> None:
    assert budget_law.worst_usd(worst, budget_law.lasts_s(budget, worst)) == pytest.approx(budget)
    assert budget_law.lasts_s(least_budget_usd(worst, 0.01) - 0.01, worst) == pytest.approx(LEAST_LIFETIME_S)


prices = st.floats(0.01, 5.0)
gaps = st.floats(0.0, 5000.0)
WORST_PRICE = 5.0


@given(first=prices, changes=st.lists(st.tuples(gaps, prices), max_size=12), last=gaps, lives=st.booleans())
def test_what_is_spent_never_falls_and_is_the_sum_over_the_pieces(
    first: float, changes: list[tuple[float, float]], last: float, lives: bool
) -> None:
    stay, now_s, spent = seen_machine(since_s=1000.0, usd_per_hour=first), 1000.0, 0.0
    rate, begun_s, pieces = first, 1000.0, 0.0
    for gap, price in changes:
        now_s += gap
        assert stay.usd(now_s) >= spent
        spent = stay.usd(now_s)
        stay = stay.repriced(price, now_s)
        assert stay.usd(now_s) == pytest.approx(spent), "a price changes nothing that was spent"
        # The least that is paid for is paid at the price that it began with.
        until_s = max(now_s, 1060.0)
        pieces, rate, begun_s = pieces + rate * (until_s - begun_s) / 3600, price, until_s
    now_s += last
    if not lives:
        stay = stay.model_copy(update={"until_s": now_s})
    assert stay.usd(now_s) >= spent
    assert stay.usd(now_s) == pytest.approx(pieces + rate * (max(now_s, 1060.0) - begun_s) / 3600)
    assert stay.usd(now_s) <= WORST_PRICE * max(now_s - 1000.0, 60.0) / 3600 * (1 + 1e-9)


def seen_machine(host: str = "h0", zone: str = "a", **changes: Any) -> MachineState:
    usual: dict[str, Any] = {
        "id": f"i-{host}",
        "instance_type": "c7i.large",
        "state": "running",
        "since_s": 0.0,
        "usd_per_hour": 1.0,
        "extras_usd_per_hour": 0.01,
    }
    return MachineState(host=host, zone=zone, **{**usual, **changes})


@given(st.lists(st.tuples(gaps, prices), max_size=6), st.floats(1.0, 3599.0))
def test_what_ec2_takes_back_in_its_first_hour_is_free_whatever_its_prices_were(
    changes: list[tuple[float, float]], end_s: float
) -> None:
    one, now_s = seen_machine(), 0.0
    for gap, price in changes:
        now_s = min(now_s + gap, end_s)
        one = one.repriced(price, now_s)
    ended = one.model_copy(update={"until_s": end_s, "ending": "interrupted", "state": "terminated"})
    usd = ended.usd(1e6)
    assert usd == pytest.approx(0.01 * max(end_s, 60.0) / 3600)


@pytest.fixture
def order(order_for: Callable[..., Order]) -> Order:
    """Two machines on spot, in one of three zones."""
    made = order_for()
    role = made.roles[0].model_copy(update={"hosts": ("h0", "h1")})
    rate = Rate(usd_per_hour=1.0, worst_usd_per_hour=3.0, on_demand_usd_per_hour=4.0)
    zones = tuple(
        Zone(name=name, zone_id=name, subnet_id=f"s-{name}", vpc_id="v", rates={"c7i.large": rate}) for name in "abc"
    )
    return made.model_copy(update={"roles": (role,), "zones": zones, "extras_usd_per_hour": 0.01, "created_s": 0.0})


def seen(**changes: Any) -> ClusterState:
    return ClusterState(
        **{"time_s": 0.0, "zone": "a", "machines": (seen_machine(), seen_machine("h1", zone="")), **changes}
    )


def history(at_s: float, *prices: tuple[str, float]) -> Answer:
    """What EC2 answers, where the pools of c7i.large in some zones have changed their price."""
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    told = ({"AvailabilityZone": zone, "SpotPrice": str(usd), "Timestamp": at} for zone, usd in prices)
    return {"SpotPriceHistory": [{"InstanceType": "c7i.large", **one} for one in told]}


def test_prices_are_believed_up_to_the_worst_and_kept_where_nothing_is_said(order: Order) -> None:
    one = rebilled(order, seen(), history(3600.0, ("a", 2.0), ("b", 77.0), ("z", 0.1)), 3600.0)
    assert {each.usd_per_hour for each in one.machines} == {2.01}
    assert one.spent_usd(3600.0) == pytest.approx(2.0)
    assert one.spent_usd(7200.0) == pytest.approx(2.0 + 2 * 2.01)
    assert [one.usd_per_hour(zone, "c7i.large", "spot") for zone in order.zones] == [2.01, 3.0, 1.0]
    assert one.usd_per_hour(order.zones[1], "c7i.large", "on-demand") == 4.0
    two = rebilled(order, one, history(4200.0, ("b", 0.5)), 4200.0)
    assert two.machines == one.machines
    assert [two.usd_per_hour(zone, "c7i.large", "spot") for zone in order.zones] == [2.01, 0.51, 1.0]
    assert ClusterState.from_json(two.to_json(), origin="a test") == two
