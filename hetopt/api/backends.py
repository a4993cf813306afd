"""Backends by name: the record of each one's options, and what makes it once it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetopt.backends.options import Ec2, Local, Machines, Rehearsal, Sky, Slurm, Ssh
from hetopt.core.errors import BadInput, setting
from hetopt.core.interruption import Reporter
from hetopt.core.option import options_of
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

__all__ = [
    "BACKENDS",
    "Ec2",
    "Local",
    "Machines",
    "Rehearsal",
    "Sky",
    "Slurm",
    "Ssh",
    "backend",
    "backend_of",
    "options_at",
    "register",
]

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend

Make = Callable[[Reporter], "Backend"]
"""A function that makes a backend; it gets the reporter for remarks about the cloud."""


def _later(module: str, name: str) -> Make:
    """Return a function that makes a backend of a class, imported when it is called."""
    return lambda reporter: getattr(import_module(module), name)()


def _ec2(reporter: Reporter) -> Backend:
    """Return a new EC2 backend of this user, which reports remarks; its modules are imported now."""
    from hetopt.backends.ec2.renter.backend import Ec2Backend
    from hetopt.core.run_folder import runs_home

    return Ec2Backend(home=runs_home().parent, tell=reporter.note)


BACKENDS: dict[str, tuple[type[Machines], Make]] = {
    Local.PLACE: (Local, _later("hetopt.backends.on_this_machine", "LocalBackend")),
    Rehearsal.PLACE: (Rehearsal, _later("hetopt.backends.on_this_machine", "RehearsalBackend")),
    Ssh.PLACE: (Ssh, _later("hetopt.backends.on_this_machine", "SshBackend")),
    Slurm.PLACE: (Slurm, _later("hetopt.backends.slurm.jobs", "SlurmBackend")),
    Sky.PLACE: (Sky, _later("hetopt.integrations.sky", "SkyBackend")),
    Ec2.PLACE: (Ec2, _ec2),
}
"""Backends by name: the class of the launch options, and the function that makes the backend from a reporter.
`register` adds to it."""

ENTRY_POINTS = "hetopt.backends"
"""The group in which an installed package names the module that registers its backend."""


def register(options: type[Machines], make: Make) -> None:
    """Register a backend: from now on `hetopt.launch` takes its options, or their ``PLACE``, as ``on``.

    Args:
        options: class of the backend's launch options, whose ``PLACE`` is the backend's name.
        make: makes the backend, given a reporter; called each time that the backend is asked for.

    Raises:
        ValueError: a backend of this name is registered already.
    """
    if options.PLACE in BACKENDS:
        raise ValueError(f"there is a backend {options.PLACE!r} already")
    BACKENDS[options.PLACE] = (options, make)


def _entry(name: str) -> tuple[type[Machines], Make]:
    """Return the options and maker of a registered backend, also one of an installed package.

    Raises:
        BadInput: there is no such backend.
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
    return BACKENDS[name]


def options_at(name: str, values: Mapping[str, Any]) -> Machines:
    """Return the launch options of the backend ``name``, made from ``values`` by field; fields left out have defaults.

    A backend of an installed package (entry point ``hetopt.backends``) is imported if its name is not known yet.

    Args:
        name: name of the backend, such as ``ec2``.
        values: by field of some backend's options, as a person types them; each is parsed by its option.

    Raises:
        BadInput: there is no backend of this name, a field is another backend's, or a value is refused by its option.
    """
    record, _ = _entry(name)
    for field in values.keys() - options_of(record).keys():
        owners = [setting("on", place) for place, (other, _) in BACKENDS.items() if field in options_of(other)]
        raise BadInput(f"`{field}` is for {' or '.join(owners)}.", hint=f"leave it out, or choose {owners[0]}")
    return record(**values)


def backend(name: str, reporter: Reporter | None = None) -> Backend:
    """Return a new backend by its name, such as ``local``; no machine is touched.

    Args:
        name: one of `BACKENDS`, or one that an installed package brings (entry point ``hetopt.backends``).
        reporter: receives remarks about the cloud; None: nothing is reported.

    Raises:
        BadInput: there is no backend of this name.
    """
    _, make = _entry(name)
    return make(reporter or Reporter())


def backend_of(launch: Launch | None, folder: Path, reporter: Reporter | None = None) -> Backend:
    """Return the backend that a run was started on; it watches, stops and resumes the run.

    Args:
        launch: the run's launch record. None: ``ec2`` if the folder holds an order of machines, as of rented probes,
            else ``local``.
        folder: the run's folder.
        reporter: receives remarks about the cloud; None: nothing is reported.

    Raises:
        BadInput: this installation has no backend of the recorded name.
    """
    from hetopt.backends.ec2.renter.order import ORDER_FILE

    unrecorded = "ec2" if (folder / ORDER_FILE).exists() else "local"
    return backend(unrecorded if launch is None else launch.on, reporter)


def read_launch(folder: Path) -> Launch | None:
    """Return the launch record in a run's folder; None: the folder has none, as of a probe.

    Raises:
        BadInput: the file is there, and cannot be read or is no launch record.
    """
    return Launch.load(folder / LAUNCH_FILE) if (folder / LAUNCH_FILE).exists() else None
