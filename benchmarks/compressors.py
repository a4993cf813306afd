"""Speed of every compressor on a gradient of ResNet-50's size, one CPU thread: encode and decode, beside a memory copy.

Each way of exchanging runs alone, so what is timed is a worker's own work for one payload: select or round, pack,
unpack and write the dense result. What the memory of a gradient costs (one addition over all elements) comes on top.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks._outcome import Outcome, options, publish, quartiles, run_benchmark
from hetopt.core.comm.composition import AR_TOPK, METHODS, PACKED, PACKED_BF16, PLAIN, STAR, combine
from hetopt.core.comm.payload_bytes import kept_elements, wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.methods import make_chain

ELEMENTS = 25_557_032
LAYERS = ((1024, 1024),) * 24
SHAPES = (*LAYERS, (ELEMENTS - sum(rows * columns for rows, columns in LAYERS),))
RATIO = 0.01
WORKERS = 8  # for what the payload depends on: how wide codes are
SPEEDUP_GOAL = 4.0

Work = Callable[[int], object]


def torch_topk(flat: torch.Tensor, out: torch.Tensor) -> Work:
    """The baseline of all selection: what `torch.topk` chooses, written into a dense vector."""
    k = kept_elements(ELEMENTS, RATIO)

    def work(step: int) -> None:
        indices = torch.topk(flat.abs(), k, sorted=False).indices
        out.zero_().index_add_(0, indices, flat.index_select(0, indices))

    return work


def exchange_alone(compression: Compression, flat: torch.Tensor, out: torch.Tensor) -> Work:
    """One worker's compression and decompression."""
    links = make_chain(compression, ELEMENTS, shapes=SHAPES)
    return lambda step: links.run(flat, out, Channel(), step)


def ways() -> dict[str, Compression]:
    """Every compressor by each kind of collective that it has."""
    found: dict[str, Compression] = {}
    for name, method in METHODS.items():
        for collective in method.collectives:
            if collective in (AR_TOPK, STAR):
                continue  # alone, every AR-Topk selects in every step
            found[f"{name}_{collective}" if len(method.collectives) > 1 else name] = Compression(
                name=name,
                ratio=RATIO if method.by_ratio else 1.0,
                collective=collective,
                memory=combine(name, collective=collective).memory,
            )
    for coding in (PACKED, PACKED_BF16):
        found[f"topk_{coding}"] = Compression(name="topk", ratio=RATIO, coding=coding)
    return found


def main() -> None:
    """Time all of them in every round, so that a busy moment of the machine hits all."""
    asked = options(__doc__)
    torch.set_num_threads(1)
    flat = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(flat)
    compressions = ways()
    works: dict[str, Work] = {"memory_copy": lambda step: out.copy_(flat), "torch_topk": torch_topk(flat, out)}
    works |= {key: exchange_alone(compression, flat, out) for key, compression in compressions.items()}
    rounds = 3 if asked.quick else 11
    times: dict[str, list[float]] = {key: [] for key in works}
    for round_ in range(rounds + 1):
        print(f"round {round_} of {rounds}", file=sys.stderr)
        for key, work in works.items():
            started = time.perf_counter()
            work(round_)
            if round_ > 0:  # the first round warms up
                times[key].append(time.perf_counter() - started)
    figures: dict[str, float] = {}
    print(f"{'':<28}{'GB/s':>8}{'quartiles':>18}{'ms':>9}{'copies':>9}{'sent':>9}")
    for key, seconds in times.items():
        low, middle, high = quartiles([4e-9 * ELEMENTS / each for each in seconds])
        copies = quartiles([each / copy for each, copy in zip(seconds, times["memory_copy"], strict=True)])[1]
        compression = compressions.get(key)
        sent = ""
        if compression is not None:
            payload = wire_bytes(
                compression.name,
                ELEMENTS,
                compression.ratio,
                workers=WORKERS,
                collective=compression.collective,
                coding=compression.coding or PLAIN,
                shapes=SHAPES,
            )
            sent = f"{payload / 4 / ELEMENTS:.2%}"
        spread = f"{low:.2f} – {high:.2f}"
        print(f"{key:<28}{middle:>8.2f}{spread:>18}{1e3 * quartiles(seconds)[1]:>9.0f}{copies:>9.1f}{sent:>9}")
        figures[f"{key}_gb_per_s"] = round(middle, 3)
    speedup = quartiles([slow / fast for slow, fast in zip(times["torch_topk"], times["topk_all_gather"], strict=True)])
    print(f"topk is {speedup[1]:.1f} times as fast as torch.topk ({speedup[0]:.1f} – {speedup[2]:.1f})")
    publish(
        Outcome(
            benchmark="compressors",
            quick=asked.quick,
            figures={
                **{key: value for key, value in figures.items() if key.removesuffix("_gb_per_s") in compressions},
                "topk_speedup": round(speedup[1], 2),
            },
            goals={"topk_speedup": {"at_least": SPEEDUP_GOAL}},
            baselines={key: figures[key] for key in ("memory_copy_gb_per_s", "torch_topk_gb_per_s")},
        ),
        asked.json_file,
    )


if __name__ == "__main__":
    run_benchmark(main)
