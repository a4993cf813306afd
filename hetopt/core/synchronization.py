"""When workers put together what they have learned, which samples each of them sees, and which they hand on: the
records, and how a person writes them.

selsync(0.3)               local-sgd(8, outer_rate=0.7)       labels(1)
selsync(auto, share=0.2)   fedavg(0.5, 2, stretch=1.5)
diloco(50)                 local-sgd(50, outer_rate=0.7, outer_momentum=0.9), in a word
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from hetopt.core.artifact import Record, RecordLeavingOut
from hetopt.core.grammar import FRACTION, Unit, arguments, call, record, written
from hetopt.core.plain_text import known

SyncName = Literal["bsp", "local-sgd", "fedavg", "selsync"]
"""Each is explained in `hetopt.trainer.sync.synchroniser`."""

Votes = Literal["any", "majority", "quantile"]
"""How many workers have to ask for a synchronisation: one, more than half, or a stated part of them."""

PartitionName = Literal["global", "shards", "seldp", "labels"]
"""Each is explained in `hetopt.trainer.data.cursor`."""


POLICIES: Mapping[SyncName, str] = MappingProxyType(
    {
        "bsp": "gradients are summed in every step",
        "local-sgd": "parameters are averaged every H steps",
        "fedavg": "parameters of a part of the workers are averaged some times an epoch",
        "selsync": "parameters are averaged while gradients change (SelSync)",
    }
)


class _Named(RecordLeavingOut):
    """A choice by name; a file says only what differs from the defaults."""

    WRITTEN = ("name",)


class Synchronization(_Named):
    """The synchronization of the workers' models: by gradients in every step, or by parameters now and then.

    Attributes:
        name: of the policy.
        every_steps: ``local-sgd``: parameters are averaged after so many steps (H).
        participants: ``fedavg``: part of the workers whose parameters enter an average (C); all of them receive it.
        every_epochs: ``fedavg``: parameters are averaged after so many passes over the data (E).
        delta: ``selsync``: relative change of a worker's gradient norm from which it votes to synchronise; ``auto``:
            steered so that ``synchronised_share`` holds; ``never``: votes are counted in vain.
        synchronised_share: ``selsync(auto)``: part of the steps that are to end in a synchronisation.
        votes: of whom it takes how many.
        quorum: ``votes = quantile``: the part of the workers that has to vote for it.
        max_local_steps: ``selsync``: no more steps in a row without a synchronisation; absent: any number.
        window: ``selsync`` with a fixed delta: first steps, each of which synchronises while the mean of the norm
            settles. Under ``auto`` averages become rarer from the first step on.
        smoothing: ``selsync``: weight of the newest squared norm in that moving mean.
        vote_lag: steps between a vote and the synchronisation that it asks for. 1: votes travel while the next step is
            computed; 0: every step waits for them, as published.
        outer_rate: what part of the way to the average is gone at a synchronisation (r); 1: all of it.
        outer_momentum: Nesterov's, of those steps (m): DiLoCo has 0.7 and 0.9.
        stretch: epochs that the task's schedule of the learning rate takes for one of its own. Workers that average now
            and then need more steps than those that sum every gradient, and a rate that falls as early ends training
            before they were taken.
    """

    name: SyncName = "bsp"
    every_steps: PositiveInt = 8
    participants: float = Field(default=1.0, gt=0, le=1)
    every_epochs: PositiveFloat = 0.25
    delta: NonNegativeFloat | Literal["auto", "never"] = 0.3
    synchronised_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    votes: Votes = "any"
    quorum: float = Field(default=0.25, gt=0, le=1)
    max_local_steps: PositiveInt | None = None
    window: PositiveInt = 25
    smoothing: float = Field(default=0.16, gt=0, le=1)
    vote_lag: int = Field(default=1, ge=0, le=1)
    outer_rate: PositiveFloat = 1.0
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    stretch: PositiveFloat = 1.0

    @property
    def is_local(self) -> bool:
        """True where workers apply their own gradients, and average parameters."""
        return self.name != "bsp"


class Partition(_Named):
    """The rule for which samples a worker may see.

    Attributes:
        name: of the rule.
        labels: ``labels``: how many labels a worker's samples have.
    """

    name: PartitionName = "global"
    labels: PositiveInt = 1


class Injection(Record):
    """Samples that workers hand on to each other, so that all see something of what only some of them have.

    In every step ``ceil(workers * N)`` of the N workers, drawn anew, give the others a copy of a part of their samples.

    Attributes:
        workers: part of the workers that give (alpha).
        samples: part of the samples of a step that a giver gives (beta).
    """

    workers: float = Field(gt=0, le=1)
    samples: float = Field(gt=0, le=1)


DILOCO = "diloco"
"""Local SGD with the outer step of arXiv 2311.08105, whose paper found rate and momentum."""

PARTITIONS = ("global", "shards", "seldp", "labels")

_FIRST: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every",),
    "fedavg": ("participants", "epochs"),
    "selsync": ("delta",),
    "labels": ("labels",),
}
"""What may be said without its key."""

_AVERAGED = ("outer_rate", "outer_momentum", "stretch")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every", *_AVERAGED),
    "fedavg": ("participants", "epochs", *_AVERAGED),
    "selsync": ("delta", "share", "votes", "quorum", "max_local", "window", "smoothing", "vote_lag", *_AVERAGED),
    "labels": ("labels",),
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
    """Parse the synchronization of workers, such as ``local-sgd(8)``.

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
    """Parse the rule for which samples a worker sees; arguments as of `parse_sync`.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    item = call(text, option)
    name = known(item.name, PARTITIONS, "partition")
    return record(Partition, item, _fields(name), first=_FIRST.get(name, ()), defaults={"name": name})


def parse_injection(text: str, *, option: str = "`inject`") -> Injection:
    """Parse ``ALPHA, BETA``: the part of the workers that hands on samples, and the part of its samples.

    Raises:
        BadInput: not two fractions.
    """
    keys = {"workers": "workers", "samples": "samples"}
    return record(Injection, arguments(text, option), keys, first=keys, units=dict.fromkeys(keys, FRACTION))


def spell_sync(sync: Synchronization) -> str:
    """Format a synchronization as `parse_sync` reads it."""
    return _spell(sync, sync.name)


def spell_partition(partition: Partition) -> str:
    """Format a partition as `parse_partition` reads it."""
    return _spell(partition, partition.name)


def _fields(name: str) -> dict[str, str]:
    keys = {key: _FIELDS.get(key, key) for key in _KEYS.get(name, ())}
    return {**keys, **{field: field for field in keys.values()}}


def _spell(said: Record, name: str) -> str:
    first, defaults = _FIRST.get(name, ()), type(said).model_fields
    values = {key: getattr(said, _FIELDS.get(key, key)) for key in _KEYS.get(name, ())}
    changed = {key: value for key, value in values.items() if value != defaults[_FIELDS.get(key, key)].default}
    return written(name, [values[key] for key in first], {k: v for k, v in changed.items() if k not in first})
