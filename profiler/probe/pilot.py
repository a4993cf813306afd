"""Pilot runs: training towards the target, evaluated like a real run; the first also samples noise and gain.

They sum gradients in every step, but for those that are there to see what another sync costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_spec import Compression, ProbeSchedule
from hetopt.core.synchronization import Synchronization, parse_sync
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.gradient import ExchangeTrials, HeldExchange, ResidualGains
from hetopt.profiler.records import GainMeasured, NoiseMeasured, PilotEvaluation, PilotFinished, PilotStarted
from hetopt.trainer.assembly import build_model
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.data.cursor import GlobalBatch, MicroBatch, SampleCursor
from hetopt.trainer.data.fetch import MapDataset
from hetopt.trainer.steps.fused_step import FusedStep
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import Autocast, LossModule, initial_loss_scale, matrices_in, trainable_parameters
from hetopt.trainer.steps.stopwatch import make_stopwatch
from hetopt.trainer.sync.synchroniser import make_synchroniser
from hetopt.trainer.task import LearningRate, Task, average_buffers, evaluate, make_optimizer

FEWEST_STEPS = 4
"""Taken by the first pilot whatever its time limit: without any there would be neither noise nor gain."""

SAMPLING_SHARE = 0.3
"""Part of a pilot's time that its samples may take, which become rarer where they are costly; and of its time limit,
that trying other ways to exchange may."""

EVALUATIONS_IN_LIMIT = 6
"""An epoch that is longer than this part of the time limit is evaluated in between."""

Ending = Literal["target", "time", "epochs", "diverged"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PilotGround:
    """What all pilots of a probe share; ``trials`` go on in each that trains as the first does."""

    crew: ProbeGroup
    task: Task
    reader: BatchReader
    evaluation: MapDataset
    schedule: ProbeSchedule
    trials: ExchangeTrials | None = None


class PilotRun:
    """One pilot: its model, its place in the data, and what it does at a step. Built and run by all ranks together."""

    def __init__(self, ground: PilotGround, index: int) -> None:
        context, pilot, task = ground.crew.context, ground.schedule.pilots[index], ground.task
        self._ground, self._index, self._pilot = ground, index, pilot
        self._seed = ground.schedule.seed + pilot.repeat
        self._model = build_model(task, context.device, self._seed)
        torch.manual_seed(self._seed + 7919 * (context.rank + 1))  # dropout differs between workers
        self._optimizer = make_optimizer(task, self._model)
        self._scale = task.learning_rate_scale(pilot.global_batch_size)
        sync = None if pilot.sync is None else parse_sync(pilot.sync)
        self._learning_rate = LearningRate.of(task, self._optimizer, 1.0 if sync is None else sync.stretch)
        elements = sum(parameter.numel() for parameter in trainable_parameters(self._model))
        self._held = HeldExchange(Exchange(Compression(), elements, device=context.device), elements, context.device)
        autocast = Autocast(device_type=context.device.type, precision=pilot.precision)
        self._loss_scale = initial_loss_scale(pilot.precision)
        loss = LossModule(self._model, task.loss, autocast)
        self._step = FusedStep(
            module=loss,
            reader=ground.reader,
            exchange=self._held,
            stopwatch=make_stopwatch(context.device),
            pace=Slowdown(),
            counts="unused",  # workers take samples in groups of their own, so that they cannot add them up in between
        )
        self._cursor = SampleCursor(len(ground.reader.dataset), self._seed)
        workers = context.world_size
        self._shares = largest_remainder(
            [1.0] * workers, pilot.global_batch_size, minimum=[0] * workers, maximum=[None] * workers
        )
        self._local: LocalPilot | None = None
        if sync is not None:
            self._local = LocalPilot(
                ground.crew,
                sync,
                loss=loss,
                optimizer=self._optimizer,
                reader=ground.reader,
                shares=self._shares,
            )
        self._gains: ResidualGains | None = None
        first = ground.schedule.pilots[0]
        usual = (pilot.global_batch_size, pilot.precision) == (first.global_batch_size, first.precision)
        self._trials = ground.trials if usual and sync is None else None
        self._tried_s = 0.0
        if index == 0:
            self._gains = ResidualGains(
                ground.schedule.gain_ratios, ground.schedule.gain_residual_ratios, elements, context.device
            )

    def run(self, time_limit_s: float, *, evaluated: bool) -> None:
        """Train until the target, the time limit or the last epoch.

        Args:
            time_limit_s: seconds that the pilot may take.
            evaluated: False where an evaluation costs too much; the pilot then serves noise and gain alone.
        """
        crew, pilot, index = self._ground.crew, self._pilot, self._index
        crew.record(
            PilotStarted(
                pilot=index,
                global_batch_size=pilot.global_batch_size,
                learning_rate_scale=self._scale,
                seed=self._seed,
                sync=pilot.sync,
                workers=crew.context.world_size,
                precision=pilot.precision,
            )
        )
        with matrices_in(pilot.precision):
            self._train(time_limit_s, evaluated=evaluated)

    def _train(self, time_limit_s: float, *, evaluated: bool) -> None:
        crew, pilot, index = self._ground.crew, self._pilot, self._index
        fewest_steps = FEWEST_STEPS if index == 0 else 1
        next_sample, plain_s = 0, 0.0
        begun_s = now_s = evaluated_s = crew.elapsed_s()
        step, evaluated_epochs = 0, 0
        ending: Ending | None = None
        while ending is None:
            batch = self._cursor.take(self._shares)
            self._learning_rate.apply(self._optimizer, batch.position / self._cursor.dataset_size, self._scale)
            sampled = self._gains is not None and step >= next_sample
            tries = self._trials is not None and self._tried_s <= SAMPLING_SHARE * time_limit_s
            finite = (
                self._sampled_step(batch, step) if sampled else self._plain_step(batch, tries=step if tries else None)
            )
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
        synchronised = None if self._local is None else self._local.synchronised()
        crew.record(PilotFinished(pilot=index, step=step, reason=ending, synchronised=synchronised))

    def _plain_step(self, batch: GlobalBatch, *, tries: int | None) -> bool:
        """One step; False when the loss of any worker is not finite (then nothing is learnt).

        Args:
            batch: to learn from.
            tries: number of a step whose gradient a way to exchange is tried on; None: of none.
        """
        context = self._ground.crew.context
        if self._local is not None:
            return self._local.step(self._ground.reader.cut(batch, context.rank))
        scale, parts = self._loss_scale, self._ground.reader.cut(batch, context.rank)
        trace = self._step.run(parts, len(batch), None if scale is None else scale.value)
        if scale is not None:
            self._loss_scale = scale.after(finite=trace.finite)
        return self._apply(float(trace.loss_sum), learns=trace.finite, tries=tries)

    def _sampled_step(self, batch: GlobalBatch, step: int) -> bool:
        """The same step computed in groups, whose gradients also tell signal from noise."""
        crew, total = self._ground.crew, len(batch)
        loss_sum, weighted_square_norms = 0.0, 0.0
        groups = self._groups(batch)
        gradient = torch.zeros_like(self._held.local)
        for group in groups:
            loss_sum += float(self._step.run([group], total, None).loss_sum)
            # What is held is g_j * b_j / B, and b_j |g_j|^2 is wanted.
            weighted_square_norms += square_norm(self._held.local) * total**2 / len(group)
            gradient += self._held.local
        self._held.local.copy_(gradient)
        measured = self._gains.measure(gradient, crew) if self._gains is not None else ()
        finite = self._apply(loss_sum)
        count, weighted_square_norms = crew.total([float(len(groups)), weighted_square_norms])
        if finite and count >= 2:
            crew.record(
                NoiseMeasured(
                    pilot=self._index,
                    step=step,
                    samples_seen=batch.position,
                    groups=int(count),
                    samples=total,
                    weighted_square_norms=weighted_square_norms,
                    mean_square_norm=square_norm(self._held.local),
                )
            )
        if finite and measured:
            crew.record(GainMeasured(pilot=self._index, step=step, gains=measured))
        return finite

    def _apply(self, loss_sum: float, *, learns: bool = True, tries: int | None = None) -> bool:
        """Let the residuals follow, exchange and learn, unless the loss of some worker says that it is over.

        Args:
            loss_sum: of this worker.
            learns: False where gradients overflowed in fp16: the step is passed over, as in training.
            tries: see `_plain_step`.
        """
        if not math.isfinite(self._ground.crew.total([loss_sum])[0]):
            return False
        if not learns:
            return True
        if self._gains is not None:
            self._gains.follow(self._held.local)
        if self._trials is not None and tries is not None:
            self._try_exchange(self._trials, tries)
        self._held.release()
        self._optimizer.step()
        return True

    def _try_exchange(self, trials: ExchangeTrials, step: int) -> None:
        """Beside the step, on the time that trials may take."""
        crew = self._ground.crew
        begun_s = crew.elapsed_s()
        for tried in trials.follow(self._held.local, crew, pilot=self._index, step=step):
            crew.record(tried)
        self._tried_s += crew.elapsed_s() - begun_s

    def _groups(self, batch: GlobalBatch) -> list[MicroBatch]:
        """Return this worker's micro-batches, cut further so that all workers together have about ``noise_groups``.

        At least two samples a group: BatchNorm cannot normalise one alone. With BatchNorm the statistics of smaller
        groups are noisier, which counts as gradient noise here as it does in a run of many workers.
        """
        context, schedule = self._ground.crew.context, self._ground.schedule
        wanted = max(1, schedule.noise_groups // context.world_size)
        parts = self._ground.reader.cut(batch, context.rank)
        pieces = max(1, wanted // max(1, len(parts)))
        return [
            MicroBatch(epoch=part.epoch, indices=piece.tolist())
            for part in parts
            for piece in np.array_split(np.asarray(part.indices), max(1, min(pieces, len(part) // 2)))
        ]

    def _evaluate(self, step: int, epoch: float) -> Ending | None:
        """Judge the model; how that ends the pilot, if it does."""
        ground, context = self._ground, self._ground.crew.context
        if self._local is None:
            average_buffers(self._model, 1 / context.world_size, context.world_size)
        try:
            with nullcontext() if self._local is None else self._local.averaged():
                metrics = evaluate(
                    ground.task,
                    self._model,
                    ground.evaluation,
                    shares=[1.0] * context.world_size,
                    rank=context.rank,
                    device=context.device,
                )
        except RunFailed:  # a metric that is not finite, the same on all ranks
            return "diverged"
        reached = ground.task.target.reached(metrics)
        ground.crew.record(
            PilotEvaluation(pilot=self._index, step=step, epoch=epoch, metric=metrics[ground.task.target.metric])
        )
        return "target" if reached else None


def square_norm(flat: Tensor) -> float:
    """``|flat|^2``, summed in double precision."""
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2


class LocalPilot:
    """Steps of one such pilot. Built and called by all ranks together.

    Args:
        crew: the workers.
        sync: how they put together what they learn.
        loss: the model with its loss; now the same on all of them.
        optimizer: this worker's own.
        reader: of the samples.
        shares: samples of each worker in a step.
    """

    def __init__(
        self,
        crew: ProbeGroup,
        sync: Synchronization,
        *,
        loss: LossModule,
        optimizer: Optimizer,
        reader: BatchReader,
        shares: Sequence[int],
    ) -> None:
        context = crew.context
        stopwatch = make_stopwatch(context.device)
        step = FusedStep(
            module=loss,
            reader=reader,
            stopwatch=stopwatch,
            pace=Slowdown(),
            norms=sync.name == "selsync",
            counts="alone",
        )
        model: nn.Module = loss.model
        synchroniser = make_synchroniser(
            context.spec.model_copy(update={"sync": sync}),
            model,
            optimizer,
            device=context.device,
            clock=context.clock,
            stopwatch=stopwatch,
            dataset_size=len(reader.dataset),
        )
        if synchroniser is None:
            raise BadInput(
                f"a pilot with {sync.name} needs at least 2 workers, got 1.",
                hint="profile with `workers=2`",
            )
        self._crew, self._step, self._optimizer, self._shares = crew, step, optimizer, tuple(shares)
        self._synchroniser = synchroniser
        self._steps = 0

    def step(self, parts: Sequence[MicroBatch]) -> bool:
        """Compute, learn, and average if it is time to; False where the loss of any worker is not finite."""
        trace = self._step.run(parts, sum(self._shares), None)
        if not math.isfinite(self._crew.total([float(trace.loss_sum)])[0]):
            return False
        self._optimizer.step()
        self._steps += 1
        self._synchroniser.after(self._steps, trace, self._shares)
        return True

    def averaged(self) -> AbstractContextManager[None]:
        """The model is the average of all workers' inside."""
        return self._synchroniser.averaged()

    def synchronised(self) -> int:
        """Steps that ended in an average, since this was asked last."""
        told = self._synchroniser.event(self._steps).get("sync", {})
        return int(told.get("synchronised", 0))
