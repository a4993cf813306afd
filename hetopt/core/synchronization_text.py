"""Synchronisation, partition and injection as a person writes them, on the command line and in a script.

selsync(0.3)               local-sgd(8, momentum=average)    labels(1)
selsync(auto, share=0.2)   fedavg(0.5, 2, stretch=1.5)       dirichlet(0.5)
diloco(50)                 local-sgd(50, outer_rate=0.7, outer_momentum=0.9), in a word
"""

from __future__ import annotations

from collections.abc import Mapping

from hetopt.core.artifact import Record
from hetopt.core.errors import BadInput
from hetopt.core.grammar import arguments, call, record, written
from hetopt.core.names import known
from hetopt.core.quantities import FRACTION, Unit
from hetopt.core.synchronization import Injection, Partition, Synchronization
from hetopt.core.synchronization_rules import POLICIES

DILOCO = "diloco"
"""Local SGD with the outer step of arXiv 2311.08105, whose paper found rate and momentum."""

PARTITIONS = ("global", "shards", "seldp", "labels", "dirichlet")

_FIRST: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every",),
    "fedavg": ("participants", "epochs"),
    "ssp": ("staleness",),
    "selsync": ("delta",),
    "labels": ("labels",),
    "dirichlet": ("alpha",),
}
"""What may be said without its key."""

_AVERAGED = ("momentum", "outer_rate", "outer_momentum", "buffers", "stretch")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every", "rate_power", "fragments", *_AVERAGED),
    "fedavg": ("participants", "epochs", *_AVERAGED),
    "ssp": ("staleness", "stretch"),
    "selsync": ("delta", "share", "votes", "quorum", "max_local", "window", "smoothing", "vote_lag", *_AVERAGED),
    "labels": ("labels",),
    "dirichlet": ("alpha",),
}
_FIELDS: Mapping[str, str] = {
    "share": "synchronised_share",
    "every": "every_steps",
    "epochs": "every_epochs",
    "max_local": "max_local_steps",
}
"""Of keys that are shorter than their fields; the field's own name is understood as well."""

_UNITS: Mapping[str, Unit] = dict.fromkeys(("synchronised_share", "participants", "quorum"), FRACTION)


def parse_sync(text: str, *, option: str = "`sync`") -> Synchronization:
    """When workers put together what they have learned.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    item = call(text, option)
    name = known(item.name, (*POLICIES, DILOCO), "synchronisation")
    defaults: dict[str, object] = {"name": name}
    if name == DILOCO:
        name = "local-sgd"
        defaults = {"name": name, "outer_rate": 0.7, "outer_momentum": 0.9}
    first = _FIRST.get(name, ())
    return record(Synchronization, item, _fields(name), first=first, units=_UNITS, defaults=defaults)


def parse_partition(text: str, *, option: str = "`partition`") -> Partition:
    """Which samples a worker sees; arguments as of `parse_sync`.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    item = call(text, option)
    name = known(item.name, PARTITIONS, "partition")
    return record(Partition, item, _fields(name), first=_FIRST.get(name, ()), defaults={"name": name})


def parse_injection(text: str, *, option: str = "`inject`") -> Injection:
    """``ALPHA, BETA``: which part of the workers gives which part of its samples.

    Raises:
        BadInput: not two fractions.
    """
    item = arguments(text, option)
    if len(item.values) + len(item.pairs) != 2:
        raise BadInput(
            f"{option} must be two fractions, got {text!r}.",
            hint='for example "0.25,0.25": a quarter of the workers give a quarter of their samples',
        )
    keys = {key: key for key in Injection.model_fields}
    return record(Injection, item, keys, first=keys, units=dict.fromkeys(keys, FRACTION))


def spell_sync(sync: Synchronization) -> str:
    """The synchronisation as `parse_sync` reads it."""
    return _spell(sync, sync.name)


def spell_partition(partition: Partition) -> str:
    """The partition as `parse_partition` reads it."""
    return _spell(partition, partition.name)


def _fields(name: str) -> dict[str, str]:
    keys = {key: _FIELDS.get(key, key) for key in _KEYS.get(name, ())}
    return {**keys, **{field: field for field in keys.values()}}


def _spell(said: Record, name: str) -> str:
    first, defaults = _FIRST.get(name, ()), type(said).model_fields
    values = {key: getattr(said, _FIELDS.get(key, key)) for key in _KEYS.get(name, ())}
    changed = {key: value for key, value in values.items() if value != defaults[_FIELDS.get(key, key)].default}
    return written(name, [values[key] for key in first], {k: v for k, v in changed.items() if k not in first})
