"""Puts a worker's parts together: the data, the model and the form of step that suits the whole cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.bucketed_step import BucketedStep
from hetopt.trainer.conditions import ConditionsReader
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.control.choose import choose_policy, micro_batch_size
from hetopt.trainer.control.policy import BatchPolicy
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import Batch, MapDataset
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.data.prefetch import ProcessReadAhead, ReadAhead, ReadingWatch, ThreadReadAhead
from hetopt.trainer.exchange.exchange import make_exchange
from hetopt.trainer.fused_step import FusedStep
from hetopt.trainer.learning_rate import AdaptiveScale
from hetopt.trainer.local_batch import BatchReader, SampleFeed, StartReadAhead
from hetopt.trainer.local_gradient import DoesNotFit, LocalGradient
from hetopt.trainer.pace import Pace, make_pace
from hetopt.trainer.precision import Autocast
from hetopt.trainer.spec import RunSpec
from hetopt.trainer.step import LossModule, Step, trainable_parameters
from hetopt.trainer.stopwatch import Stopwatch
from hetopt.trainer.task import Task
from hetopt.trainer.tasks.load import load_task

FIRST_BUCKET_BYTES = 1 << 20
"""What DistributedDataParallel sends as soon as it is ready, before it collects larger buckets (its default). A
gradient of no more has nothing to send while backward still runs, and the fused step sends it with less ado."""


def build_model(task: Task, device: torch.device, seed: int) -> nn.Module:
    """The task's model on the device, the same on every rank: seeded alike, then as rank 0 has it."""
    torch.manual_seed(seed)
    model = task.model().to(device)
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
    across_samples = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    enough = spec.global_batch_size >= 2 * len(spec.workers)
    return choose_policy(spec, minimum=2 if across_samples and enough else 1)


def make_feed(context: WorkerContext, dataset: MapDataset) -> SampleFeed:
    """This worker's training samples, from the start."""
    spec = context.spec
    reader = BatchReader(
        dataset=dataset,
        device=context.device,
        seed=spec.seed,
        max_samples=context.worker.max_local_batch_size,
        unit=micro_batch_size(spec),
    )
    cursor = SampleCursor(len(dataset), spec.seed)

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
    if spec.prefetch == "off" and not spec.loader_processes:
        read_ahead = None
    # A GPU computes by itself: whatever the host does meanwhile is gained.
    is_judged = spec.prefetch == "auto" and context.device.type == "cpu" and not spec.loader_processes
    watch = ReadingWatch() if is_judged else None
    return SampleFeed(reader=reader, rank=context.rank, cursor=cursor, read_ahead=read_ahead, watch=watch)


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
    if spec.compression.name != "identity":
        raise BadInput(
            f"The learning rate cannot follow the noise of gradients that {spec.compression.name} compresses.",
            hint="use the learning rate rule 'fixed', or no compression",
        )
    return AdaptiveScale(
        value=spec.learning_rate_scale, batch_size=spec.global_batch_size, tuned_batch_size=task.batch_size
    )


def make_worker_pace(context: WorkerContext) -> Pace:
    """The pace of this worker."""
    return make_pace(
        context.worker,
        context.device,
        conditions=ConditionsReader(context.run_dir),
        seed=context.spec.seed + context.rank,
        own_core=_own_core(context.spec),
    )


def make_step(
    context: WorkerContext,
    task: Task,
    model: nn.Module,
    *,
    feed: SampleFeed,
    stopwatch: Stopwatch,
    pace: Pace,
    samples: int,
) -> Step:
    """The step for this run, warmed up: what a device does only the first time is start-up, not training.

    Args:
        context: this worker.
        task: for its loss.
        model: on the device.
        feed: of the training data; learns here already if that many samples do not fit into memory.
        stopwatch: of the device.
        pace: of this worker.
        samples: how many to warm up with; this worker's share.

    Raises:
        BadInput: nothing in the model can be trained, or the loss does not depend on it.
        RunFailed: not even one sample fits into memory.
    """
    spec, device = context.spec, context.device
    parameters = trainable_parameters(model)
    module = LossModule(model, task.loss, Autocast(device_type=device.type, precision=spec.precision))
    uses_all = _uses_all(module, feed, task, context.rank)
    by_noise = spec.learning_rate_rule == "adascale"
    step: Step
    if _may_bucket(context, uses_all, sum(parameter.nbytes for parameter in parameters)):
        step = BucketedStep(module=module, reader=feed, stopwatch=stopwatch, pace=pace, noise=by_noise)
    else:
        step = FusedStep(
            module=module,
            reader=feed,
            exchange=make_exchange(spec.compression, sum(parameter.numel() for parameter in parameters), device=device),
            stopwatch=stopwatch,
            pace=pace,
            noise=("workers" if context.world_size > 1 else "micro-batches") if by_noise else None,
        )
    _fit(step.warm_up, feed, samples, context.rank)
    return step


def _uses_all(module: LossModule, feed: SampleFeed, task: Task, rank: int) -> bool:
    """Whether the model uses all of its parameters; tried with a sample or two.

    Raises:
        BadInput: the loss does not depend on the model.
    """

    def forward(batch: Batch) -> Tensor:
        loss: Tensor = module(batch)
        if not loss.requires_grad:
            raise BadInput(f"The loss of task '{task.name}' does not depend on its model.", hint="check the loss")
        return loss

    first = LocalGradient(model=module.model, forward=forward, reader=feed, device=feed.device)
    _fit(first.try_out, feed, 2, rank)
    parameters = trainable_parameters(module.model)
    uses_all = all(parameter.grad is not None for parameter in parameters)
    module.zero_grad(set_to_none=True)
    return uses_all


def _fit(compute: Callable[[MicroBatch], None], feed: SampleFeed, samples: int, rank: int) -> None:
    """Compute a share of so many samples, or as much of it as fits into memory at once."""
    while True:
        try:
            compute(feed.first_part(samples))
        except DoesNotFit as error:
            too_many = error.samples
        else:
            return
        feed.learn_bound(half_of(too_many, rank))


def half_of(samples: int, rank: int) -> int:
    """The micro-batch to try when one of so many samples does not fit.

    Raises:
        RunFailed: it was a single sample.
    """
    if samples == 1:
        raise RunFailed(
            f"worker {rank} has too little memory for a single sample.",
            hint="leave this worker out, or give it a device with more memory",
        )
    return samples // 2


def _own_core(spec: RunSpec) -> bool:
    """Whether every worker of this machine can have a core to itself. Paced workers share one machine."""
    return len(spec.workers) <= len(os.sched_getaffinity(0))


def _may_bucket(context: WorkerContext, uses_all: bool, gradient_bytes: int) -> bool:
    """Whether the whole cluster can sum buckets under backward, and gains by it; all ranks come to the same answer."""
    spec = context.spec
    if context.world_size == 1 or spec.compression.name != "identity" or spec.compression.ratio != 1.0:
        return False
    is_cuda = context.device.type == "cuda"
    # A GPU's gradients go over gloo only through the host, which the fused step does in one piece.
    own_terms = uses_all and (not is_cuda or "nccl" in dist.get_backend())
    rows = gather_numbers([float(own_terms), float(is_cuda)], context.world_size)
    return gradient_bytes > FIRST_BUCKET_BYTES and all(row == [1.0, rows[0][1]] for row in rows)
