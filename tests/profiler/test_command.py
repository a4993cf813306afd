"""`hetopt profile` as typed: what it refuses before measuring, what it writes, and what an interruption leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from hetopt.cli.profile import profile
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from tests.disturbance import PATIENCE_S
from tests.forks import Forked
from tests.listeners import watched

HERE = Path(__file__).parent
TASK = f"{HERE / 'tiny_task.py'}:task"
COMMAND = "import sys, typer\nfrom hetopt.cli.profile import profile\ntyper.run(profile)\n"


def refusal(*arguments: str) -> BadInput:
    app = typer.Typer()
    app.command()(profile)
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, BadInput), (result.exception, result.output)
    return result.exception


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-task"], "no bundled task"),
        (["nowhere.py:task"], "is not there"),
        ([TASK, "--data", "/nowhere/at/all"], "no data folder"),
        ([TASK, "--workers", "0"], "`workers` must be"),
        ([TASK, "--workers", "65"], "`workers` must be"),
        ([TASK, "--time-budget", "nan"], "`time_budget_s` must be a length of time"),
        ([TASK, "--time-budget", "1"], "`time_budget_s` must be"),
        ([TASK, "--seed", "-1"], "`seed` must be at least 0"),
        ([TASK, "--type", "c99.huge"], "c99.huge"),
        ([TASK, "--from", "/nowhere"], "there is no checkpoint"),
        ([TASK, "--explore"], "belong together"),
        ([TASK, "--explore", "--probe-budget", "0.1", "--on", "mars"], "cannot be explored"),
        ([TASK, "-o", "no/such/folder/p.json"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    error = refusal(*arguments)
    assert said in error.message
    assert error.hint
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before, "nothing was started"
    assert list(tmp_path.iterdir()) == []


def test_an_existing_profile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text("precious")
    assert "exists already" in refusal(TASK).message
    assert Path("profile.json").read_text() == "precious"


def left_in(folder: Path) -> list[str]:
    """What hetopt left behind; torch keeps a cache folder of its own in the temporary folder."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One real profile, written by the command."""
    folder = tmp_path_factory.mktemp("command")
    command = folder.parent / "profile.py"
    command.write_text(COMMAND)
    arguments = [str(command), TASK, "-o", "p.json", "--time-budget", "5s", "--seed", "7"]
    with watched(os.getpid()) as listeners, Forked(arguments, {**os.environ, "TMPDIR": str(folder)}, folder) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    listeners.assert_all_on_loopback()
    assert process.returncode == 0, err
    assert left_in(folder) == ["p.json"]  # the run's own folder is gone
    assert "pilot at batch 16" in err
    return folder / "p.json"


def test_the_command_writes_a_profile_that_loads(made: Path) -> None:
    measured = Profile.load(made)
    assert measured.seed == 7
    assert measured.job.task == TASK
    assert measured.devices[0].type == "local"
    assert measured.profiling_s > 0


@pytest.mark.parametrize("moment", ["loading the task", "looking at the model"])
def test_an_interruption_leaves_no_process_and_no_file(tmp_path: Path, moment: str) -> None:
    command = tmp_path.parent / f"{tmp_path.name}.py"
    command.write_text(COMMAND)
    process = Forked([str(command), TASK, "-o", "p.json"], {**os.environ, "TMPDIR": str(tmp_path)}, tmp_path)
    said = ""
    for line in process.stderr:
        said += line
        if moment in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, said
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
    assert left_in(tmp_path) == []


@pytest.mark.slow
def test_exploring_measures_whole_steps_and_says_what_they_cost(tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    arguments = [TASK, "--time-budget", "5", "--explore", "--probe-budget", "0.05", "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the smallest layout, to begin with" in done.stderr
    assert "explored for" in done.stderr
    found = Profile.load(output)
    layouts = {sample.workers for sample in found.samples}
    assert {1, 2} <= layouts
    assert all(sample.nodes[0].type == "local" for sample in found.samples)
    assert 0 < found.profiling_usd <= 0.05
    assert found.profiling_s > 5
