"""`hetopt gc --on ec2`: what runs left in every region that was ever used; nothing is removed unless it is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.optimizer.ec2.removal import Found


def run(*, regions: Sequence[str], run_id: str | None, everything: bool, remove: bool, as_json: bool) -> None:
    """Look in every region, show what is there, and remove what belongs to no run that goes on.

    Args:
        regions: to look in beside those that were ever used from here.
        run_id: only this run, even if it goes on.
        everything: also what belongs to runs that go on.
        remove: do it.
        as_json: print rows for programs.
    """
    import time

    from hetopt.optimizer.cli import render
    from hetopt.optimizer.ec2 import leftovers
    from hetopt.optimizer.ec2.launcher import fleets_of
    from hetopt.optimizer.ec2.removal import Remover
    from hetopt.optimizer.ec2.session import connect, connect_run
    from hetopt.profiler.errors import CloudRefused
    from hetopt.trainer.launch.runs import RunFolders, runs_home

    home = runs_home().parent
    runs = leftovers.local_runs(RunFolders(home=runs_home()).all())
    places = leftovers.regions_to_look_in(home, runs, regions or _configured_region())
    leftovers.settle(runs, time.time(), time.sleep)
    rows: list[dict[str, object]] = []
    refused: list[CloudRefused] = []
    for region in places:
        fleets = [id_ for run in runs.values() if run.region == region for id_ in fleets_of(run.folder)]
        try:
            found = Remover(edge=connect(region), sleep=time.sleep, fleet_ids=fleets).find(run_id)
        except CloudRefused as error:  # the other regions can still be looked at
            refused.append(error)
            continue
        by_run: dict[str, list[Found]] = {}
        for one in found:
            by_run.setdefault(one.run_id, []).append(one)
        for name, things in by_run.items():
            kept = None if everything or run_id is not None else _kept(things, runs)
            removed = False
            if remove and kept is None:
                edge = connect_run(region, runs[name].folder, home) if name in runs else connect(region)
                try:
                    remover = Remover(edge=edge, sleep=time.sleep, fleet_ids=fleets)
                    remover.remove(things)
                    remover.remove_run(name)
                    removed = True
                except CloudRefused as error:
                    refused.append(error)
            rows += [_row(region, one, kept, removed) for one in things]
    if as_json:
        render.print_json(rows)
    else:
        _show(rows, places, remove=remove)
    if refused:
        raise refused[0]


def _kept(things: Sequence[Found], runs: object) -> str | None:
    import time

    from hetopt.optimizer.ec2.leftovers import why_leave

    assert isinstance(runs, dict)
    reasons = [why_leave(one, runs, time.time()) for one in things]
    return next((reason for reason in reasons if reason is not None), None)


def _row(region: str, one: Found, kept: str | None, removed: bool) -> dict[str, object]:
    return {
        "region": region,
        "run": one.run_id,
        "kind": one.kind,
        "id": one.id,
        "detail": one.detail,
        "owner": one.owner,
        "left_alone": kept,
        "removed": removed,
    }


def _show(rows: Sequence[dict[str, object]], places: Sequence[str], *, remove: bool) -> None:
    from hetopt.optimizer.cli import render

    if not rows:
        where = (
            ", ".join(places) if places else "any region: nothing was ever rented from here (name one with --region)"
        )
        render.line(f"nothing is left behind in {where}")
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
