"""Whether predictions hold on a machine that others keep busy: `python -m benchmarks._contended` (ten minutes).

Each trial begins to spin on every processor, profiles ``digits``, plans some epochs of it, launches them on two workers
of which one is half as fast, and reads the report, as a person would. Trials differ by how many processes spin, and
before some of them the profile is taken in quiet. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EPOCHS = 6
LOADS = ((1, 1), (2, 2), (3, 3), (0, 2), (2, 1))
"""Spinning processes a processor, while the job is profiled and while it runs; again and again."""


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Keep processors busy by so many processes that do nothing else."""
    others = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _spin() -> None:
    while True:
        pass


def trial(folder: Path, profiled: int, launched: int) -> dict[str, object]:
    """Return the run time as it was predicted and measured, in seconds, beside the contention that was seen."""
    environment = {**os.environ, "HETOPT_HOME": str(folder / "home")}

    def hetopt(*arguments: str) -> str:
        command = [sys.executable, "-m", "hetopt", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=600
        ).stdout

    processors = os.cpu_count() or 1
    with spinning(profiled * processors):
        hetopt("profile", "digits", "-o", "profile.json", "--time-budget", "20s")
    plan = ("--budget", "5", "--epochs", str(EPOCHS), "--types", "c7i.*", "-o", "plan.json")
    hetopt("recommend", "profile.json", *plan)
    with spinning(launched * processors):
        hetopt("launch", "plan.json", "--on", "local", "--slowdown", "1,2", "-y")
    report = json.loads(hetopt("report", "--json"))
    run_time = next(figure for figure in report["compared"] if figure["name"] == "run time")
    return {
        "spinning": [profiled, launched],
        **{name: round(run_time[name], 2) for name in ("predicted", "low", "high", "measured")},
        "inside": run_time["low"] <= run_time["measured"] <= run_time["high"],
        "contention": report["contention"],
    }


def main() -> int:
    """Print a line for each trial, and how many runs lay in their intervals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--trials", type=int, default=10)
    count = parser.parse_args().trials
    found = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            found.append(trial(Path(folder), *LOADS[number % len(LOADS)]))
        print(json.dumps(found[-1]), flush=True)
    inside = sum(bool(one["inside"]) for one in found)
    print(json.dumps({"benchmark": "contended", "trials": count, "inside": inside, "met": inside >= 0.8 * count}))
    return int(inside < 0.8 * count)


if __name__ == "__main__":
    sys.exit(main())
