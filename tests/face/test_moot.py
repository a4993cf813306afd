"""What is typed is done or refused: an option that another leaves without effect is named, and a file's is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hetopt.cli.main import app
from hetopt.cli.moot import MOOT

USES: dict[str, Sequence[Sequence[str]]] = {
    "profile": (
        ("--from-samples", "none.jsonl"),
        ("digits", "--on", "local"),
    ),
    "predict": (("none.json", "--explain", "1"), ("none.json",)),
    "recommend": (("none.json", "--rank"), ("none.json", "--trials", "0")),
    "estimate": (("--flops", "1e18"),),
    "convert": (("none.py", "--no-compare"),),
    "status": (("--all",),),
    "logs": (("--events",),),
    "setup": (("--create-bucket",),),
    "gc": (("--on", "ec2", "--run", "none"),),
    "catalog refresh": (("--no-account",), ("--region", "all")),
}
"""How each row of the table comes about, in its order."""
OTHER_USE = {"task", "arguments"}
"""With these `hetopt profile --from-samples` is used otherwise."""


def parameters(command: str) -> dict[str, Any]:
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    return {one.name: one for one in found.params}


def rows() -> list[Any]:
    """Every pair of a use and an option that has no effect in it, as typed."""
    found = []
    for command, moots in MOOT.items():
        for use, moot in zip(USES[command], moots, strict=True):
            for name, one in parameters(command).items():
                if moot.includes(name) and not (command == "profile" and name in OTHER_USE) and name != "help":
                    found.append(pytest.param(command, use, one, id=f"{command}: {' '.join(use)} {one.opts[0]}"))
    return found


def typed(one: Any) -> list[str]:
    if one.param_type_name == "argument":
        return ["--", "3"]
    return [one.opts[0]] if getattr(one, "is_flag", False) else [one.opts[0], "3"]


@pytest.mark.parametrize(("command", "use", "one"), rows())
def test_an_option_without_effect_is_refused_before_anything_begins(
    hetopt: Callable[..., Any], command: str, use: Sequence[str], one: Any
) -> None:
    answer = hetopt(*command.split(), *use, *typed(one))
    told = " ".join(answer.err.split())
    name = one.opts[0] if one.param_type_name == "option" else one.name.upper()
    assert answer.code == 2
    assert f"error: {name} has no effect with" in told
    assert "→" in told


def test_the_table_names_what_there_is() -> None:
    for command, moots in MOOT.items():
        for moot in moots:
            assert moot.options | moot.reads <= parameters(command).keys()


def test_a_file_of_options_serves_every_use(
    hetopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hetopt.toml").write_text('[recommend]\nbudget = "5"\nconfidence = 0.9\n')
    monkeypatch.chdir(tmp_path)
    told = hetopt("recommend", "none.json", "--rank").err
    assert "no effect" not in told
    assert "none.json does not exist" in " ".join(told.split())
