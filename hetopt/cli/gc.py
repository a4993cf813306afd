"""`hetopt gc`: find what runs that were killed left behind, on this machine or on EC2, and remove it."""

from __future__ import annotations

import typer

from hetopt.cli.options import one_of


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
    from hetopt.cli import gc_document
    from hetopt.core.errors import BadInput

    if on == "ec2":
        from hetopt.api.account import search

        found = search(
            more_regions=region,
            run_id=run,
            everything=everything,
            everybody=everybody,
            remove=remove_ and not dry_run,
        )
        gc_document.show(found, as_json=json_)
        return
    if on != "rehearsal" or remove_ or region or run is not None or everything or everybody:
        raise BadInput(
            f"there is nothing to find on {on!r}." if on != "rehearsal" else "--remove and the like are for --on ec2.",
            hint="use --on ec2 or --on rehearsal",
        )
    gc_document.show_rehearsals(dry_run=dry_run, as_json=json_)
