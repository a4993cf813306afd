"""Your AWS account: what must be in place there, what would stop a launch, and runs that were launched elsewhere."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hetopt.api.options import REGION
from hetopt.api.run import Run
from hetopt.backends.backend import Prepared
from hetopt.backends.ec2.renter import doctor, ordering as accounts, removal
from hetopt.backends.ec2.renter.backend import Rental, adopt
from hetopt.backends.ec2.renter.calls import END_ROLE
from hetopt.backends.ec2.renter.doctor import Check, worst
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.order import (
    OVERRUN,
    UNPLACED_S,
    Order,
    judged,
    last_seen,
    usd_per_hour,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.ordering import PROFILE_NAME, Identity, Orders, identity, region_of, regions
from hetopt.backends.ec2.renter.removal import LocalRun, Remover, TaggedResource
from hetopt.backends.ec2.renter.request import (
    LEDGER_FILE,
    BotoEdge,
    Edge,
    Made,
    Retrying,
    connect,
    connect_run,
    known_regions,
    made,
    read_ledger,
)
from hetopt.backends.emulation import namespaces
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.formatting import duration, usd
from hetopt.core.option import names
from hetopt.core.paths import REGION_PATTERN, ROLE_PATTERN, inside, is_name, shown
from hetopt.core.run_folder import RunFolders, runs_home
from hetopt.core.run_status import RunStatus
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.quota import account_quotas_file, keep_quotas, write_quotas
from hetopt.optimizer.plan import Plan

__all__ = ["Check", "Setup", "attach", "checks", "worst"]


def attach(run: str, *, region: str = "us-east-1", bucket: str | None = None) -> Run:
    """Fetch the records of a run that was launched on EC2 from elsewhere into a new folder here, and return the run.

    Nothing of the run changes in AWS; afterwards `status`, `logs` and `stop` work here.

    Args:
        run: the run's full name; a part of it is not enough.
        region: AWS region of the run's machines.
        bucket: S3 bucket of the run. None: ``hetopt-ACCOUNT-REGION``, of the account of the credentials in use.

    Raises:
        BadInput: a folder of this run is here already, the name is no run's name, the bucket has no such run, or boto3
            is not installed.
        CloudRefused: AWS does not answer, or refuses to read the bucket or the machines.
    """
    folder = inside(runs_home(), run, what="run")
    if folder.exists():
        raise BadInput(f"{run} is known here.", hint=f"look at it with `hetopt status {run}`")
    edge = connect(region)
    who = accounts.identity(edge)
    place = bucket or accounts.default_bucket(who.account_id, region)
    adopt(edge, folder, bucket=place, account_id=who.account_id, now_s=time.time())
    return Run.in_folder(folder)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The names of what an administrator sets up once in an AWS account: bucket and role. Making one creates nothing.

    Attributes:
        region: AWS region of the bucket and of the machines.
        account: account number, 12 digits.
        bucket: S3 bucket for code, checkpoints and states of runs.
        role: name of the IAM role of rented machines, and of their instance profile.
    """

    region: str
    account: str
    bucket: str
    role: str

    @classmethod
    def of(
        cls,
        *,
        region: str = "us-east-1",
        account: str | None = None,
        bucket: str | None = None,
        role: str | None = None,
    ) -> Setup:
        """Return the setup of an account, with hetopt's usual names where none are given; nothing is created.

        Args:
            region: AWS region.
            account: account number, 12 digits. None: the account of the credentials in use, asked of AWS.
            bucket: S3 bucket. None or empty: ``hetopt-ACCOUNT-REGION``.
            role: role of the machines. None or empty: ``hetopt-node``.

        Raises:
            BadInput: the account number has not 12 digits, the region, bucket or role has a name that AWS does not
                allow, or boto3 is needed and not installed.
            CloudRefused: no account is given, and AWS does not tell the account of the credentials.
        """
        if account is not None and not (account.isdigit() and len(account) == 12):
            raise BadInput(f"an account number has 12 digits, not {account!r}.", hint="`aws sts get-caller-identity`")
        # They become a part of policies, in which * is every one.
        if not is_name(REGION_PATTERN, region):
            raise BadInput(f"`region` must be one like us-east-1, got {shown(region)}.", hint="name one region")
        if bucket:
            accounts.check_bucket_name(bucket)
        if role and not is_name(ROLE_PATTERN, role):
            raise BadInput(
                f"`role` must be 1 to 64 letters, digits and +=,.@-_, got {shown(role)}.",
                hint="name a role without its path, or leave `role` out",
            )
        try:
            number = accounts.identity(connect(region)).account_id if account is None else account
        except CloudRefused as refused:
            beside = "; policies need no credentials where `account` names its number"
            raise CloudRefused(refused.message, hint=f"{refused.hint}{beside}") from refused
        place = bucket or accounts.default_bucket(number, region)
        return cls(region=region, account=number, bucket=place, role=role or PROFILE_NAME)

    def make_bucket(self) -> Iterator[str]:
        """Create the private, encrypted S3 bucket with expiry, one AWS call an item; yield a line after each call.

        Nothing is called before the first item is taken. Repeating it changes nothing.

        Raises:
            BadInput: boto3 is not installed.
            CloudRefused: AWS refuses a call, such as for a bucket name of another account. Earlier calls stay done.
        """
        edge = connect(self.region)
        for request in doctor.bucket_calls(self.bucket, self.region, self.account):
            edge(request)
            yield f"{request.api_name}: {request.purpose}"

    def policies(self, types: Sequence[str] | str = ()) -> dict[str, Any]:
        """Return the least IAM policies that hetopt needs, by name; under ``commands`` shell commands to apply them.

        No call is made to AWS.

        Args:
            types: the only instance types that may be rented, as a sequence or a text with commas; empty: all types.

        Raises:
            BadInput: the catalogue of the region has no such instance type.
        """
        only = sorted(names(types, "types"))
        if only:
            known = load_catalog(self.region)
            only = [known.instance_type(name).name for name in only]
        place = {"account": self.account, "region": self.region, "bucket": self.bucket, "role": self.role}
        return {
            **{name: doctor.policy(name, types=only, **place) for name in doctor.POLICIES},
            "commands": doctor.commands(self.role),
        }


def checks(plan: Path | None = None, *, region: str | None = None, options: Ec2 | None = None) -> Iterator[Check]:
    """Yield checks of what would stop a launch on EC2, asking AWS; nothing there changes. End at bad credentials.

    Without boto3 the only check is a bad one. The account's vCPU quotas that were read are kept in the user's home
    folder, and later plans use them.

    Args:
        plan: file of a plan, whose images, quotas, zones, prices and permissions are checked as well; None: the account
            alone.
        region: AWS region. None: the plan's, else ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else us-east-1.
        options: options of the launch, such as bucket and role; None: the defaults.

    Raises:
        BadInput: the plan cannot be read, or its machines are not of one AWS region.
    """
    options = options or Ec2()
    loaded = None if plan is None else Plan.load(plan)
    configured = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    place = region or (region_of(loaded) if loaded is not None else configured)
    try:
        boto = BotoEdge(place)
    except BadInput as error:
        yield Check(name="boto3", verdict="bad", said=error.message.rstrip("."), hint=error.hint)
        return
    edge = Retrying(inner=boto, sleep=time.sleep, random=Random(), attempts=2)
    is_known = True
    for check in doctor.account_checks(edge, place, options):
        yield check
        is_known &= (check.name, check.verdict) != ("credentials", "bad")
    if is_known:
        yield _quotas(edge, place)
    if loaded is not None and is_known:
        orders = Orders(edge=edge, catalog=load_catalog(place), options=options)
        yield from doctor.plan_checks(orders, loaded, time.time())


def _quotas(edge: Edge, region: str) -> Check:
    """Return a check of the account's vCPU quotas in a region, and keep them for plans; it is bad where all are 0.

    Where AWS refuses to tell them, its verdict is unknown, and nothing is kept.

    Raises:
        BadInput: the file of kept quotas cannot be read or written.
    """
    try:
        granted = doctor.account_quotas(edge)
        number = accounts.identity(edge).account_id
    except CloudRefused as refused:
        sentence = f"what the account may run cannot be read ({refused.message.rstrip('.')})"
        return Check(name="quotas", verdict="unknown", said=sentence, hint=refused.hint)
    keep_quotas(account_quotas_file(), number, region, granted, datetime.datetime.now(datetime.UTC))
    some = {bucket: vcpus for bucket, vcpus in granted.items() if vcpus}
    return Check(
        name="quotas",
        verdict="good" if some else "bad",
        said=f"vCPUs in {region}: {write_quotas(some) or 'none'}; `hetopt recommend` plans with them",
        hint=None if some else f"ask for some in the Service Quotas console of {region}, Amazon EC2",
    )


def rehearsal_leftovers(*, remove: bool) -> list[str]:
    """Return the ids of emulated networks that rehearsals left whose launching process is dead.

    Args:
        remove: True: also remove these networks, and kill what still runs in them; False: change nothing.

    Raises:
        RunFailed: a network could not be removed, such as without root; later ones are then left, too.
    """
    left = namespaces.find_leftovers()
    for network_id in left if remove else ():
        namespaces.remove(network_id)
    return left


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A cloud resource that a run left behind, and whether a search removed it.

    Attributes:
        region: AWS region of the resource.
        resource: kind, id, run and owner of the resource.
        left_alone: sentence on why a search does not remove the resource; None: the resource may be removed.
        removed: True if the search removed the resource; False also where removal failed or was not asked for.
    """

    region: str
    resource: TaggedResource
    left_alone: str | None
    removed: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search of AWS regions for resources that runs left behind; the last three attributes collect what was found.

    Attributes:
        run_id: search only this run's resources, which may be removed even if the run goes on; None: those of all runs.
        everything: resources of runs that still go on may be removed, too.
        everybody: resources of other people may be removed, too.
        remove: remove what may be removed; else only list.
        runs: EC2 runs that have a folder on this machine, by name.
        leftovers: the resources found so far, removed or not.
        looked_in: the regions in which every kind of resource could be listed.
        refused: the refusals so far: what could not be listed or removed. Searching goes on after each.
    """

    run_id: str | None = None
    everything: bool = False
    everybody: bool = False
    remove: bool = False
    runs: Mapping[str, LocalRun] = field(default_factory=lambda: removal.local_runs(RunFolders(home=runs_home()).all()))
    leftovers: list[Leftover] = field(default_factory=list)
    looked_in: list[str] = field(default_factory=list)
    refused: list[CloudRefused] = field(default_factory=list)

    def look_everywhere(self, more_regions: Sequence[str] = ()) -> None:
        """Search all AWS regions that this machine ever rented in or has configured, and ``more_regions``, by `look`.

        Before that, it sleeps up to a minute where a dead process may just have created something, as AWS lists that
        late.

        Args:
            more_regions: further region names. Where neither these nor earlier runs name a region, all regions of the
                account are searched.

        Raises:
            BadInput: boto3 is not installed.
            CloudRefused: AWS does not tell who the caller is, or which regions the account has.
        """
        configured = [name for name in (os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION")) if name]
        asked = {*(run.region for run in self.runs.values()), *known_regions(runs_home().parent), *more_regions}
        places = sorted({*(asked or regions(connect(next(iter(configured), REGION)))), *configured})
        who = identity(connect(places[0]))
        removal.settle(self.runs, time.time(), time.sleep)
        for region in places:
            self.look(region, who)

    def look(self, region: str, who: Identity) -> None:
        """Search a region, add each resource found to ``leftovers``, and with ``remove`` remove what may be removed.

        Refusals by AWS are added to ``refused`` and raise nothing.

        Args:
            region: AWS region.
            who: caller of AWS, whose own resources may be removed.

        Raises:
            BadInput: boto3 is not installed.
        """
        edge = connect(region)
        survey = Remover(edge=edge, sleep=time.sleep).look(self.run_id)
        try:
            survey.check()
            self.looked_in.append(region)
        except CloudRefused as error:  # what was found is shown, and the other regions can still be looked at
            self.refused.append(CloudRefused(f"in {region}, {error.message}", hint=error.hint))
        by_run: dict[str, list[TaggedResource]] = {}
        for thing in survey.resources:
            by_run.setdefault(thing.run_id, []).append(thing)
        for name, things in by_run.items():
            kept = self._why_leave(things, who, edge, region)
            removed = self.remove and kept is None and self._remove(name, things, edge, region)
            self.leftovers.extend(
                Leftover(region=region, resource=thing, left_alone=kept, removed=removed) for thing in things
            )

    def _why_leave(self, things: Sequence[TaggedResource], who: Identity, edge: Edge, region: str) -> str | None:
        """Return why the resources of a run are left alone; None: they may go.

        Left alone are those of another caller, unless ``everybody``; and, unless ``everything`` or one run was asked
        for, those of a run that may still need them.
        """
        if not self.everybody and not all(removal.is_of(thing, who) for thing in things):
            return f"it belongs to {removal.owner_named(things)}; `everybody=True` includes it"
        if self.everything or self.run_id is not None:
            return None
        known = self.runs.get(things[0].run_id)
        over = known is not None and known.over
        return None if over else removal.why_leave(edge, region, who.account_id, things, time.time())

    def _remove(self, name: str, things: Sequence[TaggedResource], edge: Edge, region: str) -> bool:
        """Remove a run's cloud resources; return whether all are gone; a refusal by AWS is added to ``refused``.

        Args:
            name: name of the run, which need not be known on this machine.
            things: the resources that were found.
            edge: edge to AWS; a run that is known here is removed by an edge that writes to its ledger.
            region: region of the resources.
        """
        known = self.runs.get(name)
        ledger = Made()
        if known is not None:
            edge = connect_run(region, known.folder, runs_home().parent)
            ledger = made(read_ledger(known.folder / LEDGER_FILE), time.time())
        try:
            remover = Remover(edge=edge, sleep=time.sleep, made=ledger)
            remover.remove(things)
            remover.remove_run(name)
        except CloudRefused as error:
            self.refused.append(error)
            return False
        return True


def rental_of(prepared: Prepared) -> Rental:
    """Return the same prepared launch, typed as an EC2 rental, for its order of machines.

    Raises:
        AssertionError: the launch was prepared by another backend.
    """
    assert isinstance(prepared, Rental)
    return prepared


def unfollowed(rental: Rental) -> str:
    """Return a sentence on what a prepared EC2 run does, and for how long, while no process follows it."""
    lives_s, takes_s = rental.order.lifetime_s, rental.wanted.chosen.prediction.total_s.high
    sentence = (
        "if nobody follows the run, or this machine sleeps, training goes on; machines that are lost are not replaced. "
        "When the budget is spent, all save a checkpoint and end: after "
        f"{duration(lives_s)} at the machines' highest prices. "
        f"The run may take {duration(takes_s)}"
    )
    if takes_s <= lives_s:
        return sentence
    if not rental.order.has_spot:
        return f"{sentence}, which is longer: it would end unfinished, with a checkpoint"
    return f"{sentence}, which is longer: `hetopt status`, now and then, gives it more time as long as less was spent"


def hourly_usd(order: Order) -> tuple[float, float]:
    """Return an EC2 order's cost in USD an hour of all machines: as planned in its first zone, and at most."""
    return usd_per_hour(order.roles, order.zones[0]), worst_usd_per_hour(order.roles, order.zones)


def last_end(order: Order) -> str:
    """Return a sentence on how AWS ends an order's machines that nothing else reaches, and what they then cost."""
    if order.end_role is None:
        return (
            f"the machines' own timers alone, as the account has no role {END_ROLE}: `hetopt setup --print-policy` "
            "tells how it is made"
        )
    lives = duration(order.outside_end_s() - order.created_s)
    soon, most = duration(UNPLACED_S), usd((1 + OVERRUN) * order.budget_usd)
    return (
        f"the account's scheduler ends machines without a place after {soon}, and all after {lives} or, while somebody "
        f"follows the run, later with its lease: if all of them hang, they cost {most} at most"
    )


def look(run: Run, *, ask: bool) -> tuple[RunStatus, dict[str, Any]]:
    """Return a rented run's status and the facts of its machines for `hetopt status --json`.

    Args:
        run: a run on EC2.
        ask: ask AWS first, which also renews the run's records and lease; else use the records of the last look.

    Returns:
        The status, and a mapping with spending and budget (USD), the age of the records (``seen_s_ago``) and a list of
            machines. Where AWS or a record refuses, ``not_asked`` says why, and the last records are used.

    Raises:
        AssertionError: the run is of another backend.
        BadInput: the records in the run's folder cannot be read.
    """
    launcher, folder = run.backend, run.folder
    assert isinstance(launcher, Ec2Launcher)
    why_not: str | None = None
    if ask:
        try:
            launcher.look(run.handle)
        except (CloudRefused, BadInput) as error:
            why_not = f"{error.message} {error.hint or ''}".strip()
    seen, now_s = last_seen(folder), time.time()
    rental = {
        "seen_s_ago": now_s - seen.time_s if seen.time_s else None,
        "not_asked": why_not,
        "spent_usd": seen.spent_usd(now_s),
        "spent_is_estimate": seen.is_estimate,
        "budget_usd": run.order and run.order.budget_usd,
        "usd_per_hour": sum(machine.usd_per_hour for machine in seen.alive),
        "ends_in_s": seen.lease_end_s - now_s if seen.lease_end_s is not None and seen.alive else None,
        "zone": seen.zone,
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
                "usd": machine.usd(now_s),
                "usd_is_estimate": machine.state == "gone",
                "heartbeat_s_ago": now_s - machine.heartbeat_s if machine.heartbeat_s is not None else None,
            }
            for machine in seen.machines
        ],
    }
    return judged(folder, seen), rental


def spent(run: Run) -> tuple[float, bool, str | None]:
    """Return a rented run's cost in USD at its last look, whether the cost is an estimate, and why the run was ended.

    Args:
        run: a run on EC2; AWS is not asked.

    Returns:
        The cost; True where AWS had forgotten a machine before its end was seen; the reason, None where nobody ended
            the run.

    Raises:
        BadInput: the records in the run's folder cannot be read.
    """
    seen = last_seen(run.folder)
    return seen.spent_usd(seen.time_s), seen.is_estimate, seen.stop_reason
