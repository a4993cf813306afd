"""The engine: the training step, and the control period of some steps after which all workers decide alike.

Two fronts drive it. A task's loop has `TaskEngine.train_step` do whole steps: the feed gives samples, and
`hetopt.trainer.steps` computes their gradient and sums it. A script drives it by what it does anyway: a session
(`hetopt.trainer.session`) is the script-driven front of the same engine. Its backward passes sum gradients by the same
exchange, and each step that the script has done goes through the same `Engine.after`, `gather`, `tell`, `steer` and
`share` as a task's.

Inside a period the only communication is the gradient's. At its end one row of numbers of each worker is gathered;
every rank reads the same rows, and so concludes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from hetopt.trainer.agreement import Gathering
from hetopt.trainer.balance import Balance
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.stream.source import Flow
from hetopt.trainer.generators import Generators
from hetopt.trainer.statistics import Period, PeriodLog, marks_of
from hetopt.trainer.steps.fused_step import DoesNotFit, half_of
from hetopt.trainer.steps.learning_rate import LearningRate
from hetopt.trainer.steps.local_batch import SampleFeed
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import LossScale, StepTrace, initial_loss_scale
from hetopt.trainer.steps.step_config import ExchangeConfig, StepConfig
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer


class Engine:
    """Steps that somebody computes, in control periods: what all workers learn of them, and conclude alike.

    A period goes `begin`, a step and `after` until it `is_over`, `gather`; then, of the rows of all workers, `tell`,
    `steer` and `share`. What a front cannot do it does not call, or is not given: no synchroniser, nothing to steer.

    Args:
        context: this worker.
        exchange: how gradients travel.
        balance: the shares.
        stopwatch: of the device.
        synchroniser: brings models together that workers train for themselves; None: gradients are exchanged.
        step: done before.

    Attributes:
        step: steps done.
        is_over: whether the period's last step is done.
        control_s: spent on control since the last ``step`` event.
        log: of the steps that no row tells about yet.
    """

    def __init__(
        self,
        *,
        context: WorkerContext,
        exchange: ExchangeConfig,
        balance: Balance,
        stopwatch: Stopwatch,
        synchroniser: Synchronizer | None = None,
        step: int = 0,
    ) -> None:
        self.context = context
        self.exchange = exchange
        self.balance = balance
        self.synchroniser = synchroniser
        self.step = step
        self.is_over = False
        self.control_s = 0.0
        self.log = PeriodLog(stopwatch)
        self._steps = self._told = self._done = 0

    def period_steps(self, steps: int) -> int:
        """Steps of the next period, where it would have so many."""
        return steps if self.exchange.steering is None else self.exchange.steering.period_steps(steps)

    def begin(self, steps: int, *, all_meet: bool = True) -> None:
        """A period begins.

        A message of a few numbers takes as long as a small gradient does: where it can, it travels under the last step,
        and tells about the steps before that one.

        Args:
            steps: at least one.
            all_meet: whether the workers wait for each other after the last of them anyway.
        """
        self._steps, self._done = steps, 0
        self._told = steps if all_meet else max(1, steps - 1)
        self.is_over = False
        self.log.resume()

    @property
    def gathers_now(self) -> bool:
        """Whether the row is to be sent before the next step, and travels under it."""
        return self._done == self._told < self._steps

    @property
    def look_at(self) -> Sequence[float]:
        """Ratios to tell the kept energy at in the next step; few steps look."""
        steering = self.exchange.steering
        return steering.look_at if steering is not None and self._done + 1 == self._told else ()

    def after(self, trace: StepTrace, samples: Sequence[int], *, counts: bool = True) -> None:
        """The optimizer has done a step, on every worker.

        Args:
            trace: of the step.
            samples: of the step, of every worker.
            counts: whether it is like others: else nobody is told of it.
        """
        self.step += 1
        if self.synchroniser is not None:
            trace = self.synchroniser.after(self.step, trace, samples)
        if counts:
            self.log.add(trace)
        else:
            self.log.resume()
        self._done += 1
        self.is_over = self._done == self._steps

    def gather(self, **told: Any) -> Gathering:
        """Send this worker's row on its way.

        Args:
            told: of this worker besides its steps (see `PeriodLog.close`).
        """
        row, begun_s = self.row(**told), self.context.clock()
        gathering = Gathering(row, self.context.world_size)
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return gathering

    def row(self, **told: Any) -> list[float]:
        """This worker's row, for whoever sends it with something else.

        Args:
            told: as of `gather`.
        """
        begun_s = self.context.clock()
        steering = self.exchange.steering
        traffic = self.log.traffic(
            way=self.exchange.way,
            dense_bytes=self.exchange.dense_bytes,
            looks=0 if steering is None else len(steering.looks),
        )
        row = [*self.log.close(**told).to_list(), *traffic.to_list()]
        self.control_s += self.context.clock() - begun_s
        self.log.resume()
        return row

    def read(self, gathering: Gathering) -> Period:
        """What the workers' rows tell of the period; waits for them."""
        return self.period_of(gathering.wait())

    def period_of(self, rows: Sequence[Sequence[float]]) -> Period:
        """The same of rows that are there, in rank order."""
        return Period.of(rows, local_batch_sizes=self.balance.shares)

    def tell(self, period: Period, *, epoch: float, samples_seen: int, **more: Any) -> None:
        """Write the ``step`` event."""
        step = self.step - self.log.unread
        self.context.events.write(
            "step",
            **period.event(step=step, epoch=epoch, samples_seen=samples_seen),
            control_s=round(self.control_s / period.steps, 7),
            **self.exchange.event(period.traffic),
            **({} if self.synchroniser is None else self.synchroniser.event(step)),
            **more,
        )
        self.control_s = 0.0

    def steer(self, period: Period, *, epoch: float, learning_rate: float, steps_left: int | None) -> None:
        """Decide how gradients travel from now on.

        Args:
            period: that was gathered last.
            epoch: passes over the data completed, with fractions.
            learning_rate: of the first parameter group.
            steps_left: until training ends by its own rules; None: that is not known.
        """
        steering = self.exchange.steering
        if steering is None:
            return
        change = steering.judge(
            period.traffic,
            step=self.step,
            epoch=epoch,
            learning_rate=learning_rate,
            steps_left=steps_left,
            loss=period.loss,
        )
        if change is not None:
            self.exchange.follow()
            self.context.events.write("exchange_changed", step=self.step, **change)

    def share(self, period: Period, epoch: int) -> bool:
        """Judge the shares if it is time to; whether they change from the next step on."""
        if not self.balance.is_due(period):
            return False
        change = self.balance.judge(period, epoch)
        self.log.judged(changed=change is not None)
        if change is None:
            return False
        self.context.events.write("shares_changed", step=self.step, **change)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """What a step changes before it is done: where the data stood, and the random generators, when it began."""

    cursor: dict[str, int]
    generators: Generators


class TaskEngine(Engine):
    """The engine as a task's loop drives it: it computes the steps, too.

    Args:
        context: this worker.
        form: the step.
        balance: the shares.
        feed: of the training data.
        optimizer: applies the summed gradients.
        learning_rate: of every step.
        pace: of this worker.
        stopwatch: of the device.
        synchroniser: see `Engine`.
        checkpoint_part: how far this worker's part of the checkpoint under way is.
        flow: what the worker's stream was like since this was last asked; None: there is none.

    Attributes:
        unfinished: where the step under way began; None: none is, or nobody would go on from there.
        loss_scale: of fp16.
    """

    def __init__(
        self,
        *,
        context: WorkerContext,
        form: StepConfig,
        balance: Balance,
        feed: SampleFeed,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        pace: Slowdown,
        stopwatch: Stopwatch,
        synchroniser: Synchronizer | None = None,
        checkpoint_part: Callable[[], float] = lambda: 0.0,
        flow: Callable[[], Flow] | None = None,
    ) -> None:
        super().__init__(
            context=context, exchange=form, balance=balance, stopwatch=stopwatch, synchroniser=synchroniser
        )
        self._form = form
        self._feed = feed
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._pace = pace
        self._checkpoint_part = checkpoint_part
        self._flow = flow
        self.unfinished: Unfinished | None = None
        self.loss_scale: LossScale | None = initial_loss_scale(context.spec.precision)

    def follow(self, form: StepConfig, synchroniser: Synchronizer | None, task_epoch: Callable[[float], float]) -> None:
        """From the next step on workers train for themselves.

        Args:
            form: the step.
            synchroniser: brings them together; None: there is only one.
            task_epoch: where the task's schedule stands after so many epochs.
        """
        self._form = self.exchange = form
        self.synchroniser = synchroniser
        self._learning_rate = replace(self._learning_rate, task_epoch=task_epoch)

    @property
    def epoch(self) -> float:
        """Passes over the data completed, with fractions."""
        return self._feed.cursor.position / self._feed.cursor.dataset_size

    def run_period(self, steps: int, *, learning_rate_scale: float, all_meet: bool, checkpoint_s: float) -> Gathering:
        """Do a period's steps; the rows of all workers, on their way.

        Args:
            steps: see `begin`.
            learning_rate_scale: of these steps.
            all_meet: see `begin`.
            checkpoint_s: when the last checkpoint was saved, on this worker's clock.
        """
        self.begin(steps, all_meet=all_meet)
        gathering: Gathering | None = None
        while not self.is_over:
            if self.gathers_now:
                gathering = self.gather_all(checkpoint_s)
            self.train_step(learning_rate_scale)
        return gathering or self.gather_all(checkpoint_s)

    def gather_all(self, checkpoint_s: float) -> Gathering:
        """Send this worker's row on its way, with all that a task's loop decides by.

        Args:
            checkpoint_s: as of `run_period`.
        """
        begun_s = self.context.clock()
        marks = marks_of(self._optimizer, models_are_alike=self.synchroniser is None)
        self.control_s += self.context.clock() - begun_s
        return self.gather(
            pace_use=self._pace.use(),
            memory_bound=self._feed.learned_bound or 0,
            stop_wished=self.context.stop_requested(),
            since_checkpoint_s=begun_s - checkpoint_s,
            checkpoint_part=self._checkpoint_part(),
            flow=None if self._flow is None else self._flow(),
            marks=marks,
        )

    def train_step(self, learning_rate_scale: float) -> None:
        """One optimizer step over this rank's part of the global batch.

        The gradient that the optimizer sees is ``sum_i g_i``: g_i the gradient of rank i's mean loss times its part
        ``b_i / B`` of the batch. Sent as a whole it is that of one machine with all B samples.
        """
        shares = self.balance.shares  # samples of every rank, ``sum b_i = B``
        self._learning_rate.apply(self._optimizer, self.epoch, learning_rate_scale)
        if self.context.spec.is_elastic:
            cursor = dict(self._feed.cursor.state())
            self.unfinished = Unfinished(cursor=cursor, generators=Generators.at(self.context.device))
        scale = self.loss_scale
        parts = self._feed.take(shares)  # micro-batches
        held = self._feed.sizes  # of every rank, with copies that were handed on
        trace: StepTrace | None = None
        while trace is None:
            try:  # forward, backward, weight, compress, reduce, decompress
                trace = self._form.step.run(parts, sum(held), None if scale is None else scale.value, self.look_at)
            except DoesNotFit as error:
                too_many = error.samples
            if trace is None:  # out here, where the error no longer holds on to what filled the memory
                parts = self._feed.learn_bound(half_of(too_many, self.context.rank))
        if trace.finite:
            self._optimizer.step()
        if scale is not None:
            self.loss_scale = scale.after(finite=trace.finite)
        self.unfinished = None
        if sum(held) != sum(shares):  # with copies from others; losses are told as of the local batches
            trace = replace(trace, loss_sum=trace.loss_sum * (sum(shares) / sum(held)))
        self.after(trace, held)
