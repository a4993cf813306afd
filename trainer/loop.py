"""Trains: steps in control periods, and between periods everything that all workers decide together.

Inside a period the only communication is the gradient's. At its end one control vector is gathered; every rank reads
the same numbers and so decides the same: new shares, an evaluation, a checkpoint, the end. The vector travels while the
last step of the period is computed: it tells about the steps before that one, and the next vector about the rest.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts
from hetopt.trainer.announcement import announce
from hetopt.trainer.assembly import (
    build_model,
    half_of,
    make_adaptive_scale,
    make_controller,
    make_feed,
    make_step,
    make_worker_pace,
)
from hetopt.trainer.balance import Balance
from hetopt.trainer.checkpoint import (
    CheckpointFolder,
    RankState,
    SharedState,
    parameters_sha256,
    run_digest,
    save_model,
)
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.evaluation import average_buffers, evaluate
from hetopt.trainer.learning_rate import LearningRate
from hetopt.trainer.local_gradient import DoesNotFit
from hetopt.trainer.milestones import Milestones
from hetopt.trainer.precision import LossScale, initial_loss_scale
from hetopt.trainer.run_folder import MODEL_FILE
from hetopt.trainer.statistics import ControlRow, Period, PeriodLog
from hetopt.trainer.step import Step, StepTrace
from hetopt.trainer.stopwatch import make_stopwatch
from hetopt.trainer.task import Task, TaskData
from hetopt.trainer.tasks.load import load_task


def train(context: WorkerContext) -> None:
    """Train the task of the spec until its stop rule, its target or somebody's wish ends it; resumes a checkpoint.

    Raises:
        BadInput: the task, its data or the checkpoint cannot be used.
        RunFailed: the loss or a metric is no longer finite, the replicas differ, or the disk refuses.
    """
    torch.manual_seed(context.spec.seed)
    task = load_task(context.spec.task)
    data = task.data(Path(context.spec.data_dir) if context.spec.data_dir is not None else None)
    model = build_model(task, context.device, context.spec.seed)
    with closing(_Run(context, task, data, model)) as run:
        run.resume()
        run.go()


class _Run:
    """One worker's state of the training run; everything here except generators and residual is alike on all ranks."""

    def __init__(self, context: WorkerContext, task: Task, data: TaskData, model: nn.Module) -> None:
        spec = context.spec
        self._context = context
        self._task = task
        self._data = data
        self._model = model
        self._milestones = Milestones(
            stop=spec.stop,
            dataset_size=len(data.train),
            global_batch_size=spec.global_batch_size,
            evaluate_every_epochs=spec.evaluate_every_epochs,
            control_period_steps=spec.control_period_steps,
        )
        self._balance = Balance(spec, make_controller(spec, model), self._milestones)
        self._feed = make_feed(context, data.train)
        self._pace = make_worker_pace(context)
        stopwatch = make_stopwatch(context.device)
        self._step_form: Step = make_step(
            context,
            task,
            model,
            feed=self._feed,
            stopwatch=stopwatch,
            pace=self._pace,
            samples=self._balance.shares[context.rank],
        )
        self._log = PeriodLog(stopwatch)
        self._optimizer: Optimizer = task.optimizer(model)
        self._learning_rate = LearningRate.of(task, self._optimizer)
        self._adaptive_scale = make_adaptive_scale(spec, task)
        self._loss_scale: LossScale | None = initial_loss_scale(spec.precision)
        self._memory_bounds = (0,) * context.world_size
        self._checkpoints = CheckpointFolder(context.run_dir)
        self._step = 0
        self._earlier_s = 0.0  # trained by earlier attempts
        self._control_s = 0.0  # spent on control since the last event
        self._begun_s = context.clock()
        self._checkpoint_s = context.clock()
        self._checkpoint_step: int | None = None
        self._evaluated_step: int | None = None
        self._metrics: dict[str, float] = {}
        self._target_reached = False
        # Workers may draw (dropout) from here on, each its own sequence.
        torch.manual_seed(spec.seed + 7919 * (context.rank + 1))

    def resume(self) -> None:
        """Continue from the newest checkpoint, if the leader sees one."""
        context = self._context
        latest = self._checkpoints.latest_step()
        step = int(gather_numbers([-1 if latest is None else latest], context.world_size)[0][0])
        if step < 0:
            return
        shared = self._checkpoints.load_shared(step, run_digest(context.spec))
        if shared.cursor["dataset_size"] != len(self._data.train):
            raise BadInput(
                f"The checkpoint was made with {shared.cursor['dataset_size']} training samples; "
                f"now there are {len(self._data.train)}.",
                hint="give the run the data that it started with",
            )
        try:
            self._model.load_state_dict(dict(shared.model))
            self._optimizer.load_state_dict(dict(shared.optimizer))
        except (RuntimeError, ValueError, KeyError):
            raise BadInput(
                f"The checkpoint of step {step} does not fit the task's model or optimizer.",
                hint="give the run the task that it started with, or start over in another folder",
            ) from None
        own = self._checkpoints.load_own(
            step, context.rank, workers_then=len(shared.shares), workers_now=context.world_size
        )
        own.restore_generators(context.device)
        self._step_form.memory.load_state(own.memory)
        self._feed.continue_from(SampleCursor.from_state(shared.cursor))
        self._loss_scale = LossScale.from_dict(shared.loss_scale) if shared.loss_scale is not None else None
        if self._adaptive_scale is not None and shared.learning_rate is not None:
            self._adaptive_scale = self._adaptive_scale.resumed(shared.learning_rate)
        self._balance.resume(policy=shared.policy, shares=shared.shares, state=shared.controller)
        if len(shared.memory_bounds) == context.world_size:
            self._memory_bounds = shared.memory_bounds
            self._feed.recall_bound(shared.memory_bounds[context.rank])
        self._step = self._checkpoint_step = step
        self._earlier_s = shared.training_s
        self._target_reached = shared.target_reached

    def go(self) -> None:
        """Train to the end and leave the model, a checkpoint and the last event behind."""
        context, clock = self._context, self._context.clock
        announce(context, self._model, shares=self._balance.shares, step=self._step)
        self._feed.begin(self._balance.shares)
        context.events.write("training_started", step=self._step)
        self._begun_s = self._checkpoint_s = clock()
        step_time_s: float | None = None
        reason = self._ended()
        while reason is None:
            before = self._feed.position
            period = self._period(self._milestones.period_steps(self._step, before, step_time_s))
            step_time_s = period.step_time_s
            if self._milestones.evaluation_due(before, self._feed.position):
                self._evaluate()
            reason = self._ended() or ("stopped" if period.stop_wished else None)
            if reason is None and period.rows[0].since_checkpoint_s >= context.spec.checkpoint_every_s:
                self._save_checkpoint()
        if self._log.unread:
            self._tell(self._gather().wait())
        self._finish(reason)

    def close(self) -> None:
        """Let go of threads and processes."""
        self._feed.close()

    def _period(self, steps: int) -> Period:
        """Do some steps over the present shares, read what they were like, and decide."""
        context, clock = self._context, self._context.clock
        # A message of a few numbers takes as long as a small gradient does: it travels under the last step.
        hidden = context.world_size > 1 and steps > 1 and not self._all_meet_after(steps)
        self._log.resume()
        for _ in range(steps - 1):
            self._one_step()
        if hidden:
            gathering = self._gather()
            self._log.resume()
            self._one_step()
        else:
            self._one_step()
            gathering = self._gather()
        begun_s = clock()
        period = self._tell(gathering.wait())
        self._decide(period)
        self._control_s += clock() - begun_s
        return period

    def _all_meet_after(self, steps: int) -> bool:
        return self._milestones.all_meet(self._step, self._feed.position, steps)

    def _one_step(self) -> None:
        self._learning_rate.apply(self._optimizer, self._epoch, self._learning_rate_scale)
        scale = self._loss_scale
        parts = self._feed.take(self._balance.shares)
        trace: StepTrace | None = None
        while trace is None:
            try:
                trace = self._step_form.run(
                    parts, self._context.spec.global_batch_size, None if scale is None else scale.value
                )
            except DoesNotFit as error:
                too_many = error.samples
            if trace is None:  # out here, where the error no longer holds on to what filled the memory
                parts = self._feed.learn_bound(half_of(too_many, self._context.rank))
        if trace.finite:
            self._optimizer.step()
        if scale is not None:
            self._loss_scale = scale.after(finite=trace.finite)
        self._log.add(trace)
        self._step += 1

    def _gather(self) -> Gathering:
        """Send this worker's control row on its way."""
        context, begun_s = self._context, self._context.clock()
        row = self._log.close(
            pace_use=self._pace.use(),
            memory_bound=self._feed.learned_bound or 0,
            stop_wished=context.stop_requested(),
            since_checkpoint_s=begun_s - self._checkpoint_s,
        )
        gathering = Gathering(row.to_list(), context.world_size)
        self._control_s += context.clock() - begun_s
        return gathering

    def _tell(self, rows: list[list[float]]) -> Period:
        """Make the rows a period and write what it was like.

        Raises:
            RunFailed: the loss is no longer finite.
        """
        events, unread = self._context.events, self._log.unread
        period = Period(
            rows=tuple(ControlRow.from_list(numbers) for numbers in rows), local_batch_sizes=self._balance.shares
        )
        step = self._step - unread
        if period.diverged:
            raise RunFailed(
                f"the loss is {period.loss} at step {step}.",
                hint="lower the learning rate, or check the data for values that are not finite",
            )
        seen = self._feed.position - unread * self._context.spec.global_batch_size
        events.write(
            "step",
            **period.event(step=step, epoch=seen / self._feed.dataset_size, samples_seen=seen),
            control_s=round(self._control_s / period.steps, 7),
            learning_rate_scale=self._learning_rate_scale,
        )
        self._control_s = 0.0
        for rank, (bound, known) in enumerate(zip(period.memory_bounds, self._memory_bounds, strict=True)):
            if bound not in (0, known):
                events.write("memory_bound_learned", step=step, rank=rank, samples=bound)
        self._memory_bounds = period.memory_bounds
        return period

    def _decide(self, period: Period) -> None:
        """What every rank concludes from the same numbers: the shares and the learning rate from now on."""
        if self._adaptive_scale is not None and (moments := period.noise()) is not None:
            self._adaptive_scale = self._adaptive_scale.after(moments)
        if not self._balance.is_due(period):
            return
        change = self._balance.judge(period, self._feed.cursor.epoch)
        self._log.judged(changed=change is not None)
        if change is not None:
            self._context.events.write("shares_changed", step=self._step, **change)

    def _evaluate(self) -> None:
        context = self._context
        begun_s = context.clock()
        self._agree_on_buffers()
        self._metrics = evaluate(
            self._task,
            self._model,
            self._data.evaluation,
            shares=self._balance.shares,
            rank=context.rank,
            device=context.device,
        )
        self._evaluated_step = self._step
        self._target_reached = self._task.target.reached(self._metrics)
        context.events.write(
            "evaluated",
            step=self._step,
            epoch=round(self._epoch, 4),
            metrics=self._metrics,
            evaluation_s=round(context.clock() - begun_s, 6),
        )

    def _save_checkpoint(self) -> None:
        context = self._context
        if self._checkpoint_step == self._step:
            return
        begun_s = context.clock()
        self._agree_on_buffers()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self._model.parameters()):
            # The last step's gradient did this; its own loss was still finite. Alike on all ranks.
            raise RunFailed(f"the model is no longer finite at step {self._step}.", hint="lower the learning rate")
        shared = SharedState(
            digest=run_digest(context.spec),
            step=self._step,
            training_s=self._training_s,
            shares=self._balance.shares,
            model=self._model.state_dict(),
            optimizer=self._optimizer.state_dict(),
            cursor=self._feed.cursor.state(),
            policy=context.spec.batch_policy,
            controller=self._balance.state(),
            loss_scale=None if self._loss_scale is None else self._loss_scale.to_dict(),
            learning_rate=None if self._adaptive_scale is None else self._adaptive_scale.state(),
            memory_bounds=self._memory_bounds,
            target_reached=self._target_reached,
        )
        self._checkpoints.save(
            shared=shared if context.is_leader else None,
            rank=context.rank,
            own=RankState.now(self._step_form.memory.state(), context.device),
            step=self._step,
            barrier=lambda: _meet(context.world_size),
        )
        self._checkpoint_step = self._step
        self._checkpoint_s = context.clock()
        context.events.write(
            "checkpoint_saved",
            step=self._step,
            path=str(self._checkpoints.path(self._step).relative_to(context.run_dir)),
            save_s=round(self._checkpoint_s - begun_s, 6),
        )

    def _finish(self, reason: str) -> None:
        context = self._context
        # Whoever asked the run to stop is waiting for it.
        if reason != "stopped" and self._evaluated_step != self._step:
            self._evaluate()
        training_s = self._training_s
        self._save_checkpoint()
        digest = parameters_sha256(self._model)
        if len(set(gather_texts(digest, context.world_size))) > 1:
            raise RunFailed(
                "the workers' models differ at the end of the run.",
                hint="a task whose model uses other parameters on other workers can do this; please report it if not",
            )
        if context.is_leader:
            save_model(context.run_dir / MODEL_FILE, self._model)
        context.events.write(
            "training_finished",
            step=self._step,
            epoch=round(self._epoch, 4),
            reason=reason,
            training_s=round(training_s, 6),
            metrics=self._metrics,
            parameters_sha256=digest,
        )

    def _ended(self) -> str | None:
        if self._context.spec.stop.target and self._target_reached:
            return "target"
        return self._milestones.ended_by(self._step, self._feed.position)

    def _agree_on_buffers(self) -> None:
        weight = self._balance.shares[self._context.rank] / self._context.spec.global_batch_size
        average_buffers(self._model, weight, self._context.world_size)

    @property
    def _epoch(self) -> float:
        return self._feed.position / self._feed.dataset_size

    @property
    def _learning_rate_scale(self) -> float:
        adaptive = self._adaptive_scale
        return self._context.spec.learning_rate_scale if adaptive is None else adaptive.value

    @property
    def _training_s(self) -> float:
        """Seconds of training by all attempts, evaluations and checkpoints included, start-up not."""
        return self._earlier_s + self._context.clock() - self._begun_s


def _meet(world_size: int) -> None:
    gather_numbers([0.0], world_size)
