"""How far predicted steps to a target lie from measured ones, and how well the batch follows the noise in a run.

``--part logs``: batch sizes left out of public training logs, to every level of the metric that the data names, steps
between evaluations by a straight line. Six protocols and a bound, all by one default method and beside published laws:

- *levels*: each batch size from all others;
- *last*: the same, to a metric 0.2 % short of what the worst run reaches, counted to the evaluation that finds it. What
  the laws are about is where a run crosses the target, which is between two evaluations; so they learn from that, and
  their prediction is the evaluation after it. (Some of these jobs evaluate only four to six times until then.);
- *seen*: no prediction, but how far hetopt's curve through all batch sizes stays from the levels that it was fitted to.
  Single runs scatter by so much around a smooth curve, and what leaves one out can't be expected to be nearer;
- *two*: each batch size from every two others;
- *pair*: the same with the gradient noise over the smaller one's run, as a profile has it, and beside it (as in *two*)
  the same guesses from that run alone: a second run may not make them worse;
- *smallest*: all larger batch sizes from the smallest one's run and its gradient noise over that run, which is what a
  first profile knows. How large the critical batch size is for the noise is learned from the other jobs. Beside it
  Pollux's gain formula with the noise recorded in that run, and no loss of efficiency at all, with goals from these;
- *early*: batch sizes up to 16 times a run's own from its length and the first reading of its noise, which is all that
  a short profile knows: how plans price another batch size. The prior was set by these logs; goals are for intervals.

``--part contest``: three jobs trained to a loss that the given batch reaches after 60 to 80 % of its run, by the given
batch, by larger ones with rates by the two usual rules, by AdaScale at the batch that is best in hindsight, by Pollux'
goodput, and by the batch policy ``critical``; and a job whose noise is small throughout, where the batch has to stay.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._batches import contest
from benchmarks._outcome import DATA, Outcome, options, publish, run_benchmark
from benchmarks._published_laws import MCCANDLISH, SCAVENGER, two_powers
from hetopt.core.profile import Evaluation
from hetopt.optimizer.convergence.averaged_law import AveragedCurve, averaged_curve
from hetopt.optimizer.convergence.convergence import LARGEST_BATCH_FACTOR, Convergence, GivenSteps, equal_steps
from hetopt.optimizer.convergence.steps_law import Z90, PriorRun
from hetopt.profiler.collect import steps_to_target

GOALS: Mapping[str, Mapping[str, float]] = {
    "levels": {"cifar10": 0.04, "bert": 0.01, "ncf": 0.12},
    "last": {"cifar10": 0.04, "bert": 0.01, "ncf": 0.12},
    "two": {"cifar10": 0.06, "bert": 0.06, "ncf": 0.06},
    "pair": {"cifar10": 0.06, "bert": 0.06, "ncf": 0.06},
    "smallest": {"cifar10": 0.178, "bert": 0.065, "ncf": 0.0795},
}
"""Median error with one batch size left out; from two runs; and from one run and its noise: that of Pollux's formula on
the first two, of no loss of efficiency on the third. Other jobs in the folder are reported without a goal."""

KAPPAS = tuple(float(each) for each in np.geomspace(0.5, 32.0, 121))
"""Critical batch sizes over the noise scale that are tried on the other jobs."""

SHORT_OF_WORST = 0.998
HETOPT = "hetopt"
PEERS = {"mccandlish": MCCANDLISH, "scavenger": SCAVENGER}


@dataclass(frozen=True, kw_only=True)
class Log:
    """One training run: its evaluations, and the noise scale at each of them, in samples."""

    batch_size: int
    steps: tuple[int, ...]
    metrics: tuple[float, ...]
    noise_scales: tuple[float, ...]
    steps_to_level: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A predicted number of steps, the measured one, and whether the 90 % interval held it (None: there is none)."""

    predicted: float
    measured: float
    inside: bool | None

    @property
    def error(self) -> float:
        """The relative error of the predicted number of steps."""
        return self.predicted / self.measured - 1


def read(file: Path) -> tuple[Log, ...]:
    """Return the training logs of a job, sorted by batch size.

    Metrics are negated where lower is better.
    """
    job = json.loads(file.read_text(encoding="utf-8"))
    logs = [
        Log(
            batch_size=run["global_batch_size"],
            steps=tuple(each["iteration"] for each in run["evaluations"]),
            metrics=tuple(each["metric"] * (1 if job["higher_is_better"] else -1) for each in run["evaluations"]),
            noise_scales=tuple(
                job["noise_batch_size"] * each["grad_var"] / max(each["grad_sqr"], 1e-30) for each in run["noise"]
            ),
            steps_to_level=run["steps_to_target"],
        )
        for run in job["runs"]
    ]
    return tuple(sorted(logs, key=lambda log: log.batch_size))


def levels(logs: Sequence[Log]) -> dict[str, list[float]]:
    """Return the steps of every run to each level of the metric."""
    return {level: [log.steps_to_level[level] for log in logs] for level in logs[0].steps_to_level}


def last_target(logs: Sequence[Log]) -> tuple[list[float], list[float]]:
    """Return the steps of every run to 0.2 % short of the worst run's best, and to the evaluation that finds it.

    Steps are NaN where a run never crosses it.
    """
    worst = min(max(log.metrics) for log in logs)
    target = worst * SHORT_OF_WORST if worst > 0 else worst / SHORT_OF_WORST
    crossed, found_steps = [], []
    for log in logs:
        evaluations = [Evaluation(step=s, metric=m) for s, m in zip(log.steps, log.metrics, strict=True)]
        crossed.append(steps_to_target(evaluations, target=target, higher_is_better=True) or math.nan)
        found_steps.append(float(next(each.step for each in evaluations if each.metric >= target)))
    return crossed, found_steps


def prior_runs(logs: Sequence[Log], steps: Sequence[float]) -> list[PriorRun]:
    """Return the runs as the laws learn from them: steps to a target at each batch size."""
    return [
        PriorRun(global_batch_size=log.batch_size, steps_to_target=count)
        for log, count in zip(logs, steps, strict=True)
    ]


def leave_one_out(
    logs: Sequence[Log], steps: Sequence[float], found_steps: Sequence[float] | None = None
) -> dict[str, list[Guess]]:
    """Return predictions of each batch size from all others, by hetopt and by each peer, and by hetopt from all (seen).

    Args:
        logs: the runs.
        steps: of each until its target is reached.
        found_steps: of the evaluations that found it, where those are to be predicted; None: ``steps`` themselves.
    """
    runs = prior_runs(logs, steps)
    guesses: dict[str, list[Guess]] = {name: [] for name in (HETOPT, *PEERS, "seen")}
    whole = averaged_curve(runs)
    for log, held, true_steps in zip(logs, runs, found_steps or steps, strict=True):
        others, size = [run for run in runs if run is not held], held.global_batch_size
        curve = averaged_curve(others)
        predicted = {name: two_powers(others, law)(size) for name, law in PEERS.items()}
        predicted |= {HETOPT: float(curve.steps(size)), "seen": float(whole.steps(size))}
        every_steps = float(np.median(np.diff((0, *log.steps))))
        for name, count in predicted.items():
            # 1e-9: a target that is reached at an evaluation is found by that one.
            at = count if found_steps is None else max(1, math.ceil(count / every_steps - 1e-9)) * every_steps
            guesses[name].append(
                guess(
                    replace(held, steps_to_target=true_steps), at, float(curve.log_sd(size)) if name == HETOPT else None
                )
            )
    return guesses


def noise_over(log: Log, count: float) -> dict[str, Any]:
    """Return a run's noise scales up to step ``count``, and the steps of each, as arguments of `averaged_curve`."""
    return {
        "noise_scale": log.noise_scales,
        "noise_steps": np.maximum(np.diff((0.0, *np.minimum(log.steps, count))), 1e-9 * count).tolist(),
    }


def from_pairs(logs: Sequence[Log], steps: Sequence[float], kappa: float | None = None) -> dict[str, list[Guess]]:
    """Return predictions of each batch size from every two others, and from the smaller one of these alone.

    Args:
        logs: the runs.
        steps: of each until the target is reached.
        kappa: critical batch size over noise scale; None: the noise is not known.
    """
    runs, guesses = prior_runs(logs, steps), {HETOPT: list[Guess](), "smaller_alone": list[Guess]()}
    for pair in combinations(runs, 2):
        smaller = runs.index(pair[0])
        known = {} if kappa is None else noise_over(logs[smaller], steps[smaller]) | {"kappa": kappa}
        for name, curve in zip(
            guesses, (averaged_curve(pair, **known), averaged_curve(pair[:1], **known)), strict=True
        ):
            guesses[name] += [from_curve(curve, run) for run in runs if run not in pair]
    return guesses


def from_smallest(logs: Sequence[Log], steps: Sequence[float], kappa: float) -> dict[str, list[Guess]]:
    """Return predictions of all larger batch sizes from the smallest one's run up to its target.

    Args:
        logs: the runs.
        steps: of each until the target is reached.
        kappa: critical batch size over noise scale.
    """
    (first, *_), (count, *_), (run, *others) = logs, steps, prior_runs(logs, steps)
    curve = averaged_curve([run], **noise_over(first, count), kappa=kappa)
    return {
        HETOPT: [from_curve(curve, other) for other in others],
        "gain": [guess(each, gain_formula(first, count, int(each.global_batch_size)), None) for each in others],
        "no_loss": [guess(each, count * first.batch_size / each.global_batch_size, None) for each in others],
    }


def from_beginning(logs: Sequence[Log], steps: Sequence[float]) -> dict[str, list[Guess]]:
    """Return predictions of larger batch sizes at equal progress, from each run's length and first noise scale.

    Of batch sizes at most `LARGEST_BATCH_FACTOR` times as large.
    """
    guesses = []
    for log, length in zip(logs, steps, strict=True):
        known = Convergence(noise_scale=log.noise_scales[0], pilot_batch_sizes=(), basis="")
        model = equal_steps(known, GivenSteps(amount=round(length)), log.batch_size)
        for run in prior_runs(logs, steps):
            if log.batch_size < run.global_batch_size <= LARGEST_BATCH_FACTOR * log.batch_size:
                predicted = float(model.steps(run.global_batch_size, 1.0))
                guesses.append(guess(run, predicted, float(model.log_sd(run.global_batch_size, 1.0))))
    return {HETOPT: guesses}


def kappa_of(jobs: Sequence[Sequence[Log]]) -> float:
    """Return the ratio of critical batch size to noise scale of least mean ``|ln error|`` over these jobs."""

    def error(kappa: float) -> float:
        return statistics.mean(
            statistics.mean(
                abs(math.log1p(each.error))
                for steps in levels(logs).values()
                for each in from_smallest(logs, steps, kappa)[HETOPT]
            )
            for logs in jobs
        )

    return min(KAPPAS, key=error)


def gain_formula(first: Log, count: float, batch_size: int) -> float:
    """Return steps by Pollux's gain: a step of ``B`` samples does ``(Bn + B0) / (Bn + B) B / B0`` steps of ``B0``."""
    steps, before = 0.0, 0.0
    for end, noise in zip(first.steps, first.noise_scales, strict=True):
        part = min(count, end) - before
        steps += part * (noise + batch_size) / (noise + first.batch_size) * first.batch_size / batch_size
        before = min(count, end)
    return steps


def from_curve(curve: AveragedCurve, run: PriorRun) -> Guess:
    """Return a curve's prediction beside the measured steps of a run."""
    size = run.global_batch_size
    return guess(run, float(curve.steps(size)), float(curve.log_sd(size)))


def guess(run: PriorRun, predicted: float, log_sd: float | None) -> Guess:
    """Return a prediction beside the measured steps of its run.

    ``log_sd`` None: it has no interval.
    """
    measured = run.steps_to_target
    inside = None if log_sd is None else abs(math.log(predicted / measured)) <= Z90 * log_sd
    return Guess(predicted=predicted, measured=measured, inside=inside)


def scored(results: Outcome, job: str, protocol: str, guesses: Mapping[str, Sequence[Guess]]) -> None:
    """Print a line of the table for every predictor; record median absolute errors, hetopt's coverage, and goals."""
    for predictor, some in guesses.items():
        errors = [abs(each.error) for each in some]
        held = [each.inside for each in some if each.inside is not None]
        middle, coverage = statistics.median(errors), f"{statistics.mean(held):.0%}" if held else "-"
        print(
            f"{job:12}{protocol:10}{predictor:12}{middle:>8.1%}{statistics.mean(errors):>8.1%}"
            f"{float(np.quantile(errors, 0.9)):>8.1%}{statistics.median(each.error for each in some):>+9.1%}"
            f"{coverage:>10}{len(some):>5}"
        )
        name = f"{job}_{protocol}_median_error"
        if predictor != HETOPT:
            results.baselines[f"{name}_{predictor}"] = round(middle, 4)
            continue
        results.figures[name] = round(middle, 4)
        results.figures[f"{job}_{protocol}_share_in_90_percent_interval"] = round(statistics.mean(held), 4)
        if (goal := GOALS.get(protocol, {}).get(job)) is not None:
            results.goals[name] = {"at_most": goal}
        if protocol in ("two", "pair", "smallest", "early"):
            results.goals[f"{job}_{protocol}_share_in_90_percent_interval"] = {
                "at_least": 0.82,
                **({} if protocol == "early" else {"at_most": 0.97}),
            }


def public_logs(results: Outcome) -> None:
    """Score every job in the folder of public logs by every protocol, print the table, and record figures and goals.

    Exits where the folder has none.
    """
    files = sorted((DATA / "convergence").glob("*.json"))
    if not files:
        sys.exit(f"No training logs in {DATA}: HETOPT_SHARED_DATA says where the data is.")
    print(f"{'job':12}{'protocol':10}{'by':12}{'median':>8}{'mean':>8}{'p90':>8}{'bias':>9}{'coverage':>10}{'n':>5}")
    jobs = {file.stem: read(file) for file in files}
    for job, logs in jobs.items():
        print(job, file=sys.stderr)
        by_level = [(steps,) for steps in levels(logs).values()]
        kappa = kappa_of([others for other, others in jobs.items() if other != job])
        results.figures[f"{job}_smallest_kappa_of_the_others"] = round(kappa, 2)
        protocols: dict[str, tuple[Callable[..., dict[str, list[Guess]]], Sequence[Sequence[Sequence[float]]]]] = {
            "levels": (leave_one_out, by_level),
            "last": (leave_one_out, [last_target(logs)]),
            "two": (from_pairs, by_level),
            "pair": (partial(from_pairs, kappa=kappa), by_level),
            "early": (from_beginning, by_level),
            "smallest": (partial(from_smallest, kappa=kappa), by_level),
        }
        for protocol, (predicted, targets) in protocols.items():
            by_target = [predicted(logs, *steps) for steps in targets]
            scored(
                results, job, protocol, {name: [g for some in by_target for g in some[name]] for name in by_target[0]}
            )


PARTS = ("logs", "contest")


def main() -> None:
    """Score the public logs, train the contest's jobs, and publish."""
    asked = options(__doc__, PARTS)
    results = Outcome(benchmark="convergence", quick=asked.quick)
    if asked.part in (None, "logs"):
        public_logs(results)
    if asked.part in (None, "contest"):
        contest(results, quick=asked.quick)
    publish(results, asked.json_file, part=asked.part)


if __name__ == "__main__":
    run_benchmark(main)
