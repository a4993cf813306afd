"""What every backend can do: prepare a plan, submit it, say how the run is, stop it. Backends are peers."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hetopt.core.errors import BadInput, setting
from hetopt.core.reading import shortened
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunStatus

if TYPE_CHECKING:  # a rented machine starts runs without the optimizer
    from hetopt.core.runs import RunFolders
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.plan import Plan


MOST_SLOWDOWN = 1e6
"""A step of a microsecond would take a second."""
MOST_RESTARTS = 10**6

POLL_S = 0.2
"""Between two looks of whoever waits for a run: what a person does not notice, and `Launcher.poll` is cheap."""


@dataclass(frozen=True, kw_only=True)
class RunHandle:
    """Names one run. Everything about it is in its folder, so that another terminal can look and stop it."""

    run_dir: Path


class Launcher(Protocol):
    """Runs a `RunSpec` somewhere."""

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run and return at once. ``run_dir`` exists and is empty but for what the caller put there."""
        ...

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is now. Cheap: callers ask a few times a second."""
        ...

    def stop(self, handle: RunHandle) -> None:
        """End the run: workers save a checkpoint if they can, then nothing of it is left running. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What a launch is told beside its plan; `hetopt.api.launching` refuses those of other backends.

    Attributes:
        data: folder of the task's data (ssh: on each host); on EC2 ``s3://BUCKET/PREFIX``. Absent: where
            the profile found it.
        restarts: how often a worker that is killed is replaced (local, rehearsal); absent: the plan's.
        slowdowns: local: a factor of 1 or more for each worker, whose computation takes so many times as long.
        hosts: rehearsal: these hosts instead of the plan's machines, such as ``"speed=1,rate=100mbit x2"``; ssh: those
            to run on, such as ``"alice@box1,bob@box2"``.
        inventory: ssh: the file that describes them.
        schedule: rehearsal: the text that says what happens on the way, a change a line.
        stand_in: rehearsal: a gradient of the same weight is exchanged, and the job is not trained.
        budget_usd: ec2: a hard cap on the whole bill; absent: the plan's.
        bucket: ec2: where code, checkpoints and state go; absent: ``hetopt-ACCOUNT-REGION``.
        zone: ec2: only this availability zone, by name or id.
        substitutes: ec2: for a type those that may stand in for it.
        instance_profile: ec2: the machines' role; absent: ``hetopt-node``.
        images: ec2: the image of a kind of machine: x86_64-cpu, arm64-cpu, x86_64-gpu or arm64-gpu.
        unprobed: ec2: rent types although no step was ever measured on them or a relative.
        accept_risk: ec2: rent a plan that is less sure to keep its limits than was asked for.
        accept_fewer: ec2: asked whether the run may begin on fewer machines; absent: all or none.
        subnets: ec2: that machines may be in; empty: the default ones.
        security_group: ec2: of the machines; absent: one that is made for the run.
        public_address: ec2: whether machines have one, as their subnet gives it.
        proxy: ec2: by which machines reach S3 and packages; absent: by themselves.
        canary: ec2: first rent one machine of each type for some minutes, and put what it measures into the plan.
    """

    data: str | None = None
    restarts: int | None = None
    slowdowns: tuple[float, ...] | None = None
    hosts: str | None = None
    inventory: str | None = None
    schedule: str | None = None
    stand_in: bool = False
    budget_usd: float | None = None
    bucket: str | None = None
    zone: str | None = None
    substitutes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    instance_profile: str | None = None
    images: Mapping[str, str] = field(default_factory=dict)
    unprobed: bool = False
    accept_risk: bool = False
    accept_fewer: Callable[[RunSpec], bool] | None = None
    subnets: tuple[str, ...] = ()
    security_group: str | None = None
    public_address: bool = True
    proxy: str | None = None
    canary: bool = False


TAKES: dict[str, frozenset[str]] = {
    "local": frozenset({"data", "restarts", "slowdowns"}),
    "rehearsal": frozenset({"data", "restarts", "hosts", "schedule", "stand_in"}),
    "ssh": frozenset({"data", "hosts", "inventory"}),
    "ec2": frozenset(
        {
            *("data", "budget_usd", "bucket", "zone", "substitutes", "instance_profile", "images"),
            *("unprobed", "accept_risk", "accept_fewer", "canary"),
            *("subnets", "security_group", "public_address", "proxy"),
        }
    ),
}
"""Which of these options each backend takes."""


def _is_slowdown(factor: object) -> bool:
    return isinstance(factor, Real) and 1 <= float(factor) <= MOST_SLOWDOWN


def check_options(place: str, options: LaunchOptions) -> None:
    """Refuse an option that is another backend's, and a value that none takes.

    Raises:
        BadInput: one was given.
    """
    unset = LaunchOptions()
    for option in fields(options):
        name = option.name
        if getattr(options, name) != getattr(unset, name) and name not in TAKES[place]:
            owners = [owner for owner, its in TAKES.items() if name in its]
            instead = "describe slower hosts with `hosts`" if name == "slowdowns" else "leave it out"
            on = " or ".join(setting("on", owner) for owner in owners)
            raise BadInput(f"`{name}` is for {on}.", hint=f"{instead}, or choose {setting('on', owners[0])}")
    factors = options.slowdowns
    if factors is not None and not (factors and all(map(_is_slowdown, factors))):
        said = ", ".join(map(str, factors)) or "none"
        raise BadInput(
            f"`slowdowns` must be numbers from 1 to {MOST_SLOWDOWN:,.0f}, got {shortened(said)}.",
            hint="for example `slowdowns=[1, 1, 2, 4]`",
        )
    if options.restarts is not None and not 0 <= options.restarts <= MOST_RESTARTS:
        raise BadInput(
            f"`restarts` must be a number from 0 to {MOST_RESTARTS:,}, got {options.restarts}.",
            hint="for example `restarts=1`",
        )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan on a backend, predicted and priced. Nothing was started or rented.

    Attributes:
        launch: the record of the launch, with what the run should take there.
        folder: of the run that goes on; absent: a new one begins.
        connects_to: sentences on the machines that it goes to, which a person reads before saying yes.
    """

    launch: Launch
    folder: Path | None = None
    connects_to: tuple[str, ...] = ()

    def begun(self, folders: RunFolders, *, secret: bool = False) -> tuple[Path, Launch]:
        """The folder of the run, and its record with the moment in which it begins, or goes on.

        Args:
            folders: where a new one is made.
            secret: its name cannot be guessed.
        """
        if self.folder is not None:
            return self.folder, self.launch.model_copy(update={"resumed_s": (*self.launch.resumed_s, time.time())})
        now = datetime.datetime.now(datetime.UTC)
        folder = folders.create(self.launch.spec.task.rpartition("/")[2], now, secret=secret)
        created = now.isoformat(timespec="seconds")
        update = {"run_id": folder.name, "created": created, "started_s": time.time()}
        return folder, self.launch.model_copy(update=update)


class Backend(Launcher, Protocol):
    """Where plans run. Whoever adds another writes one file with these methods."""

    def prepare(self, made: Plan, wanted: Plan, options: LaunchOptions) -> Prepared:
        """Map a plan onto this backend, and predict it there.

        Args:
            made: the plan as it was made, for the record.
            wanted: as it is to be run.
            options: of the launch.

        Raises:
            HetoptError: it cannot be run here.
        """
        ...

    def prepare_resumed(self, folder: Path, options: LaunchOptions) -> Prepared:
        """A run that has ended, to go on from its last checkpoint.

        Raises:
            HetoptError: it is not over, ran elsewhere, or has no checkpoint.
        """
        ...

    def check_ready(self, prepared: Prepared) -> None:
        """Refuse what could not be started now, before anybody is asked and anything is made. `submit` does it too.

        It connects to no machine of the plan: nobody has said yes to that yet.

        Raises:
            HetoptError: it could not.
        """
        ...

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """Start what was prepared, and return at once: the run, and its record as it was written.

        Raises:
            HetoptError: it cannot be started; nothing of it is left.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What the machines of a run cost an hour now.

    Attributes:
        zone: where they are.
        usd_per_hour: of each host.
        elsewhere_usd_per_hour: of all of them together on spot, by zone that they could be in; empty: they stay.
    """

    zone: str
    usd_per_hour: Mapping[str, float]
    elsewhere_usd_per_hour: Mapping[str, float]


@runtime_checkable
class Renting(Launcher, Protocol):
    """A launcher that can have other machines in the places of those of a run."""

    def replace(self, handle: RunHandle, host: str) -> None:
        """Give a host's machine back; what follows is what follows from any loss.

        Raises:
            BadInput: no machine of the run is that host now.
        """
        ...

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Have machines in the place of all that can be taken back, which cannot; those are given back after that.

        Args:
            handle: of the run.
            needed_s: from now to its end.

        Raises:
            BadInput: there are none, or it is being done.
            BudgetStop: the budget does not pay for it.
        """
        ...

    def add(self, handle: RunHandle, host: str, machines: int, needed_s: float) -> None:
        """Rent more machines like that of a host; they join the run.

        Args:
            handle: of the run.
            host: whose machine and workers they are like.
            machines: how many.
            needed_s: from now to the run's end.

        Raises:
            BadInput: the run has no such host, or is over.
            BudgetStop: the budget does not pay for them.
        """
        ...

    def pools(self, handle: RunHandle) -> Pools | None:
        """What the run's machines cost here and elsewhere; None while some come or go."""
        ...

    def switch(self, handle: RunHandle, zone: str, needed_s: float) -> None:
        """Have the same machines in another zone; those that train are given back once the others take over.

        Args:
            handle: of the run.
            zone: where.
            needed_s: from now to the run's end.

        Raises:
            BadInput: it cannot leave for there now.
            BudgetStop: the budget does not pay for both meanwhile.
        """
        ...
