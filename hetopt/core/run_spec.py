"""`RunSpec`: everything a worker needs to know about the run, and nothing about why it was chosen."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hetopt.core.artifact import HostName, Record, RecordLeavingOut, renamed
from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT
from hetopt.core.policy_settings import BATCH_SETTINGS, RATIO_SETTINGS, Settings, check_settings
from hetopt.core.precision import Precision
from hetopt.core.probe_schedule import ProbeSchedule
from hetopt.core.scaled_emulation import DeclaredTime, ScaledEmulation
from hetopt.core.stream import Stream
from hetopt.core.synchronization import Injection, Partition, Synchronization

OWN_NAME = r"^[a-z][a-z0-9_-]{0,63}$"
"""What a person who adds a batch policy or a backend may call it."""

DATA_PLACE = "{data}"
"""In the arguments of a script: where it is told the folder of its data, which is another on each machine."""

BATCH_POLICIES: dict[str, str] = {
    "uniform": "equal shares",
    "static": "the plan's shares",
    "proportional": "in proportion to the throughput of the last epoch",
    "dynamic": "the same each period, smoothed, with a dead-band and a growth cap",
    "omnilearn": "the same each epoch, with a wide dead-band and bounds",
    "allocation": "whole micro-batches in proportion to throughput, until the times agree",
    "model": "the exact solution for the lines that the workers' times follow",
    "rate": "what each worker's stream brings in a set time; their sum changes",
}
"""Who shares the global batch, and how. `hetopt.trainer.policies.choose` makes them, and registers others."""

BatchPolicy: TypeAlias = str
"""One of `BATCH_POLICIES`; one that a task or a script registers is known where that is imported."""
"""How the global batch is shared while the run goes on; each is explained in `hetopt.trainer.policies`."""

LearningRateRule = Literal["fixed", "adascale"]
"""``fixed``: the plan's scale, whichever rule it came from. ``adascale``: follows the measured gradient noise."""

RatioPolicyName = Literal["fixed", "warm_up", "accordion", "gravac", "threshold", "scan", "auto"]
"""Who decides how much of the gradient is sent; each is explained in `hetopt.trainer.policies.ratio.choose`."""

WEIGHS_WAYS: tuple[RatioPolicyName, ...] = ("scan", "auto")
"""Those that weigh whole ways to exchange by their time, compressor and collective included, and not a ratio alone."""

Prefetch = Literal["auto", "on", "off"]
"""Whether a worker that reads its samples itself does so ahead, in a thread; ``auto``: where reading takes long."""


class Compression(RecordLeavingOut):
    """How gradients travel: the compressor, the fraction of elements it sends, and what should not be as it proposes.

    A file says only what differs from the defaults; what goes together is in `hetopt.core.comm.composition`.
    """

    WRITTEN = ("name", "ratio")

    name: str = "identity"
    ratio: float = Field(default=1.0, gt=0, le=1)
    collective: str = Field(default="auto", description="how payloads of workers meet")
    memory: str = Field(default="auto", description="what becomes of what is not sent")
    bits: PositiveInt | None = Field(default=None, description="width of a quantiser's codes on the wire")
    levels: PositiveInt | None = Field(default=None, description="of a quantiser; absent: as many as its codes hold")
    rank: PositiveInt | None = Field(default=None, description="of PowerSGD's factors")
    floor_ratio: float | None = Field(
        default=None, gt=0, le=1, description="select from a selection of this fraction, as GraVAC does"
    )
    least_gain: PositiveFloat | None = Field(
        default=None,
        description="part of the energy that a step's payload keeps at least: the selection, else the floor's, "
        "else everything",
    )
    coding: str | None = Field(default=None, description="of selected elements; absent: plain")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="of momentum correction")
    clip_norm: PositiveFloat | None = Field(
        default=None, description="largest norm of the whole gradient; each worker clips its own part to its share"
    )


class WorkerSpec(Record):
    """One worker (one process, one device), in rank order."""

    host: HostName = Field(description="name of the machine the worker runs on, unique in the run")
    type: str = Field(description="device type it was planned as: a catalogue name or 'local'")
    local_batch_size: PositiveInt
    slowdown: PositiveFloat = Field(default=1.0, ge=1, description="compute takes so many times as long")
    declared: DeclaredTime | None = Field(default=None, description="compute takes so long; absent: as long as it does")
    threads: PositiveInt | None = Field(default=None, description="CPU threads; absent: what torch chooses")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_local_batch_size: PositiveInt | None = Field(
        default=None,
        description="samples that its memory holds at once; a task computes a larger local batch in micro-batches",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_named_before(cls, value: object) -> object:
        """Files of 0.1 call the slowdown factor ``pace``."""
        return renamed(value, {"pace": "slowdown"})


class StopRule(Record):
    """When training ends: at the first of those that are given."""

    max_steps: PositiveInt | None = None
    max_epochs: PositiveFloat | None = None
    target: bool = Field(default=False, description="stop as soon as the task's target is reached")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.max_steps is None and self.max_epochs is None and not self.target:
            raise ValueError("a run needs max_steps, max_epochs or target, or it would never end")
        return self


class RunSpec(RecordLeavingOut):
    """One run of the trainer: the task, the workers with their shares, and the rules of the game."""

    LEFT_OUT = ("resumes", "ratio_settings", "batch_settings")

    task: str
    script: tuple[str, ...] = Field(
        default=(), description="a training script with a session, and its arguments, in place of a task"
    )
    resumes: bool = Field(
        default=True, description="goes on from checkpoints; false: a script that saves none begins again"
    )
    data_dir: str | None = None
    seed: NonNegativeInt = 0
    workers: tuple[WorkerSpec, ...] = Field(min_length=1)
    compression: Compression = Field(
        default=Compression(), description="of gradients; under 'auto' where to begin, else its ratio is the smallest"
    )
    ratio_policy: RatioPolicyName = "fixed"
    ratio_settings: Settings = Field(default={}, description="of the ratio policy, that are not the usual ones")
    collective_policy: Literal["fixed", "cheapest"] = Field(
        default="fixed", description="whether the collective follows the network while the run goes on"
    )
    slowdown_coefficient: NonNegativeFloat = Field(
        default=CAUTIOUS_COEFFICIENT,
        description="what compression costs in steps, before it is seen: see hetopt.core.compression_slowdown",
    )
    sync: Synchronization = Field(default=Synchronization(), description="when workers put together what they learned")
    partition: Partition = Field(default=Partition(), description="which samples a worker may see")
    injection: Injection | None = Field(default=None, description="samples that workers hand on to each other")
    stream: Stream | None = Field(default=None, description="samples are trained on as they arrive; absent: in epochs")
    exchange_timeout_s: PositiveFloat = Field(default=300.0, description="a worker that is later than this is lost")
    batch_policy: BatchPolicy = Field(default="model", pattern=OWN_NAME, examples=list(BATCH_POLICIES))
    batch_settings: Settings = Field(default={}, description="of the batch policy, likewise")
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="samples that are computed together; shares are whole multiples under 'allocation'"
    )
    learning_rate_scale: PositiveFloat = 1.0
    learning_rate_rule: LearningRateRule = "fixed"
    precision: Precision = Field(default="fp32", description="what matrices are multiplied in")
    prefetch: Prefetch = "auto"
    loader_processes: NonNegativeInt = Field(
        default=0, description="processes of each worker that read its samples ahead; 0: the worker reads them itself"
    )
    stop: StopRule
    evaluate_every_epochs: PositiveFloat = 1.0
    control_period_steps: PositiveInt = Field(default=20, description="steps between looks at the gathered statistics")
    checkpoint_every_s: PositiveFloat = 60.0
    probe: ProbeSchedule | None = Field(default=None, description="profile instead of train")
    max_restarts: NonNegativeInt = Field(
        default=0, description="how often a worker that is killed is replaced, and then how often all start again"
    )
    miniature: ScaledEmulation | None = Field(
        default=None, description="the rehearsed cluster, where the run is a rehearsal"
    )

    @model_validator(mode="after")
    def _workers_live_on_the_hosts(self) -> Self:
        if self.miniature is None:
            return self
        ranked = [host.name for host in self.miniature.hosts for _ in range(host.workers)]
        if ranked != [worker.host for worker in self.workers]:
            raise ValueError("the workers must be those of the miniature's hosts, host by host")
        return self

    @model_validator(mode="after")
    def _policies_have_such_settings(self) -> Self:
        check_settings(self.ratio_policy, self.ratio_settings, RATIO_SETTINGS)
        check_settings(self.batch_policy, self.batch_settings, BATCH_SETTINGS)
        return self

    @model_validator(mode="after")
    def _stream_suits_the_run(self) -> Self:
        stream = self.stream
        if stream is None:
            if self.batch_policy == "rate":
                raise ValueError("the batch policy 'rate' follows streams, and the run has none")
            return self
        if stream.rates and len(stream.rates) != len(self.workers):
            raise ValueError(f"there are {len(stream.rates)} rates of streams for {len(self.workers)} workers")
        if stream.patience_s >= self.exchange_timeout_s:
            raise ValueError(
                f"the patience with streams, {stream.patience_s:g} s, must be shorter than the exchange timeout, "
                f"{self.exchange_timeout_s:g} s, or other workers give up first"
            )
        if self.learning_rate_rule == "adascale":
            raise ValueError("on a stream the learning rate follows the batch, not the noise: use the rule 'fixed'")
        if self.loader_processes:
            raise ValueError("a stream is read as it arrives, not by loader processes")
        return self

    @property
    def is_local(self) -> bool:
        """Whether workers apply their own gradients, and are brought together now and then."""
        return len(self.workers) > 1 and self.sync.is_local

    @property
    def steers_exchange(self) -> bool:
        """Whether what is sent, or how, may change while the run goes on."""
        may_change = self.ratio_policy != "fixed" or self.collective_policy != "fixed"
        return len(self.workers) > 1 and not self.is_local and may_change

    @property
    def weighs_ways(self) -> bool:
        """Whether the ratio policy chooses among whole ways to exchange."""
        return self.ratio_policy in WEIGHS_WAYS

    @property
    def is_elastic(self) -> bool:
        """Whether workers that lose others go on with what they have in memory.

        Where workers differ, or may come to differ, in more than their place in the batch, all of them start again from
        a checkpoint.
        """
        one_model = not self.is_local and not self.sync.may_settle
        alike = one_model and self.partition.name == "global" and self.injection is None and self.stream is None
        return self.max_restarts > 0 and not self.script and len(self.workers) > 1 and self.probe is None and alike

    @property
    def script_command(self) -> tuple[str, ...]:
        """The script and its arguments, with the folder of the data where they say `DATA_PLACE`."""
        return tuple(one.replace(DATA_PLACE, self.data_dir or DATA_PLACE) for one in self.script)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all workers."""
        return sum(worker.local_batch_size for worker in self.workers)
