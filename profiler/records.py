"""The events that a probe writes into its log, and that `hetopt.profiler.collect` reads; seconds, bytes and samples.

In the log every record has its name in `EVENTS` and a time beside its fields. ``probe_started`` (start-up is over) and
``probe_finished`` have no fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import CleanText, Record
from hetopt.core.memory import Precision, TrainingMemory
from hetopt.core.profile import Collective, CompressorCost, Evaluation, ExchangeTrial, Host, Job, NoiseSample

STARTED = "probe_started"
FINISHED = "probe_finished"

PHASES = 4
"""Number of phases of a step: loading, forward, backward and the optimizer's update, in this order."""


class DeviceFacts(Record):
    """Event: the device of a sweep's workers, the bytes that each may use, and how fast it multiplies and copies.

    ``sweep`` counts the sweeps of the schedule from 0.
    """

    sweep: NonNegativeInt
    kind: Literal["cpu", "cuda"]
    precision: Precision
    memory_limit_bytes: PositiveInt
    matmul_flops_per_s: PositiveFloat
    copy_bytes_per_s: PositiveFloat


class PrecisionRefused(Record):
    """Event: a precision that the task cannot be computed in, and why."""

    precision: Precision
    reason: CleanText


class WorkerSteps(Record):
    """Timed steps of one worker at one batch size, seconds; without any, the worker was idle or ran out of memory.

    ``phases_s`` are medians of loading, forward, backward and update; ``peak_memory_bytes`` is None where it is not
    known.
    """

    samples_s: tuple[PositiveFloat, ...] = Field(default=(), description="every timed step, without contention")
    phases_s: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=PHASES, max_length=PHASES)] = (0.0,) * PHASES
    peak_memory_bytes: PositiveInt | None = None
    yardstick_s: PositiveFloat | None = Field(
        default=None, description="of the processor meanwhile; absent: it computes elsewhere"
    )
    contention: float | None = Field(
        default=None, ge=1, description="wall time of its steps over their time without contention"
    )

    def row(self, length: int) -> list[float]:
        """Return the record as numbers that ranks can gather: 3 + `PHASES` figures, then ``length`` step times.

        Step times beyond the record's own are NaN, and 0 stands for None.
        """
        padding = [math.nan] * (length - len(self.samples_s))
        first = (self.peak_memory_bytes or 0, self.yardstick_s or 0.0, self.contention or 0.0)
        return [*first, *self.phases_s, *self.samples_s, *padding]

    @classmethod
    def of(cls, row: Sequence[float]) -> Self:
        """Return the record that `row` turned into these numbers."""
        peak_bytes, yardstick_s, contention, *seconds = row
        return cls(
            samples_s=tuple(sample for sample in seconds[PHASES:] if not math.isnan(sample)),
            phases_s=tuple(seconds[:PHASES]),
            peak_memory_bytes=int(peak_bytes) or None,
            yardstick_s=yardstick_s or None,
            contention=contention or None,
        )


class SweepPoint(Record):
    """Event: timed steps at one local batch size, samples, by each of the workers that computed at the same time."""

    sweep: NonNegativeInt
    local_batch_size: PositiveInt
    workers: tuple[WorkerSteps, ...] = Field(min_length=1)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest peak memory of a worker, bytes; None: no worker knows its own."""
        return max((worker.peak_memory_bytes or 0 for worker in self.workers), default=0) or None


class MemoryCounted(Record):
    """Event: bytes that one worker's step takes of the device's memory, by kind of tensor, as the leader counted."""

    sweep: NonNegativeInt
    memory: TrainingMemory


class SweepEnded(Record):
    """Event: the local batch size at which a sweep ran out of memory; larger sizes are left out."""

    sweep: NonNegativeInt
    local_batch_size: PositiveInt


class CompressorPoint(Record):
    """Event: seconds of compressing the whole gradient, and of unpacking each payload; medians over workers.

    ``sweep`` is the number of the sweep in whose division of the host they were timed.
    """

    sweep: NonNegativeInt
    cost: CompressorCost


class LinkPoint(Record):
    """Event: seconds that a collective of ``payload_bytes`` added to a step, in each of several timings.

    The seconds count from the end of computing on the slowest worker. ``across_hosts``: whether the workers are on
    several.
    """

    collective: Collective
    workers: int = Field(ge=2)
    across_hosts: bool
    payload_bytes: PositiveInt
    samples_s: tuple[PositiveFloat, ...] = Field(min_length=1)


class EvaluationCost(Record):
    """Event: seconds of the whole evaluation set on one worker, alone on its host, and its peak device bytes."""

    evaluation_s: NonNegativeFloat
    peak_bytes: NonNegativeInt = Field(default=0, description="that it took of the device's memory; 0: not counted")


class GainMeasured(Record):
    """Event: share of the gradient's energy that Top-k retains at each ratio of the schedule, in their order."""

    gains: tuple[float, ...]


Ending: TypeAlias = Literal["target", "time", "epochs", "diverged"]


class PilotSeen(Record):
    """Event: a pilot as far as it has come, written as it begins, after each evaluation and at its end.

    ``pilot`` counts the pilots of the schedule from 0; ``step``, ``epoch`` and ``evaluations`` are those done so far,
    by ``workers`` together. ``ended`` is None while the pilot goes on, then why it ended: the target was reached, time
    or epochs were over, or it diverged.
    """

    pilot: NonNegativeInt
    global_batch_size: PositiveInt
    learning_rate_scale: PositiveFloat
    seed: int
    sync: str | None = Field(default=None, description="as written; absent: gradients are summed in every step")
    workers: PositiveInt = 1
    precision: Precision = "fp32"
    step: NonNegativeInt = 0
    epoch: NonNegativeFloat = 0.0
    evaluations: tuple[Evaluation, ...] = ()
    ended: Ending | None = Field(default=None, description="why")
    synchronised: NonNegativeInt | None = Field(default=None, description="steps that ended in an average")


EVENTS: Mapping[type[Record], str] = {
    Host: "host_facts",
    Job: "job_facts",
    DeviceFacts: "device_facts",
    PrecisionRefused: "precision_refused",
    SweepPoint: "sweep_point",
    MemoryCounted: "memory_counted",
    SweepEnded: "sweep_ended",
    CompressorPoint: "compressor_point",
    LinkPoint: "link_point",
    EvaluationCost: "evaluation_cost",
    GainMeasured: "gain_sample",
    NoiseSample: "noise_sample",
    ExchangeTrial: "exchange_tried",
    PilotSeen: "pilot",
}
"""Name in the log of every record that a probe writes."""
