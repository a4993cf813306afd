"""Who brings the models of a run's workers together, and what such a run cannot have besides."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hetopt.core.batch_partition import first_shares
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import why_not_local, why_not_settling
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.injection import drawn_samples
from hetopt.trainer.policies.sync.choose import choose_sync_policy
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.parameter_sync import ParameterSync
from hetopt.trainer.sync.stale_sync import StaleSync
from hetopt.trainer.sync.streaming_sync import StreamingSync
from hetopt.trainer.sync.synchroniser import Own, Synchronizer


def make_synchroniser(
    spec: RunSpec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int,
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
        rank: this worker's.
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
    if spec.sync.name == "ssp":
        return StaleSync(
            staleness=spec.sync.staleness, model=model, optimizer=optimizer, rank=rank, stopwatch=stopwatch
        )
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
