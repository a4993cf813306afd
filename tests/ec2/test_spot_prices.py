"""What machines cost follows the prices that are seen: piece by piece, never beyond the worst, and never downwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.renewal import Stay
from hetopt.backends.ec2.renter.cluster_state import (
    PAIR_RESTS_S,
    ClusterState,
    MachineState,
    SpotPrices,
    pair,
    pools_of,
    repriced,
)
from hetopt.backends.ec2.renter.order import UNPLACED_S, Guard, Order, Rate, Zone
from hetopt.backends.ec2.renter.reconcile import guard_of, switched
from hetopt.core.budget_law import SHUTDOWN_S

prices = st.floats(0.01, 5.0)
gaps = st.floats(0.0, 5000.0)
WORST = 5.0


@given(first=prices, changes=st.lists(st.tuples(gaps, prices), max_size=12), last=gaps, lives=st.booleans())
def test_what_is_spent_never_falls_and_is_the_sum_over_the_pieces(
    first: float, changes: list[tuple[float, float]], last: float, lives: bool
) -> None:
    stay, now_s, spent = Stay(since_s=1000.0, until_s=None, usd_per_hour=first), 1000.0, 0.0
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
        stay = Stay(**{**vars(stay), "until_s": now_s})
    assert stay.usd(now_s) >= spent
    assert stay.usd(now_s) == pytest.approx(pieces + rate * (max(now_s, 1060.0) - begun_s) / 3600)
    assert stay.usd(now_s) <= WORST * max(now_s - 1000.0, 60.0) / 3600 * (1 + 1e-9)


def machine(host: str = "h0", zone: str = "a", **changes: Any) -> MachineState:
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
    one, now_s = machine(), 0.0
    for gap, price in changes:
        now_s = min(now_s + gap, end_s)
        one = one.repriced(price, now_s, minimum_s=60.0)
    ended = one.model_copy(update={"until_s": end_s, "ending": "interrupted", "state": "terminated"})
    usd = ended.stay(minimum_s=60.0, free_within_s=3600.0).usd(1e6)
    assert usd == pytest.approx(0.01 * max(end_s, 60.0) / 3600)


def test_a_price_is_for_machines_on_spot_that_are_there() -> None:
    for other in (
        machine(on_demand=True),
        machine(state="unseen"),
        machine(state="terminated", until_s=50.0, ending="finished"),
    ):
        assert other.repriced(2.0, 100.0, minimum_s=60.0) == other


@given(
    budget=st.floats(1.0, 100.0),
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40),
    gap=st.floats(1.0, 60.0),
)
def test_prices_never_take_a_promise_beyond_the_worst_case(budget: float, shares: list[float], gap: float) -> None:
    """Whatever is seen of prices: what was granted is paid for at the worst price, and never taken back."""
    guard = Guard(budget_usd=budget, fixed_usd=0.0, worst_usd_per_hour=WORST, checkpoint_s=30, heartbeat_s=60)
    stay, now_s, end_s = Stay(since_s=0.0, until_s=None, usd_per_hour=WORST), 60.0, 0.0
    for share in shares:
        stay = stay.repriced(share * WORST, now_s)
        now_s += gap
        spent = stay.usd(now_s)
        if guard.decide(spent, now_s) == "stop":
            break
        assert guard.end_s(spent, now_s) >= end_s - 1e-6
        end_s = guard.end_s(spent, now_s)
        assert spent + WORST * (end_s + SHUTDOWN_S - now_s) / 3600 == pytest.approx(budget)


@pytest.fixture
def order(order_for: Callable[..., Order]) -> Order:
    """Two machines on spot, in one of three zones."""
    made = order_for()
    role = made.roles[0].model_copy(update={"hosts": ("h0", "h1")})
    rate = Rate(usd_per_hour=1.0, worst_usd_per_hour=3.0)
    zones = tuple(
        Zone(name=name, zone_id=name, subnet_id=f"s-{name}", vpc_id="v", rates={"c7i.large": rate}) for name in "abc"
    )
    return made.model_copy(update={"roles": (role,), "zones": zones, "extras_usd_per_hour": 0.01, "created_s": 0.0})


def seen(**changes: Any) -> ClusterState:
    return ClusterState(**{"time_s": 0.0, "zone": "a", "machines": (machine(), machine("h1", zone="")), **changes})


def test_prices_are_believed_up_to_the_worst_and_kept_where_nothing_is_said(order: Order) -> None:
    one = repriced(order, seen(), {("a", "c7i.large"): 2.0, ("b", "c7i.large"): 77.0, ("z", "c7i.large"): 0.1}, 3600.0)
    assert {each.usd_per_hour for each in one.machines} == {2.01}
    assert one.spent_usd(3600.0) == pytest.approx(2.0)
    assert one.spent_usd(7200.0) == pytest.approx(2.0 + 2 * 2.01)
    assert [one.usd_per_hour(zone, "c7i.large", "spot") for zone in order.zones] == [2.01, 3.0, 1.0]
    assert one.usd_per_hour(order.zones[1], "c7i.large", "on-demand") == 3.0
    two = repriced(order, one, {("b", "c7i.large"): 0.5}, 4200.0)
    assert two.machines == one.machines
    assert two.prices_before == one.prices
    assert [two.usd_per_hour(zone, "c7i.large", "spot") for zone in order.zones] == [2.01, 0.51, 1.0]
    assert ClusterState.from_json(two.to_json(), origin="a test") == two


@pytest.mark.parametrize("spent_h", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("waited_s", [0.0, 300.0, UNPLACED_S])
def test_a_change_of_zones_that_nobody_sees_through_is_paid(order: Order, spent_h: float, waited_s: float) -> None:
    """Both clusters at their worst price: until those end that wait in vain, and until the lease ends."""
    now_s, budgeted = spent_h * 3600.0, order.model_copy(update={"budget_usd": 40.0})
    worst = budgeted.worst_usd_per_hour()
    change = switched(budgeted, seen(), ("h0", "h1"), "b", 600.0, now_s)
    spent = change.state.spent_usd(now_s)
    both = spent + worst * (change.end_s + SHUTDOWN_S - now_s + UNPLACED_S) / 3600
    assert both + budgeted.fixed_usd == pytest.approx(40.0)
    # Those that wait spend what was kept for them: the end stays where it is while they do.
    late = [
        machine(host, "b", duty="waits", since_s=now_s, usd_per_hour=3.0, id=f"i-new-{host}") for host in ("h0", "h1")
    ]
    leaving = change.state.model_copy(update={"machines": (*change.state.machines, *late)})
    then_s = now_s + waited_s
    end_s = guard_of(budgeted, leaving, then_s).end_s(leaving.spent_usd(then_s), then_s)
    assert end_s >= change.end_s - 1e-6


def at(here: float, there: float, seen_s: float) -> SpotPrices:
    return SpotPrices(seen_s=seen_s, usd_per_hour={"a": {"c7i.large": here}, "b": {"c7i.large": there}})


def test_another_zone_is_as_cheap_as_it_was_seen_twice(order: Order) -> None:
    hosts = ("h0", "h1")
    dear = tuple(each.model_copy(update={"usd_per_hour": 2.0}) for each in seen().machines)

    def elsewhere(now_s: float = 5000.0, **changes: Any) -> dict[str, float]:
        usual = {"machines": dear, "prices": at(2.0, 0.5, 4800.0), "prices_before": at(2.0, 0.6, 4200.0)}
        found = pools_of(order, seen(**{**usual, **changes}), hosts, now_s)
        assert found is not None
        assert found.usd_per_hour == dict.fromkeys(hosts, 2.0)
        return dict(found.elsewhere_usd_per_hour)

    assert elsewhere() == {"b": pytest.approx(1.2), "c": pytest.approx(2.0)}
    assert elsewhere(prices_before=at(2.0, 2.0, 4200.0))["b"] == pytest.approx(4.0), "a dip there, seen once"
    assert elsewhere(prices_before=at(0.5, 0.5, 4200.0))["b"] == pytest.approx(4.0), "a peak here, seen once"
    assert elsewhere(prices_before=None)["b"] == pytest.approx(4.0), "what the order says was seen, too"
    assert elsewhere(now_s=7000.0) == {}, "prices that old decide nothing"
    assert elsewhere(prices=None) == {}
    assert set(elsewhere(switches={pair("b", "a"): 4000.0})) == {"c"}
    assert set(elsewhere(switches={pair("b", "a"): 5000.0 - PAIR_RESTS_S})) == {"b", "c"}
    assert elsewhere(machines=(dear[0], dear[1].model_copy(update={"on_demand": True}))) == {}
    assert elsewhere(on_demand=True) == {}
