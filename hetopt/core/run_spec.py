"""`RunSpec`: all that workers need to know of a run, without the reasons for it, and how people write its parts.

Its parts are records too: a host's place (`Node`), streams of samples, a probe's schedule, a rehearsed cluster with
its links and events, the settings of published policies (each default as published, or what stands for it where
none was printed; a run keeps only what was said otherwise), and averaging:

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
"""Names of the synchronization policies, each explained in `hetopt.trainer.sync.synchroniser`."""

Votes = Literal["any", "majority", "quantile"]
"""How many workers have to ask for a synchronisation: one (``any``), more than half (``majority``), or a stated part of
them (``quantile``)."""

PartitionName = Literal["global", "shards", "seldp", "labels"]
"""Names of the rules for which samples a worker sees, each explained in `hetopt.trainer.data.cursor`."""


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
        name: name of the policy.
        every_steps: ``local-sgd``: parameters are averaged after so many steps (H).
        participants: ``fedavg``: part of the workers whose parameters enter an average (C); all of them receive it.
        every_epochs: ``fedavg``: parameters are averaged after so many passes over the data (E).
        delta: ``selsync``: relative change of a worker's gradient norm from which it votes to synchronise; ``auto``:
            steered so that ``synchronised_share`` holds; ``never``: votes are counted in vain.
        synchronised_share: ``selsync(auto)``: part of the steps that are to end in a synchronisation.
        votes: ``selsync``: how many workers must vote to synchronise: ``any`` one, a ``majority``, or the part
            ``quorum`` (``quantile``).
        quorum: ``votes = quantile``: the part of the workers that has to vote to synchronise.
        max_local_steps: ``selsync``: most steps in a row without a synchronisation; None: any number.
        window: ``selsync`` with a fixed delta: first steps, each of which synchronises while the mean of the norm
            settles. Under ``auto`` averages become rarer from the first step on.
        smoothing: ``selsync``: weight of the newest squared norm in that moving mean.
        vote_lag: ``selsync``: steps between a vote and the synchronisation that it asks for. 1: votes travel while the
            next step is computed; 0: every step waits for them, as published.
        outer_rate: part of the way to the average that is gone at a synchronisation (r); 1: all of it.
        outer_momentum: Nesterov's momentum of those steps (m); 0: none; DiLoCo has rate 0.7 and momentum 0.9.
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
        name: name of the rule.
        labels: ``labels``: number of labels that a worker's samples have.
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
"""Name of local SGD with the outer step of arXiv 2311.08105, whose paper found rate and momentum."""

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
    """Parse how workers synchronize, such as ``local-sgd(8)``; ``diloco`` is local SGD with an outer rate and momentum.

    Args:
        text: as a person writes it.
        option: with which errors begin.

    Raises:
        BadInput: the name or a key is unknown (the nearest is named), or a value is no number or out of its range.
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
        BadInput: the name or a key is unknown (the nearest is named), or a value is no number or out of its range.
    """
    item = call(text, option)
    name = known(item.name, get_args(PartitionName), "partition")
    return record(Partition, item, _fields(name), first=_FIRST.get(name, ()), defaults={"name": name})


def parse_injection(text: str, *, option: str = "`inject`") -> Injection:
    """Parse ``0.25, 0.1``: the fraction of workers that pass on samples, and of their samples; errors name ``option``.

    Raises:
        BadInput: the text is not two fractions above 0 and at most 1.
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


def _spell(policy: Record, name: str) -> str:
    """Format a policy's record as ``name(first values, key=value)``, without keyed values that are defaults."""
    first, defaults = _FIRST.get(name, ()), type(policy).model_fields
    values = {key: getattr(policy, _FIELDS.get(key, key)) for key in _KEYS.get(name, ())}
    changed = {key: value for key, value in values.items() if value != defaults[_FIELDS.get(key, key)].default}
    return written(name, [values[key] for key in first], {k: v for k, v in changed.items() if k not in first})


EVERY_HOST = "*"
"""Name that stands for every host in a change."""


class DeclaredTime(Record):
    """The compute time of a rehearsed worker's step on the real machine: ``fixed_s + per_sample_s * samples``.

    The worker computes for real and then waits until that time is over.

    Times are in seconds.
    """

    fixed_s: NonNegativeFloat = 0.0
    per_sample_s: PositiveFloat


class EmulatedHost(Record):
    """A rehearsal's emulated host: a network namespace with one link, and a number of workers.

    Attributes:
        name: up to 8 small letters and digits, such as ``h0``.
        workers: number of workers on the host.
        speed: relative speed, in whatever unit the rehearsal was described in; changes are given in the same unit.
        rate_bits_per_s: rate of the link in each direction; None: not limited.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9]{0,7}$")
    workers: PositiveInt = 1
    speed: PositiveFloat = 1.0
    rate_bits_per_s: PositiveFloat | None = Field(default=None, description="both directions; absent: not limited")


class Change(Record):
    """A change of a rehearsal's host at a time or step of the run.

    With neither time nor step it happens at once. At most one of the five fates is True; speed or rate may change
    instead or beside.

    Attributes:
        host: name of the host; ``*``: every host.
        at_s: seconds after training began.
        at_step: as soon as this step is seen.
        speed: new relative speed; None: unchanged.
        rate_bits_per_s: new link rate; None: unchanged.
        dies: all of the host's processes are killed.
        returns: a host that has died is there again.
        notice: the host will be taken away soon.
        cut: the host reaches nobody until it heals.
        heals: a host that was cut off reaches the others again.
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
        """Return the change if it is one thing at one time; raise `ValueError` otherwise."""
        if self.at_s is not None and self.at_step is not None:
            raise ValueError("a change happens at a time or at a step, not both")
        fates = self.dies + self.returns + self.notice + self.cut + self.heals
        if self.speed is None and self.rate_bits_per_s is None and not fates:
            raise ValueError("a change needs a speed, a rate or a death")
        if fates > 1:
            raise ValueError("a host dies, returns, has notice, is cut off or heals: one at a time")
        return self


class ScaledEmulation(Record):
    """A cluster emulated on one machine.

    Attributes:
        hosts: in the order of their workers' ranks.
        time_factor: factor by which links are slower than in the cluster that is rehearsed. Computation takes as many
            times as long, unless something with a smaller gradient stands in for the job.
        changes: scheduled changes of hosts; empty: none.
    """

    hosts: tuple[EmulatedHost, ...] = Field(min_length=1)
    time_factor: PositiveFloat = 1.0
    changes: tuple[Change, ...] = ()


class Conditions(Record):
    """The present speeds of a rehearsal, written by its conductor and read by every worker between steps.

    Attributes:
        slowdown: factor by which the whole miniature runs slower than was planned, because the real computation did not
            fit into the declared time; 1: it fits.
        speed_factors: present speed over declared speed, by host; a host that is not named is as declared.
    """

    slowdown: PositiveFloat = Field(default=1.0, ge=1)
    speed_factors: dict[str, PositiveFloat] = Field(default_factory=dict)


STAND_IN = "stand-in"
"""The bundled task that trains in the place of a job that this machine cannot train."""

PARAMETERS = 250_000
"""Parameters of the stand-in, in single precision: a gradient of 1 MB. Links are scaled to it, so that a step exchanges
as long as the job's would: 110 million parameters over 10 Gbit/s are as slow as 1 MB over 23 Mbit/s, which a network
on a few cores carries."""

LAYERS = 10
"""Number of vectors of one length that the stand-in's parameters are: a real gradient does not come at once either."""

SHAPES = ((PARAMETERS // LAYERS,),) * LAYERS
GRADIENT_BYTES = 4 * PARAMETERS


Settings: TypeAlias = dict[str, int | float | str | bool]
"""Settings of a policy that differ from its defaults, by key."""

Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]


BufferPolicy = Literal["persistence", "truncation", "bounded_age"]
"""What becomes of samples that arrived and were not taken: all wait (``persistence``), only a batch of the newest does
(``truncation``), or those younger than a set age do (``bounded_age``)."""


class Stream(Record):
    """The rates at which each worker's samples arrive, what becomes of waiting ones, and how batches follow.

    Attributes:
        rates: samples a second that arrive at each worker, in rank order.
        buffer: what becomes of samples that wait.
        max_age_s: under ``bounded_age``: age from which a waiting sample is dropped.
        batch_interval_s: under the batch policy ``rate`` a batch is what arrives in this time. The paper's is 1 s.
        min_batch: least local batch size, in samples.
        max_batch: largest local batch size, in samples.
        learning_rate: how the learning rate follows the batch; the run's own is for the plan's global batch.
        max_learning_rate_scale: largest factor, up or down, by which the learning rate follows. The paper has no cap,
            and loses accuracy by it.
        patience_s: seconds after which a stream that gives no batch ends the run.
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
        """Return the stream if its least batch is no larger than its largest; raise `ValueError` otherwise."""
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
        eps: least retained energy of what is sent, as a fraction.
        omega: relative difference of throughputs that counts as none.
        floor: first compression factor; 10 sends a tenth.
        raises: how the candidate factor grows from one to the next.
        smoothing: weight of the newest throughput in the moving average.
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
        gentle: ratio in critical regimes; None: ten times the run's.
        threshold: relative change of the gradient's norm that makes a regime critical.
        smoothing: weight of the newest norm in the moving average.
        epochs: epochs between looks at the norm; 0: every control period.
        decay: whether a learning rate that has fallen makes a regime critical, too.
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
    """

    delta: Part = 0.3


class ScanSettings(Record):
    """The settings of the ratio policy ``scan``, the choice of AR-Topk (arXiv 2312.02493).

    Attributes:
        time: weight of the exchange time.
        gain: weight of the retained gradient energy.
        sensitivity: relative change of either that calls for another scan.
        least_gain: gain below which nothing is chosen while there is something above it; the paper has no such floor
            (0).
    """

    time: Annotated[float, Field(ge=0)] = 0.6
    gain: Annotated[float, Field(ge=0)] = 0.4
    sensitivity: Annotated[float, Field(ge=0)] = 0.1
    least_gain: Part = 0.05


class ProportionalSettings(Record):
    """The settings of the batch policy ``proportional`` (arXiv 2110.08941).

    Attributes:
        every: when shares are decided anew: each ``epoch`` or each control ``period``.
    """

    every: Literal["epoch", "period"] = "epoch"


class DynamicSettings(Record):
    """The settings of the batch policy ``dynamic`` (arXiv 2305.12213).

    Attributes:
        smoothing: weight of the newest time in the moving average.
        dead_band: relative change of a share below which all shares stay.
        least: least share, in units of an equal share.
        most: largest share, in units of an equal share; None: no bound.
        every: when shares are decided anew: each ``epoch`` or each control ``period``.
    """

    smoothing: Share = 0.5
    dead_band: Annotated[float, Field(ge=0)] = 0.05
    least: Part = 0.0
    most: Annotated[float, Field(ge=1)] | None = None
    every: Literal["epoch", "period"] = "period"


class AllocationSettings(Record):
    """The settings of the batch policy ``allocation`` (arXiv 2111.08272).

    Attributes:
        micro: samples of a micro-batch; None: the run's, or about an eighth of an equal share.
        tolerance: relative difference of compute times that is left alone; None: what one micro-batch resolves.
        every: when shares are decided anew: each ``epoch`` or each control ``period``.
    """

    micro: PositiveInt | None = None
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
    every: Literal["epoch", "period"] = "epoch"


class CriticalSettings(Record):
    """The settings of the batch policy ``critical``, whose global batch follows the gradient noise.

    Attributes:
        most: largest global batch, in units of the planned one.
        least: smallest global batch, in units of the planned one; the task's learning rate is for it.
        critical: critical batch size that the plan reckons with, samples.
        overhead: samples that workers would compute in the time of a step that does not depend on their number.
        least_gain: least fraction of the time for equal progress that a change must save.
    """

    most: Annotated[float, Field(ge=1)] = 8.0
    least: Share = 1.0
    critical: PositiveFloat | None = None
    overhead: PositiveFloat | None = None
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

    Args:
        text: as a person writes it.
        names: all policies that exist.
        settings: by policy, the record class of its settings; a policy that is not there has none.
        where: with which errors about the text begin.
        what: kind of policy, for the error about an unknown name.

    Raises:
        BadInput: the name or a key is unknown, or a value is no number or out of its range.
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
    """Check a policy's settings against its record in ``kinds``; a policy without a record takes no settings.

    Args:
        name: of the policy.
        settings: the settings that differ from its defaults.
        kinds: record class of the settings, by policy.

    Raises:
        ValueError: the policy has no such setting, or not with that value.
    """
    try:
        kinds.get(name, Record).model_validate(settings)
    except ValidationError as error:
        raise ValueError(f"{name}: {faults(error)[0]}") from None


class Sweep(Record):
    """A schedule for measuring step times over local batch sizes, for one division of the host's processors.

    Attributes:
        concurrent_workers: workers that compute at the same time; the others wait.
        threads_per_worker: CPU threads of each.
        local_batch_sizes: samples, measured in this order.
        warmup_steps: steps of each size that are not timed.
        timed_steps: steps of each size that are timed.
        time_limit_s: seconds after which larger batch sizes are left out.
        precision: that is computed in.
    """

    concurrent_workers: PositiveInt = Field(description="workers that compute at the same time; the others wait")
    threads_per_worker: PositiveInt
    local_batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1)
    warmup_steps: PositiveInt = 5
    timed_steps: PositiveInt = 20
    time_limit_s: PositiveFloat = Field(description="larger batch sizes are left out once this much time is spent")
    precision: Precision = "fp32"


class NetworkProbe(Record):
    """A schedule for timing collectives between all workers of the probe.

    Attributes:
        payload_bytes: bytes that each worker contributes, one after the other.
        warmup: rounds that are not timed.
        most_rounds: most rounds that are timed.
    """

    payload_bytes: tuple[PositiveInt, ...] = (4_096, 65_536, 1_048_576, 4_194_304)
    warmup: PositiveInt = 3
    most_rounds: PositiveInt = 12


class CompressorProbe(Record):
    """A schedule for timing compressors at several ratios.

    Attributes:
        names: of the compressors.
        ratios: at which those that send a part are timed.
        repeats: of each timing.
        time_limit_s: seconds after which others than the usual compressors are left out; None: no limit.
    """

    names: tuple[str, ...] = ("topk", "bf16", "int8", "int4")
    ratios: tuple[float, ...] = (0.1, 0.01, 0.001)
    repeats: PositiveInt = 5
    time_limit_s: PositiveFloat | None = Field(
        default=None, description="of each division of the host, after which other ways than the usual are left out"
    )


class PilotProbe(Record):
    """A schedule of one pilot: a short training run towards the target at one global batch size.

    Attributes:
        global_batch_size: samples of a step.
        time_limit_s: seconds after which the pilot ends.
        max_epochs: passes over the data after which it ends.
        sample_every_steps: steps between samples of noise and gain, in the first pilot only.
        repeat: added to the schedule's seed.
        sync: synchronization, such as 'local-sgd(8)'; None: gradients are summed in every step.
        precision: that is computed in.
    """

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
    """The schedule of a whole profiling run: sweeps of step times, collectives, compressors and pilots.

    Attributes:
        seed: of weights and sample order.
        sweeps: of step times.
        network: timing of collectives; None: none.
        compressors: timing of compressors; None: none.
        pilots: short training runs; empty: none.
        gain_ratios: ratios at which retained gradient energy is measured.
        noise_groups: micro-batches that a noise sample is estimated from.
        memory_fraction: part of the memory that workers may use.
        gain_residual_ratios: ratios at which error feedback is followed.
        exchanges: compressions, as people write them, that are tried on gradients of pilots.
        time_limit_s: seconds after which pilots are cut short; None: no limit.
        from_checkpoint: folder of a run or checkpoint where the pilots begin; None: with new weights.
    """

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
"""Placeholder in the arguments of a script for the folder of its data, which is another on each machine."""

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
"""Batch policies by name, each with how it shares the global batch. `hetopt.trainer.policies.policy` makes them, and
registers others."""

RatioPolicyName = Literal["fixed", "warm_up", "accordion", "gravac", "threshold", "scan", "auto"]
"""Names of the policies that decide how much of the gradient is sent, each explained in
`hetopt.trainer.steps.adaptive_controller`."""

WEIGHS_WAYS: tuple[RatioPolicyName, ...] = ("scan", "auto")
"""Ratio policies that weigh whole ways to exchange by their time, compressor and collective included, and not a ratio
alone."""

Prefetch = Literal["auto", "on", "off"]
"""Whether a worker that reads its samples itself does so ahead, in a thread; ``auto``: where reading takes long."""


class Compression(RecordLeavingOut):
    """The compression of gradients: the compressor, the fraction of elements it sends, and overrides of its defaults.

    A file holds only what differs from the defaults; which values go together is in `hetopt.core.comm.composition`.
    None stands for no override.

    Attributes:
        name: of the compressor.
        ratio: fraction of the elements that is sent.
        collective: by which workers' payloads are combined; ``auto``: the compressor's default.
        memory: what becomes of elements that are not sent; ``auto``: the compressor's default.
        bits: width of a quantiser's codes on the wire.
        levels: of a quantiser; None: as many as its codes hold.
        rank: of PowerSGD's factors.
        floor_ratio: select from a selection of this fraction, as GraVAC does.
        least_gain: part of the energy that a step's payload keeps at least: the selection, else the floor's, else
            everything.
        coding: of selected elements; None: plain.
        momentum: of momentum correction.
        clip_norm: largest norm of the whole gradient; each worker clips its own part to its share.
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
    """A worker of a run (one process, one device): its host, local batch size, slowdown and memory bound.

    Attributes:
        host: name of the machine that the worker runs on.
        type: device type that it was planned as: a catalogue name or 'local'.
        local_batch_size: samples of a step.
        slowdown: factor by which its compute is slowed down on purpose.
        declared: compute time that it imitates; None: its own.
        threads: CPU threads; None: what torch chooses.
        device: that it computes on; ``auto``: a GPU if there is one.
        max_local_batch_size: samples that its memory holds at once; None: not known.
    """

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
    """The end of training: the first of the limits that are given, at least one.

    Attributes:
        max_steps: optimizer steps; None: no such limit.
        max_epochs: passes over the data; None: no such limit.
        target: whether to stop as soon as the task's target is reached.
    """

    max_steps: PositiveInt | None = None
    max_epochs: PositiveFloat | None = None
    target: bool = Field(default=False, description="stop as soon as the task's target is reached")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        """Return the rule if something ends the run: steps, epochs or a target; raise `ValueError` otherwise."""
        if self.max_steps is None and self.max_epochs is None and not self.target:
            raise ValueError("a run needs max_steps, max_epochs or target, or it would never end")
        return self


class RunSpec(RecordLeavingOut):
    """All that workers need to know of a run: task or script, workers with local batch sizes, policies, and the end.

    Attributes:
        task: name of the task, or of the script's job.
        script: a training script with a session, and its arguments; empty: the task runs.
        batches_per_step: batches of a script's loader in a step.
        resumes: whether it goes on from checkpoints.
        data_dir: folder of the data; None: the task needs none.
        seed: of weights and sample order.
        workers: in rank order, at least one.
        compression: of gradients; under the ratio policy 'auto' where to begin.
        ratio_policy: what decides how much is sent.
        ratio_settings: its settings that are not the usual ones.
        collective_policy: whether the collective follows the network.
        slowdown_coefficient: what compression costs in steps before that is seen.
        sync: when workers sum gradients or average parameters.
        partition: which samples a worker may see.
        injection: samples that workers hand on; None: none.
        stream: rates at which samples arrive; None: the data are read in epochs.
        exchange_timeout_s: seconds after which a late worker is lost.
        batch_policy: what sets local batch sizes.
        batch_settings: its settings that are not the usual ones.
        micro_batch_size: samples that are computed together; None: as many as fit.
        learning_rate_scale: factor on the task's own learning rate.
        precision: that matrices are multiplied in.
        shard: what the devices of a machine share of the model; None: as the task says.
        prefetch: whether samples are read ahead.
        stop: when training ends.
        evaluate_every_epochs: epochs between evaluations.
        control_period_steps: steps between two decisions of all workers.
        checkpoint_every_s: seconds between checkpoints.
        probe: measurements in the place of training; None: the run trains.
        max_restarts: how often a killed worker is replaced, and then how often all start again.
        miniature: the rehearsed cluster; None: the run is no rehearsal.
    """

    LEFT_OUT = ("batches_per_step", "resumes", "ratio_settings", "batch_settings", "shard")

    task: str
    script: tuple[str, ...] = Field(
        default=(), description="a training script with a session, and its arguments, in place of a task"
    )
    batches_per_step: PositiveInt = Field(
        default=1, description="batches of a script's loader in a step: more than one where it accumulates gradients"
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
        """Return the spec if its policies' settings and its streams suit each other; raise `ValueError` otherwise."""
        check_settings(self.ratio_policy, self.ratio_settings, RATIO_SETTINGS)
        check_settings(self.batch_policy, self.batch_settings, BATCH_SETTINGS)
        if self.batches_per_step > 1 and not self.script:
            raise ValueError("a task computes a step's samples at once: batches_per_step must be 1")
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
        """True where two or more workers apply their own gradients and average parameters, in the whole run."""
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
        """True where workers that lose others go on with what they have in memory, without a restart from a checkpoint.

        That takes a task on several CPU workers that sum gradients and read one stream of samples, unsharded: on one
        machine only with restarts. Where workers differ, or may come to differ, in more than their place in the batch,
        all of them start again from a checkpoint.
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
        """The script and its arguments, with the data's folder in the place of `DATA_PLACE`; empty: a task runs."""
        return tuple(word.replace(DATA_PLACE, self.data_dir or DATA_PLACE) for word in self.script)

    @property
    def global_batch_size(self) -> int:
        """The samples of one step over all workers."""
        return sum(worker.local_batch_size for worker in self.workers)


MEETING_PORT = 29400
"""Port at which the hosts of a run meet by default."""


def _endpoint(text: str) -> str:
    """Return a text that is ``address:port``; refuse another with the `ValueError` that pydantic reports."""
    address, _, port = text.rpartition(":")
    ipaddress.ip_address(address)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("a rendezvous must be an IP address and a port, such as 10.0.0.1:29400")
    return text


MeetingPoint = Annotated[str, AfterValidator(_endpoint)]
"""IP address and port where all hosts of a run meet, such as ``10.0.0.1:29400``."""


class Node(Record):
    """A host of a run: its name, its address and where all hosts meet, for the process that starts its workers.

    Attributes:
        host: its name in the run.
        address: IP address by which the others reach it.
        meeting: IP address and port, at the first host.
    """

    host: HostName
    address: AddressAmongHosts = Field(description="by which the others reach it")
    meeting: MeetingPoint = Field(description="where all meet: at the first host")


def host_names(spec: RunSpec) -> list[str]:
    """Return the names of a run's hosts, each once, in the order of their workers' ranks."""
    return list(dict.fromkeys(worker.host for worker in spec.workers))


def first_rank(spec: RunSpec, host: str) -> int:
    """Return the rank, from 0, of the first worker on a host.

    Raises:
        BadInput: the run has no worker on such a host.
    """
    for rank, worker in enumerate(spec.workers):
        if worker.host == host:
            return rank
    raise BadInput(f"the run has no host called {host!r}.", hint=f"its hosts are {', '.join(host_names(spec))}")
