"""Priced clusters as a plan's records: groups with local batch sizes, predictions with bills, stand-ins, run spec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetopt.core.batch_partition import solve_shares
from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.options import settled_collective
from hetopt.core.comm.payload_bytes import Collective
from hetopt.core.run_spec import RunSpec, Settings, StopRule, WorkerSpec
from hetopt.core.training_laws import learning_rate_scale
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.bill import itemise
from hetopt.optimizer.cost.cost import CHECKPOINT_INTERVAL_S, planned_usage
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import OWN, Assumptions, Candidate, Goal, Group, Hardware, Prediction, Range, ScalingRule
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, tabulate_rows
from hetopt.optimizer.search.forecast import Forecast, JobModel, forecast
from hetopt.optimizer.search.objective import Limits, expected, expected_totals
from hetopt.optimizer.search.search_space import Cluster, MachineOption, SearchSpace

STAND_INS = 10
"""Most types that may stand in for a planned one: 'A good rule of thumb is to be flexible across at least 10 instance
types for each workload' (EC2 user guide, "Best practices for Amazon EC2 Spot", read 2026-11)."""


def make_candidate(space: SearchSpace, job: JobModel, cluster: Cluster, forecast: Forecast, row: int) -> Candidate:
    """Return the plan record of ``cluster``: groups, local batch sizes, and the prediction in row ``row``.

    Args:
        space: search space that the cluster's indices point into.
        job: inputs of a forecast that do not depend on the cluster.
        cluster: machines, batch size and exchange, as indices into ``space``.
        forecast: predicted time and cost of clusters.
        row: the cluster's row in ``forecast``, from 0.

    Raises:
        BadInput: the batch has no sample for some worker, or does not fit into memory; never for a cluster that a
            search has priced.
    """
    exchange = space.exchanges[cluster.exchange]
    times = [
        space.options[index].worker.time
        for index, machines in cluster.machines
        for _ in range(machines * space.options[index].worker.workers)
    ]
    sizes = list(solve_shares(times, space.batch_sizes[cluster.batch]).local_batch_sizes)
    groups = []
    for index, machines in cluster.machines:
        option = space.options[index]
        local_batch_sizes, sizes = sizes[: machines * option.worker.workers], sizes[machines * option.worker.workers :]
        local_batch_sizes = _by_device(option, local_batch_sizes)
        groups.append(_group(option, machines, local_batch_sizes, exchange.collective))
    return Candidate(
        groups=tuple(groups),
        global_batch_size=space.batch_sizes[cluster.batch],
        compression=exchange.compression,
        collective=settled_collective(exchange.compression),
        sync=exchange.sync,
        precision=space.options[cluster.machines[0][0]].precision,
        disk_gb=int(forecast.disk_gb[row]),
        prediction=_prediction(space, job, cluster, forecast, row),
    )


def stand_ins(
    space: SearchSpace, job: JobModel, limits: Limits, cluster: Cluster, candidate: Candidate
) -> tuple[tuple[str, ...], ...]:
    """Return, for each group of a ``cluster``, up to `STAND_INS` types that may replace its type, the cheapest first.

    With another type in one group, the run fits the limits at its median, and its expected time and cost are no higher
    than the upper ends of the candidate's 90 % intervals. See `_may_replace` for the types.

    Args:
        space: search space with its options, those in ``beaten`` too.
        job: inputs of a forecast that do not depend on the cluster.
        limits: budget and deadline that the run has to fit.
        cluster: cluster as indices into ``space``.
        candidate: the plan record of the cluster.
    """
    options, types = [space.options[index] for index, _ in cluster.machines], []
    for place, (_, machines) in enumerate(cluster.machines):
        others = [option for option in (*space.options, *space.beaten) if _may_replace(option, options[place])]
        rest = [(other, count) for other, (_, count) in enumerate(cluster.machines) if other != place]
        clusters = [
            Cluster.of([*rest, (len(options) + number, machines)], cluster.batch, cluster.exchange)
            for number in range(len(others))
        ]
        rows, table = tabulate_rows(Columns(replace(space, options=(*options, *others))), ClusterRows.of(clusters))
        predicted = forecast(table, job)
        time_s, cost_usd = expected_totals(predicted)
        within = (time_s <= candidate.prediction.total_s.high) & (cost_usd <= candidate.prediction.cost_usd.high)
        kept = within & (limits.overrun(predicted) <= 1)
        cheapest = [row for row in np.argsort(cost_usd, kind="stable").tolist() if kept[row]][:STAND_INS]
        types.append(tuple(others[rows.cluster(row).machines[-1][0] - len(options)].name for row in cheapest))
    return tuple(types)


def _may_replace(option: MachineOption, planned: MachineOption) -> bool:
    """Return whether a type of the same market, region, architecture, workers and `way` may replace a planned one.

    Never for the user's own machines. If the planned type's speed is better than extrapolated, the other's must be, too
    (see `optimizer.exploring.check_probed`).
    """
    alike = (
        (each.offer.price.market, each.offer.price.region, each.offer.instance_type.architecture, each.worker.kind,
         each.worker.workers, each.way)
        for each in (option, planned)
    )  # fmt: skip
    return (
        option.name != planned.name
        and planned.offer.price.region != OWN
        and len(set(alike)) == 1
        and (option.worker.evidence != "extrapolated" or planned.worker.evidence == "extrapolated")
    )


def _by_device(option: MachineOption, local_batch_sizes: list[int]) -> list[int]:
    """Return local batch sizes with each machine's samples divided anew among its unlike workers; alike: unchanged."""
    times, each = option.worker.unlike, option.worker.workers
    if not times:
        return local_batch_sizes
    totals = [sum(local_batch_sizes[first : first + each]) for first in range(0, len(local_batch_sizes), each)]
    return [size for total in totals for size in solve_shares(times, total).local_batch_sizes]


def spread(value: float, log_sd: float) -> Range:
    """Return a log-normal's median ``value`` with its 90 % interval; ``log_sd``: standard deviation of its log.

    With ``log_sd`` 0 both ends are ``value``.
    """
    reach = float(np.exp(Z90 * log_sd))
    return Range(value=value, low=value / reach, high=value * reach)


def expected_scores(candidates: Sequence[Candidate], limits: Limits) -> NDArray[np.float64]:
    """Return each candidate's score of expected time and cost, [candidates]; lower is better.

    The score is ``time^w cost^(1-w)`` with w the time weight of ``limits``; whether the limits are kept does not count.
    """
    predictions = [candidate.prediction for candidate in candidates]
    return limits.score(
        *(
            expected(np.array([figure.value for figure in figures]), np.array([figure.high for figure in figures]))
            for figures in (
                [prediction.total_s for prediction in predictions],
                [prediction.cost_usd for prediction in predictions],
            )
        )
    )


def expected_score(candidate: Candidate, limits: Limits) -> float:
    """Return one candidate's score of expected time and cost, see `expected_scores`; lower is better."""
    return float(expected_scores([candidate], limits)[0])


def _group(option: MachineOption, machines: int, local_batch_sizes: list[int], collective: Collective) -> Group:
    """Return the plan record of a group of machines of one option: price with source, local batches, assumptions."""
    price, band = option.offer.price, option.offer.band
    time, link = option.worker.time, option.network.links[collective]
    return Group(
        instance_type=option.name,
        machines=machines,
        workers_per_machine=option.worker.workers,
        market=price.market,
        region=price.region,
        price_usd_per_hour=price.usd_per_hour,
        price_date=price.date.isoformat(),
        price_source=price.source,
        price_is_estimate=price.is_estimate,
        interruption_band=band.label if band else None,
        watched=option.watched,
        network=option.network.source if machines > 1 else None,
        local_batch_sizes=tuple(local_batch_sizes),
        evidence=option.worker.evidence,
        hardware=hardware_of(option.offer.instance_type),
        assumed=Assumptions(
            fixed_s=time.fixed_s,
            per_sample_s=time.per_sample_s,
            floor_s=time.floor_s,
            max_samples=time.max_samples,
            micro_batch=time.micro_batch,
            once_s=0.0 if time.micro_batch is None else time.once_s,
            shard=option.way[1].shard,
            recomputes=option.way[1].recomputes,
            link_latency_s=link.latency_s,
            link_bytes_per_s=link.bytes_per_s,
        ),
    )


def hardware_of(instance: InstanceType) -> Hardware:
    """Return the vCPUs, memory, GiB, and GPUs of one machine of a type, as a plan has them; ``gpu`` None: no GPU."""
    gpu = instance.accelerator
    return Hardware(
        vcpus=instance.vcpus,
        memory_gib=instance.memory_gib,
        gpu=None if gpu is None else gpu.name,
        gpus=0 if gpu is None else gpu.count * gpu.fraction,
        gpu_memory_gib=None if gpu is None else gpu.memory_gib,
    )


def _prediction(space: SearchSpace, job: JobModel, cluster: Cluster, forecast: Forecast, row: int) -> Prediction:
    """Return the prediction in row ``row`` of a forecast, with the bill of the cluster line by line."""

    def at(column: str) -> float:
        return float(getattr(forecast, column)[row])

    machines = [(space.options[index], count) for index, count in cluster.machines]
    bill = itemise(
        [(option.offer, count) for option, count in machines],
        planned_usage(
            start_up_s=at("startup_s"),
            work_s=at("work_s"),
            interruption_s=at("interruption_s"),
            machines=cluster.machine_count,
            stops_per_hour=at("stops_per_hour"),
            interval_s=at("interval_s"),
            checkpoint_bytes=job.checkpoint_bytes,
        ),
        job.billing,
        disk_gb=at("disk_gb"),
        hazard_basis=_hazard_basis([option for option, _ in machines]),
    )
    return Prediction(
        step_time_s=spread(at("step_time_s"), at("step_time_log_sd")),
        compute_s=at("compute_s"),
        communication_s=at("communication_s"),
        waiting_s=at("waiting_s"),
        steps=spread(at("steps"), at("steps_log_sd")),
        steps_source=job.steps.source,
        training_s=spread(at("work_s"), at("work_log_sd")),
        startup_s=at("startup_s"),
        closed_s=at("closed_s"),
        unavailable_s=at("unavailable_s"),
        data_transfer_usd=job.before_usd,
        total_s=Range(value=at("total_s"), low=at("total_low_s"), high=at("total_high_s")),
        cost_usd=Range(value=at("cost_usd"), low=at("cost_low_usd"), high=at("cost_high_usd")),
        cost_terms=bill if job.transfer is None else (job.transfer, *bill),
    )


def _hazard_basis(options: Sequence[MachineOption]) -> str:
    """Return the basis of expected preemptions as a phrase: prior, and observed losses of the options' pools."""
    prior = "the prior of the interruption band (most pools lose few machines, and a few one in 2 h)"
    seen = [f"{option.watched.in_words} of {option.name}" for option in options if option.watched is not None]
    return f"on average over {prior}" + (f", updated by {' and '.join(seen)}" if seen else "")


STEPS_MARGIN = 2.0
"""Factor on the upper end of the predicted steps after which a run ends that has not reached its target."""


def run_spec(
    model: FittedModel,
    goal: Goal,
    chosen: Candidate,
    *,
    seed: int,
    evaluate_every_epochs: float,
    interval_s: float = math.inf,
    learning_rate_rule: ScalingRule | None = None,
    equal_progress: bool = False,
    follows_noise: Settings | None = None,
) -> RunSpec:
    """Return the run spec of a candidate: what its workers need to train, with stop rule and checkpoint interval.

    Hosts are named TYPE-MARKET-NUMBER. A run to a target ends after `STEPS_MARGIN` times its predicted steps at the
    latest. Where several workers send a part of their gradients, the run chooses how much and by which collective.

    Args:
        model: fits of the profile.
        goal: what the run is for, and its limits.
        chosen: the candidate.
        seed: seed of the run.
        evaluate_every_epochs: epochs between evaluations.
        interval_s: seconds of work between checkpoints in the candidate's forecast; infinite (no machine is taken
            back): the run saves at the longest interval of the rules.
        learning_rate_rule: how the learning rate follows the batch size; None: the task's own rule.
        equal_progress: whether the run ends after the predicted steps of equal progress; False: after the epochs or
            steps that were asked for, whatever its batch size.
        follows_noise: settings of the policy by which batch and learning rate follow the gradient noise; None or empty:
            they do not.
    """
    profile = model.profile
    job = profile.job
    workers = [
        WorkerSpec(
            host=f"{group.instance_type}-{'own' if group.is_own else group.market}-{machine}",
            type=group.instance_type,
            local_batch_size=group.local_batch_sizes[machine * group.workers_per_machine + place],
            max_local_batch_size=None if group.assumed is None else group.assumed.together,
        )
        for group in chosen.groups
        for machine in range(group.machines)
        for place in range(group.workers_per_machine)
    ]
    # A plan that sends a part says where to begin; the run knows better how much. One that does not leaves it at that:
    # nobody's gradient is thinned out who was not told so.
    shares = next((group.assumed.shard for group in chosen.groups if group.assumed is not None), "none")
    selects = len(workers) > 1 and METHODS[chosen.compression.name].by_ratio
    return RunSpec(
        task=job.task,
        script=job.script,
        batches_per_step=job.batches_per_step,
        resumes=job.resumes,
        data_dir=profile.data_dir,
        seed=seed,
        workers=tuple(workers),
        compression=chosen.compression,
        ratio_policy="auto" if selects else "fixed",
        collective_policy="cheapest" if selects else "fixed",
        sync=chosen.sync,
        precision=chosen.precision,
        shard=None if (shares == "none" and job.shard != "auto") or profile.is_counted else shares,
        slowdown_coefficient=round(model.convergence.gate.penalty.cautious_coefficient, 2),
        learning_rate_scale=learning_rate_scale(
            "none" if follows_noise else learning_rate_rule or job.learning_rate_rule,
            chosen.global_batch_size,
            job.batch_size,
        ),
        batch_policy="critical" if follows_noise else "model",
        batch_settings=follows_noise or {},
        stop=_stop(goal, chosen, as_many=equal_progress and chosen.global_batch_size != job.batch_size),
        evaluate_every_epochs=evaluate_every_epochs,
        checkpoint_every_s=round(interval_s) if math.isfinite(interval_s) else CHECKPOINT_INTERVAL_S[1],
    )


def _stop(goal: Goal, chosen: Candidate, *, as_many: bool) -> StopRule:
    """Return the stop rule of a candidate's run: the target with a most number of steps, or epochs, or steps.

    With ``as_many``, the predicted number of steps replaces epochs and steps.
    """
    if goal.ends == "target":
        return StopRule(target=True, max_steps=math.ceil(STEPS_MARGIN * chosen.prediction.steps.high))
    if as_many:
        return StopRule(max_steps=math.ceil(chosen.prediction.steps.value))
    if goal.ends == "epochs":
        return StopRule(max_epochs=goal.amount)
    return StopRule(max_steps=math.ceil(goal.amount or 1))
