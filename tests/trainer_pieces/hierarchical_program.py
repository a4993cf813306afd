"""One of four workers, which are thought to be on hosts in several ways: exchanges in two levels, saves what it holds.

python hierarchical_program.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, HierarchicalExchange, HostGroups
from tests.trainer.joining import join, leave

WORKERS = 4
LAYOUTS = {"2+2": "aabb", "3+1": "aaab", "mixed": "abab", "alone": "abcd", "one": "aaaa"}
SHAPES = ((300, 60), (77,))
NUMEL = 18_077
STEPS = 6
TOPK = Compression(name="topk", ratio=0.02)
WAYS = [
    TOPK,
    Compression(),
    Compression(name="topk", ratio=0.1, collective="ar_topk"),
    Compression(name="qsgd_maxnorm"),
    Compression(name="powersgd", rank=2),
    Compression(name="redsync", ratio=0.02),
]
LOOK_AT = (0.01, 0.1)


def gradient(rank: int, step: int) -> torch.Tensor:
    """In eighths, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-400, 401, (NUMEL,), generator=generator) / 8


def scattered(rank: int) -> torch.Tensor:
    """Over six orders of magnitude, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator) * 10 ** torch.empty(NUMEL).uniform_(-3, 3, generator=generator)


def nested(first: Compression, groups: HostGroups) -> HierarchicalExchange:
    return HierarchicalExchange(first, NUMEL, groups=groups, shapes=SHAPES, seed=4)


def told(stats: ExchangeStats) -> dict[str, object]:
    return {
        "messages": [(m.primitive, m.payload_bytes, m.scope) for m in stats.messages],
        "sent_bytes": stats.sent_bytes,
        "energy": stats.energy,
        "look_energies": stats.look_energies,
    }


def exchange(rank: int) -> tuple[dict[str, State], dict[str, object]]:
    """Everything that the test judges, as tensors and as plain values."""
    held: dict[str, State] = {}
    said: dict[str, object] = {}
    layouts = {layout: HostGroups(hosts, timeout_s=300) for layout, hosts in LAYOUTS.items()}
    for layout, hosts in layouts.items():
        flat = scattered(rank)
        nested(Compression(), hosts).run(flat)
        held[f"{layout} dense"] = {"sum": flat}

        thin = nested(TOPK, hosts)
        for step in range(STEPS):
            flat = gradient(rank, step)
            stats = thin.run(flat, LOOK_AT)
            held[f"{layout} sparse {step}"] = {"sum": flat, **thin.state()}
        said[f"{layout} sparse"] = told(stats)

        switching, received = nested(WAYS[0], hosts), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(2 * len(WAYS)):
            switching.use(WAYS[step // 2])
            flat = gradient(rank, step)
            stats = switching.run(flat)
            received += flat
            said[f"{layout} way {step // 2}"] = told(stats)
        held[f"{layout} switched"] = {"received": received, **switching.state()}

        # A checkpoint in the middle, resumed on workers that are elsewhere now.
        for other, others in {**layouts, "flat": None}.items():
            before, begun = nested(WAYS[2], hosts), torch.zeros(NUMEL, dtype=torch.float64)
            for step in range(3):
                flat = gradient(rank, step)
                before.run(flat)
                begun += flat
            after = Exchange(WAYS[2], NUMEL, shapes=SHAPES, seed=4) if others is None else nested(WAYS[2], others)
            after.load_state(before.state())
            after.use(Compression())
            flat = gradient(rank, 3)
            after.run(flat)
            held[f"{layout} then {other}"] = {"received": begun + flat, **after.state()}
    plain = Exchange(TOPK, NUMEL, shapes=SHAPES, seed=4)
    flat = gradient(rank, 0)
    plain.run(flat)
    after = nested(TOPK, layouts["2+2"])
    after.load_state(plain.state())
    after.use(Compression())
    rest = gradient(rank, 1)
    after.run(rest)
    held["flat then 2+2"] = {"received": flat.double() + rest}
    return held, said


def main(rank: int, folder: Path) -> None:
    join(rank, WORKERS, folder)
    held, said = exchange(rank)
    torch.save(held, folder / f"rank-{rank}.pt")
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
