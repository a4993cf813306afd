"""Puts a worker's parts together: the model, the data, the batch policy, the learning rate and the pace.

Of a run on a stream also what that adds: samples that arrive, batches that follow them, and word of what is saved.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetopt.core.batch_partition import first_shares, micro_batch_size
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import ConditionsReader
from hetopt.core.run_spec import RunSpec, Stream
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import Cursor, Indices, SampleCursor
from hetopt.trainer.data.fetch import MapDataset, fetch, labels_of
from hetopt.trainer.data.injection import Injector
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.data.partitions import NEED_LABELS, PartitionedCursor, Parts, make_parts
from hetopt.trainer.data.prefetch import ProcessReadAhead, ReadAhead, ReadingWatch, ThreadReadAhead
from hetopt.trainer.data.stream.redis_source import ReceivedSamples, RedisSource
from hetopt.trainer.data.stream.replay import Replay, every_nth_of_all
from hetopt.trainer.data.stream.source import Flow, Source, StreamCursor
from hetopt.trainer.data.stream.wire import header_of
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.policies.choose import choose_policy
from hetopt.trainer.policies.policy import BatchPolicy
from hetopt.trainer.policies.stream_rate import stream_learning_rate_scale
from hetopt.trainer.steps.learning_rate import AdaptiveScale
from hetopt.trainer.steps.local_batch import BatchReader, SampleFeed, StartReadAhead
from hetopt.trainer.steps.slowdown import Slowdown, make_pace
from hetopt.trainer.task import Task, make_model
from hetopt.trainer.tasks.load import load_task


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


def make_streaming(context: WorkerContext, dataset: MapDataset) -> Streaming | None:
    """This worker's stream, where the run has one; a replay of partitioned data gives each worker its own part."""
    if context.spec.stream is None:
        return None
    parts = make_agreed_parts(context, dataset)
    return Streaming(context, dataset, None if parts is None else partial(parts.order, context.rank))


def make_feed(context: WorkerContext, dataset: MapDataset, streaming: Streaming | None = None) -> SampleFeed:
    """This worker's training samples, from the start: those of the stream, where there is one."""
    spec = context.spec
    if streaming is not None:
        dataset = streaming.dataset
    reader = BatchReader(
        dataset=dataset,
        device=context.device,
        seed=spec.seed,
        max_samples=context.worker.max_local_batch_size,
        unit=micro_batch_size(spec),
    )
    cursor = make_cursor(context, dataset) if streaming is None else streaming.cursor
    injector = None
    if spec.injection is not None and context.world_size > 1:
        injector = Injector(spec.injection, seed=spec.seed, channel=Channel)

    def in_thread(parts: Iterator[MicroBatch]) -> ReadAhead:
        ahead = ThreadReadAhead(reader.read_for_later)
        ahead.follow(parts)
        return ahead

    def in_processes(parts: Iterator[MicroBatch]) -> ReadAhead:
        return ProcessReadAhead(
            partial(open_training_data, spec.task, spec.data_dir),
            seed=spec.seed,
            processes=spec.loader_processes,
            pin=context.device.type == "cuda",
            upcoming=parts,
        )

    read_ahead: StartReadAhead | None = in_processes if spec.loader_processes else in_thread
    if streaming is not None or (spec.prefetch == "off" and not spec.loader_processes):
        read_ahead = None
    # A GPU computes by itself: whatever the host does meanwhile is gained.
    is_judged = spec.prefetch == "auto" and context.device.type == "cpu" and not spec.loader_processes
    watch = ReadingWatch() if is_judged else None
    return SampleFeed(
        reader=reader, rank=context.rank, cursor=cursor, read_ahead=read_ahead, watch=watch, injector=injector
    )


def make_cursor(context: WorkerContext, dataset: MapDataset) -> Cursor:
    """The beginning of the training samples: one order for all workers, or a part for each.

    Raises:
        BadInput: the data cannot be partitioned like that.
        RunFailed: the workers see other labels, or arrive at other parts.
    """
    parts = make_agreed_parts(context, dataset)
    if parts is None:
        return SampleCursor(len(dataset), context.spec.seed)
    return PartitionedCursor(parts, len(dataset), weights=first_shares(context.spec))


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


def open_training_data(task: str, data_dir: str | None) -> MapDataset:
    """The training data of a task by its name, as another process opens it."""
    return load_task(task).data(Path(data_dir) if data_dir is not None else None).train


def make_adaptive_scale(spec: RunSpec, task: Task) -> AdaptiveScale | None:
    """The scale of the learning rate that follows the gradient noise, if the run wants that.

    Raises:
        BadInput: the gradient is compressed, so that nobody sees the sum of which the noise could be told.
    """
    if spec.learning_rate_rule == "fixed":
        return None
    if spec.compression.name != "identity" or spec.ratio_policy != "fixed":
        who = spec.compression.name if spec.ratio_policy == "fixed" else f"the ratio policy '{spec.ratio_policy}'"
        raise BadInput(
            f"the learning rate cannot follow the gradient noise, which {who} changes by compression.",
            hint="use the learning rate rule 'fixed', or no compression",
        )
    return AdaptiveScale(
        value=spec.learning_rate_scale, batch_size=spec.global_batch_size, tuned_batch_size=task.batch_size
    )


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


class Streaming:
    """One worker's stream in a run.

    Args:
        context: this worker, whose spec asks for a stream.
        dataset: the task's training data.
        order: of a replay: this worker's samples in each pass; None: every n-th of all.

    Attributes:
        cursor: goes along the stream.
        dataset: what the cursor's indices are of.

    Raises:
        BadInput: the stream cannot be what the run says.
    """

    dataset: MapDataset

    def __init__(
        self, context: WorkerContext, dataset: MapDataset, order: Callable[[int], Indices] | None = None
    ) -> None:
        spec = context.spec
        assert spec.stream is not None
        self._stream: Stream = spec.stream
        self._planned_batch_size = spec.global_batch_size
        rank, workers = context.rank, context.world_size
        self._source: Source
        if spec.stream.source == "replay":
            self.dataset = dataset
            order = order or every_nth_of_all(len(dataset), spec.seed, rank, workers)
            self._source = Replay(spec.stream, rank, order=order, tell=_teller(context))
        else:
            self.dataset = received = ReceivedSamples(dataset)
            self._source = RedisSource(
                spec.stream,
                rank,
                workers,
                samples=received,
                expected=header_of(fetch(dataset, [0])),
                tell=_teller(context),
            )
        self.cursor = StreamCursor(self._source, dataset_size=len(dataset), rank=rank, workers=workers)
        self._begun: tuple[int, Mapping[str, int]] | None = None
        self._committed_step: int | None = None

    def begin(self) -> None:
        """Samples arrive from now on."""
        self._source.begin()

    def flow(self) -> Flow:
        """What the stream was like since this was last asked for."""
        return self._source.flow()

    def learning_rate_scale(self, shares: Sequence[int]) -> float:
        """The factor on the run's learning rate for steps of these shares."""
        return stream_learning_rate_scale(self._stream, sum(shares), self._planned_batch_size)

    def saves(self, step: int) -> None:
        """The cursor's last state goes into the checkpoint of this step, which is not yet complete."""
        self._begun = (step, self.cursor.told)

    def saved(self, step: int | None, *, is_last: bool = False) -> None:
        """The newest complete checkpoint is of this step; the last one is never gone back behind."""
        if self._begun is None or self._begun[0] != step:
            return
        if is_last or self._committed_step != step:
            self._source.committed(self._begun[1], is_last=is_last)
            self._committed_step = step

    def close(self) -> None:
        """Let go of the source."""
        self._source.close()


def _teller(context: WorkerContext) -> Callable[[str], None]:
    """Tells people that this worker waits: in its log, and in the run's events, into which every worker may write."""

    def tell(what: str) -> None:
        print(f"worker {context.rank} {what}", file=sys.stderr, flush=True)
        log = EventLog(context.run_dir / EVENTS_FILE)
        log.write("stream_waits", rank=context.rank, what=what)
        log.close()

    return tell
