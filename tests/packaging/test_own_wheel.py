"""What is exported to other launchers, or hinted at, can be installed without an index that has hetopt."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hetopt.core.search_path import CPU_INDEX, install_command, requirement
from hetopt.reports.exports import own_wheel

REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_made_of_itself_holds_what_the_built_one_holds(wheel: Path, tmp_path: Path) -> None:
    name, data = own_wheel()
    made = tmp_path / name
    made.write_bytes(data)
    assert name == wheel.name
    assert own_wheel()[1] == data
    with zipfile.ZipFile(made) as own, zipfile.ZipFile(wheel) as built:
        for entry in built.namelist():
            if ".dist-info/" not in entry:
                assert own.read(entry) == built.read(entry), entry
        code = [entry for entry in own.namelist() if ".dist-info/" not in entry]
        assert set(code) == {entry for entry in built.namelist() if ".dist-info/" not in entry}


def test_pip_installs_it_and_it_runs_from_there(tmp_path: Path) -> None:
    name, data = own_wheel()
    (tmp_path / name).write_bytes(data)
    there = tmp_path / "there"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps", "-q"]
    subprocess.run([*pip, "--target", str(there), f"./{name}[train]"], cwd=tmp_path, check=True)
    told = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import hetopt.core.search_path as s; print(s.__file__, s.install_command('aws'))",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(there)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.startswith(str(there))
    assert "boto3>=1.35" in told


@pytest.mark.parametrize("extra", ["train", "aws", "streams", "docs"])
def test_the_hint_names_what_the_extra_needs(extra: str) -> None:
    declared = PYPROJECT["project"]["optional-dependencies"][extra]
    told = install_command(extra).removeprefix(f"PIP_EXTRA_INDEX_URL={CPU_INDEX} ")
    assert shlex.split(told) == ["pip", "install", *declared]
    for one in declared:
        assert importlib.metadata.version(re.split(r"[=<>\[]", one)[0])


def test_torch_comes_without_cuda_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, told in ((True, False), (False, True)):
        monkeypatch.setattr("hetopt.core.search_path._has_gpu", lambda gpu=gpu: gpu)
        assert (CPU_INDEX in install_command("train")) == told
        assert CPU_INDEX not in install_command("aws")
    assert CPU_INDEX in (REPOSITORY / "requirements" / "torch_index.py").read_text(encoding="utf-8")
    assert requirement("torch") in install_command("train")
    assert requirement("of-nobody") == "of-nobody"


def test_nothing_tells_people_to_install_hetopt_by_name() -> None:
    """No index has it under this name, so such a line installs nothing, or somebody else's package."""
    by_name = re.compile(r"pip install[^`\n]*?(?<![\w./-])hetopt(?![-\w./])")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name.endswith((".py", ".md", ".yaml", ".sh"))]
    if not paths:
        pytest.skip("no git repository here")
    told = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in paths
        if path.exists() and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if by_name.search(line)
    ]
    assert not told, told
