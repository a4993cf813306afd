"""The interface of every backend: prepare a plan, submit it, poll the run, stop it. Backends are peers.

When a host or a machine is given up: by the steps that its placements brought, not by whether it answers.

A host that crashes as soon as it takes part is there again each time, and would be placed for ever.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
"""Between two looks of whoever waits for a run: what a person does not notice, and `Launcher.poll` is cheap."""


def until(
    reached: Callable[[], bool], *, within_s: float, every_s: float = 0.05, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Wait until a condition holds, at least one look long; return whether it did in time.

    Args:
        reached: looks whether it has.
        within_s: how long to wait at most.
        every_s: between looks.
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
    """The name of one run. Everything about it is in its folder, so that another terminal can look and stop it."""

    run_dir: Path


class Launcher(Protocol):
    """A launcher that runs a `RunSpec` somewhere."""

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Start the run and return at once. ``run_dir`` exists and is empty but for what the caller put there."""

    def poll(self, handle: RunHandle) -> RunStatus:
        """Return the present status of a run. Cheap: callers ask a few times a second."""

    def stop(self, handle: RunHandle) -> None:
        """End the run: workers save a checkpoint if they can, then nothing of it is left running. Idempotent."""


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
        """Return the folder of a run, new or resumed, and its launch record dated with this start.

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
    """An execution target that plans run on. Whoever adds another writes one file with these methods."""

    def prepare(self, made: Plan, wanted: Plan, options: Any) -> Prepared:
        """Map a plan onto this backend, and predict it there.

        Args:
            made: the plan as it was made, for the record.
            wanted: as it is to be run.
            options: the record that this backend was registered with.

        Raises:
            HetoptError: it cannot be run here.
        """

    def prepare_resumed(self, folder: Path, options: Any) -> Prepared:
        """Prepare a run that has ended to go on from its last checkpoint.

        Raises:
            HetoptError: it is not over, ran elsewhere, or has no checkpoint.
        """

    def check_ready(self, prepared: Prepared) -> None:
        """Refuse what could not be started now, before anybody is asked and anything is made. `submit` does it too.

        It connects to no machine of the plan: nobody has said yes to that yet.

        Raises:
            HetoptError: it could not.
        """

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """Start what was prepared, and return at once: the run, and its record as it was written.

        Raises:
            HetoptError: it cannot be started; nothing of it is left.
        """


@runtime_checkable
class Renting(Launcher, Protocol):
    """A launcher that can replace the machines of a run by others."""

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Replace all preemptible machines by others that nobody takes back; the former are given back after that.

        Args:
            handle: of the run.
            needed_s: from now to its end.

        Raises:
            BadInput: there are none, or it is being done.
            BudgetStop: the budget does not pay for it.
        """


def check_place(launch: Launch, folder: Path, place: str) -> None:
    """Refuse a run that goes on elsewhere.

    Raises:
        BadInput: so it is.
    """
    if launch.on != place:
        raise BadInput(
            f"{folder.name} was started on {launch.on}, and goes on there.",
            hint=f"hetopt launch --on {launch.on} --resume {folder.name}",
        )


def is_finished(events: Sequence[LogEvent]) -> bool:
    """Return whether a run came to an end of its own, by its events: nothing is left to do."""
    match events[-1] if events else None:
        case TrainingFinished(reason=reason):
            return reason != "stopped"
        case ProbeEvent(event="probe_finished"):
            return True
    return False


def advances(event: LogEvent) -> bool:
    """Return whether an event shows progress of a run: a machine that brings it is not given up."""
    return isinstance(event, StepsLogged | CheckpointSaved | ProbeEvent)


MOST_IDLE = 3
"""Placements in a row that end with the host and without a completed step. Once is an accident; what lasts for minutes,
such as a package index or a line that is down, is over by the third."""


def is_given_up(idle: int) -> bool:
    """Return whether a host is given up, after too many placements without a completed step.

    Args:
        idle: its placements since the last completed step that it took part in, each of which it has ended itself.
    """
    return idle >= MOST_IDLE


def back_off_s(first_s: float, idle: int) -> float:
    """Return how many seconds to wait before a host is placed again: twice as long each time.

    Args:
        first_s: after a placement that brought steps.
        idle: as for `is_given_up`.
    """
    return first_s * 2.0 ** min(idle, MOST_IDLE)
