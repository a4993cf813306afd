"""Synchronisation policies by name.

What a run under sync ``auto`` has settled for: averages of parameters, from some step on and to its end.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetopt.core.artifact import Record
from hetopt.core.run_rules import steps_of_round
from hetopt.core.run_spec import Compression, RunSpec, StopRule
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.policies.sync.periodic import FedAvg, LocalSgd
from hetopt.trainer.policies.sync.policy import SyncPolicy
from hetopt.trainer.policies.sync.selsync import SelSync, votes_needed


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


def choose_sync_policy(
    sync: Synchronization, *, workers: int, seed: int, dataset_size: int, global_batch_size: int
) -> SyncPolicy[Any] | None:
    """The policy that says when parameters are averaged; None: nobody asks (``bsp``, ``ssp``, and
    ``auto`` before it has settled).

    Args:
        sync: the choice.
        workers: of the run.
        seed: of draws.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
    """
    match sync.name:
        case "local-sgd":
            return LocalSgd(every_steps=sync.every_steps, rate_power=sync.rate_power)
        case "fedavg":
            return FedAvg(
                every_steps=steps_of_round(sync.every_epochs, dataset_size, global_batch_size),
                participants=sync.participants,
                workers=workers,
                seed=seed,
            )
        case "selsync":
            deltas = {"auto": None, "never": math.inf}
            return SelSync(
                delta=deltas[sync.delta] if isinstance(sync.delta, str) else sync.delta,
                synchronised_share=sync.synchronised_share,
                needed=votes_needed(sync.votes, sync.quorum, workers),
                window=sync.window,
                max_local_steps=sync.max_local_steps,
            )
        case _:
            return None
