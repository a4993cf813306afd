"""Synchronisation policies by name."""

from __future__ import annotations

import math
from typing import Any

from hetopt.core.synchronization import Synchronization
from hetopt.core.synchronization_rules import steps_of_round
from hetopt.trainer.policies.sync.periodic import FedAvg, LocalSgd
from hetopt.trainer.policies.sync.policy import SyncPolicy
from hetopt.trainer.policies.sync.selsync import SelSync, votes_needed


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
