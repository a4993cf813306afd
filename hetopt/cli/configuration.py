"""Options that are not typed: of a project, of a user, and of the environment. What is typed goes before them all.

    hetopt.toml                        of a project: the nearest one upward from the current folder
    ~/.config/hetopt/config.toml       of a user ($XDG_CONFIG_HOME)
    HETOPT_BUDGET=20                   in the environment: --budget of every command that has it

    region = "eu-west-1"               # of every command that has the option
    [recommend]
    budget = "$20"                     # as it is typed

A later line of this list goes before an earlier one: user, project, environment, command line. What spends, overwrites
or removes is only ever taken from the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hetopt.cli import render
from hetopt.core.errors import BadInput
from hetopt.core.paths import expanded, inside, read_text
from hetopt.core.plain_text import fault_of, known, texts_in

if TYPE_CHECKING:
    from typer._click import Command, Parameter


PROJECT_FILE = "hetopt.toml"
PREFIX = "HETOPT_"

TYPED_ONLY = frozenset(
    {
        *("yes", "force", "accept-risk", "unprobed", "create-bucket"),  # spend, or overwrite
        *("remove", "everybody", "all"),  # remove, or reach for what belongs to others
        *("resume", "learn", "version", "install-completion", "show-completion"),  # are meant once
        *("launch budget", "profile probe-budget", "profile explore"),  # what may be spent
        "doctor budget",  # which a launch is looked at with
    }
)
"""Options that no file and no variable gives: a project that was copied from somewhere must not decide them."""

RENTED = "ec2"
"""The value of --on that costs money, and is typed as well."""

_LISTS = "`hetopt --help` lists the commands, and `hetopt COMMAND --help-all` their options"

_MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An option that has another value than its default.

    Attributes:
        command: such as ``launch`` or ``catalog list``.
        option: such as ``--budget``.
        parameter: the command's own name for it.
        value: as it would be typed.
        source: the file or the variable.
        is_default: whether the command has the same value without it.
    """

    command: str
    option: str
    parameter: str
    value: str | bool | tuple[str, ...]
    source: str
    is_default: bool = False

    @property
    def shown(self) -> str:
        """As it would be typed, without quotes."""
        if isinstance(self.value, bool):
            return self.option if self.value else f"no {self.option}"
        many = self.value if isinstance(self.value, tuple) else (self.value,)
        return " ".join(f"{self.option} {one}" for one in many)


def settings(
    root: Command, environment: Mapping[str, str], folder: Path, *, typed: str | None = None
) -> tuple[Setting, ...]:
    """Return every option that a file or a variable gives, of every command.

    Args:
        root: the whole command line.
        environment: of the process.
        folder: where it was started.
        typed: the one command that matters. Where no file gives anything, the others' options are not looked at.

    Raises:
        BadInput: a file cannot be read, or names what there is not (the nearest is named) or what must be typed.
    """
    files = tuple(_files(environment, folder))
    options = _options(root, None if files else typed)
    found: dict[tuple[str, str], Setting] = {}
    for file in files:
        for command, name, value in _given(_read(file), options, file):
            found[command, name] = _setting(command, options[command][name], value, file)
    for command, its in options.items():
        for name, parameter in its.items():
            variable = PREFIX + name.upper().replace("-", "_")
            if environment.get(variable) and not _is_typed_only(command, name):
                found[command, name] = _setting(command, parameter, environment[variable], variable)
    return tuple(found[key] for key in sorted(found))


def default_map(given: tuple[Setting, ...]) -> dict[str, Any]:
    """Return the settings as the command line takes them: by command, and by subcommand within."""
    whole: dict[str, Any] = {}
    for one in given:
        inner = whole
        for word in one.command.split():
            inner = inner.setdefault(word, {})
        inner[one.parameter] = list(one.value) if isinstance(one.value, tuple) else one.value
    return whole


def of_command(given: tuple[Setting, ...], arguments: list[str]) -> tuple[Setting, ...]:
    """Return the settings that matter to what was typed."""
    typed = {word.partition("=")[0] for word in arguments}
    words = {one.command: one.command.split() for one in given}
    return tuple(
        one for one in given if arguments[: len(words[one.command])] == words[one.command] and one.option not in typed
    )


def _options(root: Command, only: str | None) -> dict[str, dict[str, Parameter]]:
    """Return the options of every command, or of one (none, if there is no such), by name without dashes."""
    found: dict[str, dict[str, Parameter]] = {}

    def walk(command: Command, path: tuple[str, ...]) -> None:
        inside: Mapping[str, Command] = getattr(command, "commands", {})
        for name, one in inside.items():
            walk(one, (*path, name))
        if not inside:
            found[" ".join(path)] = {
                option.removeprefix("--"): parameter
                for parameter in command.params
                for option in parameter.opts
                if option.startswith("--") and option.removeprefix("--") != "help"
            }

    commands: Mapping[str, Command] = getattr(root, "commands", {})
    for name in commands if only is None else {only} & set(commands):
        walk(commands[name], (name,))
    return found


def _files(environment: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Yield the user's file, then the project's; a link to nothing is refused when it is read."""
    home, own = environment.get("XDG_CONFIG_HOME", ""), []
    with suppress(BadInput):  # whose home nothing tells has no file there
        own.append(expanded(home if home.startswith("/") else "~/.config") / "hetopt" / "config.toml")
    project = next((file for place in (folder, *folder.parents) if os.path.lexists(file := place / PROJECT_FILE)), None)
    yield from filter(os.path.lexists, own)
    yield from [] if project is None else [project]


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    hint = "correct the file, or move it away"
    try:
        given = tomllib.loads(read_text(file, most_bytes=_MOST_BYTES, hint=hint))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{file} must be TOML: {str(error)[:200]}.", hint=hint) from None
    except RecursionError:
        raise BadInput(f"{file} is nested too deeply.", hint=hint) from None
    for text in texts_in(given):
        fault = fault_of(text)
        if fault is not None:
            raise BadInput(f"{file}: a text {fault}.", hint=hint)
    return given


def _given(
    table: Mapping[str, Any], options: Mapping[str, Mapping[str, Parameter]], file: Path, command: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield command, option and value of a table: options of every command that has them, then those of one.

    A table is a command where there is one of that name: ``[report]`` is `hetopt report`, not an option --report.

    Raises:
        BadInput: there is no such option or command, it must be typed, or a command is no table.
    """
    within = [one for one in options if not command or one == command or one.startswith(f"{command} ")]
    below = {one.removeprefix(command).split()[0] for one in within if one != command}
    names = {name for one in within for name in options[one]}
    tables = {key: value for key, value in table.items() if key in below and isinstance(value, dict)}
    for key in [key for key in table if key not in tables]:
        what, hint = "option or command", _LISTS
        if command and not below:
            what, hint = f"option of `hetopt {command}`", f"`hetopt {command} --help-all` lists them"
        name = known(key.replace("_", "-"), sorted(names | below), f"{what} (in {file})", hint=hint)
        if name not in names:
            path = f"{command} {name}".strip()
            raise BadInput(f"{file}: {path} must be a table of options.", hint=f"write [{path.replace(' ', '.')}]")
        having = [one for one in within if name in options[one] and not _is_typed_only(one, name)]
        if not having:
            raise BadInput(
                f"{file}: {name} must be typed where it is meant, and is never taken from here.",
                hint=f"remove it there, and type --{name}",
            )
        yield from ((one, name, table[key]) for one in having)
    for key, inner in tables.items():
        yield from _given(inner, options, file, f"{command} {key}".strip())


def _is_typed_only(command: str, name: str) -> bool:
    return name in TYPED_ONLY or f"{command} {name}" in TYPED_ONLY


def _setting(command: str, parameter: Parameter, value: Any, source: Path | str) -> Setting:
    option = next(one for one in parameter.opts if one.startswith("--"))
    name = option.removeprefix("--")
    said: str | bool | tuple[str, ...]
    if getattr(parameter, "is_flag", False):
        flags = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in flags:
            raise BadInput(f"{source}: {name} must be true or false, got {value!r}.", hint="write true or false")
        said = flags[str(value).lower()]
    elif getattr(parameter, "multiple", False):
        said = tuple(map(_typed, value)) if isinstance(value, list) else (_typed(value),)
    else:
        said = _typed(value)
        if option == "--on" and said == RENTED:
            raise BadInput(f"{source}: on must not be {RENTED!r}, which costs money.", hint=f"type --on {RENTED}")
        if isinstance(source, Path) and _is_path(parameter):
            own = source.name != PROJECT_FILE
            said = str(expanded(said) if own else inside(source.parent, said, what=name, any_text=True))
    return Setting(
        command=command,
        option=option,
        parameter=parameter.name or "",
        value=said,
        source=str(source),
        is_default=said == parameter.default or said == str(parameter.default),
    )


def _is_path(parameter: Parameter) -> bool:
    """Return whether an option takes a path; typer tells it in its own way since it has no click beside it."""
    described = getattr(parameter, "type_descriptor", None)
    return (
        getattr(described, "annotation", None) is Path or getattr(getattr(parameter, "type", 0), "name", "") == "path"
    )


def _typed(value: Any) -> str:
    """Return a value of a file as a person would type it."""
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def config(
    context: typer.Context,
    json_: bool = typer.Option(False, "--json", help="Print them as JSON."),
) -> None:
    """Show every option that a file or the environment gives, with its value and where it comes from.

    Read are ~/.config/hetopt/config.toml, the nearest hetopt.toml upward from here, and HETOPT_OPTION in the
    environment, the later before the earlier; what is typed goes before them all. Options that spend, overwrite or
    remove (--yes, --force, --accept-risk, --unprobed and their like) are only ever typed.

    \b
      hetopt config
    """
    from hetopt.reports.document import Table, columns

    given = settings(context.find_root().command, os.environ, Path.cwd())
    found = [one for one in given if not one.is_default]
    if json_:
        render.print_json(
            [{"command": one.command, "option": one.option, "value": one.value, "from": one.source} for one in found]
        )
        return
    if not found:
        render.line("Every option has its default: no hetopt.toml here or above, no file of yours, no HETOPT_OPTION.")
        return
    rows = [(one.command, one.option, one.shown.removeprefix(f"{one.option} "), one.source) for one in found]
    render.show([Table(name="options", columns=columns("command, option, value, from"), rows=rows)])
