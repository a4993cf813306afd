"""Options of files and of the environment: which goes before which, what is refused, and where each comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import given, strategies as st

from hetopt.cli import options as completion
from hetopt.cli.configuration import PROJECT_FILE, settings
from hetopt.cli.main import app
from hetopt.core.errors import BadInput
from hetopt.optimizer.plan import Plan
from tests.face.conftest import RECORDED, Answer

pytestmark = pytest.mark.usefixtures("small_catalogue")

ROOT = typer.main.get_command(app)
PROFILE = RECORDED / "digits.json"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of configuration, with the current folder in a project beside it."""
    (tmp_path / "home" / "hetopt").mkdir(parents=True)
    (tmp_path / "project" / "inner").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project" / "inner")
    return tmp_path


def shown(hetopt: Callable[..., Any]) -> dict[tuple[str, str], tuple[Any, str]]:
    answer = hetopt("config", "--json")
    assert answer.code == 0, answer.err
    return {(one["command"], one["option"]): (one["value"], one["from"]) for one in json.loads(answer.out)}


def test_the_later_goes_before_the_earlier(hetopt, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User, project, environment, command line."""
    own, project = home / "home" / "hetopt" / "config.toml", home / "project" / PROJECT_FILE
    own.write_text('region = "eu-west-1"\n[recommend]\nbudget = "$1"\nepochs = 7\nseed = 3\n')
    project.write_text('[recommend]\nbudget = "$2"\nepochs = 8\nmarket = "any"\n')
    monkeypatch.setenv("HETOPT_EPOCHS", "9")
    found = shown(hetopt)
    assert found["recommend", "--seed"] == ("3", str(own))
    assert found["recommend", "--budget"] == ("$2", str(project))
    assert found["recommend", "--epochs"] == ("9", "HETOPT_EPOCHS")
    assert found["doctor", "--region"] == found["recommend", "--region"] == ("eu-west-1", str(own))
    assert ("launch", "--region") not in found
    plan = json.loads(hetopt("recommend", PROFILE, "--region", "us-east-1", "--json").out)
    assert (plan["goal"]["budget_usd"], plan["goal"]["amount"]) == (2.0, 9.0)
    typed = hetopt("recommend", PROFILE, "--region", "us-east-1", "--budget", 5, "--epochs", "6", "--json")
    plan = json.loads(typed.out)
    assert (plan["goal"]["budget_usd"], plan["goal"]["amount"]) == (5.0, 6.0)
    assert "--market any" in typed.err


def test_without_files_every_option_has_its_default(hetopt, home: Path) -> None:
    assert shown(hetopt) == {}
    assert "has its default" in hetopt("config").out


def test_lists_are_written_in_parts(hetopt, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text(
        """
        [launch]
        slowdown = [1, 2]
        allow_partial = true
        [recommend]
        quota = ["g=8", "spot:standard=32"]
        [catalog.list]
        limit = 3
        """
    )
    found = {key: value for key, (value, _) in shown(hetopt).items()}
    assert found["launch", "--slowdown"] == "1,2"
    assert found["recommend", "--quota"] == ["g=8", "spot:standard=32"]
    assert found["catalog list", "--limit"] == "3"
    listed = hetopt("catalog", "list", "--json")
    assert len(json.loads(listed.out)) == 3


def test_paths_of_a_project_lie_in_it(hetopt, home: Path) -> None:
    (home / "home" / "hetopt" / "config.toml").write_text('catalog = "/prices"\n')
    project = home / "project" / PROJECT_FILE
    project.write_text('[recommend]\noutput = "plans/next.json"\n')
    found = {key: value for key, (value, _) in shown(hetopt).items()}
    assert found["recommend", "--output"] == str(home / "project" / "plans" / "next.json")
    assert found["recommend", "--catalog"] == "/prices"
    for path in ("../next.json", "/etc/next.json"):
        project.write_text(f'[recommend]\noutput = "{path}"\n')
        with pytest.raises(BadInput, match="output"):
            settings(ROOT, {}, Path.cwd())


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("bugdet = 3", "called 'bugdet'", "'budget'"),
        ("[recomend]\nbudget = 3", "called 'recomend'", "'recommend'"),
        ("[recommend]\nbugdet = 3", "called 'bugdet'", "'budget'"),
        ("[catalog.lst]\nlimit = 3", "called 'lst'", "'list'"),
        ("launch = 3", "launch must be a table", "[launch]"),
        ("[catalog]\nlist = 3", "catalog list must be a table", "[catalog.list]"),
        ("budget = ", "must be TOML", "correct"),
        ("[launch]\nallow-partial = 3", "must be true or false, got 3", "true or false"),
        ('zone = "\\u001b[2J"', "printable characters", "correct"),
        *((f"{name} = true", "must be typed", f"--{name}") for name in ("yes", "force", "accept-risk", "unprobed")),
        ("[launch]\naccept_risk = true", "must be typed", "--accept-risk"),
        ("[launch]\nbudget = 900", "must be typed", "--budget"),
        ("[profile]\nprobe-budget = 900", "must be typed", "--probe-budget"),
        ("[gc]\nremove = true", "must be typed", "--remove"),
        ('[launch]\non = "ec2"', "which costs money", "--on ec2"),
        ('on = "ec2"', "which costs money", "--on ec2"),
        ("bugdet = 3", "called 'bugdet'", "COMMAND --help-all"),
    ],
)
def test_what_a_file_must_not_say(hetopt, home: Path, text: str, said: str, hint: str) -> None:
    file = home / "project" / PROJECT_FILE
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        settings(ROOT, {}, Path.cwd())
    assert said in refused.value.message
    assert hint in (refused.value.hint or "")
    assert str(file) in refused.value.message
    answer = hetopt("recommend", PROFILE, "--budget", 2)
    assert answer.code == 2


def test_a_run_can_be_ended_whatever_a_file_says(hetopt, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text("= no TOML")
    answer = hetopt("stop", "nothing")
    assert "no run" in answer.err
    assert PROJECT_FILE in answer.err
    assert hetopt("--help").code == hetopt("stop", "--help").code == 0


def test_the_environment_spends_and_overwrites_nothing(home: Path) -> None:
    variables = {
        "HETOPT_YES": "1",
        "HETOPT_FORCE": "1",
        "HETOPT_ACCEPT_RISK": "1",
        "HETOPT_BUDGET": "20",
        "HETOPT_X": "",
    }
    found = settings(ROOT, variables, Path.cwd())
    assert {(one.command, one.option) for one in found} == {("estimate", "--budget"), ("recommend", "--budget")}


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.booleans(), max_size=3))
def test_any_environment_is_read(variables: dict[str, str]) -> None:
    """Variables of other programs, and of hetopt itself, are no options."""
    environment = {f"HETOPT_{name.upper()}": str(value) for name, value in variables.items()}
    for one in settings(ROOT, {**environment, "XDG_CONFIG_HOME": "/nowhere"}, Path("/nowhere")):
        assert environment[one.source]


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    assert completion.runs("") == []
    (tmp_path / "runs" / "20261120-digits").mkdir(parents=True)
    assert completion.runs("digits") == ["20261120-digits"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hetopt la", "launch"),
        ("hetopt launch --batch-p", "--batch-policy"),
        ("hetopt launch --sync sels", "selsync"),
        pytest.param("hetopt launch --batch-policy unif", "uniform", marks=pytest.mark.slow),
        pytest.param("hetopt recommend --objective fast", "fastest", marks=pytest.mark.slow),
        pytest.param("hetopt catalog list --market sp", "spot", marks=pytest.mark.slow),
    ],
)
def test_the_shell_completes(words: str, offered: str, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text("= no TOML")
    asked = {"_HETOPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "hetopt.cli.main"]
    answer = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert answer.stdout.split() == [offered], answer.stderr


# The table of bad input: one clear sentence, what to do next, the documented exit code, and nothing half-written.


Hetopt = Callable[..., Answer]


def _refused(answer: Answer, code: int, said: str) -> None:
    error = " ".join(answer.err.split())
    assert answer.code == code, error
    assert said in error
    assert "error:" in error
    assert "→" in error, "an error says what to do next"
    assert "Traceback" not in error
    assert answer.out == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "nan"], "--budget must be an amount in USD, got"),
        (["--budget", "-1"], "--budget must be a positive number of USD"),
        (["--budget", "0"], "--budget must be a positive number of USD"),
        (["--budget", "inf"], "--budget must be an amount in USD, got"),
        ([], "give --budget, --deadline or both"),
        (["--deadline", "soon"], "--deadline must be a length of time"),
        (["--budget", "5", "--target", "accuracy"], "--target must be METRIC=VALUE"),
        (["--budget", "5", "--target", "bleu=30"], "was profiled for accuracy, not bleu"),
        (["--budget", "5", "--epochs", "nan"], "--epochs must be a number"),
        (["--budget", "5", "--epochs", "3", "--steps", "9"], "exclude each other"),
        (["--budget", "5", "--steps", "0"], "--steps must be at least 1"),
        (["--budget", "5", "--steps", "9" * 30], "--steps must be at most 1,000,000,000,000, got 999"),
        (["--budget", "5", "--epochs", "1e300"], "--epochs must be at most 1,000,000,000, got 1e300"),
        (["--budget", "5", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--budget", "5", "--seed", "9" * 30], "--seed must be at most 9,223,372,036,854,775,807, got 999"),
        (["--deadline", "2026-12-01"], "write 6h or 1h30m, not a date"),
        (["--deadline", "6"], "--deadline needs a unit, got '6'"),
        (["--deadline", "1e300"], "--deadline needs a unit, got '1e300'"),
        (["--deadline", "1e300h"], "--deadline must be at most 36525d, got '1e300h'"),
        (["--budget", "5", "--disk", "-4"], "--disk must be at least 1, got -4"),
        (["--budget", "5", "--provisioning", "x"], "--provisioning must be a length of time, got 'x'"),
        (["--budget", "5", "-o", "-"], "- is no file to write to"),
        (["--budget", "5", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["--budget", "5", "--max-machines", "0"], "--max-machines must be at least 1, got 0"),
        (["--budget", "5", "--market", "black"], "There is no market called 'black'"),
        (["--budget", "5", "--region", "mars-1"], "mars-1"),
        (["--budget", "5", "--types", "g5.xlagre"], "g5.xlagre"),
        (["--budget", "5", "--types", ""], "--types must name at least one, got ''"),
        (["--budget", "5", "--gpus", " , "], "--gpus must name at least one, got ' , '"),
        (["--budget", "5", "--weights", "time=0,cost=0"], "one of them above 0"),
        (["--budget", "5", "--catalog", "/nowhere"], "/nowhere"),
        (["--budget", "5", "--lr-rule", "cubic"], "no learning rate rule called 'cubic'"),
    ],
)
def test_bad_options_of_recommend(hetopt: Hetopt, digits_profile: Path, options: list[str], said: str) -> None:
    _refused(hetopt("recommend", digits_profile, *options), 2, said)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("mine.json", "exists already"),
        ("no/plan.json", "there is no folder"),
        ("pipe", "is no file to write to"),
        ("/proc/plan.json", "cannot be written"),  # which refuses new files even to root
    ],
)
def test_an_output_that_cannot_be_written(
    hetopt: Hetopt, digits_profile: Path, tmp_path: Path, output: str, said: str
) -> None:
    (tmp_path / "mine.json").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    _refused(hetopt("recommend", digits_profile, "--budget", 5, "-o", tmp_path / output), 2, said)
    assert (tmp_path / "mine.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("launch", "no plan was named"),
        ("launch --on moon plan.json", "cannot launch on 'moon'"),
        ("launch --on local none.json", "does not exist"),
        ("launch --on local --slowdown 0.5 none.json", "--slowdown must be numbers from 1"),
        ("launch --on local --max-restarts 9999999 none.json", "must be at most 1,000,000"),
        ("launch --on ec2 --image nope none.json", "--image must be KIND=AMI, got 'nope'"),
        ("predict none.json --suggest-probes=-3", "greater than or equal to 0, got '-3'"),
        ("profile -o p.json digit", "digits"),
        ("profile -o p.json -- none.py", "there is no script none.py"),
        ("profile -o p.json /etc/passwd", "neither a bundled task nor a Python script"),
        ("profile -o p.json resnet20-cifar10 --data .", "data_batch_1.bin"),
        ("launch --on local --resume nothing", "no runs in"),
        ("launch --on local --hosts speed=1 none.json", "--hosts is for --on rehearsal"),
        ("launch --on rehearsal --slowdown 1,2 none.json", "--slowdown is for --on local"),
        ("launch --on rehearsal --steps 0 none.json", "--steps must be at least 1"),
        ("launch --on local --compression tokp:0.1 none.json", "no compressor called 'tokp'"),
        ("launch --on local --collective ring none.json", "no collective called 'ring'"),
        ("launch --on local --resume r --compression auto", "--resume goes on with a run as it was"),
        ("launch --on rehearsal --resume r --steps 5", "--resume goes on with a run as it was"),
        ("inject nothing h0=dies", "no runs in"),
        ("report", "no runs in"),
        ("status nothing", "no runs in"),
        ("logs", "no runs in"),
        ("stop", "no runs in"),
        ("catalog show g5.xlagre", "g5.xlagre"),
    ],
)
def test_commands_without_what_they_need(
    hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, said: str
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _refused(hetopt(*arguments.split()), 2, said)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_made(hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, plan_file: Path) -> None:
    monkeypatch.setenv("HETOPT_HOME", "/proc/nowhere")
    _refused(hetopt("launch", plan_file, "--on", "local", "--yes", "--json"), 2, "set HETOPT_HOME")


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--on local --data nope", "there is no data folder nope"),
        ("--on rehearsal --hosts x2", "has a value too many: 'x2'"),
        ("--on rehearsal --hosts speed=1,workers=300", "must be at least 300, one sample a worker, got 256"),
        ("--on rehearsal --hosts speed=1;speed=0.00001", "would be less than one sample"),
        ("--on rehearsal --hosts speed=1 --schedule none.txt", "does not exist"),
        ("--on rehearsal --hosts speed=1 --schedule schedule.txt", "names the host 'h9'"),
        ("--on local --compression powersgd:0.1", "the ratio of powersgd must be 1"),
        ("--on local --compression powersgd --ratio-policy gravac", "nothing for gravac to decide"),
        ("--on local --slowdown 1,2 --compression qsgd_maxnorm,bits=8,levels=64", "overflow"),
    ],
)
def test_launches_that_cannot_be(
    hetopt: Hetopt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan_file: Path, options: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedule.txt").write_text("30s h9 speed=0.5")
    _refused(hetopt("launch", plan_file, *options.split(), "--dry-run"), 2, said)


def test_a_plan_that_does_not_know_how_fast_its_machines_are(hetopt: Hetopt, plan_file: Path) -> None:
    old = json.loads(plan_file.read_text())
    del old["chosen"]["groups"][0]["assumed"]
    plan_file.write_text(json.dumps(old))
    _refused(hetopt("launch", plan_file, "--on", "rehearsal", "--dry-run"), 2, "how fast its machines")
