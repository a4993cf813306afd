"""Training on samples as they arrive: where they come from, what becomes of those that wait, and how batches follow."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from hetopt.core.artifact import Record

SourceName = Literal["replay", "redis"]
"""``replay``: the task's own data, at set rates. ``redis``: Redis Streams, whoever fills them."""

BufferPolicy = Literal["persistence", "truncation", "bounded_age"]
"""What becomes of samples that arrived and were not taken: all wait, only a batch of the newest does, or those younger
than a set age do."""


class Stream(Record):
    """The stream of each worker, and what a batch has to do with it.

    Attributes:
        source: where samples come from.
        rates: ``replay``: samples a second that arrive at each worker, in rank order.
        buffer: ``replay``: what becomes of samples that wait. In Redis they wait in the broker, and whoever writes them
            says how many it keeps.
        max_age_s: of samples that wait, under ``bounded_age``.
        url: ``redis``: the broker. A password is never part of it: it is read from ``HETOPT_REDIS_PASSWORD``.
        key: ``redis``: streams are called ``KEY:0``, ``KEY:1`` and so on.
        streams: ``redis``: how many there are; absent: one a worker. Worker r of N reads streams r, r + N and so on.
        group: ``redis``: the consumer group. Another run that is to see the same samples has another.
        delete_trained: ``redis``: samples are deleted from the broker once a checkpoint holds what they taught.
        batch_interval_s: under the batch policy ``rate`` a batch is what arrives in this time. The paper's is 1 s.
        min_batch: samples of a worker, at least.
        max_batch: at most.
        learning_rate: how it follows the batch: the run's is for the plan's global batch.
        max_learning_rate_scale: it follows no further than by this factor, up or down. The paper has no cap, and loses
            accuracy by it.
        patience_s: a stream that gives no batch for so long ends the run.
    """

    source: SourceName = "replay"
    rates: tuple[PositiveFloat, ...] = ()
    buffer: BufferPolicy = "persistence"
    max_age_s: PositiveFloat = 10.0
    url: str = "redis://127.0.0.1:6379/0"
    key: str = Field(default="hetopt", min_length=1)
    streams: PositiveInt | None = None
    group: str = Field(default="hetopt", min_length=1)
    delete_trained: bool = False
    batch_interval_s: PositiveFloat = 1.0
    min_batch: PositiveInt = 8
    max_batch: PositiveInt = 1024
    learning_rate: Literal["fixed", "linear", "sqrt"] = "linear"
    max_learning_rate_scale: float = Field(default=4.0, ge=1)
    patience_s: PositiveFloat = 60.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_batch > self.max_batch:
            raise ValueError(f"the least batch, {self.min_batch}, must not exceed the largest, {self.max_batch}")
        if self.source == "replay" and not self.rates:
            raise ValueError("a replay needs rates, in samples a second")
        if self.source == "redis":
            self._check_broker()
        return self

    def _check_broker(self) -> None:
        place = urlsplit(self.url)
        if place.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("the broker's address begins with redis://, rediss:// or unix://")
        if place.password is not None:
            raise ValueError("a password must not stand in the address, give it as HETOPT_REDIS_PASSWORD")
        if self.rates:
            raise ValueError("rates are those of a replay; samples come out of Redis as they were written")
        if self.buffer != "persistence":
            raise ValueError("in Redis whoever writes samples says how many are kept (XADD MAXLEN), not the run")

    def batch(self, rate_per_s: float) -> int:
        """Samples of a worker whose stream brings so many a second: ``b = clip(S t, min, max)`` (arXiv 2301.08897)."""
        return max(self.min_batch, min(self.max_batch, round(rate_per_s * self.batch_interval_s)))


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
