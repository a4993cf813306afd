"""What forks of this process need not import any more: torch, what its first optimizer asks for, hetopt's children."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch._dynamo

import hetopt.profiler.script.child
import hetopt.profiler.script.gradients
import hetopt.trainer.loop
import hetopt.trainer.session  # noqa: F401

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
PATIENCE_S = 120.0


def alone(said: Path) -> None:
    """Begin as a program that is started with its output in a file, and nobody who types."""
    writes, reads = os.open(said, os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for of, to in ((reads, 0), (writes, 1), (writes, 2)):
        os.dup2(of, to)
    sys.stdin = os.fdopen(0)


torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
torch.set_num_threads(1)
