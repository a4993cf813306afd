"""The learning rate of a run: the task's own, times a scale for the global batch, times the task's schedule."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

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
