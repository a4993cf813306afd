"""How far predicted steps to a target lie from measured ones at batch sizes left out of public training logs.

Three protocols and a bound, all by one default method and beside the published laws in the same call:

- *levels*: each batch size from all others, at every level of the metric that the data names, steps between evaluations
  by a straight line;
- *last*: the same, to a metric 0.2 % short of what the worst run reaches, counted to the evaluation that finds it. What
  the laws are about is where a run crosses the target, which is between two evaluations; so they learn from that, and
  their prediction is the evaluation after it. (Some of these jobs evaluate only four to six times until then.);
- *seen*: no prediction, but how far hetopt's curve through all batch sizes stays from the levels that it was fitted to.
  Single runs scatter by so much around a smooth curve, and what leaves one out can't be expected to be nearer;
- *smallest*: all larger batch sizes from the smallest one's run and its gradient noise, at every level, which is what a
  first profile knows. How large the critical batch size is for the noise is learned from the other jobs. Beside it
  Pollux's gain formula with the noise recorded in that run, and no loss of efficiency at all, with goals from these;
- *early*: batch sizes up to 16 times a run's own from its length and the first reading of its noise, which is all that
  a short profile knows: how plans price another batch size. The prior was set by these logs; goals are for intervals.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks._outcome import DATA, Outcome, options, publish, run_benchmark
from benchmarks._published_laws import MCCANDLISH, SCAVENGER, two_powers
from hetopt.core.profile import Evaluation
from hetopt.optimizer.convergence.averaged_law import averaged_curve
from hetopt.optimizer.convergence.convergence import LARGEST_BATCH_FACTOR, Convergence, GivenSteps, equal_steps
from hetopt.optimizer.convergence.steps_law import Z90, PriorRun
from hetopt.profiler.collect import steps_to_target

GOALS = {"cifar10": 0.04, "bert": 0.01, "ncf": 0.12}
"""Median error with one batch size left out; other jobs in the folder are reported without a goal."""

SMALLEST_GOALS = {"cifar10": 0.178, "bert": 0.065, "ncf": 0.0795}
"""Median error from one run and its noise: Pollux's formula on the first two, no loss of efficiency on the third."""

EARLY_COVERAGE = 0.82

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
    """Return the training logs of a job, sorted by batch size."""
    job = json.loads(file.read_text(encoding="utf-8"))
    sign = 1.0 if job["higher_is_better"] else -1.0
    unit = job["noise_batch_size"]
    logs = [
        Log(
            batch_size=run["global_batch_size"],
            steps=tuple(each["iteration"] for each in run["evaluations"]),
            metrics=tuple(sign * each["metric"] for each in run["evaluations"]),
            noise_scales=tuple(unit * each["grad_var"] / max(each["grad_sqr"], 1e-30) for each in run["noise"]),
            steps_to_level=run["steps_to_target"],
        )
        for run in job["runs"]
    ]
    return tuple(sorted(logs, key=lambda log: log.batch_size))


def levels(logs: Sequence[Log]) -> dict[str, list[float]]:
    """Return the steps of every run to each level of the metric."""
    return {level: [log.steps_to_level[level] for log in logs] for level in logs[0].steps_to_level}


def last_target(logs: Sequence[Log]) -> tuple[list[float], list[float]]:
    """Return the steps of every run to 0.2 % short of the worst run's best, and to the evaluation that finds it."""
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


def found_at(steps: float, every_steps: float) -> float:
    """Return the step of the evaluation that finds a target which is reached after ``steps``, where runs end."""
    # 1e-9: a target that is reached at an evaluation is found by that one.
    return max(1, math.ceil(steps / every_steps - 1e-9)) * every_steps


def leave_one_out(
    logs: Sequence[Log], steps: Sequence[float], found_steps: Sequence[float] | None = None
) -> dict[str, list[Guess]]:
    """Return predictions of each batch size from all others, by hetopt and by each peer.

    Args:
        logs: the runs.
        steps: of each until its target is reached.
        found_steps: of the evaluations that found it, where those are to be predicted; None: ``steps`` themselves.
    """
    runs = prior_runs(logs, steps)
    guesses: dict[str, list[Guess]] = {name: [] for name in (HETOPT, *PEERS)}
    for place, (log, held) in enumerate(zip(logs, runs, strict=True)):
        others = [run for run in runs if run is not held]
        curve = averaged_curve(others)
        predicted = {name: two_powers(others, law)(log.batch_size) for name, law in PEERS.items()}
        predicted[HETOPT] = float(curve.steps(log.batch_size))
        measured = held
        if found_steps is not None:
            every_steps = float(np.median(np.diff((0, *log.steps))))
            predicted = {name: found_at(count, every_steps) for name, count in predicted.items()}
            measured = PriorRun(global_batch_size=log.batch_size, steps_to_target=found_steps[place])
        for name, count in predicted.items():
            log_sd = float(curve.log_sd(log.batch_size)) if name == HETOPT else None
            guesses[name].append(guess(measured, count, log_sd))
    return guesses


def seen(logs: Sequence[Log], steps: Sequence[float]) -> list[Guess]:
    """Return predictions of every batch size by the curve through all of them."""
    runs = prior_runs(logs, steps)
    curve = averaged_curve(runs)
    return [guess(run, float(curve.steps(run.global_batch_size)), None) for run in runs]


def progress_weighted_noise_scale(noise_scales: Sequence[float], steps: Sequence[float], batch_size: int) -> float:
    """Return the average of a log of noise scales over the optimisation's progress rather than over its steps.

    A step of ``B`` samples makes the progress of ``1 / (1 + Bn / B)`` noise-free steps (McCandlish et al. 2018), and
    late steps, where the noise is large, make little of it. So entry ``i``, which stands for ``steps_i`` steps, weighs
    ``steps_i / (1 + Bn_i / B)``. For ``B`` far below every ``Bn_i`` this is their harmonic mean, far above it the plain
    one.

    Args:
        noise_scales: ``Bn_i`` in samples, not negative.
        steps: optimizer steps that each entry stands for.
        batch_size: global batch size ``B`` of the run that was logged.
    """
    weights = [count / (1 + scale / batch_size) for scale, count in zip(noise_scales, steps, strict=True)]
    total = math.fsum(weight * scale for weight, scale in zip(weights, noise_scales, strict=True))
    return total / math.fsum(weights)


def from_smallest(logs: Sequence[Log], steps: Sequence[float], kappa: float) -> dict[str, list[Guess]]:
    """Return predictions of all larger batch sizes from the smallest one's run up to its target.

    Args:
        logs: the runs.
        steps: of each until the target is reached.
        kappa: critical batch size over noise scale.
    """
    first, count = logs[0], steps[0]
    taken = np.diff((0.0, *np.minimum(first.steps, count)))
    noise = progress_weighted_noise_scale(first.noise_scales, taken.tolist(), first.batch_size)
    measured_run = PriorRun(global_batch_size=first.batch_size, steps_to_target=count)
    curve = averaged_curve([measured_run], noise_scale=noise, kappa=kappa)
    guesses: dict[str, list[Guess]] = {HETOPT: [], "gain": [], "no_loss": []}
    for log, measured in zip(logs[1:], steps[1:], strict=True):
        run = PriorRun(global_batch_size=log.batch_size, steps_to_target=measured)
        guesses[HETOPT].append(guess(run, float(curve.steps(log.batch_size)), float(curve.log_sd(log.batch_size))))
        guesses["gain"].append(guess(run, gain_formula(first, count, log.batch_size), None))
        guesses["no_loss"].append(guess(run, count * first.batch_size / log.batch_size, None))
    return guesses


def from_beginning(logs: Sequence[Log], steps: Sequence[float]) -> list[Guess]:
    """Return predictions of larger batch sizes at equal progress, from each run's length and first noise scale."""
    guesses = []
    for log, length in zip(logs, steps, strict=True):
        known = Convergence(noise_scale=log.noise_scales[0], pilot_batch_sizes=(), basis="")
        model = equal_steps(known, GivenSteps(amount=round(length)), log.batch_size)
        for other, measured in zip(logs, steps, strict=True):
            if log.batch_size < other.batch_size <= LARGEST_BATCH_FACTOR * log.batch_size:
                run = PriorRun(global_batch_size=other.batch_size, steps_to_target=measured)
                predicted, log_sd = model.steps(other.batch_size, 1.0), model.log_sd(other.batch_size, 1.0)
                guesses.append(guess(run, float(predicted), float(log_sd)))
    return guesses


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


def guess(run: PriorRun, predicted: float, log_sd: float | None) -> Guess:
    """Return a prediction beside the measured steps of its run."""
    measured = run.steps_to_target
    inside = None if log_sd is None else abs(math.log(predicted / measured)) <= Z90 * log_sd
    return Guess(predicted=predicted, measured=measured, inside=inside)


def row(job: str, protocol: str, predictor: str, guesses: Sequence[Guess]) -> tuple[float, float]:
    """Print a line of the table; return the median absolute error and the coverage."""
    errors = [abs(each.error) for each in guesses]
    held = [each.inside for each in guesses if each.inside is not None]
    middle, coverage = statistics.median(errors), sum(held) / len(held) if held else math.nan
    print(
        f"{job:12}{protocol:10}{predictor:12}{middle:>8.1%}{statistics.mean(errors):>8.1%}"
        f"{float(np.quantile(errors, 0.9)):>8.1%}{statistics.median(each.error for each in guesses):>+9.1%}"
        f"{f'{coverage:.0%}' if held else '-':>10}{len(guesses):>5}"
    )
    return middle, coverage


def main() -> None:
    """Score every job in the folder, and publish."""
    asked = options(__doc__)
    files = sorted((DATA / "convergence").glob("*.json"))
    if not files:
        sys.exit(f"No training logs in {DATA}: HETOPT_SHARED_DATA says where the data is.")
    results = Outcome(benchmark="convergence", quick=asked.quick)
    print(f"{'job':12}{'protocol':10}{'by':12}{'median':>8}{'mean':>8}{'p90':>8}{'bias':>9}{'coverage':>10}{'n':>5}")
    jobs = {file.stem: read(file) for file in files}
    for job, logs in jobs.items():
        print(job, file=sys.stderr)
        by_level = levels(logs)
        if asked.quick:
            by_level = dict(list(by_level.items())[-1:])
        every: list[tuple[Sequence[float], Sequence[float] | None]] = [(steps, None) for steps in by_level.values()]
        protocols: dict[str, list[tuple[Sequence[float], Sequence[float] | None]]] = {
            "levels": every,
            "last": [last_target(logs)],
        }
        for protocol, targets in protocols.items():
            by_target = [leave_one_out(logs, steps, found_steps) for steps, found_steps in targets]
            for predictor in (HETOPT, *PEERS):
                middle, coverage = row(
                    job, protocol, predictor, [each for some in by_target for each in some[predictor]]
                )
                (results.figures if predictor == HETOPT else results.baselines)[
                    f"{job}_{protocol}_median_error" + ("" if predictor == HETOPT else f"_{predictor}")
                ] = round(middle, 4)
                if predictor == HETOPT:
                    results.figures[f"{job}_{protocol}_share_in_90_percent_interval"] = round(coverage, 4)
            if job in GOALS:
                results.goals[f"{job}_{protocol}_median_error"] = {"at_most": GOALS[job]}
        middle, _ = row(job, "seen", HETOPT, [each for steps in by_level.values() for each in seen(logs, steps)])
        results.baselines[f"{job}_levels_median_error_seen"] = round(middle, 4)
        early = [each for steps in by_level.values() for each in from_beginning(logs, steps)]
        middle, coverage = row(job, "early", HETOPT, early)
        results.figures[f"{job}_early_median_error"] = round(middle, 4)
        results.figures[f"{job}_early_share_in_90_percent_interval"] = round(coverage, 4)
        results.goals[f"{job}_early_share_in_90_percent_interval"] = {"at_least": EARLY_COVERAGE}
        kappa = kappa_of([others for other, others in jobs.items() if other != job])
        results.figures[f"{job}_smallest_kappa_of_the_others"] = round(kappa, 2)
        alone = [from_smallest(logs, steps, kappa) for steps in by_level.values()]
        for predictor in alone[0]:
            middle, coverage = row(job, "smallest", predictor, [g for each in alone for g in each[predictor]])
            if predictor == HETOPT:
                results.figures[f"{job}_smallest_median_error"] = round(middle, 4)
                results.figures[f"{job}_smallest_share_in_90_percent_interval"] = round(coverage, 4)
                if job in SMALLEST_GOALS:
                    results.goals[f"{job}_smallest_median_error"] = {"at_most": SMALLEST_GOALS[job]}
            else:
                results.baselines[f"{job}_smallest_median_error_{predictor}"] = round(middle, 4)
    publish(results, asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
