"""Puts a worker's parts together: the model, the data, the batch policy, the learning rate and the pace."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetopt.core.batch_partition import first_shares, micro_batch_size
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import ConditionsReader
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import Cursor, SampleCursor
from hetopt.trainer.data.fetch import MapDataset, labels_of
from hetopt.trainer.data.injection import Injector
from hetopt.trainer.data.partitions import NEED_LABELS, PartitionedCursor, Parts, make_parts
from hetopt.trainer.data.replay import Replay, StreamCursor, every_nth_of_all
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.policies.choose import choose_policy
from hetopt.trainer.policies.policy import BatchPolicy
from hetopt.trainer.steps.local_batch import BatchReader, SampleFeed
from hetopt.trainer.steps.slowdown import Slowdown, make_pace
from hetopt.trainer.task import Task, make_model


def build_model(task: Task, device: torch.device, seed: int) -> nn.Module:
    """The task's model on the device, the same on every rank: seeded alike, then as rank 0 has it."""
    torch.manual_seed(seed)
    model = make_model(task).to(device)
    if dist.is_initialized():
        tensors = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                staged = tensor.detach().cpu()
                dist.broadcast(staged, src=0)
                tensor.copy_(staged)
    model.train()
    return model


def make_controller(spec: RunSpec, model: nn.Module) -> BatchPolicy[Any]:
    """The batch policy of a run.

    A share has no upper bound: what exceeds a worker's memory is computed in micro-batches. BatchNorm cannot normalise
    a single sample, so models that have it keep two on every worker where the global batch allows.
    """
    return choose_policy(spec, minimum=least_share(model, spec.global_batch_size, len(spec.workers)))


def make_feed(context: WorkerContext, dataset: MapDataset) -> SampleFeed:
    """Return this worker's training samples, from the start."""
    spec = context.spec
    reader = BatchReader(
        dataset=dataset,
        device=context.device,
        seed=spec.seed,
        max_samples=context.worker.max_local_batch_size,
        unit=micro_batch_size(spec),
    )
    # A GPU computes by itself: whatever the host does meanwhile is gained. A gather from memory is soon done.
    is_worth = spec.prefetch == "on" or context.device.type != "cpu" or not hasattr(dataset, "gather")
    return SampleFeed(
        reader=reader,
        rank=context.rank,
        cursor=make_cursor(context, dataset),
        reads_ahead=spec.prefetch != "off" and spec.stream is None and is_worth,
        injector=None if spec.injection is None or context.world_size == 1 else Injector(spec.injection, spec.seed),
    )


def make_cursor(context: WorkerContext, dataset: MapDataset) -> Cursor:
    """Return the beginning of the training samples: one order for all workers, a part for each, or a stream.

    Raises:
        BadInput: the data cannot be partitioned like that.
        RunFailed: the workers see other labels, or arrive at other parts.
    """
    parts, spec = make_agreed_parts(context, dataset), context.spec
    size, rank, workers = len(dataset), context.rank, context.world_size
    if spec.stream is not None:
        everything = every_nth_of_all(size, spec.seed, rank, workers)
        order = everything if parts is None else partial(parts.order, rank)
        replay = Replay(spec.stream, rank, order=order, tell=_teller(context))
        return StreamCursor(replay, dataset_size=size, rank=rank, workers=workers)
    if parts is None:
        return SampleCursor(size, spec.seed)
    return PartitionedCursor(parts, size, weights=first_shares(spec))


def make_agreed_parts(context: WorkerContext, dataset: MapDataset) -> Parts | None:
    """What each worker sees, alike on all of them; None: all see everything (see `make_cursor` for errors)."""
    spec, size = context.spec, len(dataset)
    if context.world_size == 1 or spec.partition.name == "global":
        return None
    weights = first_shares(spec)
    labels = labels_of(dataset) if spec.partition.name in NEED_LABELS else None
    parts = make_parts(spec.partition, size=size, weights=weights, seed=spec.seed, labels=labels)
    assert parts is not None
    digest = hashlib.sha256()
    for worker in range(parts.workers):
        digest.update(parts.order(worker, 0).tobytes())
    if len(set(gather_texts(digest.hexdigest(), context.world_size))) > 1:
        raise RunFailed(
            "the workers divide the training data in different ways.", hint="give all workers the same data"
        )
    return parts


def make_worker_pace(context: WorkerContext) -> Slowdown:
    """The pace of this worker."""
    return make_pace(
        context.worker,
        context.device,
        conditions=ConditionsReader(context.run_dir),
        own_core=_own_core(context.spec),
    )


def _own_core(spec: RunSpec) -> bool:
    """Whether every worker of this machine can have a core to itself. Paced workers share one machine."""
    return len(spec.workers) <= len(os.sched_getaffinity(0))


def _teller(context: WorkerContext) -> Callable[[str], None]:
    """Tells people that this worker waits: in its log, and in the run's events, into which every worker may write."""

    def tell(what: str) -> None:
        print(f"worker {context.rank} {what}", file=sys.stderr, flush=True)
        log = EventLog(context.run_dir / EVENTS_FILE)
        log.write("stream_waits", rank=context.rank, what=what)
        log.close()

    return tell
