"""Deadline policies replayed on recorded spot pools: what they cost, and whether what was promised beforehand holds.

Every run is a job that fits its deadline on machines on demand. Costs are shares of what those alone would cost. Ours
starts without any knowledge of the pool (`cold`) or after two days of watching it. It is compared with the published
uniform-progress rule, with the greedy one, and with the best policy that knows the pool: for every pool and deadline
the cheapest, in hindsight, of nine exact policies around the recording's own mean rates and of both rules.

Promises take pools to be as bursty as those of the other series of recordings are; the choices know nothing of that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks._deadline_policies import Assignment, DeadlinePolicy, SwitchWhenLate, UniformProgress
from benchmarks._expected_cost import ExpectedCost
from benchmarks._outcome import Bound, Outcome, options, publish, run_benchmark
from benchmarks._policy_runs import CostPromise, PolicyRuns, run_policy
from benchmarks._pool_capacity import Capacity, Seen
from benchmarks._spot_pools import Pool, dispersion_elsewhere, read_pools

CHANGEOVER_S = 360.0
WORK_H = (4.0, 10.0)
DEADLINE_OVER_WORK = (1.15, 1.3, 1.6)
CONFIDENCES = (0.8, 0.9)
WATCHED_H = 48.0
TOLERATED_SHORTFALL = 0.03
ABOVE_KNOWING = 1.05
HINDSIGHT = (1 / 3, 1.0, 3.0)
SPOT_SHARE = 0.3
DATA = Path(os.environ.get("HETOPT_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One assignment with the policy for it, and what the policy promises for each series of recordings."""

    assignment: Assignment
    ours: ExpectedCost
    promises: Mapping[str, CostPromise]

    @classmethod
    def of(cls, work_h: float, factor: float, dispersions: Mapping[str, float], *, runs: int) -> Setting:
        """Prices are shares of the on-demand price, so that one setting serves every pool."""
        assignment = Assignment(
            work_s=work_h * 3600,
            deadline_s=work_h * factor * 3600,
            changeover_s=CHANGEOVER_S,
            spot_usd_per_hour=SPOT_SHARE,
            on_demand_usd_per_hour=1.0,
        )
        capacity = Capacity.unknown()
        ours = ExpectedCost(assignment, capacity)
        return cls(
            assignment=assignment,
            ours=ours,
            promises={
                series: CostPromise.of(ours, assignment, capacity, seed=0, runs=runs, dispersion=dispersion)
                for series, dispersion in dispersions.items()
            },
        )


def replay(setting: Setting, pool: Pool, runs: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Costs as shares of on-demand alone, and whether promises held, an entry a run; empty if the pool is too short."""
    assignment = setting.assignment
    starts = pool.starts(runs, assignment.deadline_s)
    if not len(starts):
        return {}
    available = pool.windows(pool.available, starts, assignment.deadline_s).astype(np.bool_)
    shares = pool.windows(pool.spot_share, starts, assignment.deadline_s).astype(np.float64)
    alone = (assignment.work_s + assignment.changeover_s) / 3600

    def run(policy: DeadlinePolicy, seen: Seen | None = None) -> PolicyRuns:
        return run_policy(policy, assignment, available, pool.gap_s, seen=seen, spot_usd_per_hour=shares)

    watched = pool.watched(starts, WATCHED_H)
    done = {
        "uniform_progress": run(UniformProgress()),
        "greedy": run(SwitchWhenLate()),
        "cold": run(setting.ours),
        "watched": run(setting.ours, watched),
    }
    hindsight = {
        (loss, back): run(
            ExpectedCost(assignment, Capacity.known(loss * pool.loss_per_hour, back * pool.back_per_hour))
        )
        for loss in HINDSIGHT
        for back in HINDSIGHT
    }
    done["known_rates"] = hindsight[1.0, 1.0]
    known = min([*hindsight.values(), done["uniform_progress"], done["greedy"]], key=lambda one: one.cost_usd.mean())
    found = {f"cost_{name}": one.cost_usd / alone for name, one in {**done, "knowing": known}.items()}
    # A promise is made at the price of the moment; the policy's own is that of the setting.
    priced = shares[0] / SPOT_SHARE
    for name, seen in (("cold", Seen.nothing(len(starts))), ("watched", watched)):
        in_time = done[name].finished_s <= assignment.deadline_s
        found[f"in_time_{name}"] = in_time.astype(np.float64)
        for confidence in CONFIDENCES:
            budget = setting.promises[pool.series].budget_usd(seen, confidence) * np.maximum(1.0, priced)
            kept = in_time & (done[name].cost_usd <= budget + 1e-9)
            found[f"kept_{name}_{confidence:g}"] = kept.astype(np.float64)
            found[f"budget_{name}_{confidence:g}"] = budget / alone
    return found


def main() -> None:
    """Replay every pool in every setting."""
    asked = options(__doc__)
    pools = read_pools(DATA / "spot-traces")
    if not pools:
        print(f"no spot traces under {DATA}; set HETOPT_SHARED_DATA to the folder that holds them", file=sys.stderr)
        publish(Outcome(benchmark="spot_replay", quick=asked.quick, figures={}), asked.json_file)
        return
    dispersions = {pool.series: dispersion_elsewhere(pools, pool.series) for pool in pools}
    print(f"burstiness of the other series: {', '.join(f'{x:.2f}' for x in dispersions.values())}", file=sys.stderr)
    runs = 4 if asked.smoke else 20 if asked.quick else 80
    works = WORK_H[:1] if asked.smoke else WORK_H[1:] if asked.quick else WORK_H
    factors = DEADLINE_OVER_WORK[1:2] if asked.smoke else DEADLINE_OVER_WORK
    print(
        f"{'pool':<42}{'work':>6}{'until':>7}{'uniform':>9}{'greedy':>8}{'knowing':>9}{'cold':>7}{'watched':>9}{'kept':>6}"
    )
    rows: list[dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
    for work_h in works:
        for factor in factors:
            setting = Setting.of(work_h, factor, dispersions, runs=20 if asked.quick else 60)
            for pool in pools[:3] if asked.smoke else pools:
                print(f"{work_h:g} h in {work_h * factor:g} h: {pool.name}", file=sys.stderr)
                found = replay(setting, pool, runs)
                if not found:
                    continue
                rows.append(found)
                mean = {name: float(values.mean()) for name, values in found.items()}
                print(
                    f"{pool.name:<42}{work_h:>4g} h{work_h * factor:>5.3g} h{mean['cost_uniform_progress']:>9.3f}"
                    f"{mean['cost_greedy']:>8.3f}{mean['cost_knowing']:>9.3f}{mean['cost_cold']:>7.3f}"
                    f"{mean['cost_watched']:>9.3f}{mean['kept_watched_0.9']:>6.0%}"
                )
    # Every pool and deadline counts as much as another, whatever its number of runs.
    mean = {name: float(np.mean([row[name].mean() for row in rows])) for name in rows[0]}
    figures = {
        "runs": float(sum(len(row["cost_cold"]) for row in rows)),
        "cost_cold": mean["cost_cold"],
        "cost_watched": mean["cost_watched"],
        "cold_over_knowing": mean["cost_cold"] / mean["cost_knowing"],
        "watched_over_knowing": mean["cost_watched"] / mean["cost_knowing"],
        "cold_over_uniform_progress": mean["cost_cold"] / mean["cost_uniform_progress"],
        "in_time_cold": mean["in_time_cold"],
        "in_time_watched": mean["in_time_watched"],
    }
    goals: dict[str, dict[Bound, float]] = {
        "cold_over_knowing": {"at_most": ABOVE_KNOWING},
        "watched_over_knowing": {"at_most": ABOVE_KNOWING},
        "cold_over_uniform_progress": {"at_most": 1.0},
    }
    for name in ("cold", "watched"):
        for confidence in CONFIDENCES:
            figure = f"kept_{name}_{confidence:g}".replace(".", "_")
            figures[figure] = mean[f"kept_{name}_{confidence:g}"]
            figures[f"budget_{name}_{confidence:g}".replace(".", "_")] = mean[f"budget_{name}_{confidence:g}"]
            goals[figure] = {"at_least": round(confidence - TOLERATED_SHORTFALL, 4)}
    publish(
        Outcome(
            benchmark="spot_replay",
            quick=asked.quick,
            figures={name: round(value, 4) for name, value in figures.items()},
            goals=goals,
            baselines={
                name: round(mean[name], 4)
                for name in ("cost_uniform_progress", "cost_greedy", "cost_known_rates", "cost_knowing")
            },
        ),
        asked.json_file,
    )


if __name__ == "__main__":
    run_benchmark(main)
