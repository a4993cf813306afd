"""Ways to bring workers together now and then that a search may choose from: those that pilots speak for, or one asked.

A policy that was measured is offered as it was, and with averages twice and four times as often. FedAvg counts in
epochs, so that its share depends on the batch: it is planned as if every step summed gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.core.synchronization import Synchronization
from hetopt.core.training_laws import MOST_LOST
from hetopt.optimizer.convergence.compression_penalty import Penalty, distance
from hetopt.optimizer.convergence.local_penalty import LocalGate, LocalPilot
from hetopt.optimizer.step_time.local_steps import Communication, communication

Array = NDArray[np.float64]

OFTENER = (1, 2, 4)

PLANNED = ("local-sgd", "selsync")

MOST_SHARE = 0.5
"""Averages in more of the steps than that are not worth another way of training: they hide behind nothing."""


@dataclass(frozen=True, kw_only=True)
class LocalOption:
    """One local SGD policy that a search may choose.

    Attributes:
        sync: what the workers are told.
        told: how often they communicate.
        penalty: what it costs in steps.
        most_workers: that may be planned with.
        counts_steps: whether what it costs is paid in steps; a run of fixed length has no more of them.
    """

    sync: Synchronization
    told: Communication
    penalty: Penalty
    most_workers: int
    counts_steps: bool

    def stretch(self, workers: Array) -> Array:
        """Return the factor on the steps of synchronous SGD, by the number of workers."""
        return self.penalty.inflation(self.told.share, workers) if self.counts_steps else np.ones_like(workers)

    def stretch_log_sd(self, workers: Array) -> Array:
        """Return the standard deviation of the log of `stretch`, by the number of workers."""
        return self.penalty.log_sd(self.told.share, workers) if self.counts_steps else np.zeros_like(workers)


def measured_options(gate: LocalGate, *, to_target: bool, dataset_size: int, batch: int) -> Iterator[LocalOption]:
    """Yield the local SGD policies that a profile's pilots support, also with averages twice and four times as often.

    Args:
        gate: what they say.
        to_target: whether more steps can make up for what is lost; else hardly anything may be.
        dataset_size: samples of an epoch.
        batch: the task's global batch size, samples.
    """
    for pilot in gate.arrived():
        if not is_planned(pilot.sync):
            continue
        for sync in dict.fromkeys(_oftener(pilot)):
            averaging = communication(
                sync, dataset_size=dataset_size, global_batch_size=batch, measured=gate.measured_share(sync)
            )
            penalty, most = gate.penalty(sync), gate.most_workers(sync, averaging.share)
            if not to_target:
                most = _most_that_lose_little(penalty, averaging.share, most)
            if most > 1 and gate.objection(sync, averaging.share) is None:
                yield LocalOption(sync=sync, told=averaging, penalty=penalty, most_workers=most, counts_steps=to_target)


def asked_option(
    sync: Synchronization, gate: LocalGate, *, to_target: bool, dataset_size: int, batch: int, max_workers: int
) -> LocalOption:
    """Return the option of a policy that was asked for, whatever pilots say."""
    averaging = communication(
        sync, dataset_size=dataset_size, global_batch_size=batch, measured=gate.measured_share(sync)
    )
    return LocalOption(
        sync=sync, told=averaging, penalty=gate.penalty(sync), most_workers=max_workers, counts_steps=to_target
    )


def is_planned(sync: Synchronization) -> bool:
    """Return whether clusters can be compared under a synchronization policy."""
    return sync.name in PLANNED and sync.delta != "never"


def _oftener(pilot: LocalPilot) -> Iterator[Synchronization]:
    sync = pilot.sync
    for times in OFTENER:
        if sync.name == "local-sgd":
            if times == 1 or sync.every_steps // times >= 1 / MOST_SHARE:
                every_steps = sync.every_steps // times
                yield sync.model_copy(update={"every_steps": every_steps})
        elif sync.name == "selsync" and sync.delta == "auto":
            if times == 1 or sync.synchronised_share * times <= MOST_SHARE:
                yield sync.model_copy(update={"synchronised_share": sync.synchronised_share * times})
        elif times == 1:
            yield sync


def _most_that_lose_little(penalty: Penalty, share: float, most: int) -> int:
    """Return the most workers, up to ``most``, of a run of fixed length, where no more steps make up for a loss."""
    return max(
        (
            workers
            for workers in range(most + 1)
            if workers < 2 or 1 + penalty.cautious_coefficient * float(distance(share, workers)) <= 1 + MOST_LOST
        ),
        default=0,
    )
