"""What every rank concludes from the same numbers after a control period: shares, exchange and learning rate."""

from __future__ import annotations

from dataclasses import replace

from hetopt.core.errors import RunFailed
from hetopt.trainer.announcement import tell_network
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
            f"{workers(ranks)} has {what} than most workers at step {training.runner.step}.",
            hint="the task's model, optimizer and schedule must do the same on every worker: nothing in them may "
            "depend on the rank, the time or a random number of their own",
        )
    if training.adaptive_scale is not None and (moments := period.noise()) is not None:
        training.adaptive_scale = training.adaptive_scale.after(moments)
    _steer(training, period)
    if not training.balance.is_due(period):
        return
    change = training.balance.judge(period, training.feed.cursor.epoch)
    training.runner.log.judged(changed=change is not None)
    if change is not None:
        training.milestones = replace(
            training.milestones, global_batch_size=sum(training.feed.drawn(training.balance.shares))
        )
        training.context.events.write("shares_changed", step=training.runner.step, **change)


def _steer(training: Training, period: Period) -> None:
    if training.steering is None or training.ended() is not None:
        return
    if training.steering.watch(period.traffic):
        _measure_network(training)
    rate = float(training.optimizer.param_groups[0]["lr"])
    change = training.steering.judge(
        period.traffic,
        step=training.runner.step,
        epoch=training.epoch,
        learning_rate=rate,
        steps_left=training.milestones.steps_left(training.runner.step, training.feed.position),
        loss=period.loss,
    )
    if change is not None:
        training.form.follow()
        training.context.events.write("exchange_changed", step=training.runner.step, **change)
    _try_twins(training)
    _settle(training)


def _settle(training: Training) -> None:
    """Where averages of parameters promise to reach the target clearly sooner, that is how the run goes on."""
    assert training.steering is not None
    promise = training.steering.promise
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
    assert training.steering is not None
    context, ratio = training.context, training.steering.try_ratio
    if ratio is None:
        return
    begun_s = context.clock()
    verdict = try_twins(training, ratio)
    training.steering.heard(verdict)
    took_s = round(context.clock() - begun_s, 6)
    context.events.write("twins_tried", step=training.runner.step, ratio=ratio, says=verdict.says, took_s=took_s)


def _measure_network(training: Training) -> None:
    """Again, as it has jumped."""
    assert training.steering is not None
    assert training.form.probe is not None
    timings = training.form.probe.measure()
    training.steering.measured(timings)
    network = training.steering.network
    assert network is not None
    tell_network(
        training.context.events,
        network,
        timings,
        step=training.runner.step,
        beside_s=round(training.steering.beside_s, 7),
    )
