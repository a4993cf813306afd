"""Runs a script as one of two workers, with or without shares of 2:1, and keeps the parameters of its optimizer steps.

``python -m tests.integrations.worker FOLDER plain|shares SCRIPT ARGUMENTS``, under torchrun's variables.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.trainer.ddp.lifetime import keep_modules
from hetopt.trainer.ddp.script import unequal
from hetopt.trainer.script.plan import SessionPlan
from hetopt.trainer.worker import leave

SHARES = (32, 16)


def spec(script: str) -> RunSpec:
    workers = tuple(WorkerSpec(host=f"h{n}", type="local", local_batch_size=share) for n, share in enumerate(SHARES))
    return RunSpec(
        task="script", script=(script,), workers=workers, compression=Compression(), batch_policy="static",
        stop=StopRule(max_steps=1),
    )  # fmt: skip


def main() -> None:
    folder, way, script = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    keep_modules()
    steps: list[Tensor] = []

    def stepped(optimizer: Any, args: Any, options: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        steps.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))

    register_optimizer_step_post_hook(stepped)
    sys.argv = sys.argv[3:]
    with unequal(SessionPlan(spec=spec(script)), folder) if way == "shares" else nullcontext():
        runpy.run_path(script, run_name="__main__")
    torch.save(torch.stack(steps), folder / f"{way}-{os.environ['RANK']}.pt")
    leave(0)


if __name__ == "__main__":
    main()
