"""Synchronisation, partition and injection as a person writes them, on the command line and in a script.

    selsync(0.3)            local-sgd(8,momentum=average)        labels(1)
    selsync(auto,share=0.2) fedavg(0.5,2,stretch=1.5)            dirichlet(0.5)

Each is a name, and in parentheses its values: the first ones without their keys, in the order of `_FIRST`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from hetopt.core.artifact import Record
from hetopt.core.comm.composition import known
from hetopt.core.errors import BadInput
from hetopt.core.synchronization import Injection, Partition, Synchronization
from hetopt.core.synchronization_rules import POLICIES

PARTITIONS = ("global", "shards", "seldp", "labels", "dirichlet")

_FIRST: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every_steps",),
    "fedavg": ("participants", "every_epochs"),
    "ssp": ("staleness",),
    "selsync": ("delta",),
    "labels": ("labels",),
    "dirichlet": ("alpha",),
}
_SELSYNC = ("delta", "synchronised_share", "votes", "quorum", "max_local_steps", "window", "smoothing", "vote_lag")
_AVERAGED = ("momentum", "buffers", "stretch")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every_steps", "rate_power", "fragments", *_AVERAGED),
    "fedavg": ("participants", "every_epochs", *_AVERAGED),
    "ssp": ("staleness", "stretch"),
    "selsync": (*_SELSYNC, *_AVERAGED),
    "labels": ("labels",),
    "dirichlet": ("alpha",),
}
_SHORT: Mapping[str, str] = {
    "share": "synchronised_share",
    "every": "every_steps",
    "epochs": "every_epochs",
    "max_local": "max_local_steps",
}

RecordT = TypeVar("RecordT", bound=Record)


def parse_sync(text: str, *, option: str = "`sync`") -> Synchronization:
    """When workers put together what they have learned.

    Args:
        text: as written.
        option: where, for the sentence about what cannot be.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    return _read(text, option, tuple(POLICIES), "synchronisation", Synchronization)


def parse_partition(text: str, *, option: str = "`partition`") -> Partition:
    """Which samples a worker sees; arguments as of `parse_sync`.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    return _read(text, option, PARTITIONS, "partition", Partition)


def parse_injection(text: str) -> Injection:
    """``ALPHA,BETA``: which part of the workers gives which part of its samples.

    Raises:
        BadInput: not two fractions.
    """
    values = [value.strip() for value in text.split(",")]
    if len(values) != 2:
        raise BadInput(
            f"`inject` must be two fractions with a comma between, got {text!r}.",
            hint='for example `inject="0.25,0.25"`: a quarter of the workers give a quarter of their samples',
        )
    return _validated(Injection, dict(zip(("workers", "samples"), values, strict=True)), "`inject`")


def spell_sync(sync: Synchronization) -> str:
    """The synchronisation as `parse_sync` reads it."""
    return _spell(sync, sync.name)


def spell_partition(partition: Partition) -> str:
    """The partition as `parse_partition` reads it."""
    return _spell(partition, partition.name)


def _spell(record: Record, name: str) -> str:
    first = _FIRST.get(name, ())
    fields = type(record).model_fields
    said = [f"{getattr(record, key)}" for key in first]
    for key in _KEYS.get(name, ()):
        value = getattr(record, key)
        if key not in first and value != fields[key].default:
            said.append(f"{key}={value}")
    return f"{name}({','.join(said)})" if said else name


def _read(text: str, option: str, names: tuple[str, ...], what: str, record: type[RecordT]) -> RecordT:
    found = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if found is None:
        raise BadInput(f"{option} {text!r} cannot be read.", hint="write NAME or NAME(VALUE,...), in quotes")
    name = known(found[1], dict.fromkeys(names), what)
    values: dict[str, str] = {"name": name}
    allowed, first = _KEYS.get(name, ()), list(_FIRST.get(name, ()))
    for piece in (part.strip() for part in (found[2] or "").split(",")):
        if not piece:
            continue
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            if not first:
                raise BadInput(f"{option} {text!r} has a value too many: {piece}.", hint=_hint(name))
            key, value = first.pop(0), piece
        key = _SHORT.get(key, key)
        if key not in allowed:
            raise BadInput(f"{name} has no option {key!r}.", hint=_hint(name))
        if key in values:
            raise BadInput(f"{option} {text!r} says twice what {key} is.", hint="say it once")
        values[key] = value
    return _validated(record, values, option)


def _hint(name: str) -> str:
    return f"{name} takes {', '.join(_KEYS[name])}" if name in _KEYS else f"{name} takes none"


def _validated(record: type[RecordT], values: Mapping[str, str], option: str) -> RecordT:
    try:
        return record.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"][:1].lower() + first["msg"][1:]
        if not first["loc"]:  # each value may be, and together they may not
            raise BadInput(
                f"{option}: {reason.removeprefix('value error, ')}.",
                hint="see docs/methods.md, or `hetopt launch --help`",
            ) from None
        key = str(first["loc"][0])
        raise BadInput(
            f"{option}: {key} cannot be {values[key]!r}: {reason}.", hint="see `hetopt launch --help`"
        ) from None
