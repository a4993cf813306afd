"""The baseline of every benchmark that trains: a textbook DistributedDataParallel script, on the same task and hosts.

Equal shares, the loop of the PyTorch tutorial, all options at their defaults. The global batches are hetopt's, in the
same order, so that a difference in quality does not come from another shuffle. Where a host declares its time, the
computation is stretched just before the last gradient of backward is ready, so that what DistributedDataParallel
overlaps with backward stays overlapped. The gradients may travel through one of torch's communication hooks, or without
any through a tuned one, whose next batch is read in a thread while a step is computed.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import Batch, fetch, set_epoch
from hetopt.trainer.steps.stopwatch import Slowdown
from hetopt.trainer.task import Task, TaskData, average_buffers, evaluate, mean_of
from hetopt.trainer.tasks.load import load_task

HookName = Literal["none", "tuned", "fp16", "powersgd"]

FP32_BYTES, FP16_BYTES = 4, 2
DENSE_STEPS = 2
"""PowerSGD's first steps are dense: as few as torch allows, for its default of 1,000 is more than a short run has."""

RANK = 2
"""Of PowerSGD's factors: for image classifiers, as its authors propose (Vogels et al. 2019)."""


class NoHook:
    """DistributedDataParallel with all its defaults, by which gradients are summed as they are.

    Attributes:
        dense_steps: the first steps, that send the whole gradient under a hook as well.
        gradient_bytes: of the model.
    """

    dense_steps = 0

    def __init__(self, gradient_bytes: int) -> None:
        self.gradient_bytes = gradient_bytes

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Return the model in DistributedDataParallel."""
        return DistributedDataParallel(model)

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that a worker has sent in all ``steps`` steps."""
        return steps * self.gradient_bytes


class Tuned(NoHook):
    """DistributedDataParallel tuned by an expert: gradients are views of its buckets, and the graph is static."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Return the model in DistributedDataParallel with tuned options."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


class Fp16Hook(NoHook):
    """The hook of DistributedDataParallel that casts gradients to fp16 for the all-reduce."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Return the model in DistributedDataParallel, with the hook."""
        parallel = DistributedDataParallel(model, forward_sync_buffers=False)
        parallel.register_comm_hook(None, fp16_compress_hook)
        return parallel

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes of half the gradient in every step."""
        return steps * self.gradient_bytes * FP16_BYTES // FP32_BYTES


class PowerSgdHook(NoHook):
    """The PowerSGD hook of DistributedDataParallel: low-rank factors of gradients, with error feedback.

    The gradient is one bucket: the hook waits inside its callbacks, and a bucket each would block gloo's threads.

    Args:
        gradient_bytes: of the model.
    """

    dense_steps = DENSE_STEPS

    def __init__(self, gradient_bytes: int) -> None:
        super().__init__(gradient_bytes)
        # Rows of an embedding that no word of the batch has are zero, and cannot be made orthogonal without an epsilon.
        self._state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=DENSE_STEPS,
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]  # torch's own annotation is int
        )

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Return the model in DistributedDataParallel, with the hook."""
        whole_mb = self.gradient_bytes / 2**20 + 1
        parallel = DistributedDataParallel(model, forward_sync_buffers=False, bucket_cap_mb=whole_mb)
        parallel.register_comm_hook(self._state, powerSGD_hook)
        return parallel

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that the hook has counted, and those of the dense steps."""
        compressed = FP32_BYTES * int(self._state.total_numel_after_compression)
        return min(steps, DENSE_STEPS) * self.gradient_bytes + compressed


HOOKS: dict[HookName, type[NoHook]] = {"none": NoHook, "tuned": Tuned, "fp16": Fp16Hook, "powersgd": PowerSgdHook}


class StretchedBackward:
    """The emulated computation time of a slower host, waited out when the last gradient is there, before it is sent."""

    def __init__(self, task: Task, model: nn.Module, batch: Batch, pace: Slowdown) -> None:
        order: list[nn.Parameter] = []

        def arrived(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            order.append(parameter)

        hooks = [
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]  # torch's gap
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        buffers = [buffer.clone() for buffer in model.buffers()]
        mean_of(task.loss(model, batch)).backward()  # type: ignore[no-untyped-call]  # likewise
        for hook in hooks:
            hook.remove()
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.data.copy_(kept)
        model.zero_grad(set_to_none=True)
        self._pace = pace
        order[-1].register_hook(self._wait)  # type: ignore[no-untyped-call]  # likewise

    def _wait(self, gradient: Tensor) -> Tensor:
        self._pace.reach(1.0)
        return gradient


def train_plainly(spec: RunSpec, rank: int, events: EventLog, pace: Slowdown, hook_name: HookName = "none") -> None:
    """Train to the stop rule with equal local batches; write ``step`` and ``evaluated`` events like hetopt's own.

    A ``step`` event's ``exchange`` says what a worker contributed to one exchange, and whether the hook was at work.
    """
    world_size = len(spec.workers)
    torch.manual_seed(spec.seed)
    task = load_task(spec.task)
    data = task.data(Path(spec.data_dir) if spec.data_dir is not None else None)
    model = task.model()
    local = spec.global_batch_size // world_size
    StretchedBackward(task, model, fetch(data.train, range(local)), pace)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    hook = HOOKS[hook_name](gradient_bytes)
    parallel = hook.wrap(model)
    optimizer = task.optimizer(model)
    rates = [float(group["lr"]) * spec.learning_rate_scale for group in optimizer.param_groups]
    steps_per_epoch = len(data.train) / (local * world_size)
    last = spec.stop.max_steps or math.ceil((spec.stop.max_epochs or 0) * steps_per_epoch)
    cursor = SampleCursor(len(data.train), spec.seed)
    parallel.train()  # type: ignore[no-untyped-call]  # likewise
    events.write("training_started", step=0)
    begun_s = block_s = time.perf_counter()
    losses: list[Tensor] = []
    evaluated = sent_bytes = 0

    def taken() -> tuple[float, Batch]:
        """Return the epochs done, and this worker's part of the next batch."""
        epoch = cursor.position / cursor.dataset_size
        set_epoch(data.train, cursor.epoch, spec.seed)
        return epoch, fetch(data.train, cursor.take([local] * world_size).slice(rank).copy())

    ahead = ThreadPoolExecutor(1) if hook_name == "tuned" else None
    coming = None if ahead is None else ahead.submit(taken)
    for step in range(1, last + 1):
        pace.begin(local)
        epoch, batch = taken() if coming is None else coming.result()
        coming = ahead.submit(taken) if ahead is not None and step < last else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(epoch)
        optimizer.zero_grad()
        loss = mean_of(task.loss(parallel, batch))
        loss.backward()  # type: ignore[no-untyped-call]  # likewise
        optimizer.step()
        losses.append(loss.detach())
        due = math.floor(step / steps_per_epoch / spec.evaluate_every_epochs) > evaluated or step == last
        if len(losses) == spec.control_period_steps or due or step == hook.dense_steps:
            now_s = time.perf_counter()
            sent_before, sent_bytes = sent_bytes, hook.sent_bytes(step)
            events.write(
                "step",
                step=step,
                steps=len(losses),
                step_time_s=(now_s - block_s) / len(losses),
                local_batch_sizes=[local] * world_size,
                loss=float(torch.stack(losses).mean()),
                exchange={
                    "way": "none" if step <= hook.dense_steps else hook_name,
                    "sent_bytes": (sent_bytes - sent_before) / len(losses),
                    "dense_bytes": gradient_bytes,
                },
            )
            losses = []
            if due:
                evaluated += 1
                _evaluate(task, data, model, events, step=step, rank=rank, world_size=world_size)
            block_s = time.perf_counter()
    if ahead is not None:
        ahead.shutdown()
    events.write("training_finished", step=last, training_s=time.perf_counter() - begun_s)


def _evaluate(
    task: Task, data: TaskData, model: nn.Module, events: EventLog, *, step: int, rank: int, world_size: int
) -> None:
    """Average the buffers, evaluate with all workers, and log the metrics."""
    average_buffers(model, 1 / world_size, world_size)
    metrics = evaluate(task, model, data.evaluation, shares=[1.0] * world_size, rank=rank, device=torch.device("cpu"))
    events.write("evaluated", step=step, metrics=metrics)
