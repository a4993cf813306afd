"""Time to find the largest gradient elements of ResNet-50's size on one CPU thread: hetopt, NumPy, `torch.topk`.

All select from the same gradient, in turn, and must find the same magnitudes. Ratios are of CPU time, which what else
runs on the machine disturbs less than the clock; the goal is of the clock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks._outcome import Outcome, options, publish, quartiles, run_benchmark
from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.topk import largest_magnitudes

ELEMENTS = 25_557_032
RATIOS = (0.1, 0.01, 0.001)
SPEEDUP_GOAL = 3.0


def torch_topk(flat: torch.Tensor, k: int) -> torch.Tensor:
    """The baseline: ascending indices of what `torch.topk` selects."""
    return torch.topk(flat.abs(), k, sorted=False).indices.sort().values


def numpy_partition(flat: torch.Tensor, k: int) -> torch.Tensor:
    """The other baseline: ascending indices of the magnitudes from the k-th largest on (ties may add some)."""
    magnitudes = np.abs(flat.numpy())
    return torch.from_numpy(np.flatnonzero(magnitudes >= np.partition(magnitudes, -k)[-k])[:k])


SELECTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "hetopt": largest_magnitudes,
    "numpy_partition": numpy_partition,
    "torch_topk": torch_topk,
}


def _times(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    return quartiles([one / other for one, other in zip(slow, fast, strict=True)])


def main() -> None:
    """Time all selections in every round, so that a busy moment of the machine hits all."""
    asked = options(__doc__)
    torch.set_num_threads(1)
    flat = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    rounds = 3 if asked.quick else 15
    figures: dict[str, float] = {}
    baselines: dict[str, float] = {}
    print(f"{'sent':>8}{'by':>18}{'CPU time':>12}{'times hetopt':>14}{'quartiles':>16}")
    for ratio in RATIOS:
        k = kept_elements(ELEMENTS, ratio)
        cpu_s: dict[str, list[float]] = {name: [] for name in SELECTIONS}
        clock_s: dict[str, list[float]] = {name: [] for name in SELECTIONS}
        for round_ in range(rounds + 1):
            print(f"{ratio:.1%}: round {round_} of {rounds}", file=sys.stderr)
            found: dict[str, torch.Tensor] = {}
            for name, select in SELECTIONS.items():
                started_cpu, started = time.process_time(), time.perf_counter()
                indices = select(flat, k)
                took_cpu, took = time.process_time() - started_cpu, time.perf_counter() - started
                found[name] = flat[indices].abs().sort().values
                if round_ > 0:  # the first round warms up the allocator
                    cpu_s[name].append(took_cpu)
                    clock_s[name].append(took)
            if not all(torch.equal(found["hetopt"], other) for other in found.values()):
                raise SystemExit(f"the selections differ at a ratio of {ratio:g}")
        spelled = f"{ratio:g}".replace(".", "_")
        figures[f"select_{spelled}_cpu_s"] = round(quartiles(cpu_s["hetopt"])[1], 4)
        figures[f"speedup_{spelled}"] = round(_times(clock_s["torch_topk"], clock_s["hetopt"])[1], 2)
        for name, seconds in cpu_s.items():
            low, middle, high = _times(seconds, cpu_s["hetopt"])
            print(f"{ratio:>8.1%}{name:>18}{quartiles(seconds)[1]:>10.3f} s{middle:>14.1f}{low:>9.1f} – {high:.1f}")
            if name != "hetopt":
                baselines[f"{name}_{spelled}_cpu_s"] = round(quartiles(seconds)[1], 4)
                figures[f"cpu_speedup_over_{name}_{spelled}"] = round(middle, 2)
    publish(
        Outcome(
            benchmark="topk_selection",
            quick=asked.quick,
            figures=figures,
            goals={"speedup_0_01": {"at_least": SPEEDUP_GOAL}},
            baselines=baselines,
        ),
        asked.json_file,
    )


if __name__ == "__main__":
    run_benchmark(main)
