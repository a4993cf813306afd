"""Plain `hetopt`, installed from the wheel without torch, plans; what needs torch says so in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = sorted((REPOSITORY / "tests" / "recorded").glob("*.json"))
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


def test_there_is_no_torch_here(planning_bin: Path) -> None:
    """Otherwise the tests below prove nothing."""
    code = (
        "import sys; from importlib.util import find_spec; sys.exit(any(map(find_spec, ('torch', 'boto3', 'sklearn'))))"
    )
    assert subprocess.run([str(planning_bin / "python"), "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--help",), "recommend"),
        (("--version",), "hetopt 0."),
        (("recommend", "--help"), "--budget"),
        (("catalog", "show", "g5.xlarge"), "A10G"),
    ],
)
def test_the_command_line_works(planning_bin: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = hetopt(planning_bin, tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout


def test_there_is_a_recorded_profile_to_plan_from() -> None:
    assert RECORDED


@pytest.mark.parametrize(
    "profile",
    [pytest.param(path, marks=[pytest.mark.slow] * (path != RECORDED[0]), id=path.stem) for path in RECORDED],
)
def test_a_recorded_profile_becomes_a_plan(planning_bin: Path, tmp_path: Path, profile: Path) -> None:
    result = hetopt(planning_bin, tmp_path, "recommend", str(profile), "--budget", "5", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["kind"] == "plan"
    assert plan["chosen"]["prediction"]["cost_usd"]["value"] <= 5


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
                str(RECORDED[0]),
                "--budget",
                "5",
                "--epochs",
                "9",
                "-o",
                "plan.json",
                "--study",
                "study.jsonl",
            ),
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
    assert (tmp_path / "plan.json").exists()


def test_measuring_without_torch_says_what_to_install(planning_bin: Path, tmp_path: Path) -> None:
    result = hetopt(planning_bin, tmp_path, "profile", "digits", "-o", "profile.json")
    assert result.returncode == 2
    assert "pip install torch==2.13.0 'safetensors>=0.5' 'scikit-learn>=1.5'" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["status", "logs", "stop", "report"])
def test_looking_at_runs_where_there_are_none_is_one_sentence(planning_bin: Path, tmp_path: Path, command: str) -> None:
    result = hetopt(planning_bin, tmp_path, command)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_the_command_line_starts_light(planning_bin: Path, tmp_path: Path) -> None:
    """`hetopt --help` must be instant, so the face imports no library until a command needs it."""
    code = f"import sys; import hetopt.cli.main; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run(
        [str(planning_bin / "python"), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
