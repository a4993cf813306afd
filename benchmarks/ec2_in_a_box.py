"""Stories of rented runs on an account that is unkind: what must be left in none of them, and what they may cost.

400 lives of runs by a seed, on an account in which lists and tags lag, calls are throttled, refused, answered with
faults or not at all, credentials end, pools run dry and prices move by zone and hour, machines hang, fail, start again
or are taken back, and IAM decides each call by the printed policy; whoever launches or follows is killed by a real
signal. Time is the account's own, and what machines do is acted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._outcome import Outcome, options, publish, run_benchmark
from benchmarks._search_spaces import RECORDED
from benchmarks.box.stories import KINDS
from hetopt.core.errors import RunFailed

HETOPT = (sys.executable, "-m", "hetopt.cli.main")
GOAL = ("--budget", "5", "--batch-size", "1024")
CHOICE = ("--types", "c7i.xlarge,c6in.large", "--max-machines", "4", "--mixed-types", "2")
LEDGER_GOAL = 0.01
STORIES, QUICK_STORIES, SMOKE_STORIES = 400, 40, 4
WORKERS = 4
"""Processes that tell stories, each on an account of its own."""


def main() -> None:
    """Simulate the stories, and publish."""
    asked = options(__doc__)
    stories = SMOKE_STORIES if asked.smoke else QUICK_STORIES if asked.quick else STORIES
    results = Outcome(benchmark="ec2_in_a_box", quick=asked.quick)
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as name:
        tell_stories(results, Path(name), stories)
    publish(results, asked.json_file)


def tell_stories(results: Outcome, folder: Path, stories: int) -> None:
    """Simulate lives of runs by seeds, several at a time, and record the faults that must not happen.

    Prints the timelines of stories with faults, and of the first.

    Raises:
        RunFailed: a teller ended before its last story.
        subprocess.CalledProcessError: `hetopt recommend` failed.
    """
    print("telling stories", file=sys.stderr)
    plan = folder / "told-plan.json"
    # A recorded profile: what this machine is busy with now must not be a part of any story.
    subprocess.run(
        [*HETOPT, "recommend", RECORDED / "digits.json", *GOAL, "--steps", "10000", *CHOICE, "-o", plan],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "HETOPT_HOME": str(folder)},
    )
    program = [sys.executable, "-m", "benchmarks.box.stories", str(plan)]
    files = [folder / f"told-{first}.jsonl" for first in range(WORKERS)]
    with ExitStack() as opened:
        tellers = [
            subprocess.Popen(
                [*program, str(first), str(WORKERS), str(stories)], stdout=opened.enter_context(path.open("w"))
            )
            for first, path in enumerate(files)
        ]
        for teller in tellers:
            teller.wait()
    stories_told = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    if len(stories_told) != stories:
        raise RunFailed(f"{len(stories_told)} of {stories} stories were told to their end.", hint="read what they say")
    for story in sorted(stories_told, key=lambda story: int(story["seed"])):
        if story["faults"] or story["seed"] == 0:
            print(story["timeline"], "\n")
    _of_stories(results, stories_told)


def _of_stories(results: Outcome, stories: Sequence[dict[str, Any]]) -> None:
    """Record how many stories had a fault of each kind, and the worst error of the ledger."""
    ledgers = [abs(story["ledger_error"]) for story in stories if story["ledger_error"] is not None]
    results.figures["stories"] = len(stories)
    results.figures["stories_kills"] = sum(story["kills"] for story in stories)
    results.figures["stories_followed_to_their_bill"] = len(ledgers)
    for kind in KINDS:
        faults = sum(any(fault.startswith(f"{kind}:") for fault in story["faults"]) for story in stories)
        results.goal(f"stories_faults_{kind.replace('-', '_')}", faults, at_most=0)
    results.goal("stories_ledger_error_worst", max(ledgers, default=0.0), at_most=LEDGER_GOAL)


if __name__ == "__main__":
    run_benchmark(main)
