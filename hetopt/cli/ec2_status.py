"""What `hetopt status` adds for a rented run: its machines, what they cost by now, and how old that knowledge is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetopt.core.run_status import RunStatus


def _more(machine: dict[str, Any]) -> list[str]:
    """What there is to say of a machine beside its state."""
    if machine["ending"]:
        return [machine["ending"]]
    duty = [] if machine["duty"] == "serves" else [machine["duty"]]
    return [*(["on demand"] if machine["market"] == "on-demand" else []), *duty]


def look(folder: Path, *, ask: bool) -> tuple[RunStatus, dict[str, Any]]:
    """How a rented run is. Without a way to ask, what was seen last is told, with its age.

    Args:
        folder: the run's.
        ask: whether to ask the cloud at all.
    """
    import time

    from hetopt.api.backends import backend
    from hetopt.backends.backend import RunHandle
    from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
    from hetopt.backends.ec2.renter.launcher import Ec2Launcher
    from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
    from hetopt.backends.ec2.renter.run_status import judged
    from hetopt.core.errors import BadInput, CloudRefused

    launcher = backend("ec2")
    assert isinstance(launcher, Ec2Launcher)
    why_not: str | None = None
    if ask:
        try:
            launcher.look(RunHandle(run_dir=folder))
        except (CloudRefused, BadInput) as error:
            why_not = f"{error.message} {error.hint or ''}".strip()
    path = folder / SEEN_FILE
    seen = ClusterState.load(path) if path.exists() else ClusterState(time_s=0.0)
    now_s = time.time()
    order = Order.load(folder / ORDER_FILE) if (folder / ORDER_FILE).exists() else None
    rental = {
        "seen_s_ago": now_s - seen.time_s if path.exists() else None,
        "not_asked": why_not,
        "spent_usd": seen.spent_usd(now_s),
        "budget_usd": order.budget_usd if order else None,
        "usd_per_hour": sum(machine.usd_per_hour for machine in seen.alive),
        "ends_in_s": seen.lease_end_s - now_s if seen.lease_end_s is not None and seen.alive else None,
        "zone": seen.zone,
        "leaves_for_zone": seen.zone_wanted,
        "strange_objects": seen.strange_objects,
        "everything_is_removed": seen.cleared,
        "machines": [
            {
                "id": machine.id,
                "host": machine.host,
                "type": machine.instance_type,
                "market": "on-demand" if machine.on_demand else "spot",
                "duty": machine.duty,
                "state": machine.state,
                "ending": machine.ending,
                "reason": machine.reason,
                "up_s": (machine.until_s or now_s) - machine.since_s,
                "usd": machine.stay(minimum_s=seen.minimum_billed_s, free_within_s=seen.free_within_s).usd(now_s),
                "heartbeat_s_ago": now_s - machine.heartbeat_s if machine.heartbeat_s is not None else None,
            }
            for machine in seen.machines
        ],
    }
    return judged(folder, seen), rental


def show(rental: dict[str, Any]) -> None:
    """Print the machines of a run and their states."""
    from hetopt.cli import render
    from hetopt.core import formatting

    alive = sum(machine["state"] in ("pending", "running", "unseen") for machine in rental["machines"])
    of = f" of {formatting.usd(rental['budget_usd'])}" if rental["budget_usd"] is not None else ""
    going = f", {formatting.usd(rental['usd_per_hour'])} an hour" if alive else ""
    render.line(
        f"  {alive} of {len(rental['machines'])} machines up; {formatting.usd(rental['spent_usd'])}{of} spent{going}"
    )
    if rental["ends_in_s"] is not None:
        render.line(f"  the machines end by themselves in {formatting.duration(max(rental['ends_in_s'], 0.0))}")
    if rental["leaves_for_zone"] is not None:
        render.line(f"  leaving {rental['zone']} for {rental['leaves_for_zone']}, where the same machines cost less")
    if rental["machines"]:
        render.table(
            [
                render.Column(name="machine", fixed=True),
                render.Column(name="host"),
                render.Column(name="state"),
                render.Column(name="up", justify="right"),
                render.Column(name="cost", justify="right"),
                render.Column(name="last word", justify="right"),
            ],
            [
                [
                    machine["id"],
                    machine["host"],
                    ", ".join([machine["state"], *_more(machine)]),
                    formatting.duration(max(machine["up_s"], 0.0)),
                    formatting.usd(machine["usd"]),
                    f"{formatting.duration(max(machine['heartbeat_s_ago'], 0.0))} ago"
                    if machine["heartbeat_s_ago"] is not None
                    else "",
                ]
                for machine in rental["machines"]
            ],
        )
    if rental["strange_objects"]:
        names = ", ".join(rental["strange_objects"])
        render.note(f"objects in the bucket whose names no file of a run has were left there: {names}")
    if rental["not_asked"] is not None:
        age = formatting.duration(rental["seen_s_ago"]) if rental["seen_s_ago"] is not None else None
        render.note(f"this is {age} old: {rental['not_asked']}" if age else rental["not_asked"])
    if rental["machines"] and not alive and not rental["everything_is_removed"]:
        render.note("something of it may be left: look with `hetopt gc --on ec2`")
