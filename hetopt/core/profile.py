"""The `Profile`: everything measured about one training job, with units, host facts, seeds and the samples' spread.

Seconds, bytes and samples throughout. Unmeasured is absent (`None` or an empty tuple), never zero.
"""

import math
from typing import ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hetopt.core.artifact import Artifact, CleanText, Record, RecordLeavingOut
from hetopt.core.memory import Precision, Sharding, TrainingMemory
from hetopt.core.step_samples import ModelKind, StepSample

Collective = Literal["all_reduce", "all_gather", "broadcast"]
LearningRateRule = Literal["none", "linear", "sqrt"]
MOST_BYTES_A_PARAMETER = 16
"""Most bytes of one parameter's gradient: complex numbers of double precision."""

LOCAL = "local"
"""The device type of a machine that is not in the catalogue: the one where the profile was taken."""


class Host(Record):
    """The machine on which a profile was measured: processors, memory, software and GPUs.

    Attributes:
        cpu_model: name of the processor.
        logical_cpus: number of logical processors.
        memory_bytes: of the machine.
        operating_system: name and version.
        python_version: of the interpreter.
        torch_version: of torch.
        accelerator: name of the GPUs; None: there is none.
        accelerator_count: number of GPUs.
        accelerator_memory_bytes: memory of one GPU; None: there is none.
    """

    cpu_model: CleanText
    logical_cpus: PositiveInt
    memory_bytes: PositiveInt
    operating_system: CleanText
    python_version: CleanText
    torch_version: CleanText
    accelerator: CleanText | None = None
    accelerator_count: int = Field(default=0, ge=0)
    accelerator_memory_bytes: PositiveInt | None = None


class Job(RecordLeavingOut):
    """The training job that a profile is of; a sample is an item of its data set (an image, a window of tokens).

    Attributes:
        task: name of the task, or of the script.
        script: a training script and its arguments; empty: the job is a task.
        has_session: whether it can be launched; False: a script that `hetopt convert` has to write a session into.
        converts: whether `hetopt convert` can do that.
        resumes: whether it goes on from checkpoints.
        parameters: number of parameters that are trained.
        gradient_bytes: bytes of the gradient.
        dataset_size: samples of an epoch.
        counts_epochs: False: nothing tells a script's epoch, and ``dataset_size`` is a stand-in.
        batch_size: global batch size in samples at which the task's defaults were tuned.
        batches_per_step: batches of a script's loader in a step.
        least_local_batch_size: samples that a worker needs in a step.
        learning_rate_rule: how the learning rate follows the batch size.
        target_metric: name of the metric of the target.
        target_value: its value at the target.
        target_higher_is_better: whether larger values of the metric are better.
        usual_epochs: how long the task is trained where nothing is asked for; None: not known.
        operators_per_step: kernels that one step launches.
        flops_per_sample: operations of matrix work, forward and backward; None: not known.
        model_kind: what most of the model is made of; None: its modules do not tell.
        parameter_shapes: of all parameters, in the order of the gradient; empty: not known.
        shard: what devices share of the model, as the job says; None: it says nothing.
        blocks: number of modules by which devices can share the model; None: there are none.
        block_share: fraction of the bytes of all weights in the largest block; None: there are none.
    """

    LEFT_OUT = (
        "batches_per_step",
        "has_session",
        "converts",
        "resumes",
        "counts_epochs",
        "model_kind",
        "parameter_shapes",
        "shard",
        "blocks",
        "block_share",
    )

    task: str
    script: tuple[str, ...] = Field(
        default=(), description="a training script and its arguments, where the job is one; empty: it is a task"
    )
    has_session: bool = Field(
        default=True, description="can be launched; false: a script that `hetopt convert` has to write a session into"
    )
    converts: bool = Field(
        default=True, description="`hetopt convert` writes a session into it; false: a person has to"
    )
    resumes: bool = Field(
        default=True, description="goes on from checkpoints; false: a script that saves none begins again"
    )
    parameters: PositiveInt
    gradient_bytes: PositiveInt
    dataset_size: PositiveInt = Field(description="samples in one epoch")
    counts_epochs: bool = Field(
        default=True,
        description="false: nothing tells how many samples an epoch of a script has, and `dataset_size` is a stand-in",
    )
    batch_size: PositiveInt = Field(description="global batch size the task's defaults were tuned at, samples")
    batches_per_step: PositiveInt = Field(
        default=1, description="batches of a script's loader in a step: more than one where it accumulates gradients"
    )
    least_local_batch_size: PositiveInt = Field(
        default=1, description="samples that a worker needs in a step: two where BatchNorm normalises over them"
    )
    learning_rate_rule: LearningRateRule
    target_metric: str
    target_value: float
    target_higher_is_better: bool
    usual_epochs: PositiveFloat | None = Field(
        default=None, description="how long the task is trained where nothing else is asked for"
    )
    operators_per_step: PositiveInt = Field(description="kernels one step launches, forward to optimizer")
    flops_per_sample: PositiveFloat | None = Field(
        default=None, description="forward and backward floating-point operations of matrix work, a sample"
    )
    model_kind: ModelKind | None = Field(
        default=None, description="what most of the model is made of; absent: its modules do not tell"
    )
    parameter_shapes: tuple[tuple[PositiveInt, ...], ...] = Field(
        default=(), description="of all parameters, in the order of the gradient; empty: not known"
    )
    shard: Sharding | None = Field(
        default=None,
        description="what a task or a script's session lets devices share of the model (`auto`: what memory asks for), "
        "or a script that calls `fully_shard`; absent: it says nothing, so that a task is told",
    )
    blocks: PositiveInt | None = Field(
        default=None, description="modules of one class, by which devices can share the model; absent: there are none"
    )
    block_share: float | None = Field(
        default=None, gt=0, le=1, description="of the bytes of all weights, that of the largest block"
    )

    @model_validator(mode="after")
    def _of_one_model(self) -> Self:
        """Return the job if gradient bytes and shapes fit its number of parameters; raise `ValueError` otherwise."""
        if not self.parameters <= self.gradient_bytes <= MOST_BYTES_A_PARAMETER * self.parameters:
            raise ValueError(
                f"gradient_bytes is {self.gradient_bytes:,} for {self.parameters:,} parameters, but a parameter's "
                f"gradient has 1 to {MOST_BYTES_A_PARAMETER} bytes"
            )
        elements = sum(math.prod(shape) for shape in self.parameter_shapes)
        if self.parameter_shapes and elements != self.parameters:
            raise ValueError(
                f"parameter_shapes hold {elements:,} elements, but there are {self.parameters:,} parameters"
            )
        return self


class StepTime(Record):
    """The measured times of one worker's training step at one local batch size, without exchange between workers.

    Attributes:
        local_batch_size: samples of the step.
        step_time_s: median of ``samples_s``.
        samples_s: seconds of each timed step, warm-up discarded.
        load_s: median seconds to fetch the batch and move it to the device.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        optimizer_s: seconds of the optimizer's update.
        peak_memory_bytes: highest use of memory; None: not measured.
    """

    local_batch_size: PositiveInt
    step_time_s: PositiveFloat = Field(description="median of samples_s")
    samples_s: tuple[PositiveFloat, ...] = Field(min_length=1, description="each timed step, warm-up discarded")
    load_s: NonNegativeFloat = Field(description="median time to fetch the batch and move it to the device")
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    optimizer_s: NonNegativeFloat
    peak_memory_bytes: PositiveInt | None = None


class CompressorCost(Record):
    """The seconds to compress and to decompress one whole gradient by one compressor at one ratio.

    Attributes:
        name: of the compressor.
        ratio: fraction of the elements that is sent.
        compress_s: seconds to compress.
        decompress_s: seconds to decompress.
    """

    name: str
    ratio: float = Field(gt=0, le=1, description="fraction of the elements that is sent")
    compress_s: NonNegativeFloat
    decompress_s: NonNegativeFloat


class Counted(RecordLeavingOut):
    """The counted operations and memory traffic of a sample, where nothing was measured: a roofline's two terms.

    Attributes:
        flops: operations of a sample that take as long at the data sheet's peak rate.
        moved_bytes: bytes of a sample through the GPU's memory; None: no data sheet relates one GPU to another.
        layers: number of layers, one behind the other.
        weight_bytes: of a replica's weights, as they are multiplied with.
        log_sd: standard deviation of the log of (true / given) step time.
        unexplained_s: seconds of a sample, on a GPU that was hardly used, that faster ones may not shorten; None: none.
    """

    LEFT_OUT = ("unexplained_s",)

    flops: PositiveFloat = Field(description="operations that take as long at the data sheet's peak rate")
    moved_bytes: PositiveFloat | None = Field(
        default=None, description="through the GPU's memory; absent where no data sheet relates one GPU to another"
    )
    layers: PositiveInt = Field(description="one behind the other: devices that share a replica gather one at a time")
    weight_bytes: PositiveFloat = Field(description="of a replica's weights, as they are multiplied with")
    log_sd: PositiveFloat = Field(description="standard deviation of the log of (true / given) step time")
    unexplained_s: PositiveFloat | None = Field(
        default=None, description="of a sample on a GPU that was hardly used, which faster ones may not shorten"
    )


class Device(RecordLeavingOut):
    """The measurements of one kind of worker: a device type, a division of its host, and a precision.

    Attributes:
        type: name in the catalogue, or 'local'.
        kind: processors, or CUDA GPUs.
        workers_per_host: workers that computed at the same time.
        threads_per_worker: CPU threads of each.
        precision: that was computed in.
        step_times: in increasing order of local batch size.
        memory_limit_bytes: memory that one worker may use.
        memory: counted memory of training; None: not counted.
        compressors: timings of compressors; empty: none.
        matmul_flops_per_s: achieved on a large fp32 product; None: not measured.
        copy_bytes_per_s: achieved by a memory copy, read plus write; None: not measured.
        counted: operations of the job, where nothing was measured; None: it was measured.
    """

    LEFT_OUT = ("counted",)

    type: str = Field(description="catalogue name, or 'local'")
    kind: Literal["cpu", "cuda"]
    workers_per_host: PositiveInt = Field(description="workers computing at the same time on the host")
    threads_per_worker: PositiveInt
    precision: Precision = "fp32"
    step_times: tuple[StepTime, ...] = Field(min_length=1)
    memory_limit_bytes: PositiveInt = Field(description="bytes of memory that one worker may use")
    memory: TrainingMemory | None = Field(default=None, description="absent where it was not counted")
    compressors: tuple[CompressorCost, ...] = ()
    matmul_flops_per_s: PositiveFloat | None = Field(default=None, description="achieved on a large fp32 product")
    copy_bytes_per_s: PositiveFloat | None = Field(default=None, description="achieved memory copy, read plus write")
    counted: Counted | None = Field(
        default=None, description="where the job's operations were counted and nothing was measured"
    )

    @model_validator(mode="after")
    def _distinct_batches(self) -> Self:
        """Return the device if its step times rise by local batch size, each once; raise `ValueError` otherwise."""
        sizes = [point.local_batch_size for point in self.step_times]
        if sizes != sorted(set(sizes)):
            raise ValueError("step_times must be in increasing order of local_batch_size, each once")
        return self


class Link(Record):
    """The measured times of one collective, and the line through them: ``latency_s + payload / bytes_per_s``.

    Attributes:
        scope: workers on one ``host``, or over the ``network``.
        collective: that was timed.
        workers: that took part.
        payload_bytes: bytes that one worker contributed, one timing each.
        time_s: mean seconds that each payload adds to a step.
        latency_s: intercept of the line: seconds of an empty payload.
        bytes_per_s: payload bytes a second, by the slope of the line.
    """

    scope: Literal["host", "network"] = Field(description="workers on one host, or on several")
    collective: Collective
    workers: int = Field(ge=2)
    payload_bytes: tuple[PositiveInt, ...] = Field(min_length=1, description="bytes one worker contributes")
    time_s: tuple[PositiveFloat, ...] = Field(min_length=1, description="mean time that each payload adds to a step")
    latency_s: NonNegativeFloat = Field(description="intercept: time of an empty payload")
    bytes_per_s: PositiveFloat = Field(description="slope: payload bytes a second")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        """Return the link if each payload has a time; raise `ValueError` otherwise."""
        if len(self.payload_bytes) != len(self.time_s):
            raise ValueError("payload_bytes and time_s must have the same length")
        return self


class NoiseSample(Record):
    """The gradient's squared norm and variance in a pilot, smoothed over steps; their ratio is the noise scale.

    Attributes:
        step: optimizer steps before.
        samples_seen: samples trained on before.
        gradient_square: estimate of |G|^2, squared norm of the true gradient.
        gradient_variance: estimate of tr(cov) of one sample's gradient.
    """

    step: int = Field(ge=0)
    samples_seen: int = Field(ge=0)
    gradient_square: float = Field(description="estimate of |G|^2, squared norm of the true gradient")
    gradient_variance: NonNegativeFloat = Field(description="estimate of tr(cov) of one sample's gradient")


class GainPoint(Record):
    """The gradient energy that Top-k retains at one ratio, |C(g)|^2 / |g|^2, g being gradient plus residual.

    Attributes:
        ratio: fraction of the elements kept.
        gain: mean over the sampled steps.
        gain_low: 10th percentile over the sampled steps.
    """

    ratio: float = Field(gt=0, le=1, description="fraction of the elements kept")
    gain: float = Field(ge=0, le=1 + 1e-6)
    gain_low: float = Field(ge=0, le=1 + 1e-6, description="10th percentile over the sampled steps")


class ExchangeTrial(Record):
    """The error that a compressor of whole gradients makes in their sum, as means over pilots at the task's batch.

    Attributes:
        compression: as `parse_compression` reads it.
        workers: whose gradients were summed.
        gain: retained energy of gradient and residual; None: nothing is held back.
        variance: energy of the error of the sum over that of all gradients; None: there is a residual.
        signal: part of the sum that is left in its own direction.
    """

    compression: CleanText = Field(description="as `parse_compression` reads it")
    workers: PositiveInt = Field(description="whose gradients were summed")
    gain: float | None = Field(
        default=None, gt=0, le=1 + 1e-6, description="retained energy of gradient and residual; absent without one"
    )
    variance: NonNegativeFloat | None = Field(
        default=None, description="energy of the error of the sum over that of all gradients; absent with a residual"
    )
    signal: float = Field(default=1.0, gt=0, le=1, description="part of the sum that is left in its own direction")


class Evaluation(Record):
    """The value ``metric`` of the task's target metric after ``step`` optimizer steps."""

    step: int = Field(ge=0)
    metric: float


class PilotCompression(Record):
    """The compression that a pilot run trained with.

    Attributes:
        name: of the compressor.
        ratio: fraction of the elements that was sent.
        gain: mean retained gradient energy.
    """

    name: str = Field(description="compressor")
    ratio: float = Field(gt=0, le=1, description="fraction of the elements that was sent")
    gain: float = Field(gt=0, le=1, description="retained gradient energy, mean over the run")


class PilotSync(Record):
    """The synchronization policy of a pilot's workers, where they did not sum gradients in every step.

    Attributes:
        policy: as `parse_sync` reads it, such as 'local-sgd(8)'.
        workers: number of workers.
        share: fraction of the steps that ended in an average of parameters.
    """

    policy: str = Field(description="as `parse_sync` reads it, such as 'local-sgd(8)'")
    workers: int = Field(ge=2)
    share: float = Field(gt=0, le=1, description="of the steps that ended in an average of parameters")


class Pilot(Record):
    """The result of a short training run towards the target at one global batch size.

    Attributes:
        global_batch_size: samples of a step.
        learning_rate_scale: factor on the task's own learning rate.
        seed: of weights and sample order.
        evaluations: values of the target metric on the way.
        steps_to_target: steps it took; None: the pilot ended before the target.
        compression: of gradients; None: everything was sent.
        sync: policy of synchronization; None: gradients were summed in every step.
    """

    global_batch_size: PositiveInt
    learning_rate_scale: PositiveFloat
    seed: int
    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    steps_to_target: PositiveFloat | None = Field(description="absent when the pilot ended before the target")
    compression: PilotCompression | None = Field(default=None, description="absent where everything was sent")
    sync: PilotSync | None = Field(default=None, description="absent where gradients were summed in every step")


class PrecisionTrial(Record):
    """Two pilots from the same weights over the same batches, one in ``precision`` and one in the profile's first.

    Attributes:
        precision: the other precision.
        global_batch_size: samples of a step.
        seed: of weights and sample order.
        steps: until the target metric was as good as both came to have it.
        usual_steps: the same of the pilot in the profile's first precision.
    """

    precision: Precision
    global_batch_size: PositiveInt
    seed: int
    steps: PositiveFloat = Field(description="until the target metric was as good as both came to have it")
    usual_steps: PositiveFloat = Field(description="until then, of the pilot in the profile's first precision")


class Provisioned(Record):
    """The time that one launch of the job took to begin training.

    Attributes:
        run: name of the launch's run.
        types: instance types of its machines, or names of the user's own hosts.
        took_s: seconds from requesting the machines to the first step.
    """

    run: str
    types: tuple[str, ...] = Field(min_length=1, description="instance types of its machines, or names of one's own")
    took_s: PositiveFloat


class Profile(Artifact, RecordLeavingOut):
    """One training job as measured: throughput, network, gradient noise, compressibility and pilot runs.

    Attributes:
        created: when, ISO 8601 in UTC.
        hetopt_version: that measured.
        seed: of weights and sample order.
        data_dir: folder of the task's data; None: the task needs none.
        host: machine that was measured.
        job: that was measured.
        devices: measurements by division of the host and precision, at least one.
        links: timings of collectives; empty: not measured.
        noise: samples of the gradient noise; empty: not measured.
        gain: points of the curve of retained gradient energy; empty: not measured.
        pilots: short training runs; empty: none.
        precision_trials: what other precisions cost in steps; empty: not measured.
        exchange_trials: what rounding and factoring gradients loses; empty: not measured.
        samples: step samples of the same job, measured elsewhere; empty: none.
        provisioned: launches of the same job; empty: none.
        evaluation_s: seconds of one evaluation by one worker with the host to itself; None: not measured.
        startup_s: seconds from starting the probe's processes to their first measurement; None: not measured.
        yardstick_s: processor seconds of a fixed piece of arithmetic then; None: not measured.
        yardstick_log_sd: standard deviation of its log; None: not measured.
        contention: wall over processor time of its steps, at least 1; None: not measured.
        contention_log_sd: standard deviation of its log; None: not measured.
        profiling_s: wall seconds that measuring took.
        profiling_usd: cost of rented machines.
    """

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt profile TASK -o FILE"
    SHOWN_BY: ClassVar[str] = "hetopt.reports.profile_document:page"
    LEFT_OUT = ("precision_trials", "exchange_trials")

    created: str = Field(description="ISO 8601, UTC")
    hetopt_version: str
    seed: int
    data_dir: str | None = None
    host: Host
    job: Job
    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    noise: tuple[NoiseSample, ...] = ()
    gain: tuple[GainPoint, ...] = ()
    pilots: tuple[Pilot, ...] = ()
    precision_trials: tuple[PrecisionTrial, ...] = Field(
        default=(), description="what other precisions cost in steps; empty: nobody looked"
    )
    exchange_trials: tuple[ExchangeTrial, ...] = Field(
        default=(), description="what rounding and factoring gradients loses of them; empty: nobody looked"
    )
    samples: tuple[StepSample, ...] = Field(default=(), description="steps of the same job, measured elsewhere")
    provisioned: tuple[Provisioned, ...] = Field(default=(), description="launches of the same job")
    evaluation_s: NonNegativeFloat | None = Field(
        default=None, description="one evaluation of the whole evaluation set by one worker with the host to itself"
    )
    startup_s: NonNegativeFloat | None = Field(
        default=None, description="from starting the processes of the probe to their first measurement"
    )
    yardstick_s: PositiveFloat | None = Field(
        default=None, description="how fast the machine was then: processor time of one fixed piece of arithmetic"
    )
    yardstick_log_sd: NonNegativeFloat | None = Field(
        default=None, description="how far that time scattered meanwhile: standard deviation of its log"
    )
    contention: float | None = Field(
        default=None, ge=1, description="how busy others kept it: wall over processor time of its steps"
    )
    contention_log_sd: NonNegativeFloat | None = Field(
        default=None, description="how far that scattered meanwhile: standard deviation of its log"
    )
    profiling_s: NonNegativeFloat = Field(description="wall time the measurement took")
    profiling_usd: NonNegativeFloat = Field(
        default=0.0, description="what its machines cost; nothing where they are owned"
    )

    def __str__(self) -> str:
        """Describe the job and the machine that measured it."""
        on = self.host.accelerator or self.host.cpu_model
        return f"{self.job.task}, {self.job.parameters:,} parameters, batch size {self.job.batch_size:,}, on {on}"

    def __repr__(self) -> str:
        return f"<Profile of {self}>"

    @property
    def is_counted(self) -> bool:
        """True where operations were counted and nothing was measured, as of `hetopt estimate`.

        A plan from such a profile can be rehearsed, but not run.
        """
        return any(device.counted is not None for device in self.devices)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of its devices, fp32 first if it was measured. Pilots, noise and gains are of the first."""
        return tuple(
            sorted(
                dict.fromkeys(device.precision for device in self.devices), key=lambda precision: precision != "fp32"
            )
        )

    @property
    def measured_machines(self) -> frozenset[str]:
        """The instance types, or names of the user's own hosts, of the step samples; empty: there are no samples."""
        return frozenset(node.type for sample in self.samples for node in sample.nodes)

    def computing_in(self, precision: Precision) -> Self:
        """Return the profile with only its measurements in ``precision``; unchanged where none are, or no others.

        Compression times do not depend on the precision, are measured in the first one alone, and are kept.
        """
        if precision not in self.precisions or len(self.precisions) == 1:
            return self
        exchanging = {
            (device.type, device.workers_per_host): device.compressors
            for device in self.devices
            if device.precision == self.precisions[0]
        }
        measured = (device for device in self.devices if device.precision == precision)
        devices = tuple(
            device.model_copy(update={"compressors": exchanging.get((device.type, device.workers_per_host), ())})
            if not device.compressors
            else device
            for device in measured
        )
        return self.model_copy(update={"devices": devices})

    @model_validator(mode="after")
    def _distinct_devices(self) -> Self:
        """Return the profile if devices differ in type, workers a host or precision; raise `ValueError` otherwise."""
        keys = [(device.type, device.workers_per_host, device.precision) for device in self.devices]
        if len(set(keys)) != len(keys):
            raise ValueError("two devices have the same type, workers_per_host and precision")
        return self
