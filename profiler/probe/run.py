"""Execution of a probe's schedule, part after part, on all workers."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.profile import Job
from hetopt.core.run_spec import ProbeSchedule
from hetopt.profiler.probe.crew import ProbeGroup, ProbeStopped
from hetopt.profiler.probe.exchange_costs import time_collectives
from hetopt.profiler.probe.facts import (
    WorkCount,
    count_on,
    host_facts,
    model_kind,
    without_fused_layers,
)
from hetopt.profiler.probe.gradient import ExchangeTrials
from hetopt.profiler.probe.pilot import PilotRun
from hetopt.profiler.probe.sweep import Replica, run_sweep, threads
from hetopt.profiler.records import FINISHED, STARTED, EvaluationCost, PrecisionRefused
from hetopt.profiler.schedule import LATER_PASS_SHARE, NETWORK_SHARE
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.sharding import block_facts
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import lacks_units, matrices_in
from hetopt.trainer.task import Task, TaskData, evaluation_sums, least_samples
from hetopt.trainer.tasks.load import load_task

COUNTED_SAMPLES = 2
"""Number of samples that operators and FLOPs are counted on; one alone cannot be normalised across samples."""

EVALUATION_SHARE = 0.05
"""Part of a probe's time that timing one evaluation may take."""

COSTLY_EVALUATION = 0.2
"""Part of a pilot's time from which on one evaluation is too costly; such a pilot is not evaluated."""


def run_probe(context: WorkerContext) -> None:
    """Measure what the run's ``spec.probe`` asks for and log it, unless asked to stop; every rank calls it.

    A probe that is asked to stop returns early, and its log lacks the last event.

    Raises:
        BadInput: the spec has no probe, the task or its data cannot be used, or the task cannot be computed in the
            precision that the spec names.
    """
    schedule = context.spec.probe
    if schedule is None:
        raise BadInput("this run has nothing to measure.", hint="profile with `hetopt profile TASK`")
    task = load_task(context.spec.task)
    data = task.data(Path(context.spec.data_dir) if context.spec.data_dir is not None else None)
    crew = ProbeGroup(context=context, started_s=context.clock())
    with suppress(ProbeStopped):
        _measure(crew, schedule, task, data)


def _measure(crew: ProbeGroup, schedule: ProbeSchedule, task: Task, data: TaskData) -> None:
    """Measure and log all that a schedule asks for, in its order; every rank calls it.

    The order is facts of the job, step times of each sweep, one evaluation, collectives, step times again, pilots as
    far as the time goes (the first one always), step times again. Precisions that the task cannot be computed in are
    left out.

    Raises:
        ProbeStopped: any worker was asked to stop.
        BadInput: the task's model or optimizer cannot be used, or it cannot be computed in the precision that the spec
            names.
    """
    context = crew.context
    replica = Replica.build(task, context.spec, context.device)
    budget_s = schedule.time_limit_s or math.inf
    reader = BatchReader(dataset=data.train, device=context.device, seed=schedule.seed)
    crew.gather([])
    crew.context.events.write(STARTED)
    part = MicroBatch(epoch=0, indices=range(min(COUNTED_SAMPLES, len(data.train))))
    if context.is_leader:
        crew.record(host_facts(context.device))
        crew.record(job_facts(task, context.spec.task, replica, reader, part))
    refused = _refused(crew, schedule, reader, replica, part)
    measured = [
        () if sweep.precision in refused else run_sweep(crew, replica, reader, index, sweep, schedule=schedule)
        for index, sweep in enumerate(schedule.sweeps)
    ]

    def come_back_to_sweeps(replica: Replica) -> None:
        """Time the measured sizes of each sweep again on a replica, for a part of its time; every rank calls it.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        for index, (sweep, sizes) in enumerate(zip(schedule.sweeps, measured, strict=True)):
            later = {"local_batch_sizes": sizes, "time_limit_s": LATER_PASS_SHARE * sweep.time_limit_s}
            run_sweep(crew, replica, reader, index, sweep.model_copy(update=later), schedule=None)

    # In every precision, the last sweep is that of all workers together, as pilots are.
    together = {sweep.precision: sizes for sweep, sizes in zip(schedule.sweeps, measured, strict=True)}
    largest = min((sizes[-1] for sizes in together.values() if sizes), default=0)
    evaluation_s = _evaluation_cost(crew, schedule, task, data, replica, EVALUATION_SHARE * budget_s)
    if schedule.network is not None and context.world_size > 1:
        with threads(schedule.sweeps[-1].threads_per_worker if schedule.sweeps else 1):
            time_collectives(
                crew,
                schedule.network,
                gradient_bytes=replica.gradient.nbytes,
                time_limit_s=NETWORK_SHARE * budget_s,
            )
    come_back_to_sweeps(replica)
    pilot_reader = BatchReader(
        dataset=data.train, device=context.device, seed=schedule.seed, max_samples=largest or None
    )
    trials = (
        ExchangeTrials(schedule.exchanges, replica.shapes, context.device, schedule.seed)
        if schedule.exchanges
        else None
    )
    del replica  # a device may have no room beside a pilot's own
    for index, pilot in enumerate(schedule.pilots):
        if pilot.precision in refused:
            continue
        time_limit_s = max(0.0, min(pilot.time_limit_s, budget_s - crew.elapsed_s()))
        is_costly = evaluation_s / context.world_size > COSTLY_EVALUATION * time_limit_s
        evaluated = schedule.from_checkpoint is None and not is_costly  # from there, no pilot is a run to the target
        if index == 0 or (evaluated and time_limit_s > 0):
            with matrices_in(pilot.precision):
                PilotRun(crew, task, pilot_reader, data.evaluation, schedule, index, trials).run(
                    time_limit_s, evaluated=evaluated
                )
    come_back_to_sweeps(Replica.build(task, context.spec, context.device))
    crew.gather([])
    crew.context.events.write(FINISHED)


def job_facts(task: Task, reference: str, replica: Replica, reader: BatchReader, part: MicroBatch) -> Job:
    """Return a task's facts: parameters, data, batch size, target, and operators and FLOPs counted on ``part``.

    Args:
        task: the task.
        reference: the text that names the task.
        replica: its model is stepped twice; its gradient is overwritten.
        reader: reads the training data.
        part: the few samples to count operators and FLOPs on.

    Raises:
        BadInput: the task says that its blocks are sharded, and its model has none.
    """
    whole, apart = WorkCount(), WorkCount()
    with whole:
        replica.step(reader.read(part))
    with without_fused_layers(), apart:
        replica.step(reader.read(part))
    return Job(
        task=reference,
        parameters=replica.gradient.numel(),
        gradient_bytes=replica.gradient.nbytes,
        dataset_size=len(reader.dataset),
        batch_size=task.batch_size,
        least_local_batch_size=least_samples(replica.loss.model),
        learning_rate_rule=task.learning_rate_rule,
        target_metric=task.target.metric,
        target_value=task.target.value,
        target_higher_is_better=task.target.higher_is_better,
        usual_epochs=task.usual_epochs,
        operators_per_step=whole.operators,
        flops_per_sample=apart.flops / len(part) or None,
        model_kind=model_kind(replica.loss.model.modules()),
        parameter_shapes=replica.shapes,
        shard=None if task.shard == "none" else task.shard,
        **block_facts(replica.loss.model, task.blocks),
    )


def _refused(
    crew: ProbeGroup, schedule: ProbeSchedule, reader: BatchReader, replica: Replica, part: MicroBatch
) -> frozenset[Precision]:
    """Return the precisions of sweeps in which a gradient of few samples fails, and log why; the same on every rank.

    Raises:
        BadInput: the run's own precision is among them.
    """
    refused: set[Precision] = set()
    for precision in dict.fromkeys(sweep.precision for sweep in schedule.sweeps):
        if precision == "fp32":
            continue
        reason = "there are no units for it here" if lacks_units(replica.device, precision) else ""
        if not reason:
            with matrices_in(precision):
                reason = _objection(replica.computing_in(precision), reader.read(part))
        replica.gradient.zero_()
        if any(row[0] for row in crew.gather([float(bool(reason))])):
            reason = reason or "another worker could not"
            if precision == crew.context.spec.precision:
                raise BadInput(
                    f"{crew.context.spec.task} cannot be computed in {precision}: {reason}.",
                    hint="leave `precision` out, or choose another",
                )
            crew.record(PrecisionRefused(precision=precision, reason=reason))
            refused.add(precision)
    return frozenset(refused)


def _objection(replica: Replica, batch: Batch) -> str:
    """Return why a replica cannot compute a batch's gradient, or that the loss is not finite; empty: no objection.

    The gradient is added to the replica's. Running out of memory is raised.
    """
    try:
        loss = replica.loss(batch)
        loss.backward()
        return "" if math.isfinite(loss.item()) else f"the task's loss is {loss.item():g} in it"
    except (RuntimeError, TypeError) as error:  # an operator that has no such form
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"the task fails in it: {lines[0].rstrip('.')}"


def _evaluation_cost(
    crew: ProbeGroup, schedule: ProbeSchedule, task: Task, data: TaskData, replica: Replica, time_limit_s: float
) -> float:
    """Time one evaluation by the leader alone, log it, and return its seconds; every rank calls it.

    Where evaluating all of the data takes longer than ``time_limit_s``, a part is timed and the whole is extrapolated.

    Raises:
        ProbeStopped: any worker was asked to stop.
    """
    context = crew.context
    evaluation_s, peak_bytes = 0.0, 0
    if context.is_leader:
        size, count, done = task.evaluation_batch_size, len(data.evaluation), 0

        def evaluate(start: int) -> int:
            """Evaluate one batch from sample ``start`` on, and return the sample behind it."""
            part = range(start, min(start + size, count))
            evaluation_sums(task, replica.loss.model, data.evaluation, part, context.device)
            return part.stop

        tensors = count_on(context.device)
        tensors.begin_phase()
        before = tensors.live_bytes
        with threads(schedule.sweeps[0].threads_per_worker if schedule.sweeps else 1):
            with tensors:
                evaluate(0)  # also sets up what evaluating needs
            peak_bytes = tensors.peak_bytes - before
            begun_s = context.clock()
            while done < count and (done == 0 or context.clock() - begun_s <= time_limit_s):
                done = evaluate(done)
            evaluation_s = (context.clock() - begun_s) * count / done
    (evaluation_s,) = crew.gather([evaluation_s])[0]
    crew.record(EvaluationCost(evaluation_s=evaluation_s, peak_bytes=peak_bytes))
    return evaluation_s
