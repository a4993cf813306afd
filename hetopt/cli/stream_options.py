"""From what a person types about streams to what the run is told.

--stream 'replay(40/80/160)'                     the task's data, at so many samples a second for each worker
--stream 'replay(uniform=38/24,factor=4)'        rates drawn by mean and standard deviation, all times 4
--stream 'redis(redis://10.0.0.5:6379/0,key=cam)'  streams cam:0, cam:1, ... of a broker
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import ValidationError

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import BatchPolicy, RunSpec
from hetopt.core.stream import Stream, draw_rates, scaled

_EXAMPLE = "for example --stream 'replay(uniform=38/24)' or --stream 'redis(redis://127.0.0.1:6379/0)'"

_FIELDS = {
    "buffer": "buffer",
    "age": "max_age_s",
    "interval": "batch_interval_s",
    "min": "min_batch",
    "max": "max_batch",
    "lr": "learning_rate",
    "lr_cap": "max_learning_rate_scale",
    "patience": "patience_s",
    "key": "key",
    "streams": "streams",
    "group": "group",
    "delete": "delete_trained",
}
_OF_REDIS = ("key", "streams", "group", "delete")
_OF_REPLAY = ("buffer", "age")
_DRAWN = ("uniform", "normal")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What was typed.

    Attributes:
        source: as of `Stream`.
        fields: of `Stream`, as text.
        rates: ``replay``: as given, in samples a second.
        drawn: or how they are drawn: distribution, mean and standard deviation.
        factor: on all of them.
    """

    source: Literal["replay", "redis"]
    fields: dict[str, str]
    rates: tuple[float, ...] = ()
    drawn: tuple[Literal["uniform", "normal"], float, float] | None = None
    factor: float = 1.0


def parse_stream(text: str | None) -> StreamOptions | None:
    """Read the option.

    Raises:
        BadInput: a source or key that is unknown, or a value that cannot be.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None or found[1] not in ("replay", "redis"):
        raise BadInput(f"--stream {text!r} names no source of samples.", hint=_EXAMPLE)
    source = cast(Literal["replay", "redis"], found[1])
    items = [item.strip() for item in (found[2] or "").split(",") if item.strip()]
    plain = [item for item in items if "=" not in item]
    split = [item.partition("=") for item in items if "=" in item]
    pairs = {key.strip(): value.strip() for key, _, value in split}
    if len(plain) > 1:
        raise BadInput(f"--stream {text!r} says {plain[0]!r} and {plain[1]!r}.", hint=_EXAMPLE)
    known = (*_FIELDS, *_DRAWN, "factor")
    foreign = (*_OF_REDIS,) if source == "replay" else (*_OF_REPLAY, *_DRAWN, "factor")
    for key in pairs:
        if key not in known or key in foreign:
            choices = ", ".join(sorted(set(known) - set(foreign)))
            raise BadInput(f"--stream {source} has no {key!r}.", hint=f"it has {choices}")
    fields = {_FIELDS[key]: value for key, value in pairs.items() if key in _FIELDS}
    if source == "redis":
        return StreamOptions(source=source, fields={**fields, **({"url": plain[0]} if plain else {})})
    drawn = [name for name in _DRAWN if name in pairs]
    if len(drawn) + len(plain) != 1:
        raise BadInput("--stream replay needs rates, said in one way.", hint=_EXAMPLE)
    factor = _numbers(pairs.get("factor", "1"), 1)[0]
    if plain:
        return StreamOptions(source=source, fields=fields, rates=_numbers(plain[0], None), factor=factor)
    mean, deviation = _numbers(pairs[drawn[0]], 2)
    distribution = cast(Literal["uniform", "normal"], drawn[0])
    return StreamOptions(source=source, fields=fields, drawn=(distribution, mean, deviation), factor=factor)


def on_stream(wish: StreamOptions, run: RunSpec, policy: BatchPolicy | None) -> RunSpec:
    """The run on that stream; batches follow it where no other policy was asked for.

    In a rehearsal, whose computation is slowed down by a factor, samples arrive slower by the same.

    Raises:
        BadInput: it does not go with the run.
    """
    factor = 1.0 if run.miniature is None else run.miniature.time_factor
    if run.miniature is not None and wish.source == "redis":
        raise BadInput(
            "hosts of a rehearsal reach nobody but each other, and no Redis.", hint="use --on local, or a replay"
        )
    if wish.drawn is None:
        rates = wish.rates
    else:
        distribution, mean, deviation = wish.drawn
        rates = draw_rates(distribution, mean, deviation, workers=len(run.workers), seed=run.seed)
    try:
        stream = Stream.model_validate(
            {**wish.fields, "source": wish.source, "rates": scaled(rates, wish.factor / factor)}, strict=False
        )
        times = {"batch_interval_s": stream.batch_interval_s * factor, "max_age_s": stream.max_age_s * factor}
        return RunSpec.model_validate(
            {
                **run.model_dump(),
                "stream": {**stream.model_dump(), **times},
                "batch_policy": policy or "rate",
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "stream")
        said = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"--stream: {where + ': ' if where else ''}{said}.", hint=_EXAMPLE) from None


def remark(run: RunSpec) -> str:
    """What to know of the prediction of a run on a stream."""
    stream = run.stream
    assert stream is not None
    if not stream.rates:
        return "the prediction is for samples that are there already; on a stream steps also wait for them"
    slowest = min(stream.rates)
    if run.batch_policy == "rate":
        least_s = max(stream.batch(rate) / rate for rate in stream.rates)
    else:
        least_s = max(worker.local_batch_size / rate for worker, rate in zip(run.workers, stream.rates, strict=True))
    return (
        f"streams bring {slowest:.4g} to {max(stream.rates):.4g} samples/s to a worker, so a step takes at least "
        f"{least_s:.3g} s; the prediction is for samples that are there already"
    )


def _numbers(text: str, count: int | None) -> tuple[float, ...]:
    """Positive numbers, with slashes between them."""
    try:
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        numbers = ()
    if not numbers or (count is not None and len(numbers) != count) or not all(0 < n < float("inf") for n in numbers):
        wanted = {None: "positive numbers", 1: "a positive number", 2: "a mean and a standard deviation"}[count]
        raise BadInput(f"--stream needs {wanted} where it says {text!r}.", hint=_EXAMPLE)
    return numbers
