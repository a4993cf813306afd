"""How long a person waits for `hetopt --help` and for a plan over the whole catalogue: whole processes, wall time.

The baseline is a Python interpreter that starts and does nothing, measured in turn with them. By its processor time
(``*_starts``) the commands can be compared where other things run as well.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._outcome import Outcome, options, publish, quartiles, run_benchmark

REPOSITORY = Path(__file__).resolve().parent.parent
HELP_GOAL_S = 0.4
RECOMMEND_GOAL_S = 3.0
HELP_GOAL_STARTS = 4.0
RECOMMEND_GOAL_STARTS = 60.0
BASELINE = "python_start_s"
HETOPT = (sys.executable, "-m", "hetopt.cli.main")


def took_s(command: tuple[str, ...]) -> tuple[float, float]:
    """Seconds from starting ``command`` to its successful end, and of processor time."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Run every command once per round, so that a busy moment of the machine hits all of them."""
    asked = options(__doc__)
    profile = min((REPOSITORY / "tests" / "recorded").glob("*.json"))
    commands = {
        BASELINE: (sys.executable, "-c", "pass"),
        "help_s": (*HETOPT, "--help"),
        "recommend_s": (*HETOPT, "recommend", str(profile), "--budget", "5", "--json"),
    }
    rounds = 3 if asked.quick else 15
    samples: dict[str, list[float]] = {name: [] for name in commands}
    computed: dict[str, list[float]] = {name: [] for name in commands}
    for round_ in range(rounds):
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr)
        for name, command in commands.items():
            wall_s, processor_s = took_s(command)
            samples[name].append(wall_s)
            computed[name].append(processor_s)
    print(f"{'':16}{'median':>10}{'quartiles':>20}")
    for name, times in samples.items():
        low, middle, high = quartiles(times)
        print(f"{name:16}{middle:>8.3f} s{low:>12.3f} – {high:.3f} s")
    one_s = quartiles(computed[BASELINE])[1]
    starts = {name.removesuffix("_s") + "_starts": round(quartiles(computed[name])[1] / one_s, 2) for name in commands}
    for name in ("help_starts", "recommend_starts"):
        print(f"{name:16}{starts[name]:>8.1f} times the processor time of Python's own start")
    medians = {name: round(quartiles(times)[1], 4) for name, times in samples.items()}
    publish(
        Outcome(
            benchmark="command_line",
            quick=asked.quick,
            figures={name: value for name, value in medians.items() if name != BASELINE}
            | {name: starts[name] for name in ("help_starts", "recommend_starts")},
            goals={
                "help_s": {"at_most": HELP_GOAL_S},
                "recommend_s": {"at_most": RECOMMEND_GOAL_S},
                "help_starts": {"at_most": HELP_GOAL_STARTS},
                "recommend_starts": {"at_most": RECOMMEND_GOAL_STARTS},
            },
            baselines={BASELINE: medians[BASELINE]},
        ),
        asked.json_file,
    )


if __name__ == "__main__":
    run_benchmark(main)
