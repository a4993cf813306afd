"""Options: fields of frozen records that have their own help, unit and bounds, and readers of what people write there.

    @options
    class Plant(Options):
        "What is planted."

        trees: Annotated[int, Option(help="Number of trees.", read=partial(within, least=1, most=9))] = 1

A record reads its values when it is made. Command lines (`hetopt.cli.options`), signatures and docstrings (`takes`) and
files of options are derived from its fields.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from numbers import Real
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import COUNT, DURATION, MONEY, NUMBER, Unit, quantity, split
from hetopt.core.plain_text import known

Function = TypeVar("Function", bound=Callable[..., Any])

COLUMNS = 112
"""Width of a line of help in a docstring."""

_NUMBER_ALONE = re.compile(r"(\d+\.?\d*|\.\d+)(e\d+)?", re.IGNORECASE)
_COUNTED = ("parameters", "samples", "FLOPs")
"""Units of numbers that run into millions."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The help, parser and command-line spelling of a field.

    Attributes:
        help: a sentence or two; other parameters stand in backticks.
        read: makes the value of what was given, which is not None; it is called with that and the field's name.
        flag: what it is called on a command line, without dashes in front; empty: as the field is.
        short: a letter that is typed instead.
        metavar: what stands for the value in a help.
        names: values that a shell completes, as of `expanded`; without ``read`` there are no others.
        repeats: it is typed once for each of its values.
        is_file: a command line names a file, of which ``read`` makes the value.
        is_fixed: it cannot change in a run that goes on.
    """

    help: str
    read: Callable[..., Any] | None = None
    flag: str = ""
    short: str = ""
    metavar: str | None = None
    names: tuple[str, ...] = ()
    repeats: bool = False
    is_file: bool = False
    is_fixed: bool = False

    def called(self, name: str) -> str:
        """Return the command-line name of the field ``name``, without dashes in front."""
        return self.flag or name.replace("_", "-")


class Options:
    """A record whose values are read as their fields say."""

    def __post_init__(self) -> None:
        """Replace each value by what its option's ``read`` makes of it.

        Raises:
            BadInput: a value cannot be.
        """
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and option.read is not None:
                object.__setattr__(self, name, option.read(value, name))
            elif value is not None and option.names:
                known(value, expanded(option.names), name.replace("_", " "))


def changed(record: Options) -> tuple[str, ...]:
    """Return the names of fields that have another value than their default."""
    usual = type(record)()
    return tuple(name for name in options_of(type(record)) if getattr(record, name) != getattr(usual, name))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def options(record: type) -> Any:
    """Make a frozen dataclass whose docstring and signature say what its fields are."""
    decorated: Any = dataclass(frozen=True, kw_only=True)(record)
    _, *parameters = inspect.signature(decorated.__init__).parameters.values()
    known_of = options_of(decorated)
    decorated.__signature__ = inspect.Signature(
        [
            parameter.replace(annotation=_plain(parameter.annotation, known_of.get(parameter.name)))
            for parameter in parameters
        ]
    )
    decorated.__doc__ = f"{inspect.cleandoc(record.__doc__ or '')}\n\nAttributes:\n{_described(decorated)}"
    return decorated


def takes(record: Any) -> Callable[[Function], Function]:
    """Give a function of ``**options`` the signature of a record, and its docstring the record's help.

    Args:
        record: made by `options`. A line ``**options: ...`` of the docstring gives way to its fields.
    """

    def with_signature(function: Function) -> Function:
        signature = inspect.signature(function)
        before = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        parameters = [*before, *inspect.signature(record).parameters.values()]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        doc = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = re.sub(r"^    \*\*options: .*$", lambda _: _described(record), doc, flags=re.MULTILINE)
        return function

    return with_signature


@cache
def types_of(record: Any) -> dict[str, Any]:
    """Return the type of each field of a record, with its annotations."""
    # Of names that only type checkers import, anything.
    known_names = defaultdict[str, Any](lambda: Any, vars(builtins))
    for base in reversed(record.__mro__):
        known_names.update(vars(sys.modules.get(base.__module__, builtins)))
    return get_type_hints(record, localns=known_names, include_extras=True)


def _options_of(record: Any) -> Mapping[str, Option]:
    hints = types_of(record)
    return {
        attribute.name: option
        for attribute in fields(record)
        for option in getattr(hints[attribute.name], "__metadata__", ())
        if isinstance(option, Option)
    }


options_of: Callable[[Any], Mapping[str, Option]] = cache(_options_of)
"""Return what is known of each field of a record, by name."""


def expanded(names: Iterable[str]) -> list[str]:
    """Return the names, with the values of a literal type or a collection in the place of its ``module:NAME``."""
    values: list[str] = []
    for name in names:
        module, colon, attribute = name.partition(":")
        listed = getattr(import_module(module), attribute) if colon else (name,)
        values += get_args(listed) or list(listed)
    return values


def _plain(annotation: str, option: Option | None) -> str:
    """Return the annotation of a field for signatures: the type itself, or a text."""
    tree = ast.parse(annotation, mode="eval").body
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple) and ast.unparse(tree.value) == "Annotated":
        annotation = ast.unparse(tree.slice.elts[0])
    reads_text = option is not None and option.read is not None and not re.search(r"\b(str|int)\b", annotation)
    return re.sub(r"( \| None)?$", r" | str\1", annotation, count=1) if reads_text else annotation


def _described(record: type) -> str:
    lines = [f"{name}: {option.help}" for name, option in options_of(record).items()]
    return "\n".join(
        textwrap.fill(
            line,
            COLUMNS,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for line in lines
    )


def positive(value: float | str, name: str, unit: str) -> float:
    """Return a finite number above zero, also of a text such as '$20' or '110M'.

    Raises:
        BadInput: it is not.
    """
    written = COUNT if unit in _COUNTED else MONEY if unit.startswith("USD") else NUMBER
    if not isinstance(value, str | Real):
        raise BadInput(f"`{name}` must be {written.what}, got {value!r}.", hint=f"write {written.example}")
    number = quantity(value if isinstance(value, str) else repr(float(value)), written, f"`{name}`")
    if not (math.isfinite(number) and number > 0):
        example = setting(name, "110M") if unit == "parameters" else f"`{name}=5`"
        raise BadInput(f"`{name}` must be a positive number of {unit}, got {value}.", hint=f"for example {example}")
    return number


def within(value: Any, name: str, least: float, most: float, *, example: str, written: Unit | None = None) -> Any:
    """Check that a number is from ``least`` to ``most``, and return it; a text is read in the unit ``written``.

    Raises:
        BadInput: it is not.
    """
    if written is not None and isinstance(value, str):
        value = quantity(value, written, f"`{name}`")
    if not isinstance(value, Real):
        raise BadInput(f"`{name}` must be a number, got {value!r}.", hint=f"for example `{name}={example}`")
    if value < least:
        raise BadInput(f"`{name}` must be at least {least:,}, got {value}.", hint=f"for example `{name}={example}`")
    if not value <= most:
        raise BadInput(f"`{name}` must be at most {most:,}, got {value}.", hint=f"for example `{name}={example}`")
    return value


def duration_s(given: str | float, name: str) -> float:
    """Parse '90s', '45m', '6h', '1h30m', '2d', or a number of seconds, into seconds.

    Raises:
        BadInput: it is no length of time above 0.
    """
    if isinstance(given, str) and _NUMBER_ALONE.fullmatch(given.strip()) and float(given):
        example = setting(name, f"{given.strip()}h")
        raise BadInput(f"`{name}` needs a unit, got {given!r}.", hint=f"for example {example}")
    seconds = quantity(str(given), DURATION, f"`{name}`")
    if seconds <= 0:
        raise BadInput(
            f"`{name}` must be a length of time above 0, got {given!r}.", hint=f"for example {setting(name, '6h')}"
        )
    return seconds


def names(given: Sequence[str] | str, name: str) -> tuple[str, ...]:
    """Return names as a tuple, also of a text with commas between them.

    Raises:
        BadInput: a text that names nothing, as of a shell's variable that is not set, would be no limit at all.
    """
    parts = split(given, ",;", f"`{name}`") if isinstance(given, str) else given
    chosen = tuple(part.strip() for part in parts if part.strip())
    if isinstance(given, str) and not chosen:
        raise BadInput(f"`{name}` must name at least one, got {given!r}.", hint=f"name one, or leave `{name}` out")
    return chosen
