"""Trains the twins of a trial (`hetopt.trainer.policies.ratio.auto`) on this worker, from where training is."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import ErrorFeedback, Turn
from hetopt.trainer.comm.topk import TopK
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.policies.ratio.auto import CHUNK_STEPS, PART, PairedTrial
from hetopt.trainer.policies.ratio.policy import Verdict
from hetopt.trainer.steps.fused_step import DoesNotFit, FusedStep
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import Autocast, LossModule
from hetopt.trainer.steps.stopwatch import make_stopwatch
from hetopt.trainer.task import LEAST_SAMPLES, LearningRate, make_model, make_optimizer
from hetopt.trainer.training import Training


def try_twins(training: Training, ratio: float) -> Verdict:
    """Train both for some steps, and compare; nothing of the training itself changes. Called by all ranks together.

    A worker whose memory does not hold two more models says so by a loss that is not a number.
    """
    context, feed = training.context, training.feed
    samples = [max(LEAST_SAMPLES, share // PART) for share in training.balance.shares]
    cursor = feed.cursor.at(feed.cursor.state())
    reader = BatchReader(
        dataset=training.data.train, device=context.device, seed=context.spec.seed, max_samples=feed.max_samples
    )
    trial = PairedTrial(ratio=ratio)
    verdict: Verdict | None = None
    with torch.random.fork_rng(devices=[context.device] if context.device.type == "cuda" else []):
        twins: tuple[_Twin, ...] = ()
        with suppress(torch.OutOfMemoryError):
            twins = (_Twin(training, reader, None), _Twin(training, reader, ratio))
        while verdict is None:
            steps = [reader.cutting.parts(cursor.take(samples), context.rank) for _ in range(CHUNK_STEPS)]
            losses = [_loss(twin, steps, seed=context.spec.seed + cursor.position) for twin in twins]
            row = [*(losses or [math.nan, math.nan]), float(samples[context.rank])]
            verdict = trial.after(gather_numbers(row, context.world_size))
    return verdict


def _loss(twin: _Twin, steps: Sequence[Sequence[MicroBatch]], *, seed: int) -> float:
    torch.manual_seed(seed)  # both draw alike, where a model draws
    try:
        return twin.train(steps)
    except (DoesNotFit, torch.OutOfMemoryError):
        return math.nan


class _Twin:
    """A copy of the model as it is, and of its optimizer.

    Args:
        training: that is under way.
        reader: of its samples.
        ratio: of the gradient's elements that are learned from in a step, the others later; None: all at once.
    """

    def __init__(self, training: Training, reader: BatchReader, ratio: float | None) -> None:
        context, task = training.context, training.task
        model = make_model(task).to(context.device)
        model.load_state_dict(training.model.state_dict())
        self._optimizer = make_optimizer(task, model)
        rate = LearningRate.of(task, self._optimizer)
        self._optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))  # it keeps what it is given
        rate.apply(self._optimizer, training.epoch, training.learning_rate_scale)
        autocast = Autocast(device_type=context.device.type, precision=context.spec.precision)
        self._step = FusedStep(
            module=LossModule(model, task.loss, autocast),
            reader=reader,
            stopwatch=make_stopwatch(context.device),
            pace=training.pace,
            counts="alone",
        )
        self._thin: tuple[TopK, ErrorFeedback] | None = None
        if ratio is not None and ratio < 1:
            self._thin = TopK(ratio), ErrorFeedback(self._step.flat.numel(), device=context.device)

    def train(self, steps: Sequence[Sequence[MicroBatch]]) -> float:
        """Take these steps; the mean loss over their samples."""
        losses, samples = 0.0, 0
        for parts in steps:
            size = sum(map(len, parts))
            losses += float(self._step.run(parts, size, None).loss_sum)
            samples += size
            if self._thin is not None:
                selection, residual = self._thin
                prepared = residual.prepare(self._step.flat)
                sent = selection.encode(prepared, Turn(Channel()))
                self._step.flat.copy_(sent.dense())
                residual.commit(prepared, sent)
            self._optimizer.step()
        return losses / samples
