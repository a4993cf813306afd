"""From what a person types about synchronisation, partition and injection to what the run is told.

    --sync selsync(0.3)                   --partition labels(1)          --inject 0.25,0.25
    --sync selsync(auto,share=0.2)        --partition dirichlet(0.5)
    --sync local-sgd(8,momentum=average)  --partition seldp

Each is a name, and in parentheses its values: the first ones without their keys, in the order of `_FIRST`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from hetopt.optimizer.local_steps import communication
from hetopt.optimizer.plan import Plan
from hetopt.profiler.artifact import Record
from hetopt.profiler.errors import BadInput
from hetopt.trainer.control.sync.choose import POLICIES, why_not_local
from hetopt.trainer.exchange.composition import known
from hetopt.trainer.spec import Compression, RunSpec
from hetopt.trainer.synchronisation import Injection, Partition, Synchronisation

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
_AVERAGED = ("momentum", "buffers")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every_steps", *_AVERAGED),
    "fedavg": ("participants", "every_epochs", *_AVERAGED),
    "ssp": ("staleness",),
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


@dataclass(frozen=True, kw_only=True)
class SyncWish:
    """What was typed; None for what was not."""

    sync: Synchronisation | None = None
    partition: Partition | None = None
    injection: Injection | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was typed."""
        return self == SyncWish()


def parse_wish(sync: str | None, partition: str | None, inject: str | None) -> SyncWish:
    """Read the three options.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    return SyncWish(
        sync=None if sync is None else _read(sync, "--sync", tuple(POLICIES), "synchronisation", Synchronisation),
        partition=None if partition is None else _read(partition, "--partition", PARTITIONS, "partition", Partition),
        injection=None if inject is None else parse_injection(inject),
    )


def decide(wish: SyncWish, run: RunSpec, *, exchange_was_asked: bool) -> RunSpec:
    """The run with the wish in it. A plan's own choice of compression gives way to workers that send no gradients.

    Args:
        wish: what was typed.
        run: as planned, with what else was typed.
        exchange_was_asked: whether compression, ratio policy or collective was typed, too.

    Raises:
        BadInput: the wish does not go with the rest of the run.
    """
    changes = {"sync": wish.sync, "partition": wish.partition, "injection": wish.injection}
    run = run.model_copy(update={name: value for name, value in changes.items() if value is not None})
    if not run.sync.is_local:
        return run
    if wish.sync is not None and not exchange_was_asked:
        plain = {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"}
        run = run.model_copy(update=plain)
    reason = why_not_local(run)
    if reason is not None:
        raise BadInput(reason, hint="use --sync bsp, or leave the other out")
    return run


def into_plan(wish: SyncWish, plan: Plan) -> Plan:
    """The plan, to be run as wished, and what that does to its prediction.

    Raises:
        BadInput: the wish does not go with the rest of the run.
    """
    if wish.is_empty:
        return plan
    run = decide(wish, plan.run, exchange_was_asked=False)
    if run.sync.is_local and not run.is_local:
        alone = f"The plan has one worker, which {run.sync.name} changes nothing for."
        return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, alone)})
    if not run.is_local:
        return plan.model_copy(update={"run": run})
    told = communication(run.sync, dataset_size=plan.profile.job.dataset_size, global_batch_size=run.global_batch_size)
    sentence = f"{told.note} Cluster, time and cost are those of the plan without it, which communicates in every step."
    return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, sentence)})


def parse_injection(text: str) -> Injection:
    """``ALPHA,BETA``: which part of the workers gives which part of its samples.

    Raises:
        BadInput: not two fractions.
    """
    values = [value.strip() for value in text.split(",")]
    if len(values) != 2:
        raise BadInput(
            f"--inject takes two fractions, not {text!r}.",
            hint="for example --inject 0.25,0.25: a quarter of the workers give a quarter of their samples",
        )
    return _validated(Injection, dict(zip(("workers", "samples"), values, strict=True)), "--inject")


def spell_sync(sync: Synchronisation) -> str:
    """The synchronisation as `parse_wish` reads it."""
    return _spell(sync, sync.name)


def spell_partition(partition: Partition) -> str:
    """The partition as `parse_wish` reads it."""
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
        key = str(first["loc"][0])
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise BadInput(
            f"{option}: {key} cannot be {values[key]!r}: {reason}.", hint="see hetopt launch --help"
        ) from None
