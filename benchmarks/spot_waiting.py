"""How long runs take that wait for spot machines: planned from two days of a pool, and replayed on what follows.

Jobs of 1 to 48 h, on as many machines as a recording has, begin at moments drawn from it. What was seen of the pool in
the two days before is what a plan knows: losses, machine-hours, and how long lost machines were missed. Its prior was
fitted to the recordings of all pools but the job's. The replay trains in every sample with the machines that are there,
each from `START_S` after it came, at a speed of the job's own: a plan knows it within `SPEED_LOG_SD`. A job that
outlives its recording counts as later than planned where it is already, and is left out elsewhere. The chance to keep a
deadline of `DEADLINE` times the work stands beside the share of jobs that kept it.

``shown`` is the time of a plan, and ``simulated`` the median of its possible runs. ``first_`` is the plan of who saw
nothing of the pool. ``blind`` is the simulated one where a lost machine can be had again at once. ``certain`` believes
all of what was seen, in place of `PAST_WEIGHT` of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks._outcome import DATA, Outcome, options, publish, run_benchmark
from benchmarks._spot_nodes import NodeTrace, read_node_traces
from hetopt.optimizer.convergence.convergence import GivenSteps
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.cost.monte_carlo import Finalist, RentedPool, possible_runs
from hetopt.optimizer.cost.preemption_rate import (
    PAST_WEIGHT,
    RECORDED,
    ObservedPreemptions,
    Outages,
    PreemptionRatePosterior,
    effective_machines,
    scarce_prior,
)
from hetopt.optimizer.plan import ObservedLosses
from hetopt.optimizer.search.forecast import ClusterTable, JobModel, forecast
from hetopt.optimizer.step_time.posterior import Known, Shape

JOBS = 600
SEEN_S = 2 * 86_400.0
WORK_S = 3600.0, 48 * 3600.0
START_S, SPEED_LOG_SD, DEADLINE = 180.0, 0.05, 2.0

ONE_STEP = JobModel(
    steps=GivenSteps(amount=1),
    evaluate_every_samples=math.inf,
    shape=Shape(
        **{part.name: Known(value=1.0, sd=0.0) for part in fields(Shape) if part.name != "gradient_bytes"},
        gradient_bytes=0.0,
    ),
    startup_log_sd=0.0,
    checkpoint_s=1.0,
    billing=load_billing(),
)
"""A job that is all computing: its time without waiting is known."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on a recorded pool: what was seen of it before, and when the job ended after.

    Attributes:
        pool: zone and machine, as its recording is named.
        took_s: from the request; at least that where the recording ends before.
        ended: whether it is in the recording.
    """

    pool: str
    machines: int
    work_s: float
    watched: ObservedLosses
    took_s: float
    ended: bool


def watched_of(trace: NodeTrace) -> ObservedLosses:
    """Return what a launch would have kept of a pool, of at least a second of a machine."""
    moves = np.diff(trace.running)
    losses, events = int(-moves[moves < 0].sum()), int((moves < 0).sum())
    return ObservedLosses(
        instance_hours=max(1.0, float(trace.running.sum()) * trace.gap_s) / 3600,
        losses=losses,
        lost_together=losses / events if events else 1.0,
        outages=losses,
        outage_hours=float((trace.nodes - trace.running).sum()) * trace.gap_s / 3600,
        until="2023-01-01",
    )


def replayed(trace: NodeTrace, work_s: float) -> tuple[float, bool]:
    """Return the seconds until all of a job's work is done, and whether the recording holds its end.

    Where the recording ends first, its length stands for the seconds.
    """
    sample, needed_s = np.arange(len(trace.running))[:, None], trace.nodes * work_s
    last_away = np.where(trace.running[:, None] > np.arange(trace.nodes), -1, sample)
    here_s = trace.gap_s * (sample - np.maximum.accumulate(last_away))
    worked_s = np.clip(here_s - START_S, 0.0, trace.gap_s).sum(axis=1).cumsum()
    end = int(np.searchsorted(worked_s, needed_s))
    if end == len(worked_s):
        return end * trace.gap_s, False
    return (end + 1) * trace.gap_s - (worked_s[end] - needed_s) / float(trace.running[end]), True


def jobs(traces: list[NodeTrace], count: int, seed: int) -> Iterator[Job]:
    """Yield jobs at moments drawn from each trace in its turn."""
    generator = np.random.default_rng(seed)
    for place in range(count):
        trace = traces[place % len(traces)]
        work_s = math.exp(generator.uniform(*np.log(WORK_S)))
        before = round(SEEN_S / trace.gap_s)
        first = int(generator.integers(before, len(trace.running)))
        past, later = (
            NodeTrace(name=trace.name, nodes=trace.nodes, running=part, gap_s=trace.gap_s)
            for part in (trace.running[first - before : first], trace.running[first:])
        )
        took_s, ended = replayed(later, work_s * math.exp(generator.normal(0.0, SPEED_LOG_SD)))
        yield Job(
            pool=trace.name.split()[-1],
            machines=trace.nodes,
            work_s=work_s,
            watched=watched_of(past),
            took_s=took_s,
            ended=ended,
        )


def shown_s(job: Job, belief: PreemptionRatePosterior) -> tuple[float, ...]:
    """Return the time of a plan and its 90 % interval, seconds."""
    effective = float(effective_machines(job.machines))
    known = {
        "machines": job.machines,
        "workers": 1.0,
        "batch": 1.0,
        "stretch": 1.0,
        "compute_s": job.work_s,
        "compute_log_sd": SPEED_LOG_SD,
        "startup_s": START_S,
        "calm_per_hour": effective * belief.calm.mean_per_hour,
        "scarce_per_hour": effective * (belief.calm.mean_per_hour + belief.scarce.mean_per_hour),
        "scarce_chance": belief.scarce_chance,
        "missing": belief.missing,
    }
    columns = {column.name: np.array([known.get(column.name, 0.0)]) for column in fields(ClusterTable)}
    shown = forecast(ClusterTable(**columns | {"open_parts": np.ones((1, 1))}), ONE_STEP)
    return tuple(float(part[0]) for part in (shown.total_s, shown.total_low_s, shown.total_high_s))


def simulated_s(job: Job, belief: PreemptionRatePosterior) -> tuple[float, ...]:
    """Return the median time of simulated runs and its 90 % interval, seconds, and the chance to keep the deadline."""
    run = Finalist(
        pools=(RentedPool(machines=job.machines, usd_per_hour=1.0, belief=belief),),
        billing=ONE_STEP.billing,
        work_s=job.work_s,
        step_time_log_sd=SPEED_LOG_SD,
        start_up_s=START_S,
        restart_s=START_S,
        checkpoint_s=ONE_STEP.checkpoint_s,
        interval_s=60.0,
    )
    runs = possible_runs([run], seed=0)
    return (
        *np.quantile(runs.total_s[0], [0.5, 0.05, 0.95]).tolist(),
        float(runs.chance(deadline_s=DEADLINE * job.work_s)[0]),
    )


def believed(job: Job, *, weight: float = PAST_WEIGHT) -> PreemptionRatePosterior:
    """Return what a plan believes that trusts so much of what was seen, by a prior that knows all pools but the job's.

    All these types are in the advisor's last band, whose prior was told by the twelve pools together: by eleven, 92 in
    100 of its pools are scarce instead of 93.
    """
    scarce, outages = scarce_prior(
        [pool for pool in ObservedPreemptions.load(RECORDED).pools if job.pool not in str(pool.source)]
    )
    return replace(PreemptionRatePosterior.prior(">20%"), scarce=scarce, outages=outages).seeing(
        job.watched, weight=weight
    )


def judged(drawn: list[Job], planned: Callable[[Job], tuple[float, ...]]) -> tuple[float, float, float]:
    """Return the signed median error of planned times, the share within their interval, and its median half width.

    Jobs whose end no recording holds count only if even the part it holds is longer than the interval.
    """
    rows = [
        (middle / job.took_s - 1, low / 1.001 <= job.took_s <= high, math.sqrt(high / low))
        for job in drawn
        for middle, low, high, *_ in [planned(job)]
        if job.ended or job.took_s >= high
    ]
    errors, inside, widths = np.array(rows).T
    return float(np.median(errors)), float(np.mean(inside)), float(np.median(widths))


def main() -> None:
    """Measure, print, and publish.

    Exits where no recordings are at hand.
    """
    read = options(__doc__)
    traces = read_node_traces(DATA / "spot-traces", least=1)
    if not traces:
        raise SystemExit(f"{DATA / 'spot-traces'} has no recordings; set HETOPT_SHARED_DATA to the folder that does")
    drawn = list(jobs(traces, JOBS // 6 if read.quick else JOBS, seed=0))
    results = Outcome(benchmark="spot_waiting", quick=read.quick)
    for name, planned in (
        ("shown", lambda job: shown_s(job, believed(job))),
        ("simulated", lambda job: simulated_s(job, believed(job))),
        ("first_shown", lambda job: shown_s(job, believed(job, weight=0.0))),
        ("first_simulated", lambda job: simulated_s(job, believed(job, weight=0.0))),
        ("blind", lambda job: simulated_s(job, replace(believed(job), outages=Outages(hours=0.0)))),
        ("certain", lambda job: simulated_s(job, believed(job, weight=1.0))),
    ):
        error, within, width = judged(drawn, planned)
        print(
            f"{name:15} signed median error {error:+.1%}, 90 % intervals hold {within:.0%}, and are x{width:.2f} wide"
        )
        if name in ("shown", "simulated", "first_shown", "first_simulated"):
            results.goal(f"{name}_abs_signed_median_error", abs(error), at_most=0.10)
            results.goal(f"{name}_within_interval", within, at_least=0.80, at_most=0.97)
        else:
            results.baselines |= {
                f"{name}_abs_signed_median_error": round(abs(error), 4),
                f"{name}_within_interval": round(within, 4),
            }
    chance, kept = np.mean(
        [
            (simulated_s(job, believed(job))[-1], job.took_s <= DEADLINE * job.work_s)
            for job in drawn
            if job.ended or job.took_s > DEADLINE * job.work_s
        ],
        axis=0,
    )
    print(f"{chance:.0%} planned to keep a deadline of {DEADLINE:g} times the work, {kept:.0%} kept it")
    results.goal("chance_less_kept", abs(float(chance - kept)), at_most=0.10)
    publish(results, read.json_file)


if __name__ == "__main__":
    run_benchmark(main)
