"""One of five workers, in groups of two, three and all of them: every operation of a channel, at sizes of every form.

python channel_program.py RANK FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hetopt.trainer.comm.channel import Channel
from tests.trainer.joining import join, leave

WORKERS = 5
GROUPS = {"two": (1, 4), "three": (0, 2, 3), "all": tuple(range(WORKERS))}
BYTES = (1, 7, 300, 4096, 16_384, 70_000, 300_001)
DTYPES = {"bytes": torch.uint8, "halves": torch.bfloat16, "floats": torch.float32}


def vector(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, which every type has and sums of which are exact."""
    generator = torch.Generator().manual_seed(10 * size + rank)
    return torch.randint(0, 20, (size,), generator=generator).to(dtype)


def numels(dtype: torch.dtype) -> list[int]:
    return [max(1, size // dtype.itemsize) for size in BYTES]


def main(rank: int, folder: Path) -> None:
    join(rank, WORKERS, folder)
    results: dict[str, torch.Tensor] = {}
    for name, ranks in GROUPS.items():
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=300))
        if rank not in ranks:
            continue
        channel = Channel(group)
        for kind, dtype in DTYPES.items():
            for numel in numels(dtype):
                own, key = vector(rank, numel, dtype), f"{name} {kind} {numel}"
                for source in range(channel.workers):
                    sent = own.clone()
                    channel.broadcast(sent, source)
                    results[f"{key} broadcast {source}"] = sent
                results[f"{key} gather"] = channel.all_gather(own).clone()
                place = torch.full((channel.workers * numel,), 99, dtype=dtype)
                assert channel.all_gather(own, place).data_ptr() == place.data_ptr()
                results[f"{key} gather in place"] = place.view(channel.workers, -1)
                slices = torch.empty(channel.workers, numel, dtype=dtype)
                channel.gather_slices(own, slices)
                results[f"{key} slices"] = slices
                rows = torch.stack([own + receiver for receiver in range(channel.workers)])
                swapped = torch.empty_like(rows)
                channel.all_to_all(rows, swapped)
                results[f"{key} swapped"] = swapped
                if dtype == torch.float32:
                    for reduction in ("sum", "max"):
                        reduced = own.clone()
                        channel.all_reduce(reduced, reduction)
                        results[f"{key} {reduction}"] = reduced
    torch.save(results, folder / f"rank-{rank}.pt")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
