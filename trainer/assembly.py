"""Puts a worker's parts together: the data, the model and the form of step that suits the whole cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hetopt.profiler.errors import BadInput
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.bucketed_step import BucketedStep
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.control.batch import BatchController, FixedBatches, ProportionalBatches
from hetopt.trainer.exchange.exchange import make_exchange
from hetopt.trainer.fused_step import FusedStep
from hetopt.trainer.local_batch import BatchReader, MicroBatch
from hetopt.trainer.pace import make_pace
from hetopt.trainer.precision import Autocast
from hetopt.trainer.spec import RunSpec
from hetopt.trainer.step import LossModule, Step, trainable_parameters
from hetopt.trainer.stopwatch import Stopwatch
from hetopt.trainer.task import Task


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of a run: the task's own, times the plan's scale, times the task's schedule."""

    task: Task
    scale: float
    base: tuple[float, ...]

    @classmethod
    def of(cls, task: Task, optimizer: Optimizer, scale: float) -> LearningRate:
        """Remember the rates that a fresh optimizer came with."""
        return cls(task=task, scale=scale, base=tuple(float(group["lr"]) for group in optimizer.param_groups))

    def apply(self, optimizer: Optimizer, epoch: float) -> None:
        """Set the rates for the step that begins after ``epoch`` epochs."""
        factor = self.scale * self.task.schedule(epoch)
        for group, rate in zip(optimizer.param_groups, self.base, strict=True):
            group["lr"] = rate * factor


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


def make_controller(spec: RunSpec, model: nn.Module) -> BatchController:
    """The batch controller of a run.

    A share has no upper bound here: what exceeds a worker's memory is computed in micro-batches. BatchNorm cannot
    normalise a single sample, so models that have it keep two on every worker where the global batch allows.
    """
    if spec.batch_policy == "fixed":
        return FixedBatches()
    workers = len(spec.workers)
    across_samples = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    minimum = 2 if across_samples and spec.global_batch_size >= 2 * workers else 1
    return ProportionalBatches(minimum=(minimum,) * workers, maximum=(None,) * workers)


def make_step(
    context: WorkerContext, task: Task, model: nn.Module, reader: BatchReader, stopwatch: Stopwatch, samples: int
) -> Step:
    """The step for this run, warmed up: what a device does only the first time is start-up, not training.

    Args:
        context: this worker.
        task: for its loss.
        model: on the device.
        reader: of the training data.
        stopwatch: of the device.
        samples: how many to warm up with; this worker's share.

    Raises:
        BadInput: nothing in the model can be trained, or the loss does not depend on it.
    """
    spec = context.spec
    parameters = trainable_parameters(model)
    autocast = Autocast(device_type=context.device.type, precision=spec.precision)
    module = LossModule(model, task.loss, autocast)
    part = MicroBatch(epoch=0, indices=range(min(samples, len(reader.dataset), reader.max_samples or samples)))
    cuda = [context.device] if context.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), _buffers_kept(model):
        loss = module(reader.read(part))
        if not loss.requires_grad:
            raise BadInput(f"The loss of task '{task.name}' does not depend on its model.", hint="check the loss")
        loss.backward()
        uses_all = all(parameter.grad is not None for parameter in parameters)
        model.zero_grad(set_to_none=True)
        if _may_bucket(context, uses_all):
            bucketed = BucketedStep(module=module, reader=reader, stopwatch=stopwatch)
            # DistributedDataParallel lays its buckets out anew after the first backward pass, and sums round
            # differently in another layout. Done here, a resumed run has the same layout from its first step as one
            # that never stopped.
            bucketed.run([part], len(part), None)
            return bucketed
    numel = sum(parameter.numel() for parameter in parameters)
    return FusedStep(
        module=module,
        reader=reader,
        exchange=make_exchange(spec.compression, numel, device=context.device),
        stopwatch=stopwatch,
        pace=make_pace(context.worker.pace, context.device, own_core=_own_core(spec)),
    )


def _own_core(spec: RunSpec) -> bool:
    """Whether every worker of this machine can have a core to itself. Paced workers share one machine."""
    return len(spec.workers) <= len(os.sched_getaffinity(0))


def _may_bucket(context: WorkerContext, uses_all: bool) -> bool:
    """Whether the whole cluster can sum buckets under backward; every rank comes to the same answer."""
    spec = context.spec
    if context.world_size == 1 or spec.compression.name != "identity" or spec.compression.ratio != 1.0:
        return False
    if any(worker.pace != 1 for worker in spec.workers):
        return False
    is_cuda = context.device.type == "cuda"
    # A GPU's gradients go over gloo only through the host, which the fused step does in one piece.
    own_terms = uses_all and (not is_cuda or "nccl" in dist.get_backend())
    rows = gather_numbers([float(own_terms), float(is_cuda)], context.world_size)
    return all(row == [1.0, rows[0][1]] for row in rows)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what forward passes do to the model's buffers."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)
