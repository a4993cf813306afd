"""Options of files and of the environment: which goes before which, what is refused, and where each comes from."""

from __future__ import annotations

import errno
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from hetopt.cli import options as completion
from hetopt.cli.configuration import PROJECT_FILE, default_map, of_command, settings
from hetopt.cli.main import app
from hetopt.core.errors import BadInput
from hetopt.core.option import expanded
from hetopt.core.run_folder import runs_home
from tests.face.conftest import RECORDED
from tests.face.test_task_check import SMALLEST

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
    assert "--budget" not in typed.err
    monkeypatch.setenv("COLUMNS", "400")
    table = hetopt("config").out
    assert "HETOPT_EPOCHS" in table
    assert PROJECT_FILE in table


def test_without_files_every_option_has_its_default(hetopt, home: Path) -> None:
    assert shown(hetopt) == {}
    (home / "project" / PROJECT_FILE).write_text('[recommend]\nregion = "us-east-1"\nseed = 0\n')
    assert shown(hetopt) == {}
    assert "has its default" in hetopt("config").out


def test_records_and_lists_are_written_in_parts(hetopt, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text(
        """
        [launch]
        compression = {name = "topk", ratio = 0.01, momentum = 0.9}
        slowdown = [1, 2]
        hosts = [{speed = 1, rate = "100mbit"}, {speed = 0.25}]
        substitute = ["c7i.large=c6i.large"]
        allow_partial = true
        [recommend]
        quota = ["g=8", "spot:standard=32"]
        [catalog.list]
        limit = 3
        """
    )
    found = {key: value for key, (value, _) in shown(hetopt).items()}
    assert found["launch", "--compression"] == "topk(ratio=0.01, momentum=0.9)"
    assert found["launch", "--slowdown"] == "1,2"
    assert found["launch", "--hosts"] == "speed=1, rate=100mbit; speed=0.25"
    assert found["launch", "--substitute"] == ["c7i.large=c6i.large"]
    assert found["launch", "--allow-partial"] is True
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
    assert answer.out == ""


@pytest.mark.parametrize("target", [PROJECT_FILE, "gone.toml"])
def test_a_link_to_nothing_is_refused(hetopt, home: Path, target: str) -> None:
    (home / "project" / PROJECT_FILE).symlink_to(target)
    answer = hetopt("recommend", PROFILE, "--budget", 2)
    assert answer.code == 2
    assert f"project/{PROJECT_FILE}" in answer.err


def test_who_has_no_home_has_no_file_there_and_is_told_what_to_set(
    hetopt, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("HETOPT_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert settings(ROOT, {}, Path.cwd()) == ()
    with pytest.raises(BadInput, match="nothing says which folder '~' is") as refused:
        runs_home()
    assert "HETOPT_HOME" in (refused.value.hint or "")


def test_a_file_that_may_not_be_looked_for_stops_all_but_what_ends_runs(
    hetopt, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.lstat

    def guarded(path: Path) -> os.stat_result:
        if path.name == "config.toml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return whole(path)

    monkeypatch.setattr(Path, "lstat", guarded)
    with pytest.raises(BadInput, match=r"config\.toml cannot be looked for: Permission denied"):
        settings(ROOT, {}, Path.cwd())


def test_a_current_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = f"rmdir {gone} && exec {sys.executable} -m hetopt.cli.main gpus"
    ended = subprocess.run(["sh", "-c", words], cwd=gone, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "the current folder is not there any more" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_variable_that_is_almost_an_option_is_refused(home: Path) -> None:
    with pytest.raises(BadInput) as refused:
        settings(ROOT, {"HETOPT_BUGDET": "5"}, Path.cwd(), typed="recommend")
    assert "HETOPT_BUGDET" in refused.value.message
    assert "'budget'" in (refused.value.hint or "")
    # Another command's option is none of these, however near.
    assert settings(ROOT, {"HETOPT_GPUS": "T4", "HETOPT_HOME": "/tmp"}, Path.cwd(), typed="catalog") == ()


def test_a_run_can_be_ended_whatever_a_file_says(hetopt, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text("= no TOML")
    answer = hetopt("stop", "nothing")
    assert "no runs in" in answer.err
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
    """Variables of other programs, and of hetopt itself, are no options; one that is almost an option is named."""
    environment = {f"HETOPT_{name.upper()}": str(value) for name, value in variables.items()}
    try:
        found = settings(ROOT, {**environment, "XDG_CONFIG_HOME": "/nowhere"}, Path("/nowhere"))
    except BadInput as error:
        found, refused = (), error.message
    else:
        refused = None
    assert refused is None or any(name in refused for name in environment)
    for one in found:
        assert environment[one.source]


def test_a_map_of_defaults_is_nested_as_commands_are(home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text('region = "us-east-2"\n[logs]\nworker = 1\n')
    found = settings(ROOT, {}, Path.cwd())
    whole = default_map(found)
    assert whole["catalog"]["list"]["region"] == "us-east-2"
    assert whole["logs"] == {"worker": "1"}
    assert [one.option for one in of_command(found, ["logs", "r"])] == ["--worker"]
    assert not of_command(found, ["logs", "--worker=2"])


CLOSED = [
    (command, parameter.opts[0], parameter)
    for command, one in ROOT.commands.items()  # type: ignore[attr-defined]
    for parameter in one.params
    if getattr(parameter, "_custom_shell_complete", None) is not None
]


def test_closed_lists_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = {(command, option) for command, option, _ in CLOSED}
    assert {
        ("launch", "--batch-policy"),
        ("launch", "--on"),
        ("recommend", "--objective"),
        ("status", "run"),
    } <= completed
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    assert completion.runs("") == []
    (tmp_path / "runs" / "20261120-digits").mkdir(parents=True)
    assert completion.runs("digits") == ["20261120-digits"]
    assert completion.one_of("a", "hetopt.optimizer.plan:Objective")("") == [
        "a",
        *expanded(("hetopt.optimizer.plan:Objective",)),
    ]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hetopt la", "launch"),
        ("hetopt launch --batch-p", "--batch-policy"),
        ("hetopt launch --batch-policy unif", "uniform"),
        ("hetopt launch --sync sels", "selsync"),
        ("hetopt catalog list --market sp", "spot"),
    ],
)
def test_the_shell_completes(words: str, offered: str, home: Path) -> None:
    (home / "project" / PROJECT_FILE).write_text("= no TOML")
    asked = {"_HETOPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "hetopt.cli.main"]
    answer = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert answer.stdout.split() == [offered], answer.stderr


OWN = ("trainer.py", "optimizer.py", "profiler.py", "catalogs.py", "grammar.py", "torchrun.py", "config.py")


@pytest.mark.slow
def test_files_of_ones_own_break_nothing(home: Path) -> None:
    """A task beside files with the names of hetopt's parts imports its own, and hetopt never does."""
    folder = home / "project"
    for name in OWN:
        (folder / name).write_text("raise RuntimeError('imported by mistake')\n")
    (folder / "catalogs").mkdir()
    (folder / "catalogs" / "__init__.py").write_text("raise RuntimeError('imported by mistake')\n")
    (folder / "optimizer.py").write_text("RATE = 0.1\n")
    (folder / PROJECT_FILE).write_text("[recommend]\nepochs = 5\n[launch]\nsteps = 3\n")
    (folder / "mine.py").write_text(f"import optimizer\n{SMALLEST}\nassert optimizer.RATE\n")

    def typed(*arguments: object) -> str:
        command = [sys.executable, "-m", "hetopt.cli.main", *map(str, arguments)]
        environment = {**os.environ, "HETOPT_HOME": str(home / "runs")}
        answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        assert "by mistake" not in answer.stderr + answer.stdout
        return answer.stdout

    typed("check", "mine.py:task")
    typed("recommend", PROFILE, "--budget", 2, "-o", "plan.json")
    assert json.loads((folder / "plan.json").read_text())["goal"]["amount"] == 5
    report = json.loads(typed("launch", "plan.json", "--on", "local", "--slowdown", "1,1", "--yes", "--json"))
    assert report["kind"] == "report"
    assert "steps" in typed("config")
