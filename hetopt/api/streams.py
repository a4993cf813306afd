"""Streams of samples, as people describe them and as the run is told.

replay(40/80/160)                      the task's data, at so many samples a second for each worker
replay(uniform=38/24, factor=4)        rates drawn by mean and standard deviation, all times 4
redis(redis://10.0.0.5:6379/0, key=cam)  streams cam:0, cam:1, ... of a broker
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import ValidationError

from hetopt.core.artifact import faults
from hetopt.core.errors import BadInput
from hetopt.core.grammar import DURATION, NUMBER, call, fields, quantity, split
from hetopt.core.run_spec import BatchPolicy, RunSpec, Stream
from hetopt.optimizer.plan import Prediction, Range

_EXAMPLE = "for example `stream=replay(uniform=38/24)` or `stream=redis(redis://127.0.0.1:6379/0)`"

_COMMON = {
    "interval": "batch_interval_s",
    "min": "min_batch",
    "max": "max_batch",
    "lr": "learning_rate",
    "lr_cap": "max_learning_rate_scale",
    "patience": "patience_s",
}
_DRAWN = ("uniform", "normal")
_KEYS = {
    "replay": {
        "rates": "rates",
        **{name: name for name in (*_DRAWN, "factor")},
        "buffer": "buffer",
        "age": "max_age_s",
        **_COMMON,
    },
    "redis": {
        "url": "url",
        "key": "key",
        "streams": "streams",
        "group": "group",
        "delete": "delete_trained",
        **_COMMON,
    },
}
_SECONDS = ("batch_interval_s", "max_age_s", "patience_s")


@dataclass(frozen=True, kw_only=True)
class StreamWish:
    """A stream as it was asked for, before the workers that it is for are known.

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


def parse_stream(text: str) -> StreamWish:
    """Return the stream that a text describes.

    Raises:
        BadInput: a source or key that is unknown, or a value that cannot be.
    """
    item = call(text, "`stream`")
    if item.name not in _KEYS:
        raise BadInput(f"`stream` must name a source of samples, replay or redis, got {text!r}.", hint=_EXAMPLE)
    source = cast(Literal["replay", "redis"], item.name)
    said = fields(item, _KEYS[source], first=("rates" if source == "replay" else "url",))
    for field in _SECONDS:
        if field in said:
            said[field] = repr(quantity(said[field], DURATION, f"`stream`: {field}"))
    if source == "redis":
        return StreamWish(source=source, fields=said)
    ways = [way for way in ("rates", *_DRAWN) if way in said]
    if len(ways) != 1:
        raise BadInput("`stream` of replay needs rates, said in one way.", hint=_EXAMPLE)
    (factor,) = _numbers(said.pop("factor", "1"), 1)
    numbers = _numbers(said.pop(ways[0]), None if ways == ["rates"] else 2)
    if ways == ["rates"]:
        return StreamWish(source=source, fields=said, rates=numbers, factor=factor)
    distribution = cast(Literal["uniform", "normal"], ways[0])
    mean, deviation = numbers
    return StreamWish(source=source, fields=said, drawn=(distribution, mean, deviation), factor=factor)


def on_stream(wish: StreamWish, run: RunSpec, policy: BatchPolicy | None) -> RunSpec:
    """The run on that stream; batches follow it where no other policy was asked for.

    In a rehearsal, whose computation is slowed down by a factor, samples arrive slower by the same.

    Raises:
        BadInput: it does not go with the run.
    """
    factor = 1.0 if run.miniature is None else run.miniature.time_factor
    if run.miniature is not None and wish.source == "redis":
        raise BadInput(
            "hosts of a rehearsal reach nobody but each other, and no Redis.", hint='choose `on="local"`, or a replay'
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
        said = faults(error)[0].removeprefix("stream.")
        raise BadInput(f"`stream`: {said}.", hint=_EXAMPLE) from None


def waiting(prediction: Prediction, run: RunSpec) -> tuple[Prediction, str]:
    """The prediction of a run on a stream, and what to know of it.

    A step takes what was predicted, or until the samples of every worker have arrived, whichever is longer:

        T_step = max(t, max_i b_i / S_i)        b_i samples of worker i, S_i its rate, samples/s

    Args:
        prediction: for samples that are there already, at the plan's local batch sizes.
        run: with its stream; the rates of Redis are not known.
    """
    stream = run.stream
    assert stream is not None
    if not stream.rates:
        return prediction, "the prediction is for samples that are there already; on a stream steps also wait for them"
    least_s = max(
        (stream.batch(rate) if run.batch_policy == "rate" else worker.local_batch_size) / rate
        for worker, rate in zip(run.workers, stream.rates, strict=True)
    )
    said = (
        f"streams bring {min(stream.rates):.4g} to {max(stream.rates):.4g} samples/s to a worker, so a step takes at "
        f"least {least_s:.3g} s, which the prediction counts"
    )
    step, steps = prediction.step_time_s, prediction.steps.value
    waits_s = Range(
        value=max(0.0, least_s - step.value), low=max(0.0, least_s - step.high), high=max(0.0, least_s - step.low)
    )
    total = _longer(prediction.total_s, steps, waits_s)
    costlier = total.value / prediction.total_s.value
    return prediction.model_copy(
        update={
            "step_time_s": _longer(step, 1.0, waits_s),
            "waiting_s": prediction.waiting_s + waits_s.value,
            "training_s": _longer(prediction.training_s, steps, waits_s),
            "total_s": total,
            "cost_usd": Range(**{name: one * costlier for name, one in prediction.cost_usd.model_dump().items()}),
        }
    ), said


def _longer(time_s: Range, steps: float, waits_s: Range) -> Range:
    """A time in which so many steps wait; quick steps wait for longer."""
    value = time_s.value + steps * waits_s.value
    low, high = time_s.low + steps * waits_s.high, time_s.high + steps * waits_s.low
    return Range(value=value, low=min(low, value), high=max(high, value))


def _numbers(text: str, count: int | None) -> tuple[float, ...]:
    """Positive numbers, with slashes between them."""
    numbers = tuple(quantity(part, NUMBER, "`stream`: each of its rates") for part in split(text, "/", "`stream`"))
    if (count is not None and len(numbers) != count) or min(numbers) <= 0:
        wanted = {None: "positive numbers", 1: "a positive number", 2: "a mean and a standard deviation"}[count]
        raise BadInput(f"`stream` needs {wanted}, got {text!r}.", hint=_EXAMPLE)
    return numbers


_LEAST_PART = 0.125
"""Of the mean rate: what a stream has at least, whatever was drawn; as the paper's least batch, 8, is of its 64."""


def draw_rates(
    distribution: Literal["uniform", "normal"], mean: float, deviation: float, *, workers: int, seed: int
) -> tuple[float, ...]:
    """Rates of the workers' streams, samples/s: drawn by mean and standard deviation, and never below 1/8 of the mean.

    The published distributions reach below zero (uniform 38/24 from -3.6), where no stream is.
    """
    generator = random.Random(f"{distribution} {mean} {deviation} {seed}")
    half_width = deviation * math.sqrt(3)
    drawn = [
        generator.uniform(mean - half_width, mean + half_width)
        if distribution == "uniform"
        else generator.gauss(mean, deviation)
        for _ in range(workers)
    ]
    return tuple(round(max(_LEAST_PART * mean, rate), 6) for rate in drawn)


def scaled(rates_per_s: Sequence[float], factor: float) -> tuple[float, ...]:
    """The same streams, all of them faster by a factor."""
    return tuple(rate * factor for rate in rates_per_s)
