"""The events of a probe: what each measurement writes into the log, and `hetopt.profiler.collect` reads.

In the log every record has its `EVENT` name and a time beside its fields. Seconds, bytes and samples throughout. Host
and job facts travel as the profile's own `Host` and `Job`, under the names ``host_facts`` and ``job_facts``;
``probe_started`` (start-up is over) and ``probe_finished`` have no fields.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record, Told
from hetopt.core.memory import Precision, TrainingMemory
from hetopt.core.profile import Collective

STARTED = "probe_started"
FINISHED = "probe_finished"
HOST_FACTS = "host_facts"
JOB_FACTS = "job_facts"


class Measurement(Record):
    """Base of everything that a probe measures and logs: one event each, named by ``EVENT``."""

    EVENT: ClassVar[str]


class DeviceFacts(Measurement):
    """What the workers of one sweep computed on. ``sweep`` counts the sweeps of the schedule from 0."""

    EVENT: ClassVar[str] = "device_facts"

    sweep: NonNegativeInt
    kind: Literal["cpu", "cuda"]
    precision: Precision
    memory_limit_bytes: PositiveInt
    matmul_flops_per_s: PositiveFloat
    copy_bytes_per_s: PositiveFloat


class PrecisionRefused(Measurement):
    """What the task cannot be computed in, and why."""

    EVENT: ClassVar[str] = "precision_refused"

    precision: Precision
    reason: Told


class SweepPoint(Measurement):
    """Timed steps at one local batch size, by each of the workers that computed at the same time."""

    EVENT: ClassVar[str] = "sweep_point"

    sweep: NonNegativeInt
    local_batch_size: PositiveInt
    samples_s: tuple[tuple[PositiveFloat, ...], ...] = Field(
        min_length=1, description="every timed step of each worker, without contention"
    )
    load_s: NonNegativeFloat
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    optimizer_s: NonNegativeFloat
    peak_memory_bytes: PositiveInt | None = Field(description="of the worker that used most")
    yardsticks_s: tuple[PositiveFloat, ...] = Field(
        default=(), description="of each worker's processor meanwhile; absent: it computes elsewhere"
    )
    contentions: tuple[Annotated[float, Field(ge=1)], ...] = Field(
        default=(), description="of each worker: wall time of its steps over their time without contention"
    )


class MemoryCounted(Measurement):
    """Tensors of one worker over one step, by the leader."""

    EVENT: ClassVar[str] = "memory_counted"

    sweep: NonNegativeInt
    memory: TrainingMemory


class SweepEnded(Measurement):
    """Why a sweep left out ``local_batch_size`` and everything above it."""

    EVENT: ClassVar[str] = "sweep_ended"

    sweep: NonNegativeInt
    local_batch_size: PositiveInt
    reason: Literal["time", "memory-predicted", "memory-exhausted"]


class CompressorPoint(Measurement):
    """Time to compress and decompress the whole gradient, median over the workers of a sweep."""

    EVENT: ClassVar[str] = "compressor_point"

    sweep: NonNegativeInt
    name: str
    ratio: float = Field(gt=0, le=1)
    compress_s: NonNegativeFloat
    decompress_s: NonNegativeFloat


class LinkPoint(Measurement):
    """A timed collective; each sample is what it added to the computation of the slowest worker."""

    EVENT: ClassVar[str] = "link_point"

    collective: Collective
    workers: int = Field(ge=2)
    across_hosts: bool
    payload_bytes: PositiveInt
    samples_s: tuple[PositiveFloat, ...] = Field(min_length=1)


class EvaluationCost(Measurement):
    """One evaluation of the whole evaluation set by one worker with the host to itself."""

    EVENT: ClassVar[str] = "evaluation_cost"

    evaluation_s: NonNegativeFloat
    covered: float = Field(gt=0, le=1, description="part of the set that was evaluated; the time is scaled up by it")
    peak_bytes: NonNegativeInt = Field(default=0, description="that it took of the device's memory; 0: not counted")


class PilotStarted(Measurement):
    """A pilot run begins; ``pilot`` counts the pilots of the schedule from 0."""

    EVENT: ClassVar[str] = "pilot_started"

    pilot: NonNegativeInt
    global_batch_size: PositiveInt
    learning_rate_scale: PositiveFloat
    seed: int
    sync: str | None = Field(default=None, description="as written; absent: gradients are summed in every step")
    workers: PositiveInt = 1
    precision: Precision = "fp32"


class NoiseMeasured(Measurement):
    """Sums from which both moments of the gradient are estimated (see `hetopt.core.training_laws.pooled_noise`)."""

    EVENT: ClassVar[str] = "noise_sample"

    pilot: NonNegativeInt
    step: NonNegativeInt
    samples_seen: NonNegativeInt
    groups: int = Field(ge=2)
    samples: PositiveInt
    weighted_square_norms: NonNegativeFloat
    mean_square_norm: NonNegativeFloat


class GainMeasured(Measurement):
    """Retained energy at every ratio of the schedule's ``gain_ratios``, in their order."""

    EVENT: ClassVar[str] = "gain_sample"

    pilot: NonNegativeInt
    step: NonNegativeInt
    gains: tuple[float, ...]


class ExchangeTried(Measurement):
    """What one way to exchange made of gradients of some steps, beside a pilot that summed them whole."""

    EVENT: ClassVar[str] = "exchange_tried"

    pilot: NonNegativeInt
    step: NonNegativeInt
    compression: Told = Field(description="as `parse_compression` reads it")
    workers: PositiveInt
    gain: float | None = Field(default=None, description="retained energy of gradient and residual; absent without one")
    variance: NonNegativeFloat | None = Field(
        default=None, description="energy of the error of the sum over that of all gradients; absent with a residual"
    )
    signal: float | None = Field(default=None, description="part of the sum that is left in its own direction")


class PilotEvaluation(Measurement):
    """The task's target metric after ``step`` steps of a pilot."""

    EVENT: ClassVar[str] = "pilot_evaluation"

    pilot: NonNegativeInt
    step: NonNegativeInt
    epoch: NonNegativeFloat
    metric: float


class PilotFinished(Measurement):
    """A pilot run ended, and why."""

    EVENT: ClassVar[str] = "pilot_finished"

    pilot: NonNegativeInt
    step: NonNegativeInt
    reason: Literal["target", "time", "epochs", "diverged"]
    synchronised: NonNegativeInt | None = Field(default=None, description="steps that ended in an average")
