"""Options from files and the environment, of a project and of a user; what is typed goes before them.

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
"""Names of options that no file or variable gives: a project that was copied must not decide them."""

RENTED = "ec2"
"""Value of --on that costs money, and is typed as well."""

_LISTS = "`hetopt --help` lists the commands, and `hetopt COMMAND --help-all` their options"

_MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option that a file or the environment sets, with its value and source.

    Attributes:
        command: name of the command, such as ``launch`` or ``catalog list``.
        option: name of the option, such as ``--budget``.
        parameter: name that the command's function has for it.
        value: value as it would be typed; of a switch a bool, of an option that repeats all values.
        source: file or variable that sets it.
    """

    command: str
    option: str
    parameter: str
    value: str | bool | tuple[str, ...]
    source: str

    @property
    def shown(self) -> str:
        """Option and value as they would be typed, without quotes; of a switch that is off ``no --NAME``."""
        if isinstance(self.value, bool):
            return self.option if self.value else f"no {self.option}"
        many = self.value if isinstance(self.value, tuple) else (self.value,)
        return " ".join(f"{self.option} {value}" for value in many)


def settings(
    root: Command, environment: Mapping[str, str], folder: Path, *, typed: str | None = None
) -> tuple[Setting, ...]:
    """Return every option that a file or an environment variable sets, of every command.

    Ordered by command and option. Of several sources the variable counts, then the project's file, then the user's.

    Args:
        root: command line with all commands.
        environment: variables of the process.
        folder: folder in which the process was started.
        typed: name of the command that is run, whose options alone are looked at where there is no file; None: all.

    Raises:
        BadInput: a file cannot be read, names an option or command that does not exist (the nearest is named), gives a
            value that cannot be, or names what must be typed.
    """
    files = tuple(_files(environment, folder))
    options = _options(root, None if files else typed)
    by_option: dict[tuple[str, str], Setting] = {}
    for file in files:
        for command, name, value in _given(_read(file), options, file):
            by_option[command, name] = _setting(command, options[command][name], value, file)
    for command, parameters in options.items():
        for name, parameter in parameters.items():
            variable = PREFIX + name.upper().replace("-", "_")
            if environment.get(variable) and not _is_typed_only(command, name):
                by_option[command, name] = _setting(command, parameter, environment[variable], variable)
    return tuple(by_option[key] for key in sorted(by_option))


def default_map(given: tuple[Setting, ...]) -> dict[str, Any]:
    """Return the settings as click's default map: parameter values nested by command and subcommand.

    A later setting goes before an earlier one.
    """
    whole: dict[str, Any] = {}
    for setting in given:
        inner = whole
        for word in setting.command.split():
            inner = inner.setdefault(word, {})
        inner[setting.parameter] = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    return whole


def of_command(given: tuple[Setting, ...], arguments: list[str]) -> tuple[Setting, ...]:
    """Return the settings of the command that was typed, without options that were typed too.

    Args:
        given: settings of any commands.
        arguments: arguments of the command line, without the program's name.
    """
    typed = {word.partition("=")[0] for word in arguments}
    words = {setting.command: setting.command.split() for setting in given}
    return tuple(
        setting
        for setting in given
        if arguments[: len(words[setting.command])] == words[setting.command] and setting.option not in typed
    )


def _options(root: Command, only: str | None) -> dict[str, dict[str, Parameter]]:
    """Return the options of every command, or of one (none, if there is no such), by name without dashes."""
    by_command: dict[str, dict[str, Parameter]] = {}

    def walk(command: Command, path: tuple[str, ...]) -> None:
        """Add the options of a command, or of all commands below a group."""
        inside: Mapping[str, Command] = getattr(command, "commands", {})
        for name, subcommand in inside.items():
            walk(subcommand, (*path, name))
        if not inside:
            by_command[" ".join(path)] = {
                option.removeprefix("--"): parameter
                for parameter in command.params
                for option in parameter.opts
                if option.startswith("--") and option.removeprefix("--") != "help"
            }

    commands: Mapping[str, Command] = getattr(root, "commands", {})
    for name in commands if only is None else {only} & set(commands):
        walk(commands[name], (name,))
    return by_command


def _files(environment: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Yield the user's file, then the project's; a link to nothing is refused when it is read.

    Only files that are there; the project's is the nearest one upward from ``folder``.
    """
    home, users = environment.get("XDG_CONFIG_HOME", ""), []
    with suppress(BadInput):  # whose home nothing tells has no file there
        users.append(expanded(home if home.startswith("/") else "~/.config") / "hetopt" / "config.toml")
    project = next((file for place in (folder, *folder.parents) if os.path.lexists(file := place / PROJECT_FILE)), None)
    yield from filter(os.path.lexists, users)
    yield from [] if project is None else [project]


def _read(file: Path) -> dict[str, Any]:
    """Return the table in a TOML file; BadInput: it cannot be read, or holds characters that no name may have."""
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
    """Yield command, option and value of a TOML table: options of every command that has them, then those of one.

    A table is a command where there is one of that name: ``[report]`` is `hetopt report`, not an option --report.

    Args:
        table: the whole file, or the table of ``command``.
        options: options of each command, by its name and theirs.
        file: path of the file, for errors.
        command: command that the table is of; empty: the whole file.

    Raises:
        BadInput: there is no such option or command, it must be typed, or a command is no table.
    """
    within = [
        candidate for candidate in options if not command or candidate == command or candidate.startswith(f"{command} ")
    ]
    below = {candidate.removeprefix(command).split()[0] for candidate in within if candidate != command}
    names = {name for candidate in within for name in options[candidate]}
    tables = {key: value for key, value in table.items() if key in below and isinstance(value, dict)}
    for key in [key for key in table if key not in tables]:
        what, hint = "option or command", _LISTS
        if command and not below:
            what, hint = f"option of `hetopt {command}`", f"`hetopt {command} --help-all` lists them"
        name = known(key.replace("_", "-"), sorted(names | below), f"{what} (in {file})", hint=hint)
        if name not in names:
            path = f"{command} {name}".strip()
            raise BadInput(f"{file}: {path} must be a table of options.", hint=f"write [{path.replace(' ', '.')}]")
        having = [
            candidate for candidate in within if name in options[candidate] and not _is_typed_only(candidate, name)
        ]
        if not having:
            raise BadInput(
                f"{file}: {name} must be typed where it is meant, and is never taken from here.",
                hint=f"remove it there, and type --{name}",
            )
        yield from ((candidate, name, table[key]) for candidate in having)
    for key, inner in tables.items():
        yield from _given(inner, options, file, f"{command} {key}".strip())


def _is_typed_only(command: str, name: str) -> bool:
    return name in TYPED_ONLY or f"{command} {name}" in TYPED_ONLY


def _setting(command: str, parameter: Parameter, value: Any, source: Path | str) -> Setting:
    """Return an option's setting from a value in a file or variable.

    A path in a project's file must be below the file's folder; in a user's file ``~`` is the home folder.

    Raises:
        BadInput: the value cannot be, or would rent machines.
    """
    option = next(flag for flag in parameter.opts if flag.startswith("--"))
    name = option.removeprefix("--")
    parsed: str | bool | tuple[str, ...]
    if getattr(parameter, "is_flag", False):
        flags = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in flags:
            raise BadInput(f"{source}: {name} must be true or false, got {value!r}.", hint="write true or false")
        parsed = flags[str(value).lower()]
    elif getattr(parameter, "multiple", False):
        parsed = tuple(map(_typed, value)) if isinstance(value, list) else (_typed(value),)
    else:
        parsed = _typed(value)
        if option == "--on" and parsed == RENTED:
            raise BadInput(f"{source}: on must not be {RENTED!r}, which costs money.", hint=f"type --on {RENTED}")
        if isinstance(source, Path) and _is_path(parameter):
            is_users = source.name != PROJECT_FILE
            parsed = str(expanded(parsed) if is_users else inside(source.parent, parsed, what=name, any_text=True))
    return Setting(
        command=command,
        option=option,
        parameter=parameter.name or "",
        value=parsed,
        source=str(source),
    )


def _is_path(parameter: Parameter) -> bool:
    """Return whether an option takes a path; typer tells it in its own way since it has no click beside it."""
    described = getattr(parameter, "type_descriptor", None)
    return (
        getattr(described, "annotation", None) is Path or getattr(getattr(parameter, "type", 0), "name", "") == "path"
    )


def _typed(value: Any) -> str:
    """Return a TOML value as the text that a person would type."""
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
    if json_:
        render.print_json(
            [
                {"command": setting.command, "option": setting.option, "value": setting.value, "from": setting.source}
                for setting in given
            ]
        )
        return
    if not given:
        render.line("Every option has its default: no hetopt.toml here or above, no file of yours, no HETOPT_OPTION.")
        return
    rows = [
        (setting.command, setting.option, setting.shown.removeprefix(f"{setting.option} "), setting.source)
        for setting in given
    ]
    render.show([Table(name="options", columns=columns("command, option, value, from"), rows=rows)])
