"""`hetopt.core.records.dataclass` against the standard library's: one class as both make it, and what both answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given, strategies as st

from hetopt.core import records


def made(decorate: Any, **options: bool) -> Any:
    """Return a record with every kind of field, as a decorator makes it."""

    @decorate(frozen=True, **options)
    class Kept:
        a: int
        b: str = dataclasses.field(default="b", repr=False)
        c: list[int] = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            assert self.a < 10

    return Kept


def answer(ask: Callable[[], Any]) -> Any:
    """Return what a call returns, as text, or the kind of its error."""
    try:
        return repr(ask())
    except (TypeError, AssertionError, AttributeError) as error:
        return isinstance(error, dataclasses.FrozenInstanceError) or type(error)


def answers(kind: Any, values: dict[str, Any], others: dict[str, Any]) -> list[Any]:
    """Return the answers of a class to everything that is done with records."""
    one, other = partial(kind, **values), partial(kind, **others)
    return [
        *map(answer, (one, other, lambda: one() == other(), lambda: hash(one()) == hash(other()), lambda: one() == 1)),
        answer(lambda: dataclasses.asdict(one())),
        *map(answer, (lambda: setattr(one(), "a", 1), lambda: delattr(one(), "a"))),
        *map(answer, (lambda: dataclasses.replace(one(), **others), lambda: kind(*values.values()))),
    ]


VALUES = st.fixed_dictionaries(
    {}, optional={"a": st.integers(8, 10), "b": st.sampled_from("xy"), "c": st.just([1]), "d": st.none()}
)


@given(VALUES, VALUES, st.sampled_from([{}, {"kw_only": True}]))
def test_a_record_is_what_the_standard_library_makes(
    values: dict[str, Any], others: dict[str, Any], options: dict[str, bool]
) -> None:
    ours, theirs = (
        answers(made(decorate, **options), values, others) for decorate in (records.dataclass, dataclasses.dataclass)
    )
    assert ours == theirs
