"""What would be rented, as a person reads it before saying yes: machines, zone, every call, and what it all costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hetopt.cli import render
from hetopt.core import formatting

if TYPE_CHECKING:
    from hetopt.backends.ec2.renter.backend import Rental
    from hetopt.backends.ec2.renter.order import Order
    from hetopt.backends.ec2.renter.ordering import Moved
    from hetopt.backends.ec2.renter.request import Request


def show(rental: Rental) -> None:
    """Print the order: cluster, prices, budget and zones."""
    from hetopt.api.rental import last_end, unfollowed, way_out

    plan, order = rental.wanted, rental.order
    zone, names = order.zones[0], [one.name for one in order.zones]
    render.line(
        f"{plan.run.task} on {formatting.cluster((role.machines, role.instance_types[0]) for role in order.roles)} "
        f"in {zone.name} ({zone.zone_id})",
        style="bold",
    )
    moved = {one.instance_type: one for one in rental.moved_prices()}
    _show_machines(order, moved)
    for note in rental.launch.notes:
        render.bullet(note)
    if plan.risk is not None:
        render.bullet(f"RISK: {plan.risk}; else it is stopped unfinished")
    for one in moved.values():
        if one.is_price_increase:
            render.bullet(
                f"{one.instance_type} has become more expensive since {one.price_date}: "
                f"{formatting.usd(one.planned_usd_per_hour)} was planned, {formatting.usd(one.usd_per_hour)} an hour "
                "it is"
            )
    value, high = rental.expected_usd()
    hourly, worst = order.usd_per_hour(zone), order.worst_usd_per_hour()
    render.facts(
        {
            "cluster": f"{formatting.usd(hourly)} an hour now, {formatting.usd(worst)} at most",
            **({"canary": rental.canary_line} if rental.canary_line else {}),
            "expected": f"{formatting.usd(value)} for {formatting.duration(plan.chosen.prediction.total_s.value)}, "
            f"and up to {formatting.usd(high)} where it takes longer",
            "budget": f"{formatting.usd(order.budget_usd)}, a hard stop: the machines end by themselves after "
            f"{formatting.duration(order.lifetime_s)}{_LONGER if order.has_spot else ''}",
            **({"deadline": _DEADLINE.format(formatting.usd(order.move_usd))} if order.move_usd else {}),
            "unfollowed": unfollowed(rental),
            "last end": last_end(order),
            **({"way out": out} if (out := way_out(order)) is not None else {}),
            "bucket": order.bucket,
            "zones": f"tried one after another until one has all machines: {', '.join(names)}",
        }
    )


def _show_machines(order: Order, moved: Mapping[str, Moved]) -> None:
    """A row for each role of the cluster, with what was planned and what it costs now."""
    zone = order.zones[0]
    rows = []
    for role in order.roles:
        name = role.instance_types[0]
        rate, price = zone.rates[name], moved[name]
        rows.append(
            [
                f"{role.machines} × {name}",
                ", ".join(role.instance_types[1:]),
                role.market,
                formatting.usd(price.planned_usd_per_hour),
                formatting.usd(price.usd_per_hour),
                formatting.usd(rate.worst_usd_per_hour - order.extras_usd_per_hour),
            ]
        )
    render.table(
        ["machines", "or", "market", "planned $/h", "now $/h", "at most $/h"],
        rows,
        numbers={"planned $/h", "now $/h", "at most $/h"},
        caption="prices are of one machine; its disk, its address and requests add "
        f"{formatting.usd(order.extras_usd_per_hour)} an hour",
    )


_LONGER = "; `hetopt status` gives them longer where less was spent by then"

_DEADLINE = "a run that you follow moves to on-demand machines when only they still keep it; {} is kept for that"


def show_calls(requests: Sequence[Request]) -> None:
    """Every call of a launch on stdout; equal ones that follow each other are one row with their number."""
    rows = (
        (
            request.api_name,
            request.purpose,
            formatting.usd(request.usd_per_hour) if request.usd_per_hour else "",
            formatting.usd(request.worst_usd_per_hour) if request.worst_usd_per_hour else "",
        )
        for request in requests
    )
    counted = ((row, len(list(equal))) for row, equal in groupby(rows))
    render.heading("calls that would be made")
    render.table(
        ["", "call", "for", "$/h now", "at most"],
        [[f"{count} ×" if count > 1 else "", *row] for row, count in counted],
        numbers={"", "$/h now", "at most"},
        fixed={"call"},
        caption="nothing was made; --json prints every parameter, `hetopt doctor PLAN` finds what would stop a launch",
    )


def as_json(order: Order, requests: Sequence[Request]) -> dict[str, Any]:
    """The order and its calls as JSON has them."""
    return {
        "order": order.model_dump(mode="json"),
        "usd_per_hour": order.usd_per_hour(order.zones[0]),
        "worst_usd_per_hour": order.worst_usd_per_hour(),
        "calls": [
            {
                "step": request.step,
                "call": request.api_name,
                "purpose": request.purpose,
                "parameters": request.shown(),
                "usd_per_hour": request.usd_per_hour,
                "worst_usd_per_hour": request.worst_usd_per_hour,
            }
            for request in requests
        ],
    }
