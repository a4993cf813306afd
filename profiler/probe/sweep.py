"""Step times over local batch sizes while some workers compute at the same time, and devices' FLOP/s and copy rates."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hetopt.core.calibration_benchmark import measure_yardstick_s
from hetopt.core.memory import Precision, TrainingMemory, fit_memory, memory_limit_bytes
from hetopt.core.run_spec import ProbeSchedule, RunSpec, Sweep
from hetopt.profiler.probe.crew import Alignment, ProbeGroup, align
from hetopt.profiler.probe.exchange_costs import time_compressors
from hetopt.profiler.probe.facts import StepMemoryCount, device_memory_bytes, peak_memory_bytes, reset_peak_memory
from hetopt.profiler.records import PHASES, DeviceFacts, MemoryCounted, SweepEnded, SweepPoint, WorkerSteps
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import LossModule, matrices_in, trainable_parameters
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch
from hetopt.trainer.task import Task, make_optimizer
from hetopt.trainer.training import build_model

FEWEST_TIMED = 3
FEWEST_SIZES = 2
"""Number of batch sizes that are measured whatever it takes, as a line needs two points; larger ones are left out when
time runs short."""


def worker_steps(steps: Sequence[TimedStep], device: torch.device, before_s: float | None) -> WorkerSteps:
    """Return the record of steps that just ended: times, contention, peak bytes since `reset_peak_memory`, yardstick.

    Args:
        steps: steps that ended just now, at least one, without warm-up steps.
        device: device that computed the steps.
        before_s: `yardstick_s` before the steps, which the record averages with one now; None: on a GPU.
    """
    after_s = yardstick_s(device)
    return WorkerSteps(
        peak_memory_bytes=peak_memory_bytes(device),
        yardstick_s=None if before_s is None or after_s is None else (before_s + after_s) / 2,
        contention=max(1.0, math.fsum(step.wall_s for step in steps) / math.fsum(step.alone_s for step in steps)),
        phases_s=tuple(statistics.median(step.phases_s[phase] for step in steps) for phase in range(PHASES)),
        samples_s=tuple(step.alone_s for step in steps),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """Model and optimizer of a probe's worker; all gradients are views into the flat fp32 ``gradient``.

    Attributes:
        loss: the model with the task's loss on top.
        optimizer: optimizer of the model, with a learning rate of 0.
        gradient: [elements], of all trained parameters in their order.
        task: task of the model.
        device: device where it is.
    """

    loss: LossModule
    optimizer: Optimizer
    gradient: Tensor
    task: Task
    device: torch.device

    @classmethod
    def build(cls, task: Task, spec: RunSpec, device: torch.device) -> Replica:
        """Build the same fp32 replica on every rank, whose optimizer moves no weight; every rank must call it.

        The optimizer works at a learning rate of zero, so that however many steps are timed, activations and gradients
        stay those of a sane model.

        Raises:
            BadInput: the task's model has no parameter to train, one that is not fp32, or an optimizer that cannot be
                used.
        """
        model = build_model(task, device, spec.seed)
        parameters = trainable_parameters(model)
        sizes = [parameter.numel() for parameter in parameters]
        gradient = torch.zeros(sum(sizes), device=device)
        for parameter, view in zip(parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = view.view_as(parameter)
        optimizer = make_optimizer(task, model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        loss = LossModule(model, task.loss, "fp32")
        return cls(loss=loss, optimizer=optimizer, gradient=gradient, task=task, device=device)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters, in the order of the gradient; a number counts as a vector of one."""
        return tuple(tuple(parameter.shape) or (1,) for parameter in trainable_parameters(self.loss.model))

    def computing_in(self, precision: Precision) -> Replica:
        """Return a replica that computes in another precision, with the same model, optimizer and gradient."""
        return replace(self, loss=LossModule(self.loss.model, self.task.loss, precision))

    def step(self, batch: Batch, mark: Callable[[], object] = lambda: None) -> None:
        """Compute one step on ``batch``, updating at learning rate 0, no exchange; call ``mark`` between phases.

        Args:
            batch: batch to compute.
            mark: called after the forward and after the backward pass.
        """
        self.gradient.zero_()
        loss = self.loss(batch)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()

    def count(self, batch: Batch, samples: int) -> TrainingMemory:
        """Take one step on a batch of ``samples`` samples; return its memory, bytes by kind of tensor.

        The optimizer must have stepped before, so that its state exists.
        """
        count = StepMemoryCount(
            self.device,
            parameters=list(self.loss.model.parameters()),
            buffers=list(self.loss.model.buffers()),
            optimizers=[self.optimizer],
            gradient_bytes=self.gradient.nbytes,
            gradient=self.gradient,
        )
        count.begins()
        count.gets(batch)
        with count.tensors:
            self.step(batch, count.updates)
            count.updated()
        return count.result(samples)


class _Stepper:
    """A replica's training steps over the data in this worker's own order, timed phase by phase."""

    def __init__(self, replica: Replica, reader: BatchReader, rank: int) -> None:
        """Make the stepper of one rank; samples come in an order that is random by ``rank``, again and again."""
        self._replica = replica
        self._reader = reader
        self._stopwatch = Stopwatch(replica.device)
        self._order = cycle(np.random.default_rng(rank).permutation(len(reader.dataset)).tolist())

    def step(self, size: int) -> TimedStep:
        """Take one step of ``size`` samples, loading included, and return the step's times."""
        marks = [self._stopwatch.mark()]

        def mark() -> None:
            marks.append(self._stopwatch.mark())

        batch = self.read(size)
        mark()
        self._replica.step(batch, mark)
        mark()
        return timed_step(self._stopwatch, (marks[0], marks[-1]), *([span] for span in pairwise(marks)))

    def read(self, size: int) -> Batch:
        """Return the next ``size`` samples."""
        return self._reader.read(MicroBatch(epoch=0, indices=list(islice(self._order, size))))


def run_sweep(
    crew: ProbeGroup,
    replica: Replica,
    reader: BatchReader,
    index: int,
    sweep: Sweep,
    *,
    schedule: ProbeSchedule | None,
) -> tuple[int, ...]:
    """Time steps at each batch size of a sweep, log them, and return the sizes that were timed; every rank calls it.

    The first pass over a sweep also logs the device; the first sweep in a precision the memory of steps, and sweeps in
    the schedule's first precision the times of compressors.

    Args:
        crew: all workers of the probe.
        replica: this worker's.
        reader: reader of the samples.
        index: index of the sweep in the schedule.
        sweep: batch sizes, workers, precision and time limit.
        schedule: schedule of the probe; None: this is a later pass over a sweep.


    Returns:
        The batch sizes that were measured, ascending; empty: not even the first fits.

    Raises:
        ProbeStopped: any worker was asked to stop.
    """
    context, group = crew.context, crew.first(sweep.concurrent_workers)
    begun_s = crew.elapsed_s()
    points: list[SweepPoint] = []
    with threads(sweep.threads_per_worker), matrices_in(sweep.precision):
        computing = replica.computing_in(sweep.precision)
        # The others keep still.
        stepper = _Stepper(computing, reader, context.rank) if context.rank < sweep.concurrent_workers else None
        # Tensors are the same in every division of the host.
        counts = schedule is not None and sweep.precision not in [
            previous.precision for previous in schedule.sweeps[:index]
        ]
        limit_bytes = (
            math.inf
            if schedule is None
            else record_facts(crew, index, sweep, group, stepper is not None, schedule.memory_fraction)
        )
        for position, size in enumerate(sweep.local_batch_sizes):
            left_s = sweep.time_limit_s - (crew.elapsed_s() - begun_s)
            if schedule is None and left_s <= 0:
                break
            if is_too_large(points, size, left_s, limit_bytes):
                break
            allowed_s = max(0.0, left_s) / (len(sweep.local_batch_sizes) - position)
            timed = _measure(stepper, sweep, size, allowed_s, group, context.device) if stepper else WorkerSteps()
            rows = crew.gather(timed.row(sweep.timed_steps))[: sweep.concurrent_workers]
            workers = tuple(WorkerSteps.of(row) for row in rows)
            if not all(worker.samples_s for worker in workers):
                if schedule is not None:
                    crew.record(SweepEnded(sweep=index, local_batch_size=size))
                break
            if schedule is None:  # the memory of a process that has trained since says nothing about the batch size
                workers = tuple(worker.model_copy(update={"peak_memory_bytes": None}) for worker in workers)
            points.append(SweepPoint(sweep=index, local_batch_size=size, workers=workers))
            crew.record(points[-1])
            if stepper is not None and context.is_leader and counts:
                crew.record(MemoryCounted(sweep=index, memory=computing.count(stepper.read(size), size)))
        usual = schedule is not None and sweep.precision == schedule.sweeps[0].precision
        if schedule is not None and schedule.compressors is not None and usual and points:
            # The gradient of the last step is still there: real values to compress.
            gradient = None if stepper is None else replica.gradient
            time_compressors(crew, index, schedule.compressors, gradient, group, replica.shapes)
    return tuple(point.local_batch_size for point in points)


def _measure(
    stepper: _Stepper, sweep: Sweep, size: int, allowed_s: float, group: Alignment, device: torch.device
) -> WorkerSteps:
    """Return the record of timed steps of ``size`` samples, in step with the other active workers, after a warm-up.

    The record is empty if any worker ran out of memory. ``allowed_s`` decides how many steps are timed, see
    `steps_within`.
    """
    reset_peak_memory(device)
    timed: list[TimedStep] = []
    warmups, steps = sweep.warmup_steps, sweep.timed_steps
    before_s = yardstick_s(device)
    align(group)
    while len(timed) < warmups + steps:
        try:
            timed.append(stepper.step(size))
            step_s = timed[-1].wall_s
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            step_s = math.inf
        # Workers begin every step together, as in training; one that ran out of memory ends it for all.
        step_s = align(group, step_s)
        if step_s == math.inf:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return WorkerSteps()
        if len(timed) <= 2:
            # The first step also sets up its kernels, so the second knows better how many steps there is time for.
            warmups, steps = steps_within(sweep, allowed_s, step_s)
    return worker_steps(timed[warmups:], device, before_s)


def steps_within(sweep: Sweep, allowed_s: float, step_s: float) -> tuple[int, int]:
    """Return how many steps of ``step_s`` s to warm up with, and how many to time, within ``allowed_s`` seconds.

    Never more than ``sweep`` asks for, and at least one to warm up with and three to time, whatever the time.
    """
    warmups = min(sweep.warmup_steps, max(1, int(0.2 * allowed_s / step_s)))
    return warmups, min(sweep.timed_steps, max(FEWEST_TIMED, int(0.8 * allowed_s / step_s)))


def yardstick_s(device: torch.device) -> float | None:
    """Return the seconds that a calibration micro-benchmark takes on this processor now; None: ``device`` is a GPU.

    It is read anew for each batch size, as a shared machine changes its speed within seconds.
    """
    return measure_yardstick_s() if device.type == "cpu" else None


def is_too_large(points: Sequence[SweepPoint], size: int, left_s: float, limit_bytes: float) -> bool:
    """Return whether to skip batch size ``size``: by ``points`` it exceeds ``limit_bytes`` or ``left_s`` seconds.

    Args:
        points: measurements of smaller sizes; time counts from `FEWEST_SIZES` of them on, memory if peaks are known.
        size: local batch size, samples.
        left_s: seconds that are left of the sweep.
        limit_bytes: bytes that a worker may use; infinite: no limit.
    """
    peaks = [(point.local_batch_size, point.peak_memory_bytes) for point in points if point.peak_memory_bytes]
    if peaks:
        line = fit_memory([measured for measured, _ in peaks], [peak for _, peak in peaks])
        if line.peak_bytes(size) > limit_bytes:
            return True
    if len(points) < FEWEST_SIZES:
        return False
    last = max(points, key=lambda point: point.local_batch_size)
    # In proportion to the samples: never too short, since a step has a fixed part as well.
    larger = max(1.0, size / last.local_batch_size)
    step_s = max(statistics.median(worker.samples_s) for worker in last.workers) * larger
    return left_s < (1 + FEWEST_TIMED) * step_s


def record_facts(
    crew: ProbeGroup, index: int, sweep: Sweep, group: Alignment, active: bool, memory_fraction: float
) -> int:
    """Log a sweep's device and its speeds, and return the bytes that a worker may use; every rank calls it.

    Args:
        crew: all workers of the probe.
        index: index of the sweep in the schedule.
        sweep: number of workers that compute, and their precision.
        group: the workers that compute; None: one alone.
        active: whether this worker computes.
        memory_fraction: share of the device's memory that training may use.

    Raises:
        ProbeStopped: any worker was asked to stop.
    """
    device = crew.context.device
    rates = (0.0, 0.0)
    if active:
        align(group)
        rates = speeds(device)
    rows = crew.gather([*rates, float(device_memory_bytes(device))])[: sweep.concurrent_workers]
    # Every GPU worker has a device of its own; CPU workers share the host's memory.
    sharing = sweep.concurrent_workers if device.type == "cpu" else 1
    limit_bytes = memory_limit_bytes(int(min(row[2] for row in rows)), workers=sharing, fraction=memory_fraction)
    crew.record(
        DeviceFacts(
            sweep=index,
            kind="cuda" if device.type == "cuda" else "cpu",
            precision=sweep.precision,
            memory_limit_bytes=limit_bytes,
            matmul_flops_per_s=statistics.median(row[0] for row in rows),
            copy_bytes_per_s=statistics.median(row[1] for row in rows),
        )
    )
    return limit_bytes


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's CPU threads to ``count`` in this context, and back after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SPEED_REPEATS = 5
MATRIX_SIDE = {"cpu": 1024, "cuda": 4096}
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes that are copied to time memory, by device: far more than the caches of one worker hold."""


def speeds(device: torch.device) -> tuple[float, float]:
    """Return a device's FLOP/s in a large fp32 matrix product, and bytes/s of a memory copy, read plus write.

    Both are measured now, on what this process may use of the device.
    """
    side, stopwatch = MATRIX_SIDE[device.type], Stopwatch(device)
    matrix, source = torch.rand(side, side, device=device), torch.rand(COPY_BYTES[device.type] // 4, device=device)
    product, target = torch.empty_like(matrix), torch.empty_like(source)

    def median_s(work: Callable[[], object]) -> float:
        """Return the median processor seconds of `SPEED_REPEATS` calls of ``work``, after one that does not count."""
        times_s = []
        for _ in range(1 + SPEED_REPEATS):
            begun = stopwatch.mark()
            work()
            times_s.append(stopwatch.processor_s(begun, stopwatch.mark()))
        return statistics.median(times_s[1:])

    flops_per_s = 2 * side**3 / median_s(lambda: torch.mm(matrix, matrix, out=product))
    return flops_per_s, 2 * source.nbytes / median_s(lambda: target.copy_(source))


Span = tuple[Mark, Mark]


class TimedStep(NamedTuple):
    """Seconds of one training step: wall time, time without contention, and that time by phase.

    Attributes:
        wall_s: wall time.
        alone_s: time without contention.
        phases_s: parts of ``alone_s``: loading, forward, backward and update.
    """

    wall_s: float
    alone_s: float
    phases_s: tuple[float, ...]


def timed_step(stopwatch: Stopwatch, whole: Span, loading: Sequence[Span], *computing: Sequence[Span]) -> TimedStep:
    """Return the seconds of one step from marks of a stopwatch: wall time, and without contention, also by phase.

        contention c = wall / processor time      of forward, backward and update, which only compute
        alone        = processor time             of these
                     = wall - (c - 1) processor   of all else, which also waits for disks and loaders

    Args:
        stopwatch: stopwatch that set the marks.
        whole: span of the whole step.
        loading: spans that waited for samples.
        computing: spans of forward, of backward and of the update.
    """
    wall_s, processor_s = _spent(stopwatch, [whole])
    phases = [_spent(stopwatch, spans) for spans in computing]
    computed_wall_s, computed_s = (math.fsum(column) for column in zip(*phases, strict=True))
    contention = max(1.0, computed_wall_s / computed_s) if computed_s > 0 else 1.0

    def alone_s(wall_s: float, processor_s: float) -> float:
        return max(processor_s, wall_s - (contention - 1) * processor_s)

    return TimedStep(
        wall_s=wall_s,
        alone_s=computed_s + alone_s(wall_s - computed_wall_s, processor_s - computed_s),
        phases_s=(alone_s(*_spent(stopwatch, loading)), *(phase_s for _, phase_s in phases)),
    )


def _spent(stopwatch: Stopwatch, spans: Sequence[Span]) -> tuple[float, float]:
    """Return the wall and the processor seconds of some spans together."""
    return (
        math.fsum(stopwatch.seconds(*span) for span in spans),
        math.fsum(stopwatch.processor_s(*span) for span in spans),
    )
