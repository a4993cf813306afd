"""The library's parameters become options of the command line, and each of these options is real."""

from __future__ import annotations

import io
import re
import shlex
import tokenize
from pathlib import Path

import click
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import hetopt
from hetopt.cli.flags import flags, in_flags
from hetopt.cli.main import app
from hetopt.core.errors import setting

FLAGS = flags()
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
