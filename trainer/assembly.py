"""Puts a worker's parts together: the model, the data, the batch policy, the pace, and the step."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hetopt.core.batch_partition import first_shares, micro_batch_size
from hetopt.core.comm.composition import AUTO, combine
from hetopt.core.comm.cost import BUCKETWISE
from hetopt.core.comm.options import BF16, IDENTITY, way_name
from hetopt.core.comm.payload_bytes import VALUE_BYTES
from hetopt.core.errors import RunFailed
from hetopt.core.run_folder import ConditionsReader
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import BucketExchange, BucketSum, DenseBuckets
from hetopt.trainer.comm.peers import Guard, meet
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import (
    NEED_LABELS,
    Cursor,
    MicroBatch,
    PartitionedCursor,
    Parts,
    SampleCursor,
    make_parts,
)
from hetopt.trainer.data.fetch import Batch, MapDataset, labels_of
from hetopt.trainer.data.injection import Injector
from hetopt.trainer.data.replay import Replay, StreamCursor, every_nth_of_all
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.loss_test import MOST_SAMPLES, LossTest, probe_loss
from hetopt.trainer.steps.buckets import parts_of
from hetopt.trainer.steps.exchange_assembly import ExchangeConfig, can_overlap, is_steered, make_exchange
from hetopt.trainer.steps.fused_step import (
    DoesNotFit,
    FusedStep,
    Switch,
    half_of,
    switch_between,
)
from hetopt.trainer.steps.local_batch import BatchReader, SampleFeed
from hetopt.trainer.steps.slowdown import Slowdown, make_pace
from hetopt.trainer.steps.step import LossModule, trainable_parameters
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.task import Task, make_model

FEWEST_TRIED = 4
"""Samples that a loss is tested with, where a worker's share is smaller: two parts that BatchNorm can normalise."""


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
        replay = Replay(spec.stream, rank, order=order)
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
        own_core=len(context.spec.workers) <= len(os.sched_getaffinity(0)),  # paced workers share one machine,
    )


def make_step(
    context: WorkerContext,
    task: Task,
    module: LossModule,
    compression: Compression,
    *,
    feed: SampleFeed,
    stopwatch: Stopwatch,
    pace: Slowdown,
    samples: int,
) -> tuple[ExchangeConfig, FusedStep]:
    """Return the exchange of a run and its step, warmed up: what a device does only once is start-up, not training.

    Args:
        context: this worker.
        task: for its loss.
        module: the model with its loss, on the device.
        compression: of the run.
        feed: of the training data; learns here already if a share does not fit into memory.
        stopwatch: of the device.
        pace: of this worker.
        samples: how many to warm up with; this worker's share.

    Raises:
        BadInput: nothing in the model can be trained, the loss does not depend on it, the compression does not suit it,
            or the workers are about to exchange in different ways.
        RunFailed: not even one sample fits into memory.
    """
    spec, device, is_alone = context.spec, context.device, context.spec.is_local
    parameters = trainable_parameters(module.model)
    numel, parts = sum(parameter.numel() for parameter in parameters), parts_of(parameters)
    # What the workers do next depends on these: those that disagree would wait for each other for ever.
    if context.world_size > 1:
        policies = f"ratio policy {spec.ratio_policy}, collective {spec.collective_policy}, {spec.sync.name}"
        asked = compression.model_dump_json(exclude={"name", "ratio"})
        meet(f"{way_name(compression)}, {policies} ({numel} elements, {spec.precision}) {asked}", Channel())
    # A loss that does not depend on the model is refused by all ranks, before one of them tries it in parts.
    _fit(feed, FusedStep(module=module, reader=feed, stopwatch=stopwatch, pace=pace).warm_up, 2, context.rank)
    module.zero_grad(set_to_none=True)
    _try_loss(context, task, module, feed, samples)
    # What a loss counts is known when backward begins: too late for buckets that are on their way by then.
    overlaps = not is_alone and can_overlap(device, context.world_size) and len(parts) > 1 and not module.is_counted
    # A GPU's kernels, and residuals under loss scaling, are the whole gradient's business.
    in_thread = device.type == "cpu" and spec.precision != "fp16"

    def in_buckets(way: Compression) -> BucketSum | None:
        """Return what sums buckets under backward; None: this compression needs the whole gradient."""
        memory = combine(way.name, memory=way.memory, collective=way.collective).memory
        if way.name == IDENTITY and way.ratio == 1.0 and memory == "none":
            description = f"{way_name(way)} in {len(parts)} buckets of {numel} elements"
            return DenseBuckets(Guard(description, store=context.store))
        if way.name not in BUCKETWISE or not in_thread:
            return None
        return BucketExchange(way, parameters, seed=spec.seed, store=context.store, clock=context.clock)

    steered = is_steered(spec, compression)
    bucket_sum = in_buckets(compression) if overlaps and not steered else None
    if is_alone or bucket_sum is not None:
        config = ExchangeConfig(compression=compression, dense_bytes=VALUE_BYTES * numel)
    else:
        config = make_exchange(
            spec,
            compression,
            [tuple(parameter.shape) for parameter in parameters],
            device,
            store=context.store,
            clock=context.clock,
            buckets=len(parts) if overlaps else 1,
            bf16_in_buckets=in_thread and compression.memory == AUTO,  # buckets remember nothing
            tries_twins=True,
        )
    switch: Switch | None = None
    steering = config.steering
    if config.exchange is not None and steering is not None:
        ways = {each.compression.name for each in steering.candidates.all if each.in_buckets}
        plain = (Compression(name=name, memory="none") for name in (IDENTITY, BF16) if name in ways)
        sums = {way.name: bucket_sum for way in plain if (bucket_sum := in_buckets(way)) is not None}
        switch = switch_between(config.exchange, sums, lambda: steering.candidate)
    step = FusedStep(
        module=module,
        reader=feed,
        exchange=config.exchange,
        in_buckets=bucket_sum,
        switch=switch,
        stopwatch=stopwatch,
        pace=pace,
        norms=spec.sync.name == "selsync" if is_alone else steered and spec.ratio_policy == "accordion",
        way="" if is_alone else way_name(compression),
        counts="alone" if is_alone else "all",
    )
    _fit(feed, step.warm_up, samples, context.rank)
    return config, step


def _try_loss(context: WorkerContext, task: Task, module: LossModule, feed: SampleFeed, samples: int) -> None:
    """Find out what the loss is a mean over, on rank 0 with its first samples; all ranks then know.

    Raises:
        BadInput: the loss is a sum over samples; on all ranks.
    """
    found = LossTest()
    if context.is_leader:
        found = _tried_loss(task, module, feed, min(max(samples, FEWEST_TRIED), MOST_SAMPLES))
    test = LossTest.from_list(gather_numbers(found.to_list(), context.world_size)[0])
    if test.problem is not None and (context.world_size > 1 or feed.max_samples is not None):
        raise test.problem
    module.follow(counts=test.kind == "counted", targets_per_sample=test.targets_per_sample)
    if test.note and context.is_leader and context.world_size > 1:
        print(f"hetopt: {test.note}; {test.hint}.", file=sys.stderr, flush=True)


def _tried_loss(task: Task, module: LossModule, feed: SampleFeed, samples: int) -> LossTest:
    """What the loss is a mean over, by the first so many samples, or as many of them as fit into memory."""
    places = list(feed.first_part(samples).indices)

    def read(some: Sequence[int]) -> Batch:
        return feed.read(MicroBatch(epoch=0, indices=[places[at] for at in some]))

    tried = len(places)
    while tried > 1:
        try:
            return probe_loss(module.model, task.loss, read, tried)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        tried //= 2
    return LossTest()


def _fit(feed: SampleFeed, compute: Callable[[MicroBatch], None], samples: int, rank: int) -> None:
    """Compute a share of so many samples, or as much of it as fits into memory at once."""
    while True:
        try:
            compute(feed.first_part(samples))
        except DoesNotFit as error:
            too_many = error.samples
        else:
            return
        feed.learn_bound(half_of(too_many, rank))
