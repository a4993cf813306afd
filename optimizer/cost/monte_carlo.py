"""Monte Carlo simulation of runs on a few clusters: the distribution of their time and cost under all uncertainty.

Each draw has its own error of step time and of steps, start-up, spot price, loss rate of every pool (from the belief,
so that a pool may turn out scarce) and losses. A loss stops the job until another machine could have started; work
since the last checkpoint is done again. Losses are drawn by their number and the moments of their cost, without a loop
over events; the mean over draws is Daly's. While a pool has no other machine, the rest of the cluster trains on: the
run takes longer by the part of its machines that is away, which is not paid. The first request may fall into such a
time.

A run with a deadline moves to the same machines on demand at the last moment at which these are in time, if the budget
pays for that, as a supervised launch does. Replayed on nine recorded pools, 76, 81, 85 and 89 % of runs were planned to
keep 1.3, 1.6, 2 and 3 times their work, and 76, 79, 82 and 87 % did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.optimizer.cost.bill import USUAL_DISK_GB, Array, Billing, Numbers, Usage, billed_hours, total_usd
from hetopt.optimizer.cost.preemption_rate import OUTAGE_SHAPE, PreemptionRatePosterior, effective_machines

DRAWS = 2000
_MOST_LOSSES = 1e5
_NEVER_S = 1e12


@dataclass(frozen=True, kw_only=True)
class RentedPool:
    """Machines of a cluster that come from one capacity pool, with their price and preemption rate.

    Attributes:
        machines: number of machines.
        usd_per_hour: median price of one machine.
        price_log_sd: standard deviation of the log of that price; 0 on demand.
        belief: preemption rate of the pool; None: on demand, never preempted.
    """

    machines: int
    usd_per_hour: float
    price_log_sd: float = 0.0
    belief: PreemptionRatePosterior | None = None


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """Cluster to simulate runs on: its machines, its median times in seconds, and the spread of times and prices.

    Attributes:
        pools: the cluster's machines, by pool.
        work_s: median of training without losses, evaluations included.
        step_time_log_sd, steps_log_sd: standard deviations of the logs of step time and of the number of steps.
        billing: prices beside the machines' own.
        start_up_s: seconds from the request to the first step; ``start_up_log_sd`` is the spread of the log.
        restart_s: seconds from a loss to training again.
        checkpoint_s: seconds of pause to copy a checkpoint of ``checkpoint_bytes`` (0: none in the bucket).
        interval_s: work between checkpoints; infinite: none is saved, and a loss costs all work so far.
        written_s: seconds from a checkpoint's copy until it is on disk.
        before_usd: paid before machines are rented, such as for the data set's transfer.
        disk_gb: size of each machine's volume.
        deadline_s: a run that would end later moves to machines on demand in time; 0: no run moves.
        budget_usd: most that a run may cost if it moves.
        on_demand_usd_per_hour: price of all machines together, on demand.
    """

    pools: tuple[RentedPool, ...]
    billing: Billing
    work_s: float
    start_up_s: float
    restart_s: float
    checkpoint_s: float
    interval_s: float
    written_s: float = 0.0
    step_time_log_sd: float = 0.0
    steps_log_sd: float = 0.0
    start_up_log_sd: float = 0.0
    checkpoint_bytes: float = 0.0
    disk_gb: float = USUAL_DISK_GB
    before_usd: float = 0.0
    deadline_s: float = 0.0
    budget_usd: float = 0.0
    on_demand_usd_per_hour: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PossibleRuns:
    """Simulated seconds and USD of runs on each finalist, [finalists, draws].

    The same draw of two finalists shares the errors that both have in common.
    """

    total_s: Array
    cost_usd: Array

    def chance(self, *, budget_usd: float | None = None, deadline_s: float | None = None) -> Array:
        """Return each finalist's probability of keeping both budget and deadline, [finalists]; None: no limit."""
        cheap = self.cost_usd <= (np.inf if budget_usd is None else budget_usd)
        in_time = self.total_s <= (np.inf if deadline_s is None else deadline_s)
        return np.asarray((cheap & in_time).mean(axis=1), dtype=np.float64)


def possible_runs(finalists: Sequence[Finalist], *, seed: int, draws: int = DRAWS) -> PossibleRuns:
    """Simulate ``draws`` runs on each finalist; the same arguments give the same result."""
    drawn = [_runs_of(run, seed, draws) for run in finalists]
    totals, costs = np.array(drawn).reshape(len(drawn), 2, draws).swapaxes(0, 1)
    return PossibleRuns(total_s=totals, cost_usd=costs)


@lru_cache(maxsize=256)
def _runs_of(run: Finalist, seed: int, draws: int) -> tuple[Array, Array]:
    """Return total seconds and USD of a finalist's simulated runs, [draws] each; cached.

    A run that moves to machines on demand ends at its deadline.
    """
    time_error, steps_error, start_error, price_error = np.random.default_rng(seed).standard_normal((4, draws))
    # The same stream for each, so that a finalist's draws depend neither on the others nor on its place among them.
    generator = np.random.default_rng((seed, 1))
    start_factor = np.exp(run.start_up_log_sd * start_error)
    work = run.work_s * np.exp(run.step_time_log_sd * time_error + run.steps_log_sd * steps_error)
    machines = sum(pool.machines for pool in run.pools)
    per_hour, hourly, away_s, first_s = np.zeros((4, draws))
    for pool in run.pools:
        if pool.belief is not None:
            hazard, outage_h = pool.belief.sample(draws, generator)
            per_hour += hazard * effective_machines(pool.machines)
            waits_s = waits(work, hazard, SECONDS_PER_HOUR * outage_h, generator)
            away_s += pool.machines / machines * waits_s[0]
            first_s += waits_s[1]
        hourly += pool.machines * pool.usd_per_hour * np.exp(pool.price_log_sd * price_error)
    interval_s, restart_s = min(run.interval_s, _NEVER_S), run.restart_s * start_factor + run.written_s
    count, checkpoints, added_s = losses(work, per_hour, interval_s, run.checkpoint_s, restart_s, generator)
    start_up = run.start_up_s * start_factor
    usage = Usage(
        start_up_s=start_up,
        work_s=work,
        interruption_s=added_s,
        checkpoint_bytes=run.checkpoint_bytes,
        checkpoints=checkpoints + 1,
        restores=count * machines,
    )
    cost = run.before_usd + total_usd(
        usage, run.billing, machine_usd_per_hour=hourly, machines=machines, disk_gb=run.disk_gb
    )
    began_s, total_s = start_up + first_s, start_up + first_s + work + added_s + away_s
    # The last moment to move, of a run that trains evenly: two changes of machines must fit, in case the first is lost.
    pace = work / (total_s - began_s)
    move_s = (run.deadline_s - 2 * restart_s - interval_s - work - pace * began_s) / np.maximum(1 - pace, 1e-9)
    moved_usd = (
        cost * move_s / total_s + billed_hours(run.deadline_s - move_s, run.billing) * run.on_demand_usd_per_hour
    )
    moves = (total_s > run.deadline_s) & (move_s >= began_s) & (moved_usd <= run.budget_usd)
    return np.where(moves, run.deadline_s, total_s), np.where(moves, moved_usd, cost)


def losses(
    work_s: Array,
    losses_per_hour: Array,
    interval_s: float,
    checkpoint_s: float,
    restart_s: Numbers,
    generator: np.random.Generator,
) -> tuple[Array, Array, Array]:
    """Draw for each run the number of losses, the number of checkpoints, and the seconds that both add, [runs] each.

    A segment of length L is passed with probability p = e^(-L / Theta); the failures before K segments are passed have
    a negative binomial distribution, and each costs an exponential time cut off at L. A restart is a segment too.

    Args:
        work_s: seconds of training without losses, [runs].
        losses_per_hour: losses of the whole cluster, [runs].
        interval_s: seconds of work between checkpoints.
        checkpoint_s: seconds for which training pauses at each.
        restart_s: seconds from a loss to training again, without the work that is done again.
        generator: source of the draws, advanced.
    """
    rate = np.maximum(losses_per_hour, 1e-15) / SECONDS_PER_HOUR
    whole = np.floor(work_s / interval_s)
    rest = work_s - whole * interval_s
    exact = rest <= 0  # the last segment writes no checkpoint: the run ends with it
    whole, rest = np.where(exact & (whole > 0), whole - 1, whole), np.where(exact & (whole > 0), interval_s, rest)
    failed_whole, lost_whole = _failures(whole, interval_s + checkpoint_s, rate, generator)
    failed_rest, lost_rest = _failures(np.ones_like(whole), rest, rate, generator)
    count = failed_whole + failed_rest
    failed_restarts, lost_restarts = _failures(count, restart_s, rate, generator)
    added = whole * checkpoint_s + lost_whole + lost_rest + count * restart_s + lost_restarts
    return count + failed_restarts, whole, added


def waits(
    work_s: Array, losses_per_hour: Array, outage_s: Array, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Draw for each run the seconds without a pool's machines, after losses and before the first request is met.

    Two arrays, [runs]. A pool's machines are away together: in pools of four, all were there for nine tenths of the
    time that any was. With independent outages, 90 % intervals of runs on four to eighty machines hold 2 to 4 % less
    (two pools of 2023, and six of uclasystem/bamboo of 2020 and 2021).

    Args:
        work_s: seconds of training without losses, [runs].
        losses_per_hour: losses of one machine, [runs].
        outage_s: expected length of an outage after a loss, [runs].
        generator: source of the draws, advanced.
    """
    events = generator.poisson(np.minimum(work_s * losses_per_hour / SECONDS_PER_HOUR, _MOST_LOSSES))
    scale = outage_s / OUTAGE_SHAPE
    later = generator.gamma(OUTAGE_SHAPE * events) * scale
    in_outage = generator.random(len(work_s)) > 1 / (1 + losses_per_hour * outage_s / SECONDS_PER_HOUR)
    # A moment within an outage is in a long one, and anywhere in it.
    rest = generator.random(len(work_s)) * generator.gamma(OUTAGE_SHAPE + 1, size=len(work_s)) * scale
    return later, np.where(in_outage, rest, 0.0)


def _failures(segments: Array, length_s: Numbers, rate: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw for each run the failures before ``segments`` segments are passed, and the seconds lost by them, [runs].

    Args:
        segments: stretches of work to pass without a loss, [runs].
        length_s: seconds of each.
        rate: losses a second, [runs].
        generator: source of the draws, advanced.
    """
    x = np.asarray(length_s * rate, dtype=np.float64)
    passed = np.exp(-np.minimum(x, 30.0))
    count = np.zeros_like(segments)
    some = (segments > 0) & (passed < 1)
    count[some] = generator.negative_binomial(segments[some], passed[some])
    count = np.minimum(count, _MOST_LOSSES)
    # Moments of an exponential time with rate 1 cut off at x; series where the closed form loses its digits.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        up = np.expm1(np.minimum(x, 300.0))
        mean = np.where(x < 1e-3, x / 2 - x**2 / 12, 1 - x / up)
        variance = np.where(x < 1e-2, x**2 / 12 - x**4 / 240, 1 - x**2 * (1 + 1 / up) / up)
    lost = np.zeros_like(segments)
    hit = (count > 0) & (mean > 0) & (variance > 0)
    shape = count[hit] * mean[hit] ** 2 / variance[hit]
    lost[hit] = generator.gamma(shape, variance[hit] / mean[hit]) / rate[hit]
    return count, lost
