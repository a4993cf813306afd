"""One worker of a group that goes wrong, and what it says about it.

python peers_program.py RANK WORLD_SIZE FOLDER die|hang
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm import peers
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.peers import LostPeer
from hetopt.trainer.failure import is_peer_loss
from tests.trainer.joining import join, leave

TIMEOUT_S, PATIENCE_S = 3.0, 2.0
LOST = 1


def main(rank: int, world_size: int, folder: Path, way: str) -> None:
    """First disagree, which leaves the group whole; then lose a worker."""
    # Whoever dies is missed without any patience.
    store = join(rank, world_size, folder, timeout_s=TIMEOUT_S if way == "hang" else 300)
    peers.ROLL_CALL_S = PATIENCE_S
    said: dict[str, object] = {}
    odd = Compression(name="topk", ratio=0.01) if rank == LOST else Compression()
    try:
        Exchange(odd, 1000).run(torch.ones(1000))
    except BadInput as error:
        said["disagreement"] = error.message

    exchange = Exchange(Compression(), 300_000, store=store)
    exchange.run(torch.ones(300_000))
    if rank == LOST:
        if way == "die":
            os._exit(9)
        while not all((folder / f"rank-{other}.json").exists() for other in range(world_size) if other != LOST):
            time.sleep(0.05)
        os._exit(9)
    try:
        exchange.run(torch.ones(300_000))
    except (LostPeer, RunFailed) as error:
        said |= {
            "loss": getattr(error, "message", str(error)),
            "kind": type(error).__name__,
            "peer_loss": is_peer_loss(error),
        }
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
