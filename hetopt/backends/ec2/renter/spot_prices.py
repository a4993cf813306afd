"""What machines on spot cost now: asked for in one call, believed up to the worst price, and billed from then on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState, SpotPrices
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.request import Answer, Request

PRICES_EVERY_S = 600.0
"""Prices move over hours, and a machine is billed by the second: a look costs nothing, and tells little more often."""

_PRODUCT = "Linux/UNIX"


def price_request(names: Sequence[str], now_s: float) -> Request:
    """Ask what types cost on spot in every zone.

    Args:
        names: of the types.
        now_s: seconds since the epoch; a history that begins now is the price of now.
    """
    return Request(
        step="spot-prices",
        service="ec2",
        operation="describe_spot_price_history",
        parameters={
            "InstanceTypes": list(names),
            "ProductDescriptions": [_PRODUCT],
            "StartTime": datetime.datetime.fromtimestamp(now_s, datetime.UTC),
        },
        purpose="what the types cost now, zone by zone",
    )


def newest_prices(answer: Answer) -> dict[tuple[str, str], float]:
    """The newest price of each zone and type, USD an hour, without volume and address."""
    newest: dict[tuple[str, str], Answer] = {}
    for found in answer.get("SpotPriceHistory", ()):
        pool = (found["AvailabilityZone"], found["InstanceType"])
        if pool not in newest or found["Timestamp"] > newest[pool]["Timestamp"]:
            newest[pool] = found
    return {pool: float(found["SpotPrice"]) for pool, found in newest.items()}


def spot_types(order: Order) -> list[str]:
    """All types that an order may rent on spot."""
    return list(dict.fromkeys(name for role in order.roles if role.market == "spot" for name in role.instance_types))


def are_due(order: Order, seen: ClusterState, now_s: float) -> bool:
    """Whether prices are to be asked for: some machine is billed at them, and the last ones are old."""
    asked_s = order.created_s if seen.prices_asked_s is None else seen.prices_asked_s
    on_spot = any(not machine.on_demand for machine in seen.alive)
    return on_spot and seen.stop_wished_s is None and now_s >= asked_s + PRICES_EVERY_S


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
            price = newest.get((zone.name, name))
            if price is not None and price > 0:
                usd = min(price + order.extras_usd_per_hour, zone.rates[name].worst_usd_per_hour)
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
