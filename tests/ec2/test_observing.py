"""What a run that is over leaves for the next plan: hours and losses of its spot pools, counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter.order import ClusterState, Ending, MachineState, Order, Role, remember, seen_pools
from hetopt.optimizer.cost.preemption_rate import ObservedPreemptions, observed_file

HOUR = 3600.0


@pytest.fixture
def order(order_for: Callable[..., Order]) -> Order:
    """Three spot machines and one on demand."""
    made = order_for()
    spot, demand = (
        Role(
            name=name,
            instance_types=made.roles[0].instance_types,
            hosts=hosts,
            market=market,
            image_kind=made.roles[0].image_kind,
        )
        for name, hosts, market in (("spot", ("a", "b", "c"), "spot"), ("sure", ("d",), "on-demand"))
    )
    return made.model_copy(update={"roles": (spot, demand)})


def machine(order: Order, host: str, hours: float, ending: Ending, *, since_h: float = 0.0) -> MachineState:
    since_s = order.created_s + since_h * HOUR
    return MachineState(
        id=f"i-{host}{since_h:g}",
        host=host,
        instance_type="c7i.large",
        state="terminated",
        ending=ending,
        since_s=since_s,
        until_s=since_s + hours * HOUR,
        usd_per_hour=0.1,
        extras_usd_per_hour=0.01,
        on_demand=host == "d",
    )


def _seen(order: Order, *machines: MachineState) -> ClusterState:
    return ClusterState(time_s=order.created_s + 9 * HOUR, zone="us-east-1a", machines=machines, cleared=True)


def test_hours_and_losses_of_spot_alone_are_counted(order: Order) -> None:
    (pool,) = seen_pools(
        _seen(
            order,
            machine(order, "a", 2.0, "interrupted"),
            machine(order, "b", 2.01, "interrupted"),  # 36 s later: the same event
            machine(order, "c", 4.0, "interrupted"),
            machine(order, "a", 3.0, "finished", since_h=2.5),
            machine(order, "d", 8.0, "interrupted"),  # on demand
        ),
        order,
    )
    assert (pool.instance_type, pool.region, pool.zone) == ("c7i.large", order.region, "us-east-1a")
    assert pool.instance_hours == pytest.approx(2.0 + 2.01 + 4.0 + 3.0)
    assert (pool.losses, pool.events) == (3, 2)
    assert (pool.outages, pool.outage_hours) == (1, pytest.approx(0.5 + (8.0 - 2.01) + (8.0 - 4.0))), (
        "two are still open"
    )


def test_hours_count_for_the_pool_where_they_were(order: Order) -> None:
    left = machine(order, "a", 2.0, "stopped by us").model_copy(update={"zone": "us-east-1c"})
    moved = machine(order, "b", 1.0, "stopped by us").model_copy(update={"on_demand": True})
    pools = seen_pools(_seen(order, left, moved, machine(order, "a", 3.0, "finished", since_h=2.0)), order)
    assert {pool.zone: pool.instance_hours for pool in pools} == {"us-east-1a": 3.0, "us-east-1c": 2.0}


def test_every_life_of_a_run_is_counted_once(order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    first = machine(order, "a", 2.0, "stopped by us")
    remember(_seen(order, first), order, tmp_path)
    remember(_seen(order, first), order, tmp_path)  # another terminal saw the end, too
    again = order.model_copy(update={"life": 1, "created_s": order.created_s + 5 * HOUR})
    remember(_seen(order, first, machine(again, "a", 1.0, "interrupted")), again, tmp_path)
    (pool,) = ObservedPreemptions.load(observed_file()).pools
    assert (pool.instance_hours, pool.losses, pool.events) == (pytest.approx(3.0), 1, 1)


def test_nothing_is_kept_of_a_run_without_spot(order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    remember(_seen(order, machine(order, "d", 2.0, "finished")), order, tmp_path)
    assert not observed_file().exists()
