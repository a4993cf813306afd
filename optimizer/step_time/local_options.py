"""Local SGD policies that a search may choose from, and the share of steps in which each communicates.

A search may choose policies that pilots support, or the one that the user asked for. Nothing hides an average, which is
made after the step; the share of steps that make one is known (local SGD, FedAvg), steered (SelSync with ``auto``),
measured by an earlier run, or assumed from publications. FedAvg counts in epochs, so that its share depends on the
batch: it is planned as if every step summed gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetopt.core.run_rules import steps_of_epochs
from hetopt.core.run_spec import Synchronization
from hetopt.core.training_laws import MOST_LOST
from hetopt.optimizer.convergence.compression_penalty import LocalGate, Penalty, distance
from hetopt.optimizer.convergence.steps_law import Array

PUBLISHED_SHARE = 0.15
"""Of steps that synchronise under SelSync with a fixed delta: 1 - LSSR is 0.034 to 0.275 over four models and deltas of
0.3 and 0.5 (2307.07950, table I); the geometric middle of those for 0.3 is 0.12, and more workers vote more often."""

PUBLISHED_LOG_SD = 0.7
"""Those values lie within a factor of three to either side."""

MEASURED_LOG_SD = 0.3
"""More workers vote more often, and gradients change less as training goes on."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Share of steps in which workers under local SGD average their parameters, with its uncertainty.

    Attributes:
        share: fraction of the steps.
        log_sd: standard deviation of the log of (true share / share).
        note: a sentence for people.
    """

    share: float
    log_sd: float
    note: str


def communication(
    sync: Synchronization, *, dataset_size: int, global_batch_size: int, measured: float | None = None
) -> Communication:
    """Return the expected share of steps in which a local SGD policy averages, with its spread and a note.

    The policy itself tells, except a SelSync with a fixed delta, whose share is ``measured``, else the published one. A
    policy with a largest number of local steps averages at least that often.

    Args:
        sync: the policy; not ``bsp``.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
        measured: share of the steps that synchronised in an earlier run with the policy; None: there was none.
    """
    match sync.name:
        case "local-sgd":
            share, log_sd, known = 1 / sync.every_steps, 0.0, "as it is told to"
        case "fedavg":
            steps = steps_of_epochs(sync.every_epochs, dataset_size, global_batch_size)
            share, log_sd, known = 1 / steps, 0.0, "as it is told to"
        case "selsync" if sync.delta == "auto":
            share, log_sd, known = sync.synchronised_share, 0.1, "as its delta is steered to"
        case "selsync" if sync.delta == "never":
            share, log_sd, known = 0.0, 0.0, "as it is told to"
        case "selsync" if sync.delta == 0:
            share, log_sd, known = 1.0, 0.0, "as it is told to"
        case "selsync" if measured is not None:
            share, log_sd, known = measured, MEASURED_LOG_SD, "as in a pilot"
        case _:
            share, log_sd, known = PUBLISHED_SHARE, PUBLISHED_LOG_SD, "as was published of others, within a factor of 3"
    least = 1 / (sync.max_local_steps + 1) if sync.name == "selsync" and sync.max_local_steps else 0.0
    share = max(share, least)
    note = f"Parameters are averaged in {share:.3g} of the steps, {known} ({sync.name})."
    return Communication(share=share, log_sd=log_sd, note=note)


PLANNED = ("local-sgd", "selsync")


@dataclass(frozen=True, kw_only=True)
class LocalOption:
    """Local SGD policy that a search may choose: how often it averages, what it costs in steps, its most workers.

    Attributes:
        sync: the policy.
        communication: share of steps in which workers average.
        penalty: what the policy costs in steps.
        most_workers: most workers that may be planned with.
        counts_steps: whether ``penalty`` adds steps, as in a run to a target; a run of fixed length has none to add.
    """

    sync: Synchronization
    communication: Communication
    penalty: Penalty
    most_workers: int
    counts_steps: bool

    def stretch(self, workers: Array) -> Array:
        """Return the factor on the steps of synchronous SGD, by number of workers; 1 in runs of fixed length."""
        return self.penalty.inflation(self.communication.share, workers) if self.counts_steps else np.ones_like(workers)

    def stretch_log_sd(self, workers: Array) -> Array:
        """Return the standard deviation of the log of `stretch`, [workers]; 0 for runs of a given length."""
        return self.penalty.log_sd(self.communication.share, workers) if self.counts_steps else np.zeros_like(workers)


def measured_options(gate: LocalGate, *, to_target: bool, dataset_size: int, batch: int) -> Iterator[LocalOption]:
    """Yield the local SGD policies that pilots support for two workers or more, with their measured shares and costs.

    Args:
        gate: rules from the pilots.
        to_target: whether the run goes on to a target, where more steps make up for a loss; a run of fixed length is
            offered only policies and workers that lose little (`MOST_LOST`).
        dataset_size: samples of an epoch.
        batch: the task's global batch size, samples.
    """
    for sync in dict.fromkeys(pilot.sync for pilot in gate.arrived() if is_planned(pilot.sync)):
        averaging = communication(
            sync, dataset_size=dataset_size, global_batch_size=batch, measured=gate.measured_share(sync)
        )
        penalty, most = gate.penalty(sync), gate.most_workers(sync, averaging.share)
        if not to_target:
            most = _most_that_lose_little(penalty, averaging.share, most)
        if most > 1 and gate.objection(sync, averaging.share) is None:
            yield LocalOption(
                sync=sync, communication=averaging, penalty=penalty, most_workers=most, counts_steps=to_target
            )


def asked_option(
    sync: Synchronization, gate: LocalGate, *, to_target: bool, dataset_size: int, batch: int, max_workers: int
) -> LocalOption:
    """Return the option of a local SGD policy that the user asked for, with up to ``max_workers``, whatever pilots say.

    The other arguments are those of `measured_options`.
    """
    averaging = communication(
        sync, dataset_size=dataset_size, global_batch_size=batch, measured=gate.measured_share(sync)
    )
    return LocalOption(
        sync=sync, communication=averaging, penalty=gate.penalty(sync), most_workers=max_workers, counts_steps=to_target
    )


def is_planned(sync: Synchronization) -> bool:
    """Return whether the planner can compare clusters under a policy: local SGD, or SelSync that ever averages."""
    return sync.name in PLANNED and sync.delta != "never"


def _most_that_lose_little(penalty: Penalty, share: float, most: int) -> int:
    """Return the most workers, up to ``most``, at which the penalty cautiously stays within `MOST_LOST`; 0: none."""
    return max(
        (
            workers
            for workers in range(most + 1)
            if workers < 2 or 1 + penalty.cautious_coefficient * float(distance(share, workers)) <= 1 + MOST_LOST
        ),
        default=0,
    )
