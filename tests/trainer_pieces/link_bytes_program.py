"""One worker on a host of its own: exchanges once in every way, and reads off its link how many bytes it sent.

python link_bytes_program.py RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hetopt.core.comm.composition import FEEDBACK, Combination, combinations
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.exchange import Exchange
from tests.trainer.joining import join, leave

SHAPES = ((600, 500), (400,))
NUMEL = 300_400
QUIET_S = 0.03


def ways() -> list[Combination]:
    """One memory of each is enough: memories send nothing."""
    return list({(c.name, c.collective): c for c in combinations() if c.memory != FEEDBACK}.values()) + [
        c for c in combinations() if c.memory == FEEDBACK and c.name in ("powersgd", "randomk", "sign")
    ]


def key(combination: Combination) -> str:
    return f"{combination.name} {combination.collective} {combination.memory}"


def sent_by_link() -> int:
    """Bytes that have left this network namespace, headers and acknowledgements included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def main(rank: int, world_size: int, folder: Path) -> None:
    join(rank, world_size, folder)
    counted: dict[str, object] = {}
    for combination in ways():
        compression = Compression(
            name=combination.name,
            ratio=0.1 if combination.method.by_ratio else 1.0,
            collective=combination.collective,
            memory=combination.memory,
            rank=16 if combination.name == "powersgd" else None,
        )
        exchange = Exchange(compression, NUMEL, shapes=SHAPES)
        flat = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
        exchange.run(flat.clone())  # with the agreement
        dist.barrier()
        time.sleep(QUIET_S)
        channel, before = Channel(None, on=flat.device), sent_by_link()
        exchange.run(flat, channel=channel)
        time.sleep(QUIET_S)
        messages = [(message.primitive, message.payload_bytes) for message in channel.messages]
        counted[key(combination)] = {"messages": messages, "bytes": sent_by_link() - before}
        dist.barrier()
    (folder / f"rank-{rank}.json").write_text(json.dumps(counted))
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
