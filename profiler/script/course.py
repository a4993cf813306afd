"""Driver of a script's measurement, step after step: times by batch size, then training at the script's own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from hetopt.core.errors import RunFailed
from hetopt.core.profile import NoiseSample
from hetopt.core.run_spec import ProbeSchedule
from hetopt.core.training_laws import pooled_noise
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.facts import (
    WorkCount,
    reset_peak_memory,
    without_fused_layers,
)
from hetopt.profiler.probe.gradient import ResidualGains
from hetopt.profiler.probe.sweep import FEWEST_TIMED, TimedStep, is_too_large, steps_within, worker_steps, yardstick_s
from hetopt.profiler.records import GainMeasured, MemoryCounted, SweepPoint
from hetopt.profiler.schedule import batch_ladder
from hetopt.profiler.script.observer import Course, Observer, Step, Wish
from hetopt.profiler.script.order import ScriptOrder
from hetopt.trainer.sharding import is_sharded

LIKE = 0.2
"""Relative distance of a step's samples from a batch size up to which it counts for that size, as batches of whole
sentences vary. Sizes that are asked for are a factor of two apart: anything below a half tells them from each other."""

LATE_STEPS = 20
"""Most batches that reader processes have drawn ahead when another size is asked for."""

PARTS = 4
"""Ratio of a batch to the smaller one whose gradient is compared with it; 2 to 8 find the same noise."""

SMALL_STEPS, LARGE_STEPS = 4, 2
"""Numbers of gradients, of the smaller and of the whole batch, that one sample of the noise is the mean of: of more, a
sample varies less and there are fewer."""

FEWEST_SAMPLES = 3


SAMPLE_EVERY_STEPS = 10

USUAL = ProbeSchedule(seed=0, sweeps=())
"""Schedule with the ratios at which gains are measured, as of tasks."""


@dataclass(kw_only=True)
class ScriptCourse:
    """Driver of a script's measurement: sets the batch size of each next step, and keeps what was measured so far.

    Attributes:
        order: arguments, steps and time limits.
        observer: reports the script's steps.
        crew: this process alone.
        operators: number of operators that a step calls; 0: not counted.
        flops_per_sample: floating-point operations of matrix work; None: not counted.
        points: steps at each batch size, in the order of measuring.
        trying: the batch size that is being measured; 0: none.
    """

    order: ScriptOrder
    observer: Observer
    crew: ProbeGroup
    operators: int = 0
    flops_per_sample: float | None = None
    points: list[SweepPoint] = field(default_factory=list)
    trying: int = 0

    def run(self) -> Course:
        """Yield a `Wish` for each step after the script's first, and be sent its `Step`, until all is measured.

        Measurements are kept in the attributes and logged on the way. A script that ends early closes the generator;
        steps of the present batch size are then kept if there are enough.

        Raises:
            RunFailed: the script made no steps of the batch size that its first steps had.
        """
        order = self.order
        if order.watch == "steps":
            yield from self._sweep((self.observer.batch_size,), self.crew.elapsed_s(), order.time_limit_s)
            return
        step = yield Wish()
        counted = yield from self._count()
        # Of three steps: what reads batches ahead, as frameworks do, has read more of them in its first one.
        batch_size = statistics.median_low(each.samples for each in (step, *counted)) or self.observer.batch_size
        self.observer.batch_size = batch_size
        self.observer.batches = max(1, statistics.median_low(each.batches for each in (step, *counted)))
        begun_s = self.crew.elapsed_s()
        epoch = self.order.dataset_size or self.observer.dataset_size
        sizes = batch_ladder(batch_size, dataset_size=epoch) if self.changes_size else (batch_size,)
        # The script's own size comes first: it is what training takes, and is measured however short the time is.
        ahead = sorted((size for size in sizes if size <= self.observer.batch_size), reverse=True)
        later = [size for size in sizes if size > self.observer.batch_size]
        goes_on = yield from self._sweep(ahead, begun_s, order.time_limit_s * (len(ahead) / len(sizes)))
        trained_from_s = self.crew.elapsed_s()
        if order.training_s > 0:
            yield from self._train()
        # What was spent on training is no part of the sweep. The largest batches come last: they may fill the memory.
        spent_s = self.crew.elapsed_s() - trained_from_s
        if goes_on:
            yield from self._sweep(later, begun_s + spent_s, order.time_limit_s)
        if not self.points:
            raise RunFailed(f"no steps of {self.observer.batch_size} samples came, as the script's first ones had")

    def _count(self) -> Generator[Wish, Step, tuple[Step, Step]]:
        """Count a step's operators and a sample's FLOPs (not of a sharded model) into the attributes.

        Returns the two steps that this takes.
        """
        whole, apart = WorkCount(), WorkCount()
        first = yield Wish(inside=(whole,))
        self.operators = whole.operators
        # Of a sharded model it would see the operators of the whole and those of this worker's part.
        counters = () if is_sharded(self.observer.parameters) else (without_fused_layers(), apart)
        step = yield Wish(inside=counters)
        if step.samples:
            self.flops_per_sample = apart.flops / step.samples or None
        return first, step

    @property
    def changes_size(self) -> bool:
        """True if the script is given batches of other sizes than its own: it has a DataLoader, as ordered."""
        return self.observer.loader is not None and self.order.watch == "every-size"

    def _is_of(self, step: Step, size: int) -> bool:
        return abs(step.samples - size) <= LIKE * size

    def _sweep(self, sizes: Sequence[int], begun_s: float, limit_s: float) -> Generator[Wish, Step, bool]:
        """Time steps of batch sizes within ``limit_s`` seconds from ``begun_s``; return False at one that is too large.

        True: all were tried. In the first sweep the memory of a step is counted at each size, too.
        """
        for position, size in enumerate(sizes):
            left_s = limit_s - (self.crew.elapsed_s() - begun_s)
            if is_too_large(self.points, size, left_s, math.inf):
                return False
            self.trying = size
            timed = yield from self._time(size, max(0.0, left_s) / (len(sizes) - position))
            if timed and self.order.sweep == 0 and self.order.watch != "steps":  # it is the same beside others
                yield from self._count_memory(size)
            self.trying = 0
        return True

    def _time(self, size: int, allowed_s: float) -> Generator[Wish, Step, bool]:
        """Time steps of one batch size and keep them; return whether the script makes steps of that size.

        Steps of other sizes are passed over, up to a number. If the script ends, the steps so far are kept if there are
        more than `FEWEST_TIMED`.
        """
        order, device = self.order, self.observer.device
        steps: list[TimedStep] = []
        warmups, count, others = order.warmup_steps, order.timed_steps, 0
        before_s = yardstick_s(device)
        reset_peak_memory(device)
        try:
            while len(steps) < warmups + count:
                step = yield Wish(factor=size / self.observer.batch_size)
                if not self._is_of(step, size):
                    others += 1
                    if others > LATE_STEPS + order.warmup_steps and len(steps) < others:
                        return False
                    continue
                steps.append(step.timed)
                if len(steps) <= 2:
                    warmups, count = steps_within(order, allowed_s, step.timed.wall_s)
        except GeneratorExit:  # the script has come to its end
            if len(steps) > FEWEST_TIMED:
                self._keep(size, steps[min(warmups, len(steps) - FEWEST_TIMED) :], before_s)
            raise
        self._keep(size, steps[warmups:], before_s)
        return True

    def _keep(self, size: int, steps: Sequence[TimedStep], before_s: float | None) -> None:
        workers = (worker_steps(steps, self.observer.device, before_s),)
        self.points.append(SweepPoint(sweep=self.order.sweep, local_batch_size=size, workers=workers))

    def _count_memory(self, size: int) -> Course:
        """Log the memory that the second of two steps of ``size`` samples takes, with leftovers of the first."""
        factor = size / self.observer.batch_size
        count = self.observer.count()
        yield Wish(factor=factor, count=count)
        step = yield Wish(factor=factor, count=count)
        self.crew.record(MemoryCounted(sweep=self.order.sweep, memory=count.result(step.samples or size)))

    def _train(self) -> Course:
        """Train at the script's own batch size for ``training_s`` seconds, and record noise and gains now and then.

        The first few samples are taken once they are due, however late that is. Gains need finite gradients.
        """
        order, begun_s = self.order, self.crew.elapsed_s()
        gains: ResidualGains | None = None
        count = 0
        while True:
            due = count % SAMPLE_EVERY_STEPS == 0
            is_first = due and count < FEWEST_SAMPLES * SAMPLE_EVERY_STEPS
            if not is_first and self.crew.elapsed_s() - begun_s > order.training_s:
                return
            step = yield Wish(learns=True, wants_gradient=True)
            count += 1
            if step.gradient is not None and math.isfinite(step.gradient[0]):
                _, sample = step.gradient
                gains = gains or ResidualGains(
                    USUAL.gain_ratios, USUAL.gain_residual_ratios, sample.numel(), sample.device
                )
                if due:
                    self.crew.record(GainMeasured(gains=gains.measure(sample, self.crew)))
                gains.follow(sample)
            if due:
                yield from self._sample_noise(count)

    def _sample_noise(self, step: int) -> Course:
        """Record gradient noise by ``E|g_b|^2 = |G|^2 + V / b`` at two sizes (McCandlish et al. 2018, appendix A.1).

        Nothing is recorded if the batch size cannot be changed, or no finite gradient comes.
        """
        large = self.observer.batch_size
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
        self.crew.record(NoiseSample(step=step, samples_seen=step * large, **vars(moments)))

    def _mean_square(self, factor: float, size: int, count: int) -> Generator[Wish, Step, float | None]:
        """Return the mean squared norm of the gradients of ``count`` steps, or fewer, of ``size`` samples.

        None: a gradient is not finite, or no step of that size came.
        """
        squares: list[float] = []
        for _ in range(count + LATE_STEPS):
            step = yield Wish(factor=factor, wants_gradient=True)
            if step.gradient is not None and self._is_of(step, size):
                squares.append(step.gradient[0])
            if len(squares) == count:
                break
        return statistics.fmean(squares) if squares and all(map(math.isfinite, squares)) else None
