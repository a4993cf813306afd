"""How far the predicted run time of the demo's job lies from the measured one: profile, plan, train, report, for real.

The baseline predicts from the same profile as one would by hand: the measured step time of an unhurried worker at its
share, nothing else (no exchange, no waiting, no evaluations, no start-up).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._outcome import quartiles
from hetopt.backends.prediction.hosting import division
from hetopt.optimizer.fit import fit
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.reports.report import TOLERANCE, Report

PACES = ("1,1", "1,2", "1,3")
GOAL = ("--budget", "2", "--epochs", "100", "--batch-size", "256")
HETOPT = (sys.executable, "-m", "hetopt.cli.main")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the rounds came to, as figures and baselines of a benchmark."""

    figures: dict[str, float]
    baselines: dict[str, float]


def run(home: Path, *arguments: str) -> str:
    """The standard output of one hetopt command whose runs live under ``home``."""
    environment = {**os.environ, "HETOPT_HOME": str(home)}
    return subprocess.run(
        [*HETOPT, *arguments], check=True, text=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment
    ).stdout


def by_hand_s(launch: Launch) -> float:
    """Steps times the profiled step time of the first worker, which is at full pace."""
    device, _ = division(fit(launch.plan.profile), len(launch.spec.workers))
    return launch.prediction.steps.value * device.time_s(launch.spec.workers[0].local_batch_size)


def demo(rounds: int) -> Demo:
    """Profile anew every round: a prediction must survive what the machine does between measuring and running."""
    errors: dict[str, list[float]] = {pace: [] for pace in PACES}
    naive: list[float] = []
    runs: dict[str, float] = {}
    inside = 0
    for round_ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as folder:
            home = Path(folder)
            run(home, "profile", "digits", "-o", f"{home}/profile.json")
            run(home, "recommend", f"{home}/profile.json", *GOAL, "-o", f"{home}/plan.json")
            for pace in PACES:
                text = run(home, "launch", f"{home}/plan.json", "--on", "local", "--slowdown", pace, "--yes", "--json")
                report = Report.from_json(text, origin="launch")
                time = next(figure for figure in report.compared if figure.name == "run time")
                launch = Launch.load(home / "runs" / report.run_id / LAUNCH_FILE)
                errors[pace].append(time.measured / time.predicted - 1)
                naive.append(time.measured / by_hand_s(launch) - 1)
                inside += time.low <= time.measured <= time.high
                for kind, value in (("low", time.low), ("measured", time.measured), ("high", time.high)):
                    runs[f"demo_run_{len(naive) - 1}_{kind}_over_predicted"] = round(value / time.predicted, 4)
                print(f"round {round_ + 1}, pace {pace}: {errors[pace][-1]:+.1%}", file=sys.stderr)
    print(f"\nRun time of the demo\n{'pace':8}{'median error':>14}{'worst':>9}{'quartiles':>20}")
    for pace, values in errors.items():
        low, middle, high = quartiles(values) if len(values) > 1 else (values[0],) * 3
        print(f"{pace:8}{middle:>+14.1%}{max(values, key=abs):>+9.1%}{low:>+11.1%} – {high:+.1%}")
    every = [error for values in errors.values() for error in values]
    print(
        f"{sum(abs(error) <= TOLERANCE for error in every)} of {len(every)} runs within {TOLERANCE:.0%}, "
        f"{inside} in their 90 % interval; by hand the median error is {statistics.median(naive):+.1%}"
    )
    return Demo(
        figures={
            "demo_median_absolute_error": round(statistics.median(map(abs, every)), 4),
            "demo_worst_absolute_error": round(max(map(abs, every)), 4),
            "demo_share_within_10_percent": round(sum(abs(error) <= TOLERANCE for error in every) / len(every), 4),
            "demo_share_in_90_percent_interval": round(inside / len(every), 4),
            **runs,
        },
        baselines={"demo_median_absolute_error_by_hand": round(statistics.median(map(abs, naive)), 4)},
    )
