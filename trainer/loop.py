"""Trains a task: steps in control periods, and between periods what all workers decide: shares, evaluation, checkpoint.

Inside a period the only communication is the gradient's. At its end one control vector is gathered; every rank reads
the same numbers and so decides the same: new shares, an evaluation, a checkpoint, the end. The vector travels while the
last step of the period is computed: it tells about the steps before that one, and the next vector about the rest.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import Gathering, gather_numbers, gather_texts
from hetopt.trainer.checkpoints.folder import (
    CheckpointFolder,
    CheckpointSaver,
    copied,
    is_due,
    parameters_sha256,
    run_digest,
    snapshot,
    unsaved,
    write_model,
)
from hetopt.trainer.comm.compressor import ALIKE
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.elastic.rendezvous import Version
from hetopt.trainer.elastic.worker_group import CarriedState, WorkerGroup, hand_over
from hetopt.trainer.engine import announce
from hetopt.trainer.sharding import Shards, gathered, held
from hetopt.trainer.steps.period import Period
from hetopt.trainer.steps.step import matrices_in
from hetopt.trainer.task import Task, TaskData, evaluate
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.training import Training, build_sharded, try_twins


@dataclass(frozen=True)
class Material:
    """The task and data of a run, which a worker loads before it joins the others, so that they need not wait.

    Attributes:
        task: the task.
        data: training and evaluation data of the task.
    """

    task: Task
    data: TaskData

    @classmethod
    def load(cls, spec: RunSpec) -> Material:
        """Load the task that a run's spec names, and its data, with torch's generator seeded by the spec.

        Raises:
            BadInput: task or data cannot be used.
        """
        torch.manual_seed(spec.seed)
        task = load_task(spec.task)
        return cls(task, task.data(Path(spec.data_dir) if spec.data_dir is not None else None))


def train(context: WorkerContext, group: WorkerGroup | None = None, material: Material | None = None) -> None:
    """Train the spec's task to its limit, target or a stop request, from the newest checkpoint; every worker calls it.

    Writes events, checkpoints and the trained model to the run's folder (the leader; each worker its part of a
    checkpoint).

    Args:
        context: context of this worker.
        group: membership by which this worker finds the others again when some are lost; None: the loss of a worker
            ends the run.
        material: task and data that were loaded before; None: they are loaded now.

    Raises:
        BadInput: the task, its data or the checkpoint cannot be used, or workers would exchange in different ways.
        RunFailed: the loss, a metric or the model is no longer finite, the replicas differ, memory does not hold one
            sample, a file of the run cannot be written, or, without a group, a worker did not answer in time.
        LostPeer: without a group, the connection to another worker broke.
        Abandoned: workers were lost, and meanwhile the run was asked to stop or is over.
    """
    material = material or Material.load(context.spec)
    held: CarriedState | None = None
    while True:
        is_over, held = _attempt(context, material.task, material.data, group, held)
        if is_over:
            return
        assert group is not None
        gc.collect()  # what the broken group trained with, before the next one is given as much memory
        context = group.join(held)


def _attempt(
    context: WorkerContext, task: Task, data: TaskData, group: WorkerGroup | None, held: CarriedState | None
) -> tuple[bool, CarriedState | None]:
    """Train with one group of workers; return whether that was to the end, and else the state that this worker holds.

    Errors that the ``group`` does not survive, and all without one, are raised. The state is None after the end, or
    where no worker had one yet.
    """
    run: _Run | None = None
    try:
        # Anew in every generation: what a broken step has left on the model's parameters must not act on.
        model, shards = build_sharded(context, task)
        run = _Run(context, task, data, model, group, shards)
        with matrices_in(context.spec.precision):
            run.resume(held)
            run.go()
        return True, None
    except Exception as error:
        if group is not None and group.survives(error):
            group.leave(str(error))  # at once: others may still wait for this worker
            return False, (run.held() if run is not None else None) or held
        raise
    finally:
        if run is not None:
            run.close()


class _Run(Training):
    """The training of one worker, in periods and checkpoints, decided alike by all."""

    def __init__(
        self,
        context: WorkerContext,
        task: Task,
        data: TaskData,
        model: nn.Module,
        group: WorkerGroup | None,
        shards: Shards,
    ) -> None:
        super().__init__(context, task, data, model, CheckpointSaver(context), shards)
        self._group = group
        self._agreed: int | None = None  # generation in which all workers took over one state; None: they have not yet
        self._decisions = 0
        self._evaluation_owed = False
        self._checkpoint_s = context.clock()
        self._evaluated_step: int | None = None
        self._metrics: dict[str, float] = {}

    def resume(self, held: CarriedState | None = None) -> None:
        """Continue from the newest state that a worker holds, or else from the newest checkpoint, if there is one.

        ``held`` is the state that this worker kept from a broken group; None: it has just started. All workers must
        call it.
        """
        group = self._group
        if group is None:
            self._resume_from_disk()
            return
        assert group.generation is not None
        handed = hand_over(held, group.generation, self.context.rank)
        if handed is None:
            self._resume_from_disk()
        else:
            rank_state = handed.rank_state or self.own_state()
            self.take_over(
                handed.shared, replace(rank_state, memory={**rank_state.memory, **handed.alike}), "the other workers"
            )
            self._decisions, self._evaluation_owed = handed.version.decisions, handed.evaluation_owed
        self._agreed = group.generation.number
        group.agreed(handed, step=self.step)

    def held(self) -> CarriedState | None:
        """Return this worker's training state as of before the step under way; None before all workers had one state.

        To be asked for when the group has fallen apart: nothing here communicates.
        """
        if self._agreed is None:
            return None
        shared, own_after = self.shared_state(), self.own_state()
        rank_state, unfinished = own_after, self.unfinished
        if unfinished is not None:
            cursor, generators = unfinished
            shared, rank_state = replace(shared, cursor=cursor), replace(rank_state, **vars(generators))
        return CarriedState(
            version=Version(agreed=self._agreed, step=self.step, decisions=self._decisions),
            shared=snapshot(shared),
            rank_state=snapshot(rank_state),
            rank_state_after=snapshot(own_after),
            alike=copied({key: value for key, value in rank_state.memory.items() if key.startswith(ALIKE)}),
            evaluation_owed=self._evaluation_owed,
            share=self.balance.shares[self.context.rank],
        )

    def _resume_from_disk(self) -> None:
        """Continue from the newest whole checkpoint; without one, change nothing; BadInput: as of `load_newest`."""
        context, folder = self.context, CheckpointFolder(self.context.run_dir)
        digest, in_parts = run_digest(context.spec), self.shards.devices > 1
        newest = folder.load_newest(digest, context.rank, context.world_size, context.events, in_parts=in_parts)
        if newest is not None:
            shared, rank_state = newest
            self.take_over(shared, rank_state, f"the checkpoint of step {shared.step}")
            self._saver.saved_step = shared.step

    def go(self) -> None:
        """Train until a limit, the target or a stop, then write model, checkpoint and last event; all must call it.

        On the way evaluate when it is due, and write checkpoints in a thread. Errors are those of `train`.
        """
        context, clock = self.context, self.context.clock
        announce(
            context,
            self.model,
            self.exchange,
            shares=self.balance.shares,
            step=self.step,
        )
        if self.replay is not None:
            self.replay.begin()
        context.events.write("training_started", step=self.step)
        self.begun_s = self._checkpoint_s = clock()
        step_time_s: float | None = None
        if self._evaluation_owed:
            self._evaluate()
        reason, feed = self.ended(), self.feed
        while reason is None:
            if self._group is not None:
                self._group.check()
            before = feed.cursor.position
            period = self._period(self.milestones.period_steps(self.step, before, step_time_s))
            step_time_s = period.step_time_s
            self._decisions += 1
            self._evaluation_owed = self.milestones.evaluation_due(before, feed.cursor.position)
            if self._evaluation_owed:
                self._evaluate()
            reason = self.ended() or ("stopped" if period.stop_wished else None)
            self._saver.conclude([row.checkpoint_part for row in period.rows])
            since_s, period_s = period.rows[0].since_checkpoint_s, period.steps * period.step_time_s
            due = is_due(since_s, period_s=period_s, every_s=context.spec.checkpoint_every_s)
            if reason is None and due and not self._saver.is_busy:
                self._begin_checkpoint()
        if self.log.unread:
            self._tell(self.gather_all(self._checkpoint_s))
        self._finish(reason)

    def _period(self, steps: int) -> Period:
        """Train some steps over the present shares, read their period, and decide on exchange and local batch sizes.

        Raises:
            RunFailed: a worker's parameters differ from those of most, or the loss is no longer finite.
        """
        context, clock = self.context, self.context.clock
        steps = self.period_steps(steps)
        gathering = self.run_period(
            steps,
            learning_rate_scale=self.learning_rate_scale,
            # Steps on a stream differ in size: none of them is told about in another period than its own.
            all_meet=context.world_size == 1
            or self.replay is not None
            or self.milestones.all_meet(self.step, self.feed.cursor.position, steps),
            checkpoint_s=self._checkpoint_s,
        )
        begun_s = clock()
        period = self._tell(gathering)
        if period.drifted:
            raise RunFailed(
                f"{workers(period.drifted)} has other values of its parameters than most workers at step {self.step}.",
                hint="the task's model, optimizer and schedule must do the same on every worker: nothing in them may "
                "depend on the rank, the time or a random number of their own",
            )
        position, steering = self.feed.cursor.position, self.exchange.steering
        if self.ended() is None:
            self.steer(
                period,
                epoch=self.epoch,
                learning_rate=float(self.optimizer.param_groups[0]["lr"]),
                steps_left=self.milestones.steps_left(self.step, position),
            )
            if steering is not None and (ratio := steering.try_ratio) is not None:
                # It is worth knowing whether thin exchanges would hold training back.
                steering.verdict = try_twins(self, ratio)
        self.share(period, self.feed.cursor.epoch, position)
        self.follow_shares()
        self.control_s += clock() - begun_s
        return period

    def _tell(self, gathering: Gathering) -> Period:
        """Read a period off the workers' rows, and log it.

        Raises:
            RunFailed: the loss is no longer finite.
        """
        unread = self.log.unread
        period = self.read(gathering)
        step = self.step - unread
        if period.diverged:
            ranks = [rank for rank, row in enumerate(period.rows) if not math.isfinite(row.loss_sum)] or [0]
            raise RunFailed(
                f"the loss is {period.loss} at step {step} or up to {period.steps} before, on {workers(ranks)}.",
                hint="lower the learning rate, or check the data for values that are not finite",
            )
        feed = self.feed
        seen = feed.cursor.position - unread * sum(feed.drawn(self.balance.shares))
        worth, planned = self.balance.worth, self.balance.progress(seen) / self.context.spec.global_batch_size
        self.tell(
            period,
            epoch=seen / feed.cursor.dataset_size,
            samples_seen=seen,
            learning_rate_scale=self.learning_rate_scale,
            **feed.event(),
            **({} if worth is None else {"worth": worth, "planned_step": round(planned, 2)}),
            **({} if (stream := self.context.spec.stream) is None else period.stream_event(stream.rates)),
        )
        for rank, (bound, known) in enumerate(zip(period.memory_bounds, self.memory_bounds, strict=True)):
            if bound not in (0, known):
                self.context.events.write("memory_bound_learned", step=step, rank=rank, samples=bound)
        self.memory_bounds = period.memory_bounds
        return period

    def _evaluate(self) -> None:
        """Evaluate the model with all workers, note whether it reached the target, and log its metrics.

        Every worker must call it. Where parameters are averaged, the average is evaluated.
        """
        context = self.context
        begun_s = context.clock()
        with self.one_model():
            self._metrics = evaluate(
                self.task,
                self.model,
                self.data.evaluation,
                shares=self.balance.shares,
                rank=context.rank,
                device=context.device,
            )
        self._evaluated_step = self.step
        self._evaluation_owed = False
        self._decisions += 1
        self.target_reached = self.task.target.reached(self._metrics)
        context.events.write(
            "evaluated",
            step=self.step,
            epoch=round(self.epoch, 4),
            metrics=self._metrics,
            evaluation_s=round(context.clock() - begun_s, 6),
        )

    def _begin_checkpoint(self, *, keeps: int = 1) -> None:
        """Begin a checkpoint in a thread, with all workers; RunFailed: the model is no longer finite.

        Every worker must call it; training goes on while files are written.
        """
        context = self.context
        begun_s = context.clock()
        with self.one_model():
            finite = all(bool(torch.isfinite(held(parameter)).all()) for parameter in self.model.parameters())
            if self.shards.devices > 1:
                finite = all(row[0] for row in gather_numbers([float(finite)], context.world_size))
            if not finite:
                # The last step's gradient did this; its own loss was still finite. Alike on all ranks.
                raise RunFailed(
                    f"the model is no longer finite at step {self.step}.",
                    hint="lower the learning rate",
                )
            self._saver.begin(self.shared_state(), self.own_state(), begun_s=begun_s, keeps=keeps)
        self._checkpoint_s = context.clock()

    def _finish_checkpoint(self, *, stopped: bool) -> None:
        """Save the last checkpoint, and wait for it. A finished run has its model, and can do without.

        Raises:
            RunFailed: a run that is stopped is to go on from it, and a worker's disk refuses.
        """
        if self._saver.saved_step != self.step:
            self._begin_checkpoint(keeps=int(stopped))
            problem = self._saver.finish()
            if problem is not None and stopped:
                raise unsaved(problem)

    def _finish(self, reason: str) -> None:
        """Evaluate (unless stopped), write the model and a last checkpoint, and log the end; all must call it.

        Raises:
            RunFailed: the workers' models differ, the model is not finite or cannot be written, or a stopped run's
                checkpoint.
        """
        context = self.context
        # Whoever asked the run to stop is waiting for it.
        if reason != "stopped" and self._evaluated_step != self.step:
            self._evaluate()
        training_s = self.training_s
        self._saver.finish()
        stopped = reason == "stopped"
        if stopped:
            self._finish_checkpoint(stopped=True)
        with self.one_model():
            digest = parameters_sha256((name, held(value)) for name, value in self.model.named_parameters())
            digests, devices = gather_texts(digest, context.world_size), self.shards.devices
            if any(len(set(digests[place::devices])) > 1 for place in range(devices)):
                raise RunFailed(
                    "the workers' models differ at the end of the run.",
                    hint="a task whose model uses other parameters on other workers can do this; "
                    "please report it if not",
                )
            state = gathered(self.model.state_dict(), keep=context.is_leader)
            if context.is_leader:
                write_model(context.run_dir, state, stopped=stopped)
                if devices > 1:  # of the whole model, as of one that is not shared
                    digest = parameters_sha256((name, state[name]) for name, _ in self.model.named_parameters())
        if not stopped:
            self._finish_checkpoint(stopped=False)
        if self._group is not None and context.is_leader:
            self._group.finished()
        context.events.write(
            "training_finished",
            step=self.step,
            epoch=round(self.epoch, 4),
            reason=reason,
            training_s=round(training_s, 6),
            metrics=self._metrics,
            parameters_sha256=digest,
        )
