"""What forks of this process need not import any more: torch, what its first optimizer asks for, hetopt's children."""

from __future__ import annotations

import multiprocessing

import torch
import torch._dynamo

import hetopt.profiler.script.child
import hetopt.profiler.script.gradients
import hetopt.trainer.session  # noqa: F401

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
torch.set_num_threads(1)
