"""`hetopt gc`: find what runs that were killed left behind, on this machine or on EC2, and remove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hetopt.cli.completion import one_of

if TYPE_CHECKING:
    from hetopt.backends.emulation.namespaces import FoundNetwork


def gc(
    on: str = typer.Option(
        "rehearsal",
        autocompletion=one_of("rehearsal", "ec2"),
        help="Where to look: 'rehearsal' is this machine, 'ec2' is the cloud.",
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

    With --on ec2: machines, fleets, launch templates, security groups and disks that carry hetopt's tags, in every
    region that was ever used from here; in all regions of the account, where none was. They are only listed, unless
    --remove is given. What belongs to a run that goes on, by its lease and its machines' heartbeats, or to somebody
    else is left alone. What could not be looked at is named, and the exit code is not 0.
    """
    from hetopt.core.errors import BadInput

    if on == "ec2":
        from hetopt.api.leftovers import search
        from hetopt.cli import ec2_gc

        found = search(
            more_regions=region,
            run_id=run,
            everything=everything,
            everybody=everybody,
            remove=remove_ and not dry_run,
        )
        ec2_gc.show(found, as_json=json_)
        return
    if on != "rehearsal" or remove_ or region or run is not None or everything or everybody:
        raise BadInput(
            f"there is nothing to find on {on!r}." if on != "rehearsal" else "--remove and the like are for --on ec2.",
            hint="use --on ec2 or --on rehearsal",
        )
    _rehearsals(dry_run=dry_run, as_json=json_)


def _rehearsals(*, dry_run: bool, as_json: bool) -> None:
    """Remove the networks of rehearsals whose launcher is dead, and print them.

    Raises:
        RunFailed: one of them could not be removed.
    """
    from hetopt.api.leftovers import of_rehearsals
    from hetopt.cli import render

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
