"""The wheel as a user would get it, built once from a clean copy of the sources by way of the source distribution."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.once import once

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """The files of the repository, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if not names:  # this is a source distribution itself
        hidden = (".", "__pycache__", "build", "dist", "site")
        found = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*"))
        names = [str(path) for path in found if not any(part.startswith(hidden) for part in path.parts)]
    return [Path(name) for name in names if (REPOSITORY / name).exists()]


COMMIT = "0123456789" * 4
"""Of which the wheel is built."""


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory, tracked: list[Path]) -> Path:
    """A clean copy of the repository, with no more of git than which commit it is."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text(f"{COMMIT}\n", encoding="utf-8")
    for path in tracked:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory, worker_id: str, request: pytest.FixtureRequest) -> Path:
    """A folder with the source distribution and the wheel that was built from it; once, for all processes of tests."""

    def build(folder: Path) -> None:
        sources = request.getfixturevalue("sources")
        result = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(sources)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr

    return once("dist", build, tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    """The wheel."""
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    return read_metadata(wheel)


@pytest.fixture(scope="session")
def planning_bin(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """``bin`` of an environment with the wheel and exactly what plain `hetopt` declares to need: no torch, no extras.

    The dependencies are linked from the environment that runs the tests, so that this needs no network.
    """
    root = tmp_path_factory.mktemp("planning")
    venv.create(root, with_pip=False, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    for name in needed_by_plain(wheel):
        link(name, site)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "--disable-pip-version-check"),
            *("install", "--quiet", "--no-deps", "--no-index", str(wheel)),
        ],
        check=True,
    )
    return root / "bin"


def needed_by_plain(wheel: Path) -> set[str]:
    """The distributions that the wheel needs without any extra, and what those need."""
    found: set[str] = set()
    waiting = read_metadata(wheel).get_all("Requires-Dist", [])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or ()
    return found


def read_metadata(wheel: Path) -> Message:
    """The wheel's own METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(path).decode())


def link(name: str, site: Path) -> None:
    """Make the installed distribution ``name`` importable from ``site``."""
    distribution = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        target = site / top
        if not target.exists():
            os.symlink(str(distribution.locate_file(top)), target)
