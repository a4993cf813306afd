"""What runs left in the cloud and on this machine, as people and as programs read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetopt.api.account import of_rehearsals
from hetopt.cli import render
from hetopt.cli.flags import in_flags
from hetopt.core.errors import CloudRefused
from hetopt.reports.document import Block, Line, Remarks

if TYPE_CHECKING:
    from hetopt.api.account import Leftover, Search


def show(searched: Search, *, as_json: bool) -> None:
    """Print what was found.

    Raises:
        CloudRefused: something could not be looked at, or not be removed.
    """
    if as_json:
        render.print_json([_facts(leftover) for leftover in searched.found])
    else:
        render.show(_document(searched))
        if not searched.remove and any(leftover.left_alone is None for leftover in searched.found):
            render.note("nothing was removed; do it with `hetopt gc --on ec2 --remove`")
    if searched.refused:
        told = " ".join(dict.fromkeys(error.message for error in searched.refused))
        raise CloudRefused(told, hint=searched.refused[0].hint)


def _facts(leftover: Leftover) -> dict[str, Any]:
    found = leftover.found
    return {
        "region": leftover.region,
        "run": found.run_id,
        "kind": found.kind,
        "id": found.id,
        "detail": found.detail,
        "owner": found.launched_by or found.owner,
        "left_alone": leftover.left_alone and in_flags(leftover.left_alone),
        "removed": leftover.removed,
    }


def _document(searched: Search) -> Iterator[Block]:
    """Yield what each run left in each region, by kind."""
    if not searched.found and searched.looked_in:
        yield Line(f"nothing is left behind in {', '.join(searched.looked_in)}")
    by_run: dict[tuple[str, str], dict[str, list[Leftover]]] = {}
    for leftover in searched.found:
        kinds = by_run.setdefault((leftover.region, leftover.found.run_id), {})
        kinds.setdefault(leftover.found.kind, []).append(leftover)
    for (region, run), kinds in by_run.items():
        first = next(iter(kinds.values()))[0]
        fate = "removed" if first.removed else "left over"
        yield Line(f"{region}  {run}: {f'left alone, {first.left_alone}' if first.left_alone else fate}", "strong")
        named = {
            kind: [f"{one.found.id}{f' ({one.found.detail})' if one.found.detail else ''}" for one in its]
            for kind, its in kinds.items()
        }
        yield Remarks([f"{kind}: {', '.join(names)}" for kind, names in named.items()])


def show_rehearsals(*, dry_run: bool, as_json: bool) -> None:
    """Remove the networks of rehearsals whose launcher is dead, and print them.

    Raises:
        RunFailed: one of them could not be removed.
    """
    found, stayed = of_rehearsals(remove=not dry_run)
    gone = [network for network in found if network.id not in stayed]
    if as_json:
        facts = [
            {
                "id": network.id,
                "owner_pid": network.owner.pid if network.owner else None,
                "purpose": network.owner.purpose if network.owner else None,
                "removed": not dry_run and network in gone,
            }
            for network in found
        ]
        render.print_json(facts)
    else:
        for network in gone:
            owner = f" of {network.owner.purpose} (process {network.owner.pid})" if network.owner else ", unsigned"
            render.line(f"{'would remove' if dry_run else 'removed'} rehearsal {network.id}{owner}")
        if not found:
            render.line("nothing is left behind")
    for failed in stayed.values():
        raise failed
