"""What runs that were killed left behind, on this machine and in every region that was ever used."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.backends.ec2.renter import removal
from hetopt.backends.ec2.renter.edge import LEDGER_FILE, Made, connect, connect_run, made, read_ledger
from hetopt.backends.ec2.renter.launcher import fleets_of
from hetopt.backends.ec2.renter.ordering import Identity, identity, regions
from hetopt.backends.ec2.renter.removal import Found, LocalRun, Remover
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.emulation import namespaces
from hetopt.backends.emulation.namespaces import FoundNetwork
from hetopt.core.errors import CloudRefused, RunFailed
from hetopt.core.run_folder import RunFolders, runs_home

_FIRST_REGION = "us-east-1"
"""Which is asked for the others; every account has it."""


def of_rehearsals(*, remove: bool) -> tuple[list[FoundNetwork], dict[str, RunFailed]]:
    """The networks of rehearsals whose launcher is dead, and of those that could not be removed why, by id.

    Args:
        remove: do it.
    """
    found = list(namespaces.find_leftovers())
    stayed: dict[str, RunFailed] = {}
    for network in found if remove else ():
        try:
            namespaces.remove(network.id)
        except RunFailed as error:  # the others can still go
            stayed[network.id] = error
    return found, stayed


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A thing of a run.

    Attributes:
        region: where it is.
        found: the thing.
        left_alone: why it is not to be removed; None where it may be.
        removed: whether it was.
    """

    region: str
    found: Found
    left_alone: str | None
    removed: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was looked for, and what has been found so far.

    Attributes:
        home: hetopt's folder on this machine.
        runs: what this machine knows of runs, by name.
        run_id: only this run, even if it goes on.
        everything: also what belongs to runs that go on may be removed.
        everybody: also what belongs to other people.
        remove: do it.
        found: the things.
        looked_in: the regions that could be looked at as a whole.
        refused: what could not be looked at, or not be removed.
    """

    home: Path
    runs: Mapping[str, LocalRun]
    run_id: str | None = None
    everything: bool = False
    everybody: bool = False
    remove: bool = False
    found: list[Leftover] = field(default_factory=list)
    looked_in: list[str] = field(default_factory=list)
    refused: list[CloudRefused] = field(default_factory=list)

    def look(self, region: str, who: Identity) -> None:
        """Look in a region, and remove what is to go."""
        edge = connect(region)
        mine = [run for run in self.runs.values() if run.region == region and not run.cleared]
        fleets = tuple(fleet for run in mine for fleet in fleets_of(run.folder))
        survey = Remover(edge=edge, sleep=time.sleep, made=Made(ids=fleets)).look(self.run_id)
        try:
            survey.check()
            self.looked_in.append(region)
        except CloudRefused as error:  # what was found is shown, and the other regions can still be looked at
            self.refused.append(CloudRefused(f"in {region}, {error.message}", hint=error.hint))
        by_run: dict[str, list[Found]] = {}
        for one in survey.found:
            by_run.setdefault(one.run_id, []).append(one)
        for name, things in by_run.items():
            kept = self._why_leave(things, who, edge, region)
            removed = self.remove and kept is None and self._remove(name, things, edge, region)
            self.found.extend(Leftover(region=region, found=one, left_alone=kept, removed=removed) for one in things)

    def _why_leave(self, things: Sequence[Found], who: Identity, edge: Edge, region: str) -> str | None:
        """Why the things of a run are left alone; None where they may go."""
        if not self.everybody and not all(removal.is_of(one, who) for one in things):
            return f"it belongs to {removal.owner_named(things)}; `everybody=True` includes it"
        if self.everything or self.run_id is not None:
            return None
        known = self.runs.get(things[0].run_id)
        over = known is not None and known.over
        return None if over else removal.why_leave(edge, region, who.account_id, things, time.time())

    def _remove(self, name: str, things: Sequence[Found], edge: Edge, region: str) -> bool:
        """Remove the things of a run; whether all of them are gone."""
        known = self.runs.get(name)
        ledger = Made()
        if known is not None:
            edge = connect_run(region, known.folder, self.home)
            ledger = made(read_ledger(known.folder / LEDGER_FILE), time.time())
        try:
            remover = Remover(edge=edge, sleep=time.sleep, made=ledger)
            remover.remove(things)
            remover.remove_run(name)
        except CloudRefused as error:
            self.refused.append(error)
            return False
        return True


def search(
    *,
    more_regions: Sequence[str] = (),
    run_id: str | None = None,
    everything: bool = False,
    everybody: bool = False,
    remove: bool = False,
) -> Search:
    """Look in every region that was ever used from here; in all of the account, where none was.

    Args:
        more_regions: to look in as well.
        run_id: see `Search`.
        everything: see there.
        everybody: see there.
        remove: see there.

    Raises:
        CloudRefused: nobody says who is asking.
    """
    home = runs_home().parent
    runs = removal.local_runs(RunFolders(home=runs_home()).all())
    begun = Search(home=home, runs=runs, run_id=run_id, everything=everything, everybody=everybody, remove=remove)
    configured = [name for name in (os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION")) if name]
    places = removal.regions_to_look_in(home, runs, more_regions)
    if not places:
        places, unasked = _regions_of_the_account(configured)
        begun.refused.extend(unasked)
    places = sorted({*places, *configured})
    who = identity(connect(places[0]))
    removal.settle(runs, time.time(), time.sleep)
    for region in places:
        begun.look(region, who)
    return begun


def _regions_of_the_account(configured: Sequence[str]) -> tuple[list[str], list[CloudRefused]]:
    """Where nothing was ever rented from here: every region that the account can use; and why not all are known."""
    asked = configured[0] if configured else _FIRST_REGION
    try:
        return regions(connect(asked)), []
    except CloudRefused as error:
        told = f"the account's regions cannot be listed, so that only {asked} was looked in: {error.message}"
        return [asked], [CloudRefused(told, hint=error.hint)]
