"""How a launch changes the run of its plan: what is exchanged, when workers synchronize, and streams of samples."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from hetopt.api.options import Changes
from hetopt.core.artifact import AnyRecord, faults
from hetopt.core.comm.composition import AUTO, METHODS, why_not_controlled
from hetopt.core.comm.compression_text import IDENTITY
from hetopt.core.errors import BadInput
from hetopt.core.grammar import DURATION, NUMBER, call, fields, quantity, split
from hetopt.core.run_rules import check_ratio_controller, checked, why_not_local, why_not_sharded
from hetopt.core.run_spec import WEIGHS_WAYS, Compression, RunSpec, Stream


def exchanged(changes: Changes, run: RunSpec) -> RunSpec:
    """Return a run's spec with a launch's compression, ratio policy and collective; unchanged where none is asked for.

    With ``compression="auto"`` the run itself chooses compressor, ratio and collective, but for a collective that is
    named. A compression without a ratio policy sets the policy ``fixed``. A policy that chooses among whole options
    drops the plan's compression where that only rounds.

    Args:
        changes: changes of the launch; a field that is None keeps the plan's choice.
        run: spec of the plan.

    Raises:
        BadInput: two changes contradict each other, or compressor, memory, collective and ratio policy do not go
            together.
    """
    asked, named = changes.compression, changes.collective
    if asked is None and changes.ratio_policy is None and named is None:
        return run
    policy, settings = changes.ratio_policy or (None, {})
    if asked == AUTO and policy not in (None, AUTO):
        raise BadInput(
            f'`compression="auto"` decides the ratio itself, and `ratio_policy={policy}` would decide it as well.',
            hint=f"name a compressor as well, for example `compression=topk(0.01)` and `ratio_policy={policy}`",
        )
    if policy is None and asked is not None:
        policy = AUTO if asked == AUTO else "fixed"
    if isinstance(asked, Compression) and asked.collective != AUTO:
        if named not in (None, AUTO, asked.collective):
            raise BadInput(
                f"`compression` asks for the collective {asked.collective} and `collective` for {named}.",
                hint="name one of them",
            )
        named = named or asked.collective
    if named is None and policy == AUTO:
        named = AUTO
    if policy is None:
        policy, settings = run.ratio_policy, run.ratio_settings
    compression = asked if isinstance(asked, Compression) else run.compression
    if compression is not asked and policy in WEIGHS_WAYS and not METHODS[compression.name].by_ratio:
        # Who weighs whole ways to exchange rounds as well: a plan that only rounds leaves it everything.
        compression = Compression()
    update = {"ratio_policy": policy, "ratio_settings": settings}
    if named is not None:
        update["collective_policy"] = "cheapest" if named == AUTO else "fixed"
    if named not in (None, AUTO):
        compression = compression.model_copy(update={"collective": named})
    checked(compression)
    changed = run.model_copy(update={**update, "compression": compression})
    _check_exchange(changed)
    return changed


def _check_exchange(run: RunSpec) -> None:
    """Refuse a ratio policy that cannot decide for the run's compressor, collective or ratio.

    A policy that weighs whole options brings a compressor itself where the plan has none.

    Raises:
        BadInput: the policy has nothing to decide, or cannot be with the collective or the ratio.
    """
    compression, policy = run.compression, run.ratio_policy
    # Who weighs whole ways to exchange brings a compressor where the plan names none.
    if policy not in WEIGHS_WAYS or compression.name != IDENTITY:
        reason = why_not_controlled(compression.name, policy, compression.collective)
        if reason is not None:
            less = "name a compressor that can send less, for example `compression=topk(0.01)`"
            raise BadInput(reason, hint=f"{less}, and leave `collective` out, or say all_gather")
    if policy not in WEIGHS_WAYS:
        check_ratio_controller(policy, compression.ratio)


def synchronized(changes: Changes, run: RunSpec) -> RunSpec:
    """Return a run's spec with a launch's synchronization, partition, data injection and sharding.

    Where the new synchronization averages parameters and the launch names no compression, the plan's own compression is
    dropped.

    Args:
        changes: changes of the launch; a field that is None keeps the plan's choice.
        run: spec of the plan.

    Raises:
        BadInput: sharding, or averages of parameters, do not go with the run's other settings.
    """
    update = {"sync": changes.sync, "partition": changes.partition, "injection": changes.inject, "shard": changes.shard}
    run = run.model_copy(update={name: value for name, value in update.items() if value is not None})
    chooses = changes.sync is not None and not (changes.compression or changes.ratio_policy or changes.collective)
    if run.shard not in (None, "none") and (reason := why_not_sharded(run)) is not None:
        raise BadInput(reason, hint='leave it out, or choose `shard="none"`')
    if (not run.is_local and changes.sync is None) or not run.sync.is_local:
        return run
    if chooses:
        plain = {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"}
        run = run.model_copy(update=plain)
    reason = why_not_local(run)
    if reason is not None:
        raise BadInput(reason, hint='choose `sync="bsp"`, or leave the other out')
    return run


_EXAMPLE = "for example `stream=replay(40/80)`"

_KEYS = {
    **{name: name for name in ("rates", "factor", "buffer")},
    "age": "max_age_s",
    "interval": "batch_interval_s",
    "min": "min_batch",
    "max": "max_batch",
    "lr": "learning_rate",
    "lr_cap": "max_learning_rate_scale",
    "patience": "patience_s",
}
_SECONDS = ("batch_interval_s", "max_age_s", "patience_s")


def parse_stream(text: str) -> Stream:
    """Parse arrival rates: ``replay(40/80, factor=4)`` gives two workers the task's data at 160 and 320 samples/s.

    Other keys are ``buffer``, ``age``, ``interval``, ``min``, ``max``, ``lr``, ``lr_cap`` and ``patience``, see
    `Stream`; ``age``, ``interval`` and ``patience`` are durations.

    Raises:
        BadInput: the source is not ``replay``, rates are missing, a key is unknown, or a value is out of its range.
    """
    item = call(text, "`stream`")
    if item.name != "replay":
        raise BadInput(f"`stream` must be a replay of the task's data, got {text!r}.", hint=_EXAMPLE)
    given = fields(item, _KEYS, first=("rates",))
    if "rates" not in given:
        raise BadInput("`stream` of replay needs rates.", hint=_EXAMPLE)
    factor = quantity(given.pop("factor", "1"), NUMBER, "`stream`: factor")
    each = split(given.pop("rates"), "/", "`stream`")
    rates = tuple(factor * quantity(part, NUMBER, "`stream`: each of its rates") for part in each)
    seconds = {name: quantity(given[name], DURATION, f"`stream`: {name}") for name in _SECONDS if name in given}
    return _valid(Stream, {**given, **seconds, "rates": rates})


def on_stream(stream: Stream, run: RunSpec, policy: str | None) -> RunSpec:
    """Return a run's spec with samples arriving at ``stream``'s rates.

    In a rehearsal, samples arrive more slowly by its time factor, as computing does.

    Args:
        stream: rates and settings as they were given, for the real cluster.
        run: spec of the run.
        policy: batch policy of the run; None: ``rate``, batches follow the rates.

    Raises:
        BadInput: the stream does not go with the run, such as another number of rates than workers.
    """
    factor = 1.0 if run.miniature is None else run.miniature.time_factor
    slowed = {
        "rates": tuple(rate / factor for rate in stream.rates),
        "batch_interval_s": stream.batch_interval_s * factor,
        "max_age_s": stream.max_age_s * factor,
    }
    changes = {"stream": {**stream.model_dump(), **slowed}, "batch_policy": policy or "rate"}
    return _valid(RunSpec, {**run.model_dump(), **changes})


def _valid(kind: type[AnyRecord], values: Mapping[str, object]) -> AnyRecord:
    """Return ``values`` as a record of class ``kind``, a part of the option `stream`.

    Raises:
        BadInput: the first value that cannot be, as a fault of `stream`.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"`stream`: {faults(error)[0].removeprefix('stream.')}.", hint=_EXAMPLE) from None
