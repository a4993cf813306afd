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
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.announcement import announce, tell_network
from hetopt.trainer.assembly import (
    build_model,
    make_adaptive_scale,
    make_controller,
    make_feed,
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
from hetopt.trainer.milestones import Milestones
from hetopt.trainer.period_runner import PeriodRunner
from hetopt.trainer.precision import Autocast, LossScale
from hetopt.trainer.run_folder import MODEL_FILE
from hetopt.trainer.statistics import Period
from hetopt.trainer.step import LossModule
from hetopt.trainer.step_assembly import StepMaker, own_momentum
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
        self._optimizer: Optimizer = task.optimizer(model)
        self._form = StepMaker(
            context=context,
            task=task,
            module=LossModule(model, task.loss, Autocast(device_type=context.device.type, precision=spec.precision)),
            compression=own_momentum(spec, self._optimizer),
            feed=self._feed,
            stopwatch=stopwatch,
            pace=self._pace,
        ).make(self._balance.shares[context.rank])
        self._steering = self._form.steering
        self._runner = PeriodRunner(
            context=context,
            form=self._form,
            feed=self._feed,
            optimizer=self._optimizer,
            learning_rate=LearningRate.of(task, self._optimizer),
            pace=self._pace,
            stopwatch=stopwatch,
        )
        self._adaptive_scale = make_adaptive_scale(spec, task)
        self._memory_bounds = (0,) * context.world_size
        self._checkpoints = CheckpointFolder(context.run_dir)
        self._earlier_s = 0.0  # trained by earlier attempts
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
        self._form.step.memory.load_state(own.memory)
        self._feed.continue_from(SampleCursor.from_state(shared.cursor))
        self._runner.loss_scale = LossScale.from_dict(shared.loss_scale) if shared.loss_scale is not None else None
        if self._adaptive_scale is not None and shared.learning_rate is not None:
            self._adaptive_scale = self._adaptive_scale.resumed(shared.learning_rate)
        self._form.resume(shared.steering)
        self._balance.resume(policy=shared.policy, shares=shared.shares, state=shared.controller)
        if len(shared.memory_bounds) == context.world_size:
            self._memory_bounds = shared.memory_bounds
            self._feed.recall_bound(shared.memory_bounds[context.rank])
        self._runner.step = self._checkpoint_step = step
        self._earlier_s = shared.training_s
        self._target_reached = shared.target_reached

    def go(self) -> None:
        """Train to the end and leave the model, a checkpoint and the last event behind."""
        context, clock = self._context, self._context.clock
        announce(context, self._model, shares=self._balance.shares, step=self._runner.step)
        if self._form.calibration is not None:
            tell_network(
                context.events,
                self._form.calibration.network,
                self._form.calibration.timings,
                step=self._runner.step,
                measured_s=round(self._form.measured_s, 3),
                by_hosts=self._form.by_hosts,
            )
        self._feed.begin(self._balance.shares)
        context.events.write("training_started", step=self._runner.step)
        self._begun_s = self._checkpoint_s = clock()
        step_time_s: float | None = None
        reason = self._ended()
        while reason is None:
            before = self._feed.position
            period = self._period(self._milestones.period_steps(self._runner.step, before, step_time_s))
            step_time_s = period.step_time_s
            if self._milestones.evaluation_due(before, self._feed.position):
                self._evaluate()
            reason = self._ended() or ("stopped" if period.stop_wished else None)
            if reason is None and period.rows[0].since_checkpoint_s >= context.spec.checkpoint_every_s:
                self._save_checkpoint()
        if self._runner.log.unread:
            self._tell(self._runner.gather(self._checkpoint_s).wait())
        self._finish(reason)

    def close(self) -> None:
        """Let go of threads and processes."""
        self._feed.close()

    def _period(self, steps: int) -> Period:
        """Do some steps over the present shares, read what they were like, and decide."""
        context, clock = self._context, self._context.clock
        if self._steering is not None:
            steps = self._steering.period_steps(steps)
        gathering = self._runner.run(
            steps,
            shares=self._balance.shares,
            learning_rate_scale=self._learning_rate_scale,
            all_meet=context.world_size == 1 or self._all_meet_after(steps),
            checkpoint_s=self._checkpoint_s,
        )
        begun_s = clock()
        period = self._tell(gathering.wait())
        self._decide(period)
        self._runner.control_s += clock() - begun_s
        return period

    def _all_meet_after(self, steps: int) -> bool:
        return self._milestones.all_meet(self._runner.step, self._feed.position, steps)

    def _tell(self, rows: list[list[float]]) -> Period:
        """Make the rows a period and write what it was like.

        Raises:
            RunFailed: the loss is no longer finite.
        """
        events, unread = self._context.events, self._runner.log.unread
        period = Period.of(rows, local_batch_sizes=self._balance.shares)
        step = self._runner.step - unread
        if period.diverged:
            raise RunFailed(
                f"the loss is {period.loss} at step {step}.",
                hint="lower the learning rate, or check the data for values that are not finite",
            )
        seen = self._feed.position - unread * self._context.spec.global_batch_size
        events.write(
            "step",
            **period.event(step=step, epoch=seen / self._feed.dataset_size, samples_seen=seen),
            control_s=round(self._runner.control_s / period.steps, 7),
            learning_rate_scale=self._learning_rate_scale,
            **self._form.event(period.traffic),
        )
        self._runner.control_s = 0.0
        for rank, (bound, known) in enumerate(zip(period.memory_bounds, self._memory_bounds, strict=True)):
            if bound not in (0, known):
                events.write("memory_bound_learned", step=step, rank=rank, samples=bound)
        self._memory_bounds = period.memory_bounds
        return period

    def _decide(self, period: Period) -> None:
        """What every rank concludes from the same numbers: shares, exchange and learning rate from now on."""
        if self._adaptive_scale is not None and (moments := period.noise()) is not None:
            self._adaptive_scale = self._adaptive_scale.after(moments)
        self._steer(period)
        if not self._balance.is_due(period):
            return
        change = self._balance.judge(period, self._feed.cursor.epoch)
        self._runner.log.judged(changed=change is not None)
        if change is not None:
            self._context.events.write("shares_changed", step=self._runner.step, **change)

    def _steer(self, period: Period) -> None:
        if self._steering is None or self._ended() is not None:
            return
        if self._steering.watch(period.traffic):
            self._measure_network()
        rate = float(self._optimizer.param_groups[0]["lr"])
        change = self._steering.judge(period.traffic, step=self._runner.step, epoch=self._epoch, learning_rate=rate)
        if change is not None:
            self._form.follow()
            self._context.events.write("exchange_changed", step=self._runner.step, **change)

    def _measure_network(self) -> None:
        """Again, as it has jumped."""
        assert self._steering is not None
        assert self._form.probe is not None
        timings = self._form.probe.measure()
        self._steering.measured(timings)
        network = self._steering.network
        assert network is not None
        tell_network(self._context.events, network, timings, step=self._runner.step)

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
        self._evaluated_step = self._runner.step
        self._target_reached = self._task.target.reached(self._metrics)
        context.events.write(
            "evaluated",
            step=self._runner.step,
            epoch=round(self._epoch, 4),
            metrics=self._metrics,
            evaluation_s=round(context.clock() - begun_s, 6),
        )

    def _save_checkpoint(self) -> None:
        context = self._context
        if self._checkpoint_step == self._runner.step:
            return
        begun_s = context.clock()
        self._agree_on_buffers()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self._model.parameters()):
            # The last step's gradient did this; its own loss was still finite. Alike on all ranks.
            raise RunFailed(
                f"the model is no longer finite at step {self._runner.step}.", hint="lower the learning rate"
            )
        shared = SharedState(
            digest=run_digest(context.spec),
            step=self._runner.step,
            training_s=self._training_s,
            shares=self._balance.shares,
            model=self._model.state_dict(),
            optimizer=self._optimizer.state_dict(),
            cursor=self._feed.cursor.state(),
            policy=context.spec.batch_policy,
            controller=self._balance.state(),
            steering=None if self._steering is None else self._steering.state(),
            loss_scale=None if self._runner.loss_scale is None else self._runner.loss_scale.to_dict(),
            learning_rate=None if self._adaptive_scale is None else self._adaptive_scale.state(),
            memory_bounds=self._memory_bounds,
            target_reached=self._target_reached,
        )
        self._checkpoints.save(
            shared=shared if context.is_leader else None,
            rank=context.rank,
            own=RankState.now(self._form.step.memory.state(), context.device),
            step=self._runner.step,
            barrier=lambda: _meet(context.world_size),
        )
        self._checkpoint_step = self._runner.step
        self._checkpoint_s = context.clock()
        context.events.write(
            "checkpoint_saved",
            step=self._runner.step,
            path=str(self._checkpoints.path(self._runner.step).relative_to(context.run_dir)),
            save_s=round(self._checkpoint_s - begun_s, 6),
        )

    def _finish(self, reason: str) -> None:
        context = self._context
        # Whoever asked the run to stop is waiting for it.
        if reason != "stopped" and self._evaluated_step != self._runner.step:
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
            step=self._runner.step,
            epoch=round(self._epoch, 4),
            reason=reason,
            training_s=round(training_s, 6),
            metrics=self._metrics,
            parameters_sha256=digest,
        )

    def _ended(self) -> str | None:
        if self._context.spec.stop.target and self._target_reached:
            return "target"
        return self._milestones.ended_by(self._runner.step, self._feed.position)

    def _agree_on_buffers(self) -> None:
        weight = self._balance.shares[self._context.rank] / self._context.spec.global_batch_size
        average_buffers(self._model, weight, self._context.world_size)

    @property
    def _epoch(self) -> float:
        return self._runner.epoch

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
