"""Names that were changed still work, and their new ones are said once."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from hetopt.cli.main import app
from hetopt.cli.old_names import COMMANDS, OPTIONS, renewed
from tests.face.conftest import RECORDED

pytestmark = pytest.mark.usefixtures("small_catalogue")

GROUP = typer.main.get_command(app)


def test_every_new_name_exists_and_no_old_one_does() -> None:
    commands = GROUP.commands  # type: ignore[attr-defined]
    assert set(COMMANDS.values()) <= set(commands)
    assert not set(COMMANDS) & set(commands)
    for command, names in OPTIONS.items():
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(names.values()) <= options
        assert not set(names) & options


@pytest.mark.parametrize(
    ("typed", "now", "said"),
    [
        (["disturb", "r", "h0 dies"], ["inject", "r", "h0 dies"], 1),
        (["adopt", "r"], ["attach", "r"], 1),
        (
            ["launch", "p", "--pace", "1,2", "--policy=model"],
            ["launch", "p", "--slowdown", "1,2", "--batch-policy=model"],
            2,
        ),
        (["launch", "--pace", "1", "--pace", "2"], ["launch", "--slowdown", "1", "--slowdown", "2"], 1),
        (["launch", "--", "--pace"], ["launch", "--", "--pace"], 0),
        (["logs", "adopt"], ["logs", "adopt"], 0),
        (["recommend", "--policy"], ["recommend", "--policy"], 0),
        (["--version"], ["--version"], 0),
        ([], [], 0),
    ],
)
def test_old_names_become_new_ones(typed: list[str], now: list[str], said: int) -> None:
    arguments, sentences = renewed(typed)
    assert arguments == now
    assert len(sentences) == said


def test_an_old_option_works_and_its_new_name_is_said_once(hetopt, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert hetopt("recommend", RECORDED / "digits.json", "--budget", "$2", "--epochs", 9, "-o", plan).code == 0
    old = hetopt("launch", plan, "--on", "local", "--pace", "1,2", "--policy", "static", "--dry-run", "--json")
    new = hetopt(
        "launch", plan, "--on", "local", "--slowdown", "1,2", "--batch-policy", "static", "--dry-run", "--json"
    )
    assert old.code == new.code == 0, old.err
    assert old.err.count("--slowdown") == old.err.count("--batch-policy") == 1
    assert "now called" not in new.err
    assert "now called" not in old.out
    assert hetopt("disturb", "nothing", "h0 dies").err.count("`hetopt inject`") == 1
