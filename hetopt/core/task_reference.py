"""How the text that names a task (bundled name, ``module:attribute``, ``file.py:attribute``) becomes an object."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import unknown
from hetopt.core.scaled_emulation import STAND_IN

BUNDLED: Mapping[str, str] = MappingProxyType(
    {
        "digits": "hetopt.trainer.tasks.digits:digits",
        "resnet20-cifar10": "hetopt.trainer.tasks.vision:resnet20_cifar10",
        "resnet101-cifar10": "hetopt.trainer.tasks.vision:resnet101_cifar10",
        "vgg11-cifar10": "hetopt.trainer.tasks.vision:vgg11_cifar10",
        "vgg16-cifar100": "hetopt.trainer.tasks.vision:vgg16_cifar100",
        "lstm-small": "hetopt.trainer.tasks.language:lstm_small",
        "lstm-ptb": "hetopt.trainer.tasks.language:lstm_ptb",
        STAND_IN: "hetopt.trainer.tasks.stand_in:stand_in",
    }
)
"""Name of a bundled task -> where it is defined, as ``module:attribute``. Nobody is offered the one that stands in."""


def check_found(reference: str) -> None:
    """Look whether what ``reference`` names is there, without running anything of it.

    Raises:
        BadInput: there is no such bundled task, file or module.
    """
    if reference in BUNDLED:
        return
    place, colon, _ = reference.rpartition(":")
    if not colon:
        raise names_no_task(reference)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise BadInput(
                f"the task's file {place} is not there: {Path(place).resolve()} does not exist.",
                hint="go to the folder that holds it, or give its path when you profile",
            )
        return
    package = place.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
        raise BadInput(
            f"there is no module '{place}' to import the task from.",
            hint="go to the folder that holds it, or name its file when you profile: path/to/file.py:attribute",
        )


def check_data_folder(folder: Path) -> None:
    """Look whether the folder of a task's data is there.

    Raises:
        BadInput: it is not.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no data folder {folder}.", hint="give the folder that holds the task's files")


def names_no_task(reference: str) -> BadInput:
    """Return the refusal of a text that names no task."""
    if reference.endswith(".py"):
        return BadInput(f"'{reference}' names a file but no task in it.", hint=f"Add the attribute: {reference}:task")
    if "/" in reference or Path(reference).exists():
        return BadInput(
            f"'{reference}' is neither a bundled task nor a Python script, whose name ends in .py.",
            hint="give the path of the script, or of the file and the task in it: file.py:attribute",
        )
    offered = [name for name in BUNDLED if name != STAND_IN]
    own = "your own is module:attribute or file.py:attribute"
    return unknown(reference, offered, "bundled task", hint=f"choose one of: {', '.join(offered)}; {own}")
