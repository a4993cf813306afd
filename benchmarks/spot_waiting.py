"""How long runs take that wait for spot machines: planned from two days of a pool, and replayed on what follows.

Jobs of 1 to 48 h, on as many machines as a recording has, begin at moments drawn from it. What was seen of the pool in
the two days before is what a plan knows: losses, machine-hours, and how long lost machines were missed. The replay
trains in every sample with the machines that are there, each from `START_S` after it came, at a speed of the job's own:
a plan knows it within `SPEED_LOG_SD`. A job that outlives its
recording counts as later than planned where it is already, and is left out elsewhere.

``blind`` is the same plan where a lost machine can be had again at once, as plans had it before. ``certain`` believes
all of what was seen, in place of `TOLD_BY_THE_PAST` of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks._outcome import DATA, Outcome, options, publish, run_benchmark
from benchmarks._spot_nodes import NodeTrace, read_node_traces
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.cost.monte_carlo import Finalist, RentedPool, possible_runs
from hetopt.optimizer.cost.preemption_rate import TOLD_BY_THE_PAST, Outages, PreemptionRatePosterior
from hetopt.optimizer.plan import ObservedLosses

JOBS = 600
SEEN_S = 2 * 86_400.0
WORK_S = 3600.0, 48 * 3600.0
START_S, CHECKPOINT_S, SPEED_LOG_SD = 180.0, 1.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on a recorded pool: what was seen of it before, and when the job ended after.

    Attributes:
        took_s: from the request; at least that where the recording ends before.
        ended: whether it is in the recording.
    """

    machines: int
    work_s: float
    watched: ObservedLosses | None
    took_s: float
    ended: bool


def watched_of(trace: NodeTrace) -> ObservedLosses | None:
    """Return what a launch would have kept of a pool; None where no machine ran."""
    moves = np.diff(trace.running)
    losses, events = int(-moves[moves < 0].sum()), int((moves < 0).sum())
    hours = trace.gap_s / 3600
    if not trace.running.any():
        return None
    return ObservedLosses(
        instance_hours=float(trace.running.sum()) * hours,
        losses=losses,
        lost_together=losses / events if events else 1.0,
        outages=losses,
        outage_hours=float((trace.nodes - trace.running).sum()) * hours,
        until="2023-01-01",
    )


def replayed(trace: NodeTrace, work_s: float) -> tuple[float, bool]:
    """Return the seconds until all of a job's work is done, and whether the recording holds its end."""
    booting = np.full(trace.nodes, START_S)
    left, before = trace.nodes * work_s, 0
    for sample, running in enumerate(trace.running.tolist()):
        booting[before:running] = START_S
        before = running
        at_work = trace.gap_s - np.minimum(booting[:running], trace.gap_s)
        booting[:running] = np.maximum(0.0, booting[:running] - trace.gap_s)
        left -= float(at_work.sum())
        if left <= 0:
            return (sample + 1) * trace.gap_s + left / running, True
    return len(trace.running) * trace.gap_s, False


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
        yield Job(machines=trace.nodes, work_s=work_s, watched=watched_of(past), took_s=took_s, ended=ended)


def planned_s(job: Job, belief: PreemptionRatePosterior) -> tuple[float, float, float]:
    """Return a plan's time and the ends of its 90 % interval, from simulated runs, seconds."""
    run = Finalist(
        pools=(RentedPool(machines=job.machines, usd_per_hour=1.0, belief=belief),),
        billing=load_billing(),
        work_s=job.work_s,
        step_time_log_sd=SPEED_LOG_SD,
        start_up_s=START_S,
        restart_s=START_S,
        checkpoint_s=CHECKPOINT_S,
    )
    low, middle, high = np.quantile(possible_runs([run], seed=0).total_s[0], [0.05, 0.5, 0.95]).tolist()
    return middle, low, high


def believed(job: Job, *, told: float = TOLD_BY_THE_PAST, outages: bool = True) -> PreemptionRatePosterior:
    """Return what a plan believes that trusts so much of what was seen, and knows outages or none."""
    belief = PreemptionRatePosterior.prior(None).seeing(job.watched, weight=told)
    return belief if outages else replace(belief, outages=Outages(hours=0.0))


def judged(drawn: list[Job], belief: Callable[[Job], PreemptionRatePosterior]) -> tuple[float, float, float]:
    """Return the signed median error of planned times, the share within their interval, and its median half width."""
    errors, within, widths = [], [], []
    for job in drawn:
        middle, low, high = planned_s(job, belief(job))
        if not job.ended and job.took_s < high:
            continue
        errors.append(middle / job.took_s - 1)
        within.append(low <= job.took_s * (1 + 1e-3) and job.took_s <= high)
        widths.append(math.sqrt(high / low))
    return float(np.median(errors)), float(np.mean(within)), float(np.median(widths))


def main() -> None:
    """Measure, print, and publish."""
    read = options(__doc__)
    traces = read_node_traces(DATA / "spot-traces", least=1)
    if not traces:
        raise SystemExit(f"{DATA / 'spot-traces'} has no recordings; set HETOPT_SHARED_DATA to the folder that does")
    drawn = list(jobs(traces, JOBS // 6 if read.quick else JOBS, seed=0))
    results = Outcome(benchmark="spot_waiting", quick=read.quick)
    for name, belief in (
        ("hetopt", believed),
        ("blind", partial(believed, outages=False)),
        ("certain", partial(believed, told=1.0)),
    ):
        error, within, width = judged(drawn, belief)
        print(f"{name:8} signed median error {error:+.1%}, 90 % intervals hold {within:.0%}, and are x{width:.2f} wide")
        if name == "hetopt":
            results.goal("hetopt_abs_signed_median_error", abs(error), at_most=0.10)
            results.goal("hetopt_within_interval", within, at_least=0.80)
        else:
            results.baselines[f"{name}_abs_signed_median_error"] = round(abs(error), 4)
            results.baselines[f"{name}_within_interval"] = round(within, 4)
    publish(results, read.json_file)


if __name__ == "__main__":
    run_benchmark(main)
