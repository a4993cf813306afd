"""The workers of a rehearsed benchmark: ``python -m benchmarks._crew FOLDER``.

One process imports torch, and becomes a worker on each host of ``FOLDER/runs.json``. A worker joins the others once and
then does the runs one after another, hetopt's and the baseline's in turn: starting processes takes longer than most
runs, and sides that take turns see the same machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from benchmarks._collectives import time_exchanges
from benchmarks._in_process import train_here
from benchmarks._plain_ddp import HookName, train_plainly
from benchmarks._plain_script import train_in_session
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import conditions_in, read_spec
from hetopt.trainer.failure import FailureReport
from hetopt.trainer.host.gate import group_store
from hetopt.trainer.steps.stopwatch import make_pace
from hetopt.trainer.worker import keep_freed_memory

RUNS_FILE = "runs.json"
EXCHANGES = "exchanges"
SESSION = "session"
DDP_SIDES: dict[str, HookName] = {"ddp": "none", "ddp-tuned": "tuned", "ddp-fp16": "fp16", "ddp-powersgd": "powersgd"}


def main(folder: Path) -> int:
    """Start the workers and wait for all; return the exit code of the first that failed, 0 if none did.

    Once one has failed, the others are killed.
    """
    runs = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
    if any(run["side"] == EXCHANGES for run in runs["runs"]):
        # On hosts of their own workers would not wait for a core, and here those that a message wakes up should not
        # either: this is about links. Whatever else this machine does has to wait instead.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    places = runs["namespaces"]
    children = {}
    for rank, namespace in enumerate(places):
        child = os.fork()
        if child == 0:
            _enter(namespace)
            _leave(_work(folder, runs["runs"], rank, len(places)))
        children[child] = rank
    failed = 0
    while children:
        child, status = os.wait()
        children.pop(child, None)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = abs(code)
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


def _work(folder: Path, runs: list[dict[str, str]], rank: int, world_size: int) -> int:
    """Do all runs as one worker; return the exit code of the first that failed, after which none is done.

    0: none did.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # as hetopt's workers do, on every side: what is compared is not the allocator
    dist.init_process_group("gloo", store=group_store(os.environ, rank), rank=rank, world_size=world_size)
    for run in runs:
        run_dir = folder / run["name"]
        if rank == 0:
            print(f"  {run['name']}", file=sys.stderr, flush=True)
        dist.barrier()
        with FailureReport(run_dir, rank) as report:
            if run["side"] == EXCHANGES:
                time_exchanges(run_dir, rank, world_size)
            else:
                _train(run["side"], run_dir, rank, world_size)
        if report.exit_code:
            return report.exit_code
    dist.barrier()
    return 0


def _train(side: str, run_dir: Path, rank: int, world_size: int) -> None:
    """Train a run as one worker: in a session, by plain DistributedDataParallel or as hetopt's task, by ``side``."""
    spec = read_spec(run_dir)
    if side == SESSION:
        train_in_session(spec, run_dir)
        return
    if side not in DDP_SIDES:
        train_here(spec, run_dir, rank=rank, world_size=world_size)
        return
    conditions = conditions_in(run_dir)
    pace = make_pace(spec.workers[rank], torch.device("cpu"), conditions=conditions, own_core=False)
    with closing(EventLog(run_dir / EVENTS_FILE if rank == 0 else None)) as events:
        train_plainly(spec, rank, events, pace, DDP_SIDES[side])


def _enter(namespace: str) -> None:
    """Enter a network namespace (`os.setns` is younger than the oldest Python that hetopt supports).

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as handle:
        if libc.setns(handle.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _leave(code: int) -> NoReturn:
    """Exit without tearing the interpreter down.

    Threads of the process group outlive it and abort the interpreter's end every now and then (torch 2.13, gloo).
    """
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
