"""What workers that train for themselves spend on being brought together: which part of their steps communicate.

Averages are made after the step, so nothing hides them; the share of steps that make one is known (local SGD, FedAvg),
steered (SelSync with ``auto``), measured by an earlier run, or assumed from what was published.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.run_rules import steps_of_round
from hetopt.core.synchronization import Synchronization

PUBLISHED_SHARE = 0.15
"""Of steps that synchronise under SelSync with a fixed delta: 1 - LSSR is 0.034 to 0.275 over four models and deltas of
0.3 and 0.5 (2307.07950, table I); the geometric middle of those for 0.3 is 0.12, and more workers vote more often."""

PUBLISHED_LOG_SD = 0.7
"""Those values lie within a factor of three to either side."""

MEASURED_LOG_SD = 0.3
"""More workers vote more often, and gradients change less as training goes on."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The share of steps in which local SGD workers average.

    Attributes:
        share: of the steps.
        log_sd: standard deviation of the log of (true share / share).
        note: a sentence for people.
    """

    share: float
    log_sd: float
    note: str


def communication(
    sync: Synchronization, *, dataset_size: int, global_batch_size: int, measured: float | None = None
) -> Communication:
    """Return the share of steps in which a policy is expected to average, before it has run.

    Args:
        sync: the policy; not ``bsp``.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
        measured: share of the steps that synchronised in an earlier run with it.
    """
    match sync.name:
        case "local-sgd":
            share, log_sd, known = 1 / sync.every_steps, 0.0, "as it is told to"
        case "fedavg":
            steps = steps_of_round(sync.every_epochs, dataset_size, global_batch_size)
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
