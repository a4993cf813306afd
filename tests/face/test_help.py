"""`--help` of every command fits on a screen of 80 by 24 and teaches by examples; `--help-all` leaves nothing out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import pytest
import typer.main
from typer.testing import CliRunner

from hetopt.cli.help_screen import FIRST, MAIN
from hetopt.cli.main import app

ROOT = typer.main.get_command(app)


def everything(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command by its path, groups too."""
    yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from everything(below, (*path, name))


COMMANDS = dict(everything())


def shown(path: str, option: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, [*path.split(), option], terminal_width=columns, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def examples() -> list[str]:
    """The commands that helps show."""
    return [line.strip() for path in COMMANDS for line in shown(path, "--help").splitlines() if _is_example(line)]


def _is_example(line: str) -> bool:
    return re.match(r"    hetopt \S", line) is not None


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_on_a_screen_and_has_examples(path: str) -> None:
    lines = shown(path, "--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any(_is_example(line) and line.strip().startswith(f"hetopt {path}".strip()) for line in lines)
    assert shown(path, "-h") == shown(path, "--help")


@pytest.mark.parametrize("path", COMMANDS)
def test_help_all_leaves_nothing_out(path: str) -> None:
    told = shown(path, "--help-all", 100)
    for parameter in COMMANDS[path].params:
        if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
            assert all(name in told for name in parameter.opts), parameter.name
    for name, below in getattr(COMMANDS[path], "commands", {}).items():
        assert below.hidden or name in told
    assert "..." not in told.partition("Commands:")[2], "what is said of a command is whole"


@pytest.mark.parametrize("path", ["estimate", "recommend"])
def test_first_options_name_their_choices(path: str) -> None:
    told = " ".join(shown(path, "--help").split())
    assert "--objective" not in told or "fastest, cheapest or balanced" in told


def test_what_comes_first_is_there() -> None:
    for path, options in FIRST.items():
        known = {name for parameter in COMMANDS[path].params for name in parameter.opts}
        assert set(options) <= known, path
    assert set(MAIN) <= set(COMMANDS)
