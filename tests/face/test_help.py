"""`--help` of every command fits on a screen of 80 by 24 and teaches by examples; `--help-all` leaves nothing out."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from hypothesis import given, strategies as st
from typer.testing import CliRunner

import hetopt
from hetopt.api.options import RECORDS
from hetopt.cli.flags import OTHERS, flag_of, in_flags
from hetopt.cli.help_screen import FIRST, MAIN
from hetopt.cli.main import app
from hetopt.core.errors import setting
from hetopt.core.option import options_of
from tests.disturbance import PATIENCE_S

from .conftest import Answer

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
def test_help_fits_on_a_screen_and_all_of_it_leaves_nothing_out(path: str) -> None:
    lines = shown(path, "--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any(_is_example(line) and line.strip().startswith(f"hetopt {path}".strip()) for line in lines)
    told = shown(path, "--help-all", 100)
    for parameter in COMMANDS[path].params:
        if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
            assert all(name in told for name in parameter.opts), parameter.name
    for name, below in getattr(COMMANDS[path], "commands", {}).items():
        assert below.hidden or name in told
    assert path or shown("", "-h") == shown("", "--help")
    assert "..." not in told.partition("Commands:")[2], "what is said of a command is whole"


def test_what_comes_first_is_there() -> None:
    for path, options in FIRST.items():
        known = {name for parameter in COMMANDS[path].params for name in parameter.opts}
        assert set(options) <= known, path
    assert set(MAIN) <= set(COMMANDS)


# What is typed wrong is answered as every other mistake is: one sentence, the next step, an exit code.


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("recomend", ["There is no command called 'recomend'.", "did you mean 'recommend'? `hetopt -h`"]),
        ("catalog lst", ["There is no command called 'lst'.", "did you mean 'list'? `hetopt catalog -h`"]),
        ("recommend p.json --buget 5", ["There is no option called '--buget'.", "did you mean '--budget'?"]),
        ("gpus 4090", ["There is no accelerator called '4090'.", "did you mean 'RTX 4090'?"]),
        ("gpus 'RTX_4090'", ["no machine here has the RTX 4090.", "T4, T4G, V100"]),
        ("gpus --gpus H100", ["There is no option called '--gpus'.", "write `hetopt gpus [OPTIONS] [GPU]...`"]),
        ("cost", ["There is no command called 'cost'.", "`hetopt -h`"]),
        ("resume", ["There is no command called 'resume'.", "write `hetopt launch --resume`; `hetopt -h`"]),
        ("estimate --params 0 --samples 3M", ["got 0.", "for example --params 110M"]),
        ("estimate --samples 3M --took 3d --on A10G", ["what the model is.", "--params 110M and --samples 3M"]),
        ("estimate --params 1M --samples 3M --market own", ["in no region.", "name them with --inventory hosts.toml"]),
        ("estimate --params 1M --samples 3M --price p4d=9", ["'p4d'.", "'p4d.24xlarge' or 'p4de.24xlarge'?"]),
        ("estimate --params 1M --samples 3M --cloud gcp", ["'gcp'.", "`hetopt catalog import FILE --cloud gcp`"]),
        ("estimate --flops 1e15 --gpus V100", ["V100", "name other --gpus, or leave it out; `hetopt gpus --region"]),
        ("gpus --region all 4090", ["There is no accelerator called '4090'.", "T4, T4G, V100"]),
        ("recommend", ["missing argument 'profile'.", "write `hetopt recommend [OPTIONS] PROFILE`"]),
        ("inject a-run", ["missing argument 'change'.", "write `hetopt inject [OPTIONS] RUN CHANGE`"]),
        ("recommend p.json --budget", ["option '--budget' requires an argument.", "`hetopt recommend -h`"]),
        ("recommend --json=3 p.json", ["option '--json' does not take a value.", "`hetopt recommend -h`"]),
        ("recommend p.json more", ["got unexpected extra argument(s) (more).", "`hetopt recommend [OPTIONS] PROFILE`"]),
        ("estimate --method LoRA", ["There is no method called 'LoRA'.", "did you mean 'lora'? choose"]),
        ("estimate --tokens 2.5", ["--tokens must be a whole number, got 2.5.", "for example --tokens 128"]),
        ("estimate --tokens two", ["--tokens must be a whole number, got 'two'.", "write 128, 10k or 2M"]),
        ("profile --from-samples x --seed 3", ["--seed: no effect with --from-samples alone", "leave them out"]),
        ("catalog list --limit=2k", ["--limit must be a valid integer, got '2k'.", "`hetopt catalog list -h`"]),
        ("catalog import none.csv --cloud c", ["none.csv does not exist.", "name a vms.csv of SkyPilot"]),
        ("gpus --cloud lamda", ["There is no cloud called 'lamda'.", "did you mean 'lambda'?"]),
        ("recommend resnet20-cifar --budget 5", ["no profile called 'resnet20-cifar'.", "mean 'resnet20-cifar10'?"]),
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


# The library's parameters become options of the command line, and each of these options is real.

FLAGS = {name: flag for known in (*map(options_of, RECORDS), OTHERS) for name in known if (flag := flag_of(name))}
NAMES = st.sampled_from(sorted(FLAGS))


def options(command: click.Command) -> set[str]:
    """Every option of a command and of those below it."""
    found = {one for parameter in command.params for one in parameter.opts}
    return found.union(*(options(below) for below in getattr(command, "commands", {}).values()))


def test_texts_are_in_quotes_where_the_library_names_them() -> None:
    """``on="local"`` can be typed in Python as it is said; ``on=local`` is a name that nobody has."""
    bare = re.compile(r"(?<!`)`[a-z_]+=(?!True`|False`|None`)[A-Za-z][\w./-]*`(?!`)")
    package = Path(hetopt.__file__).parent
    said = {
        f"{path}:{token.start[0]} {token.string}"
        for folder in (one for one in package.iterdir() if one.is_dir() and one.name != "cli")
        for path in folder.resolve().rglob("*.py")
        for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
        if token.type == tokenize.STRING and bare.search(token.string)
    }
    assert said == set()


def test_every_flag_is_an_option_of_some_command() -> None:
    assert set(FLAGS.values()) - options(typer.main.get_command(app)) == set()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("raise `max_workers`.", "raise --max-workers."),
        ("`confidence=0.9` is kept", "--confidence 0.9 is kept"),
        ('profile with `sync="local-sgd(8)"`', "profile with --sync 'local-sgd(8)'"),
        ('use `on="local"` or `on="ec2"`', "use --on local or --on ec2"),
        ("for example `slowdowns=[1, 2]`", f"for example {FLAGS['slowdowns']} 1,2"),
        ('name one: `images={"arm64-cpu": "AMI"}`', "name one: --image arm64-cpu=AMI"),
        ("launch with `unprobed=True`", "launch with --unprobed"),
        ("type `hetopt stop RUN`, or look at `epochs`", "type `hetopt stop RUN`, or look at --epochs"),
        ("`startup_s` has no option", "`startup_s` has no option"),
    ],
)
def test_parameters_are_shown_as_options(said: str, shown: str) -> None:
    assert in_flags(said) == shown


@given(NAMES, st.text(st.characters(exclude_characters="`", exclude_categories=("C", "Z")), min_size=1))
def test_a_shell_reads_back_the_value(name: str, value: str) -> None:
    assert shlex.split(in_flags(setting(name, value))) == [FLAGS[name], value]


@given(st.text(st.characters(exclude_characters="`")))
def test_text_without_backticks_stays(text: str) -> None:
    assert in_flags(text) == text
