"""One search over a part of the catalogue in a process of its own: seconds to the first and the last answer, memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from benchmarks._search_spaces import whole
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import Effort, search


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The time and memory of one search; ``*_cpu_s`` is processor time, without the import of libraries.

    Attributes:
        options: that were left to choose from.
        first_s, final_s: until every cluster of one type is priced, and until the end; with types=1 they are one.
        gap: proved for mixes of two types, and of three where they are asked for; 1 where it was not.
    """

    options: int
    first_s: float
    final_s: float
    first_cpu_s: float
    final_cpu_s: float
    peak_mb: float
    gap: float


def measure(name: str, *, every: int, workers: int, types: int, loose: float) -> Growth:
    """Return the growth of a search over every ``every``-th option of the catalogue, run in another process."""
    arguments = [name, str(every), str(workers), str(types), str(loose)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._search_growth", *arguments], capture_output=True, text=True, check=True
    )
    return Growth(**json.loads(done.stdout.splitlines()[-1]))


def _search(name: str, every: int, workers: int, types: int, loose: float) -> Growth:
    space, job = whole(name, workers)
    space = replace(space, options=space.options[::every])
    cheapest = search(space, job, Limits(time_weight=0.0), effort=Effort(types=1)).forecast.cost_high_usd.min()
    limits = Limits(budget_usd=float(loose * cheapest), time_weight=1.0)
    whole.cache_clear()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    space, job = whole(name, workers)  # what is to be searched is part of the answer's time
    space = replace(space, options=space.options[::every])
    heard: list[tuple[float, float]] = []

    def tell(text: str) -> None:
        heard.append((time.perf_counter(), time.process_time()))

    result = search(space, job, limits, effort=Effort(types=types), tell=tell)
    end = (time.perf_counter(), time.process_time())
    first = heard[1] if len(heard) > 1 else end
    return Growth(
        options=len(space.options),
        first_s=first[0] - begun,
        final_s=end[0] - begun,
        first_cpu_s=first[1] - begun_cpu,
        final_cpu_s=end[1] - begun_cpu,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        gap=1.0 if result.proof is None or result.proof.gap is None else result.proof.gap,
    )


if __name__ == "__main__":
    asked = sys.argv[1:]
    growth = _search(asked[0], int(asked[1]), int(asked[2]), int(asked[3]), float(asked[4]))
    print(json.dumps(vars(growth)))
