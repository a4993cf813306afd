"""The order by which a process measures a script: its arguments, batch sizes, and limits on steps and seconds."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.run_spec import CompressorProbe, Sweep

ORDER_FILE = "order.json"
SAID_FILE = "said-{rank}.log"
MEETING_FILE = "meeting"

Watch: TypeAlias = Literal["every-size", "own-size", "steps"]
"""How much of a script is watched. ``every-size``: loaders, gradients and steps, also at other batch sizes than its
own; ``own-size``: these at its own alone; ``steps``: nothing but the ends of optimizers' steps, so that it runs as
by itself."""


class ScriptOrder(Sweep):
    """Order to measure one start of a script, or of several copies side by side: arguments, steps and time limits.

    ``warmup_steps`` steps are not timed, the ``timed_steps`` after them are. ``compressors`` None: none are timed.
    """

    script: str = Field(description="the file")
    arguments: tuple[str, ...] = ()
    watch: Watch = Field(default="every-size", description="how much of it is watched")
    as_torchrun: bool = Field(default=False, description="whether it is started as torchrun starts its only worker")
    sweep: NonNegativeInt = Field(default=0, description="number of the sweep of the schedule that this is")
    concurrent_workers: PositiveInt = Field(default=1, description="copies of the script that compute together")
    threads_per_worker: PositiveInt = 1
    local_batch_sizes: tuple[PositiveInt, ...] = Field(default=(1,), description="not used: a script has its own")
    warmup_steps: PositiveInt = 3
    timed_steps: PositiveInt = 14
    dataset_size: PositiveInt | None = Field(default=None, description="samples of an epoch where no loader tells")
    startup_s: PositiveFloat = Field(default=600.0, description="until the first step: imports, data")
    training_s: NonNegativeFloat = Field(default=0.0, description="of training in earnest, for noise and gains")
    compressors: CompressorProbe | None = None
    network_s: NonNegativeFloat = 0.0
