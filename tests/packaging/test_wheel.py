"""What is in the tree is in the wheel and the other way round.

Every way to install works on the oldest Python that is supported and on the newest one of this machine.

The short form has the wheel on the Python that runs the tests. The other asks a package index for the builds of
another Python, as a person's `pip install` does, and is skipped where there is none.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from hetopt.core.search_path import CPU_INDEX, install_command, requirement
from hetopt.reports.exports import own_wheel
from tests.packaging.conftest import COMMIT, REPOSITORY

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
    assert set(metadata.get_all("Provides-Extra", [])) == {"train", "aws", "sky", "frameworks", "docs", "dev"}
    assert "hetopt = hetopt.cli.main:main" in entry_points


def test_it_knows_its_commit_though_it_was_built_of_a_source_distribution(wheel: Path, planning_bin: Path) -> None:
    told = subprocess.run([planning_bin / "hetopt", "--version"], capture_output=True, text=True, check=True).stdout
    assert told == f"hetopt {PYPROJECT['project']['version']} ({COMMIT[:9]})\n"


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


def test_torch_and_boto3_are_extras_and_several_versions_of_torch_will_do(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    plain = [text for text in requirements if "extra ==" not in text]
    assert not [text for text in plain if text.startswith(("torch", "boto3", "safetensors", "scikit-learn"))]
    assert any(text.startswith("torch<2.15,>=2.11;") and 'extra == "train"' in text for text in requirements)


def test_the_source_distribution_is_the_repository(distributions: Path, tracked: list[Path]) -> None:
    """Whoever has it can build, read, test and measure as from a checkout. The wheel was built from it.

    It holds the four folders inside of `hetopt`, where a checkout has links to them.
    """
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {Path(*Path(one.name).parts[1:]) for one in archive.getmembers() if one.isfile()}
    made = {Path("PKG-INFO"), Path("setup.cfg")}
    there = {name for name in names - made if not any(part.endswith(".egg-info") for part in name.parts)}
    links = {name for name in tracked if (REPOSITORY / name).is_symlink() and (REPOSITORY / name).is_dir()}
    linked = {link.name for link in links}
    expected = {Path("hetopt", name) if name.parts[0] in linked else name for name in tracked} - links
    assert there == {name for name in expected if name != Path(".gitignore")} | {Path("MANIFEST.in")}


# What is exported to other launchers, or hinted at, can be installed without an index that has hetopt.


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
    subprocess.run([*pip, "--no-compile", "--target", str(there), f"./{name}[train]"], cwd=tmp_path, check=True)
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


@pytest.mark.parametrize("extra", ["train", "aws", "docs"])
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


# Plain `hetopt`, installed from the wheel without torch, plans; what needs torch says so in a sentence.

DIGITS = REPOSITORY / "tests" / "recorded" / "digits.json"
HEAVY = ("torch", "scipy", "sklearn", "boto3", "optuna", "numpy", "pydantic", "rich")


def hetopt(planning_bin: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{planning_bin}:{os.defpath}", "HOME": str(folder), "HETOPT_HOME": str(folder / "home")}
    return subprocess.run(
        [str(planning_bin / "hetopt"), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_install_that_cannot_be_written_to_is_left_as_it_is(planning_bin: Path, tmp_path: Path) -> None:
    """Catalogues, studies and whatever else is kept goes to the person's own folders."""
    (installed,) = planning_bin.parent.glob("lib/python*/site-packages/hetopt")

    def files() -> dict[str, int]:
        found = (path for path in installed.rglob("*") if "__pycache__" not in path.parts)
        return {str(path.relative_to(installed)): path.stat().st_mtime_ns for path in found}

    before = files()
    folders = [installed, *(path for path in installed.rglob("*") if path.is_dir())]
    try:
        for folder in folders:
            folder.chmod(0o555)
        for arguments in (
            (
                "recommend",
                str(DIGITS),
                "--budget",
                "5",
                "--epochs",
                "9",
                "-o",
                "plan.json",
                "--study",
                "study.jsonl",
            ),
            ("recommend", "--help"),
            ("catalog", "list", "--json"),
            ("status",),
            ("config",),
        ):
            result = hetopt(planning_bin, tmp_path, *arguments)
            assert result.returncode == (2 if arguments == ("status",) else 0), result.stderr
            assert "Traceback" not in result.stderr
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert files() == before
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (plan["kind"], plan["chosen"]["prediction"]["cost_usd"]["value"] <= 5) == ("plan", True)


def test_measuring_without_torch_says_what_to_install(planning_bin: Path, tmp_path: Path) -> None:
    result = hetopt(planning_bin, tmp_path, "profile", "digits", "-o", "profile.json")
    assert result.returncode == 2
    assert "pip install 'torch<2.15,>=2.11' 'safetensors>=0.5' 'scikit-learn>=1.5'" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_starts_light(planning_bin: Path, tmp_path: Path) -> None:
    """`hetopt --help` must be instant, so the face imports no library until a command needs it.

    There is no torch here, or else the tests above prove nothing.
    """
    code = (
        "import sys, hetopt.cli.main; from importlib.util import find_spec\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules), *map(find_spec, ('torch', 'boto3', 'sklearn')))"
    )
    result = subprocess.run(
        [str(planning_bin / "python"), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["None"] * 3


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
    plan = told(environment, tmp_path, "hetopt", "recommend", str(DIGITS), "--budget", "2", "--epochs", "9", "--json")
    assert '"kind": "plan"' in plan
