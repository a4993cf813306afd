"""The learning rate of a run: the task's own, times a scale for the global batch, times the task's schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from torch.optim import Optimizer

from hetopt.core.training_laws import Moments, SmoothedNoise, adascale_gain, noise_scale
from hetopt.trainer.task import Task


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Sets the learning rates of an optimizer: the task's, times its schedule, times a scale that the run decides.

    Attributes:
        task: for its schedule.
        base: rates of the parameter groups, as a fresh optimizer came with them.
        stretch: epochs that the schedule takes for one of the task's.
    """

    task: Task
    base: tuple[float, ...]
    stretch: float = 1.0

    @classmethod
    def of(cls, task: Task, optimizer: Optimizer, stretch: float = 1.0) -> LearningRate:
        """Remember the rates that a fresh optimizer came with."""
        return cls(task=task, base=tuple(float(group["lr"]) for group in optimizer.param_groups), stretch=stretch)

    def apply(self, optimizer: Optimizer, epoch: float, scale: float) -> None:
        """Set the rates for the step that begins after ``epoch`` epochs."""
        factor = scale * self.task.schedule(epoch / self.stretch)
        for group, rate in zip(optimizer.param_groups, self.base, strict=True):
            group["lr"] = rate * factor


@dataclass(frozen=True, kw_only=True)
class AdaptiveScale:
    """The scale that follows the gradient noise, AdaScale-style (see `hetopt.core.training_laws`).

    It changes between control periods. The schedule goes on by epochs; the paper's goes on by the sum of gains, which
    would make the length of a run depend on its noise.

    Attributes:
        value: the present scale; until the noise can be told from the signal it is what the run began with.
        batch_size: samples of a step.
        tuned_batch_size: samples of the step that the task's learning rate was tuned for.
        noise: what was measured so far.
    """

    value: float
    batch_size: int
    tuned_batch_size: int
    noise: SmoothedNoise = field(default_factory=SmoothedNoise)

    def after(self, moments: Moments) -> Self:
        """The scale once one more period was measured."""
        noise = self.noise.add(moments)
        measured = noise_scale(noise.moments)
        value = self.value if measured is None else adascale_gain(measured, self.batch_size, self.tuned_batch_size)
        return replace(self, noise=noise, value=value)

    def state(self) -> dict[str, float]:
        """The scale and the noise estimate, as a checkpoint keeps them."""
        return {"value": self.value, **asdict(self.noise)}

    def resumed(self, state: Mapping[str, float]) -> Self:
        """The scale that `state` was taken of."""
        noise = {name: float(value) for name, value in state.items() if name != "value"}
        return replace(self, value=float(state["value"]), noise=SmoothedNoise(**noise))
