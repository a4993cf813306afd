"""What a run under sync ``auto`` has settled for: averages of parameters, from some step on and to its end."""

from __future__ import annotations

import math

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record
from hetopt.core.run_spec import Compression, RunSpec, StopRule
from hetopt.core.synchronization import Synchronization


class Settled(Record):
    """Averages for the rest of a run; part of its checkpoints.

    Attributes:
        every_steps: from one average to the next, until the learning rate falls.
        fragments: that the model is averaged in, one after the other, each under the step that follows.
        compressor: that rounds them.
        stretch: steps that are taken for one of what was left to do, and epochs of the schedule likewise.
        step, epoch: when it began: steps done, and passes over the data with fractions.
    """

    every_steps: PositiveInt
    fragments: PositiveInt = 1
    compressor: str
    stretch: PositiveFloat
    step: NonNegativeInt
    epoch: NonNegativeFloat

    def run(self, spec: RunSpec) -> RunSpec:
        """The run as it is from then on: with a synchronisation of its own, and more steps to its end."""
        return spec.model_copy(
            update={
                "sync": Synchronization(
                    name="local-sgd", every_steps=self.every_steps, fragments=self.fragments, rate_power=1.0
                ),
                "compression": Compression(name=self.compressor),
                "ratio_policy": "fixed",
                "collective_policy": "fixed",
                "stop": self._stop(spec.stop),
            }
        )

    def task_epoch(self, epoch: float) -> float:
        """Where the task's schedule of the learning rate stands after so many passes."""
        return epoch if epoch <= self.epoch else self.epoch + (epoch - self.epoch) / self.stretch

    def _stop(self, stop: StopRule) -> StopRule:
        """The end of the run, as far behind as what is left to do takes longer."""
        steps, epochs = stop.max_steps, stop.max_epochs
        return stop.model_copy(
            update={
                "max_steps": None if steps is None else max(steps, math.ceil(self._later(steps, self.step))),
                "max_epochs": None if epochs is None else max(epochs, self._later(epochs, self.epoch)),
            }
        )

    def _later(self, end: float, begun: float) -> float:
        return begun + (end - begun) * self.stretch
