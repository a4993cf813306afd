"""`hetopt gc`: what runs left in the cloud and on this machine, as people and as programs read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetopt.api.leftovers import of_rehearsals
from hetopt.cli import render
from hetopt.cli.flags import in_flags
from hetopt.core.errors import CloudRefused

if TYPE_CHECKING:
    from hetopt.api.leftovers import Leftover, Search
    from hetopt.backends.emulation.namespaces import FoundNetwork


def show(searched: Search, *, as_json: bool) -> None:
    """Print what was found.

    Raises:
        CloudRefused: something could not be looked at, or not be removed.
    """
    if as_json:
        render.print_json([_row(one) for one in searched.found])
    else:
        _show(searched)
    if searched.refused:
        told = " ".join(dict.fromkeys(error.message for error in searched.refused))
        raise CloudRefused(told, hint=searched.refused[0].hint)


def _row(one: Leftover) -> dict[str, Any]:
    return {
        "region": one.region,
        "run": one.found.run_id,
        "kind": one.found.kind,
        "id": one.found.id,
        "detail": one.found.detail,
        "owner": one.found.launched_by or one.found.owner,
        "left_alone": one.left_alone and in_flags(one.left_alone),
        "removed": one.removed,
    }


def _show(searched: Search) -> None:
    if not searched.found and searched.looked_in:
        render.line(f"nothing is left behind in {', '.join(searched.looked_in)}")
    by_run: dict[tuple[str, str], list[Leftover]] = {}
    for one in searched.found:
        by_run.setdefault((one.region, one.found.run_id), []).append(one)
    for (region, run), its in by_run.items():
        render.line(f"{region}  {run}: {_fate(its)}", style="bold")
        by_kind: dict[str, list[str]] = {}
        for one in its:
            detail = f" ({one.found.detail})" if one.found.detail else ""
            by_kind.setdefault(one.found.kind, []).append(f"{one.found.id}{detail}")
        for kind, ids in by_kind.items():
            render.bullet(f"{kind}: {', '.join(ids)}")
    if not searched.remove and any(one.left_alone is None for one in searched.found):
        render.note("nothing was removed; do it with `hetopt gc --on ec2 --remove`")


def _fate(its: Sequence[Leftover]) -> str:
    if its[0].left_alone:
        return f"left alone, {its[0].left_alone}"
    return "removed" if its[0].removed else "left over"


def show_rehearsals(*, dry_run: bool, as_json: bool) -> None:
    """Remove the networks of rehearsals whose launcher is dead, and print them.

    Raises:
        RunFailed: one of them could not be removed.
    """
    found, stayed = of_rehearsals(remove=not dry_run)
    if as_json:
        render.print_json(
            [
                {
                    "id": network.id,
                    "owner_pid": network.owner.pid if network.owner else None,
                    "purpose": network.owner.purpose if network.owner else None,
                    "removed": not dry_run and network.id not in stayed,
                }
                for network in found
            ]
        )
    else:
        for network in found:
            if network.id not in stayed:
                render.line(f"{'would remove' if dry_run else 'removed'} {_told(network)}")
        if not found:
            render.line("nothing is left behind")
    for failed in stayed.values():
        raise failed


def _told(network: FoundNetwork) -> str:
    owner = f" of {network.owner.purpose} (process {network.owner.pid})" if network.owner else ", unsigned"
    return f"rehearsal {network.id}{owner}"
