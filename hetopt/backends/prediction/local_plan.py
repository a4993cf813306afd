"""Maps a plan onto workers of this machine, and predicts what `hetopt launch --on local` will take there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetopt.backends.prediction.hosting import (
    HOST_LINK,
    STARTUP_S,
    Foreseen,
    Mapped,
    Meeting,
    begun_shares,
    division,
    foresee,
    no_overlap,
    predict_run,
)
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.profile import LOCAL
from hetopt.core.run_spec import WorkerSpec
from hetopt.optimizer.fit import FittedDevice, FittedModel, fit, times_as_long
from hetopt.optimizer.plan import Plan, Prediction
from hetopt.optimizer.step_time.profiled import RUN_TO_RUN_LOG_SD, learned_shape
from hetopt.optimizer.step_time.step_time import Breakdown, step_time

UNMEASURED_DIVISION_LOG_SD = 0.2
"""Added when the host was never measured divided among so many workers."""


def predict_on_local(plan: Plan, slowdowns: Sequence[float] | None) -> Mapped:
    """The plan's run as workers of the machine that was profiled, and what it should take there.

    Global batch, compression, goal and seed are kept. Shares are solved anew for the workers that there are, each
    slowed down by its factor.

    Args:
        plan: what to run.
        slowdowns: one for each worker, 1 or more: its computation takes so many times as long. Absent: as many workers
            at full speed as the plan has, but no more than the machine has logical CPUs.

    Raises:
        BadInput: more workers than samples in a batch, or a compression that cannot serve so many workers.
    """
    model = fit(plan.profile, plan.run.precision)
    cpus = plan.profile.host.logical_cpus
    if slowdowns is None:
        slowdowns = (1.0,) * min(len(plan.run.workers), cpus)
    count = len(slowdowns)
    device, crowding = division(model, count)
    workers = [_worker_time(device, crowding, slowdown) for slowdown in slowdowns]
    best = solve_shares(workers, plan.chosen.global_batch_size).local_batch_sizes
    shares = begun_shares(plan.run, best, least=plan.profile.job.least_local_batch_size)
    run = plan.run.model_copy(
        update={
            "workers": tuple(
                WorkerSpec(
                    host=f"{LOCAL}-{rank}",
                    type=LOCAL,
                    local_batch_size=samples,
                    slowdown=slowdown,
                    threads=max(1, cpus // count) if device.device.kind == "cpu" else None,
                    max_local_batch_size=device.largest_batch or None,
                )
                for rank, (samples, slowdown) in enumerate(zip(shares, slowdowns, strict=True))
            )
        }
    )
    compute_s = [
        _slowed_s(device, device.time_s(samples), crowding, slowdown)
        for samples, slowdown in zip(shares, slowdowns, strict=True)
    ]
    meeting = Meeting(
        model=model,
        workers=count,
        link=lambda primitive: model.host_links.get(primitive, HOST_LINK),
        compressors={**model.reference.compressors, **device.compressors},
        # On CPUs the exchange takes the cores that backward would hide it behind.
        overlap=learned_shape(model).overlap if device.device.kind == "cuda" else no_overlap,
    )
    exchange = foresee(run, meeting, compute_s=max(compute_s), to_target=plan.goal.ends == "target")
    step = step_time(
        compute_s,
        exchange_s=exchange.exchange_s,
        compress_s=exchange.compress_s,
        jitter=device.step_time.jitter,
        overlap=exchange.overlap,
    )
    prediction = _prediction(model, device, plan, step, exchange, shares, crowding)
    return Mapped(run=run, prediction=prediction, notes=exchange.notes)


def _worker_time(fitted: FittedDevice, crowding: float, slowdown: float) -> WorkerTime:
    line = fitted.step_time
    return WorkerTime(
        fixed_s=_slowed_s(fitted, line.fixed_s, crowding, slowdown),
        per_sample_s=line.per_sample_s * (crowding + slowdown - 1),
        floor_s=_slowed_s(fitted, line.floor_s, crowding, slowdown),
    )


def _slowed_s(fitted: FittedDevice, step_s: float, crowding: float, slowdown: float) -> float:
    """``crowding * t + (slowdown - 1) (t - t_optimizer)``: the trainer stretches what a worker computed, not its wait
    for a core, and not the optimizer's update."""
    return max(0.0, step_s * (crowding + slowdown - 1) - (slowdown - 1) * fitted.optimizer_s)


def _prediction(
    model: FittedModel,
    fitted: FittedDevice,
    plan: Plan,
    step: Breakdown,
    exchange: Foreseen,
    shares: Sequence[int],
    crowding: float,
) -> Prediction:
    # Measured with the host to itself. Each worker evaluates in proportion to its share, without its slowdown.
    samples = min(fitted.largest_measured, model.whole_host.largest_measured)
    divided = crowding * times_as_long(fitted.time_s, model.whole_host.time_s, samples)
    evaluation_s = (plan.profile.evaluation_s or 0.0) * divided * max(shares) / plan.chosen.global_batch_size
    compute_share = step.compute_s / step.step_time_s
    step_log_sd = math.hypot(
        RUN_TO_RUN_LOG_SD,
        compute_share * math.hypot(fitted.step_time.log_sd, UNMEASURED_DIVISION_LOG_SD if crowding != 1 else 0.0),
        (1 - compute_share) * exchange.log_sd,
    )
    return predict_run(
        model,
        plan,
        step,
        exchange,
        step_log_sd=step_log_sd,
        evaluation_s=evaluation_s,
        startup_s=plan.profile.startup_s or STARTUP_S,
        exchanges_on_processors=True,
    )
