"""The training step, and the control period: some steps, and the row of numbers that tells all workers about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from hetopt.trainer.agreement import Gathering
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.stream.source import Flow
from hetopt.trainer.divergence import LossRecord
from hetopt.trainer.likeness import marks_of
from hetopt.trainer.slow_comm_detector import IN_A_ROW, SlowCommDetector
from hetopt.trainer.statistics import PeriodLog
from hetopt.trainer.steps.learning_rate import LearningRate
from hetopt.trainer.steps.local_batch import SampleFeed
from hetopt.trainer.steps.local_gradient import DoesNotFit, half_of
from hetopt.trainer.steps.precision import LossScale, initial_loss_scale
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.step_config import StepConfig
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """What a step changes before it is done: where the data stood, and the random generators, when it began."""

    cursor: dict[str, int]
    cpu_generator: Tensor
    cuda_generator: Tensor | None


class Engine:
    """Steps, and what changes with every one of them.

    Args:
        context: this worker.
        form: the step.
        feed: of the training data.
        optimizer: applies the summed gradients.
        learning_rate: of every step.
        pace: of this worker.
        stopwatch: of the device.
        synchroniser: brings models together that workers train for themselves; None: gradients are exchanged.
        checkpoint_part: how far this worker's part of the checkpoint under way is.
        flow: what the worker's stream was like since this was last asked; None: there is none.

    Attributes:
        step: steps done.
        unfinished: where the step under way began; None: none is, or nobody would go on from there.
        loss_scale: of fp16.
        control_s: spent on control since the loop last took note of it.
        log: of the steps that no row tells about yet.
    """

    def __init__(
        self,
        *,
        context: WorkerContext,
        form: StepConfig,
        feed: SampleFeed,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        pace: Slowdown,
        stopwatch: Stopwatch,
        synchroniser: Synchronizer | None = None,
        checkpoint_part: Callable[[], float] = lambda: 0.0,
        flow: Callable[[], Flow] | None = None,
    ) -> None:
        self._context = context
        self._form = form
        self._feed = feed
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._pace = pace
        self._stopwatch = stopwatch
        self._synchroniser = synchroniser
        self._checkpoint_part = checkpoint_part
        self._flow = flow
        self._alarm = SlowCommDetector(context.world_size)
        self._probe_s = 0.0
        self.step = 0
        self.unfinished: Unfinished | None = None
        self.loss_scale: LossScale | None = initial_loss_scale(context.spec.precision)
        self.losses = LossRecord()
        self.control_s = 0.0
        self.log = PeriodLog(stopwatch)

    def follow(self, form: StepConfig, synchroniser: Synchronizer | None, task_epoch: Callable[[float], float]) -> None:
        """From the next step on workers train for themselves.

        Args:
            form: the step.
            synchroniser: brings them together; None: there is only one.
            task_epoch: where the task's schedule stands after so many epochs.
        """
        self._form, self._synchroniser = form, synchroniser
        self._learning_rate = replace(self._learning_rate, task_epoch=task_epoch)
        self._alarm = SlowCommDetector(self._context.world_size)

    @property
    def epoch(self) -> float:
        """Passes over the data completed, with fractions."""
        return self._feed.position / self._feed.dataset_size

    def run_period(
        self,
        steps: int,
        *,
        shares: Sequence[int],
        learning_rate_scale: float,
        all_meet: bool,
        checkpoint_s: float,
    ) -> Gathering:
        """Do a period's steps, fewer where exchanges have become slow; the rows of all workers, on their way.

        A message of a few numbers takes as long as a small gradient does: it travels under the last step, and tells
        about the steps before that one.

        Args:
            steps: at least one.
            shares: of all workers.
            learning_rate_scale: of these steps.
            all_meet: whether the workers wait for each other after the last of them anyway.
            checkpoint_s: when the last checkpoint was saved, on this worker's clock.
        """
        hidden = steps > 1 and not all_meet
        told = steps - hidden
        steering = self._form.steering
        self._alarm.set(None if steering is None else steering.alarm_s)
        self.log.resume()
        if self._form.probe is not None and steering is not None and steering.probe_bytes:
            self._probe_s = self._form.probe.sum_s(steering.probe_bytes)

        gathering: Gathering | None = None
        for number in range(1, steps + 1):
            if number > told:
                gathering = self.gather(checkpoint_s)
                self.log.resume()
            look_at = steering.look_at if steering is not None and number == told else ()
            trace = self.train_step(shares, learning_rate_scale, look_at)
            if number < steps and self._alarm.rings(self._exchange_s(trace)):
                gathering = self.gather(checkpoint_s, newest=IN_A_ROW)
                break
        if gathering is None:
            gathering = self.gather(checkpoint_s)
        self._alarm.rest()
        return gathering

    def gather(self, checkpoint_s: float, *, newest: int | None = None) -> Gathering:
        """Send this worker's row on its way.

        Args:
            checkpoint_s: as of `run_period`.
            newest: of the exchanges, only so many count; None: all.
        """
        context, begun_s = self._context, self._context.clock()
        steering = self._form.steering
        traffic = self.log.traffic(
            way=self._form.way,
            dense_bytes=self._form.dense_bytes,
            looks=0 if steering is None else len(steering.looks),
            newest=newest,
            probe_s=self._probe_s,
        )
        self._probe_s = 0.0
        row = self.log.close(
            pace_use=self._pace.use(),
            memory_bound=self._feed.learned_bound or 0,
            stop_wished=context.stop_requested(),
            since_checkpoint_s=begun_s - checkpoint_s,
            checkpoint_part=self._checkpoint_part(),
            flow=None if self._flow is None else self._flow(),
            marks=marks_of(self._optimizer, models_are_alike=self._synchroniser is None),
        )
        gathering = Gathering([*row.to_list(), *traffic.to_list()], context.world_size)
        self.control_s += context.clock() - begun_s
        return gathering

    def train_step(
        self, local_batch_sizes: Sequence[int], learning_rate_scale: float, look_at: Sequence[float] = ()
    ) -> StepTrace:
        """One optimizer step over this rank's part of the global batch.

        The gradient that the optimizer sees is ``sum_i g_i``: g_i the gradient of rank i's mean loss times its part
        ``b_i / B`` of the batch. Sent as a whole it is that of one machine with all B samples.

        Args:
            local_batch_sizes: samples of every rank, ``sum b_i = B``.
            learning_rate_scale: over the task's own rate.
            look_at: ratios to tell the kept energy at, where the whole gradient is exchanged at once.
        """
        self._learning_rate.apply(self._optimizer, self.epoch, learning_rate_scale)
        self.unfinished = self._as_it_is() if self._context.spec.is_elastic else None
        scale = self.loss_scale
        parts = self._feed.take(local_batch_sizes)  # micro-batches
        held = self._feed.sizes  # of every rank, with copies that were handed on
        trace: StepTrace | None = None
        while trace is None:
            try:  # forward, backward, weight, compress, reduce, decompress
                trace = self._form.step.run(parts, sum(held), None if scale is None else scale.value, look_at)
            except DoesNotFit as error:
                too_many = error.samples
            if trace is None:  # out here, where the error no longer holds on to what filled the memory
                parts = self._feed.learn_bound(half_of(too_many, self._context.rank))
        if trace.finite:
            self._optimizer.step()
        if scale is not None:
            self.loss_scale = scale.after(finite=trace.finite)
        self.step += 1
        self.losses.add(self.step, trace.loss_sum, parts)
        self.unfinished = None
        if self._synchroniser is not None:
            trace = self._synchroniser.after(self.step, trace, held)
        if sum(held) != sum(local_batch_sizes):  # with copies from others; losses are told as of the local batches
            trace = replace(trace, loss_sum=trace.loss_sum * (sum(local_batch_sizes) / sum(held)))
        self.log.add(trace)
        return trace

    def _as_it_is(self) -> Unfinished:
        device = self._context.device
        return Unfinished(
            cursor=dict(self._feed.cursor.state()),
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def _exchange_s(self, trace: StepTrace) -> float | None:
        """What an exchange took here, where anybody listens; None: another way than usual, or none at all."""
        if self._form.steering is None or not trace.way:
            return None
        if trace.exchange is not None and not trace.under_backward:
            return trace.exchange.sync_s
        return self._stopwatch.seconds(trace.backward_end, trace.reduce_end)
