"""Workers of a machine whose GPUs are unlike: together they are as fast as so many equal ones.

Worker i takes f_i + c_i b_i for b_i samples. They end together at a level L: ``n b`` samples, with ``r_i = 1 / c_i``,
take

    L = sum(f_i r_i) / sum(r_i) + b n / sum(r_i)

which is the line of a worker that stands for each of the n (`hetopt.core.batch_partition` shares a batch so).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hetopt.core.batch_partition import WorkerTime
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time.transfer import WorkerModel


def worker_of(instance: InstanceType, like: Callable[[InstanceType], WorkerModel]) -> WorkerModel:
    """Return the worker that stands for each worker of a machine, also where its GPUs are unlike.

    Args:
        instance: the machine.
        like: the worker of a machine whose GPUs are alike.
    """
    if not instance.unlike:
        return like(instance)
    count = len(instance.unlike)
    each = [like(replace(instance, accelerator=replace(gpu, count=count), unlike=())) for gpu in instance.unlike]
    rooms = [worker.room for worker in each if worker.room is not None]
    least = min(rooms, key=lambda room: math.inf if room.free_bytes is None else room.free_bytes, default=None)
    return replace(
        max(each, key=lambda worker: worker.log_sd),
        time=standing_for([worker.time for worker in each]),
        unlike=tuple(worker.time for worker in each),
        evaluation_factor=len(each) / math.fsum(1 / worker.evaluation_factor for worker in each),
        compress_factor=max(worker.compress_factor for worker in each),
        room=least,
    )


def standing_for(times: Sequence[WorkerTime]) -> WorkerTime:
    """Return the time of one of as many equal workers that end when these do, within the least one's memory limit."""
    rates = [1 / time.per_sample_s for time in times]
    rate = math.fsum(rates)

    def mean(of: Callable[[WorkerTime], float]) -> float:
        return math.fsum(share * of(time) for share, time in zip(rates, times, strict=True)) / rate

    def least(of: Callable[[WorkerTime], int | None]) -> int | None:
        """Return the samples of the mean worker with which the first worker is at its limit."""
        limits = [(most, time) for time in times for most in [of(time)] if most is not None]
        per_sample_s = len(times) / rate
        return min(
            (max(1, math.floor(most * time.per_sample_s / per_sample_s * (1 + 1e-9))) for most, time in limits),
            default=None,
        )

    fixed_s, floor_s = mean(lambda time: time.fixed_s), max(time.floor_s for time in times)
    return WorkerTime(
        fixed_s=fixed_s,
        per_sample_s=len(times) / rate,
        floor_s=floor_s,
        min_samples=max(time.min_samples for time in times),
        max_samples=least(lambda time: time.max_samples),
        micro_batch=least(lambda time: time.micro_batch),
        once_s=min(mean(lambda time: time.once_s), max(fixed_s, floor_s)),
    )
