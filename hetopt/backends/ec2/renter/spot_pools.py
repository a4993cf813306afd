"""The spot pools of a run: what their machines cost now, here and in other zones, and how often EC2 took them back.

Prices are asked for in one call, believed up to the worst price, and billed from then on. What a run has seen of its
pools, hours and preemptions, is kept for the next plan once the run is over.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hetopt.backends.backend import Pools
from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState, SpotPrices
from hetopt.backends.ec2.renter.order import Order, Zone
from hetopt.backends.ec2.renter.request import Answer, Request, read
from hetopt.backends.ec2.spot_history import PRICES_EVERY_S, changes_of, history_parameters
from hetopt.optimizer.cost.observed_preemptions import ObservedPool, keep, observed_file


def price_request(names: Sequence[str], from_s: float) -> Request:
    """Ask what types cost on spot in every zone, from a moment on (seconds since the epoch)."""
    purpose = "what the types cost now, zone by zone"
    return read("ec2", "describe_spot_price_history", purpose, **history_parameters(names, from_s))


def newest_prices(answer: Answer) -> dict[tuple[str, str], float]:
    """The newest price of each zone and type, USD an hour, without volume and address."""
    return {(change.zone, change.instance_type): change.usd_per_hour for change in changes_of(answer)}


def spot_types(order: Order) -> list[str]:
    """All types that an order may rent on spot."""
    return list(dict.fromkeys(name for role in order.roles if role.market == "spot" for name in role.instance_types))


def are_due(order: Order, seen: ClusterState, now_s: float) -> bool:
    """Whether prices are to be asked for: some machine is billed at them, and the last ones are old.

    Of machines that have all ended they are asked for once more, for their bill.
    """
    asked_s = order.created_s if seen.prices_asked_s is None else seen.prices_asked_s
    if seen.alive:
        on_spot = any(not machine.on_demand for machine in seen.alive)
        return on_spot and seen.stop_wished_s is None and now_s >= asked_s + PRICES_EVERY_S
    return any(not machine.on_demand and (machine.until_s or 0.0) > asked_s for machine in seen.machines)


def billed_from_s(order: Order, seen: ClusterState) -> float:
    """From when on nobody has seen prices: machines are billed at those of then."""
    return order.created_s if seen.prices is None else seen.prices.seen_s


def rebilled(order: Order, seen: ClusterState, history: Answer, now_s: float) -> ClusterState:
    """The run at the prices that were just seen, its machines billed at what their pools have cost since the last time.

    Where nobody has looked for hours, prices have moved meanwhile, and EC2 has billed each second at its own; so also
    of machines that have ended since.

    Args:
        order: of the run.
        seen: its last look.
        history: of prices, from `billed_from_s` on.
        now_s: seconds since the epoch.
    """
    machines, from_s = list(seen.machines), billed_from_s(order, seen)
    for one in changes_of(history):
        then_s, pool = one.at_s, (one.zone, one.instance_type)
        usd = _usd_of(order, *pool, one.usd_per_hour)
        if usd is None or not from_s < then_s < now_s:
            continue
        for place, machine in enumerate(machines):
            if (machine.zone or seen.zone, machine.instance_type) == pool and machine.since_s < then_s:
                machines[place] = machine.repriced(usd, then_s, minimum_s=seen.minimum_billed_s)
    billed = seen.model_copy(update={"machines": tuple(machines)})
    return repriced(order, billed, newest_prices(history), now_s)


def _usd_of(order: Order, zone: str, name: str, price: float) -> float | None:
    """What a machine costs an hour at a pool's price, at most the worst; None of a pool that the order does not know.

    Prices that are none are not believed.
    """
    rates = next((one.rates for one in order.zones if one.name == zone), {})
    if name not in rates or not price > 0:
        return None
    return min(price + order.extras_usd_per_hour, rates[name].worst_usd_per_hour)


def repriced(order: Order, seen: ClusterState, newest: Mapping[tuple[str, str], float], now_s: float) -> ClusterState:
    """The run from now on at the prices that were just seen; pools that nothing was said of stay as they were.

    Args:
        order: of the run; no machine is ever taken to cost more than the worst that it says.
        seen: its last look.
        newest: by zone and type, USD an hour, without volume and address.
        now_s: seconds since the epoch.
    """
    known = {} if seen.prices is None else {zone: dict(its) for zone, its in seen.prices.usd_per_hour.items()}
    for zone in order.zones:
        for name in spot_types(order):
            usd = _usd_of(order, zone.name, name, newest.get((zone.name, name), 0.0))
            if usd is not None:
                known.setdefault(zone.name, {})[name] = usd
    prices = SpotPrices(seen_s=now_s, usd_per_hour=known)

    def after(machine: MachineState) -> MachineState:
        usd = known.get(machine.zone or seen.zone, {}).get(machine.instance_type, machine.usd_per_hour)
        return machine.repriced(usd, now_s, minimum_s=seen.minimum_billed_s)

    return seen.model_copy(
        update={
            "machines": tuple(after(machine) for machine in seen.machines),
            "prices": prices,
            "prices_before": seen.prices,
            "prices_asked_s": now_s,
        }
    )


PAIR_RESTS_S = 3600.0
"""Between two zones nobody goes again so soon, in either direction; nor is a zone that had nothing asked again."""

_STALE_S = 2.5 * PRICES_EVERY_S
"""Prices that are older decide nothing."""


def may_leave(seen: ClusterState, hosts: Collection[str]) -> bool:
    """Whether all machines of a run could be had elsewhere: all on spot and serving, and nobody comes or goes.

    Args:
        seen: the run's last look.
        hosts: of those that train.
    """
    on_spot = not seen.on_demand and not any(machine.on_demand for machine in seen.serving)
    return on_spot and seen.is_settled and {machine.host for machine in seen.serving} == set(hosts)


def pair(one: str, other: str) -> str:
    """Two zones in either order."""
    return " ".join(sorted((one, other)))


def rests(seen: ClusterState, zone: str, now_s: float) -> bool:
    """Whether the run has set out between its zone and this one a short time ago."""
    set_out_s = seen.switches.get(pair(seen.zone, zone))
    return set_out_s is not None and now_s < set_out_s + PAIR_RESTS_S


def pools_of(order: Order, seen: ClusterState, hosts: Collection[str], now_s: float) -> Pools | None:
    """What the run's machines cost, here and elsewhere; None while some come or go.

    Args:
        order: of the run, with the zones that it may be in.
        seen: its last look.
        hosts: of those that train.
        now_s: seconds since the epoch.
    """
    if not seen.is_settled or {machine.host for machine in seen.serving} != set(hosts):
        return None
    here_usd = {machine.host: machine.usd_per_hour for machine in seen.serving}
    fresh = seen.prices is not None and now_s <= seen.prices.seen_s + _STALE_S
    others = [zone for zone in order.zones if zone.name != seen.zone and not rests(seen, zone.name, now_s)]
    elsewhere = {zone.name: _usd_twice_seen(order, seen, zone) for zone in others}
    return Pools(
        zone=seen.zone,
        usd_per_hour=here_usd,
        elsewhere_usd_per_hour=elsewhere if fresh and may_leave(seen, hosts) else {},
    )


def _usd_twice_seen(order: Order, seen: ClusterState, zone: Zone) -> float:
    """What the machines cost in another zone, in proportion to here, at the worse of the last two times.

    The supervisor looks every few seconds and prices are asked for every few minutes: what was seen once would be at
    many looks in a row.
    """
    here = order.zone(seen.zone)
    now_here, now_there = _usd_at(seen, seen.prices, here), _usd_at(seen, seen.prices, zone)
    before = _usd_at(seen, seen.prices_before, zone) / _usd_at(seen, seen.prices_before, here)
    return max(now_there, now_here * before)


def _usd_at(seen: ClusterState, prices: SpotPrices | None, zone: Zone) -> float:
    types = [machine.instance_type for machine in seen.serving]
    return sum(zone.rates[name].usd_per_hour if prices is None else prices.of(zone, name) for name in types)


TOGETHER_S = 300.0
"""Machines of a pool that go within so long of each other go together."""


def seen_pools(seen: ClusterState, order: Order) -> tuple[ObservedPool, ...]:
    """The spot pools of this life of a run; what it had before it was resumed was counted then."""
    spot = {host for role in order.roles if role.market == "spot" for host in role.hosts}
    pools: dict[tuple[str, str], list[MachineState]] = defaultdict(list)
    for machine in seen.machines:
        if (
            machine.host in spot
            and not machine.on_demand
            and machine.since_s >= order.created_s
            and machine.until_s is not None
        ):
            pools[machine.instance_type, machine.zone or seen.zone].append(machine)
    return tuple(
        ObservedPool(
            instance_type=name,
            region=order.region,
            zone=zone or None,
            instance_hours=sum((one.until_s or one.since_s) - one.since_s for one in machines) / 3600,
            losses=len(lost := sorted(one.until_s or 0.0 for one in machines if one.ending == "interrupted")),
            events=_events(lost),
        )
        for (name, zone), machines in sorted(pools.items())
        if any((one.until_s or one.since_s) > one.since_s for one in machines)
    )


def remember(seen: ClusterState, order: Order, run_dir: Path) -> None:
    """Add what a run that is over has seen to what launches keep, for the next plan; once for each life of a run.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
    """
    pools = seen_pools(seen, order)
    try:
        (run_dir / f".observed.{order.life}").touch(exist_ok=False)
    except FileExistsError:
        return  # Another terminal saw it end, too.
    if pools:
        until = datetime.datetime.fromtimestamp(seen.time_s, datetime.UTC).isoformat(timespec="seconds")
        keep(observed_file(), pools, until=until)


def _events(lost_s: list[float]) -> int:
    """How often machines were taken, given when each was, in order."""
    return sum(place == 0 or lost_s[place] - lost_s[place - 1] > TOGETHER_S for place in range(len(lost_s)))
