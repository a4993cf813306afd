"""`hetopt gc`: find what runs that were killed left behind, on this machine or on EC2, and remove it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from hetopt.api.account import Search, rehearsal_leftovers
from hetopt.cli import render
from hetopt.cli.flags import in_flags
from hetopt.cli.options import one_of
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.reports.document import Block, Line, Remarks

if TYPE_CHECKING:
    from hetopt.api.account import Leftover


def gc(
    on: str = typer.Option(
        "rehearsal",
        autocompletion=one_of("rehearsal", "slurm", "ec2"),
        help="Where to look: 'rehearsal' is this machine, 'slurm' a cluster's queue, 'ec2' the cloud.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be removed and stop there."),
    remove_: bool = typer.Option(False, "--remove", help="ec2: remove what is found; without it nothing is."),
    region: list[str] = typer.Option([], help="ec2: look here too, beside where anything was ever rented."),
    run: str | None = typer.Option(None, help="ec2: only this run (its full name), even if it goes on."),
    everything: bool = typer.Option(False, "--all", help="ec2: also what belongs to runs that go on."),
    everybody: bool = typer.Option(False, "--everybody", help="ec2: also what belongs to other people."),
    json_: bool = typer.Option(False, "--json", help="Print what was found as JSON."),
) -> None:
    """Remove what rehearsals whose launcher is dead left behind: network namespaces, and the processes in them.

    \b
      hetopt gc
      hetopt gc --on ec2
    \f
    Rehearsals that run are left alone.

    With --on slurm: jobs of runs of this machine that are over. Without it they end by themselves within minutes.

    With --on ec2: machines, fleets, launch templates, security groups and disks that carry hetopt's tags, in every
    region that was ever used from here; in all regions of the account, where none was. They are only listed, unless
    --remove is given. What belongs to a run that goes on, by its lease and its machines' heartbeats, or to somebody
    else is left alone. What could not be looked at is named, and the exit code is not 0.
    """

    if on == "ec2":
        searched = Search(run_id=run, everything=everything, everybody=everybody, remove=remove_ and not dry_run)
        searched.look_everywhere(region)
        show(searched, as_json=json_)
        return
    is_here = on in ("rehearsal", "slurm")
    if not is_here or remove_ or region or run is not None or everything or everybody:
        raise BadInput(
            "--remove and the like are for --on ec2." if is_here else f"there is nothing to find on {on!r}.",
            hint="use --on ec2, --on slurm or --on rehearsal",
        )
    if on == "slurm":
        from hetopt.api.hosts import runs_left_in_slurm

        left = [{"run": name, "removed": not dry_run} for name in runs_left_in_slurm(remove=not dry_run)]
        lines = [f"{'would end' if dry_run else 'ended'} the jobs of {entry['run']}" for entry in left]
    else:
        left = [{"id": id_, "removed": not dry_run} for id_ in rehearsal_leftovers(remove=not dry_run)]
        lines = [f"{'would remove' if dry_run else 'removed'} rehearsal {rehearsal['id']}" for rehearsal in left]
    if json_:
        render.print_json(left)
    else:
        render.line("\n".join(lines) or "nothing is left behind")


def show(searched: Search, *, as_json: bool) -> None:
    """Print the cloud resources that a search found, and what became of them.

    Args:
        searched: search that is over.
        as_json: whether to print JSON.

    Raises:
        CloudRefused: something could not be looked at, or not be removed.
    """
    if as_json:
        render.print_json([_facts(leftover) for leftover in searched.leftovers])
    else:
        render.show(_document(searched))
        if not searched.remove and any(leftover.left_alone is None for leftover in searched.leftovers):
            render.note("nothing was removed; do it with `hetopt gc --on ec2 --remove`")
    if searched.refused:
        message = " ".join(dict.fromkeys(error.message for error in searched.refused))
        raise CloudRefused(message, hint=searched.refused[0].hint)


def _facts(leftover: Leftover) -> dict[str, Any]:
    resource = leftover.resource
    return {
        "region": leftover.region,
        "run": resource.run_id,
        "kind": resource.kind,
        "id": resource.id,
        "detail": resource.detail,
        "owner": resource.launched_by or resource.owner,
        "left_alone": leftover.left_alone and in_flags(leftover.left_alone),
        "removed": leftover.removed,
    }


def _document(searched: Search) -> Iterator[Block]:
    """Yield the resources that each run left in each region, by kind.

    Says so where nothing is left.
    """
    if not searched.leftovers and searched.looked_in:
        yield Line(f"nothing is left behind in {', '.join(searched.looked_in)}")
    by_run: dict[tuple[str, str], dict[str, list[Leftover]]] = {}
    for leftover in searched.leftovers:
        kinds = by_run.setdefault((leftover.region, leftover.resource.run_id), {})
        kinds.setdefault(leftover.resource.kind, []).append(leftover)
    for (region, run), kinds in by_run.items():
        first = next(iter(kinds.values()))[0]
        fate = "removed" if first.removed else "left over"
        yield Line(f"{region}  {run}: {f'left alone, {first.left_alone}' if first.left_alone else fate}", "strong")
        named = {
            kind: [
                f"{leftover.resource.id}{f' ({leftover.resource.detail})' if leftover.resource.detail else ''}"
                for leftover in leftovers
            ]
            for kind, leftovers in kinds.items()
        }
        yield Remarks([f"{kind}: {', '.join(names)}" for kind, names in named.items()])
