"""What is typed wrong is answered as every other mistake is: one sentence, the next step, an exit code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.disturbance import PATIENCE_S

from .conftest import Answer


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("recomend", ["There is no command called 'recomend'.", "did you mean 'recommend'? `hetopt -h`"]),
        ("catalog lst", ["There is no command called 'lst'.", "did you mean 'list'? `hetopt catalog -h`"]),
        ("recommend p.json --buget 5", ["There is no option called '--buget'.", "did you mean '--budget'?"]),
        ("gpus 4090", ["There is no accelerator called '4090'.", "T4, T4G, V100"]),
        ("estimate --flops 1e15 --gpus V100", ["V100", "name other --gpus, or leave it out; `hetopt gpus --region"]),
        ("gpus --region all 4090", ["There is no accelerator called '4090'.", "T4, T4G, V100"]),
        ("recommend", ["PROFILE is missing.", "write `hetopt recommend [OPTIONS] PROFILE`"]),
        ("inject a-run", ["CHANGE is missing.", "write `hetopt inject [OPTIONS] RUN CHANGE`"]),
        ("recommend p.json --budget", ["--budget needs a value.", "`hetopt recommend -h`"]),
        ("recommend --json=3 p.json", ["--json takes no value.", "`hetopt recommend -h`"]),
        ("recommend p.json more", ["hetopt recommend has no use for 'more'.", "`hetopt recommend [OPTIONS] PROFILE`"]),
        ("estimate --tokens 2k", ["--tokens must be a whole number, got '2k'.", "`hetopt estimate -h`"]),
        ("profile --from-samples x --seed 3", ["--seed: no effect with --from-samples alone", "leave them out"]),
        ("estimate --tokens=2k", ["--tokens must be a whole number, got '2k'.", "`hetopt estimate -h`"]),
        ("launch --on local --memory x", ["There is no option called '--memory'.", "`hetopt launch -h`"]),
    ],
)  # fmt: skip
def test_one_sentence_and_the_next_step(hetopt: Callable[..., Answer], typed: str, said: list[str]) -> None:
    told = hetopt(*typed.split())
    assert (told.code, told.out) == (2, "")
    sentence, step = told.err.strip().splitlines()
    assert sentence.startswith("error: ")
    assert said[0] in sentence
    assert step.startswith("  → ")
    assert said[1] in step


@pytest.mark.parametrize(
    ("command", "form"),
    [
        ((), "hetopt [OPTIONS] COMMAND [ARGS]..."),
        (("recommend",), "hetopt recommend [OPTIONS] PROFILE"),
        (("launch",), "hetopt launch [OPTIONS] [PLAN] [SCRIPT]..."),
        (("gpus",), "hetopt gpus [OPTIONS] [GPU]..."),
    ],
)
def test_help_names_arguments_as_other_commands_do(
    hetopt: Callable[..., Answer], command: tuple[str, ...], form: str
) -> None:
    told = hetopt(*command, "-h")
    assert told.code == 0
    assert told.out.splitlines()[0] == f"Usage: {form}"


def test_a_group_alone_shows_its_commands(hetopt: Callable[..., Answer]) -> None:
    told = hetopt("catalog")
    assert told.code == 2
    assert told.err.startswith("Usage: hetopt catalog [OPTIONS] COMMAND [ARGS]...")


def test_whoever_leaves_a_question_unanswered_has_done_nothing(tmp_path: Path) -> None:
    """Ctrl-D where a file would be replaced."""
    kept = tmp_path / "plan.json"
    kept.write_text("mine")
    ours, theirs = pty.openpty()
    words = ["estimate", "--params", "110M", "--samples", "3M", "--budget", "200", "-o", str(kept)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hetopt.cli.main", *words], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    while b"Replace it?" not in said:
        said += os.read(ours, 4096)
    os.write(ours, b"\x04")
    with suppress(OSError):  # what Linux says when the other end is closed
        while part := os.read(ours, 4096):
            said += part
    assert process.wait(PATIENCE_S) == 130
    assert b"nothing was done." in said
    assert kept.read_text() == "mine"
    os.close(ours)


def test_python_runs_it_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-O", "-m", "hetopt", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("hetopt ")
    assert ended.stderr == ""
