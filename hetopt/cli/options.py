"""A command's options as a record: each field is an option, and the command takes one of its records.

    @dataclass(frozen=True, kw_only=True)
    class Plant:
        trees: Annotated[int, typer.Option("--trees", help="How many.")] = 1

    @options(Plant)
    def plant(asked: Plant) -> None:
        hetopt.plant(**given(asked, hetopt.plant))

Fields are called as the library calls its parameters, so that `given` hands them on. Options that several commands have
are written here once, and what the shell completes: values that are a closed list, and the names of runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints

import typer


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Record = TypeVar("Record", bound=Dataclass)


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Completes one of these.

    Args:
        names: themselves, or ``module:NAME`` of a literal type or a collection, which is imported when it is asked for.
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in expanded(names) if name.startswith(incomplete)]

    return complete


def expanded(names: tuple[str, ...]) -> list[str]:
    """The names, with those of ``module:NAME`` in its place."""
    found: list[str] = []
    for name in names:
        module, colon, attribute = name.partition(":")
        listed = getattr(import_module(module), attribute) if colon else (name,)
        found += get_args(listed) or list(listed)
    return found


def runs(incomplete: str) -> list[str]:
    """Completes the names of runs, the newest first."""
    from hetopt.core.errors import BadInput
    from hetopt.core.runs import RunFolders, runs_home

    try:
        return [run.name for run in reversed(RunFolders(home=runs_home()).all()) if incomplete in run.name]
    except BadInput:
        return []  # a shell that completes has no place for a sentence


def every_region(word: str) -> Callable[[str], str]:
    """Reads a region; 'any' and 'all' are both the command's own word for every one of them."""
    return lambda region: word if region in ("any", "all") else region


NewestRun = Annotated[
    str | None,
    typer.Argument(autocompletion=runs, help="Run, or any unambiguous part of its name. Default: the newest."),
]
Region = Annotated[str, typer.Option("--region", "-r", help="AWS region.")]
CatalogFolder = Annotated[
    Path | None,
    typer.Option("--catalog", metavar="DIR", help="Folder of another catalogue, in the format of the bundled one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RegionOrAny = Annotated[
    str,
    typer.Option("--region", "-r", callback=every_region("any"), help="AWS region; any: the best of all."),
]
Budget = Annotated[str | None, typer.Option("--budget", help="Total USD, a hard cap on the whole bill.")]
Deadline = Annotated[str | None, typer.Option("--deadline", help="Longest total time, such as 6h.")]
Market = Annotated[
    str,
    typer.Option(
        "--market",
        autocompletion=one_of("hetopt.optimizer.market.catalog_filter:AnyMarket"),
        help="spot, on-demand or any.",
    ),
]
FIRST_REGION = "us-east-1"


def options(record: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Make a command of a function that takes one record.

    Args:
        record: a dataclass whose fields are annotated with `typer.Option` or `typer.Argument`.
    """
    annotations = get_type_hints(record, include_extras=True)

    def with_options(run: Callable[[Record], None]) -> Callable[..., None]:
        def command(**typed: Any) -> None:
            run(record(**typed))

        command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
        command.__annotations__ = annotations
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
            [
                inspect.Parameter(
                    one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one), annotation=annotations[one.name]
                )
                for one in fields(record)
            ]
        )
        return command

    return with_options


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return inspect.Parameter.empty if one.default is MISSING else one.default


def given(asked: Dataclass, function: Callable[..., object], **instead: Any) -> dict[str, Any]:
    """The arguments of a function of the library that a record has a value for.

    Args:
        asked: the record. What it has nothing for is left to the function's own default.
        function: the library's.
        instead: values that take the place of the record's.
    """
    values: Mapping[str, Any] = {one.name: getattr(asked, one.name) for one in fields(asked)} | instead
    return {name: values[name] for name in inspect.signature(function).parameters if values.get(name) is not None}
