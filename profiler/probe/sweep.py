"""Step times over local batch sizes: some workers compute at the same time, the others keep still.

With them the two figures that relate devices to each other: how fast a worker's multiplies and copies.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from hetopt.core.calibration_benchmark import measure_yardstick_s
from hetopt.core.memory import TrainingMemory, fit_memory, memory_limit_bytes
from hetopt.core.run_spec import CompressorProbe, Sweep
from hetopt.profiler.probe.crew import Alignment, ProbeGroup, align
from hetopt.profiler.probe.exchange_costs import time_compressors
from hetopt.profiler.probe.facts import device_memory_bytes, peak_memory_bytes, reset_peak_memory
from hetopt.profiler.probe.replica import Replica
from hetopt.profiler.probe.step_memory import count_step
from hetopt.profiler.records import PHASES, DeviceFacts, MemoryCounted, SweepEnded, SweepPoint, Taken
from hetopt.trainer.data.cursor import Indices, MicroBatch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import matrices_in
from hetopt.trainer.steps.stopwatch import Mark, Stopwatch

FEWEST_TIMED = 3
FEWEST_SIZES = 2
"""Measured whatever it takes, as a line needs two points; larger sizes are left out when time runs short."""


def taken(steps: Sequence[TimedStep], device: torch.device, before_s: float | None) -> Taken:
    """Return what timed steps come to.

    Args:
        steps: that are over just now.
        device: that computed them.
        before_s: reading of the yardstick before them; None: the processor does not compute.
    """
    after_s = yardstick_s(device)
    return Taken(
        peak_memory_bytes=peak_memory_bytes(device),
        yardstick_s=None if before_s is None or after_s is None else (before_s + after_s) / 2,
        contention=max(1.0, math.fsum(step.wall_s for step in steps) / math.fsum(step.alone_s for step in steps)),
        phases_s=tuple(statistics.median(step.phases_s[phase] for step in steps) for phase in range(PHASES)),
        samples_s=tuple(step.alone_s for step in steps),
    )


class _Stepper:
    """A training step up to the optimizer, without any exchange, timed phase by phase."""

    def __init__(self, replica: Replica, reader: BatchReader, stopwatch: Stopwatch, order: Indices) -> None:
        self._replica = replica
        self._reader = reader
        self._stopwatch = stopwatch
        self._order = order
        self._position = 0

    def step(self, size: int) -> TimedStep:
        """Take one step of so many samples."""
        mark = self._stopwatch.mark
        part = self._next(size)
        begun = mark()
        batch = self._reader.read(part)
        loaded = mark()
        self._replica.gradient.zero_()
        loss = self._replica.loss(batch)
        forwarded = mark()
        loss.backward()
        computed = mark()
        self._replica.optimizer.step()
        marks = (begun, loaded, forwarded, computed, mark())
        return timed_step(self._stopwatch, (begun, marks[-1]), *([span] for span in pairwise(marks)))

    def count(self, size: int) -> TrainingMemory:
        """Take one step, and count its tensors."""
        return count_step(self._replica, self._reader.read(self._next(size)), size)

    def _next(self, size: int) -> MicroBatch:
        self._position = (self._position + size) % len(self._order)
        places = range(self._position, self._position + size)
        return MicroBatch(epoch=0, indices=np.take(self._order, places, mode="wrap").tolist())


def run_sweep(
    crew: ProbeGroup,
    replica: Replica,
    reader: BatchReader,
    index: int,
    sweep: Sweep,
    *,
    memory_fraction: float,
    counts_memory: bool,
    compressors: CompressorProbe | None,
) -> tuple[int, ...]:
    """Run one sweep of the schedule; called by every rank. Returns the batch sizes that were measured."""
    context = crew.context
    begun_s = crew.elapsed_s()
    points: list[SweepPoint] = []
    with _ready(crew, replica, reader, sweep) as (stepper, group):
        limit_bytes = record_facts(crew, index, sweep, group, stepper is not None, memory_fraction)
        for position, size in enumerate(sweep.local_batch_sizes):
            left_s = sweep.time_limit_s - (crew.elapsed_s() - begun_s)
            if (reason := why_not(points, size, left_s, limit_bytes)) is not None:
                crew.record(SweepEnded(sweep=index, local_batch_size=size, reason=reason))
                break
            allowed_s = max(0.0, left_s) / (len(sweep.local_batch_sizes) - position)
            workers = _measure_together(crew, stepper, sweep, size, allowed_s, group)
            if not all(worker.samples_s for worker in workers):
                crew.record(SweepEnded(sweep=index, local_batch_size=size, reason="memory-exhausted"))
                break
            points.append(SweepPoint(sweep=index, local_batch_size=size, workers=workers))
            crew.record(points[-1])
            if stepper is not None and context.is_leader and counts_memory:
                crew.record(MemoryCounted(sweep=index, memory=stepper.count(size)))
        if compressors is not None and points:
            # The gradient of the last step is still there: real values to compress.
            gradient = None if stepper is None else replica.gradient
            time_compressors(crew, index, compressors, gradient, group, replica.shapes)
    return tuple(point.local_batch_size for point in points)


def come_back(
    crew: ProbeGroup,
    replica: Replica,
    reader: BatchReader,
    index: int,
    sweep: Sweep,
    sizes: Sequence[int],
    *,
    share: float,
) -> None:
    """Time steps at batch sizes that were measured before, at a later moment, within a share of the sweep's time."""
    time_limit_s, begun_s = share * sweep.time_limit_s, crew.elapsed_s()
    with _ready(crew, replica, reader, sweep) as (stepper, group):
        for position, size in enumerate(sizes):
            left_s = time_limit_s - (crew.elapsed_s() - begun_s)
            if left_s <= 0:
                return
            workers = _measure_together(crew, stepper, sweep, size, left_s / (len(sizes) - position), group)
            if not all(worker.samples_s for worker in workers):
                return
            # The memory of a process that has trained since says nothing about the batch size.
            workers = tuple(worker.model_copy(update={"peak_memory_bytes": None}) for worker in workers)
            crew.record(SweepPoint(sweep=index, local_batch_size=size, workers=workers))


@contextmanager
def _ready(
    crew: ProbeGroup, replica: Replica, reader: BatchReader, sweep: Sweep
) -> Iterator[tuple[_Stepper | None, Alignment]]:
    """Compute as a sweep does; yields what steps over the data in this worker's own order, and the active workers.

    None in place of the first: this worker keeps still.
    """
    context, group = crew.context, crew.first(sweep.concurrent_workers)
    with threads(sweep.threads_per_worker), matrices_in(sweep.precision):
        if context.rank < sweep.concurrent_workers:
            order = np.random.default_rng(context.rank).permutation(len(reader.dataset))
            stopwatch = Stopwatch(context.device)
            yield _Stepper(replica.computing_in(sweep.precision), reader, stopwatch, order), group
        else:
            yield None, group


def _measure_together(
    crew: ProbeGroup, stepper: _Stepper | None, sweep: Sweep, size: int, allowed_s: float, group: Alignment
) -> tuple[Taken, ...]:
    """What every active worker measured at one batch size, the same on every rank; a worker without stepper listens."""
    own = _measure(stepper, sweep, size, allowed_s, group, crew.context.device) if stepper else Taken()
    rows = crew.gather(own.row(sweep.timed_steps))[: sweep.concurrent_workers]
    return tuple(Taken.of(row) for row in rows)


def _measure(
    stepper: _Stepper, sweep: Sweep, size: int, allowed_s: float, group: Alignment, device: torch.device
) -> Taken:
    """Warm up and time steps at one batch size, in step with the other active workers."""
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
            return Taken()
        if len(timed) <= 2:
            # The first step also sets up its kernels, so the second knows better how many steps there is time for.
            warmups = min(sweep.warmup_steps, max(1, int(0.2 * allowed_s / step_s)))
            steps = min(sweep.timed_steps, max(FEWEST_TIMED, int(0.8 * allowed_s / step_s)))
    return taken(timed[warmups:], device, before_s)


def yardstick_s(device: torch.device) -> float | None:
    """How fast the processor is now that this worker computes on: read before and after the steps of a batch size.

    A shared machine changes its speed within seconds: what was read once for a whole sweep says little of one size.
    """
    return measure_yardstick_s() if device.type == "cpu" else None


def why_not(
    points: Sequence[SweepPoint], size: int, left_s: float, limit_bytes: int
) -> Literal["time", "memory-predicted"] | None:
    """Why the next batch size is left out, if it is."""
    peaks = [(point.local_batch_size, point.peak_memory_bytes) for point in points if point.peak_memory_bytes]
    if peaks:
        line = fit_memory([measured for measured, _ in peaks], [peak for _, peak in peaks])
        if line.peak_bytes(size) > limit_bytes:
            return "memory-predicted"
    if len(points) >= FEWEST_SIZES:
        last = points[-1]
        # In proportion to the samples: never too short, since a step has a fixed part as well.
        step_s = max(statistics.median(worker.samples_s) for worker in last.workers) * size / last.local_batch_size
        if left_s < (1 + FEWEST_TIMED) * step_s:
            return "time"
    return None


def record_facts(
    crew: ProbeGroup, index: int, sweep: Sweep, group: Alignment, active: bool, memory_fraction: float
) -> int:
    """Write what the sweep computes on; the memory that one of its workers may use."""
    device = crew.context.device
    speeds = (0.0, 0.0)
    if active:
        align(group)
        speeds = (matmul_flops_per_s(device), copy_bytes_per_s(device))
    rows = crew.gather([*speeds, float(device_memory_bytes(device))])[: sweep.concurrent_workers]
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
    """Compute with ``count`` threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SPEED_REPEATS = 5
MATRIX_SIDE = {"cpu": 1024, "cuda": 4096}
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Far larger than the caches of one worker, so that memory itself is measured."""


def matmul_flops_per_s(device: torch.device) -> float:
    """Floating-point operations a second of a large fp32 matrix product, as this process may use the device now."""
    side = MATRIX_SIDE[device.type]
    left, right = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    out = torch.empty_like(left)
    return 2 * side**3 / _median_s(lambda: torch.mm(left, right, out=out), device)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes a second of a memory copy, read plus write."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    stopwatch, times_s = Stopwatch(device), []
    for _ in range(1 + SPEED_REPEATS):
        begun = stopwatch.mark()
        work()
        times_s.append(stopwatch.processor_s(begun, stopwatch.mark()))
    return statistics.median(times_s[1:])


Span = tuple[Mark, Mark]


class TimedStep(NamedTuple):
    """One training step on two clocks, in seconds.

    Attributes:
        wall_s: as it passed.
        alone_s: without contention.
        phases_s: of that, loading, forward, backward and update.
        contention: wall over processor time of computing, at least 1.
    """

    wall_s: float
    alone_s: float
    phases_s: tuple[float, ...]
    contention: float


def timed_step(stopwatch: Stopwatch, whole: Span, loading: Sequence[Span], *computing: Sequence[Span]) -> TimedStep:
    """Return the time of one step, which may compute in several spans, without contention.

        contention c = wall / processor time      of forward, backward and update, which only compute
        alone        = processor time             of these
                     = wall - (c - 1) processor   of all else, which also waits for disks and loaders

    Where others share the processors, wall time says how busy they are, and processor time how fast the machine is.

    Args:
        stopwatch: that set the marks.
        whole: the step from its beginning to its end.
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
        contention=contention,
    )


def _spent(stopwatch: Stopwatch, spans: Sequence[Span]) -> tuple[float, float]:
    return (
        math.fsum(stopwatch.seconds(*span) for span in spans),
        math.fsum(stopwatch.processor_s(*span) for span in spans),
    )
