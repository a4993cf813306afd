"""What `hetopt status` adds for a rented run: its machines, what they cost by now, and how old that knowledge is."""

from __future__ import annotations

from typing import Any

from hetopt.cli import render
from hetopt.core import formatting

UNSEEN_END = "estimated, as EC2 forgot machines before anybody saw when they ended: the invoice says it exactly"


def _more(machine: dict[str, Any]) -> list[str]:
    """What there is to say of a machine beside its state."""
    if machine["ending"]:
        return [machine["ending"]]
    duty = [] if machine["duty"] == "serves" else [machine["duty"]]
    return [*(["on demand"] if machine["market"] == "on-demand" else []), *duty]


def show(rental: dict[str, Any]) -> None:
    """Print the machines of a run and their states."""
    alive = sum(machine["state"] in ("pending", "running", "unseen") for machine in rental["machines"])
    of = f" of {formatting.usd(rental['budget_usd'])}" if rental["budget_usd"] is not None else ""
    going = f", {formatting.usd(rental['usd_per_hour'])} an hour" if alive else ""
    render.line(
        f"  {alive} of {len(rental['machines'])} machines up; {formatting.usd(rental['spent_usd'])}{of} spent{going}"
    )
    if rental["spent_is_estimate"]:
        render.line(f"  {UNSEEN_END}")
    if rental["ends_in_s"] is not None:
        render.line(f"  the machines end by themselves in {formatting.duration(max(rental['ends_in_s'], 0.0))}")
    if rental["leaves_for_zone"] is not None:
        render.line(f"  leaving {rental['zone']} for {rental['leaves_for_zone']}, where the same machines cost less")
    if rental["machines"]:
        render.table(
            ["machine", "host", "state", "up", "cost", "last word"],
            [
                [
                    machine["id"],
                    machine["host"],
                    ", ".join([machine["state"], *_more(machine)]),
                    formatting.duration(max(machine["up_s"], 0.0)),
                    formatting.usd(machine["usd"]) + (" (estimated)" if machine["usd_is_estimate"] else ""),
                    f"{formatting.duration(max(machine['heartbeat_s_ago'], 0.0))} ago"
                    if machine["heartbeat_s_ago"] is not None
                    else "",
                ]
                for machine in rental["machines"]
            ],
            numbers={"up", "cost", "last word"},
            fixed={"machine"},
        )
    if rental["strange_objects"]:
        names = ", ".join(rental["strange_objects"])
        render.note(f"objects in the bucket whose names no file of a run has were left there: {names}")
    if rental["not_asked"] is not None:
        age = formatting.duration(rental["seen_s_ago"]) if rental["seen_s_ago"] is not None else None
        render.note(f"this is {age} old: {rental['not_asked']}" if age else rental["not_asked"])
    if rental["machines"] and not alive and not rental["everything_is_removed"]:
        render.note("something of it may be left: look with `hetopt gc --on ec2`")
