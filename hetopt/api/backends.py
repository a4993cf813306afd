"""The backends by name, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.backends.backend import TAKES, LaunchOptions
from hetopt.core.errors import BadInput, setting
from hetopt.core.reporter import Reporter
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

__all__ = ["BACKENDS", "TAKES", "backend", "backend_of", "read_launch", "register"]

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend


def _local(reporter: Reporter) -> Backend:
    from hetopt.backends.on_this_machine import LocalBackend

    return LocalBackend()


def _rehearsal(reporter: Reporter) -> Backend:
    from hetopt.backends.on_this_machine import RehearsalBackend

    return RehearsalBackend()


def _ssh(reporter: Reporter) -> Backend:
    from hetopt.backends.ssh.backend import SshBackend

    return SshBackend()


def _ec2(reporter: Reporter) -> Backend:
    from hetopt.backends.ec2.renter.backend import Ec2Backend
    from hetopt.core.runs import runs_home

    return Ec2Backend(home=runs_home().parent, tell=reporter.note)


BACKENDS: dict[str, Callable[[Reporter], Backend]] = {
    "local": _local,
    "rehearsal": _rehearsal,
    "ssh": _ssh,
    "ec2": _ec2,
}
"""What makes each of them; the reporter is told what goes on in the cloud."""

ENTRY_POINTS = "hetopt.backends"
"""The group in which an installed package names the module that registers its backend."""


def register(name: str, make: Callable[[Reporter], Backend], *, takes: Iterable[str] = ("data", "restarts")) -> None:
    """Add a backend: from here on ``on`` may name it.

    Args:
        name: as people write it, in small letters.
        make: makes it.
        takes: the fields of `LaunchOptions` that it takes; it is never given another.

    Raises:
        ValueError: there is one of this name, or there is no such option.
    """
    if name in BACKENDS:
        raise ValueError(f"there is a backend {name!r} already")
    unknown = set(takes) - {field.name for field in fields(LaunchOptions)}
    if unknown:
        raise ValueError(f"a launch has no options {', '.join(sorted(unknown))}")
    BACKENDS[name] = make
    TAKES[name] = frozenset(takes)


def backend(name: str, reporter: Reporter | None = None) -> Backend:
    """The backend of that name.

    Args:
        name: one of `BACKENDS`, such as ``local``, or one that was registered or that an installed package brings.
        reporter: told what goes on in the cloud.

    Raises:
        BadInput: there is none.
    """
    if name not in BACKENDS:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    if name not in BACKENDS:
        raise BadInput(
            f"this version of hetopt cannot launch on {name!r}.",
            hint=f"choose one of {', '.join(BACKENDS)}; {setting('on', 'local')} and {setting('on', 'rehearsal')} "
            "cost nothing",
        )
    return BACKENDS[name](reporter or Reporter())


def read_launch(folder: Path) -> Launch | None:
    """The launch record of a run, if it was written.

    Raises:
        BadInput: it cannot be read.
    """
    return Launch.load(folder / LAUNCH_FILE) if (folder / LAUNCH_FILE).exists() else None


def backend_of(launch: Launch | None, folder: Path, reporter: Reporter | None = None) -> Backend:
    """Who can look after a run: the backend that it was started on. Rented probes have no record."""
    from hetopt.backends.ec2.renter.order import ORDER_FILE

    unrecorded = "ec2" if (folder / ORDER_FILE).exists() else "local"
    return backend(unrecorded if launch is None else launch.on, reporter)
