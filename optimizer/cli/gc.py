"""`hetopt gc`: find what rehearsals that were killed left behind on this machine, and remove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hetopt.trainer.launch.namespaces import FoundNetwork


def gc(
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be removed and stop there."),
    json_: bool = typer.Option(False, "--json", help="Print what was found as JSON."),
) -> None:
    """Remove the network namespaces, and the processes in them, of rehearsals whose launcher is dead.

    Rehearsals that run are left alone.
    """
    from hetopt.optimizer.cli import render
    from hetopt.profiler.errors import RunFailed
    from hetopt.trainer.launch.namespaces import find_leftovers, remove

    found = find_leftovers()
    stayed: dict[str, RunFailed] = {}
    for network in () if dry_run else found:
        try:
            remove(network.id)
        except RunFailed as error:  # the others can still go
            stayed[network.id] = error
    if json_:
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
