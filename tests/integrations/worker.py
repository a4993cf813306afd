"""Runs a script as several workers, in shares or not, and keeps the parameters and learning rates of its steps.

``python -m tests.integrations.worker FOLDER plain|shares SCRIPT ARGUMENTS``, with torchrun's variables but for ranks:
the workers are forks of one process that has imported what the script imports. Shares are 2:1 or those of the variable
SHARES, such as ``a:12,a:12,b:4,b:4`` for two devices of each of two hosts.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.interruption import die_with_parent
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.trainer.ddp.comm_hook import keep_modules
from hetopt.trainer.ddp.script import unequal
from hetopt.trainer.worker import leave


def spec(script: str) -> RunSpec:
    shares = (share.split(":") for share in os.environ.get("SHARES", "a:32,b:16").split(","))
    return RunSpec(
        task="script",
        script=(script,),
        batches_per_step=int(os.environ.get("BATCHES", "1")),
        workers=tuple(WorkerSpec(host=host, type="local", local_batch_size=int(samples)) for host, samples in shares),
        compression=parse_compression(os.environ.get("COMPRESSION", "identity"), option="COMPRESSION"),
        batch_policy="static",
        stop=StopRule(max_steps=1),
    )


def forked(folder: Path) -> int:
    """Fork the workers; return each one's rank in it. This process ends once their exit codes are written."""
    here, workers = os.getpid(), []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        workers.append(os.fork())
        if workers[-1] == 0:
            die_with_parent(here, signal.SIGKILL)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            return rank
    codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    (folder / "codes.json").write_text(json.dumps(codes))
    return leave(0)


def main() -> None:
    folder, way, script = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    keep_modules()
    steps: list[Tensor] = []

    def stepped(optimizer: Any, args: Any, options: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in parameters)
        rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
        steps.append(torch.cat([*(one.detach().flatten() for one in whole), rates]))

    register_optimizer_step_post_hook(stepped)
    sys.argv = sys.argv[3:]
    with unequal(spec(script), folder) if way == "shares" else nullcontext():
        lines = ast.parse(Path(script).read_text(encoding="utf-8")).body
        imports = [line for line in lines if isinstance(line, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), script, "exec"), {})
        rank = forked(folder)
        runpy.run_path(script, run_name="__main__")
    torch.save(torch.stack(steps), folder / f"{way}-{rank}.pt")
    leave(0)


if __name__ == "__main__":
    main()
