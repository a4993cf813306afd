"""What the machines of a run cost where they are and in the other zones, as far as that is a reason to leave. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hetopt.backends.backend import Pools
from hetopt.backends.ec2.renter.cluster_state import ClusterState, SpotPrices
from hetopt.backends.ec2.renter.order import Order, Zone
from hetopt.backends.ec2.renter.spot_prices import PRICES_EVERY_S

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
