"""What every rank concludes from the same numbers after a control period: shares, exchange and learning rate."""

from __future__ import annotations

from dataclasses import replace

from hetopt.core.errors import RunFailed
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.paired_trials import try_twins
from hetopt.trainer.statistics import Period
from hetopt.trainer.training import Training


def conclude(training: Training, period: Period) -> None:
    """What every rank concludes from the same numbers: shares, exchange and learning rate from now on.

    Raises:
        RunFailed: the workers do not train the same model in the same way any more.
    """
    if period.drifted is not None:
        what, ranks = period.drifted
        raise RunFailed(
            f"{workers(ranks)} has {what} than most workers at step {training.engine.step}.",
            hint="the task's model, optimizer and schedule must do the same on every worker: nothing in them may "
            "depend on the rank, the time or a random number of their own",
        )
    if training.adaptive_scale is not None and (moments := period.noise()) is not None:
        training.adaptive_scale = training.adaptive_scale.after(moments)
    engine = training.engine
    if training.ended() is None:
        engine.steer(
            period,
            epoch=training.epoch,
            learning_rate=float(training.optimizer.param_groups[0]["lr"]),
            steps_left=training.milestones.steps_left(engine.step, training.feed.position),
        )
        _try_twins(training)
        _settle(training)
    if engine.share(period, training.feed.cursor.epoch):
        training.milestones = replace(
            training.milestones, global_batch_size=sum(training.feed.drawn(training.balance.shares))
        )


def _settle(training: Training) -> None:
    """Where averages of parameters promise to reach the target clearly sooner, that is how the run goes on."""
    promise = None if training.steering is None else training.steering.promise
    if promise is None:
        return
    begun_s = training.context.clock()
    settled = training.settle(promise)
    training.context.events.write(
        "sync_settled",
        step=settled.step,
        every_steps=settled.every_steps,
        fragments=settled.fragments,
        compressor=settled.compressor,
        stretch=settled.stretch,
        stop=training.milestones.stop.model_dump(exclude_none=True),
        reason=promise.reason,
        took_s=round(training.context.clock() - begun_s, 6),
    )


def _try_twins(training: Training) -> None:
    """Where it is worth knowing whether thin exchanges would hold training back."""
    context, steering = training.context, training.steering
    ratio = None if steering is None else steering.try_ratio
    if steering is None or ratio is None:
        return
    begun_s = context.clock()
    verdict = try_twins(training, ratio)
    steering.heard(verdict)
    took_s = round(context.clock() - begun_s, 6)
    context.events.write("twins_tried", step=training.engine.step, ratio=ratio, says=verdict.says, took_s=took_s)
