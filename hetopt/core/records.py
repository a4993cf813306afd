"""The standard library's dataclasses, with methods that frozen ones share, in place of six compiled for each.

A command imports 160 of them and makes records of 100. Shared methods alone took `hetopt estimate` from 0.77 to 0.68 s
of processor time (medians of 7, interleaved). All else is the standard library's: fields, `replace`, `asdict`,
inheritance, `FrozenInstanceError`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import (
    KW_ONLY as KW_ONLY,
    MISSING as MISSING,
    FrozenInstanceError,
    asdict as asdict,
    field as field,
    fields as fields,
    replace as replace,
)
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(record: type | None = None, /, **options: bool) -> Any:
        """Return what `dataclasses.dataclass` does; frozen, keyword-only classes get methods that they share."""
        is_usual = options == {"frozen": True, "kw_only": True}
        return _with_shared if is_usual else dataclasses.dataclass(record, **options)


def _with_shared(record: Any) -> Any:
    every = fields(dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(record))
    names = {known.name for known in every}
    usual = {known.name: known.default for known in every if known.default is not MISSING}
    makers = {known.name: known.default_factory for known in every if known.default_factory is not MISSING}
    check = getattr(record, "__post_init__", callable)
    key = attrgetter("__class__", *(known.name for known in every if known.compare))

    def init(self: Any, /, **given: Any) -> None:
        values = self.__dict__
        values.update(usual)
        values.update(given)
        for name in makers and makers.keys() - given.keys():
            values[name] = makers[name]()
        if values.keys() != names:
            raise TypeError(f"{record.__name__}() takes {sorted(names)}, got {sorted(given)}")
        check(self)

    def equal(self: Any, other: object) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def shown(self: Any) -> str:
        parts = ", ".join(f"{known.name}={getattr(self, known.name)!r}" for known in every if known.repr)
        return f"{type(self).__qualname__}({parts})"

    shared = {"__init__": init, "__eq__": equal, "__hash__": lambda self: hash(key(self)), "__repr__": shown}
    for name, method in {**shared, "__setattr__": _refuse, "__delattr__": _refuse}.items():
        if name not in vars(record) or (name == "__hash__" and record.__hash__ is None):
            setattr(record, name, method)
    return record


def _refuse(self: object, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")
