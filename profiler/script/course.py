"""What is measured of a script, step after step: times by batch size, then some training in earnest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hetopt.core.errors import RunFailed
from hetopt.core.memory import TrainingMemory
from hetopt.core.profile import NoiseSample
from hetopt.core.training_laws import pooled_noise
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.facts import OperatorCount, flop_count, reset_peak_memory, without_fused_layers
from hetopt.profiler.probe.gradient import ResidualGains
from hetopt.profiler.probe.step_memory import StepCount
from hetopt.profiler.probe.sweep import FEWEST_SIZES, FEWEST_TIMED, taken, yardstick_s
from hetopt.profiler.records import GainMeasured, Taken
from hetopt.profiler.schedule import batch_ladder
from hetopt.profiler.script.observer import Course, Observer, Step, Wish
from hetopt.profiler.script.order import ScriptOrder

LIKE = 0.2
"""A step counts for a batch size when its samples differ from it by less: batches of whole sentences vary.
Sizes that are asked for are a factor of two apart: anything below a half tells them from each other."""

LATE_STEPS = 20
"""Reader processes have drawn so many batches ahead, at most, when another size is asked for."""

PARTS = 4
"""A batch over that of the smaller one whose gradient is compared with it; 2 to 8 find the same noise."""

SMALL_STEPS, LARGE_STEPS = 4, 2
"""Gradients of each that one sample of the noise is the mean of: of more, a sample varies less and there are fewer."""

FEWEST_SAMPLES = 3


@dataclass
class Measured:
    """What is known so far; complete where the script did not end before.

    Attributes:
        operators: kernels that a step launches; 0: they were not counted.
        flops: of the matrix work of one step.
        sizes: steps at each batch size, in the order of measuring.
        memory: counted at each of them.
        noise: sums of a gradient and its parts.
        gains: by ratio.
        gradient: the last that was looked at.
        ended: the size at which measuring was given up, and why.
    """

    operators: int = 0
    flops: int = 0
    flops_samples: int = 0
    sizes: dict[int, Taken] = field(default_factory=dict)
    memory: list[TrainingMemory] = field(default_factory=list)
    noise: list[NoiseSample] = field(default_factory=list)
    gains: list[GainMeasured] = field(default_factory=list)
    gradient: Tensor | None = None
    trying: int = 0
    ended: tuple[int, Literal["time", "memory-predicted", "memory-exhausted"]] | None = None


@dataclass(frozen=True, kw_only=True)
class ScriptCourse:
    """The whole of it.

    Attributes:
        order: what to measure.
        observer: of the script.
        measured: is filled.
        crew: this process alone.
    """

    order: ScriptOrder
    observer: Observer
    measured: Measured
    crew: ProbeGroup

    def run(self) -> Course:
        """Begins where the script's first step has ended."""
        order = self.order
        step = yield Wish()
        counted = yield from self._count()
        # Of three steps: what reads batches ahead, as frameworks do, has read more of them in its first one.
        own = statistics.median_low((step.samples, *counted))
        self.observer.batch_size = own or self.observer.batch_size
        begun_s = self.crew.elapsed_s()
        sizes = self._sizes()
        # The script's own size comes first: it is what training takes, and is measured however short the time is.
        ahead = sorted((size for size in sizes if size <= self._own), reverse=True)
        later = [size for size in sizes if size > self._own]
        yield from self._sweep(ahead, begun_s, order.sweep_s * (len(ahead) / len(sizes)))
        trained_from_s = self.crew.elapsed_s()
        if order.training_s > 0:
            yield from self._train()
        # What was spent on training is no part of the sweep. The largest batches come last: they may fill the memory.
        spent_s = self.crew.elapsed_s() - trained_from_s
        if self.measured.ended is None and later:
            yield from self._sweep(later, begun_s + spent_s, order.sweep_s)
        if not self.measured.sizes:
            raise RunFailed(f"no steps of {self._own} samples came, as the script's first ones had")

    def _count(self) -> Generator[Wish, Step, tuple[int, int]]:
        """Operators of a step; the samples of the two steps that it takes."""
        operators, flops = OperatorCount(), flop_count()
        first = yield Wish(inside=(operators,))
        self.measured.operators = operators.count
        # The counter takes operators apart that tensors of a sharded model do not have apart.
        counters = () if self.observer.is_sharded else (without_fused_layers(), flops)
        step = yield Wish(inside=counters)
        self.measured.flops, self.measured.flops_samples = flops.get_total_flops(), step.samples
        return first.samples, step.samples

    @property
    def _own(self) -> int:
        """Samples of a step as the script has it."""
        return self.observer.batch_size

    @property
    def changes_size(self) -> bool:
        """Whether the script is given batches of other sizes than its own."""
        return self.observer.loader is not None and self.order.watch == "every-size"

    def _sizes(self) -> tuple[int, ...]:
        """Batch sizes to time, in increasing order."""
        if not self.changes_size:
            return (self._own,)
        return batch_ladder(self._own, dataset_size=self.order.dataset_size or self.observer.dataset_size)

    def _is_of(self, step: Step, size: int) -> bool:
        return abs(step.samples - size) <= LIKE * size

    def _sweep(self, sizes: Sequence[int], begun_s: float, limit_s: float) -> Course:
        for position, size in enumerate(sizes):
            left_s = limit_s - (self.crew.elapsed_s() - begun_s)
            last = max(self.measured.sizes, default=None)
            if last is not None and len(self.measured.sizes) >= FEWEST_SIZES:
                step_s = statistics.median(self.measured.sizes[last].samples_s) * max(1.0, size / last)
                if left_s < (1 + FEWEST_TIMED) * step_s:
                    self.measured.ended = (size, "time")
                    return
            self.measured.trying = size
            timed = yield from self._time(size, max(0.0, left_s) / (len(sizes) - position))
            if timed is not None:
                self.measured.sizes[size] = timed
                if self.order.sweep == 0:  # it is the same beside others
                    yield from self._count_memory(size)
            self.measured.trying = 0

    def _time(self, size: int, allowed_s: float) -> Generator[Wish, Step, Taken | None]:
        """Steps of one size; None: the script gives none of that size."""
        order, device = self.order, self.observer.device
        steps: list[Step] = []
        warmups, count, others = order.warmup_steps, order.timed_steps, 0
        before_s = yardstick_s(device)
        reset_peak_memory(device)
        try:
            while len(steps) < warmups + count:
                step = yield Wish(factor=size / self._own)
                if not self._is_of(step, size):
                    others += 1
                    if others > LATE_STEPS + order.warmup_steps and len(steps) < others:
                        return None
                    continue
                steps.append(step)
                if len(steps) <= 2:
                    warmups = min(order.warmup_steps, max(1, int(0.2 * allowed_s / step.timed.wall_s)))
                    count = min(order.timed_steps, max(FEWEST_TIMED, int(0.8 * allowed_s / step.timed.wall_s)))
        except GeneratorExit:  # the script has come to its end
            late = [step.timed for step in steps[min(warmups, len(steps) - FEWEST_TIMED) :]]
            if len(steps) > FEWEST_TIMED:
                self.measured.sizes[size] = taken(late, device, before_s)
            raise
        return taken([step.timed for step in steps[warmups:]], device, before_s)

    def _count_memory(self, size: int) -> Course:
        """Over two steps: what the script still holds of the first one is there in the second."""
        factor = size / self._own
        count = StepCount(self.observer.device, self.observer.kept)
        yield Wish(factor=factor, count=count)
        step = yield Wish(factor=factor, count=count)
        self.measured.memory.append(count.told(step.samples or size))

    def _train(self) -> Course:
        """Steps at the script's own batch size that learn; between them, gradients that tell signal from noise."""
        order, begun_s = self.order, self.crew.elapsed_s()
        gains: ResidualGains | None = None
        count = tried = 0
        while True:
            due = count % order.sample_every_steps == 0
            late = self.crew.elapsed_s() - begun_s > order.training_s
            if late and tried >= min(FEWEST_SAMPLES, 1 + count // order.sample_every_steps):
                return
            step = yield Wish(learns=True, wants_gradient=True)
            count += 1
            if step.gradient is not None and bool(torch.isfinite(step.gradient).all()):
                self.measured.gradient = step.gradient
                if gains is None and order.gain_ratios:
                    gains = ResidualGains(
                        order.gain_ratios, order.gain_residual_ratios, step.gradient.numel(), step.gradient.device
                    )
                if gains is not None:
                    if due:
                        self.measured.gains.append(GainMeasured(gains=gains.measure(step.gradient, self.crew)))
                    gains.follow(step.gradient)
            if due:
                tried += 1
                yield from self._sample_noise(count)

    def _sample_noise(self, step: int) -> Course:
        """``E|g_b|^2 = |G|^2 + V / b`` at two sizes gives both moments (McCandlish et al. 2018, appendix A.1)."""
        large = self._own
        parts = min(PARTS, large // 2)
        if parts < 2 or not self.changes_size:
            return
        small = large // parts
        large_square = yield from self._mean_square(1.0, large, LARGE_STEPS)
        small_square = yield from self._mean_square(small / large, small, SMALL_STEPS)
        if large_square is None or small_square is None:
            return
        parts = round(large / small)
        # The parts are of other batches: a mean of few may come out shorter than the whole.
        weighted_square_norms = max(large * small_square, large * large_square)
        moments = pooled_noise(parts, large, weighted_square_norms, large_square)
        self.measured.noise.append(NoiseSample(step=step, samples_seen=step * large, **vars(moments)))

    def _mean_square(self, factor: float, size: int, count: int) -> Generator[Wish, Step, float | None]:
        squares: list[float] = []
        for _ in range(count + LATE_STEPS):
            step = yield Wish(factor=factor, wants_gradient=True)
            if step.gradient is not None and self._is_of(step, size):
                squares.append(float(torch.linalg.vector_norm(step.gradient, dtype=torch.float64)) ** 2)
            if len(squares) == count:
                break
        return statistics.fmean(squares) if squares and all(map(math.isfinite, squares)) else None
