"""Options as fields of frozen records, each with its help and parser, and parsers of common values.

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
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from importlib import import_module
from numbers import Integral, Real
from typing import Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import COUNT, DURATION, MONEY, NUMBER, SIZE, WHOLE, Unit, quantity, split
from hetopt.core.plain_text import known

Function = TypeVar("Function", bound=Callable[..., Any])

COLUMNS = 112
"""Width of a line of help in a docstring."""

_NUMBER_ALONE = re.compile(r"(\d+\.?\d*|\.\d+)(e\d+)?", re.IGNORECASE)
_COUNTED = ("parameters", "samples", "FLOPs")
"""Units of numbers that run into millions."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The help, parser and command-line spelling of one option, attached to a record's field.

    Attributes:
        help: a sentence or two; other parameters stand in backticks.
        read: returns the option's value, given what was passed (never None) and the field's name; None: the value is
            taken as it is.
        flag: name on a command line, without dashes in front; empty: the field's name.
        short: a letter that is typed instead; empty: none.
        metavar: what stands for the value in a help; None: by the type.
        names: values that a shell completes, as of `expanded`; without ``read`` other values are refused.
        repeats: whether the option is typed once for each of its values.
        is_file: whether a command line names a file, of which ``read`` makes the value.
        is_fixed: whether the option cannot change in a run that goes on.
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
        """Return the option's name on the command line, without dashes; ``name`` is its field's."""
        return self.flag or name.replace("_", "-")


class Options:
    """The base of option records: making one parses and checks each value by its field's `Option`.

    Making a record raises BadInput for a value that its option refuses; None is never checked.
    """

    def __post_init__(self) -> None:
        """Replace each value by what its option's ``read`` makes of it; check others against the option's ``names``.

        None, an option that is not given, stays.

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
    """Return the names of an option record's fields whose values are not the defaults."""
    usual = type(record)()
    return tuple(name for name in options_of(type(record)) if getattr(record, name) != getattr(usual, name))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def options(record: type) -> Any:
    """Make a class a frozen, keyword-only dataclass with signature and docstring derived from its fields' `Option`s.

    Args:
        record: subclass of `Options`, whose fields are ``Annotated`` with their `Option`.
    """
    decorated: Any = dataclass(frozen=True, kw_only=True)(record)
    doc = inspect.cleandoc(record.__doc__ or "")
    decorated.__signature__ = _WhenAsked(lambda: _signature(decorated))
    decorated.__doc__ = _WhenAsked(lambda: f"{doc}\n\nAttributes:\n{_described(decorated)}")
    return decorated


class _WhenAsked:
    """A class attribute that is made when it is first asked for: commands look at few of all records."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = cache(make)

    def __get__(self, record: object, kind: type) -> Any:
        return self._make()


def _signature(record: Any) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default if each.default_factory is MISSING else each.default_factory(),
                annotation=_plain(str(each.type), options_of(record).get(each.name)),
            )
            for each in fields(record)
        ]
    )


def takes(record: Any) -> Callable[[Function], Function]:
    """Return a decorator that puts a record's fields for ``**options`` into a function's signature and docstring.

    The function itself still gets them as keywords, and makes the record. A call with a parameter that it does not have
    raises BadInput, which names the nearest.

    Args:
        record: made by `options`. A line ``**options: ...`` of the docstring gives way to its fields.
    """

    def with_signature(function: Function) -> Function:
        """Return a function that checks its parameters' names, with the record's fields in signature and docstring."""
        signature = inspect.signature(function)
        before = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        parameters = [*before, *inspect.signature(record).parameters.values()]

        @wraps(function)
        def checked(*arguments: Any, **given: Any) -> Any:
            for name in given:
                known(name, [parameter.name for parameter in parameters], f"parameter of {function.__name__}")
            return function(*arguments, **given)

        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        doc = inspect.cleandoc(function.__doc__ or "")
        checked.__doc__ = re.sub(r"^    \*\*options: .*$", lambda _: _described(record), doc, flags=re.MULTILINE)
        return cast(Function, checked)

    return with_signature


@cache
def types_of(record: Any) -> dict[str, Any]:
    """Return the type of each field of a record class, by name, with its ``Annotated`` metadata."""
    # Of names that only type checkers import, anything.
    known_names = defaultdict[str, Any](lambda: Any, vars(builtins))
    for base in reversed(record.__mro__):
        known_names.update(vars(sys.modules.get(base.__module__, builtins)))
    return get_type_hints(record, localns=known_names, include_extras=True)


def _options_of(record: Any) -> Mapping[str, Option]:
    return {
        attribute.name: option
        for attribute in fields(record)
        for option in getattr(types_of(record)[attribute.name], "__metadata__", ())
        if isinstance(option, Option)
    }


options_of: Callable[[Any], Mapping[str, Option]] = cache(_options_of)
"""Return the `Option` of each field of a record class, by the field's name."""


def expanded(names: Iterable[str]) -> list[str]:
    """Return the names with each ``module:NAME`` replaced by the values of the Literal or collection it refers to.

    The modules are imported.
    """
    values: list[str] = []
    for name in names:
        module, colon, attribute = name.partition(":")
        listed = getattr(import_module(module), attribute) if colon else (name,)
        values += get_args(listed) or list(listed)
    return values


@cache
def _plain(annotation: str, option: Option | None) -> str:
    """Return a field's annotation as signatures show it: its type, and ``| str`` where its option reads texts."""
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
    """Return a finite number above 0, also from a text such as '$20' or '110M'.

    Args:
        value: a number or its text.
        name: of the option, for errors.
        unit: what it counts, for errors. 'parameters', 'samples' and 'FLOPs' allow suffixes such as M, 'USD...' allows
            $.

    Raises:
        BadInput: the value is no number, not finite, or not above 0.
    """
    written = COUNT if unit in _COUNTED else MONEY if unit.startswith("USD") else NUMBER
    number = quantity(str(value), written, f"`{name}`")
    if number <= 0:
        example = setting(name, "110M") if unit == "parameters" else f"`{name}=5`"
        raise BadInput(f"`{name}` must be a positive number of {unit}, got {value}.", hint=f"for example {example}")
    return number


def within(value: Any, name: str, least: float, most: float, *, example: str, written: Unit | None = None) -> Any:
    """Return a number that is from ``least`` to ``most``, a whole one where ``least`` is an int.

    Args:
        value: a number or its text; 8.0 is a whole number, and is returned as 8.
        name: of the option, for errors.
        least: smallest value allowed.
        most: largest value allowed.
        example: of a value, for the hint.
        written: unit in which a text is read; None: a whole number such as '128', '10k' or '1_000'.

    Raises:
        BadInput: the value is no such number, or outside the limits.
    """
    number = quantity(value, written or WHOLE, f"`{name}`") if isinstance(value, str) else value
    kind: Any
    kind, rule = (Integral, "a whole number") if isinstance(least, int) else (Real, "a number")
    if kind is Integral and isinstance(number, float) and number.is_integer():
        # A float rounds what has more than fifteen digits, as seeds may have.
        number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else int(number)
    if isinstance(number, kind):
        if least <= number <= most:
            return number
        limits = [f"{limit / 1e12:g} TB" if written is SIZE else f"{limit:,}" for limit in (least, most)]
        rule = f"at least {limits[0]}" if number < least else f"at most {limits[1]}"
    raise BadInput(f"`{name}` must be {rule}, got {value}.", hint=f"for example `{name}={example}`")


_ZONE = re.compile(r"[a-z]{2}(-[a-z]+)+-\d[a-f]|[a-z]+\d-az\d")
"""Names and ids of availability zones. No region has more than six (AWS, "Regions and Availability Zones", 2026)."""


def zone(given: str, name: str) -> str:
    """Return the name or the id of an availability zone as given, if it is spelled as AWS spells them.

    Args:
        given: such as ``us-east-1a`` or ``use1-az2``; whether it exists is not checked.
        name: of the option, for errors.

    Raises:
        BadInput: the text is spelled otherwise.
    """
    if _ZONE.fullmatch(given) is None:
        raise BadInput(
            f"`{name}` must be a region and a letter from a to f, or a zone's id, got {given!r}.",
            hint=f"for example {setting(name, 'us-east-1a')}",
        )
    return given


def duration_s(given: str | float, name: str) -> float:
    """Return seconds above 0 from a text with a unit ('90s', '1h30m') or from a number of seconds.

    Args:
        given: the option's value.
        name: of the option, for errors.

    Raises:
        BadInput: the value is no length of time, not above 0, over a hundred years, or a text without a unit.
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
    """Return names as a tuple, from a sequence or from a text with commas between them; empty names are left out.

    Args:
        given: the names; an empty sequence gives an empty tuple.
        name: of the option, for errors.

    Raises:
        BadInput: a text does not close a parenthesis, or names nothing: an empty one, as of a shell's variable that is
            not set, would be no limit at all.
    """
    parts = split(given, ",;", f"`{name}`") if isinstance(given, str) else given
    chosen = tuple(part.strip() for part in parts if part.strip())
    if isinstance(given, str) and not chosen:
        raise BadInput(f"`{name}` must name at least one, got {given!r}.", hint=f"name one, or leave `{name}` out")
    return chosen
