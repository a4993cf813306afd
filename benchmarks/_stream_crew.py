"""The workers of a benchmark on streams: ``python -m benchmarks._stream_crew FOLDER WORKERS``.

One process imports torch and becomes all workers, which do the runs of ``FOLDER/runs.json`` one after another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks._in_process import train_here
from hetopt.core.run_folder import read_spec
from hetopt.trainer.failure import FailureReport

RUNS_FILE = "runs.json"


def main(folder: Path, workers: int) -> int:
    """Start the workers and wait for all; 0 when all did all runs."""
    torch.set_num_threads(1)
    runs = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
    children = []
    for rank in range(workers):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _work(folder, runs, rank, workers)
            finally:
                sys.stderr.flush()
                os._exit(code)  # threads of a process group would abort the interpreter's end
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, codes))


def _work(folder: Path, runs: list[str], rank: int, workers: int) -> int:
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), workers), rank=rank, world_size=workers)
    for name in runs:
        run_dir = folder / name
        if rank == 0:
            print(f"  {name}", file=sys.stderr, flush=True)
        dist.barrier()
        with FailureReport(run_dir, rank) as report:
            train_here(read_spec(run_dir), run_dir, rank=rank, world_size=workers)
        if report.exit_code:
            return report.exit_code
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
