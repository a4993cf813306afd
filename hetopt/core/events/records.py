"""The records of a run's event log, one for each kind of event, and the types of their fields.

`EventReader` counts a line that fits none of them. Every field that was not there from the first version on has a
default, so that old logs are read; unknown fields are passed over. Numbers are finite and bounded, so that sums of
them are too; names hold no control characters, and sentences are freed of them. Lists of workers have equal lengths.
A new kind of event that `EventLog.write` is given needs a record here.
"""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass

_MOST_LETTERS = 2000
_MOST_NAMED = 256
"""Metrics of one evaluation, and anything else that is named."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def _sentence(text: str) -> str:
    """Return a text on one line without control characters, cut to the length that a person reads."""
    return _CONTROL.sub(" ", text).strip()[:_MOST_LETTERS]


EpochSeconds = Annotated[float, Field(ge=0, le=1e11)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
Factor = Annotated[float, Field(ge=0, le=1e9)]
Figure = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A loss or a metric: so large that a diverging run still shows, and its square is still a number."""
Name = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\p{Cc}]*$")]
Word = Annotated[str, StringConstraints(max_length=512)]
"""A name that every step tells: looking at its letters would cost as much as reading numbers; terminals are guarded."""
Sentence = Annotated[str, AfterValidator(_sentence)]
Metrics = Annotated[dict[Name, Figure], Field(max_length=_MOST_NAMED)]


STRICT = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)
ProbeKind = Literal[
    "probe_started",
    "probe_finished",
    "host_facts",
    "job_facts",
    "device_facts",
    "sweep_point",
    "memory_counted",
    "sweep_ended",
    "compressor_point",
    "link_point",
    "evaluation_cost",
    "pilot",
    "noise_sample",
    "gain_sample",
    "exchange_tried",
    "precision_refused",
]
"""Names of the events that a probe writes, as `hetopt.profiler.records` describes them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Happened:
    """The base of all events: their time in seconds since the epoch, by the clock of the machine that wrote them.

    Attributes:
        time_s: when, seconds since the epoch.
    """

    time_s: EpochSeconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StartedWorker:
    """A worker as the event `RunStarted` lists it.

    Attributes:
        host: name of its host.
        type: device type that it was planned as; empty: not told.
        slowdown: factor by which its compute is slowed down on purpose; 1: not.
        local_batch_size: samples of a step; 0: not told.
    """

    host: Name
    type: Name = ""
    slowdown: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    local_batch_size: Count = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExchangeFigures:
    """The gradient exchanges of a `StepsLogged`, as means over its steps.

    Attributes:
        way: name of the exchange, such as ``topk 0.01 by all_gather``.
        compressor: its name.
        collective: name of the collective.
        ratio: fraction of the elements sent.
        gain: retained gradient energy.
        sent_bytes: that one worker contributed to a step's exchange.
        dense_bytes: what everything in fp32 would have come to.
    """

    way: Word = ""
    compressor: Word = "identity"
    collective: Word = ""
    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    gain: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    sent_bytes: Bytes
    dense_bytes: Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyncFigures:
    """The parameter averages of local SGD workers over the steps of a `StepsLogged`.

    Attributes:
        policy: name of the synchronization policy; empty: not told.
        synchronised: number of steps that ended in an average.
        local: number of steps that did not.
        sent_bytes: that one worker contributed, all steps together.
        divergence: mean distance of the workers' parameters before averages; None: no step ended in one.
    """

    policy: Name = ""
    synchronised: Count
    local: Count
    sent_bytes: Bytes = 0.0
    divergence: Annotated[float, Field(ge=0, le=1e100)] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NoiseFigures:
    """The moments of the gradient in one step of a `StepsLogged`, not smoothed (`hetopt.core.training_laws`).

    Attributes:
        gradient_square: estimate of the squared norm of the mean gradient; may be negative.
        gradient_variance: estimate of the summed variance of one sample's gradient.
    """

    gradient_square: Annotated[float, Field(ge=-1e100, le=1e100)]
    gradient_variance: Annotated[float, Field(ge=0, le=1e100)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StreamFigures:
    """The seconds that each worker waited for samples to arrive, over the steps of a `StepsLogged`, in rank order.

    Attributes:
        wait_s: seconds, in rank order; empty: not told.
    """

    wait_s: tuple[Seconds, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunStarted(Happened):
    """The start of a run's workers: at its beginning, when it goes on, and each time that other workers train.

    Attributes:
        task: name of the task or script.
        workers: that start, in rank order.
        global_batch_size: samples of a step over all workers; 0: not told.
        resumed_step: step of the checkpoint that they resume from; None: they begin anew.
    """

    event: Literal["run_started"]
    task: Name
    workers: Annotated[tuple[StartedWorker, ...], Field(min_length=1, max_length=65_536)]
    global_batch_size: Count = 0
    resumed_step: Count | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingStarted(Happened):
    """The beginning of training by newly started workers, after ``step`` earlier steps (0: from the start)."""

    event: Literal["training_started"]
    step: Count = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepsLogged(Happened):
    """The measurements of ``steps`` steps, the last of them ``step``: means of a step in seconds, in rank order.

    Attributes:
        step: number of the last of these steps.
        steps: how many steps.
        step_time_s: mean seconds of a step.
        local_batch_sizes: samples of each worker in the last step.
        compute_s: mean seconds in which each worker computed.
        sync_s: mean seconds of exchanging, by worker.
        wait_s: mean seconds of waiting for slower workers, by worker.
        epoch: passes over the data set so far.
        loss: mean training loss.
        processor_s: mean processor seconds of computing, by worker; None: not measured.
        pace_use: real over declared compute time, by worker, 0: not known; None: no worker imitates another's time.
        exchange: of gradients; None: not told.
        sync: averages of parameters; None: gradients are summed.
        stream: waiting for samples; None: samples do not arrive in streams.
        noise: of the gradient; None: not measured.
        worth: steps of the planned batch that one of these is worth, where the batch follows the noise.
        planned_step: steps of the planned batch that all so far are worth; None: the batch is fixed.
    """

    event: Literal["step"]
    step: Count
    steps: Annotated[int, Field(ge=1, le=10**9)]
    step_time_s: Seconds
    local_batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)]
    compute_s: tuple[Seconds, ...]
    sync_s: tuple[Seconds, ...]
    wait_s: tuple[Seconds, ...]
    epoch: Factor
    loss: Figure
    processor_s: tuple[Seconds, ...] | None = None
    pace_use: tuple[Factor, ...] | None = None
    exchange: ExchangeFigures | None = None
    sync: SyncFigures | None = None
    stream: StreamFigures | None = None
    noise: NoiseFigures | None = None
    worth: Factor = 1.0
    planned_step: Annotated[float, Field(ge=0, le=1e15)] | None = None

    def __post_init__(self) -> None:
        """Check that lists have one figure a worker; optional ones may be absent.

        Raises:
            ValueError: a list has another length.
        """
        workers = len(self.local_batch_sizes)
        if not len(self.compute_s) == len(self.sync_s) == len(self.wait_s) == workers:
            raise ValueError("lists of one figure a worker differ in length")
        for name in ("pace_use", "processor_s"):
            if getattr(self, name) and len(getattr(self, name)) != workers:
                raise ValueError(f"{name} has not one figure a worker")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluated(Happened):
    """The metrics of an evaluation after ``step`` steps and ``epoch`` passes over the data set, by name."""

    event: Literal["evaluated"]
    step: Count
    epoch: Factor = 0.0
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointSaved(Happened):
    """A saved checkpoint, whose writing took ``written_s`` seconds altogether, beside training for the most part."""

    event: Literal["checkpoint_saved"]
    written_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Remarked(Happened):
    """An event that only gives its reason: a checkpoint or audit went wrong, or a rehearsal is slowed.

    A checkpoint that could not be written (``checkpoint_failed``), or not be read when the run went on
    (``checkpoint_skipped``); that audits have shown that shares compute something else than one machine
    (``audit_differs``, once in a run); that the loss of a script is not finite (``loss_diverged``, once in a session);
    that a rehearsal takes longer than was planned.

    Attributes:
        step: number of steps before; None: not told.
        reason: sentence on what happened; empty: not told.
    """

    event: Literal["checkpoint_failed", "checkpoint_skipped", "audit_differs", "loss_diverged", "miniature_slowed"]
    step: Count | None = None
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingFinished(Happened):
    """The orderly end of training.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the data set.
        reason: ``stopped``, or the rule that ended it: ``target``, ``epochs``, ``steps`` or ``script``.
        training_s: seconds of training, earlier sessions included; None: not told.
        metrics: of the last evaluation, by name; empty: there was none.
    """

    event: Literal["training_finished"]
    step: Count = 0
    epoch: Factor = 0.0
    reason: Sentence
    training_s: Seconds | None = None
    metrics: Metrics = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SharesChanged(Happened):
    """A change of the local batch sizes from the next step on.

    Attributes:
        step: number of steps before the change.
        after: new local batch sizes in samples, in rank order.
        reason: sentence on why; empty: not told.
    """

    event: Literal["shares_changed"]
    step: Count
    after: tuple[Count, ...]
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExchangeChanged(Happened):
    """A change of compressor, ratio or collective from the next step on.

    Attributes:
        step: number of steps before the change.
        after: name of the new exchange, such as ``topk 0.01 by all_gather``.
        reason: sentence on why; empty: not told.
    """

    event: Literal["exchange_changed"]
    step: Count
    after: Name
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Audited(Happened):
    """A step whose batch the leader computed whole, and the others in shares.

    Attributes:
        step: its number.
        distance: relative distance of the gradient of the shares from the leader's.
        tolerance: distance that the run accepts.
    """

    event: Literal["audited"]
    step: Count
    distance: Factor
    tolerance: Factor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PairedTrialEnded(Happened):
    """The result of a paired trial: whether sparsified gradients hold training back.

    Attributes:
        step: number of steps before the trial.
        ratio: fraction of the elements that one of the two copies learned from.
        says: the verdict, one word.
        took_s: seconds that the trial took.
    """

    event: Literal["twins_tried"]
    step: Count
    ratio: Annotated[float, Field(gt=0, le=1)]
    says: Name
    took_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MemoryBoundLearned(Happened):
    """The largest micro-batch that fits into a worker's memory, learned by running out of it.

    Attributes:
        step: number of steps before; None: not told.
        rank: of the worker.
        samples: of the largest micro-batch that fits.
    """

    event: Literal["memory_bound_learned"]
    step: Count | None = None
    rank: Count
    samples: Count


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WorkerLost(Happened):
    """The end of a worker, whose work others take over.

    Attributes:
        host: name of the worker's host.
        reason: sentence on why; empty: not told.
    """

    event: Literal["worker_lost"]
    host: Name
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WorkersChanged(Happened):
    """A new generation of workers that train.

    Attributes:
        step: number of steps before.
        lost: places, in the run's spec, of workers that were there before and are not now.
        new: places of workers that joined.
        source: what the generation goes on from, ``memory`` by default; ``from`` in JSON.
        recovery_s: seconds since the loss was noticed; None: no worker was lost.
    """

    event: Literal["workers_changed"]
    step: Count
    lost: tuple[Count, ...] = ()
    new: tuple[Count, ...] = ()
    source: Name = Field(default="memory", alias="from")
    recovery_s: Seconds | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunFailure(Happened):
    """The reason why a run cannot go on; the first one since workers started is the cause.

    Attributes:
        reason: sentence on what went wrong.
        hint: what would help; None: not known.
    """

    event: Literal["run_failed"]
    reason: Sentence = "no reason was given"
    hint: Sentence | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SessionFinished(Happened):
    """The orderly end of a script's session, after ``step`` steps and ``epoch`` passes over the data set."""

    event: Literal["session_finished"]
    step: Count
    epoch: Factor = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConditionChanged(Happened):
    """A change of a host from now on.

    Attributes:
        host: its name; ``*``: every host.
        speed: new relative speed; None: unchanged.
        rate_bits_per_s: new link rate; None: unchanged.
        dies: the host is lost.
        returns: a lost host is there again.
        notice: the host will be taken away soon.
        cut: the host reaches nobody until it heals.
        heals: a host that was cut off reaches the others again.
        step: number of steps before; None: not told.
        reason: sentence on why; empty: not told.
    """

    event: Literal["condition_changed"]
    host: Name
    speed: Factor | None = None
    rate_bits_per_s: Bytes | None = None
    dies: bool = False
    returns: bool = False
    notice: bool = False
    cut: bool = False
    heals: bool = False
    step: Count | None = None
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClockJumped(Happened):
    """A jump of the machine's clock by ``by_s`` seconds, as it was set, or stood still with the machine."""

    event: Literal["clock_jumped"]
    by_s: Annotated[float, Field(ge=-1e11, le=1e11)]


Action = Literal["replace", "on-demand"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisorActed(Happened):
    """An action of the supervisor on a run that falls short of its plan.

    Attributes:
        step: number of steps before; None: not told.
        action: ``on-demand``: the run moves to on-demand machines; ``replace``: a host is replaced, in old logs.
        host: its name; empty: all.
        reason: sentence on why; empty: not told.
    """

    event: Literal["supervisor_acted"]
    step: Count | None = None
    action: Action
    host: Name = ""
    reason: Sentence = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProbeEvent(Happened):
    """An event of a probe, whose fields `hetopt.profiler.records` describes and `collect` reads."""

    event: ProbeKind


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Noted(Happened):
    """An event for readers of the log itself, of which nothing is computed."""

    event: Literal["network_measured"]


LogEvent = Annotated[
    RunStarted
    | TrainingStarted
    | StepsLogged
    | Evaluated
    | CheckpointSaved
    | Remarked
    | TrainingFinished
    | SharesChanged
    | ExchangeChanged
    | Audited
    | PairedTrialEnded
    | MemoryBoundLearned
    | WorkerLost
    | WorkersChanged
    | RunFailure
    | SessionFinished
    | ConditionChanged
    | ClockJumped
    | SupervisorActed
    | ProbeEvent
    | Noted,
    Field(discriminator="event"),
]
"""Any event of a log; the field ``event`` tells the kinds apart."""

ANY_EVENT: TypeAdapter[LogEvent] = TypeAdapter(LogEvent)
"""Pydantic's adapter that validates any event of a log."""
