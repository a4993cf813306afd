"""How much is lost by searching instead of enumerating, beside other searches with as much time.

The other searches have as much processor time as hetopt took, and half a second at least.

Regret is the best score found over the best there is, less one. The score is time within a budget, or cost within a
deadline; only plans count that keep the limits at the upper end of their interval. Sub-spaces are random parts of the
catalogue that can be enumerated whole.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks._outcome import Bound, Outcome, options, publish, run_benchmark
from benchmarks._search_contenders import CONTENDERS, run
from benchmarks._search_spaces import Question, best_score, everything, small
from hetopt.optimizer.search.search import Effort, search
from hetopt.optimizer.search.search_space import MAX_TYPES

SPACES = 200
LEAST_S = 0.5
"""Of processor time for the other searches: hetopt is often done sooner, and nobody waits for less."""

NOT_FOUND = 1.0
"""The regret of a search that finds nothing where there is something."""

GOALS: dict[str, dict[Bound, float]] = {
    "homogeneous_regret_worst": {"at_most": 1e-9},
    "mixes_regret_mean": {"at_most": 0.005},
    "mixes_regret_worst": {"at_most": 0.02},
}


def regret(score: float, best: float) -> float:
    """Return a score's regret relative to the best; NaN where nothing keeps the limits."""
    if not math.isfinite(best):
        return math.nan
    return min(NOT_FOUND, score / best - 1) if math.isfinite(score) else NOT_FOUND


def ask(question: Question, best: float, *, types: int, seed: int) -> tuple[float, float]:
    """Return hetopt's regret against the best score there is, and the processor time in seconds.

    `NOT_FOUND` where the search says wrongly whether anything keeps the limits.
    """
    started = time.process_time()
    result = search(question.space, question.job, question.limits, effort=Effort(types=types))
    seconds = time.process_time() - started
    if result.safe != math.isfinite(best):
        return NOT_FOUND, seconds
    return regret(best_score(result.forecast, question.limits), best), seconds


def regrets(count: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the regrets of each contender over random sub-spaces, and hetopt's seconds for mixes.

    The others get as long as hetopt took, `LEAST_S` at least. A regret is NaN where nothing keeps the limits.
    """
    by_contender: dict[str, list[float]] = {name: [] for name in ("hetopt, one type", "hetopt", *CONTENDERS)}
    seconds: list[float] = []
    for number, question in enumerate(small(count, seed=0)):
        rows, every = everything(question.space, question.job, MAX_TYPES)
        best = best_score(every, question.limits)
        alone = (rows.count > 0).sum(axis=1) == 1
        uniform, _ = ask(question, best_score(every.take(alone), question.limits), types=1, seed=number)
        mixed, took = ask(question, best, types=MAX_TYPES, seed=number)
        by_contender["hetopt, one type"].append(uniform)
        by_contender["hetopt"].append(mixed)
        seconds.append(took)
        for name, contender in CONTENDERS.items():
            by_contender[name].append(regret(run(contender, question, max(took, LEAST_S), number).best, best))
        if number % 20 == 19:
            print(f"{number + 1} of {count} sub-spaces", file=sys.stderr)
    return by_contender, seconds


def known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def show(by_contender: dict[str, list[float]], seconds: Sequence[float]) -> None:
    """Print the table of regrets, over the sub-spaces where something keeps the limits."""
    took = f"hetopt took {statistics.median(seconds):.2f} s in the median, the others {LEAST_S:g} s at least"
    print(f"Regret in % over {len(seconds)} sub-spaces; {took}")
    print(f"{'':20}{'mean':>9}{'median':>9}{'worst':>9}{'exact':>9}")
    for name, values in by_contender.items():
        some = known(values)
        exact = sum(value < 1e-9 for value in some) / len(some)
        figures = (statistics.fmean(some), statistics.median(some), max(some), exact)
        print(f"{name:20}" + "".join(f"{100 * figure:9.2f}" for figure in figures))
    print("exact: share of the sub-spaces where the best was found")


def main() -> None:
    """Measure the search, and publish."""
    asked = options(__doc__)
    results = Outcome(benchmark="search", quick=asked.quick)
    spaces(results, 3 if asked.smoke else 30 if asked.quick else SPACES)
    publish(results, asked.json_file)


def spaces(results: Outcome, count: int) -> None:
    """Measure regrets and seconds, and record the figures."""
    by_contender, seconds = regrets(count)
    show(by_contender, seconds)
    results.figures |= {
        "homogeneous_regret_worst": max(known(by_contender["hetopt, one type"])),
        "mixes_regret_mean": round(statistics.fmean(known(by_contender["hetopt"])), 6),
        "mixes_regret_worst": round(max(known(by_contender["hetopt"])), 6),
        "mixes_median_cpu_s": round(statistics.median(seconds), 3),
    }
    results.baselines |= {
        f"{name.lower().replace(' ', '_').replace('-', '_')}_regret_{kind}": round(of(known(by_contender[name])), 6)
        for name in CONTENDERS
        for kind, of in (("mean", statistics.fmean), ("worst", max))
    }
    results.goals |= {name: goal for name, goal in GOALS.items() if name in results.figures}


if __name__ == "__main__":
    run_benchmark(main)
