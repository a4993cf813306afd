"""Writes the pins: `python requirements/freeze.py > requirements/constraints.txt`.

The pins are the exact versions of hetopt[dev] and everything it needs, as installed in the environment that runs this.
A local label such as torch's `+cpu` is left out, so that the same file serves machines with and without a GPU. On a GPU
machine torch brings CUDA libraries of its own, and it names their exact versions itself.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# The versions that hetopt is tested with: every package of hetopt[dev] and what it needs.
# Made by `make pins`; used as `pip install -c requirements/constraints.txt`.
"""


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Return every distribution that ``requirements`` need here, by canonical name, with its installed version.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    extras_of: dict[str, set[str]] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        seen = extras_of.get(name, set())
        new = {"", *requirement.extras} - seen
        extras_of[name] = seen | new
        if not new:
            continue
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in new):
                waiting.append(needed)
    return {name: importlib.metadata.version(name) for name in sorted(extras_of)}


def declared() -> list[str]:
    """Return the requirements of hetopt and of its extras, but for SkyPilot, which tests run without.

    Read from the file: installed metadata may be older.
    """
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    groups = [project["dependencies"], *(needed for extra, needed in extras if extra != "sky")]
    return [text for group in groups for text in group if not text.startswith("hetopt[")]


def pins() -> str:
    """Return the text of constraints.txt: one exact version a line."""
    versions = closure(declared())
    return HEADER + "".join(f"{name}=={Version(version).public}\n" for name, version in versions.items())


if __name__ == "__main__":
    sys.stdout.write(pins())
