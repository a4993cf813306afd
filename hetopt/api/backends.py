"""The backends by name, imported when they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.core.errors import BadInput
from hetopt.core.reporter import Reporter
from hetopt.optimizer.launch_record import LAUNCH_FILE, PLACES, Launch, Place

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend


def backend(name: str, reporter: Reporter | None = None) -> Backend:
    """The backend of that name.

    Args:
        name: ``local``, ``rehearsal`` or ``ec2``.
        reporter: told what goes on in the cloud.

    Raises:
        BadInput: there is none.
    """
    match name:
        case "local":
            from hetopt.backends.on_this_machine import LocalBackend

            return LocalBackend()
        case "rehearsal":
            from hetopt.backends.on_this_machine import RehearsalBackend

            return RehearsalBackend()
        case "ec2":
            from hetopt.backends.ec2.renter.backend import Ec2Backend
            from hetopt.backends.runs import runs_home

            return Ec2Backend(home=runs_home().parent, tell=(reporter or Reporter()).note)
        case _:
            raise BadInput(
                f"this version of hetopt cannot launch on {name!r}.",
                hint=f"choose one of {', '.join(PLACES)}; `on=local` and `on=rehearsal` cost nothing",
            )


def read_launch(folder: Path) -> Launch | None:
    """The launch record of a run, if it was written.

    Raises:
        BadInput: it cannot be read.
    """
    return Launch.load(folder / LAUNCH_FILE) if (folder / LAUNCH_FILE).exists() else None


def backend_of(launch: Launch | None, folder: Path, reporter: Reporter | None = None) -> Backend:
    """Who can look after a run: the backend that it was started on. Rented probes have no record."""
    from hetopt.backends.ec2.renter.order import ORDER_FILE

    unrecorded: Place = "ec2" if (folder / ORDER_FILE).exists() else "local"
    return backend(unrecorded if launch is None else launch.on, reporter)
