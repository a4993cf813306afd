"""Runs scripts in forks of a process that has torch: ``python -m tests.trainer.cases.server FOLDER GROUP [CASE...]``.

Each script runs plain and on three workers with audits; those of the group "scripts" also with a session of one worker.
What each optimizer step finds in ``.grad``, what the audits found, and how the script ended, is written to the folder.
"""

from __future__ import annotations

import gc
import io
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetopt.core.comm import cost
from hetopt.core.errors import HetoptError
from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.trainer.script.batches import ROUNDING, AuditRecord, AuditResult
from hetopt.trainer.session import session

from . import meetings, memories, scripts, strangers

LIMIT_S = 120.0


def drawn_by_readers(open_: Any) -> Tensor:
    return scripts.drawn(open_, num_workers=2, generator=torch.Generator().manual_seed(5))


GROUPS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "scripts": (*scripts.EXACT, *scripts.NARROW, *scripts.REFUSED, scripts.drawn,
                drawn_by_readers),
    "strangers": (*strangers.EXACT, *strangers.REMEDIES, *strangers.MORE),
    "meetings": (*meetings.EXACT, *meetings.REFUSED, *meetings.MUCH_LATER),
    "memories": (*memories.EXACT, *memories.REFUSED, memories.changed_by_hand),
}  # fmt: skip

ALONE = ("alone", 0, 1)
RUNS = (("plain", 0, 1), *((f"three-{rank}", rank, 3) for rank in range(3)))
"""Label, rank and number of workers of each process."""


class Plain:
    """Stands where the session would, and exchanges nothing."""

    rank, world_size = 0, 1

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def loader(self, loader: Any) -> Any:
        return loader

    def backward(self, loss: Tensor, *, weight: Any = None, **options: Any) -> None:
        loss.backward(**options)

    def sync(self, **options: Any) -> None:
        pass

    def split(self, batch: Any) -> Any:
        return slice(None) if isinstance(batch, int) else batch

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def total(self, value: Any) -> float:
        return float(value)

    def mean(self, value: Any, samples: int | None = None) -> float:
        return float(value)


SPEC = RunSpec(
    task="session",
    workers=tuple(WorkerSpec(host=f"h{n}", type="local", local_batch_size=share) for n, share in enumerate((1, 3, 1))),
    batch_policy="static",
    stop=StopRule(max_steps=1),
)


def child(run: Callable[[Any], Any], out: Path, rank: int, workers: int, store: Path) -> None:
    torch.manual_seed(0)  # each run of the corpus is the same
    random.seed(0)
    np.random.seed(0)
    gradients: dict[Optimizer, list[Tensor]] = {}  # which keeps them: a later one may not have an earlier one's id

    def keep(optimizer: Optimizer, args: Any, options: Any) -> None:
        flat = []
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
            flat.append(torch.view_as_real(gradient + 0j).double().flatten())
        gradients.setdefault(optimizer, []).append(torch.cat(flat))

    said, audits = "", list[AuditResult]()
    register_optimizer_step_post_hook(keep)
    tell = AuditRecord.tell

    def note(self: AuditRecord, found: AuditResult, step: int, events: EventLog) -> None:
        audits.append(found)
        tell(self, found, step, events)

    AuditRecord.tell = note  # type: ignore[method-assign]
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers))
        if workers > 1:
            # As torchrun sets them; nobody meets there, as the group is made here.
            os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(workers))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
            dist.init_process_group("gloo", store=dist.FileStore(str(store), workers), rank=rank, world_size=workers)
            dist.barrier()  # a script that is refused at once would be gone before the others are connected
        alone = Plain if out.name.startswith("plain") else session
        run(partial(session, spec=SPEC, audit="warn") if workers > 1 else alone)
    except HetoptError as error:
        said = str(error)
    except Exception as error:
        said = "".join(traceback.format_exception(error))
    differs = [found.differs(ROUNDING) for found in audits]
    told = {"audits": [found.distance for found in audits], "differs": differs}
    torch.save({"steps": list(gradients.values()), "said": said, **told}, out)
    os._exit(0)


def wait_for(living: dict[int, str]) -> None:
    """Wait for children, by their ids, and end those that take too long."""
    deadline = time.monotonic() + LIMIT_S
    while living and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        living.pop(pid, None)
        time.sleep(0 if pid else 0.01)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # So that even these small gradients are sent in parts, while backward makes them.
    cost.FIRST_BUCKET_BYTES, cost.BUCKET_BYTES = 0, 256
    # What a first optimizer makes torch import would take each child seconds.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    torch.save(0, io.BytesIO())
    gc.freeze()  # looking for cycles among what is imported would copy it in each child
    cases = {case.__name__: case for case in GROUPS[sys.argv[2]]}
    wanted = sys.argv[3:] or list(cases)
    for name in wanted:
        living = {}
        place = folder / name
        place.mkdir(exist_ok=True)
        for label, rank, workers in (*RUNS, ALONE) if sys.argv[2] == "scripts" else RUNS:
            pid = os.fork()
            if pid == 0:
                child(cases[name], place / f"{label}.pt", rank, workers, place / f"store-{workers}")
            living[pid] = label
        wait_for(living)


if __name__ == "__main__":
    main()
