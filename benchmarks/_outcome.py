"""The form that every benchmark's result has: a table for people, and as the last line of stdout one JSON object."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetopt.core.interruption import Terminated, ends_by_signals, exit_code_of

RESULTS = Path(__file__).resolve().parent / "results"
"""Where committed results are, a file a benchmark."""

DATA = Path(os.environ.get("HETOPT_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
"""Public measurements, a folder each: beside the repository, or where HETOPT_SHARED_DATA says."""

Bound = Literal["at_least", "at_most"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a benchmark's command line.

    Attributes:
        quick: from fewer rounds; also where as little is asked for as shows that it still runs.
        json_file: that also gets the JSON object.
        smoke: no figure counts.
        part: the only one that is measured; None: all.
    """

    quick: bool
    json_file: Path | None
    smoke: bool = False
    part: str | None = None


@dataclass(kw_only=True)
class Outcome:
    """The figures of a benchmark with units in their names, their goals, and baselines, gathered part by part.

    Attributes:
        asked: options that say what was measured, as they were given: "--model lstm".
        seeds: that runs were drawn with, as they are said: "0 to 199".
    """

    benchmark: str
    asked: str = ""
    quick: bool
    figures: dict[str, float] = field(default_factory=dict)
    goals: dict[str, Mapping[Bound, float]] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    seeds: str = "0"

    @property
    def met(self) -> bool:
        """Return whether every goal is met; a benchmark that misses one has still run."""
        return all(
            self.figures[name] >= bound if kind == "at_least" else self.figures[name] <= bound
            for name, goal in self.goals.items()
            for kind, bound in goal.items()
        )

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Record a figure, rounded to four decimals, with the bounds that it should keep; None: no such bound."""
        self.figures[name] = round(value, 4)
        bounds: dict[Bound, float | None] = {"at_least": at_least, "at_most": at_most}
        self.goals[name] = {kind: bound for kind, bound in bounds.items() if bound is not None}


def run_benchmark(main: Callable[[], None]) -> None:
    """Run a benchmark, and clean up (networks, folders, processes) by whatever signal it is ended; then exit.

    A benchmark that ends by itself returns here; its errors pass through.
    """
    try:
        with ends_by_signals():
            main()
    except (KeyboardInterrupt, Terminated) as error:
        sys.exit(exit_code_of(error))


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return the argument parser that all benchmarks share; ``docstring`` says what this one measures.

    None, under `python -OO`: nothing.
    """
    shared = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    shared.add_argument("--quick", action="store_true", help="the same table from fewer rounds")
    shared.add_argument("--smoke", action="store_true", help="as little as shows that it still runs; no figure counts")
    shared.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    return shared


def options(docstring: str | None, parts: Sequence[str] = ()) -> Options:
    """Return the options of a benchmark's command line, which may choose one of several parts.

    Its part is None where none is asked for.
    """
    command_line = parser(docstring)
    if parts:
        command_line.add_argument("--part", choices=parts, help="only this")
    read = command_line.parse_args()
    part = read.part if parts else None
    return Options(quick=read.quick or read.smoke, json_file=read.json, smoke=read.smoke, part=part)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of at least two samples."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def publish(outcome: Outcome, json_file: Path | None, *, part: str | None = None) -> None:
    """Print the outcome as a JSON object on the last line, and write it to a file where asked.

    Args:
        outcome: what was measured.
        json_file: where to write it; None: nowhere.
        part: the only part that was asked for, of a benchmark that has several; None: all.
    """
    asked = outcome.asked if part is None else f"--part {part}"
    text = json.dumps(
        {
            "benchmark": outcome.benchmark,
            "asked": asked,
            "quick": outcome.quick,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "seeds": outcome.seeds,
            "figures": dict(outcome.figures),
            "goals": {name: dict(goal) for name, goal in outcome.goals.items()},
            "baselines": dict(outcome.baselines),
            "met": outcome.met,
        },
        allow_nan=False,
    )
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def commit() -> str:
    """Return the commit that was measured, marked where code differs from it; empty outside a repository."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        here = Path(__file__).resolve().parent.parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py").stdout.strip()
    return git("rev-parse", "--short", "HEAD").stdout.strip() + ("-dirty" if changed else "")


def machine() -> str:
    """Return a description of this machine: usable cores, their model, and memory in GiB."""
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {(models or [platform.machine()])[0]}, {memory_gib:.0f} GiB"
