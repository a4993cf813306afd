"""The library's parameters become options of the command line, and each of these options is real."""

from __future__ import annotations

import inspect
import io
import re
import shlex
import tokenize
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import click
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import hetopt
from hetopt.cli.flags import FLAGS, in_flags
from hetopt.cli.launch import Launch
from hetopt.cli.main import app
from hetopt.cli.options import given as given_of
from hetopt.cli.profile import Measure
from hetopt.cli.recommend import Recommend
from hetopt.core.errors import setting

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
    assert len(set(FLAGS.values())) == len(FLAGS), "an option has one name in the library"


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


TYPED_ALONE: dict[type, set[str]] = {
    Measure: {"from_samples", "output", "force", "explore", "yes", "as_json"},
    Recommend: {"spot", "on_demand", "rank", "explain", "report", "output", "force", "as_json"},
    Launch: {"allow_partial", "detach", "resume", "check", "dry_run", "yes", "as_json"},
}
"""What is said to the command line and not to the library."""


@pytest.mark.parametrize(
    ("record", "function"),
    [(Measure, hetopt.profile), (Recommend, hetopt.recommend), (Launch, hetopt.launch)],
    ids=lambda one: one.__name__,
)
def test_what_is_typed_is_called_as_the_library_calls_it(record: type, function: Callable[..., object]) -> None:
    """So that `given` hands every value on, and none is typed in vain."""
    typed = {one.name for one in fields(record)}
    assert typed >= TYPED_ALONE[record]
    parameters = set(inspect.signature(function).parameters)
    assert typed - TYPED_ALONE[record] <= parameters
    assert parameters - typed <= {"samples", "reporter", "accept_fewer"}


def test_a_value_that_was_not_given_is_left_to_the_library() -> None:
    asked = Recommend(profile=Path("profile.json"), budget_usd="2", batch_size=0)
    handed = given_of(asked, hetopt.recommend, market="any")
    assert handed["budget_usd"] == "2"
    assert handed["batch_size"] == 0
    assert handed["market"] == "any"
    assert not {"deadline", "output", "spot"} & set(handed)
