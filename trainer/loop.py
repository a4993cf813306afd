"""Trains: steps in control periods, and between periods everything that all workers decide together.

Inside a period the only communication is the gradient's. At its end one control vector is gathered; every rank reads
the same numbers and so decides the same: new shares, an evaluation, a checkpoint, the end.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.assembly import LearningRate, build_model, make_controller, make_step
from hetopt.trainer.checkpoint import (
    CheckpointFolder,
    RankState,
    SharedState,
    parameters_sha256,
    run_digest,
    save_model,
)
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.control.batch import BatchController, BatchObservation, BatchState
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.evaluation import average_buffers, evaluate
from hetopt.trainer.local_batch import BatchReader
from hetopt.trainer.milestones import Milestones
from hetopt.trainer.precision import LossScale, initial_loss_scale
from hetopt.trainer.run_folder import MODEL_FILE
from hetopt.trainer.statistics import ControlRow, Period, PeriodLog
from hetopt.trainer.step import Step, trainable_parameters
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
    run = _Run(context, task, data, model)
    run.resume()
    run.announce()
    run.go()


class _Run:
    """One worker's state of the training run; everything here except generators and residual is alike on all ranks."""

    def __init__(self, context: WorkerContext, task: Task, data: TaskData, model: nn.Module) -> None:
        spec = context.spec
        self._context = context
        self._task = task
        self._data = data
        self._model = model
        self._stopwatch = make_stopwatch(context.device)
        self._reader = BatchReader(
            dataset=data.train,
            device=context.device,
            seed=spec.seed,
            max_samples=context.worker.max_local_batch_size,
        )
        self._step_form: Step = make_step(
            context, task, model, self._reader, self._stopwatch, context.worker.local_batch_size
        )
        self._optimizer: Optimizer = task.optimizer(model)
        self._learning_rate = LearningRate.of(task, self._optimizer, spec.learning_rate_scale)
        self._loss_scale: LossScale | None = initial_loss_scale(spec.precision)
        self._controller: BatchController = make_controller(spec, model)
        self._controller_state = BatchState()
        self._cursor = SampleCursor(len(data.train), spec.seed)
        self._shares = tuple(worker.local_batch_size for worker in spec.workers)
        self._milestones = Milestones(
            stop=spec.stop,
            dataset_size=len(data.train),
            global_batch_size=spec.global_batch_size,
            evaluate_every_epochs=spec.evaluate_every_epochs,
            control_period_steps=spec.control_period_steps,
        )
        self._checkpoints = CheckpointFolder(context.run_dir)
        self._log = PeriodLog(self._stopwatch)
        self._unjudged_steps = 0
        self._unjudged_s = 0.0
        self._step = 0
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
        self._step_form.memory.load_state(own.memory)
        self._cursor = SampleCursor.from_state(shared.cursor)
        self._loss_scale = LossScale.from_dict(shared.loss_scale) if shared.loss_scale is not None else None
        if len(shared.shares) == context.world_size and sum(shared.shares) == context.spec.global_batch_size:
            self._shares = shared.shares
            self._controller_state = BatchState.from_dict(shared.controller)
        self._step = self._checkpoint_step = step
        self._earlier_s = shared.training_s
        self._target_reached = shared.target_reached

    def announce(self) -> None:
        """Write ``run_started``."""
        context, spec = self._context, self._context.spec
        name = "cpu" if context.device.type == "cpu" else torch.cuda.get_device_name(context.device)
        devices = gather_texts(name, context.world_size)
        threads = gather_numbers([torch.get_num_threads()], context.world_size)
        context.events.write(
            "run_started",
            task=spec.task,
            workers=[
                {
                    "host": worker.host,
                    "type": worker.type,
                    "pace": worker.pace,
                    "local_batch_size": share,
                    "device": device,
                    "threads": int(row[0]),
                }
                for worker, share, device, row in zip(spec.workers, self._shares, devices, threads, strict=True)
            ],
            global_batch_size=spec.global_batch_size,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            gradient_bytes=sum(parameter.nbytes for parameter in trainable_parameters(self._model)),
            compression=spec.compression.model_dump(),
            resumed_step=self._step,
        )

    def go(self) -> None:
        """Train to the end and leave the model, a checkpoint and the last event behind."""
        context, clock = self._context, self._context.clock
        context.events.write("training_started", step=self._step)
        self._begun_s = self._checkpoint_s = clock()
        step_time_s: float | None = None
        reason = self._ended()
        while reason is None:
            before = self._cursor.position
            period = self._period(self._milestones.period_steps(self._step, before, step_time_s))
            step_time_s = period.step_time_s
            if period.diverged:
                raise RunFailed(
                    f"the loss is {period.loss} at step {self._step}.",
                    hint="lower the learning rate, or check the data for values that are not finite",
                )
            context.events.write(
                "step", **period.event(step=self._step, epoch=self._epoch, samples_seen=self._cursor.position)
            )
            self._share_anew(period)
            if self._milestones.evaluation_due(before, self._cursor.position):
                self._evaluate()
            reason = self._ended() or ("stopped" if period.stop_wished else None)
            if reason is None and period.rows[0].since_checkpoint_s >= context.spec.checkpoint_every_s:
                self._save_checkpoint()
        self._finish(reason)

    def _period(self, steps: int) -> Period:
        """Do some steps over the present shares and gather what they were like."""
        context, clock = self._context, self._context.clock
        begun_s = clock()
        for _ in range(steps):
            self._learning_rate.apply(self._optimizer, self._epoch)
            batch = self._cursor.take(self._shares)
            scale = self._loss_scale
            trace = self._step_form.run(
                self._reader.cut(batch, context.rank), len(batch), None if scale is None else scale.value
            )
            if trace.finite:
                self._optimizer.step()
            if scale is not None:
                self._loss_scale = scale.after(finite=trace.finite)
            self._log.add(trace)
            self._step += 1
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        now_s = clock()
        row = self._log.close(
            period_s=now_s - begun_s,
            stop_wished=context.stop_requested(),
            since_checkpoint_s=now_s - self._checkpoint_s,
        )
        rows = gather_numbers(row.to_list(), context.world_size)
        return Period(rows=tuple(ControlRow.from_list(numbers) for numbers in rows), local_batch_sizes=self._shares)

    def _share_anew(self, period: Period) -> None:
        self._unjudged_steps += period.steps
        self._unjudged_s += period.steps * period.step_time_s
        if not self._milestones.may_judge_shares(self._unjudged_steps, self._unjudged_s):
            return
        self._unjudged_steps, self._unjudged_s = 0, 0.0
        self._log.judged()
        observation = BatchObservation(local_batch_sizes=self._shares, compute_s=period.compute_median_s)
        self._controller_state, decision = self._controller.decide(self._controller_state, observation)
        if decision.changed:
            self._context.events.write(
                "shares_changed",
                step=self._step,
                before=list(self._shares),
                after=list(decision.local_batch_sizes),
                reason=decision.reason,
            )
            self._shares = decision.local_batch_sizes

    def _evaluate(self) -> None:
        context = self._context
        begun_s = context.clock()
        self._agree_on_buffers()
        self._metrics = evaluate(
            self._task,
            self._model,
            self._data.evaluation,
            shares=self._shares,
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
            shares=self._shares,
            model=self._model.state_dict(),
            optimizer=self._optimizer.state_dict(),
            cursor=self._cursor.state(),
            controller=self._controller_state.to_dict(),
            loss_scale=None if self._loss_scale is None else self._loss_scale.to_dict(),
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
        return self._milestones.ended_by(self._step, self._cursor.position)

    def _agree_on_buffers(self) -> None:
        weight = self._shares[self._context.rank] / sum(self._shares)
        average_buffers(self._model, weight, self._context.world_size)

    @property
    def _epoch(self) -> float:
        return self._cursor.position / self._cursor.dataset_size

    @property
    def _training_s(self) -> float:
        """Seconds of training by all attempts, evaluations and checkpoints included, start-up not."""
        return self._earlier_s + self._context.clock() - self._begun_s


def _meet(world_size: int) -> None:
    gather_numbers([0.0], world_size)
