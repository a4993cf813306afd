"""The form that every benchmark's result has: a table for people, and as the last line of stdout one JSON object."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hetopt.core.interruption import Terminated, ends_by_signals, exit_code_of

RESULTS = Path(__file__).resolve().parent / "results"
"""Where committed results are, a file a benchmark."""

Bound = Literal["at_least", "at_most"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a benchmark was asked to run.

    Attributes:
        quick: from fewer rounds; also where as little is asked for as shows that it still runs.
        json_file: that also gets the JSON object.
        smoke: no figure counts.
        part: that alone is measured; None: all.
    """

    quick: bool
    json_file: Path | None
    smoke: bool = False
    part: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures with units in their names, what they should be, and what they are compared with.

    Attributes:
        asked: options that say what was measured, as they were given: "--model lstm".
    """

    benchmark: str
    asked: str = ""
    quick: bool
    figures: Mapping[str, float]
    goals: Mapping[str, Mapping[Bound, float]] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether every goal is met; a benchmark that misses one has still run."""
        return all(
            self.figures[name] >= bound if kind == "at_least" else self.figures[name] <= bound
            for name, goal in self.goals.items()
            for kind, bound in goal.items()
        )


@dataclass(kw_only=True)
class Results:
    """What goes into the last line of a benchmark of several parts, gathered part by part."""

    figures: dict[str, float] = field(default_factory=dict)
    goals: dict[str, dict[Bound, float]] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Record a figure that is to be reached."""
        self.figures[name] = round(value, 4)
        bounds: dict[Bound, float | None] = {"at_least": at_least, "at_most": at_most}
        self.goals[name] = {kind: bound for kind, bound in bounds.items() if bound is not None}

    def outcome(self, benchmark: str, *, quick: bool) -> Outcome:
        """What was gathered, as the last line tells it."""
        return Outcome(
            benchmark=benchmark, quick=quick, figures=self.figures, goals=self.goals, baselines=self.baselines
        )


def run_benchmark(main: Callable[[], None]) -> None:
    """Run a benchmark; what it has made (networks, folders, processes) goes by whatever signal it is ended."""
    try:
        with ends_by_signals():
            main()
    except (KeyboardInterrupt, Terminated) as error:
        sys.exit(exit_code_of(error))


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks share; ``docstring`` says what this one measures."""
    shared = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    shared.add_argument("--quick", action="store_true", help="the same table from fewer rounds")
    shared.add_argument("--smoke", action="store_true", help="as little as shows that it still runs; no figure counts")
    shared.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    return shared


def options(docstring: str | None, parts: Sequence[str] = ()) -> Options:
    """Read a command line that has nothing else, but for the parts of which one may be asked for alone."""
    command_line = parser(docstring)
    if parts:
        only = "only this; with --json, into an earlier result"
        command_line.add_argument("--part", "--only", dest="part", choices=parts, help=only)
    read = command_line.parse_args()
    part = read.part if parts else None
    return Options(quick=read.quick or read.smoke, json_file=read.json, smoke=read.smoke, part=part)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of at least two samples."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def publish(outcome: Outcome, json_file: Path | None, *, part: str | None = None) -> None:
    """Print the object as the last line, and write it where asked.

    Args:
        outcome: what was measured.
        json_file: where to write it.
        part: of a benchmark that was asked for this part alone; what the file tells of the others stays, and what it
            was measured with is told beside it.
    """
    measured = {"commit": commit(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    parts: dict[str, object] = {}
    if part is not None:
        parts = {part: measured}
        if json_file is not None and json_file.exists():
            before = json.loads(json_file.read_text(encoding="utf-8"))
            if (before["benchmark"], before["quick"]) == (outcome.benchmark, outcome.quick):
                measured = {key: before[key] for key in measured}
                parts = {**before.get("parts", {}), **parts}
                outcome = replace(
                    outcome,
                    figures={**before["figures"], **outcome.figures},
                    goals={**before["goals"], **outcome.goals},
                    baselines={**before["baselines"], **outcome.baselines},
                )
    text = json.dumps(
        {
            "benchmark": outcome.benchmark,
            **({"asked": outcome.asked} if outcome.asked else {}),
            "quick": outcome.quick,
            **measured,
            **({"parts": parts} if parts else {}),
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


def figures_of(benchmark: str, folder: Path = RESULTS) -> dict[str, float]:
    """What sentences may quote of a benchmark's result: figures, and the baselines beside them; nothing without one."""
    path = folder / f"{benchmark}.json"
    if not path.exists():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    return {**told["baselines"], **told["figures"]}


def commit() -> str:
    """The commit that was measured, marked when the tree differs from it; empty outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() if described.returncode == 0 else ""
