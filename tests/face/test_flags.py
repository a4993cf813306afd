"""The library's parameters become options of the command line, and each of these options is real."""

from __future__ import annotations

import shlex

import click
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from hetopt.cli.flags import FLAGS, in_flags
from hetopt.cli.main import app
from hetopt.core.errors import setting

NAMES = st.sampled_from(sorted(FLAGS))


def options(command: click.Command) -> set[str]:
    """Every option of a command and of those below it."""
    found = {one for parameter in command.params for one in parameter.opts}
    return found.union(*(options(below) for below in getattr(command, "commands", {}).values()))


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
