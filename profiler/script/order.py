"""What a process that watches a script is told to measure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record, Told
from hetopt.core.run_spec import CompressorProbe, NetworkProbe

ORDER_FILE = "order.json"
SAID_FILE = "said-{rank}.log"
FAILED_FILE = "failed-{rank}.json"
MEETING_FILE = "meeting"

Watch: TypeAlias = Literal["every-size", "own-size", "steps"]
"""How much of a script is watched: loaders, gradients and steps, also at other batch sizes than its own; these at its
own alone; or nothing but the ends of optimizers' steps, so that it runs as it does by itself."""


class Failure(Record):
    """Why a script could not be measured: a sentence, and what to do."""

    message: Told
    hint: Told | None = None


class ScriptOrder(Record):
    """Of one start of a script, or of several copies side by side."""

    script: str = Field(description="the file")
    arguments: tuple[str, ...] = ()
    watch: Watch = Field(default="every-size", description="how much of it is watched")
    as_torchrun: bool = Field(default=False, description="whether it is started as torchrun starts its only worker")
    sweep: NonNegativeInt = Field(default=0, description="number of the sweep of the schedule that this is")
    workers: PositiveInt = Field(default=1, description="copies of the script that compute at the same time")
    threads: PositiveInt = Field(default=1, description="CPU threads of each")
    dataset_size: PositiveInt | None = Field(default=None, description="samples of an epoch where no loader tells")
    warmup_steps: NonNegativeInt = 3
    timed_steps: PositiveInt = 14
    startup_s: PositiveFloat = Field(default=600.0, description="until the first step: imports, data")
    sweep_s: PositiveFloat = Field(description="for all batch sizes together")
    training_s: NonNegativeFloat = Field(default=0.0, description="of training in earnest, for noise and gains")
    sample_every_steps: PositiveInt = 10
    gain_ratios: tuple[float, ...] = ()
    gain_residual_ratios: tuple[float, ...] = ()
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    compressors: CompressorProbe | None = None
    network: NetworkProbe | None = None
    network_s: NonNegativeFloat = 0.0
