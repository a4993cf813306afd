"""How a launch changes the run of its plan: what is exchanged, when workers synchronize, and what they compute in.

Streams of samples, as people describe them and as the run is told.

replay(40/80/160)                      the task's data, at so many samples a second for each worker
replay(uniform=38/24, factor=4)        rates drawn by mean and standard deviation, all times 4

What a launch computes in, where that is pinned: as planned, predicted anew on this machine, or refused.

A plan's machines, batch sizes and budget are those of its precision. Where nothing is rented and nobody's machines are
chosen by it (`local`, `rehearsal`), another precision that the profile has steps of is predicted anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import ValidationError

from hetopt.api.options import Changes
from hetopt.core.artifact import faults
from hetopt.core.comm.composition import AUTO, METHODS, why_not_controlled
from hetopt.core.comm.compression_text import IDENTITY
from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import DURATION, NUMBER, call, fields, quantity, split
from hetopt.core.run_rules import check_ratio_controller, checked, why_not_local
from hetopt.core.run_spec import WEIGHS_WAYS, BatchPolicy, Compression, RunSpec, Stream
from hetopt.core.synchronization import Synchronization
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan, Prediction, Range
from hetopt.optimizer.step_time.local_steps import communication

PREDICTED_ANEW: tuple[Place, ...] = ("local", "rehearsal")
"""Places where nothing is rented and nobody's machines are chosen by a precision."""


def exchanged(changes: Changes, run: RunSpec) -> RunSpec:
    """Return the run with the compression, ratio policy and collective that were asked for.

    ``auto`` leaves compressor, ratio and collective to the run unless they are named.

    Raises:
        BadInput: two of them contradict each other, or compressor, memory, collective and policy do not go together.
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
    compression, policy = run.compression, run.ratio_policy
    # Who weighs whole ways to exchange brings a compressor where the plan names none.
    if policy not in WEIGHS_WAYS or compression.name != IDENTITY:
        reason = why_not_controlled(compression.name, policy, compression.collective)
        if reason is not None:
            is_able = why_not_controlled(compression.name, policy) is None
            less = "name a compressor that can send less, for example `compression=topk(0.01)`"
            raise BadInput(reason, hint="leave `collective` out, or say all_gather" if is_able else less)
    if policy not in WEIGHS_WAYS:
        check_ratio_controller(policy, compression.ratio)


def synchronized(changes: Changes, run: RunSpec) -> RunSpec:
    """Return the run with the synchronization, partition and injection that were asked for.

    A plan's own choice of compression gives way to workers that send no gradients, unless somebody chose it for this
    launch.

    Raises:
        BadInput: they do not go with the rest of the run.
    """
    update = {"sync": changes.sync, "partition": changes.partition, "injection": changes.inject}
    update = {name: value for name, value in update.items() if value is not None}
    if not update and not run.is_local:
        return run
    run = run.model_copy(update=update)
    chooses = changes.sync is not None and not (changes.compression or changes.ratio_policy or changes.collective)
    if not run.sync.is_local:
        return run
    if chooses:
        plain = {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"}
        run = run.model_copy(update=plain)
    reason = why_not_local(run)
    if reason is not None:
        raise BadInput(reason, hint='choose `sync="bsp"`, or leave the other out')
    return run


def into_plan(sync: Synchronization | None, plan: Plan) -> Plan:
    """Return the plan with this synchronization, where it was not made for it, and what that does to its prediction.

    Raises:
        BadInput: it does not go with the rest of the run.
    """
    if sync is None or sync == plan.run.sync:
        return plan
    run = synchronized(Changes(sync=sync), plan.run)
    if run.sync.is_local and not run.is_local:
        note = f"The plan has one worker, which {run.sync.name} changes nothing for."
    elif not run.is_local:
        note = ""
    else:
        job = plan.profile.job
        less = communication(run.sync, dataset_size=job.dataset_size, global_batch_size=run.global_batch_size)
        note = f"{less.note} Cluster, time and cost are those of the plan without it, which communicates in every step."
    return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, *([note] if note else []))})


def in_precision(plan: Plan, precision: str | None, on: Place) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan in another precision that its profile has steps of, and what to know of that.

    Args:
        plan: as it is to be run otherwise.
        precision: None: as planned.
        on: name of the backend.

    Raises:
        BadInput: it was not measured, does not go with the rest, or the plan is for machines of another.
    """
    planned = plan.run.precision
    if precision is None or precision == planned:
        return plan, ()
    named = setting("precision", precision)
    if on not in PREDICTED_ANEW:
        raise BadInput(
            f"{named} contradicts the plan, whose machines, batch sizes and costs are for {planned}.",
            hint=f"leave it out, or plan again with {named}",
        )
    if precision not in plan.profile.precisions:
        raise BadInput(
            f"{named} was not measured: the profile has steps in {', '.join(plan.profile.precisions)}.",
            hint=f"hetopt profile TASK --precision {precision}, on a machine that has it",
        )
    if precision == "fp16" and plan.run.is_local:
        raise BadInput(
            "fp16 needs gradients to be summed in every step, as workers agree on its loss scale there.",
            hint=f"choose {setting('precision', 'bf16')}, or {setting('sync', 'bsp')}",
        )
    run = plan.run.model_copy(update={"precision": precision})
    note = f"The plan computes in {planned}, this run in {precision} as asked: the prediction is for that."
    return plan.model_copy(update={"run": run}), (note,)


_EXAMPLE = "for example `stream=replay(uniform=38/24)`"

_DRAWN = ("uniform", "normal")
_KEYS = {
    "rates": "rates",
    **{name: name for name in (*_DRAWN, "factor")},
    "buffer": "buffer",
    "age": "max_age_s",
    "interval": "batch_interval_s",
    "min": "min_batch",
    "max": "max_batch",
    "lr": "learning_rate",
    "lr_cap": "max_learning_rate_scale",
    "patience": "patience_s",
}
_SECONDS = ("batch_interval_s", "max_age_s", "patience_s")


@dataclass(frozen=True, kw_only=True)
class StreamWish:
    """A stream as it was asked for, before the workers that it is for are known.

    Attributes:
        fields: of `Stream`, as text.
        rates: as given, in samples a second.
        drawn: or how they are drawn: distribution, mean and standard deviation.
        factor: on all of them.
    """

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
    if item.name != "replay":
        raise BadInput(f"`stream` must be a replay of the task's data, got {text!r}.", hint=_EXAMPLE)
    said = fields(item, _KEYS, first=("rates",))
    for field in _SECONDS:
        if field in said:
            said[field] = repr(quantity(said[field], DURATION, f"`stream`: {field}"))
    ways = [way for way in ("rates", *_DRAWN) if way in said]
    if len(ways) != 1:
        raise BadInput("`stream` of replay needs rates, said in one way.", hint=_EXAMPLE)
    (factor,) = _numbers(said.pop("factor", "1"), 1)
    numbers = _numbers(said.pop(ways[0]), None if ways == ["rates"] else 2)
    if ways == ["rates"]:
        return StreamWish(fields=said, rates=numbers, factor=factor)
    distribution = cast(Literal["uniform", "normal"], ways[0])
    mean, deviation = numbers
    return StreamWish(fields=said, drawn=(distribution, mean, deviation), factor=factor)


def on_stream(wish: StreamWish, run: RunSpec, policy: BatchPolicy | None) -> RunSpec:
    """Return the run on that stream; batches follow it where no other policy was asked for.

    In a rehearsal, whose computation is slowed down by a factor, samples arrive slower by the same.

    Raises:
        BadInput: it does not go with the run.
    """
    factor = 1.0 if run.miniature is None else run.miniature.time_factor
    if wish.drawn is None:
        rates = wish.rates
    else:
        distribution, mean, deviation = wish.drawn
        rates = draw_rates(distribution, mean, deviation, workers=len(run.workers), seed=run.seed)
    try:
        stream = Stream.model_validate({**wish.fields, "rates": scaled(rates, wish.factor / factor)}, strict=False)
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
    """Return the prediction of a run on a stream, and what to know of it.

    A step takes what was predicted, or until the samples of every worker have arrived, whichever is longer:

        T_step = max(t, max_i b_i / S_i)        b_i samples of worker i, S_i its rate, samples/s

    Args:
        prediction: for samples that are there already, at the plan's local batch sizes.
        run: with its stream.
    """
    stream = run.stream
    assert stream is not None
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
    """Return a time in which so many steps wait; quick steps wait for longer."""
    value = time_s.value + steps * waits_s.value
    low, high = time_s.low + steps * waits_s.high, time_s.high + steps * waits_s.low
    return Range(value=value, low=min(low, value), high=max(high, value))


def _numbers(text: str, count: int | None) -> tuple[float, ...]:
    """Return positive numbers, with slashes between them."""
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
    """Return the same streams, all of them faster by a factor."""
    return tuple(rate * factor for rate in rates_per_s)
