"""Pilot runs: short training towards the target, evaluated like a real run; the first also samples noise and gain."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import torch

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.errors import RunFailed
from hetopt.core.profile import Evaluation, NoiseSample
from hetopt.core.run_spec import Compression, ProbeSchedule, parse_sync
from hetopt.core.training_laws import pooled_noise
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.gradient import ExchangeTrials, ResidualGains
from hetopt.profiler.records import Ending, GainMeasured, PilotSeen
from hetopt.trainer.checkpoints.folder import begin_from
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.data.cursor import GlobalBatch, MicroBatch, SampleCursor
from hetopt.trainer.data.fetch import MapDataset
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import FusedStep, LossModule, LossScale, trainable_parameters
from hetopt.trainer.steps.stopwatch import Slowdown, Stopwatch
from hetopt.trainer.sync.synchroniser import make_synchroniser
from hetopt.trainer.task import LearningRate, Task, average_buffers, evaluate, make_optimizer
from hetopt.trainer.training import build_model

FEWEST_STEPS = 4
"""Steps that the first pilot takes whatever its time limit: without any there would be neither noise nor gain."""

SAMPLING_SHARE = 0.3
"""Part of a pilot's time that samples of noise and gain may take, and part of its time limit that trials of compressors
may."""

EVALUATIONS_IN_LIMIT = 6
"""Number of evaluations in a time limit: an epoch that is longer than this part of it is evaluated in between."""


class PilotRun:
    """One pilot, a short training run that a probe makes and evaluates; all ranks build and run it together.

    Args:
        crew: all workers of the probe.
        task: task to train.
        reader: reader of the training data.
        evaluation: data to evaluate on.
        schedule: schedule of the probe.
        index: index of the pilot in the schedule.
        trials: trials of compressors, continued in pilots with the first one's batch size and precision; None: none.

    Raises:
        BadInput: the schedule begins from a checkpoint that cannot be used, or the pilot's sync does not go with the
            job.
    """

    def __init__(
        self,
        crew: ProbeGroup,
        task: Task,
        reader: BatchReader,
        evaluation: MapDataset,
        schedule: ProbeSchedule,
        index: int,
        trials: ExchangeTrials | None,
    ) -> None:
        """Build the pilot's model, optimizer and exchange, from a checkpoint if the schedule names one; log nothing.

        Every rank must call it. Torch's random numbers are seeded, differently on each rank.

        Raises:
            BadInput: the model, optimizer or checkpoint cannot be used, or the batch has no sample for each worker.
        """
        context, pilot = crew.context, schedule.pilots[index]
        self._crew, self._task, self._reader, self._evaluation = crew, task, reader, evaluation
        self._index, self._pilot, self._noise_groups = index, pilot, schedule.noise_groups
        seed = schedule.seed + pilot.repeat
        self._model = build_model(task, context.device, seed)
        torch.manual_seed(seed + 7919 * (context.rank + 1))  # dropout differs between workers
        self._optimizer = make_optimizer(task, self._model)
        self._seen = PilotSeen(
            pilot=index,
            global_batch_size=pilot.global_batch_size,
            learning_rate_scale=task.learning_rate_scale(pilot.global_batch_size),
            seed=seed,
            sync=pilot.sync,
            workers=context.world_size,
            precision=pilot.precision,
        )
        sync = None if pilot.sync is None else parse_sync(pilot.sync)
        self._learning_rate = LearningRate(task, self._optimizer, 1.0 if sync is None else sync.stretch)
        elements = sum(parameter.numel() for parameter in trainable_parameters(self._model))
        self._exchange = Exchange(Compression(), elements, device=context.device)
        self._loss_scale = LossScale() if pilot.precision == "fp16" else None
        loss = LossModule(self._model, task.loss, pilot.precision)
        stopwatch = Stopwatch(context.device)
        self._step = FusedStep(  # of this worker's gradient, which is looked at before it is exchanged
            module=loss,
            reader=reader,
            stopwatch=stopwatch,
            pace=Slowdown(),
            norms=sync is not None and sync.name == "selsync",
            # Workers take samples in groups of their own, so that they cannot add them up in between.
            counts="unused" if sync is None else "alone",
        )
        self._steps_before, seen = (
            (0, 0)
            if schedule.from_checkpoint is None
            else begin_from(schedule.from_checkpoint, self._model, self._optimizer)
        )
        self._cursor = SampleCursor(len(reader.dataset), seed, position=seen)
        workers = context.world_size
        self._shares = largest_remainder(
            [1.0] * workers, pilot.global_batch_size, minimum=[0] * workers, maximum=[None] * workers
        )
        self._synchroniser = (
            None
            if sync is None
            else make_synchroniser(
                context.spec.model_copy(update={"sync": sync}),
                self._model,
                self._optimizer,
                device=context.device,
                clock=context.clock,
                stopwatch=stopwatch,
                dataset_size=len(reader.dataset),
            )
        )
        first = schedule.pilots[0]
        usual = (pilot.global_batch_size, pilot.precision) == (first.global_batch_size, first.precision)
        self._trials = trials if usual and sync is None else None
        self._tried_s = 0.0
        self._gains = (
            ResidualGains(schedule.gain_ratios, schedule.gain_residual_ratios, elements, context.device)
            if index == 0
            else None
        )

    def run(self, time_limit_s: float, *, evaluated: bool) -> None:
        """Train until the target, the time limit, the last epoch or divergence, and log it; every rank calls it.

        Args:
            time_limit_s: seconds that the pilot may take; the first steps are taken in any case.
            evaluated: whether the model is evaluated; False: the pilot only samples noise and gain.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        crew, pilot = self._crew, self._pilot
        self._note()
        fewest_steps = FEWEST_STEPS if self._index == 0 else 1
        next_sample, plain_s = 0, 0.0
        begun_s = now_s = evaluated_s = crew.elapsed_s()
        step, evaluated_epochs = 0, 0
        ending: Ending | None = None
        while ending is None:
            batch = self._cursor.take(self._shares)
            self._learning_rate.apply(
                self._optimizer, batch.position / self._cursor.dataset_size, self._seen.learning_rate_scale
            )
            sampled = self._gains is not None and step >= next_sample
            tries = self._trials is not None and self._tried_s <= SAMPLING_SHARE * time_limit_s
            finite = self._sampled_step(batch, step) if sampled else self._plain_step(batch, step, tries=tries)
            before_s, now_s = now_s, crew.elapsed_s()
            if sampled:  # the next comes later where a sample costs much more than a step
                pause = (now_s - before_s - plain_s) / (SAMPLING_SHARE * plain_s) if plain_s else 0.0
                next_sample = step + max(pilot.sample_every_steps, math.ceil(pause))
            elif not tries:  # what is tried beside a step is none of its time
                plain_s = now_s - before_s
            step += 1
            epoch = self._cursor.position / self._cursor.dataset_size
            late = now_s - begun_s >= time_limit_s and step >= fewest_steps
            if not finite:
                ending = "diverged"
                continue
            overdue = now_s - evaluated_s > time_limit_s / EVALUATIONS_IN_LIMIT
            if evaluated and (epoch >= evaluated_epochs + 1 or overdue or late):
                ending = self._evaluate(step, epoch)
                evaluated_s = now_s = crew.elapsed_s()
                evaluated_epochs = math.floor(epoch)
            if ending is None and epoch >= pilot.max_epochs:
                ending = "epochs"
            if ending is None and late:
                ending = "time"
        sync = None if self._synchroniser is None else self._synchroniser.event(step).get("sync", {})
        synchronised = None if sync is None else int(sync.get("synchronised", 0))
        self._note(step=step, ended=ending, synchronised=synchronised)

    def _note(self, **fields: object) -> None:
        """Update the pilot's record by ``fields`` of `PilotSeen`, and write it to the event log."""
        self._seen = self._seen.model_copy(update=fields)
        self._crew.record(self._seen)

    def _plain_step(self, batch: GlobalBatch, step: int, *, tries: bool) -> bool:
        """Train one step; return whether the loss of every worker is finite; if not, no weight moves.

        Args:
            batch: batch of all workers.
            step: number of steps before.
            tries: whether compressors are tried on the gradient.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        scale, parts = self._loss_scale, self._reader.cut(batch, self._crew.context.rank)
        trace = self._step.run(parts, len(batch), None if scale is None else scale.value)
        if scale is not None:
            self._loss_scale = scale.after(finite=trace.finite)
        goes_on = self._apply(float(trace.loss_sum), learns=trace.finite, tries=tries)
        if goes_on and self._synchroniser is not None:
            self._synchroniser.after(step + 1, trace, self._shares)
        return goes_on

    def _sampled_step(self, batch: GlobalBatch, step: int) -> bool:
        """Train one step in groups and record noise and gain; return whether the loss of every worker is finite.

        If not, no weight moves and nothing is recorded; with fewer than two groups over all workers, no noise is.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        crew, total = self._crew, len(batch)
        loss_sum, weighted_square_norms = 0.0, 0.0
        groups = self._groups(batch)
        gradient = torch.zeros_like(self._step.flat)
        for group in groups:
            loss_sum += float(self._step.run([group], total, None).loss_sum)
            # What is there is g_j * b_j / B, and b_j |g_j|^2 is wanted.
            weighted_square_norms += energy(self._step.flat) * total**2 / len(group)
            gradient += self._step.flat
        self._step.flat.copy_(gradient)
        measured = self._gains.measure(gradient, crew) if self._gains is not None else ()
        finite = self._apply(loss_sum)
        count, weighted_square_norms = crew.total([float(len(groups)), weighted_square_norms])
        if finite and count >= 2:
            moments = pooled_noise(int(count), total, weighted_square_norms, energy(self._step.flat))
            crew.record(NoiseSample(step=self._steps_before + step, samples_seen=batch.position, **vars(moments)))
        if finite and measured:
            crew.record(GainMeasured(gains=measured))
        return finite

    def _apply(self, loss_sum: float, *, learns: bool = True, tries: bool = False) -> bool:
        """Exchange the step's gradient and update the weights; return whether the loss of every worker is finite.

        Args:
            loss_sum: sum of losses of this worker; if any worker's is not finite, no weight moves.
            learns: whether weights may move; False: gradients overflowed in fp16, and the step is skipped.
            tries: whether compressors are tried on the gradient.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        if not math.isfinite(self._crew.total([loss_sum])[0]):
            return False
        if not learns:
            return True
        if self._gains is not None:
            self._gains.follow(self._step.flat)
        if self._trials is not None and tries:
            begun_s = self._crew.elapsed_s()
            for tried in self._trials.follow(self._step.flat, self._crew, pilot=self._index):
                self._crew.record(tried)
            self._tried_s += self._crew.elapsed_s() - begun_s  # beside the step, on the time that trials may take
        if self._synchroniser is None:
            self._exchange.run(self._step.flat)
        self._optimizer.step()
        return True

    def _groups(self, batch: GlobalBatch) -> list[MicroBatch]:
        """Return this worker's micro-batches, cut further so that all workers together have about ``noise_groups``.

        Groups have at least two samples, as BatchNorm cannot normalise one.
        """
        context = self._crew.context
        wanted = max(1, self._noise_groups // context.world_size)
        parts = self._reader.cut(batch, context.rank)
        pieces = max(1, wanted // max(1, len(parts)))
        return [
            MicroBatch(epoch=part.epoch, indices=piece.tolist())
            for part in parts
            for piece in np.array_split(np.asarray(part.indices), max(1, min(pieces, len(part) // 2)))
        ]

    def _evaluate(self, step: int, epoch: float) -> Ending | None:
        """Evaluate the model, log the metric, and return 'target', 'diverged' (not finite), or None; collective.

        None: the pilot goes on. Workers that sum gradients first average the model's buffers, for good. A metric that
        is not finite is not logged.
        """
        context, task = self._crew.context, self._task
        if self._synchroniser is None:
            average_buffers(self._model, 1 / context.world_size, context.world_size)
        try:
            with nullcontext() if self._synchroniser is None else self._synchroniser.averaged():
                metrics = evaluate(
                    task,
                    self._model,
                    self._evaluation,
                    shares=[1.0] * context.world_size,
                    rank=context.rank,
                    device=context.device,
                )
        except RunFailed:  # a metric that is not finite, the same on all ranks
            return "diverged"
        reached = task.target.reached(metrics)
        evaluation = Evaluation(step=step, metric=metrics[task.target.metric])
        self._note(step=step, epoch=epoch, evaluations=(*self._seen.evaluations, evaluation))
        return "target" if reached else None
