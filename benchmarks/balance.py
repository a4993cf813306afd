"""How close unequal workers come to the physical limit, in a rehearsed cluster, against DistributedDataParallel."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._quality import BIG_JOBS, DIGITS, data_folder, qualities, time_to
from benchmarks._rehearsal import (
    Log,
    Ratio,
    Side,
    best_compute_s,
    compute_s,
    equal_shares,
    launch,
    need_namespaces,
    ratio,
    rehearse,
    share_changes,
    step_time_s,
)
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.events.log import Event
from hetopt.core.run_spec import BatchPolicy, RunSpec, StopRule, WorkerSpec
from hetopt.core.scaled_emulation import Change, DeclaredTime, EmulatedHost, ScaledEmulation

SPEEDS = ((9, 12, 18), (12, 12, 8, 16), (9, 9, 6, 24), (6, 6, 4, 32), (2, 17, 20))
"""Cores of the workers in the published clusters (arXiv 2305.12213; OmniLearn's levels)."""

POLICIES: tuple[BatchPolicy, ...] = (
    "uniform", "static", "proportional", "dynamic", "omnilearn", "allocation", "model",
)  # fmt: skip
TOY = f"{Path(__file__).with_name('_toy.py')}:task"
BATCH = 96
FIXED_S = 0.004
"""What a step costs a worker before its first sample."""

PERIOD = 5
"""Control period, steps: short, so that slow policies need not be waited for."""

USUAL_PERIOD = 20
NOISY_PERIOD = 10
"""Control period where times are noisy."""

NOISE = 0.05
DDP, TUNED = "plain DDP", "tuned DDP"
SCRIPT = "script with a session"
AS_SCRIPT = (6, 6, 4, 32)
"""The cluster on which the job is done by a script as well."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How long the benchmark may take."""

    rounds: int
    best_step_s: float
    steps: int
    noise_steps: int
    level_periods: int
    equal_rounds: int
    accuracy_rounds: int
    is_quick: bool
    speeds: tuple[tuple[float, ...], ...] = SPEEDS
    only: str | None = None


QUICK = Scale(
    rounds=1, best_step_s=0.045, steps=26, noise_steps=100, level_periods=6, equal_rounds=2, accuracy_rounds=1,
    is_quick=True,
)  # fmt: skip
FULL = Scale(
    rounds=3, best_step_s=0.08, steps=35, noise_steps=500, level_periods=8, equal_rounds=7, accuracy_rounds=1,
    is_quick=False,
)  # fmt: skip

SMOKE = Scale(
    rounds=1, best_step_s=0.03, steps=20, noise_steps=20, level_periods=3, equal_rounds=1, accuracy_rounds=1,
    is_quick=True, speeds=SPEEDS[3:4],
)  # fmt: skip


def cluster(
    speeds: Sequence[float], *, best_step_s: float, batch: int = BATCH, noise: float = 0.0, fixed_s: float = FIXED_S
) -> tuple[list[EmulatedHost], tuple[WorkerSpec, ...]]:
    """Hosts of these speeds on unlimited links, whose best split of the batch computes for ``best_step_s``."""
    hosts = [EmulatedHost(name=f"h{place}", speed=speed) for place, speed in enumerate(speeds)]
    sample_s = (best_step_s - fixed_s) * sum(speeds) / batch
    workers = tuple(
        WorkerSpec(
            host=host.name,
            type=f"speed {host.speed:g}",
            local_batch_size=share,
            threads=1,
            declared=DeclaredTime(fixed_s=fixed_s, per_sample_s=sample_s / host.speed, noise=noise),
        )
        for host, share in zip(hosts, equal_shares(len(hosts), batch), strict=True)
    )
    return hosts, workers


def spec(
    workers: tuple[WorkerSpec, ...], policy: BatchPolicy, *, steps: int, task: str = TOY, period: int = PERIOD
) -> RunSpec:
    """A run of the toy job."""
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
    """The workers with the exact shares for their declared speeds: what a perfect profile would have planned."""
    times = [
        WorkerTime(fixed_s=worker.declared.fixed_s, per_sample_s=worker.declared.per_sample_s, min_samples=1)
        for worker in workers
        if worker.declared is not None
    ]
    shares = solve_shares(times, batch).local_batch_sizes
    return tuple(
        worker.model_copy(update={"local_batch_size": share}) for worker, share in zip(workers, shares, strict=True)
    )


def adjustments_to(log: Log, workers: Sequence[WorkerSpec], start: Sequence[int], part: float) -> int | None:
    """Changes of the shares until the declared step is within ``part`` of the best possible; None: never."""
    total = sum(start)
    best_s = best_compute_s(workers, total)
    tried = [list(start), *(change["after"] for change in share_changes(log))]
    for count, shares in enumerate(tried):
        if best_s / compute_s(workers, shares) >= part:
            return count
    return None


def speeds_part(scale: Scale, results: Results) -> None:
    """Every policy from equal shares on the published clusters."""
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


def noise_part(scale: Scale, results: Results) -> None:
    """Whether 5 % noise moves settled shares."""
    hosts, workers = cluster((9, 9, 6, 24), best_step_s=0.05, noise=NOISE)
    settle = 6 * NOISY_PERIOD
    run = spec(workers, "model", steps=settle + scale.noise_steps, period=NOISY_PERIOD)
    side = Side(name="noise", by="hetopt", spec=run)
    [log] = rehearse(hosts, [side], rounds=1)["noise"]
    late = [change for change in share_changes(log) if change["step"] > settle]
    results.goal("share_changes_in_noise", len(late), at_most=0)
    print(f"\n5 % timing noise: {len(late)} share changes in {scale.noise_steps} steps after the first {settle}")


LEVELS = ((12, 12, 12, 12), (12, 12, 8, 16), (9, 9, 6, 24), (6, 6, 4, 32))
"""Levels 1, 2, 4 and 8 of OmniLearn's schedule: fastest over slowest, 48 cores each."""

SCHEDULE = (0, 1, 2, 3, 3, 2, 1, 0)
SLOWED = 3.0


def drift_part(scale: Scale, results: Results) -> None:
    """Speeds that change while the run goes on, under the product's launcher; with 5 % noise all the while."""
    *alike, slowed = LEVELS[0]
    stages: list[tuple[float, ...]] = [*(LEVELS[level] for level in SCHEDULE), (*alike, slowed / SLOWED)]
    hosts, workers = cluster(stages[0], best_step_s=scale.best_step_s, noise=NOISE)
    length = scale.level_periods * NOISY_PERIOD
    changes = tuple(
        Change(host=host.name, at_step=stage * length, speed=speed)
        for stage, speeds in enumerate(stages)
        if stage > 0
        for host, speed, before in zip(hosts, speeds, stages[stage - 1], strict=True)
        if speed != before
    )
    run = spec(workers, "model", steps=len(stages) * length, period=NOISY_PERIOD)
    log = launch(run.model_copy(update={"miniature": ScaledEmulation(hosts=tuple(hosts), changes=changes)}))
    print(f"\nspeeds change every {scale.level_periods} control periods, {NOISE:.0%} timing noise")
    print(f"{'speeds':>20} {'periods to 95 %':>16} {'share of ideal at the end':>26}")
    worst_periods, worst_end = 0, 1.0
    for stage, speeds in enumerate(stages):
        times = at_speeds(workers, speeds, hosts)
        best_s = best_compute_s(times, BATCH)
        periods = periods_of_stage(log, stage, length)
        good = [best_s / compute_s(times, period["local_batch_sizes"]) >= 0.95 for period in periods]
        needed = next((count for count in range(len(good)) if all(good[count:])), len(good) + 1)
        end = best_s / compute_s(times, periods[-1]["local_batch_sizes"])
        worst_periods, worst_end = max(worst_periods, needed), min(worst_end, end)
        print(f"{tuple(round(speed, 1) for speed in speeds)!s:>20} {needed:>16} {end:>26.3f}")
    results.goal("periods_to_95_percent_after_a_change", worst_periods, at_most=5)
    results.goal("share_of_ideal_after_a_change", worst_end, at_least=0.95)


def at_speeds(
    workers: Sequence[WorkerSpec], speeds: Sequence[float], hosts: Sequence[EmulatedHost]
) -> list[WorkerSpec]:
    """The workers with the times that they have at other speeds."""
    changed = []
    for worker, speed, host in zip(workers, speeds, hosts, strict=True):
        assert worker.declared is not None
        factor = host.speed / speed
        declared = DeclaredTime(
            fixed_s=worker.declared.fixed_s * factor, per_sample_s=worker.declared.per_sample_s * factor
        )
        changed.append(worker.model_copy(update={"declared": declared}))
    return changed


def periods_of_stage(log: Log, stage: int, length: int) -> list[Event]:
    """The control periods from the first whole one after a stage's change took effect to the stage's end."""
    steps = [event for event in log if event["event"] == "step"]
    begin = stage * length
    if stage:
        at = [event["step"] for event in log if event["event"] == "condition_changed"]
        begin = max(step for step in at if step < (stage + 1) * length)
    return [
        event for event in steps if begin < event["step"] - event["steps"] + 1 and event["step"] <= (stage + 1) * length
    ]


EQUAL_JOBS = {
    "small network": (TOY, 96, 200),
    "ResNet-20": (f"{Path(__file__).with_name('_toy.py')}:resnet", 32, 30),
    "4 M parameters": (f"{Path(__file__).with_name('_toy.py')}:wide", 32, 30),
}


def equal_part(scale: Scale, results: Results) -> None:
    """Two equal workers at full speed on limited links: what the whole machinery costs where it has nothing to win."""
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


def control_part(scale: Scale, results: Results) -> None:
    """What gathering and deciding costs at eight workers."""
    hosts, workers = cluster((6, 6, 4, 32, 6, 6, 4, 32), best_step_s=0.1, batch=2 * BATCH)
    hosts = [host.model_copy(update={"rate_bits_per_s": 1e8}) for host in hosts]
    run = spec(workers, "model", steps=80, period=USUAL_PERIOD)
    [log] = rehearse(hosts, [Side(name="control", by="hetopt", spec=run)], rounds=1)["control"]
    periods = [event for event in log if event["event"] == "step" and event["step"] > 20]
    share = statistics.median(event["control_s"] / event["step_time_s"] for event in periods)
    results.goal("control_share_of_step_at_8_workers", share, at_most=0.01)
    print(f"\ncontrol at 8 workers: {share:.3%} of a step")


def accuracy_part(scale: Scale, results: Results) -> None:
    """Time to the same quality as plain DDP, and the final quality."""
    jobs = [DIGITS] if scale.is_quick else [job for job in BIG_JOBS if data_folder(job) is not None]
    jobs = [job for job in jobs if scale.only in (None, job.task)]
    print("\ntime to the same quality at speeds (6, 6, 4, 32)")
    print(f"{'job':>18} {'DDP':>8} {'hetopt':>8} {'speed-up':>9} {'final DDP':>10} {'final hetopt':>13}")
    for job in jobs:
        hosts, workers = cluster(LEVELS[3], best_step_s=job.best_step_s, batch=job.batch)
        folder = data_folder(job)
        run = RunSpec(
            task=job.task,
            data_dir=str(folder) if folder is not None else None,
            workers=workers,
            batch_policy="model",
            learning_rate_scale=job.learning_rate_scale,
            stop=StopRule(max_epochs=job.epochs),
            evaluate_every_epochs=0.25,
            control_period_steps=PERIOD,
            checkpoint_every_s=1e6,
        )
        sides = [Side(name=DDP, by="ddp", spec=run), Side(name="hetopt", by="hetopt", spec=run)]
        logs = rehearse(hosts, sides, rounds=scale.accuracy_rounds)
        speed_ups, differences = [], []
        for plain, ours in zip(logs[DDP], logs["hetopt"], strict=True):
            final = [qualities(log, job)[-1][1] for log in (plain, ours)]
            times = [time_to(qualities(log, job), min(final)) for log in (plain, ours)]
            speed_ups.append(times[0] / times[1])
            differences.append((final[1] - final[0]) / job.points)
            sign = 1 if job.higher_is_better else -1
            print(
                f"{job.task:>18} {times[0]:>7.1f}s {times[1]:>7.1f}s {speed_ups[-1]:>9.2f} {sign * final[0]:>10.4g} "
                f"{sign * final[1]:>13.4g}",
                flush=True,
            )
        key = job.task.replace("-", "_")
        if job is DIGITS:  # over in seconds, a fifth of which pass before the first look at the workers
            results.figures[f"time_to_quality_speed_up_{key}"] = round(statistics.median(speed_ups), 3)
            continue
        results.goal(f"time_to_quality_speed_up_{key}", statistics.median(speed_ups), at_least=2.5)
        results.goal(f"final_quality_points_below_ddp_{key}", -statistics.median(differences), at_most=0.5)


DELAYED_S = 0.221
"""What half a batch computes in the logs of arXiv 2110.08941 (ResNet-50); one of two workers waits in addition."""

DELAYS_S = (0.1, 0.2)
TWO_KINDS = (81, 19)
"""Speeds of a GPU and a CPU in arXiv 2305.12213."""

CELL_POLICIES: tuple[BatchPolicy, ...] = ("static", "proportional", "dynamic", "model")


def cells_part(scale: Scale, results: Results) -> None:
    """Cells of published tables: a worker with a delay that does not shrink with its batch; and a GPU beside a CPU."""
    cells = {f"delay_{1e3 * delay_s:.0f}_ms": _delayed(delay_s) for delay_s in DELAYS_S}
    cells["81_19"] = cluster(TWO_KINDS, best_step_s=DELAYED_S)
    print(f"\n{'cell':>14} {'ideal':>6}  " + "  ".join(f"{name:>14}" for name in CELL_POLICIES))
    for label, (hosts, workers) in cells.items():
        known = by_speed(workers, BATCH)
        sides = [Side(name=DDP, by="ddp", spec=spec(workers, "uniform", steps=2 * PERIOD))]
        for policy in CELL_POLICIES:
            own, steps = (known, 2 * PERIOD) if policy == "static" else (workers, scale.steps)
            sides.append(Side(name=policy, by="hetopt", spec=spec(own, policy, steps=steps)))
        logs = rehearse(hosts, sides, rounds=scale.rounds)
        plain = [step_time_s(log, from_step=PERIOD) for log in logs[DDP]]
        ideal = compute_s(workers, equal_shares(len(workers), BATCH)) / best_compute_s(workers, BATCH)
        results.figures[f"ideal_speed_up_{label}"] = round(ideal, 3)
        cells_told = ""
        for policy in CELL_POLICIES:
            settled = PERIOD if policy == "static" else scale.steps - 2 * PERIOD
            reached = ratio(plain, [step_time_s(log, from_step=settled) for log in logs[policy]])
            place = results.figures if policy == "model" else results.baselines
            place[f"speed_up_{label}" if policy == "model" else f"speed_up_{policy}_{label}"] = round(reached.median, 3)
            cells_told += f"  {reached.median:>14.2f}"
        print(f"{label:>14} {ideal:>6.2f}{cells_told}", flush=True)


def _delayed(delay_s: float) -> tuple[list[EmulatedHost], tuple[WorkerSpec, ...]]:
    """Two workers of equal speed, of which the second waits in every step."""
    hosts, workers = cluster((1, 1), best_step_s=DELAYED_S, fixed_s=0.0)
    declared = workers[1].declared
    assert declared is not None
    waits = workers[1].model_copy(update={"declared": declared.model_copy(update={"fixed_s": delay_s})})
    return hosts, (workers[0], waits)


PARTS = {
    "cells": cells_part,
    "speeds": speeds_part,
    "noise": noise_part,
    "drift": drift_part,
    "equal": equal_part,
    "control": control_part,
    "accuracy": accuracy_part,
}
SMOKE_PARTS = ("speeds", "cells", "noise", "control")


def main() -> None:
    """Run every part, or the one that is asked for, and publish."""
    asked = options(__doc__, parts=[*PARTS, *(f"accuracy:{job.task}" for job in BIG_JOBS)])
    need_namespaces(or_skip=asked.smoke)
    scale = SMOKE if asked.smoke else QUICK if asked.quick else FULL
    names = SMOKE_PARTS if asked.smoke else tuple(PARTS)
    if asked.part is not None:
        name, _, job = asked.part.partition(":")
        names, scale = (name,), replace(scale, only=job or None)
    results = Results()
    for name in names:
        print(f"balance: {name}", file=sys.stderr, flush=True)
        PARTS[name](scale, results)
    publish(results.outcome("balance", quick=asked.quick), asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
