"""What the profiled machine can host: how it divides among workers, and what a whole run of them takes there."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from hetopt.backends.prediction.communication import Foreseen
from hetopt.core import formatting
from hetopt.core.batch_partition import WorkerTime, least_within
from hetopt.core.errors import BadInput
from hetopt.core.local_batch_sizes import first_shares
from hetopt.core.memory import memory_limit_bytes
from hetopt.core.openmp import usable_processors
from hetopt.core.profile import LOCAL, Host
from hetopt.core.run_spec import RunSpec, WorkerSpec
from hetopt.optimizer.convergence.precision_loss import precision_loss
from hetopt.optimizer.fit import FittedDevice, FittedModel, LinkModel
from hetopt.optimizer.plan import Plan, Prediction, Range
from hetopt.optimizer.recommendation.candidates import spread
from hetopt.optimizer.recommendation.recommend import steps_model
from hetopt.optimizer.search.forecast import evaluations
from hetopt.optimizer.step_time.host_level import contention_reach
from hetopt.optimizer.step_time.step_time import Breakdown

AGENT_S = 1.9
"""Processor time of torchrun's agent until it starts its workers, almost all of it importing torch."""

WORKER_S = 3.0
"""Processor time of a worker until its first step, where the profile does not say."""

STARTUP_S = AGENT_S + WORKER_S
"""Starting processes of this machine, where the profile does not say; recorded profiles say 4.0, 4.4 and 5.4 s."""

STARTUP_LOG_SD = 0.15

HOST_LINK = LinkModel(latency_s=5e-5, bytes_per_s=1e9)
"""Workers of one host over the loopback interface, where the profile holds no measurement."""

MEMORY_FRACTION = 0.9
"""Of the machine's memory, for the workers."""


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A run as its workers are on a backend, what it should take there, and what to know to read these numbers."""

    run: RunSpec
    prediction: Prediction
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """Where a run takes place, as far as it may differ from where the profile was taken.

    Attributes:
        processors: logical CPUs that its processes may use.
        operating_system: name and release, as profiles record it.
    """

    processors: int
    operating_system: str

    @classmethod
    def seen(cls) -> Self:
        """The machine that this process is on, and may use."""
        system = f"{platform.system()} {platform.release()}"
        return cls(processors=usable_processors(), operating_system=system)

    def is_profiled(self, host: Host) -> bool:
        """Whether a profile was taken here, as far as it says."""
        return (host.logical_cpus, host.operating_system) == (self.processors, self.operating_system)


def begun_shares(run: RunSpec, shares: Sequence[int], *, least: int = 1) -> tuple[int, ...]:
    """The shares that a run begins with where ``shares`` are the best ones: some batch policies begin with others.

    Args:
        run: which is to begin.
        shares: of its workers.
        least: samples that a worker of the job needs in a step.

    Raises:
        BadInput: the policy cannot share the batch so.
    """
    workers = tuple(WorkerSpec(host=LOCAL, type=LOCAL, local_batch_size=samples) for samples in shares)
    minimum = least_within(least, sum(shares), len(shares))
    return first_shares(run.model_copy(update={"workers": workers}), minimum=minimum)


def division(model: FittedModel, workers: int) -> tuple[FittedDevice, float]:
    """The measured division of the host nearest to so many workers, and how much longer its steps take with them.

    More workers than were ever measured at a time share the cores: each gets a smaller part of them.
    """
    alike = [fitted for fitted in model.devices if fitted.device.type == model.reference.device.type]
    fitting = [fitted for fitted in alike if fitted.device.workers_per_host >= workers]
    if fitting:
        return min(fitting, key=lambda fitted: fitted.device.workers_per_host), 1.0
    nearest = max(alike, key=lambda fitted: fitted.device.workers_per_host)
    return nearest, workers / nearest.device.workers_per_host


@dataclass(frozen=True, kw_only=True)
class SmallWorkers:
    """Workers with one thread each, any number of them on the processors of one machine: what they really take.

    Attributes:
        model: of the job.
        fitted: the part of the profiled host that is most like one of them.
        cpus: processors that they share.
        processors: where they compute: those, or one GPU.
        workers: how many there are.
    """

    model: FittedModel
    fitted: FittedDevice
    cpus: int
    processors: int
    workers: int

    @classmethod
    def of(cls, model: FittedModel, machine: ThisMachine, workers: int) -> SmallWorkers:
        """As many workers on a machine, judged by the part of the profiled host that had the fewest threads."""
        alike = [fitted for fitted in model.devices if fitted.device.type == model.reference.device.type]
        fitted = min(alike, key=lambda one: (one.device.threads_per_worker, -one.device.workers_per_host))
        # Workers that do not know of each other all see the first GPU, and take turns on it.
        processors = 1 if fitted.device.kind == "cuda" else machine.processors
        return cls(model=model, fitted=fitted, cpus=machine.processors, processors=processors, workers=workers)

    @property
    def on_gpu(self) -> bool:
        """Whether they compute on a GPU."""
        return self.fitted.device.kind == "cuda"

    @property
    def alone(self) -> WorkerTime:
        """Computation of one of them with a processor to itself.

        What samples take was spread over the threads of the device that was measured; fixed work is one thread's.
        """
        line = self.fitted.step_time
        return WorkerTime(fixed_s=line.fixed_s, per_sample_s=line.per_sample_s * self._threads)

    def work_s(self, samples: int) -> float:
        """The same for one share, from the nearest measurements rather than from the line through all of them."""
        fixed_s = self.fitted.step_time.fixed_s
        return fixed_s + max(0.0, self.fitted.time_s(samples) - fixed_s) * self._threads

    @property
    def crowding(self) -> float:
        """How much longer something takes that all of them do at once."""
        return max(1.0, self.workers / self.processors)

    @property
    def update_s(self) -> float:
        """The optimizer's step, which all of them do at once after the exchange."""
        return self.fitted.optimizer_s * self.crowding

    @property
    def largest_batch(self) -> int | None:
        """What one worker's part of the memory holds, samples; absent when memory was not measured or does not grow.

        Raises:
            BadInput: not even one sample fits.
        """
        memory, total = self.fitted.memory, self.model.profile.host.memory_bytes
        if memory is None or self.on_gpu:
            return self.fitted.largest_batch
        most = memory.largest_batch(memory_limit_bytes(total, workers=self.workers, fraction=MEMORY_FRACTION))
        if most == 0:
            raise BadInput(
                f"{self.workers} workers need {formatting.bytes_(self.workers * memory.peak_bytes(1))} of memory, "
                "and this "
                f"machine has {formatting.bytes_(total)}.",
                hint="run fewer workers",
            )
        return most

    @property
    def _threads(self) -> int:
        return 1 if self.on_gpu else self.fitted.device.threads_per_worker


def predict_run(
    model: FittedModel,
    plan: Plan,
    step: Breakdown,
    exchange: Foreseen,
    *,
    step_log_sd: float,
    evaluation_s: float,
    startup_s: float,
    exchanges_on_processors: bool = False,
) -> Prediction:
    """The plan's goal in steps of a known time, on a machine that costs nothing.

    The centre is of a machine that nobody else uses, as far as processor time tells. Intervals reach as far as
    contention has been seen to; what was timed on the wall may also have been as much too long.

    Args:
        model: fitted to the plan's profile.
        plan: for its goal and its global batch.
        step: where the time of one step goes.
        exchange: of each of them, by which it takes more steps to a target.
        step_log_sd: standard deviation of the log of (true / predicted) step time.
        evaluation_s: one evaluation by all workers.
        startup_s: from the request to the first step, on the wall.
        exchanges_on_processors: whether exchanges were timed between workers of this machine, on the wall.
    """
    every, batch = plan.run.evaluate_every_epochs, plan.chosen.global_batch_size
    goal = steps_model(model, plan.goal, every)
    stretch, stretch_log_sd = exchange.stretch, exchange.stretch_log_sd
    if plan.goal.ends == "target":
        loss = precision_loss(plan.profile, plan.run.precision)
        stretch, stretch_log_sd = stretch * loss.stretch, math.hypot(stretch_log_sd, loss.log_sd)
    steps, steps_log_sd = stretch * float(goal.steps(batch, exchange.gain)), float(goal.log_sd(batch, exchange.gain))
    steps_log_sd = math.hypot(steps_log_sd, stretch_log_sd)
    count = float(evaluations(steps, batch, every * plan.profile.job.dataset_size))
    training_s = steps * step.step_time_s + count * evaluation_s
    reach = contention_reach(plan.profile)
    exchanged_s = step.communication_s if exchanges_on_processors else 0.0
    on_wall_s = steps * exchanged_s + count * evaluation_s
    training = _reaching(spread(training_s, math.hypot(step_log_sd, steps_log_sd)), on_wall_s / training_s, reach)
    startup = _reaching(spread(startup_s, STARTUP_LOG_SD), 1.0, reach)
    total_s = startup_s + training_s
    return Prediction(
        step_time_s=_reaching(spread(step.step_time_s, step_log_sd), exchanged_s / step.step_time_s, reach),
        compute_s=step.compute_s,
        communication_s=step.communication_s,
        waiting_s=step.waiting_s,
        steps=spread(steps, steps_log_sd),
        steps_source=goal.source,
        training_s=training,
        startup_s=startup_s,
        total_s=Range(
            value=total_s,
            low=total_s - math.hypot(startup_s - startup.low, training_s - training.low),
            high=total_s + math.hypot(startup.high - startup_s, training.high - training_s),
        ),
        cost_usd=Range(value=0, low=0, high=0),
        cost_terms=(),
    )


def _reaching(interval: Range, on_wall: float, reach: float) -> Range:
    """Widen an interval of time by contention, of which a part was timed on the wall."""
    shorter = 1 - on_wall * (1 - 1 / reach)
    return interval.model_copy(update={"low": shorter * interval.low, "high": reach * interval.high})
