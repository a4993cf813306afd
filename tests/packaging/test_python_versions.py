"""Every way to install works on the oldest Python that is supported and on the newest one of this machine.

The short form, in `test_planning_half.py`, has the wheel on the Python that runs the tests. This one asks a package
index for the builds of another Python, as a person's `pip install` does, and is skipped where there is none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import REPOSITORY

RECORDED = REPOSITORY / "tests" / "recorded" / "digits.json"
HERE = sys.version_info[:2]


def version_of(python: Path) -> tuple[int, int] | None:
    """Of an interpreter; None where it does not start, or cannot make environments."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return None if told.returncode != 0 else (int(told.stdout.split()[0]), int(told.stdout.split()[1]))


def newest_other() -> Path | None:
    """The newest Python of another version that hetopt says to run on: on the path, or one of pyenv's."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    named = {(3, int(minor)) for minor in re.findall(r"Programming Language :: Python :: 3\.(\d+)", text)}
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in sorted((minor for _, minor in named - {HERE}), reverse=True):
        candidates = [folder / f"python3.{minor}" for folder in folders]
        for python in (*candidates, *sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"), reverse=True)):
            if python.exists() and version_of(python) == (3, minor):
                return python
    return None


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an environment of the newest other Python, with what plain `hetopt` needs, and nothing else."""
    python = newest_other()
    if python is None:
        pytest.skip("there is no other Python of a version that is supported")
    root = tmp_path_factory.mktemp("other")
    subprocess.run([str(python), "-m", "venv", str(root)], check=True)
    found = re.search(r"^dependencies = \[(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.M | re.S)
    assert found is not None
    needed = re.findall(r'"([^"]+)"', found[1])
    installed = pip(root / "bin", "setuptools>=77", *needed, "-c", str(REPOSITORY / "requirements" / "constraints.txt"))
    if installed.returncode != 0 and "No matching distribution" not in installed.stderr:
        pytest.skip(f"no package index: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    return root / "bin"


def pip(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def told(folder: Path, home: Path, *arguments: str) -> str:
    """What a command of the environment prints, warnings being errors."""
    result = subprocess.run(
        [str(folder / arguments[0]), *arguments[1:]],
        cwd=home,
        env={"PATH": f"{folder}:{os.defpath}", "HOME": str(home), "PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wheel", "source distribution", "folder", "editable"])
def test_the_planning_half_works_on_the_newest_python(
    form: str, environment: Path, distributions: Path, sources: Path, tmp_path: Path
) -> None:
    place = {
        "wheel": [str(next(distributions.glob("*.whl")))],
        "source distribution": [str(next(distributions.glob("*.tar.gz")))],
        "folder": [str(sources)],
        "editable": ["--editable", str(sources)],
    }[form]
    installed = pip(environment, "--force-reinstall", "--no-deps", "--no-build-isolation", *place)
    assert installed.returncode == 0, installed.stderr
    assert told(environment, tmp_path, "hetopt", "--version").startswith("hetopt 0.")
    code = "import hetopt, pathlib; print(hetopt.__version__, pathlib.Path(hetopt.__file__).resolve().parent)"
    where = Path(told(environment, tmp_path, "python", "-c", code).split()[1])
    assert where.is_relative_to(sources if form == "editable" else environment.parent)
    plan = told(environment, tmp_path, "hetopt", "recommend", str(RECORDED), "--budget", "2", "--epochs", "9", "--json")
    assert '"kind": "plan"' in plan
