"""Step samples: step times measured anywhere, as JSON Lines, one configuration of a cluster a line.

    {"nodes": [{"type": "g5.xlarge", "workers": 1}], "local_batch_size": 96, "step_time_s": 0.21, "sync_time_s": 0.05}

Seconds and samples throughout. ``local_batch_size`` is a number, or one a worker in the order of the nodes. Fields that
are not known here are others' and ignored, unless their name is almost that of a field which is missing.
"""

import statistics
from collections.abc import Iterable
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from hetopt.core.artifact import DEFERS, Artifact, CleanText, PlainText, faults
from hetopt.core.errors import BadInput
from hetopt.core.paths import shortened
from hetopt.core.plain_text import meant

HINT = "a line looks like " + (
    '{"nodes": [{"type": "g5.xlarge", "workers": 2}], "local_batch_size": 32, "step_time_s": 0.21}'
)
ModelKind = Literal["convolution", "transformer", "recurrent", "embedding"]
"""Kinds of what most of a model is made of, as far as that tells how it follows a GPU's rates."""

MOST_WORKERS = 65_536
IN_PRECISION = " in "
"""Text between a machine type and a precision: the same machine computing in another precision is another kind of
worker."""
MOST_SAMPLES = 20_000


class _Line(PlainText):
    """A part of a line of step samples: unknown fields are ignored, unless nearly named as an absent one."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, defer_build=DEFERS)

    @model_validator(mode="before")
    @classmethod
    def _no_slip(cls, data: object) -> object:
        """Return the fields; raise `ValueError` for an unknown one that is nearly the name of an absent field."""
        if isinstance(data, dict):
            absent = frozenset(cls.model_fields.keys() - data.keys())
            for name in data.keys() - cls.model_fields.keys():
                field = meant(name, absent)
                if field is not None:
                    raise ValueError(f"there is no field called {shortened(repr(name), 80)} (did you mean {field!r}?)")
        return data


class Node(_Line):
    """A group of equal workers on one machine of a cluster.

    Attributes:
        type: machine type.
        workers: number of workers that the machine runs (one a GPU).
    """

    type: str = Field(min_length=1)
    workers: PositiveInt


class Compression(_Line):
    """The compression of a step's gradients.

    Attributes:
        name: of the compressor.
        ratio: fraction of the elements that is sent.
        collective: its name; ``auto``: the compressor's default.
    """

    name: str
    ratio: float = Field(default=1.0, gt=0, le=1)
    collective: str = "auto"


class Configuration(_Line):
    """A cluster's machines and workers, with each worker's local batch size, compression, sync and precision.

    Attributes:
        nodes: the machines.
        local_batch_size: samples of every worker, or one number a worker in the order of the nodes.
        compression: of gradients; None: everything is sent.
        sync: synchronization, such as 'local-sgd(8)'; None: gradients are summed in every step.
        precision: that matrices are multiplied in; None: not given.
    """

    nodes: tuple[Node, ...] = Field(min_length=1)
    local_batch_size: PositiveInt | tuple[PositiveInt, ...]
    compression: Compression | None = None
    sync: str | None = Field(default=None, description="such as 'local-sgd(8)'; absent: gradients in every step")
    precision: Literal["fp32", "tf32", "tf32_conv", "bf16", "amp_bf16", "fp16", "amp_fp16"] | None = Field(
        default=None,
        description="what matrices are multiplied in; `tf32_conv`, torch's default: TF32 in convolutions alone",
    )

    @model_validator(mode="after")
    def _one_batch_a_worker(self) -> Self:
        """Return the configuration if its local batch sizes are one, or one a worker; raise `ValueError` otherwise."""
        workers = self.workers
        if workers > MOST_WORKERS:
            raise ValueError(f"{workers} workers are more than the {MOST_WORKERS} that hetopt reckons with")
        if not isinstance(self.local_batch_size, int) and len(self.local_batch_size) != workers:
            raise ValueError(f"local_batch_size has {len(self.local_batch_size)} entries for {workers} workers")
        return self

    @property
    def workers(self) -> int:
        """The number of workers of all nodes."""
        return sum(node.workers for node in self.nodes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The samples of each worker, in the order of the nodes."""
        sizes = self.local_batch_size
        return (sizes,) * self.workers if isinstance(sizes, int) else sizes

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """The kinds and workers of the nodes, sorted, so that order does not count: what one job rents and starts."""
        return tuple(sorted((self.kind(node), node.workers) for node in self.nodes))

    def kind(self, node: Node) -> str:
        """Return the kind of a node's workers: its machine type, with the precision if given: ``g5.xlarge in bf16``."""
        return node.type if self.precision is None else f"{node.type}{IN_PRECISION}{self.precision}"


class StepSample(Configuration):
    """A cluster configuration with the measured time of its step, in seconds.

    Attributes:
        step_time_s: seconds of one optimizer step, wall clock, synchronization included.
        sync_time_s: the part of it after the last local gradient was ready: exchange that is not hidden, and waiting;
            None: not known.
        model_kind: what most of the model is made of; None: not known.
        flops_per_sample: floating-point operations of matrix work of a sample, forward and backward; None: not known.
    """

    step_time_s: PositiveFloat
    sync_time_s: NonNegativeFloat | None = None
    model_kind: ModelKind | None = Field(
        default=None, description="what most of the model is made of; absent: not known"
    )
    flops_per_sample: PositiveFloat | None = Field(
        default=None, description="forward and backward floating-point operations of matrix work, a sample"
    )

    @model_validator(mode="after")
    def _is_a_step(self) -> Self:
        """Return the sample if its step takes 20 us to a day, and its exchange no longer; else raise `ValueError`."""
        if not 20e-6 <= self.step_time_s <= 86_400:  # calling a handful of operators takes longer than that
            raise ValueError(
                f"step_time_s must be that of a training step in seconds, got {self.step_time_s:g}: convert "
                "milliseconds or microseconds to seconds"
            )
        if self.sync_time_s is not None and self.sync_time_s > self.step_time_s:
            raise ValueError(
                f"sync_time_s {self.sync_time_s:g} is longer than step_time_s {self.step_time_s:g}, whose part it is "
                "(both are seconds)"
            )
        return self


class StepSamples(Artifact):
    """Measured step times of one training job, as `hetopt predict` reads them.

    Attributes:
        created: when, ISO 8601 in UTC.
        hetopt_version: that imported them.
        source: file that was imported.
        samples: at least one.
    """

    KIND: ClassVar[str] = "step-samples"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt profile --from-samples FILE -o FILE"

    created: str = Field(description="ISO 8601, UTC")
    hetopt_version: str
    source: CleanText = Field(description="the file that was imported")
    samples: tuple[StepSample, ...] = Field(min_length=1)


def read_samples(lines: Iterable[str], *, origin: str) -> tuple[StepSample, ...]:
    """Parse JSON lines into step samples, condensed to 20,000 at most; empty lines are passed over.

    Args:
        lines: one step sample each.
        origin: what errors call the lines, usually the path.

    Raises:
        BadInput: a line is no step sample (the first such line is named), or there is no sample at all.
    """
    samples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                samples.append(parse_line(StepSample, line))
            except BadInput as error:
                ending = "" if line.endswith("\n") else ", the last, where the file stops"
                raise BadInput(f"{origin}, line {number}{ending}: {error.message}", hint=error.hint) from None
            if len(samples) >= 2 * MOST_SAMPLES:
                samples = condense(samples, MOST_SAMPLES)
    if not samples:
        raise BadInput(f"{origin} holds no step samples.", hint=HINT)
    return tuple(condense(samples, MOST_SAMPLES))


def condense(samples: list[StepSample], most: int) -> list[StepSample]:
    """Return at most ``most`` step samples: of more, one median sample a configuration, then evenly thinned.

    A model of step times has a few dozen numbers to learn; beyond some thousand rows more of the same adds nothing.
    """
    if len(samples) <= most:
        return samples
    alike: dict[tuple[object, ...], list[StepSample]] = {}
    for sample in samples:
        alike.setdefault((sample.layout, sample.batch_sizes, sample.compression, sample.sync), []).append(sample)
    # The lower median is one of the samples, so that its synchronization belongs to its step.
    middles = [
        next(s for s in group if s.step_time_s == middle)
        for group in alike.values()
        for middle in (statistics.median_low(s.step_time_s for s in group),)
    ]
    middles.sort(key=lambda sample: (sample.workers, sample.layout, sample.batch_sizes))
    return middles if len(middles) <= most else [middles[index * len(middles) // most] for index in range(most)]


_AnyLine = TypeVar("_AnyLine", bound=Configuration)


def parse_line(kind: type[_AnyLine], line: str) -> _AnyLine:
    """Parse a JSON line into a cluster configuration or a step sample; ignore other fields, refuse misspelled ones.

    Args:
        kind: class of the record, `Configuration` or `StepSample`.
        line: the JSON text.

    Raises:
        BadInput: the line is not JSON, or a field is missing, misspelled or invalid; up to 8 faults are named.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        sentences = faults(error)
        more = f"; and {len(sentences) - MOST_TOLD} more" if len(sentences) > MOST_TOLD else ""
        raise BadInput(f"{'; '.join(sentences[:MOST_TOLD])}{more}.", hint=HINT) from None


MOST_TOLD = 8
"""Number of faults of one line that are named."""
