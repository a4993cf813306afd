"""Time to find the largest gradient elements of ResNet-50's size on one CPU thread: ours against `torch.topk`.

Both select from the same gradient, in turn, and must find the same magnitudes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks._outcome import Outcome, options, publish, quartiles
from hetopt.trainer.exchange.topk import largest_magnitudes
from hetopt.trainer.exchange.wire import kept_elements

ELEMENTS = 25_557_032
RATIOS = (0.1, 0.01, 0.001)
SPEEDUP_GOAL = 3.0


def torch_topk(flat: torch.Tensor, k: int) -> torch.Tensor:
    """The baseline: ascending indices of what `torch.topk` selects."""
    return torch.topk(flat.abs(), k, sorted=False).indices.sort().values


def timed(
    select: Callable[[torch.Tensor, int], torch.Tensor], flat: torch.Tensor, k: int
) -> tuple[float, torch.Tensor]:
    """Seconds of one selection, and the sorted magnitudes that it found."""
    started = time.perf_counter()
    indices = select(flat, k)
    return time.perf_counter() - started, flat[indices].abs().sort().values


def main() -> None:
    """Time both selections in every round, so that a busy moment of the machine hits both."""
    asked = options(__doc__)
    torch.set_num_threads(1)
    flat = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    rounds = 3 if asked.quick else 15
    figures: dict[str, float] = {}
    baselines: dict[str, float] = {}
    print(f"{'sent':>8}{'hetopt':>12}{'torch.topk':>14}{'times faster':>16}{'quartiles':>16}")
    for ratio in RATIOS:
        k = kept_elements(ELEMENTS, ratio)
        ours: list[float] = []
        theirs: list[float] = []
        for round_ in range(rounds + 1):
            print(f"{ratio:.1%}: round {round_} of {rounds}", file=sys.stderr)
            our_s, found = timed(largest_magnitudes, flat, k)
            their_s, expected = timed(torch_topk, flat, k)
            if not torch.equal(found, expected):
                raise SystemExit(f"the selections differ at a ratio of {ratio:g}")
            if round_ > 0:  # the first round warms up the allocator
                ours.append(our_s)
                theirs.append(their_s)
        low, middle, high = quartiles([slow / fast for slow, fast in zip(theirs, ours, strict=True)])
        our_s, their_s = quartiles(ours)[1], quartiles(theirs)[1]
        print(f"{ratio:>8.1%}{our_s:>10.3f} s{their_s:>12.3f} s{middle:>16.1f}{low:>9.1f} – {high:.1f}")
        name = f"{ratio:g}".replace(".", "_")
        figures |= {f"select_{name}_s": round(our_s, 4), f"speedup_{name}": round(middle, 2)}
        baselines[f"torch_topk_{name}_s"] = round(their_s, 4)
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
    main()
