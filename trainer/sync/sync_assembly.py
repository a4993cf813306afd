"""Who brings the models of a run's workers together, and what such a run cannot have besides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import steps_of_round, why_not_local
from hetopt.core.run_spec import RunSpec
from hetopt.core.synchronization import Synchronization
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.injection import samples_of_step
from hetopt.trainer.policies.sync.periodic import FedAvg, LocalSgd
from hetopt.trainer.policies.sync.policy import SyncPolicy
from hetopt.trainer.policies.sync.selsync import SelSync, votes_needed
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer


def choose_sync_policy(
    sync: Synchronization, *, workers: int, seed: int, dataset_size: int, global_batch_size: int
) -> SyncPolicy[Any] | None:
    """The policy that says when parameters are averaged; None: nobody asks (``bsp``).

    Args:
        sync: the choice.
        workers: of the run.
        seed: of draws.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
    """
    match sync.name:
        case "local-sgd":
            return LocalSgd(every_steps=sync.every_steps)
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
    if not spec.is_local:
        return None
    reason = why_not_local(spec)
    if reason is not None:
        raise BadInput(reason, hint="use sync bsp, or leave the other out")
    policy = choose_sync_policy(
        spec.sync,
        workers=len(spec.workers),
        seed=spec.seed,
        dataset_size=dataset_size,
        global_batch_size=samples_of_step(spec),
    )
    assert policy is not None
    return Synchronizer(
        model,
        optimizer,
        channel=partial(Channel, clock=clock, on=device),
        stopwatch=stopwatch,
        sync=spec.sync,
        policy=policy,
        compression=spec.compression,
    )
