"""`hetopt gc --on ec2`: what runs left in every region that was ever used; nothing is removed unless it is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.backends.ec2.renter.removal import Found
    from hetopt.core.errors import CloudRefused

_FIRST_REGION = "us-east-1"
"""Which is asked for the others; every account has it."""


def run(
    *, regions: Sequence[str], run_id: str | None, everything: bool, everybody: bool, remove: bool, as_json: bool
) -> None:
    """Look in every region, show what is there, and remove what belongs to no run that goes on, nor to others.

    Args:
        regions: to look in beside those that were ever used from here.
        run_id: only this run, even if it goes on.
        everything: also what belongs to runs that go on.
        everybody: also what belongs to other people.
        remove: do it.
        as_json: print rows for programs.

    Raises:
        CloudRefused: something could not be looked at, or not be removed.
    """
    import time

    from hetopt.backends.ec2.renter import leftovers
    from hetopt.backends.ec2.renter.account import identity
    from hetopt.backends.ec2.renter.edge import connect, connect_run
    from hetopt.backends.ec2.renter.launcher import fleets_of
    from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, Made, made, read_ledger
    from hetopt.backends.ec2.renter.removal import Remover
    from hetopt.backends.runs import RunFolders, runs_home
    from hetopt.cli import render
    from hetopt.core.errors import CloudRefused

    home = runs_home().parent
    runs = leftovers.local_runs(RunFolders(home=runs_home()).all())
    refused: list[CloudRefused] = []
    places = leftovers.regions_to_look_in(home, runs, regions)
    if not places:
        places, unasked = _regions_of_the_account(_configured_region())
        refused += unasked
    places = sorted({*places, *_configured_region()})
    who = identity(connect(places[0]))
    leftovers.settle(runs, time.time(), time.sleep)
    rows: list[dict[str, object]] = []
    looked_at: list[str] = []
    for region in places:
        edge = connect(region)
        fleets = [
            id_ for run in runs.values() if run.region == region and not run.cleared for id_ in fleets_of(run.folder)
        ]
        survey = Remover(edge=edge, sleep=time.sleep, made=Made(ids=tuple(fleets))).look(run_id)
        try:
            survey.check()
            looked_at.append(region)
        except CloudRefused as error:  # what was found is shown, and the other regions can still be looked at
            refused.append(CloudRefused(f"in {region}, {error.message}", hint=error.hint))
        by_run: dict[str, list[Found]] = {}
        for one in survey.found:
            by_run.setdefault(one.run_id, []).append(one)
        bucket = leftovers.Bucket(edge=edge, region=region, account_id=who.account_id)
        for name, things in by_run.items():
            known = runs.get(name)
            if not everybody and not all(leftovers.is_of(one, who) for one in things):
                kept: str | None = f"it belongs to {leftovers.owner_named(things)}; --everybody includes it"
            elif everything or run_id is not None:
                kept = None
            elif leftovers.is_known(known, time.time()):
                kept = next((why for one in things if (why := leftovers.why_leave(one, runs, time.time()))), None)
            else:
                kept = bucket.why_leave(things, time.time())
            removed = False
            if remove and kept is None:
                mine = connect_run(region, known.folder, home) if known is not None else edge
                ledger = made(read_ledger(known.folder / LEDGER_FILE), time.time()) if known is not None else Made()
                try:
                    remover = Remover(edge=mine, sleep=time.sleep, made=ledger)
                    remover.remove(things)
                    remover.remove_run(name)
                    removed = True
                except CloudRefused as error:
                    refused.append(error)
            rows += [_row(region, one, kept, removed) for one in things]
    if as_json:
        render.print_json(rows)
    else:
        _show(rows, looked_at, remove=remove)
    if refused:
        told = " ".join(dict.fromkeys(error.message for error in refused))
        raise CloudRefused(told, hint=refused[0].hint)


def _regions_of_the_account(configured: Sequence[str]) -> tuple[list[str], list[CloudRefused]]:
    """Where nothing was ever rented from here: every region that the account can use; and why not all are known."""
    from hetopt.backends.ec2.renter.account import regions
    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.core.errors import CloudRefused

    asked = configured[0] if configured else _FIRST_REGION
    try:
        return regions(connect(asked)), []
    except CloudRefused as error:
        told = f"the account's regions cannot be listed, so that only {asked} was looked in: {error.message}"
        return [asked], [CloudRefused(told, hint=error.hint)]


def _row(region: str, one: Found, kept: str | None, removed: bool) -> dict[str, object]:
    return {
        "region": region,
        "run": one.run_id,
        "kind": one.kind,
        "id": one.id,
        "detail": one.detail,
        "owner": one.launched_by or one.owner,
        "left_alone": kept,
        "removed": removed,
    }


def _show(rows: Sequence[dict[str, object]], places: Sequence[str], *, remove: bool) -> None:
    from hetopt.cli import render

    if not rows:
        if places:
            render.line(f"nothing is left behind in {', '.join(places)}")
        return
    for region, run in dict.fromkeys((str(row["region"]), str(row["run"])) for row in rows):
        mine = [row for row in rows if (row["region"], row["run"]) == (region, run)]
        first = mine[0]
        fate = (
            f"left alone, {first['left_alone']}"
            if first["left_alone"]
            else "removed"
            if first["removed"]
            else "left over"
        )
        render.line(f"{region}  {run}: {fate}", style="bold")
        for kind in dict.fromkeys(str(row["kind"]) for row in mine):
            ids = [f"{row['id']}{_in_brackets(row['detail'])}" for row in mine if row["kind"] == kind]
            render.bullet(f"{kind}: {', '.join(ids)}")
    if not remove and any(row["left_alone"] is None for row in rows):
        render.note("nothing was removed; do it with `hetopt gc --on ec2 --remove`")


def _in_brackets(detail: object) -> str:
    return f" ({detail})" if detail else ""


def _configured_region() -> list[str]:
    import os

    return [name for name in (os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION")) if name]
