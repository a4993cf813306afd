"""Commands whose options are the fields of records: each field is written once, with its help, unit and bounds.

    @with_options(Plant)
    def plant(place: Annotated[str, typer.Argument()], **typed: Any) -> None:
        hetopt.plant(place, **typed)

``typed`` has what was given for the fields on the command line, or by a file or variable, as it was typed. Arguments
that several commands have are written here once, and what a shell completes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from hetopt.cli.flags import in_flags
from hetopt.core.option import Option, expanded, options_of, types_of


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a shell-completion function for these names, which returns those that begin with what was typed.

    Args:
        *names: names; ``module:NAME`` stands for the values of a collection there.
    """
    return lambda incomplete: [name for name in expanded(names) if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Return the names of runs that contain a text, the newest first, for shell completion.

    Empty: no name contains it, or the folder of runs cannot be read.
    """
    from hetopt.core.errors import BadInput
    from hetopt.core.run_folder import RunFolders, runs_home

    try:
        return [run.name for run in reversed(RunFolders(home=runs_home()).all()) if incomplete in run.name]
    except BadInput:
        return []  # a shell that completes has no place for a sentence


NewestRun = Annotated[
    str | None,
    typer.Argument(autocompletion=runs, help="Run, or any unambiguous part of its name. Default: the newest."),
]
Region = Annotated[str, typer.Option("--region", "-r", help="AWS region.")]
CatalogFolder = Annotated[
    Path | None,
    typer.Option("--catalog", metavar="DIR", help="Folder of another catalogue, in the format of the bundled one."),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show all there is to it: more than a screen of 24 lines has room for.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def with_options(*records: type, leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that gives a command the fields of records as options, beside its own.

    The command gets as keywords its own options, and of the records' those that were given (not left at the default).

    Args:
        *records: classes made by `hetopt.core.option.options`. Where some have a ``PLACE`` and not all have a field,
            its
            help names those that do.
        leave_out: names of fields that are no options of the command.
    """

    def with_command(run: Callable[..., None]) -> Callable[..., None]:
        """Return a command for typer: the function with the records' options in its signature."""
        hints = get_type_hints(run, include_extras=True)
        before = [
            parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(run).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        derived = _derived(records, leave_out)
        names = [parameter.name for parameter in before]

        def command(context: typer.Context, **typed: Any) -> None:
            given = (name for name in derived if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT")
            run(**{name: typed[name] for name in (*names, *given)})

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
        parameters = [context, *before, *derived.values()]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        return command

    return with_command


def _derived(records: tuple[type, ...], leave_out: tuple[str, ...]) -> Mapping[str, inspect.Parameter]:
    """Return the parameter that typer reads for each field of the records, by field name.

    Fields that several records share give one option.
    """
    owners: dict[str, list[Any]] = {}
    for record in records:
        for name in options_of(record).keys() - set(leave_out):
            owners.setdefault(name, []).append(record)
    placed = [record for record in records if getattr(record, "PLACE", "")]
    ordered = dict.fromkeys(name for record in records for name in options_of(record) if name in owners)
    return {name: _option(name, owners[name], among=len(placed)) for name in ordered}


def _option(name: str, owners: list[Any], *, among: int) -> inspect.Parameter:
    """Return a field as a keyword parameter that typer reads: flag, help, default and completion.

    Args:
        name: name of the field.
        owners: option records that have the field, at least one.
        among: number of the command's records that are a backend's.
    """
    option = options_of(owners[0])[name]
    field = next(candidate for candidate in fields(owners[0]) if candidate.name == name)
    plain = get_args(types_of(owners[0])[name])[0]
    default = None if field.default is MISSING or not isinstance(field.default, str | int | float) else field.default
    flag = f"--{option.called(name)}"
    flags = [f"{flag}/{flag.replace('--', '--no-')}" if default is True else flag]
    flags += [f"-{option.short}"] if option.short else []
    annotation = Annotated[  # type: ignore[valid-type]
        _typed_as(option, plain, default),
        typer.Option(
            *flags,
            help=in_flags(_help(name, owners, among)),
            metavar=option.metavar or ("N" if int in (get_args(plain) or (plain,)) else None),
            autocompletion=one_of(*option.names) if option.names else None,
        ),
    ]
    shown: Any = [] if option.repeats else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation)


def _help(name: str, owners: list[Any], among: int) -> str:
    """Return the help of a field, with the backends that have it in front unless all ``among`` records do."""
    places: dict[str, list[str]] = {}
    for owner in owners:
        places.setdefault(options_of(owner)[name].help, []).append(getattr(owner, "PLACE", ""))
    if len(owners) == among or not all(map(all, places.values())):
        return next(iter(places))
    return " ".join(
        f"{', '.join(names)}: {text[0] if text[1].isupper() else text[0].lower()}{text[1:]}"
        for text, names in places.items()
    )


def _typed_as(option: Option, plain: Any, default: Any) -> Any:
    """Return the type that typer parses a field as: text, but for flags, paths, and numbers that nothing reads.

    A list of texts where the option repeats; optional where ``default`` is None.
    """
    if option.repeats:
        return list[str]
    kinds = get_args(plain) or (plain,)
    text = Path if option.is_file or (Path in kinds and str not in kinds) else str
    plainly = (bool, int, float) if option.read is None else (bool,)
    kind = next((type_ for type_ in plainly if type_ in kinds and str not in kinds), text)
    return kind if default is not None else kind | None
