"""The budget is never passed: whatever prices do below the worst case, whenever somebody looks or nobody does.

Machines that nobody looks after extend their lease by what spot costs, and never beyond the budget.
What machines cost follows the prices that are seen: piece by piece, never beyond the worst, and never downwards.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from hypothesis import assume, given, strategies as st

from hetopt.backends.ec2.objects import ask_prices
from hetopt.backends.ec2.renter.order import (
    UNPLACED_S,
    ClusterState,
    MachineState,
    Order,
    Rate,
    Role,
    Zone,
    lifetime_s,
    rebilled,
)
from hetopt.backends.ec2.renter.ordering import move_usd
from hetopt.backends.ec2.renter.request import Answer
from hetopt.backends.host.agent import PLACE_WITHIN_S
from hetopt.backends.host.protocol import (
    PRICES_EVERY_S,
    Allowance,
    BilledTime,
    Lease,
    PaidMachine,
    PriceChange,
    Renewal,
    renewed_end_s,
    spent_usd,
)
from hetopt.core import budget_law
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.errors import BudgetStop
from hetopt.optimizer.cost.bill import LEAST_LIFETIME_S, least_budget_usd

SPOT = Role(
    name="0-c7i-large",
    instance_types=("c7i.large",),
    hosts=("h0",),
    workers_per_machine=1,
    market="spot",
    image_kind="x86_64-cpu",
)
MINIMUM_S = 60.0
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


ZONE, WORST = "us-east-1a", 1.0
BEGIN_S = 1_800_000_000.0
NEVER = 1e11


def machine(name: str = "t0", *, usd_per_hour: float = 0.3, on_demand: bool = False) -> PaidMachine:
    return PaidMachine(
        zone=ZONE,
        instance_type=name,
        on_demand=on_demand,
        usd_per_hour=WORST if on_demand else usd_per_hour,
        worst_usd_per_hour=WORST,
        extras_usd_per_hour=0.01,
    )


def renewal(machines: Sequence[PaidMachine], left_usd: float) -> Renewal:
    return Renewal(
        since_s=BEGIN_S,
        left_usd=left_usd,
        worst_usd_per_hour=WORST * len(machines),
        checkpoint_s=30.0,
        machines=tuple(machines),
    )


def lease(terms: Renewal | None, left_usd: float, machines: int) -> Lease:
    end_s = budget_law.end_s(BEGIN_S, left_usd, WORST * machines)
    return Lease(end_s=end_s, stop_training_s=end_s - 30.0, renewal=terms)


def paths_of(changes: Sequence[PriceChange]) -> Callable[[Sequence[str], float], Sequence[PriceChange]]:
    return lambda types, from_s: [one for one in changes if one.instance_type in types]


def cost_usd(paid: PaidMachine, changes: Sequence[PriceChange], until_s: float) -> float:
    """What EC2 bills for a machine from the beginning on, reckoned another way than the product does it."""
    if paid.on_demand:
        return WORST * (until_s - BEGIN_S) / 3600
    mine = [one for one in changes if one.instance_type == paid.instance_type]
    moments = sorted({BEGIN_S, until_s, *(one.at_s for one in mine if BEGIN_S < one.at_s < until_s)})
    total = 0.0
    for since_s, then_s in itertools.pairwise(moments):
        usd = next(one.usd_per_hour for one in reversed(mine) if one.at_s <= since_s)
        total += min(usd + paid.extras_usd_per_hour, WORST) * (then_s - since_s) / 3600
    return total


changes_in_price = st.lists(st.tuples(st.floats(0, 60 * 3600), st.floats(0.01, 1.5)), max_size=8)


@given(
    left_usd=st.floats(0.05, 20.0),
    pools=st.lists(st.tuples(st.booleans(), st.floats(0.05, 1.2), changes_in_price), min_size=1, max_size=3),
    gaps=st.lists(st.floats(15.0, 4000.0), min_size=1, max_size=8),
    deaf=st.lists(st.booleans(), min_size=1, max_size=7),
    lost_at=st.floats(0.0, 1.0),
)
def test_whatever_prices_do_machines_that_extend_their_own_lives_stay_within_what_was_left(
    left_usd: float,
    pools: list[tuple[bool, float, list[tuple[float, float]]]],
    gaps: list[float],
    deaf: list[bool],
    lost_at: float,
) -> None:
    """Each machine reckons when it comes to it, some get no answer, one is lost on the way: the bill stays below."""
    machines, changes = [], []
    for number, (on_demand, first, moves) in enumerate(pools):
        machines.append(machine(f"t{number}", usd_per_hour=min(first + 0.01, WORST), on_demand=on_demand))
        path = [(BEGIN_S, first), *((BEGIN_S + at, usd) for at, usd in sorted(moves))]
        changes += [PriceChange(zone=ZONE, instance_type=f"t{number}", at_s=at, usd_per_hour=usd) for at, usd in path]
    terms = renewal(machines, left_usd)
    told = lease(terms, left_usd, len(machines))
    answers = [*deaf, False]
    ends, bill = [], 0.0
    for number, paid in enumerate(machines):
        asks = iter(range(10**6))

        def ask(types: Sequence[str], from_s: float) -> Sequence[PriceChange] | None:
            if answers[(next(asks) + number) % len(answers)]:  # noqa: B023
                return None
            now = now_s  # noqa: B023
            return [one for one in changes if one.instance_type in types and one.at_s <= now]

        allowance = Allowance(end_s=told.end_s, latest_end_s=NEVER, ask_prices=ask)
        now_s, before_s, turn = BEGIN_S, told.end_s, number
        while now_s < allowance.end_s:
            allowance.hear(told, now_s)
            assert allowance.end_s >= before_s - 1e-6, "time that was granted is never taken back"
            assert allowance.stop_training_s == pytest.approx(allowance.end_s - 30.0)
            before_s, turn = allowance.end_s, turn + 1
            now_s += gaps[turn % len(gaps)]
        ends.append(allowance.end_s)
        off_s = allowance.end_s + budget_law.SHUTDOWN_S
        if number == 1:
            off_s = BEGIN_S + lost_at * (off_s - BEGIN_S)
        bill += cost_usd(paid, changes, max(off_s, BEGIN_S))
    assert bill <= left_usd * (1 + 1e-9)


@given(share=st.floats(0.1, 0.9), left_usd=st.floats(2.0, 20.0))
def test_a_run_at_spot_prices_gets_most_of_what_they_leave(share: float, left_usd: float) -> None:
    """Where spot costs a share of the worst, the budget lasts so much longer, but for the last looks."""
    paid, usd = machine(usd_per_hour=share * WORST + 0.01), share * WORST
    change = PriceChange(zone=ZONE, instance_type="t0", at_s=BEGIN_S - 9, usd_per_hour=usd)
    told = lease(renewal([paid], left_usd), left_usd, 1)
    allowance = Allowance(end_s=told.end_s, latest_end_s=NEVER, ask_prices=paths_of([change]))
    now_s = BEGIN_S
    while now_s < allowance.stop_training_s:
        allowance.hear(told, now_s)
        now_s += 5.0
    whole_s = left_usd / (usd + 0.01) * 3600
    assert allowance.end_s - BEGIN_S >= 0.95 * whole_s - PRICES_EVERY_S - budget_law.SHUTDOWN_S


@given(budget=st.floats(0.5, 500), worst=st.floats(0.01, 100), spent=st.floats(0, 0.4), now_s=st.floats(0, 1e6))
def test_planner_follower_and_machines_have_one_law(budget: float, worst: float, spent: float, now_s: float) -> None:
    left = budget - 0.01 - spent
    terms = Renewal(
        since_s=now_s,
        left_usd=max(0.0, left),
        worst_usd_per_hour=worst,
        checkpoint_s=30,
        machines=(machine(),),
    )
    assume(left > 0)
    assert renewed_end_s(terms, [], now_s) == pytest.approx(budget_law.end_s(now_s, left, worst))
    least = least_budget_usd(worst, 0.01)
    assert budget_law.lasts_s(least - 0.01, worst) == pytest.approx(LEAST_LIFETIME_S)


def test_what_is_extended_by_nobody_stays_as_it_is() -> None:
    asked: list[float] = []

    def ask(types: Sequence[str], from_s: float) -> None:
        asked.append(from_s)

    plain = lease(None, 2.0, 1)
    allowance = Allowance(end_s=1.0, latest_end_s=NEVER, ask_prices=ask)
    for now_s in (BEGIN_S, BEGIN_S + 7000):
        allowance.hear(plain, now_s)
        assert (allowance.end_s, allowance.stop_training_s) == (plain.end_s, plain.stop_training_s)
    assert not asked
    told = lease(renewal([machine()], 2.0), 2.0, 1)
    allowance.hear(told, BEGIN_S + 7000)
    assert allowance.end_s == told.end_s, "nobody answers"
    assert asked == [BEGIN_S]
    allowance.hear(told, BEGIN_S + 7001)
    assert len(asked) == 1, "nor is anybody asked again at once"


def test_the_renters_word_counts_whatever_a_machine_has_reckoned() -> None:
    change = PriceChange(zone=ZONE, instance_type="t0", at_s=BEGIN_S - 9, usd_per_hour=0.1)
    allowance = Allowance(end_s=1.0, latest_end_s=BEGIN_S + 9000, ask_prices=paths_of([change]))
    told = lease(renewal([machine()], 2.0), 2.0, 1)
    allowance.hear(told, BEGIN_S + 3600)
    assert told.end_s < allowance.end_s <= BEGIN_S + 9000
    allowance.hear(told, BEGIN_S + 5000)
    assert allowance.end_s == BEGIN_S + 9000, "nothing lets it live longer than it was told when it booted"
    shorter = Lease(end_s=BEGIN_S + 6000, stop_training_s=BEGIN_S + 5900)
    allowance.hear(shorter, BEGIN_S + 5001)
    assert allowance.end_s == BEGIN_S + 6000, "others come, of whom it knows nothing"
    allowance.hear(Lease(end_s=told.end_s, stop_training_s=0.0), BEGIN_S + 5002)
    assert allowance.stop_training_s == 0.0


def test_a_machine_asks_ec2_and_lives_without_an_answer() -> None:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    asks = partial(ask_prices, client)
    at = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)
    page = {"AvailabilityZone": ZONE, "InstanceType": "c7i.large", "SpotPrice": "0.04", "Timestamp": at}
    with Stubber(client) as stub:
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": [page], "NextToken": "n"})
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": []})
        (change,) = asks(["c7i.large"], BEGIN_S) or ()
        stub.add_client_error("describe_spot_price_history", "UnauthorizedOperation")
        assert asks(["c7i.large"], BEGIN_S) is None
    assert change == PriceChange(zone=ZONE, instance_type="c7i.large", at_s=at.timestamp(), usd_per_hour=0.04)


prices = st.floats(0.01, 5.0)
gaps = st.floats(0.0, 5000.0)
WORST_PRICE = 5.0


@given(first=prices, changes=st.lists(st.tuples(gaps, prices), max_size=12), last=gaps, lives=st.booleans())
def test_what_is_spent_never_falls_and_is_the_sum_over_the_pieces(
    first: float, changes: list[tuple[float, float]], last: float, lives: bool
) -> None:
    stay, now_s, spent = BilledTime(since_s=1000.0, until_s=None, usd_per_hour=first, minimum_s=MINIMUM_S), 1000.0, 0.0
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
    assert spent_usd([stay, stay], now_s) == pytest.approx(2 * (pieces + rate * (max(now_s, 1060.0) - begun_s) / 3600))
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
    rate = Rate(usd_per_hour=1.0, worst_usd_per_hour=3.0)
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
    assert one.usd_per_hour(order.zones[1], "c7i.large", "on-demand") == 3.0
    two = rebilled(order, one, history(4200.0, ("b", 0.5)), 4200.0)
    assert two.machines == one.machines
    assert [two.usd_per_hour(zone, "c7i.large", "spot") for zone in order.zones] == [2.01, 0.51, 1.0]
    assert ClusterState.from_json(two.to_json(), origin="a test") == two
