"""Who brings the models of a run's workers together, and what such a run cannot have besides.

What a run under sync ``auto`` has settled for: averages of parameters, from some step on and to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.optim import Optimizer

from hetopt.core.artifact import Record
from hetopt.core.batch_partition import first_shares
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import steps_of_round, why_not_local, why_not_settling
from hetopt.core.run_spec import Compression, RunSpec, StopRule
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.injection import drawn_samples
from hetopt.trainer.policies.sync.periodic import FedAvg, LocalSgd
from hetopt.trainer.policies.sync.policy import SyncPolicy
from hetopt.trainer.policies.sync.selsync import SelSync, votes_needed
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.parameter_sync import ParameterSync
from hetopt.trainer.sync.streaming_sync import StreamingSync
from hetopt.trainer.sync.synchroniser import Own, Synchronizer


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
    """The policy that says when parameters are averaged; None: nobody asks (``bsp``, and ``auto`` before it settled).

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


def make_synchroniser(
    spec: RunSpec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    clock: Callable[[], float],
    stopwatch: Stopwatch,
    dataset_size: int,
) -> Synchronizer | None:
    """As the run's ``sync`` says; None: gradients are summed in every step, and models never differ.

    Args:
        spec: of the run.
        model: this worker's; now the same on all of them.
        optimizer: whose momentum is this worker's own.
        device: where the model is.
        clock: seconds.
        stopwatch: of the device.
        dataset_size: samples of an epoch.

    Raises:
        BadInput: the run wants something besides that needs gradients to be exchanged.
    """
    reason = why_not_local(spec) if spec.is_local else why_not_settling(spec) if spec.sync.may_settle else None
    if reason is not None:
        raise BadInput(reason, hint="use sync bsp, or leave the other out")
    if not spec.is_local:
        return None
    channel = partial(Channel, clock=clock, on=device)
    own = Own(model=model, optimizer=optimizer, channel=channel, stopwatch=stopwatch)
    if spec.sync.fragments > 1:
        beside = partial(channel, _group_beside(spec.exchange_timeout_s))
        return StreamingSync(own, sync=spec.sync, compression=spec.compression, beside=beside, clock=clock)
    policy = choose_sync_policy(
        spec.sync,
        workers=len(spec.workers),
        seed=spec.seed,
        dataset_size=dataset_size,
        global_batch_size=samples_drawn(spec),
    )
    assert policy is not None
    return ParameterSync(own, sync=spec.sync, policy=policy, compression=spec.compression)


def _group_beside(timeout_s: float) -> dist.ProcessGroup | None:
    """The same workers once more, for collectives that run beside those of the default group."""
    if not dist.is_initialized():
        return None
    return cast("dist.ProcessGroup", dist.new_group(timeout=timedelta(seconds=timeout_s)))  # torch: or 0


def samples_drawn(spec: RunSpec) -> int:
    """Samples that all workers together draw from the data in a step; they may hold copies of some besides."""
    if spec.injection is None or len(spec.workers) == 1:
        return spec.global_batch_size
    return sum(drawn_samples(spec.injection, first_shares(spec)))
