"""How close unequal workers come to the physical limit, in a rehearsed cluster, against DistributedDataParallel."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._outcome import Outcome, options, publish, run_benchmark
from benchmarks._rehearsal import (
    Log,
    Ratio,
    Side,
    best_compute_s,
    compute_s,
    declared_times,
    equal_shares,
    need_namespaces,
    ratio,
    rehearse,
    share_changes,
    step_time_s,
)
from hetopt.core.batch_partition import solve_shares
from hetopt.core.run_spec import DeclaredTime, EmulatedHost, RunSpec, StopRule, WorkerSpec

SPEEDS = ((9, 12, 18), (12, 12, 8, 16), (9, 9, 6, 24), (6, 6, 4, 32), (2, 17, 20))
"""Cores of the workers in the published clusters (arXiv 2305.12213; OmniLearn's levels)."""

POLICIES: tuple[str, ...] = (
    "uniform", "static", "proportional", "dynamic", "omnilearn", "allocation", "model",
)  # fmt: skip
TOY = f"{Path(__file__).with_name('_toy.py')}:task"
BATCH = 96
FIXED_S = 0.004
"""What a step costs a worker before its first sample."""

PERIOD = 5
"""Control period, steps: short, so that slow policies need not be waited for."""

NOISY_PERIOD = 10
"""Control period where times are noisy."""

DDP, TUNED = "plain DDP", "tuned DDP"
SCRIPT = "script with a session"
AS_SCRIPT = (6, 6, 4, 32)
"""The cluster on which the job is done by a script as well."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The rounds, steps and durations of a form of the benchmark."""

    rounds: int
    best_step_s: float
    steps: int
    equal_rounds: int
    speeds: tuple[tuple[float, ...], ...] = SPEEDS


SMOKE = Scale(rounds=1, best_step_s=0.03, steps=20, equal_rounds=1, speeds=SPEEDS[3:4])
QUICK = Scale(rounds=1, best_step_s=0.045, steps=26, equal_rounds=2)
FULL = Scale(rounds=3, best_step_s=0.08, steps=35, equal_rounds=7)


def cluster(
    speeds: Sequence[float], *, best_step_s: float, batch: int = BATCH, fixed_s: float = FIXED_S
) -> tuple[list[EmulatedHost], tuple[WorkerSpec, ...]]:
    """Return hosts of these speeds on unlimited links, and workers whose best split computes for ``best_step_s``."""
    hosts = [EmulatedHost(name=f"h{place}", speed=speed) for place, speed in enumerate(speeds)]
    sample_s = (best_step_s - fixed_s) * sum(speeds) / batch
    workers = tuple(
        WorkerSpec(
            host=host.name,
            type=f"speed {host.speed:g}",
            local_batch_size=share,
            threads=1,
            declared=DeclaredTime(fixed_s=fixed_s, per_sample_s=sample_s / host.speed),
        )
        for host, share in zip(hosts, equal_shares(len(hosts), batch), strict=True)
    )
    return hosts, workers


def spec(workers: tuple[WorkerSpec, ...], policy: str, *, steps: int, task: str = TOY, period: int = PERIOD) -> RunSpec:
    """Return the spec of a run of the toy job."""
    return RunSpec(
        task=task,
        workers=workers,
        batch_policy=policy,
        stop=StopRule(max_steps=steps),
        evaluate_every_epochs=1e6,
        control_period_steps=period,
        checkpoint_every_s=1e6,
    )


def script_side(run: RunSpec) -> Side:
    """Return the side of a script with a session, which evaluates by itself."""
    usual = RunSpec.model_fields["evaluate_every_epochs"].default
    return Side(name=SCRIPT, by="session", spec=run.model_copy(update={"evaluate_every_epochs": usual}))


def by_speed(workers: tuple[WorkerSpec, ...], batch: int) -> tuple[WorkerSpec, ...]:
    """Return the workers with optimal local batch sizes for their declared speeds, as from a perfect profile."""
    shares = solve_shares(declared_times(workers), batch).local_batch_sizes
    return tuple(
        worker.model_copy(update={"local_batch_size": share}) for worker, share in zip(workers, shares, strict=True)
    )


def adjustments_to(log: Log, workers: Sequence[WorkerSpec], start: Sequence[int], part: float) -> int | None:
    """Return the changes of local batch sizes until the step is within ``part`` of the best possible; None: never."""
    total = sum(start)
    best_s = best_compute_s(workers, total)
    tried = [list(start), *(change["after"] for change in share_changes(log))]
    for count, shares in enumerate(tried):
        if best_s / compute_s(workers, shares) >= part:
            return count
    return None


def speeds_part(scale: Scale, results: Outcome) -> None:
    """Measure every batch policy from equal local batches on the published clusters."""
    print(f"step-time speed-up over plain DDP (equal split), {scale.rounds} round(s), best step {scale.best_step_s} s")
    print(f"{'speeds':>14} {'ideal':>6}  " + "  ".join(f"{name:>12}" for name in POLICIES) + "   changes (model)")
    for speeds in scale.speeds:
        hosts, workers = cluster(speeds, best_step_s=scale.best_step_s)
        known = by_speed(workers, BATCH)
        sides = [
            Side(name=DDP, by="ddp", spec=spec(workers, "uniform", steps=2 * PERIOD)),
            *(
                Side(
                    name=policy,
                    by="hetopt",
                    spec=spec(
                        known if policy == "static" else workers,
                        policy,
                        steps=2 * PERIOD if policy in ("uniform", "static") else scale.steps,
                    ),
                )
                for policy in POLICIES
            ),
        ]
        if speeds == AS_SCRIPT:
            sides.append(script_side(spec(workers, "model", steps=scale.steps)))
        logs = rehearse(hosts, sides, rounds=scale.rounds)
        plain = [step_time_s(log, from_step=PERIOD) for log in logs[DDP]]
        ideal = compute_s(workers, equal_shares(len(workers), BATCH)) / best_compute_s(workers, BATCH)
        reached: dict[str, Ratio] = {}
        for policy in POLICIES:
            settled = PERIOD if policy in ("uniform", "static") else scale.steps - 2 * PERIOD
            reached[policy] = ratio(plain, [step_time_s(log, from_step=settled) for log in logs[policy]])
        if speeds == AS_SCRIPT:
            settled = scale.steps - 2 * PERIOD
            script = ratio(plain, [step_time_s(log, from_step=settled) for log in logs[SCRIPT]])
            results.goal("session_share_of_ideal_6_6_4_32", script.median / ideal, at_least=0.95)
            print(f"{'as a script':>14} {ideal:>6.2f}  {script}", flush=True)
        needed = [adjustments_to(log, workers, equal_shares(len(workers), BATCH), 0.95) for log in logs["model"]]
        changes = max(len(workers) * 99 if count is None else count for count in needed)
        label = "_".join(map(str, speeds))
        results.goal(f"share_of_ideal_{label}", reached["model"].median / ideal, at_least=0.95)
        results.goal(f"adjustments_to_95_percent_{label}", changes, at_most=3)
        results.figures[f"ideal_speed_up_{label}"] = round(ideal, 3)
        for policy in POLICIES:
            if policy != "model":
                results.baselines[f"speed_up_{policy}_{label}"] = round(reached[policy].median, 3)
        results.figures[f"speed_up_{label}"] = round(reached["model"].median, 3)
        cells = "  ".join(f"{reached[name].median:>12.2f}" for name in POLICIES)
        spread = f"{reached['model'].low:.2f} – {reached['model'].high:.2f}"
        print(f"{speeds!s:>14} {ideal:>6.2f}  {cells}   {changes} ({spread})", flush=True)


EQUAL_JOBS = {
    "small network": (TOY, 96, 200),
    "ResNet-20": (f"{Path(__file__).with_name('_toy.py')}:resnet", 32, 30),
    "4 M parameters": (f"{Path(__file__).with_name('_toy.py')}:wide", 32, 30),
}


def equal_part(scale: Scale, results: Outcome) -> None:
    """Measure the overhead over plain DDP on two equal workers, where there is nothing to win."""
    print(f"\nequal workers: hetopt's step over plain DDP's, {scale.equal_rounds} interleaved rounds")
    hosts = [EmulatedHost(name=f"h{place}", rate_bits_per_s=1e9) for place in range(2)]
    for name, (task, batch, steps) in EQUAL_JOBS.items():
        workers = tuple(
            WorkerSpec(host=host.name, type="equal", local_batch_size=batch // 2, threads=1) for host in hosts
        )
        run = spec(workers, "model", steps=steps, task=task, period=NOISY_PERIOD)
        sides = [
            Side(name=DDP, by="ddp", spec=run),
            Side(name=TUNED, by="ddp-tuned", spec=run),
            Side(name="hetopt", by="hetopt", spec=run),
            script_side(run),
        ]
        logs = rehearse(hosts, sides, rounds=scale.equal_rounds)
        measured = [
            [step_time_s(log, from_step=NOISY_PERIOD) for log in logs[side]] for side in ("hetopt", DDP, SCRIPT, TUNED)
        ]
        over, by_script = ratio(*measured[:2]), ratio(measured[2], measured[1])
        key = name.lower().replace(" ", "_").replace("-", "")
        results.goal(f"equal_workers_over_ddp_{key}", over.median, at_most=1.02)
        results.goal(f"session_over_ddp_{key}", by_script.median, at_most=1.02)
        results.figures[f"equal_workers_over_tuned_ddp_{key}"] = round(ratio(measured[0], measured[3]).median, 4)
        results.baselines[f"ddp_step_time_s_{key}"] = round(statistics.median(measured[1]), 5)
        print(
            f"{name:>16}: {over}, as a script {by_script}   (DDP {statistics.median(measured[1]) * 1e3:.1f} ms a step)",
            flush=True,
        )


PARTS = {"speeds": speeds_part, "equal": equal_part}


def main() -> None:
    """Run every part, or the one that is asked for (in a smoke run the speeds alone), and publish."""
    asked = options(__doc__, parts=list(PARTS))
    need_namespaces(or_skip=asked.smoke)
    scale = SMOKE if asked.smoke else QUICK if asked.quick else FULL
    results = Outcome(benchmark="balance", quick=asked.quick)
    for name in (asked.part,) if asked.part is not None else ("speeds",) if asked.smoke else tuple(PARTS):
        print(f"balance: {name}", file=sys.stderr, flush=True)
        PARTS[name](scale, results)
    publish(results, asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
