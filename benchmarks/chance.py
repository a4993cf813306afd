"""Whether the chance in a plan's headline is kept: runs simulated event by event, beside what the planner said.

Plans are made as `hetopt recommend` makes them, by search and possible runs, for random parts of the catalogue, limits
and seeds. Each is then run many times in a simulation of its own, which shares no code with the planner's: one machine,
one loss and one restart at a time, from the uncertainties that the plan states (step time, steps, provisioning and
price, the belief of each pool's preemptions, machines of a pool that go together).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._outcome import Outcome, Results, options, publish, run_benchmark
from benchmarks._search_spaces import EPOCHS, Question, everything, whole
from hetopt.optimizer.convergence.convergence import EpochSteps
from hetopt.optimizer.cost.bill import beside_usd_per_hour
from hetopt.optimizer.cost.preemption_rate import SHOCKS, PreemptionRatePosterior
from hetopt.optimizer.recommendation.confidence import confident
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Effort, Found, search

PLANS, RUNS = 200, 2000
QUICK_PLANS, QUICK_RUNS = 60, 500
TYPES, MACHINES = 6, 8
TOLERATED = 0.03
AGAIN = 10
"""Times as many runs for a plan that seems short by more.
By 2,000 runs, beside the planner's 2,000, a chance of 80 % is
known to 1.3 points: of 200 plans that keep all they say, the worst then seems short by some 3.5. By ten times as many
only the planner's own scatter is left, 0.9 points."""
BANDS = (0.0, 0.5, 0.7, 0.85, 0.95, 1.0)
_MOST_EVENTS = 100_000
"""Of one run. One that is not done by then never is, and keeps no limit."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Machines of one type and market, as the plan states them."""

    machines: int
    usd_per_hour: float
    price_log_sd: float
    belief: PreemptionRatePosterior | None


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a plan says of itself: figures, and how well each is known."""

    pools: tuple[Pool, ...]
    work_s: float
    step_time_log_sd: float
    steps_log_sd: float
    startup_s: float
    startup_log_sd: float
    detection_s: float
    checkpoint_s: float
    interval_s: float
    resumes: bool
    beside_usd_per_hour: float
    fixed_usd: float
    minimum_s: float


@dataclass(frozen=True, kw_only=True)
class Told:
    """A plan's chance as it was said, and as often as its limits were kept; ``once``: by how much it seemed short at
    first, which is what counts unless it was simulated again."""

    name: str
    said: float
    kept: float
    once: float


def run_once(plan: Stated, draw: random.Random) -> tuple[float, float]:
    """Seconds and dollars of one run of a plan, from the request to its last step."""
    work_s = plan.work_s * math.exp(draw.gauss(0.0, plan.step_time_log_sd) + draw.gauss(0.0, plan.steps_log_sd))
    hazards = [_hazard_per_s(pool.belief, draw) for pool in plan.pools]
    now_s, done_s, saved_s = _startup_s(plan, draw), 0.0, 0.0
    next_loss_s = now_s + _until_loss_s(plan, hazards, draw)
    for _ in range(_MOST_EVENTS):
        # To the next checkpoint, or to the end, which writes none.
        left_s = work_s - done_s
        stretch_s = min(plan.interval_s, left_s) if plan.resumes else left_s
        ends = stretch_s >= left_s
        passed_s = now_s + stretch_s + (0.0 if ends else plan.checkpoint_s)
        if passed_s <= next_loss_s:
            now_s, done_s, saved_s = passed_s, done_s + stretch_s, done_s + stretch_s
            if ends:
                break
            continue
        while next_loss_s < math.inf:
            # Machines may be taken while their replacements boot, too.
            now_s = next_loss_s
            back_s = now_s + plan.detection_s + _startup_s(plan, draw)
            next_loss_s = now_s + _until_loss_s(plan, hazards, draw)
            if next_loss_s >= back_s:
                now_s = back_s
                break
        done_s = saved_s = saved_s if plan.resumes else 0.0
    else:
        return math.inf, math.inf
    hourly = plan.beside_usd_per_hour + sum(
        pool.machines * pool.usd_per_hour * math.exp(draw.gauss(0.0, pool.price_log_sd)) for pool in plan.pools
    )
    return now_s, plan.fixed_usd + hourly * max(now_s, plan.minimum_s) / 3600


def _startup_s(plan: Stated, draw: random.Random) -> float:
    return plan.startup_s * math.exp(draw.gauss(0.0, plan.startup_log_sd))


def _hazard_per_s(belief: PreemptionRatePosterior | None, draw: random.Random) -> float:
    if belief is None:
        return 0.0
    part = belief.scarce if draw.random() < belief.scarce_chance else belief.calm
    return draw.gammavariate(part.shape, 1 / part.rate_h) / 3600


def _until_loss_s(plan: Stated, hazards: list[float], draw: random.Random) -> float:
    """Seconds until any machine is taken: by itself, or by a shock that takes some machines of its pool."""
    soonest_s = math.inf
    for pool, hazard in zip(plan.pools, hazards, strict=True):
        if hazard <= 0:
            continue
        soonest_s = min(soonest_s, draw.expovariate((1 - SHOCKS.share) * hazard * pool.machines))
        shock_s = 0.0
        while shock_s < soonest_s:
            shock_s += draw.expovariate(SHOCKS.share / SHOCKS.reach * hazard)
            if any(draw.random() < SHOCKS.reach for _ in range(pool.machines)):
                soonest_s = min(soonest_s, shock_s)
    return soonest_s


def stated(question: Question, found: Found) -> Stated:
    """The chosen plan with its uncertainties."""
    assert found.chosen is not None
    row, told, job = found.chosen, found.forecast, question.job
    machines = found.cluster(row).machines
    offers = [(question.space.options[index], count) for index, count in machines]
    beside = float(beside_usd_per_hour(job.billing, float(told.disk_gb[row])))
    hourly = sum(option.usd_per_hour * count for option, count in offers) + beside * sum(count for _, count in offers)
    return Stated(
        pools=tuple(
            Pool(
                machines=count,
                usd_per_hour=option.usd_per_hour,
                price_log_sd=option.offer.price.log_sd,
                belief=option.belief,
            )
            for option, count in offers
        ),
        work_s=float(told.work_s[row]),
        step_time_log_sd=float(told.step_time_log_sd[row]),
        steps_log_sd=float(told.steps_log_sd[row]),
        startup_s=float(told.startup_s[row]),
        startup_log_sd=job.startup_log_sd,
        detection_s=job.detection_s,
        checkpoint_s=job.checkpoint_s,
        interval_s=float(told.interval_s[row]),
        resumes=job.resumes,
        beside_usd_per_hour=beside * sum(count for _, count in offers),
        # Requests, storage and transfer: what the bill has beside hours.
        fixed_usd=max(0.0, float(told.cost_usd[row]) - hourly * float(told.total_s[row]) / 3600),
        minimum_s=job.billing.minimum_billed_s.value,
    )


def questions(count: int, *, seed: int) -> Iterator[tuple[Question, float | None]]:
    """Random parts of the catalogue in random markets, with limits near to what is possible; some ask for a chance."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        name = sorted(EPOCHS)[number % len(EPOCHS)]
        market = ("any", "spot")[int(draw.integers(2))]
        space, job = whole(name, market=market)
        part = replace(
            space,
            options=tuple(space.options[one] for one in draw.choice(len(space.options), TYPES, replace=False).tolist()),
            max_machines=MACHINES,
        )
        # From minutes, where provisioning and the minute's minimum decide, to days.
        assert isinstance(job.steps, EpochSteps)
        job = replace(job, steps=replace(job.steps, epochs=EPOCHS[name] * float(10 ** draw.uniform(-2, 1))))
        _, every = everything(part, job, 1)
        kind = ("budget", "deadline", "both")[int(draw.integers(3))]
        # Limits that the best tenth of the clusters just keep, or keep with something to spare.
        best = np.argsort(every.total_s * every.cost_usd)[: max(1, len(every) // 10)]
        row, loose = int(draw.choice(best)), float(draw.uniform(0.95, 2.0))
        limits = Limits(
            budget_usd=loose * float(every.cost_usd[row]) if kind != "deadline" else None,
            deadline_s=loose * float(every.total_s[row]) if kind != "budget" else None,
            time_weight=(0.0, 0.5, 1.0)[int(draw.integers(3))],
        )
        asked = (None, 0.6, 0.8, 0.95)[int(draw.integers(4))]
        yield Question(name=f"{number} {name} {market} {kind}", space=part, job=job, limits=limits), asked


def measure(plans: int, runs: int, *, seed: int = 0) -> list[Told]:
    """The plans that were found, each with what it said and how often that was kept."""
    told: list[Told] = []
    number = 0
    for question, asked in questions(3 * plans, seed=seed):
        number += 1
        found = search(question.space, question.job, question.limits, seed=number, effort=Effort(types=2, trials=0))
        if found.chosen is None:
            continue
        chosen = confident(question.space, question.job, found, question.limits, asked, seed=number)
        plan, draw = stated(question, chosen.found), random.Random(1_000_003 * (seed + 1) + number)
        limits = question.limits
        kept = _kept(plan, limits, runs, draw)
        once = chosen.chance - kept
        if once > TOLERATED:
            kept = _kept(plan, limits, AGAIN * runs, random.Random(2_000_003 * (seed + 1) + number))
        told.append(Told(name=question.name, said=chosen.chance, kept=kept, once=once))
        if len(told) == plans:
            break
        if len(told) % 20 == 0:
            print(f"{len(told)} of {plans} plans", file=sys.stderr)
    return told


def _kept(plan: Stated, limits: Limits, runs: int, draw: random.Random) -> float:
    """How often a plan keeps its limits, of so many runs."""
    return statistics.fmean(
        total_s <= (limits.deadline_s or math.inf) and usd <= (limits.budget_usd or math.inf)
        for total_s, usd in (run_once(plan, draw) for _ in range(runs))
    )


def results_of(told: list[Told], runs: int) -> Results:
    """The figures, and a table of them by what was said."""
    results = Results()
    print(f"{len(told)} plans, {runs} simulated runs of each")
    print(f"{'said':>12}{'plans':>8}{'said, mean':>12}{'kept, mean':>12}")
    worst = 0.0
    for low, high in itertools.pairwise(BANDS):
        some = [one for one in told if low <= one.said < high or (one.said == high == 1.0)]
        if not some:
            continue
        said, kept = (statistics.fmean(getattr(one, name) for one in some) for name in ("said", "kept"))
        print(f"{f'{100 * low:.0f}-{100 * high:.0f} %':>12}{len(some):>8}{100 * said:>11.1f}%{100 * kept:>11.1f}%")
        if len(some) >= 5:
            worst = max(worst, said - kept)
    shortfalls = sorted((one.said - one.kept for one in told), reverse=True)
    results.goal("shortfall_mean", statistics.fmean(shortfalls), at_most=TOLERATED)
    results.goal("shortfall_worst_band", worst, at_most=TOLERATED)
    results.goal("plans_short_by_over_3_points", sum(one > TOLERATED for one in shortfalls) / len(told), at_most=0.05)
    results.figures["plans"] = float(len(told))
    results.figures["plans_simulated_again"] = float(sum(one.once > TOLERATED for one in told))
    results.figures["shortfall_worst_plan_at_first"] = round(max(one.once for one in told), 4)
    results.figures["shortfall_worst_plan"] = round(shortfalls[0], 4)
    results.figures["error_median"] = round(statistics.median(abs(one) for one in shortfalls), 4)
    for one in sorted(told, key=lambda one: one.kept - one.said)[:5]:
        print(f"  {one.name}: said {one.said:.3f}, kept {one.kept:.3f}")
    return results


def main() -> None:
    asked = options(__doc__)
    plans, runs = (QUICK_PLANS, QUICK_RUNS) if asked.quick else (PLANS, RUNS)
    if asked.smoke:
        plans, runs = 4, 50
    outcome: Outcome = results_of(measure(plans, runs), runs).outcome("chance", quick=asked.quick)
    publish(outcome, asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
