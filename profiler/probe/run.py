"""Executes the probe schedule of a run, part after part, on all workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.run_spec import ProbeSchedule
from hetopt.profiler.probe.crew import ProbeGroup, ProbeStopped
from hetopt.profiler.probe.exchange_costs import time_collectives
from hetopt.profiler.probe.facts import host_facts, job_facts
from hetopt.profiler.probe.gradient import ExchangeTrials
from hetopt.profiler.probe.pilot import PilotGround, PilotRun
from hetopt.profiler.probe.replica import Replica
from hetopt.profiler.probe.step_memory import count_on
from hetopt.profiler.probe.sweep import come_back, run_sweep, threads
from hetopt.profiler.records import FINISHED, HOST_FACTS, JOB_FACTS, STARTED, EvaluationCost, PrecisionRefused
from hetopt.profiler.schedule import LATER_PASS_SHARE, NETWORK_SHARE
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import lacks_units, matrices_in
from hetopt.trainer.task import Task, TaskData, evaluation_sums
from hetopt.trainer.tasks.load import load_task

COUNTED_SAMPLES = 2
"""Operators and FLOPs are counted on so many samples; one alone cannot be normalised across samples."""

EVALUATION_SHARE = 0.05
"""Part of a probe's time that one evaluation may take."""

COSTLY_EVALUATION = 0.2
"""A pilot is not evaluated when one evaluation takes this part of its time; one such pilot is enough then."""

UNLIMITED_S = 3600.0

SHORT_COMPUTATION_S = 0.005
"""Long enough for communication threads to fall asleep and for the caches to hold other things."""


def run_probe(context: WorkerContext) -> None:
    """Measure what ``context.spec.probe`` asks for and write it to the event log. Ends quietly when asked to stop.

    Raises:
        BadInput: the spec has no probe, or the task or its data cannot be used.
    """
    schedule = context.spec.probe
    if schedule is None:
        raise BadInput("this run has nothing to measure.", hint="profile with `hetopt profile TASK`")
    task = load_task(context.spec.task)
    data = task.data(Path(context.spec.data_dir) if context.spec.data_dir is not None else None)
    replica = Replica.build(task, context.spec, context.device)
    crew = ProbeGroup(context=context, started_s=context.clock())
    try:
        _measure(crew, schedule, task, data, replica)
    except ProbeStopped:
        return


def _measure(crew: ProbeGroup, schedule: ProbeSchedule, task: Task, data: TaskData, replica: Replica) -> None:
    context = crew.context
    budget_s = schedule.time_limit_s or UNLIMITED_S
    reader = BatchReader(dataset=data.train, device=context.device, seed=schedule.seed)
    crew.gather([])
    crew.note(STARTED)
    if context.is_leader:
        crew.note(HOST_FACTS, host_facts(context.device))
        part = MicroBatch(epoch=0, indices=range(min(COUNTED_SAMPLES, len(data.train))))
        crew.note(JOB_FACTS, job_facts(task, context.spec.task, replica, reader, part))
    refused = _refused(crew, schedule, reader, replica)
    measured: list[tuple[int, ...]] = []
    counted: set[Precision] = set()
    for index, sweep in enumerate(schedule.sweeps):
        measured.append(
            ()
            if sweep.precision in refused
            else run_sweep(
                crew,
                replica,
                reader,
                index,
                sweep,
                memory_fraction=schedule.memory_fraction,
                counts_memory=sweep.precision not in counted,  # the same in every division
                compressors=schedule.compressors if sweep.precision == schedule.sweeps[0].precision else None,
            )
        )
        counted.add(sweep.precision)

    def come_back_to_sweeps() -> None:
        for index, (sweep, sizes) in enumerate(zip(schedule.sweeps, measured, strict=True)):
            come_back(crew, replica, reader, index, sweep, sizes, share=LATER_PASS_SHARE)

    # In every precision, the last sweep is that of all workers together, as pilots are.
    together = {sweep.precision: sizes for sweep, sizes in zip(schedule.sweeps, measured, strict=True)}
    largest = min((sizes[-1] for sizes in together.values() if sizes), default=0)
    evaluation_s = _evaluation_cost(crew, schedule, task, data, replica, EVALUATION_SHARE * budget_s)
    if schedule.network is not None and context.world_size > 1:
        with threads(schedule.sweeps[-1].threads_per_worker if schedule.sweeps else 1):
            time_collectives(
                crew,
                schedule.network,
                compute=_short_computation(crew, schedule, reader, replica),
                gradient_bytes=replica.gradient.nbytes,
                time_limit_s=NETWORK_SHARE * budget_s,
            )
    come_back_to_sweeps()
    ground = PilotGround(
        crew=crew,
        task=task,
        reader=BatchReader(dataset=data.train, device=context.device, seed=schedule.seed, max_samples=largest or None),
        evaluation=data.evaluation,
        schedule=schedule,
        trials=ExchangeTrials(schedule.exchanges, replica.shapes, context.device, schedule.seed)
        if schedule.exchanges
        else None,
    )
    for index, pilot in enumerate(schedule.pilots):
        if pilot.precision in refused:
            continue
        left_s = budget_s - crew.elapsed_s()
        time_limit_s = max(0.0, min(pilot.time_limit_s, left_s))
        evaluated = evaluation_s / context.world_size <= COSTLY_EVALUATION * time_limit_s
        if index == 0 or (evaluated and left_s > 0):
            PilotRun(ground, index).run(time_limit_s, evaluated=evaluated)
    come_back_to_sweeps()
    crew.gather([])
    crew.note(FINISHED)


def _refused(crew: ProbeGroup, schedule: ProbeSchedule, reader: BatchReader, replica: Replica) -> frozenset[Precision]:
    """What the task cannot be computed in, by a gradient of few samples; the same on every rank.

    Raises:
        BadInput: the run's own precision is among them.
    """
    part = MicroBatch(epoch=0, indices=range(min(COUNTED_SAMPLES, len(reader.dataset))))
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
    """Why a gradient cannot be computed so; empty: it can."""
    try:
        loss = replica.loss(batch)
        loss.backward()
        return "" if math.isfinite(loss.item()) else f"the task's loss is {loss.item():g} in it"
    except (RuntimeError, TypeError) as error:  # an operator that has no such form
        if is_out_of_memory(error):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        return f"the task fails in it: {said[0].rstrip('.')}"


def _short_computation(
    crew: ProbeGroup, schedule: ProbeSchedule, reader: BatchReader, replica: Replica
) -> Callable[[], None]:
    """Gradients of small batches, about `SHORT_COMPUTATION_S` in all (or one, if that takes longer)."""
    size = min((min(sweep.local_batch_sizes) for sweep in schedule.sweeps), default=COUNTED_SAMPLES)
    part = MicroBatch(epoch=0, indices=range(min(size, len(reader.dataset))))
    clock = crew.context.clock

    def one() -> None:
        replica.gradient.zero_()
        loss = replica.loss(reader.read(part))
        loss.backward()
        loss.item()  # waits for the device

    one()
    begun = clock()
    one()
    took_s = max(row[0] for row in crew.gather([clock() - begun]))
    repeats = max(1, round(SHORT_COMPUTATION_S / took_s))

    def several() -> None:
        for _ in range(repeats):
            one()

    return several


def _evaluation_cost(
    crew: ProbeGroup, schedule: ProbeSchedule, task: Task, data: TaskData, replica: Replica, time_limit_s: float
) -> float:
    """Time one evaluation by the leader alone; over a part of the evaluation data where all of it takes too long."""
    context = crew.context
    evaluation_s, peak_bytes = 0.0, 0
    if context.is_leader:
        with threads(schedule.sweeps[0].threads_per_worker if schedule.sweeps else 1):
            size, count = task.evaluation_batch_size, len(data.evaluation)

            def evaluate(start: int) -> float:
                begun = context.clock()
                evaluation_sums(
                    task, replica.loss.model, data.evaluation, range(start, min(start + size, count)), context.device
                )
                return context.clock() - begun

            tensors = count_on(context.device)
            tensors.begin_phase()
            before = tensors.live_bytes
            with tensors:
                spent_s = evaluate(0)  # also sets up what evaluating needs
            peak_bytes = tensors.peak_bytes - before
            done = min(size, count)
            if spent_s <= time_limit_s:
                done, spent_s = 0, 0.0
            while done < count and spent_s <= time_limit_s:
                spent_s += evaluate(done)
                done = min(done + size, count)
            evaluation_s = spent_s * count / done
    (evaluation_s,) = crew.gather([evaluation_s])[0]
    crew.record(EvaluationCost(evaluation_s=evaluation_s, peak_bytes=peak_bytes))
    return evaluation_s
