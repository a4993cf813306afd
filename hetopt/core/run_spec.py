"""`RunSpec`: all that workers need to know of a run, without the reasons for it, and how people write its parts.

With the records that it is made of: the settings of published policies, streams of samples, the schedule of a probe;
and the place of a host among its workers (`Node`).

What the published policies can be told beyond their name, in the one grammar: `gravac(window=50, eps=0.7)`.

Of who decides how much of the gradient is sent (`RATIO_SETTINGS`), and of who shares the global batch
(`BATCH_SETTINGS`). Each default is the published one, or what stands for it where none was printed. A run keeps only
what was said otherwise.

What a rehearsed cluster is made of: its hosts and links, and what happens to them while a run goes on; and the size
of what trains in the place of a job that this machine cannot train.

When workers put together what they have learned, which samples each of them sees, and which they hand on: the
records, and how a person writes them.

selsync(0.3)               local-sgd(8, outer_rate=0.7)       labels(1)
selsync(auto, share=0.2)   fedavg(0.5, 2, stretch=1.5)
diloco(50)                 local-sgd(50, outer_rate=0.7, outer_momentum=0.9), in a word
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from hetopt.core.artifact import HostName, Record, RecordLeavingOut, faults
from hetopt.core.errors import BadInput
from hetopt.core.grammar import FRACTION, Unit, arguments, call, record, written
from hetopt.core.hosts import AddressAmongHosts
from hetopt.core.memory import Precision, Sharding
from hetopt.core.plain_text import known
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT

SyncName = Literal["bsp", "local-sgd", "fedavg", "selsync"]
"""Each is explained in `hetopt.trainer.sync.synchroniser`."""

Votes = Literal["any", "majority", "quantile"]
"""How many workers have to ask for a synchronisation: one, more than half, or a stated part of them."""

PartitionName = Literal["global", "shards", "seldp", "labels"]
"""Each is explained in `hetopt.trainer.data.cursor`."""


POLICIES: Mapping[SyncName, str] = MappingProxyType(
    {
        "bsp": "gradients are summed in every step",
        "local-sgd": "parameters are averaged every H steps",
        "fedavg": "parameters of a part of the workers are averaged some times an epoch",
        "selsync": "parameters are averaged while gradients change (SelSync)",
    }
)


class _Named(RecordLeavingOut):
    """A choice by name; a file says only what differs from the defaults."""

    WRITTEN = ("name",)


class Synchronization(_Named):
    """The synchronization of the workers' models: by gradients in every step, or by parameters now and then.

    Attributes:
        name: of the policy.
        every_steps: ``local-sgd``: parameters are averaged after so many steps (H).
        participants: ``fedavg``: part of the workers whose parameters enter an average (C); all of them receive it.
        every_epochs: ``fedavg``: parameters are averaged after so many passes over the data (E).
        delta: ``selsync``: relative change of a worker's gradient norm from which it votes to synchronise; ``auto``:
            steered so that ``synchronised_share`` holds; ``never``: votes are counted in vain.
        synchronised_share: ``selsync(auto)``: part of the steps that are to end in a synchronisation.
        votes: of whom it takes how many.
        quorum: ``votes = quantile``: the part of the workers that has to vote for it.
        max_local_steps: ``selsync``: no more steps in a row without a synchronisation; absent: any number.
        window: ``selsync`` with a fixed delta: first steps, each of which synchronises while the mean of the norm
            settles. Under ``auto`` averages become rarer from the first step on.
        smoothing: ``selsync``: weight of the newest squared norm in that moving mean.
        vote_lag: steps between a vote and the synchronisation that it asks for. 1: votes travel while the next step is
            computed; 0: every step waits for them, as published.
        outer_rate: what part of the way to the average is gone at a synchronisation (r); 1: all of it.
        outer_momentum: Nesterov's, of those steps (m): DiLoCo has 0.7 and 0.9.
        stretch: epochs that the task's schedule of the learning rate takes for one of its own. Workers that average now
            and then need more steps than those that sum every gradient, and a rate that falls as early ends training
            before they were taken.
    """

    name: SyncName = "bsp"
    every_steps: PositiveInt = 8
    participants: float = Field(default=1.0, gt=0, le=1)
    every_epochs: PositiveFloat = 0.25
    delta: NonNegativeFloat | Literal["auto", "never"] = 0.3
    synchronised_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    votes: Votes = "any"
    quorum: float = Field(default=0.25, gt=0, le=1)
    max_local_steps: PositiveInt | None = None
    window: PositiveInt = 25
    smoothing: float = Field(default=0.16, gt=0, le=1)
    vote_lag: int = Field(default=1, ge=0, le=1)
    outer_rate: PositiveFloat = 1.0
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    stretch: PositiveFloat = 1.0

    @property
    def is_local(self) -> bool:
        """True where workers apply their own gradients and average parameters, instead of summing gradients."""
        return self.name != "bsp"


class Partition(_Named):
    """The rule for which of the data set's samples a worker may see.

    Attributes:
        name: of the rule.
        labels: ``labels``: how many labels a worker's samples have.
    """

    name: PartitionName = "global"
    labels: PositiveInt = 1


class Injection(Record):
    """The fractions of workers and samples by which workers pass on data that only some of them have.

    In every step ``ceil(workers * N)`` of the N workers, drawn anew, give the others a copy of a part of their samples.

    Attributes:
        workers: part of the workers that give (alpha).
        samples: part of the samples of a step that a giver gives (beta).
    """

    workers: float = Field(gt=0, le=1)
    samples: float = Field(gt=0, le=1)


DILOCO = "diloco"
"""Local SGD with the outer step of arXiv 2311.08105, whose paper found rate and momentum."""

_FIRST: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every",),
    "fedavg": ("participants", "epochs"),
    "selsync": ("delta",),
    "labels": ("labels",),
}
"""Keys whose values may be written without them, in this order."""

_AVERAGED = ("outer_rate", "outer_momentum", "stretch")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local-sgd": ("every", *_AVERAGED),
    "fedavg": ("participants", "epochs", *_AVERAGED),
    "selsync": ("delta", "share", "votes", "quorum", "max_local", "window", "smoothing", "vote_lag", *_AVERAGED),
    "labels": ("labels",),
}
_FIELDS: Mapping[str, str] = {
    "share": "synchronised_share",
    "every": "every_steps",
    "epochs": "every_epochs",
    "max_local": "max_local_steps",
}
"""Of keys that are shorter than their fields; the field's own name is understood as well."""

_UNITS: Mapping[str, Unit] = dict.fromkeys(("synchronised_share", "participants", "quorum", "gentle"), FRACTION)


def parse_sync(text: str, *, option: str = "`sync`") -> Synchronization:
    """Parse how workers synchronize, such as ``local-sgd(8)``; errors name ``option``.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    item = call(text, option)
    name = known(item.name, (*POLICIES, DILOCO), "synchronisation")
    defaults: dict[str, object] = {"name": name}
    if name == DILOCO:
        name = "local-sgd"
        defaults = {"name": name, "outer_rate": 0.7, "outer_momentum": 0.9}
    first = _FIRST.get(name, ())
    return record(Synchronization, item, _fields(name), first=first, units=_UNITS, defaults=defaults)


def parse_partition(text: str, *, option: str = "`partition`") -> Partition:
    """Parse the rule for which samples a worker sees, such as ``labels(1)``; errors name ``option``.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    item = call(text, option)
    name = known(item.name, get_args(PartitionName), "partition")
    return record(Partition, item, _fields(name), first=_FIRST.get(name, ()), defaults={"name": name})


def parse_injection(text: str, *, option: str = "`inject`") -> Injection:
    """Parse ``0.25, 0.1``: the fraction of workers that pass on samples, and of their samples; errors name ``option``.

    Raises:
        BadInput: not two fractions.
    """
    keys = {"workers": "workers", "samples": "samples"}
    return record(Injection, arguments(text, option), keys, first=keys, units=dict.fromkeys(keys, FRACTION))


def spell_sync(sync: Synchronization) -> str:
    """Format a synchronization as `parse_sync` reads it."""
    return _spell(sync, sync.name)


def spell_partition(partition: Partition) -> str:
    """Format a partition as `parse_partition` reads it."""
    return _spell(partition, partition.name)


def _fields(name: str) -> dict[str, str]:
    keys = {key: _FIELDS.get(key, key) for key in _KEYS.get(name, ())}
    return {**keys, **{field: field for field in keys.values()}}


def _spell(said: Record, name: str) -> str:
    first, defaults = _FIRST.get(name, ()), type(said).model_fields
    values = {key: getattr(said, _FIELDS.get(key, key)) for key in _KEYS.get(name, ())}
    changed = {key: value for key, value in values.items() if value != defaults[_FIELDS.get(key, key)].default}
    return written(name, [values[key] for key in first], {k: v for k, v in changed.items() if k not in first})


EVERY_HOST = "*"


class DeclaredTime(Record):
    """The compute time of a rehearsed worker's step on the real machine: ``fixed_s + per_sample_s * samples``.

    The worker computes for real and then waits until that time is over.
    """

    fixed_s: NonNegativeFloat = 0.0
    per_sample_s: PositiveFloat


class EmulatedHost(Record):
    """A rehearsal's emulated host: a network namespace with one link, and a number of workers.

    ``speed`` is relative, in whatever unit the rehearsal was described in; changes are given in the same unit.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9]{0,7}$")
    workers: PositiveInt = 1
    speed: PositiveFloat = 1.0
    rate_bits_per_s: PositiveFloat | None = Field(default=None, description="both directions; absent: not limited")


class Change(Record):
    """A change of a rehearsal's host, or of every host ('*'), at a time or step of the run.

    It happens ``at_s`` seconds after training began, or as soon as ``at_step`` is seen; with neither, at once. A host
    that has died may return; one that has notice will die soon; one that is cut off reaches nobody until it heals.
    """

    host: str
    at_s: NonNegativeFloat | None = None
    at_step: NonNegativeInt | None = None
    speed: PositiveFloat | None = None
    rate_bits_per_s: PositiveFloat | None = None
    dies: bool = False
    returns: bool = False
    notice: bool = False
    cut: bool = False
    heals: bool = False

    @model_validator(mode="after")
    def _is_one_change(self) -> Self:
        if self.at_s is not None and self.at_step is not None:
            raise ValueError("a change happens at a time or at a step, not both")
        fates = self.dies + self.returns + self.notice + self.cut + self.heals
        if self.speed is None and self.rate_bits_per_s is None and not fates:
            raise ValueError("a change needs a speed, a rate or a death")
        if fates > 1:
            raise ValueError("a host dies, returns, has notice, is cut off or heals: one at a time")
        return self


class ScaledEmulation(Record):
    """A cluster emulated on one machine: its hosts, in order of their workers' ranks, and scheduled changes.

    ``time_factor`` says how many times slower links are than in the cluster that is rehearsed. Computation takes as
    many times as long, unless something with a smaller gradient stands in for the job.
    """

    hosts: tuple[EmulatedHost, ...] = Field(min_length=1)
    time_factor: PositiveFloat = 1.0
    changes: tuple[Change, ...] = ()


class Conditions(Record):
    """The present speeds of a rehearsal, written by its conductor and read by every worker between steps.

    Attributes:
        slowdown: the whole miniature runs so many times slower than was planned, because the real computation did not
            fit into the declared time.
        speed_factors: present speed over declared speed, by host; a host that is not named is as declared.
    """

    slowdown: PositiveFloat = Field(default=1.0, ge=1)
    speed_factors: dict[str, PositiveFloat] = Field(default_factory=dict)


STAND_IN = "stand-in"
"""The bundled task that trains in the place of a job that this machine cannot train."""

PARAMETERS = 250_000
"""In single precision: a gradient of 1 MB. Links are scaled to it, so that a step exchanges as long as the job's would:
110 million parameters over 10 Gbit/s are as slow as 1 MB over 23 Mbit/s, which a network on a few cores carries."""

LAYERS = 10
"""Its parameters are so many vectors of one length: a real gradient does not come at once either."""

SHAPES = ((PARAMETERS // LAYERS,),) * LAYERS
GRADIENT_BYTES = 4 * PARAMETERS


Settings: TypeAlias = dict[str, int | float | str | bool]
"""Settings of a policy that differ from its defaults, by key."""

Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]


BufferPolicy = Literal["persistence", "truncation", "bounded_age"]
"""What becomes of samples that arrived and were not taken: all wait, only a batch of the newest does, or those younger
than a set age do."""


class Stream(Record):
    """The rates at which each worker's samples arrive, what becomes of waiting ones, and how batches follow.

    Attributes:
        rates: samples a second that arrive at each worker, in rank order.
        buffer: what becomes of samples that wait.
        max_age_s: of samples that wait, under ``bounded_age``.
        batch_interval_s: under the batch policy ``rate`` a batch is what arrives in this time. The paper's is 1 s.
        min_batch: samples of a worker, at least.
        max_batch: at most.
        learning_rate: how it follows the batch: the run's is for the plan's global batch.
        max_learning_rate_scale: it follows no further than by this factor, up or down. The paper has no cap, and loses
            accuracy by it.
        patience_s: a stream that gives no batch for so long ends the run.
    """

    rates: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    buffer: BufferPolicy = "persistence"
    max_age_s: PositiveFloat = 10.0
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
        return self

    def batch(self, rate_per_s: float) -> int:
        """Return a worker's local batch size for ``rate_per_s`` samples a second: ``clip(S t, min, max)``.

        (arXiv 2301.08897; ``t`` is ``batch_interval_s``.)
        """
        return max(self.min_batch, min(self.max_batch, round(rate_per_s * self.batch_interval_s)))


class GravacSettings(Record):
    """The settings of the ratio policy ``gravac`` (arXiv 2305.12201).

    Attributes:
        window: steps for which a candidate factor is tried.
        eps: least retained energy of what is sent.
        omega: relative difference of throughputs that counts as none.
        floor: first compression factor; 10 sends a tenth.
        raises: how the candidate factor grows.
        smoothing: weight of the newest throughput.
    """

    window: PositiveInt = 500
    eps: PositiveFloat = 0.7
    omega: Annotated[float, Field(ge=0, lt=1)] = 0.01
    floor: Annotated[float, Field(ge=1)] = 10.0
    raises: Literal["exponential", "geometric"] = "exponential"
    smoothing: Share = 0.3


class AccordionSettings(Record):
    """The settings of the ratio policy ``accordion`` (MLSys 2021), with its released defaults.

    The paper has threshold 0.5, smoothing 1, 10 epochs, and decay.

    Attributes:
        gentle: ratio in critical regimes; absent: ten times the run's.
        threshold: relative change of the gradient's norm that makes a regime critical.
        smoothing: weight of the newest norm.
        epochs: between looks; 0: every control period.
        decay: a learning rate that has fallen is critical too.
    """

    gentle: Share | None = None
    threshold: PositiveFloat = 0.2
    smoothing: Share = 0.5
    epochs: Annotated[float, Field(ge=0)] = 0.0
    decay: bool = False


class ThresholdSettings(Record):
    """The settings of the ratio policy ``threshold``, the rule of ScaDLES (arXiv 2301.08897).

    Attributes:
        delta: most of the gradient's energy, as a fraction, that a worker votes to lose.
        combine: how the workers' votes become a decision.
    """

    delta: Part = 0.3
    combine: Literal["majority", "any", "all", "mean"] = "majority"


class ScanSettings(Record):
    """The settings of the ratio policy ``scan``, the choice of AR-Topk (arXiv 2312.02493).

    Attributes:
        time, gain: weights of the two objectives.
        sensitivity: relative change of either that calls for another scan.
        least_gain: below which nothing is chosen while there is something above it; the paper has no such floor (0).
    """

    time: Annotated[float, Field(ge=0)] = 0.6
    gain: Annotated[float, Field(ge=0)] = 0.4
    sensitivity: Annotated[float, Field(ge=0)] = 0.1
    least_gain: Part = 0.05


class ProportionalSettings(Record):
    """The settings of the batch policy ``proportional`` (arXiv 2110.08941).

    Attributes:
        every: when shares are decided anew.
    """

    every: Literal["epoch", "period"] = "epoch"


class DynamicSettings(Record):
    """The settings of the batch policy ``dynamic`` (arXiv 2305.12213).

    Attributes:
        smoothing: weight of the newest time.
        dead_band: relative change of a share below which all shares stay.
        least, most: bounds of a share, in units of an equal share; absent: none above.
        every: when shares are decided anew.
    """

    smoothing: Share = 0.5
    dead_band: Annotated[float, Field(ge=0)] = 0.05
    least: Part = 0.0
    most: Annotated[float, Field(ge=1)] | None = None
    every: Literal["epoch", "period"] = "period"


class AllocationSettings(Record):
    """The settings of the batch policy ``allocation`` (arXiv 2111.08272).

    Attributes:
        micro: samples of a micro-batch; absent: the run's, or an eighth of an equal share.
        tolerance: relative difference of compute times that is left alone; absent: what one micro-batch resolves.
        every: when shares are decided anew.
    """

    micro: PositiveInt | None = None
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
    every: Literal["epoch", "period"] = "epoch"


class CriticalSettings(Record):
    """The settings of the batch policy ``critical``, whose global batch follows the gradient noise.

    Attributes:
        most: largest global batch, in units of the planned one.
        least_gain: least fraction of the time for equal progress that a change must save.
    """

    most: Annotated[float, Field(ge=1)] = 8.0
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.05


RATIO_SETTINGS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "gravac": GravacSettings,
        "accordion": AccordionSettings,
        "threshold": ThresholdSettings,
        "scan": ScanSettings,
    }
)
BATCH_SETTINGS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "proportional": ProportionalSettings,
        "dynamic": DynamicSettings,
        "allocation": AllocationSettings,
        "critical": CriticalSettings,
    }
)


def parse_policy(
    text: str, names: Iterable[str], settings: Mapping[str, type[Record]], where: str, what: str
) -> tuple[str, Settings]:
    """Parse a policy, ``name(key=value)``, into its name and the settings that differ from the defaults.

    Raises:
        BadInput: an unknown name or key, or a value that cannot be.
    """
    item = call(text.strip(), where)
    name = known(item.name, names, what)
    kind = settings.get(name, Record)
    keys = {key: key for key in kind.model_fields}
    chosen = record(kind, item, keys, units={key: unit for key, unit in _UNITS.items() if key in keys})
    return name, chosen.model_dump(exclude_defaults=True)


def spell_policy(name: str, settings: Settings) -> str:
    """Format a policy's name and settings, ``name(key=value)``, as `parse_policy` reads it."""
    return written(name, pairs=settings)


def check_settings(name: str, settings: Settings, kinds: Mapping[str, type[Record]]) -> None:
    """Raise ValueError for settings of a policy that its record in ``kinds`` does not have or allow.

    Raises:
        ValueError: it has no such setting, or not with that value.
    """
    try:
        kinds.get(name, Record).model_validate(settings)
    except ValidationError as error:
        raise ValueError(f"{name}: {faults(error)[0]}") from None


class Sweep(Record):
    """A schedule for measuring step times over local batch sizes, for one division of the host's processors."""

    concurrent_workers: PositiveInt = Field(description="workers that compute at the same time; the others wait")
    threads_per_worker: PositiveInt
    local_batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1)
    warmup_steps: PositiveInt = 5
    timed_steps: PositiveInt = 20
    time_limit_s: PositiveFloat = Field(description="larger batch sizes are left out once this much time is spent")
    precision: Precision = "fp32"


class NetworkProbe(Record):
    """A schedule for timing collectives between all workers of the probe."""

    payload_bytes: tuple[PositiveInt, ...] = (4_096, 65_536, 1_048_576, 4_194_304)
    warmup: PositiveInt = 3
    most_rounds: PositiveInt = 12


class CompressorProbe(Record):
    """A schedule for timing compressors at several ratios."""

    names: tuple[str, ...] = ("topk", "bf16", "int8", "int4")
    ratios: tuple[float, ...] = (0.1, 0.01, 0.001)
    repeats: PositiveInt = 5
    time_limit_s: PositiveFloat | None = Field(
        default=None, description="of each division of the host, after which other ways than the usual are left out"
    )


class PilotProbe(Record):
    """A schedule of one pilot: a short training run towards the target at one global batch size."""

    global_batch_size: PositiveInt
    time_limit_s: PositiveFloat
    max_epochs: PositiveInt
    sample_every_steps: PositiveInt = Field(
        default=10, description="steps between samples of noise and gain, which are taken in the first pilot only"
    )
    repeat: NonNegativeInt = Field(default=0, description="added to the schedule's seed, to see the spread over seeds")
    sync: str | None = Field(
        default=None, description="such as 'local-sgd(8)'; absent: gradients are summed in every step"
    )
    precision: Precision = "fp32"


class ProbeSchedule(Record):
    """The schedule of a whole profiling run: sweeps of step times, collectives, compressors and pilots."""

    seed: NonNegativeInt
    sweeps: tuple[Sweep, ...]
    network: NetworkProbe | None = None
    compressors: CompressorProbe | None = None
    pilots: tuple[PilotProbe, ...] = ()
    gain_ratios: tuple[float, ...] = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    noise_groups: PositiveInt = Field(default=8, description="micro-batches a noise sample is estimated from")
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    gain_residual_ratios: tuple[float, ...] = Field(
        default=(0.1, 0.01, 0.001),
        description="ratios at which error feedback is followed; a gain is measured on the residual of the nearest one",
    )
    exchanges: tuple[str, ...] = Field(
        default=(), description="ways to exchange that are tried on gradients of pilots, as people write them"
    )
    time_limit_s: PositiveFloat | None = Field(
        default=None, description="pilots are cut short, and later ones left out, once the probe took so long"
    )
    from_checkpoint: str | None = Field(
        default=None, description="folder of a run or checkpoint where the pilots begin; absent: with new weights"
    )


OWN_NAME = r"^[a-z][a-z0-9_-]{0,63}$"
"""Pattern of the names that added batch policies and backends may have."""

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
    "critical": "as model; the batch grows while the gradient noise makes that pay",
}
"""Who shares the global batch, and how. `hetopt.trainer.policies.policy` makes them, and registers others."""

RatioPolicyName = Literal["fixed", "warm_up", "accordion", "gravac", "threshold", "scan", "auto"]
"""Who decides how much of the gradient is sent; each is explained in `hetopt.trainer.steps.adaptive_controller`."""

WEIGHS_WAYS: tuple[RatioPolicyName, ...] = ("scan", "auto")
"""Those that weigh whole ways to exchange by their time, compressor and collective included, and not a ratio alone."""

Prefetch = Literal["auto", "on", "off"]
"""Whether a worker that reads its samples itself does so ahead, in a thread; ``auto``: where reading takes long."""


class Compression(RecordLeavingOut):
    """The compression of gradients: the compressor, the fraction of elements it sends, and overrides of its defaults.

    A file says only what differs from the defaults; what goes together is in `hetopt.core.comm.composition`.
    """

    WRITTEN = ("name", "ratio")

    name: str = "identity"
    ratio: float = Field(default=1.0, gt=0, le=1)
    collective: str = Field(default="auto", description="by which workers' payloads are combined")
    memory: str = Field(default="auto", description="what becomes of elements that are not sent")
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
    """A worker of a run (one process, one device): its host, local batch size, slowdown and memory bound."""

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


class StopRule(Record):
    """The end of training: the first of the limits that are given."""

    max_steps: PositiveInt | None = None
    max_epochs: PositiveFloat | None = None
    target: bool = Field(default=False, description="stop as soon as the task's target is reached")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.max_steps is None and self.max_epochs is None and not self.target:
            raise ValueError("a run needs max_steps, max_epochs or target, or it would never end")
        return self


class RunSpec(RecordLeavingOut):
    """All that workers need to know of a run: task or script, workers with local batch sizes, policies, and the end."""

    LEFT_OUT = ("resumes", "ratio_settings", "batch_settings", "shard")

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
        description="what compression costs in steps, before it is seen: see hetopt.core.training_laws",
    )
    sync: Synchronization = Field(
        default=Synchronization(), description="when workers sum gradients or average parameters"
    )
    partition: Partition = Field(default=Partition(), description="which samples a worker may see")
    injection: Injection | None = Field(default=None, description="samples that workers hand on to each other")
    stream: Stream | None = Field(default=None, description="samples are trained on as they arrive; absent: in epochs")
    exchange_timeout_s: PositiveFloat = Field(default=300.0, description="a worker that is later than this is lost")
    batch_policy: str = Field(default="model", pattern=OWN_NAME, examples=list(BATCH_POLICIES))
    batch_settings: Settings = Field(default={}, description="of the batch policy, that are not the usual ones")
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="samples that are computed together; shares are whole multiples under 'allocation'"
    )
    learning_rate_scale: PositiveFloat = 1.0
    precision: Precision = Field(default="fp32", description="what matrices are multiplied in")
    shard: Sharding | None = Field(
        default=None, description="what the devices of a machine share of the model; absent: as its task says"
    )
    prefetch: Prefetch = "auto"
    stop: StopRule
    evaluate_every_epochs: PositiveFloat = 1.0
    control_period_steps: PositiveInt = Field(default=20, description="steps between two decisions of all workers")
    checkpoint_every_s: PositiveFloat = 60.0
    probe: ProbeSchedule | None = Field(default=None, description="profile instead of train")
    max_restarts: NonNegativeInt = Field(
        default=0, description="how often a worker that is killed is replaced, and then how often all start again"
    )
    miniature: ScaledEmulation | None = Field(
        default=None, description="the rehearsed cluster, where the run is a rehearsal"
    )

    @model_validator(mode="after")
    def _suits(self) -> Self:
        check_settings(self.ratio_policy, self.ratio_settings, RATIO_SETTINGS)
        check_settings(self.batch_policy, self.batch_settings, BATCH_SETTINGS)
        stream = self.stream
        if stream is None:
            if self.batch_policy == "rate":
                raise ValueError("the batch policy 'rate' follows streams, and the run has none")
            return self
        if len(stream.rates) != len(self.workers):
            raise ValueError(f"there are {len(stream.rates)} rates of streams for {len(self.workers)} workers")
        if stream.patience_s >= self.exchange_timeout_s:
            raise ValueError(
                f"the patience with streams, {stream.patience_s:g} s, must be shorter than the exchange timeout, "
                f"{self.exchange_timeout_s:g} s, or other workers give up first"
            )
        return self

    @property
    def is_local(self) -> bool:
        """True where two or more workers apply their own gradients, and average parameters, from begin to end."""
        return len(self.workers) > 1 and self.sync.is_local and not self.may_average

    @property
    def may_average(self) -> bool:
        """True where the ratio policy ``auto`` chooses between sums of gradients and local SGD as ``sync`` has it."""
        return self.ratio_policy == "auto" and self.sync.name == "local-sgd"

    @property
    def steers_exchange(self) -> bool:
        """True where the ratio or collective by which two or more workers sum gradients may change during the run."""
        may_change = self.ratio_policy != "fixed" or self.collective_policy != "fixed"
        return len(self.workers) > 1 and not self.is_local and may_change

    @property
    def weighs_ways(self) -> bool:
        """True where the ratio policy chooses among whole options: ratio, collective and coding."""
        return self.ratio_policy in WEIGHS_WAYS

    @property
    def is_elastic(self) -> bool:
        """True where workers that lose others go on with what they have in memory: on one machine only with restarts.

        Where workers differ, or may come to differ, in more than their place in the batch, all of them start again from
        a checkpoint.
        """
        is_summed = not self.sync.is_local
        alike = is_summed and self.partition.name == "global" and self.injection is None and self.stream is None
        # What NCCL does when a machine is lost was never tried: GPUs start again from a checkpoint.
        by_gloo = all(worker.device == "cpu" for worker in self.workers)
        many_machines = self.miniature is None and len(host_names(self)) > 1 and by_gloo
        survives = self.max_restarts > 0 or many_machines
        is_whole = self.shard in (None, "none")  # devices that share a model lose a part of it with one of them
        return survives and alike and is_whole and not self.script and len(self.workers) > 1 and self.probe is None

    @property
    def script_command(self) -> tuple[str, ...]:
        """The script and its arguments, with the data's folder in the place of `DATA_PLACE`."""
        return tuple(word.replace(DATA_PLACE, self.data_dir or DATA_PLACE) for word in self.script)

    @property
    def global_batch_size(self) -> int:
        """The samples of one step over all workers."""
        return sum(worker.local_batch_size for worker in self.workers)


MEETING_PORT = 29400


def _endpoint(text: str) -> str:
    """Return ``address:port`` if that is what a text is; pydantic tells what `ValueError` says."""
    address, _, port = text.rpartition(":")
    ipaddress.ip_address(address)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("a rendezvous must be an IP address and a port, such as 10.0.0.1:29400")
    return text


MeetingPoint = Annotated[str, AfterValidator(_endpoint)]
"""The IP address and port where all hosts of a run meet."""


class Node(Record):
    """A host of a run: its name, its address and where all hosts meet, for the process that starts its workers."""

    host: HostName
    address: AddressAmongHosts = Field(description="by which the others reach it")
    meeting: MeetingPoint = Field(description="where all meet: at the first host")


def host_names(spec: RunSpec) -> list[str]:
    """Return the names of a run's hosts, each once, in the order of their workers' ranks."""
    return list(dict.fromkeys(worker.host for worker in spec.workers))


def first_rank(spec: RunSpec, host: str) -> int:
    """Return the rank, from 0, of the first worker on a host.

    Raises:
        BadInput: the run has no such host.
    """
    for rank, worker in enumerate(spec.workers):
        if worker.host == host:
            return rank
    raise BadInput(f"the run has no host called {host!r}.", hint=f"its hosts are {', '.join(host_names(spec))}")
