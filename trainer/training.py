"""All that a worker trains with, made for one group of workers; and the state in which another group takes it over.

The engine as a task's loop drives it: it computes the steps, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

import torch
from torch import nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.assembly import (
    make_feed,
    make_step,
    make_worker_pace,
)
from hetopt.trainer.checkpoints.folder import RankState, SharedState, run_digest
from hetopt.trainer.checkpoints.saver import CheckpointSaver
from hetopt.trainer.comm.compressor import own_momentum
from hetopt.trainer.context import Generators, WorkerContext
from hetopt.trainer.data.injection import samples_of_step
from hetopt.trainer.data.replay import Replay, StreamCursor
from hetopt.trainer.engine import Balance, Engine, Milestones
from hetopt.trainer.policies.choose import choose_policy, stream_learning_rate_scale
from hetopt.trainer.statistics import parameters_of, tensors_mark
from hetopt.trainer.steps.fused_step import DoesNotFit, half_of
from hetopt.trainer.steps.step import Autocast, LossModule, LossScale, StepTrace, initial_loss_scale
from hetopt.trainer.steps.stopwatch import make_stopwatch
from hetopt.trainer.sync.synchroniser import make_synchroniser
from hetopt.trainer.task import LearningRate, Task, TaskData, average_buffers, least_share, make_optimizer


class Training(Engine):
    """One worker's part of a training run; everything but generators and what is held back is alike on all ranks.

    Attributes:
        milestones: when things are due; they change when the samples of a step do.
        replay: the stream that samples come out of; None: they are there.
        feed: of training samples.
        pace: how fast this worker may be.
        optimizer: applies gradients.
        form: how a step is done.
        unfinished: what a step changes before it is done, where the data stood and the random generators when it
            began; None: none is under way, or nobody would go on from there.
        loss_scale: of fp16.
        memory_bounds: samples that fit, by rank; 0: all.
        earlier_s: trained by earlier attempts, seconds.
        begun_s: when this attempt began to train, on the worker's clock.
        target_reached: at the last evaluation.
    """

    def __init__(
        self, context: WorkerContext, task: Task, data: TaskData, model: nn.Module, saver: CheckpointSaver
    ) -> None:
        spec = context.spec
        self.context = context
        self.task = task
        self.data = data
        self.model = model
        self.milestones = Milestones(
            stop=spec.stop,
            dataset_size=len(data.train),
            global_batch_size=samples_of_step(spec),
            evaluate_every_epochs=spec.evaluate_every_epochs,
            control_period_steps=spec.control_period_steps,
        )
        # A share has no upper bound: what exceeds a worker's memory is computed in micro-batches. BatchNorm cannot
        # normalise a single sample, so models that have it keep two on every worker where the global batch allows.
        least = least_share(model, spec.global_batch_size, len(spec.workers))
        balance = Balance(spec, choose_policy(spec, minimum=least), minimum=least)
        self.feed = make_feed(context, data.train)
        self.replay: Replay | None = self.feed.cursor.replay if isinstance(self.feed.cursor, StreamCursor) else None
        self.pace = make_worker_pace(context)
        stopwatch = make_stopwatch(context.device)
        self.optimizer: Optimizer = make_optimizer(task, model)
        exchange, self.computes = make_step(
            context,
            task,
            LossModule(model, task.loss, Autocast(device_type=context.device.type, precision=spec.precision)),
            own_momentum(spec.compression, self.optimizer),
            feed=self.feed,
            stopwatch=stopwatch,
            pace=self.pace,
            samples=balance.shares[context.rank],
        )
        super().__init__(
            context=context,
            exchange=exchange,
            balance=balance,
            stopwatch=stopwatch,
            synchroniser=make_synchroniser(
                spec,
                model,
                self.optimizer,
                device=context.device,
                clock=context.clock,
                stopwatch=stopwatch,
                dataset_size=len(data.train),
            ),
        )
        self.unfinished: tuple[dict[str, int], Generators] | None = None
        self.loss_scale: LossScale | None = initial_loss_scale(spec.precision)
        self._learning_rate = LearningRate.of(task, self.optimizer, spec.sync.stretch)
        self._saver = saver
        self.memory_bounds = (0,) * context.world_size
        self.earlier_s = 0.0  # trained by earlier attempts
        self.begun_s = context.clock()
        self.target_reached = False
        # Workers may draw (dropout) from here on, each its own sequence.
        torch.manual_seed(spec.seed + 7919 * (context.rank + 1))

    def take_over(self, shared: SharedState, own: RankState, source: str) -> None:
        """Go on from a state.

        Raises:
            BadInput: it does not fit the task, its data or the exchange.
        """
        context = self.context
        if shared.cursor["dataset_size"] != len(self.data.train):
            raise BadInput(
                f"The run began with {shared.cursor['dataset_size']} training samples; "
                f"now there are {len(self.data.train)}.",
                hint="give the run the data that it started with",
            )
        try:
            self.model.load_state_dict(dict(shared.model))
            self.optimizer.load_state_dict(dict(shared.optimizer))
        except (RuntimeError, ValueError, KeyError):
            raise BadInput(
                f"{source[0].upper()}{source[1:]} does not fit the task's model or optimizer.",
                hint="give the run the task that it started with, or start over in another folder",
            ) from None
        own.restore_generators(context.device)
        self.computes.residual.load_state(own.memory)
        self.feed.cursor = self.feed.cursor.at(shared.cursor)
        if self.synchroniser is not None:
            self.synchroniser.resume(own.local or {})
        self.loss_scale = None if shared.loss_scale is None else LossScale(**shared.loss_scale)
        self.exchange.resume(shared.steering)
        self.balance.resume(policy=shared.policy, shares=shared.shares, state=shared.controller)
        if len(shared.memory_bounds) == context.world_size:
            self.memory_bounds = shared.memory_bounds
            self.feed.recall_bound(shared.memory_bounds[context.rank])
        self.step = shared.step
        self.earlier_s = shared.training_s
        self.target_reached = shared.target_reached

    def shared_state(self) -> SharedState:
        """What all workers share now; its tensors are those that training changes."""
        return SharedState(
            digest=run_digest(self.context.spec),
            step=self.step,
            training_s=self.training_s,
            shares=self.balance.shares,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            cursor=self.feed.cursor.state(),
            policy=self.context.spec.batch_policy,
            controller=self.balance.state(),
            steering=None if self.exchange.steering is None else self.exchange.steering.state(),
            loss_scale=None if self.loss_scale is None else asdict(self.loss_scale),
            memory_bounds=self.memory_bounds,
            target_reached=self.target_reached,
        )

    def own_state(self) -> RankState:
        """What this worker has beside that."""
        return RankState.now(
            self.computes.residual.state(),
            self.context.device,
            local=None if self.synchroniser is None else self.synchroniser.state(),
        )

    def one_model(self) -> AbstractContextManager[None]:
        """Inside, all workers' models are the same, running statistics included; where they train for themselves, the
        average of all."""
        if self.synchroniser is not None:
            return self.synchroniser.averaged()
        shares = self.balance.shares
        weight = shares[self.context.rank] / sum(shares)
        average_buffers(self.model, weight, self.context.world_size)
        return nullcontext()

    def ended(self) -> str | None:
        """Why the run is over; None: it is not."""
        if self.context.spec.stop.target and self.target_reached:
            return "target"
        return self.milestones.ended_by(self.step, self.feed.cursor.position)

    @property
    def epoch(self) -> float:
        """Passes over the data completed, with fractions."""
        return self.feed.cursor.position / self.feed.cursor.dataset_size

    @property
    def learning_rate_scale(self) -> float:
        """Of the next step, over the task's own rate."""
        spec = self.context.spec
        if spec.stream is None:
            return spec.learning_rate_scale
        batch_size = sum(self.balance.shares)
        return spec.learning_rate_scale * stream_learning_rate_scale(spec.stream, batch_size, spec.global_batch_size)

    @property
    def training_s(self) -> float:
        """Seconds of training by all attempts, evaluations and checkpoints included, start-up not."""
        return self.earlier_s + self.context.clock() - self.begun_s

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
        mark = 0 if self.synchroniser is not None else tensors_mark(parameters_of(self.optimizer))
        self.control_s += self.context.clock() - begun_s
        return self.gather(
            pace_use=self.pace.use(),
            memory_bound=self.feed.learned_bound or 0,
            stop_wished=self.context.stop_requested(),
            since_checkpoint_s=begun_s - checkpoint_s,
            checkpoint_part=self._saver.progress,
            flow=None if self.replay is None else self.replay.flow(),
            model_mark=mark,
        )

    def train_step(self, learning_rate_scale: float) -> None:
        """One optimizer step over this rank's part of the global batch.

        The gradient that the optimizer sees is ``sum_i g_i``: g_i the gradient of rank i's mean loss times its part
        ``b_i / B`` of the batch. Sent as a whole it is that of one machine with all B samples.
        """
        shares = self.balance.shares  # samples of every rank, ``sum b_i = B``
        self._learning_rate.apply(self.optimizer, self.epoch, learning_rate_scale)
        if self.context.spec.is_elastic:
            self.unfinished = dict(self.feed.cursor.state()), Generators.at(self.context.device)
        scale = self.loss_scale
        parts = self.feed.take(shares)  # micro-batches
        held = self.feed.sizes  # of every rank, with copies that were handed on
        trace: StepTrace | None = None
        while trace is None:
            try:  # forward, backward, weight, compress, reduce, decompress
                trace = self.computes.run(parts, sum(held), None if scale is None else scale.value, self.look_at)
            except DoesNotFit as error:
                too_many = error.samples
            if trace is None:  # out here, where the error no longer holds on to what filled the memory
                parts = self.feed.learn_bound(half_of(too_many, self.context.rank))
        if trace.finite:
            self.optimizer.step()
        if scale is not None:
            self.loss_scale = scale.after(finite=trace.finite)
        self.unfinished = None
        if held != shares:  # losses are told as of the local batches
            trace = replace(trace, loss_sum=trace.loss_sum * (sum(shares) / sum(held)))
        self.after(trace, held)

    def close(self) -> None:
        """Let go of threads and processes."""
        self.feed.close()
