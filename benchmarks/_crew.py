"""One worker of a rehearsed benchmark: ``python -m benchmarks._crew FOLDER RANK``.

It joins the others once and then does the runs of ``FOLDER/runs.json`` one after another, hetopt's and the baseline's
in turn: starting processes takes longer than most runs, and sides that take turns see the same machine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._plain_ddp import train_plainly
from hetopt.trainer.conditions import ConditionsReader
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.events import EVENTS_FILE, EventLog
from hetopt.trainer.failure import FailureReport
from hetopt.trainer.loop import train
from hetopt.trainer.pace import make_pace
from hetopt.trainer.run_folder import read_spec

RUNS_FILE = "runs.json"


def main(folder: Path, rank: int) -> int:
    """Do all runs; the exit code is that of the first that failed."""
    torch.set_num_threads(1)
    runs = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", rank=rank, world_size=runs["world_size"])
    for run in runs["runs"]:
        run_dir = folder / run["name"]
        spec = read_spec(run_dir)
        device = torch.device("cpu")
        if rank == 0:
            print(f"  {run['name']}", file=sys.stderr, flush=True)
        dist.barrier()
        with FailureReport(run_dir, rank) as report:
            events = EventLog(run_dir / EVENTS_FILE if rank == 0 else None)
            if run["side"] == "ddp":
                worker = spec.workers[rank]
                pace = make_pace(
                    worker, device, conditions=ConditionsReader(run_dir), seed=spec.seed + rank, own_core=False
                )
                train_plainly(spec, rank, events, pace)
            else:
                context = WorkerContext(
                    spec=spec,
                    rank=rank,
                    world_size=runs["world_size"],
                    device=device,
                    run_dir=run_dir,
                    events=events,
                    stop_requested=lambda: False,
                )
                train(context)
            events.close()
        if report.exit_code:
            return report.exit_code
    dist.barrier()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    # Threads of the process group outlive it and abort the interpreter's end every now and then (torch 2.13, gloo).
    os._exit(code)
