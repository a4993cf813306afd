"""`RunSpec`: everything a worker needs to know about the run, and nothing about why it was chosen."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.profiler.artifact import Record
from hetopt.profiler.schedule import ProbeSchedule

BatchPolicy = Literal["fixed", "proportional"]


class Compression(Record):
    """How gradients travel: the compressor's name and the fraction of elements it sends."""

    name: str = "identity"
    ratio: float = Field(default=1.0, gt=0, le=1)


class WorkerSpec(Record):
    """One worker (one process, one device), in rank order."""

    host: str = Field(description="name of the machine the worker runs on, unique in the run")
    type: str = Field(description="device type it was planned as: a catalogue name or 'local'")
    local_batch_size: PositiveInt
    pace: PositiveFloat = Field(default=1.0, ge=1, description="compute is stretched by this factor")
    threads: PositiveInt | None = Field(default=None, description="CPU threads; absent: what torch chooses")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_local_batch_size: PositiveInt | None = Field(default=None, description="memory limit, samples")


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


class RunSpec(Record):
    """One run of the trainer: the task, the workers with their shares, and the rules of the game."""

    task: str
    data_dir: str | None = None
    seed: NonNegativeInt = 0
    workers: tuple[WorkerSpec, ...] = Field(min_length=1)
    compression: Compression = Compression()
    batch_policy: BatchPolicy = "proportional"
    learning_rate_scale: PositiveFloat = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    stop: StopRule
    evaluate_every_epochs: PositiveFloat = 1.0
    control_period_steps: PositiveInt = Field(default=20, description="steps between looks at the gathered statistics")
    checkpoint_every_s: PositiveFloat = 60.0
    probe: ProbeSchedule | None = Field(default=None, description="profile instead of train")
    max_restarts: NonNegativeInt = 0

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all workers."""
        return sum(worker.local_batch_size for worker in self.workers)
