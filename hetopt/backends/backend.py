"""The interface of every backend: prepare a plan, submit it, poll the run, stop it. Backends are peers.

With the rule on when a host or a machine is given up: by the steps that its placements brought, not by whether it
answers, as a host that crashes as soon as it takes part would be placed for ever.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hetopt.core.errors import BadInput
from hetopt.core.events.records import CheckpointSaved, LogEvent, ProbeEvent, StepsLogged, TrainingFinished
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunStatus

if TYPE_CHECKING:  # a rented machine starts runs without the optimizer
    from hetopt.core.run_folder import RunFolders
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.plan import Plan


POLL_S = 0.2
"""Seconds between two looks of whoever waits for a run: what a person does not notice, and `Launcher.poll` is cheap."""


def until(
    reached: Callable[[], bool], *, within_s: float, every_s: float = 0.05, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Poll ``reached()`` every ``every_s`` seconds until it is true; return False if that takes over ``within_s``.

    Args:
        reached: returns whether what is waited for has happened; what it raises goes through.
        within_s: most seconds to wait, by the waits alone; 0: look once.
        every_s: seconds between two looks.
        sleep: waits for so many seconds.
    """
    waited_s = 0.0
    while not reached():
        if waited_s >= within_s:
            return False
        sleep(every_s)
        waited_s += every_s
    return True


@dataclass(frozen=True, kw_only=True)
class RunHandle:
    """The handle of a run, by which any other process can watch and stop the run.

    Attributes:
        run_dir: the run's folder.
    """

    run_dir: Path


class Launcher(Protocol):
    """The interface that starts, polls and stops runs of a `RunSpec` on one kind of machines, such as ssh hosts."""

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start or resume a run in the existing folder ``run_dir``; return its handle without waiting for training.

        The folder is empty but for what the caller put there, or holds an ended run, which is resumed. Renting takes
        minutes.

        Args:
            spec: spec of the run.
            run_dir: the run's folder.
            environment: variables for the run's processes, on top of this process's own.

        Raises:
            HetoptError: the run cannot be started; nothing of it runs or is rented.
        """

    def poll(self, handle: RunHandle) -> RunStatus:
        """Return a run's present status, cheap enough to ask 5 times a second; on EC2, also manage its machines.

        Raises:
            BadInput: the records in the run's folder cannot be read.
        """

    def stop(self, handle: RunHandle) -> None:
        """End a run and wait until nothing of it is running; workers save a checkpoint if they can. Idempotent.

        Raises:
            HetoptError: something of the run may be left.
        """


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A launch on one backend, predicted and priced, but not begun: nothing was started or rented.

    Attributes:
        launch: record of the launch, with the prediction of what the run takes there.
        folder: folder of the run that is resumed; None: a new run begins.
        connects_to: sentences on the machines that it goes to, which a person reads before saying yes; empty: this one.
        spends_usd: most that it may cost, to which a person has to agree; None: nothing, or what a `Rental` says.
        files: contents of the new run's folder, by name, such as the code; a run that is resumed has most of them
            there.
        detached: whether the run goes on when the process that starts it ends.
    """

    launch: Launch
    folder: Path | None = None
    connects_to: tuple[str, ...] = ()
    spends_usd: float | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    detached: bool = False

    def begun(self, folders: RunFolders, *, secret: bool = False) -> tuple[Path, Launch]:
        """Create a new run's folder, or take the resumed run's; return it and the launch record, dated now, unsaved.

        Args:
            folders: folders of runs, among which a new one is made.
            secret: whether a new folder's name must not be guessable.

        Raises:
            BadInput: the folder cannot be made.
        """
        if self.folder is not None:
            return self.folder, self.launch.model_copy(update={"resumed_s": (*self.launch.resumed_s, time.time())})
        now = datetime.datetime.now(datetime.UTC)
        folder = folders.create(self.launch.spec.task.rpartition("/")[2], now, secret=secret)
        created = now.isoformat(timespec="seconds")
        update = {"run_id": folder.name, "created": created, "started_s": time.time()}
        return folder, self.launch.model_copy(update=update)


class Backend(Launcher, Protocol):
    """The interface of an execution target, which prepares, submits, watches and stops the runs of plans there.

    Adding another takes one file with these methods.
    """

    def prepare(self, made: Plan, wanted: Plan, options: Any) -> Prepared:
        """Map the plan ``wanted`` onto this backend's machines and predict it; record ``made``. Start nothing.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run, with a launch's changes.
            options: launch options, of the class that this backend was registered with.

        Raises:
            HetoptError: the plan cannot be run here.
        """

    def prepare_resumed(self, folder: Path, options: Any) -> Prepared:
        """Prepare the ended run in ``folder`` to go on from its last checkpoint; start nothing yet.

        A run that has saved no checkpoint begins anew.

        Args:
            folder: the run's folder.
            options: launch options, of the class that this backend was registered with.

        Raises:
            HetoptError: the run is not over, or ran on another backend.
        """

    def check_ready(self, prepared: Prepared) -> None:
        """Raise if the prepared launch could not be started now; connect to none of the plan's machines for that.

        The user has not confirmed the launch yet. `submit` checks it again.

        Raises:
            HetoptError: the launch could not be started now.
        """

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """Start the prepared launch; return the run's handle and launch record without waiting for training.

        Args:
            prepared: launch made by `prepare` or `prepare_resumed`.
            folders: folders of runs, among which a new run's folder is made.

        Raises:
            HetoptError: the launch cannot be started; nothing of it runs or is rented.
        """


@runtime_checkable
class Renting(Launcher, Protocol):
    """The interface of a launcher whose runs can move from spot to on-demand machines."""

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Order that a run's spot machines are replaced by on-demand machines; later polls carry it out.

        The spot machines are given back once the others train.

        Args:
            handle: handle of the run.
            needed_s: seconds from now to the run's end, for which the budget must pay.

        Raises:
            BadInput: the run is over, has no spot machines, or is moving already.
            BudgetStop: the budget does not pay on-demand machines for so long.
        """


def check_place(launch: Launch, folder: Path, place: str) -> None:
    """Refuse to resume the run in ``folder`` anywhere but on the backend ``place``.

    Raises:
        BadInput: the launch record names another backend.
    """
    if launch.on != place:
        raise BadInput(
            f"{folder.name} was started on {launch.on}, and goes on there.",
            hint=f"hetopt launch --on {launch.on} --resume {folder.name}",
        )


def is_finished(events: Sequence[LogEvent]) -> bool:
    """Return whether a run's last event is the end of training, other than by a stop, or the end of a probe."""
    match events[-1] if events else None:
        case TrainingFinished(reason=reason):
            return reason != "stopped"
        case ProbeEvent(event="probe_finished"):
            return True
    return False


def advances(event: LogEvent) -> bool:
    """Return whether an event shows progress of a run: logged steps, a saved checkpoint, or an event of a probe."""
    return isinstance(event, StepsLogged | CheckpointSaved | ProbeEvent)


MOST_IDLE = 3
"""Placements of a host in a row, each ended by the host without a completed step, after which it is given up. Once is
an accident; what lasts for minutes, such as a package index or a line that is down, is over by the third."""


def is_given_up(idle: int) -> bool:
    """Return whether a host is given up: ``idle``, its count of placements without a completed step, is 3 or more.

    Args:
        idle: number of placements that the host itself ended before a step was done: since the last completed step, or,
            of a rented machine's host, since the run was launched or resumed.
    """
    return idle >= MOST_IDLE


def back_off_s(first_s: float, idle: int) -> float:
    """Return the seconds until a lost host is tried again: ``first_s`` * 2^``idle``, at most 8 times ``first_s``.

    Args:
        first_s: seconds after a placement that brought steps.
        idle: number of placements without a step, as for `is_given_up`.
    """
    return first_s * 2.0 ** min(idle, MOST_IDLE)
