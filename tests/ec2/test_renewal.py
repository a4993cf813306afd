"""Machines that nobody looks after extend their lease by what spot costs, and never beyond the budget."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import boto3
import pytest
from botocore.stub import Stubber
from hypothesis import assume, given
from hypothesis import strategies as st

from hetopt.backends.ec2.protocol import Lease, PaidMachine, Renewal
from hetopt.backends.ec2.renewal import PRICES_EVERY_S, Allowance, PriceChange, PriceHistory, renewed_end_s
from hetopt.backends.ec2.renter.order import Guard
from hetopt.core import budget_law
from hetopt.optimizer.cost.least_budget import LEAST_LIFETIME_S, least_budget_usd

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
    gaps=st.lists(st.floats(1.0, 4000.0), min_size=1, max_size=8),
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
    guard = Guard(budget_usd=budget, fixed_usd=0.01, worst_usd_per_hour=worst, checkpoint_s=30, heartbeat_s=15)
    assert guard.end_s(spent, now_s) == budget_law.end_s(now_s, budget - 0.01 - spent, worst)
    terms = Renewal(
        since_s=now_s,
        left_usd=max(0.0, guard.left_usd(spent)),
        worst_usd_per_hour=worst,
        checkpoint_s=30,
        machines=(machine(),),
    )
    assume(guard.left_usd(spent) > 0)
    assert renewed_end_s(terms, [], now_s) == pytest.approx(guard.end_s(spent, now_s))
    least = least_budget_usd(worst, 0.01)
    assert budget_law.lasts_s(least - 0.01, worst) == pytest.approx(LEAST_LIFETIME_S)


def test_a_pool_that_nobody_tells_of_cost_the_most_that_it_can() -> None:
    terms = renewal([machine()], 5.0)
    other = PriceChange(zone="us-east-1b", instance_type="t0", at_s=BEGIN_S - 9, usd_per_hour=0.1)
    then_s = BEGIN_S + 7200
    at_first = renewed_end_s(terms, [], BEGIN_S)
    assert renewed_end_s(terms, [other], then_s) == pytest.approx(at_first)
    assert renewed_end_s(terms, [replace(other, zone=ZONE)], then_s) > at_first + 3600


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


def test_a_lease_is_read_as_it_was_written_and_as_older_machines_write_it() -> None:
    told = lease(renewal([machine(), machine(on_demand=True)], 2.0), 2.0, 2)
    assert Lease.of_json(told.model_dump_json().encode()) == told
    assert Lease.of_json(b'{"end_s": 5, "stop_training_s": 4}') == Lease(end_s=5.0, stop_training_s=4.0)
    assert Lease.of_json(b'{"end_s": 5, "stop_training_s": 4, "renewal": {"left_usd": 1e99}}') is None


def test_a_machine_asks_ec2_and_lives_without_an_answer() -> None:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    asks = PriceHistory(client=client)
    at = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)
    page = {"AvailabilityZone": ZONE, "InstanceType": "c7i.large", "SpotPrice": "0.04", "Timestamp": at}
    with Stubber(client) as stub:
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": [page], "NextToken": "n"})
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": []})
        (change,) = asks(["c7i.large"], BEGIN_S) or ()
        stub.add_client_error("describe_spot_price_history", "UnauthorizedOperation")
        assert asks(["c7i.large"], BEGIN_S) is None
    assert change == PriceChange(zone=ZONE, instance_type="c7i.large", at_s=at.timestamp(), usd_per_hour=0.04)
