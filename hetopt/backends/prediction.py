"""Prediction of a run on the profiled machine: how it divides among workers, what they exchange, and what is assumed.

Bytes and collectives of every compressor that a run may use are known exactly (`hetopt.core.comm.payload_bytes`); what
the profile did not measure of one is assumed to be nothing, and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetopt.core import formatting
from hetopt.core.batch_partition import WorkerTime, first_shares, minimum_local_batch, solve_shares
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.cost import Operation, Primitive
from hetopt.core.comm.options import (
    IDENTITY,
    ROUNDED,
    Candidates,
    operations_of,
    timed_as,
)
from hetopt.core.errors import BadInput
from hetopt.core.memory import memory_limit_bytes
from hetopt.core.profile import LOCAL
from hetopt.core.run_rules import CONTROLLERS
from hetopt.core.run_spec import Compression, RunSpec, WorkerSpec
from hetopt.core.training_laws import LEAST_GAIN, MOST_LOST, step_inflation
from hetopt.optimizer.convergence.compression_penalty import steps_in_words
from hetopt.optimizer.convergence.convergence import precision_loss
from hetopt.optimizer.fit import (
    MEASURED_LINK_LOG_SD,
    CompressorLine,
    FittedDevice,
    FittedModel,
    LinkModel,
    fit,
    times_as_long,
)
from hetopt.optimizer.plan import Plan, Prediction, Range
from hetopt.optimizer.recommendation.candidates import spread
from hetopt.optimizer.recommendation.recommend import steps_model
from hetopt.optimizer.search.exchange_menu import gain_of
from hetopt.optimizer.search.forecast import evaluations
from hetopt.optimizer.step_time.local_options import communication
from hetopt.optimizer.step_time.model import RUN_TO_RUN_LOG_SD, contention_reach, learned_shape
from hetopt.optimizer.step_time.own_work import FORETOLD_LOG_SD, own_work
from hetopt.optimizer.step_time.step_time import NO_OVERLAP, Overlap, step_time

AGENT_S = 1.9
"""Processor seconds of torchrun's agent until it starts its workers, almost all of it importing torch."""

WORKER_S = 3.0
"""Processor seconds of a worker until its first step, where the profile does not say."""

STARTUP_S = AGENT_S + WORKER_S
"""Seconds of starting processes of this machine, where the profile does not say; recorded profiles say 4.0, 4.4 and 5.4
s."""

STARTUP_LOG_SD = 0.15

HOST_LINK = LinkModel(latency_s=5e-5, bytes_per_s=1e9)
"""Link of workers of one host over the loopback interface, where the profile holds no measurement."""

MEMORY_FRACTION = 0.9
"""Part of the machine's memory that workers may use."""


@dataclass(frozen=True, kw_only=True)
class PlacedRun:
    """A run with the workers of one backend, and its prediction there.

    Attributes:
        run: spec of the run.
        prediction: its time and cost.
        notes: sentences on what was assumed; empty: nothing.
    """

    run: RunSpec
    prediction: Prediction
    notes: tuple[str, ...]


def begun_shares(run: RunSpec, shares: Sequence[int], *, least: int = 1) -> tuple[int, ...]:
    """Return the local batch sizes, by rank, that the run's batch policy begins with if ``shares`` would be best.

    Args:
        run: spec of the run that is to begin, whose batch policy decides.
        shares: the best local batch size of each worker, in samples, by rank.
        least: samples to which the plan's own shares are raised, 1 if the batch is too small for that; shares of
            other policies may be smaller.

    Raises:
        BadInput: the policy cannot divide the batch among so many workers.
    """
    workers = tuple(WorkerSpec(host=LOCAL, type=LOCAL, local_batch_size=samples) for samples in shares)
    minimum = minimum_local_batch(least, sum(shares), len(shares))
    return first_shares(run.model_copy(update={"workers": workers}), minimum=minimum)


def division(model: FittedModel, workers: int) -> tuple[FittedDevice, float]:
    """Return the profiled device with at least ``workers`` a host (else the most), and the factor on its step times.

    Of the measured numbers of workers, the least that is enough serves, with a factor of 1. More workers than were ever
    measured at a time share the cores, and the factor is their number over the measured one.

    Args:
        model: fitted to the profile.
        workers: number of workers on the host.
    """
    alike = [fitted for fitted in model.devices if fitted.device.type == model.reference.device.type]
    fitting = [fitted for fitted in alike if fitted.device.workers_per_host >= workers]
    if fitting:
        return min(fitting, key=lambda fitted: fitted.device.workers_per_host), 1.0
    nearest = max(alike, key=lambda fitted: fitted.device.workers_per_host)
    return nearest, workers / nearest.device.workers_per_host


@dataclass(frozen=True, kw_only=True)
class SmallWorkers:
    """Workers of one thread each that share a machine's processors, and how long they really compute there.

    Attributes:
        model: fitted to the job's profile.
        fitted: the profiled division of the host that is most like one of them.
        cpus: number of processors that they share.
        processors: number of places where they compute: those processors, or 1 for one GPU.
        workers: number of workers.
    """

    model: FittedModel
    fitted: FittedDevice
    cpus: int
    processors: int
    workers: int

    @classmethod
    def of(cls, model: FittedModel, cpus: int, workers: int) -> SmallWorkers:
        """Return ``workers`` workers on ``cpus`` processors, timed by the profiled device with the fewest threads."""
        alike = [fitted for fitted in model.devices if fitted.device.type == model.reference.device.type]
        fitted = min(
            alike, key=lambda candidate: (candidate.device.threads_per_worker, -candidate.device.workers_per_host)
        )
        # Workers that do not know of each other all see the first GPU, and take turns on it.
        processors = 1 if fitted.device.kind == "cuda" else cpus
        return cls(model=model, fitted=fitted, cpus=cpus, processors=processors, workers=workers)

    @property
    def on_gpu(self) -> bool:
        """True if the workers compute on a GPU."""
        return self.fitted.device.kind == "cuda"

    @property
    def alone(self) -> WorkerTime:
        """The computing time of one worker with a processor to itself, in seconds a step.

        What samples take was spread over the threads of the device that was measured; fixed work is one thread's.
        """
        line = self.fitted.step_time
        return WorkerTime(fixed_s=line.fixed_s, per_sample_s=line.per_sample_s * self._threads)

    def work_s(self, samples: int) -> float:
        """Return the processor seconds that a worker alone needs for ``samples`` samples, by near measurements."""
        fixed_s = self.fitted.step_time.fixed_s
        return fixed_s + max(0.0, self.fitted.time_s(samples) - fixed_s) * self._threads

    @property
    def crowding(self) -> float:
        """The factor, at least 1, by which work that all workers do at once takes longer: workers per processor."""
        return max(1.0, self.workers / self.processors)

    @property
    def largest_batch(self) -> int | None:
        """The largest local batch (samples) that fits into memory; None: memory was not measured or does not grow.

        On a GPU it is the profile's; on the CPU the workers share the machine's memory.

        Raises:
            BadInput: not even one sample a worker fits into the machine's memory.
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
    compute_s: Sequence[float],
    exchange: PredictedExchange,
    *,
    compute_log_sd: float,
    run_log_sd: float = 0.0,
    jitter: float = 0.0,
    evaluation_s: float,
    startup_s: float,
    exchanges_on_processors: bool = False,
) -> Prediction:
    """Return the predicted time to a plan's goal, from workers' compute seconds of a step and the exchange; for 0 USD.

    Medians are for a machine that nobody else uses. Upper ends of intervals are widened by the contention that was
    seen (`contention_reach`), and lower ends for the part that was timed by wall clock.

    Args:
        model: fitted to the plan's profile.
        plan: plan for its goal and its global batch.
        compute_s: seconds that each worker computes in a step.
        exchange: predicted exchange of each step, which may also lengthen the way to a target.
        compute_log_sd: standard deviation of the log of (true / predicted) computing time.
        run_log_sd: the same of whole steps, from run to run.
        jitter: relative scatter of computing from step to step.
        evaluation_s: seconds of one evaluation by all workers.
        startup_s: seconds from the request to the first step, on the wall.
        exchanges_on_processors: whether exchanges were timed between workers of this machine, on the wall.
    """
    step = step_time(
        compute_s,
        exchange_s=exchange.exchange_s,
        compress_s=exchange.compress_s,
        jitter=jitter,
        overlap=exchange.overlap,
    )
    compute_share = step.compute_s / step.step_time_s
    step_log_sd = math.hypot(run_log_sd, compute_share * compute_log_sd, (1 - compute_share) * exchange.log_sd)
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
    """Return an interval of time with the upper end times ``reach``, and the lower end less for its part ``on_wall``.

    Args:
        interval: seconds on a machine without contention.
        on_wall: part of it that was timed by wall clock, 0 to 1, and may have been ``reach`` times too long.
        reach: wall over processor time that contention reaches, at least 1.
    """
    shorter = 1 - on_wall * (1 - 1 / reach)
    return interval.model_copy(update={"low": shorter * interval.low, "high": reach * interval.high})


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """The group of workers that exchanges gradients on a backend, with timings of its links and compressors.

    Attributes:
        model: fitted to the job's profile.
        workers: number of workers in the group.
        link: returns one hop of a primitive; None: as it was profiled between workers of the machine.
        compressors: timings of compressors, on workers like these, by name.
        overlap: returns how computing hides an exchange with a compressor; workers whose exchange needs the very
            processors that they compute on hide nothing.
        crowding: factor on a worker's own work before an exchange.
        together: factor on work that all of them do at once, between the messages of a sum by slices and after them.
        steered_log_sd: standard deviation of the log of (true / predicted) time where the exchange changes on the way.
    """

    model: FittedModel
    workers: int
    link: Callable[[Primitive], LinkModel] | None
    compressors: Mapping[str, CompressorLine]
    overlap: Callable[[str], Overlap] = lambda compressor: NO_OVERLAP
    crowding: float = 1.0
    together: float = 1.0
    steered_log_sd: float = FORETOLD_LOG_SD

    def operations(self, compression: Compression) -> tuple[Operation, ...]:
        """Return the collective operations, such as all-reduce, of one exchange with a compression, in order.

        Raises:
            BadInput: the compression does not go together, or cannot serve so many workers.
        """
        job = self.model.profile.job
        return operations_of(compression, job.parameters, workers=self.workers, shapes=job.parameter_shapes or None)

    def exchange(self, compression: Compression) -> tuple[float, float]:
        """Return the seconds that links need for one exchange, without waiting, and their relative standard deviation.

        Errors of the operations are taken to be the same, and add up.

        Raises:
            BadInput: as of `operations`.
        """
        link = self.link or (lambda primitive: self.model.host_links.get(primitive, HOST_LINK))
        hops = [(link(operation.primitive), operation.terms()) for operation in self.operations(compression)]
        total_s = sum(link.time_s(terms.messages, terms.traffic_bytes) for link, terms in hops)
        if total_s <= 0:
            return total_s, MEASURED_LINK_LOG_SD
        return total_s, sum(link.sd_s(terms.messages, terms.traffic_bytes) for link, terms in hops) / total_s

    def compress_s(self, compression: Compression) -> float:
        """Return a worker's seconds of compressing and decompressing in one exchange; 0: not timed, nor predictable."""
        device, numel = self.model.reference.device, self.model.profile.job.parameters
        work = own_work(compression, self.compressors, numel=numel, copy_bytes_per_s=device.copy_bytes_per_s)
        if work is None:
            return 0.0
        return (self.together if compression.name in ROUNDED else self.crowding) * work.time_s(self.workers)

    def gain(self, compression: Compression) -> float:
        """Return the retained gradient energy, the share of its squared norm that is sent; 1 if not measured."""
        known = self.measured_gain(compression)
        return 1.0 if known is None else known

    def measured_gain(self, compression: Compression) -> float | None:
        """Return the retained gradient energy, the share of its squared norm that is sent; None if not measured."""
        if METHODS[compression.name].by_ratio and (measured := self.model.gain.log_ratios):
            # The smallest gain that was measured counts for ratios below.
            compression = compression.model_copy(update={"ratio": max(compression.ratio, math.exp(measured[0]))})
        return gain_of(self.model, compression)

    def is_assumed(self, compression: Compression) -> bool:
        """Return whether a compression's time on a worker was not profiled; False for dense gradients."""
        return compression.name != IDENTITY and timed_as(compression) not in self.compressors


@dataclass(frozen=True, kw_only=True)
class PredictedExchange:
    """The predicted gradient exchange of a run: compression, seconds per step, overlap, gain and uncertainty.

    Attributes:
        compression: what an exchange sends.
        exchange_s: seconds that links need, mean over steps with and without an exchange.
        compress_s: seconds that a worker compresses and decompresses, mean over steps likewise.
        overlap: how computing hides the exchange.
        gain: retained gradient energy, 0 to 1.
        log_sd: standard deviation of the log of (true / predicted) time of the exchange alone.
        notes: sentences on what was assumed.
        stretch: factor on the steps to a target, over those of summing gradients in every step.
        stretch_log_sd: standard deviation of its log.
    """

    compression: Compression
    exchange_s: float
    compress_s: float
    overlap: Overlap
    gain: float
    log_sd: float
    notes: tuple[str, ...]
    stretch: float = 1.0
    stretch_log_sd: float = 0.0


def predict_exchange(run: RunSpec, group: ExchangeGroup, *, compute_s: float, to_target: bool) -> PredictedExchange:
    """Predict a run's gradient exchange per step; where policies choose, that of the quickest progress.

    Args:
        run: spec of the run, as it will be started.
        group: the run's workers.
        compute_s: seconds that the slowest worker computes in a step.
        to_target: whether the run ends at a target, so that what is held back costs steps.

    Raises:
        BadInput: a compression cannot serve so many workers.
    """

    def time_per_progress_s(compression: Compression) -> float:
        step = step_time(
            [compute_s],
            exchange_s=group.exchange(compression)[0],
            compress_s=group.compress_s(compression),
            overlap=group.overlap(compression.name),
        )
        return step.step_time_s * _slowdown(run, group, compression)

    chosen = run.compression if run.is_local else min(_candidates(run, group), key=time_per_progress_s)
    exchange_s, log_sd = group.exchange(chosen)
    if group.is_assumed(chosen):
        log_sd = FORETOLD_LOG_SD
    elif group.workers > 1 and not run.is_local and (run.ratio_policy, run.collective_policy) != ("fixed", "fixed"):
        log_sd = max(log_sd, group.steered_log_sd)
    every_step = PredictedExchange(
        compression=chosen,
        exchange_s=exchange_s,
        compress_s=group.compress_s(chosen),
        overlap=group.overlap(chosen.name),
        gain=group.gain(chosen),
        log_sd=log_sd,
        notes=tuple(_notes(run, chosen, group, to_target=to_target)),
    )
    if run.is_local:
        return _local_sgd_exchange(run, group, every_step, to_target=to_target)
    stretch, stretch_log_sd = group.model.losses.stretch(chosen, group.workers) if to_target else (1.0, 0.0)
    return replace(every_step, stretch=stretch, stretch_log_sd=stretch_log_sd)


def _local_sgd_exchange(
    run: RunSpec, group: ExchangeGroup, every_step: PredictedExchange, *, to_target: bool
) -> PredictedExchange:
    """Return the mean exchange of local SGD workers, over steps that average parameters and steps that do not.

    Args:
        run: spec of the run, which averages parameters.
        group: the run's workers.
        every_step: exchange of a step that averages.
        to_target: whether the run ends at a target, so that rare averages cost steps.
    """
    gate = group.model.convergence.local
    averaging = communication(
        run.sync,
        dataset_size=group.model.profile.job.dataset_size,
        global_batch_size=run.global_batch_size,
        measured=gate.measured_share(run.sync),
    )
    penalty, counts = gate.penalty(run.sync), to_target and averaging.share > 0
    stretch, stretch_log_sd = 1.0, 0.0
    if counts:
        stretch, stretch_log_sd = group.model.losses.stretch(run.compression, group.workers)
        stretch *= float(penalty.inflation(averaging.share, group.workers))
        stretch_log_sd = math.hypot(stretch_log_sd, float(penalty.log_sd(averaging.share, group.workers)))
    words = steps_in_words(penalty, averaging.share, group.workers, counts=counts)
    return replace(
        every_step,
        exchange_s=averaging.share * every_step.exchange_s,
        compress_s=averaging.share * every_step.compress_s,
        overlap=NO_OVERLAP,
        log_sd=math.hypot(averaging.log_sd, every_step.log_sd),
        notes=(averaging.note, words, *every_step.notes),
        stretch=stretch,
        stretch_log_sd=stretch_log_sd,
    )


def _candidates(run: RunSpec, group: ExchangeGroup) -> Iterable[Compression]:
    """Return the compressions that the run may use, as far as its policies choose."""
    asked = run.compression
    candidates = Candidates(
        asked=asked,
        chooses_collective=run.collective_policy == "cheapest",
        numel=group.model.profile.job.parameters,
        workers=group.workers,
        rounded_s={name: group.compress_s(Compression(name=name)) for name in ROUNDED},
    )
    if group.workers > 1 and run.ratio_policy == "auto":
        # Thinner ones need a trial that shows them to be harmless, which nobody can foresee.
        ways = (option.compression for option in candidates.all)
        return [way for way in ways if _slowdown(run, group, way) <= 1 + MOST_LOST]
    if group.workers > 1 and run.weighs_ways:
        ungained = [option.compression for option in candidates.all if option.gain is None]
        return [way for way in ungained if group.gain(way) >= LEAST_GAIN] or ungained
    if group.workers > 1 and run.collective_policy == "cheapest" and METHODS[asked.name].by_ratio:
        return [option.compression for option in candidates.at(asked.ratio)]
    return [asked]


def _slowdown(run: RunSpec, group: ExchangeGroup, compression: Compression) -> float:
    """Return the steps over those of dense training, as the run itself assumes them before it has measured anything."""
    more = step_inflation(max(group.gain(compression), 1e-9), run.slowdown_coefficient)
    return more * group.model.losses.stretch(compression, group.workers)[0]


def _notes(run: RunSpec, chosen: Compression, group: ExchangeGroup, *, to_target: bool) -> Iterator[str]:
    """Yield sentences on what the prediction of an exchange assumes: who decides, and what was not profiled.

    Nothing for one worker.
    """
    if group.workers == 1:
        return
    if run.ratio_policy != "fixed" and not run.is_local:
        is_whole = chosen.name == IDENTITY
        sent = "sending everything" if is_whole else formatting.compression(chosen.name, chosen.ratio)
        yield (
            f"How much is sent is decided while training goes on ({run.ratio_policy}: "
            f"{CONTROLLERS[run.ratio_policy]}); the prediction is for {sent} in every step."
        )
    if group.is_assumed(chosen):
        counted = "predicted by another compressor or by copying" if group.compress_s(chosen) else "nothing is counted"
        yield f"What {chosen.name} costs a worker was not profiled: {counted}."
    if to_target and group.measured_gain(chosen) is None and not run.is_local:
        yield f"What {chosen.name} loses was not profiled: the steps to the target are those of dense training."


UNMEASURED_DIVISION_LOG_SD = 0.2
"""Standard deviation of the log that is added where the host was never measured divided among so many workers."""


def predict_on_local(plan: Plan, slowdowns: Sequence[float] | None) -> PlacedRun:
    """Map a plan's run onto workers of the profiled machine and predict it; nothing is started.

    Global batch, compression, goal and seed are kept. Shares are solved anew for these workers, each slowed down by its
    factor.

    Args:
        plan: what to run.
        slowdowns: a factor of 1 or more for each worker: its computation takes so many times as long. None: as many
            workers at full speed as the plan has, but no more than the machine has logical CPUs.

    Raises:
        BadInput: there are more workers than samples in a batch, or a compression cannot serve so many.
    """
    model = fit(plan.profile, plan.run.precision)
    cpus = plan.profile.host.logical_cpus
    if slowdowns is None:
        slowdowns = (1.0,) * min(len(plan.run.workers), cpus)
    count = len(slowdowns)
    device, crowding = division(model, count)
    line = device.step_time
    workers = [
        WorkerTime(
            fixed_s=_slowed_s(device, line.fixed_s, crowding, slowdown),
            per_sample_s=line.per_sample_s * (crowding + slowdown - 1),
            floor_s=_slowed_s(device, line.floor_s, crowding, slowdown),
        )
        for slowdown in slowdowns
    ]
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
    group = ExchangeGroup(
        model=model,
        workers=count,
        link=None,
        compressors={**model.reference.compressors, **device.compressors},
        # On CPUs the exchange takes the cores that backward would hide it behind.
        overlap=learned_shape(model).overlap if device.device.kind == "cuda" else lambda compressor: NO_OVERLAP,
    )
    exchange = predict_exchange(run, group, compute_s=max(compute_s), to_target=plan.goal.ends == "target")
    # Measured with the host to itself. Each worker evaluates in proportion to its share, without its slowdown.
    samples = min(device.largest_measured, model.whole_host.largest_measured)
    divided = crowding * times_as_long(device.time_s, model.whole_host.time_s, samples)
    prediction = predict_run(
        model,
        plan,
        compute_s,
        exchange,
        compute_log_sd=math.hypot(device.step_time.log_sd, UNMEASURED_DIVISION_LOG_SD if crowding != 1 else 0.0),
        run_log_sd=RUN_TO_RUN_LOG_SD,
        jitter=device.step_time.jitter,
        evaluation_s=(plan.profile.evaluation_s or 0.0) * divided * max(shares) / plan.chosen.global_batch_size,
        startup_s=plan.profile.startup_s or STARTUP_S,
        exchanges_on_processors=True,
    )
    return PlacedRun(run=run, prediction=prediction, notes=exchange.notes)


def _slowed_s(fitted: FittedDevice, step_s: float, crowding: float, slowdown: float) -> float:
    """Return the seconds of a slowed step, ``crowding * t + (slowdown - 1) (t - t_optimizer)``: the trainer stretches
    what a worker computed, not its wait for a core, and not the optimizer's update."""
    return max(0.0, step_s * (crowding + slowdown - 1) - (slowdown - 1) * fitted.optimizer_s)


def finish_times_s(work_s: Sequence[float], processors: int) -> list[float]:
    """Return when each worker ends its ``work_s``, in seconds, if all begin at once and share ``processors`` equally.

    Processor sharing: of ``n`` workers that still compute, each advances at ``min(1, processors / n)`` of the speed
    that it has alone. Between two ends that speed is constant, and the least work ends first, so

        f_k = f_(k-1) + (w_k - w_(k-1)) max(1, (n - k) / processors),    w ascending, k from 0

    Args:
        work_s: seconds of each worker's work with a processor to itself.
        processors: number of processors; a worker uses one at a time.
    """
    order = sorted(range(len(work_s)), key=lambda i: work_s[i])
    finish = [0.0] * len(work_s)
    now_s = before_s = 0.0
    for place, i in enumerate(order):
        now_s += (work_s[i] - before_s) * max(1.0, (len(order) - place) / processors)
        before_s = work_s[i]
        finish[i] = now_s
    return finish


def least_factor(wanted_s: Sequence[float], work_s: Sequence[float], processors: int, headroom: float) -> float:
    """Return the least factor >= 1 on ``wanted_s`` for ``work_s`` to end ``headroom`` times sooner on ``processors``.

    Each worker ends ``headroom`` times sooner than its stretched time. As nobody ends before its own work is done, and
    the processors are busy until the last one ends, this also leaves ``1 - 1 / headroom`` of all processors free.

    Args:
        wanted_s: seconds that each worker's computation shall take, before stretching; above 0.
        work_s: seconds that it takes alone on a processor.
        processors: number of processors that the workers share.
        headroom: factor of at least 1.
    """
    finish = finish_times_s(work_s, processors)
    return max(1.0, max(headroom * end / wanted for end, wanted in zip(finish, wanted_s, strict=True)))


def rounded_up(factor: float) -> float:
    """Return a factor above 0 rounded up to two significant digits, so that the printed number is the used number."""
    unit = math.pow(10.0, math.floor(math.log10(factor)) - 1)
    return float(f"{math.ceil(factor / unit - 1e-9) * unit:.2g}")
