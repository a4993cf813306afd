"""What is in the tree is in the wheel and the other way round."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.packaging.conftest import COMMIT

REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(names: set[str]) -> None:
    tree = {
        (Path(folder) / file).relative_to(REPOSITORY).as_posix()
        for folder, _, files in os.walk(REPOSITORY / "hetopt", followlinks=True)
        for file in files
        if "__pycache__" not in folder
    }
    assert {name for name in names if ".dist-info/" not in name} == tree


def test_the_wheel_carries_its_metadata(wheel: Path, names: set[str], metadata: Message) -> None:
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert wheel.name == f"hetopt-{PYPROJECT['project']['version']}-py3-none-any.whl"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in names
    assert set(metadata.get_all("Provides-Extra", [])) == {"train", "aws", "streams", "frameworks", "docs", "dev"}
    assert "hetopt = hetopt.cli.main:main" in entry_points


def test_it_knows_its_commit_though_it_was_built_of_a_source_distribution(wheel: Path, planning_bin: Path) -> None:
    told = subprocess.run([planning_bin / "hetopt", "--version"], capture_output=True, text=True, check=True).stdout
    assert told == f"hetopt {PYPROJECT['project']['version']} ({COMMIT[:9]})\n"


def test_nothing_in_it_is_of_who_built_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert {entry.date_time for entry in entries} == {(2020, 2, 2, 0, 0, 0)}
    assert {entry.external_attr >> 16 & 0o777 for entry in entries} <= {0o644, 0o755, 0o664}


@pytest.mark.slow
def test_two_builds_are_the_same(sources: Path, tmp_path: Path) -> None:
    """In folders of different names, by people whose files have other rights and dates."""
    made = []
    for name, mode in (("one", 0o644), ("another", 0o664)):
        folder = tmp_path / name / "hetopt"
        shutil.copytree(sources, folder, symlinks=True)
        for path in folder.rglob("*.py"):
            path.chmod(mode)
            os.utime(path, (mode * 1e6, mode * 1e6))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / name)]
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
        (built,) = (tmp_path / name).glob("*.whl")
        made.append(built.read_bytes())
    assert made[0] == made[1]


def test_torch_and_boto3_are_extras_and_torch_is_pinned(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    plain = [text for text in requirements if "extra ==" not in text]
    assert not [text for text in plain if text.startswith(("torch", "boto3", "safetensors", "scikit-learn"))]
    assert any(text.startswith("torch==2.13.0;") and 'extra == "train"' in text for text in requirements)


def test_the_source_distribution_is_the_repository(distributions: Path, tracked: list[Path]) -> None:
    """Whoever has it can build, read, test and measure as from a checkout. The wheel was built from it.

    It holds the four folders inside of `hetopt`, where a checkout has links to them.
    """
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {Path(*Path(one.name).parts[1:]) for one in archive.getmembers() if one.isfile()}
    made = {Path("PKG-INFO"), Path("setup.cfg")}
    there = {name for name in names - made if not any(part.endswith(".egg-info") for part in name.parts)}
    links = {name for name in tracked if (REPOSITORY / name).is_symlink()}
    linked = {link.name for link in links}
    expected = {Path("hetopt", name) if name.parts[0] in linked else name for name in tracked} - links
    assert there == {name for name in expected if name != Path(".gitignore")} | {Path("MANIFEST.in")}
