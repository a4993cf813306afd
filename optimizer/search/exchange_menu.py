"""The gradient exchanges that a plan may choose from: the trainer's compressors, priced for every number of workers.

The registry is `hetopt.core.comm.composition.METHODS`; bytes and messages are those of `payload_bytes.operations`,
workers' own work is `step_time.own_work`, and extra steps follow from the retained gradient energy
(`hetopt.core.training_laws`). A compressor without one of the three is left out.

Averages of parameters are offered whole and rounded (`options.AVERAGED`). An average sends as many bytes as a sum of
gradients, and its rounding costs as many steps, beside those of averaging.

Rounding runs as it was planned. A selection of the largest elements runs under ``auto``, which begins with it, measures
its cost and sends more where that is too much; its trials take a hundredth of the time at most (less than
`objective.NEAR`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetopt.core.comm.composition import AUTO, GATHER, METHODS, PACKED_BF16, PLAIN
from hetopt.core.comm.compression_text import USUAL_RATIO
from hetopt.core.comm.cost import UNDER_BACKWARD, Operation, Primitive
from hetopt.core.comm.options import (
    AVERAGED,
    CODINGS,
    COLLECTIVES,
    IDENTITY,
    LIKE_TOPK,
    operations_of,
    selection,
    settled_collective,
    whole_ways,
)
from hetopt.core.comm.payload_bytes import MANY_WORKERS, Collective, Shapes, kept_elements, sliced_bytes
from hetopt.core.errors import BadInput, setting
from hetopt.core.run_spec import Compression, Synchronization
from hetopt.core.training_laws import LEAST_GAIN, MOST_LOST
from hetopt.optimizer.convergence.compression_penalty import Penalty
from hetopt.optimizer.convergence.steps_law import Z90, Array
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.search.pareto import undominated
from hetopt.optimizer.step_time.device_memory import ExchangeLine, counted
from hetopt.optimizer.step_time.local_options import LocalOption
from hetopt.optimizer.step_time.own_work import OwnWork, own_work

NEVER_BYTES = 1e21
"""Bytes over one link in one step beyond what anyone would wait for; finite, so that arithmetic stays so."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOption:
    """Option to sum gradients or average parameters: its messages, bytes and extra steps by number of workers.

    Attributes:
        compression: compressor of what is sent.
        collective: operation whose link times price the exchange.
        gain: share of the gradient's energy that is retained; 1: all.
        sync: whether gradients are summed in every step, or parameters averaged after some; figures of averages are
            means over all steps.
        stretch, stretch_log_sd: steps over those of summing gradients in every step, and the standard deviation of the
            log, indexed by the number of workers from 0.
        share_log_sd: standard deviation of the log of the share of steps that communicate.
        messages, traffic_bytes: messages in a row and bytes over the slowest link, indexed by the number of workers.
        compress_s: seconds of compression and decompression on the reference device, indexed by the number of workers.
        lost_progress: factor on steps, at its upper end, that would make up for a compressor's loss in a run of fixed
            length, indexed by the number of workers; it counts in comparisons alone. 1 in runs to a target.
        compress_log_sd: standard deviation of the log of ``compress_s``.
        memory: bytes of a worker's memory that the exchange keeps and takes; None: not known.
    """

    compression: Compression
    collective: Collective
    gain: float
    messages: Array
    traffic_bytes: Array
    compress_s: Array
    stretch: Array
    stretch_log_sd: Array
    lost_progress: Array
    compress_log_sd: float = 0.0
    share_log_sd: float = 0.0
    sync: Synchronization = field(default_factory=Synchronization)
    memory: ExchangeLine | None = None

    @property
    def under_backward(self) -> bool:
        """True where the exchange runs beside the backward pass; averages of parameters are made after the step."""
        return self.compression.name in UNDER_BACKWARD and not self.sync.is_local

    @property
    def is_plain(self) -> bool:
        """True where whole gradients are summed in every step."""
        return self.compression.name == IDENTITY and not self.sync.is_local


def exchange_menu(
    model: FittedModel,
    *,
    minimum_gain: float,
    max_workers: int,
    local: Sequence[LocalOption] = (),
    to_target: bool = True,
    names: Sequence[str] = (),
    ratios: Sequence[float] = (),
) -> tuple[ExchangeOption, ...]:
    """Return the exchanges that a search may choose from: dense, compressed at a known price, and averages (``local``).

    Methods without a known price, and exchanges that another beats in every figure, are left out. Averages come only
    with the compressors in `AVERAGED`.

    Args:
        model: fits of the profile.
        minimum_gain: share of the gradient's energy that must be retained; ignored if ``names`` leaves dense out.
        max_workers: most workers of a cluster.
        local: policies of local SGD to offer beside; empty: none.
        to_target: whether the run ends at a target, so that more steps can make up for a loss.
        names: names of the methods to choose from, dense gradients ("identity") only if named; empty: all.
        ratios: shares of the gradient's elements that sparsifying methods send; empty: the ratios that pilots measured.

    Raises:
        BadInput: none of the named methods can be priced; says why. Or a ratio is below all that were measured.
    """
    plain = not names or IDENTITY in names
    options = [exchange_of(model, Compression(), max_workers)] if plain else []
    ways = [way for way in _ways(model, ratios) if not names or way.name in names]
    refused = [why_not(model, way, minimum_gain if plain else 0.0) for way in ways]
    for way in itertools.compress(ways, (reason is None for reason in refused)):
        option = replace(exchange_of(model, way, max_workers), gain=gain_of(model, way) or 1.0)
        options.append(option if to_target else _of_fixed_length(option, model.convergence.gate.penalty))
    if not options:
        reasons = {way.name: reason for way, reason in zip(ways, refused, strict=True)}
        why = "; ".join(f"of {name}, {reason}" for name, reason in reasons.items())
        raise BadInput(
            f"{setting('compression', ','.join(names))} cannot be planned: {why}.",
            hint="profile the job again, or leave `compression` out: what it costs must be known",
        )
    averages = (local_exchange(model, option, average) for average in local for option in options)
    return (*drop_beaten(options), *(option for option in averages if option.compression.name in AVERAGED))


def _of_fixed_length(option: ExchangeOption, penalty: Penalty) -> ExchangeOption:
    """Return the option for a run of fixed length: extra steps become ``lost_progress``, and ``stretch`` is 1.

    Rounding that loses more than `MOST_LOST` makes the loss infinite.
    """
    held_back = float(penalty.inflation(option.gain) * np.exp(Z90 * penalty.log_sd(option.gain)))
    rounded = option.stretch * np.exp(Z90 * option.stretch_log_sd)
    lost_progress = held_back * np.where(rounded > 1 + MOST_LOST, np.inf, rounded)
    return replace(
        option,
        lost_progress=lost_progress,
        stretch=np.ones_like(option.stretch),
        stretch_log_sd=np.zeros_like(option.stretch),
    )


def exchange_of(model: FittedModel, compression: Compression, max_workers: int) -> ExchangeOption:
    """Return one gradient exchange, priced for 0 to ``max_workers`` workers; its retained energy ``gain`` is left at 1.

    Raises:
        BadInput: the profile does not say how long the compression takes a worker.
    """
    job, work = model.profile.job, _work(model, compression)
    if work is None:
        raise BadInput(
            f"the profile does not say how long {compression.name} takes.",
            hint="profile it with `compression`, or leave it out",
        )
    messages, traffic_bytes = _terms(compression, job.parameters, max_workers, job.parameter_shapes or None)
    memory = counted(model)
    stretch, stretch_log_sd = np.transpose(
        [(1.0, 0.0), *(model.losses.stretch(compression, workers) for workers in range(1, max_workers + 1))]
    )
    return ExchangeOption(
        compression=compression,
        collective="all_gather" if settled_collective(compression) == GATHER else "all_reduce",
        gain=1.0,
        messages=messages,
        traffic_bytes=traffic_bytes,
        compress_s=work.times_s(max_workers),
        compress_log_sd=work.log_sd,
        stretch=stretch,
        stretch_log_sd=stretch_log_sd,
        lost_progress=np.ones(max_workers + 1),
        memory=None if memory is None else ExchangeLine.of(compression, Synchronization(), memory.gradient_bytes),
    )


def local_exchange(model: FittedModel, summed: ExchangeOption, option: LocalOption) -> ExchangeOption:
    """Return local SGD's averaging of parameters as an exchange, priced in the mean over all steps of a run.

    With more workers than pilots support, it is never affordable (`NEVER_BYTES`).

    Args:
        model: fits of the profile.
        summed: the exchange of gradients with the compression that averages are to have.
        option: local SGD policy, with its share of steps and its penalty.
    """
    memory = counted(model)
    workers = np.arange(len(summed.messages))
    among = np.maximum(workers, 1).astype(np.float64)
    share = option.communication.share
    return replace(
        summed,
        sync=option.sync,
        messages=share * summed.messages,
        traffic_bytes=np.where(workers > option.most_workers, NEVER_BYTES, share * summed.traffic_bytes),
        compress_s=share * summed.compress_s,
        stretch=option.stretch(among) * summed.stretch,
        stretch_log_sd=np.hypot(option.stretch_log_sd(among), summed.stretch_log_sd),
        share_log_sd=option.communication.log_sd,
        memory=None if memory is None else ExchangeLine.of(summed.compression, option.sync, memory.gradient_bytes),
    )


def drop_beaten(options: Sequence[ExchangeOption]) -> tuple[ExchangeOption, ...]:
    """Return the exchanges, in their order, that no other by the same collective equals or beats in every figure.

    Of equals the first stays.
    """
    figures = np.array([_figures(option) for option in options])
    return tuple(options[row] for row in undominated(figures, [option.collective for option in options]))


def _figures(option: ExchangeOption) -> Array:
    """Return the figures of an exchange that time grows with, those that lower it negated."""
    by_workers = (
        option.messages,
        option.traffic_bytes,
        option.compress_s,
        option.stretch,
        option.stretch_log_sd,
        option.lost_progress,
    )
    memory = option.memory or ExchangeLine(kept_bytes=0, fixed_bytes=0, each_bytes=0)
    return np.concatenate(
        [
            *by_workers,
            [-option.gain, option.share_log_sd, option.compress_log_sd, -float(option.under_backward)],
            [memory.kept_bytes, memory.fixed_bytes, memory.each_bytes],
        ]
    )


def _ways(model: FittedModel, ratios: Sequence[float]) -> Iterator[Compression]:
    """Yield every compression of the registry; methods that select by each ratio, collective and coding.

    ``ratios`` empty: the ratios whose gain was profiled, else `USUAL_RATIO`.
    """
    yield from whole_ways()
    looked_at = list(ratios) or sorted({point.ratio for point in model.profile.gain if point.ratio < 1}, reverse=True)
    for name, method in METHODS.items():
        if not method.by_ratio:
            continue
        carried = [collective for collective in COLLECTIVES if collective in method.collectives] or [AUTO]
        codings = CODINGS if "coding" in method.options else (PLAIN,)
        for ratio, collective, coding in itertools.product(looked_at or (USUAL_RATIO,), carried, codings):
            carried_by = AUTO if collective == method.collectives[0] else collective
            coded = None if coding == PLAIN else coding
            yield selection(name, ratio).model_copy(update={"collective": carried_by, "coding": coded})


def gain_of(model: FittedModel, way: Compression) -> float | None:
    """Return the share of gradient energy, (0, 1], that a compression retains of a job's gradient; None: not known.

    Raises:
        BadInput: the compression sends the largest elements at a ratio below all that were measured.
    """
    if way.name in LIKE_TOPK and model.gain.log_ratios:
        return model.gain.gain(way.ratio)
    return model.losses.gain(way)


def least_gain(model: FittedModel, *, to_target: bool) -> float:
    """Return the least retained gradient energy, (0, 1], to plan with; higher for a run of fixed length.

    ``to_target``: whether the run ends at a target, so that more steps can make up for what is held back.
    """
    return LEAST_GAIN if to_target else model.convergence.gate.penalty.least_gain(1 + MOST_LOST)


def methods_left_out(model: FittedModel, minimum_gain: float, ratios: Sequence[float] = ()) -> dict[str, str]:
    """Return the compressors that a plan cannot choose at any ratio, by name, each with a few words on why.

    Args:
        model: fits of the profile.
        minimum_gain: share of the gradient's energy that must be retained.
        ratios: shares of the elements that sparsifying methods send; empty: the ratios that pilots measured.

    Raises:
        BadInput: see `gain_of`.
    """
    reasons: dict[str, str | None] = {}
    for way in _ways(model, ratios):
        reason = why_not(model, way, minimum_gain)
        reasons[way.name] = None if reason is None else reasons.get(way.name, reason)
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _work(model: FittedModel, way: Compression) -> OwnWork | None:
    """Return a method's seconds of compressing and unpacking on a worker of the profiled machine; None: not known."""
    device, numel = model.reference, model.profile.job.parameters
    return own_work(way, device.compressors, numel=numel, copy_bytes_per_s=device.device.copy_bytes_per_s)


def why_not(model: FittedModel, way: Compression, minimum_gain: float) -> str | None:
    """Return a few words on why a compression cannot be planned with, such as too little gain; None: it can.

    ``minimum_gain`` is the share of the gradient's energy that it has to retain, 0 to 1.

    Raises:
        BadInput: see `gain_of`.
    """
    gain = gain_of(model, way)
    if gain is None:
        return "what it keeps of this job's gradient was not measured"
    if _work(model, way) is None:
        return "how long it takes a worker was not measured"
    if METHODS[way.name].by_shape and not model.profile.job.parameter_shapes:
        return "the profile does not say what shapes the parameters have"
    if gain < minimum_gain:
        least = f"{100 * minimum_gain:.0f} %"
        return f"it keeps {100 * gain:.0f} % of the gradient's energy, and at least {least} is asked for"
    return model.convergence.gate.objection(scheme=way.name, ratio=way.ratio, gain=gain)


def _terms(way: Compression, numel: int, max_workers: int, shapes: Shapes | None) -> tuple[Array, Array]:
    """Return the messages in a row, and the bytes over the slowest link, of one exchange, [max_workers + 1] each.

    The operations change at `MANY_WORKERS`, where AR-Topk begins to elect. On either side a payload is the same for any
    number of workers, a slice for each, or, with a quantiser's codes, computed for each number.
    """
    messages, traffic_bytes = np.zeros(max_workers + 1), np.zeros(max_workers + 1)
    for first, last in ((2, min(MANY_WORKERS, max_workers)), (MANY_WORKERS + 1, max_workers)):
        if last < first:
            continue
        workers = np.arange(first, last + 1)
        few, many = (operations_of(way, numel, workers=count, shapes=shapes) for count in (first, last))
        for place, (operation, other) in enumerate(zip(few, many, strict=True)):
            payload: Array | float = operation.payload_bytes
            if operation.sliced:
                payload = _sliced_bytes(way, numel, workers).astype(np.float64)
            elif operation.payload_bytes != other.payload_bytes:
                each = (
                    operations_of(way, numel, workers=count, shapes=shapes)[place].payload_bytes
                    for count in workers.tolist()
                )
                payload = np.fromiter(each, dtype=np.float64, count=len(workers))
            of_messages, of_traffic = _factors(operation.primitive, max_workers)
            messages[first : last + 1] += of_messages[first : last + 1]
            traffic_bytes[first : last + 1] += of_traffic[first : last + 1] * payload
    return messages, traffic_bytes


def _sliced_bytes(way: Compression, numel: int, workers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of a sliced sum by a compression, by number of workers; selected values travel in bf16."""
    if METHODS[way.name].by_ratio:
        return sliced_bytes(PACKED_BF16, kept_elements(numel, way.ratio), workers)
    return sliced_bytes(way.name, numel, workers)


@cache
def _factors(primitive: Primitive, most: int) -> tuple[Array, Array]:
    """Return messages of a collective, and bytes that it carries for each of the payload, by the number of workers."""
    by_workers = [
        Operation(primitive=primitive, payload_bytes=1.0, members=workers).terms() for workers in range(1, most + 1)
    ]
    messages, traffic = (
        [0.0, *(getattr(terms, name) for terms in by_workers)] for name in ("messages", "traffic_bytes")
    )
    return np.array(messages), np.array(traffic)
