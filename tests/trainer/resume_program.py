"""Scripts that are killed and resumed, in forks of one process: ``python -m tests.trainer.resume_program FOLDER``.

Each trains once without an interruption, and once is killed and started again. What it comes to goes to the folder.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hetopt.core.errors import HetoptError
from hetopt.trainer.session import Session, session
from tests.trainer_pieces.runs import run_of

SAMPLES, BATCH, EPOCHS = 46, 6, 3
STEPS = 8
"""Of an epoch, the last of them over four samples."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws as it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4) + index / SAMPLES + random.random() + float(np.random.rand())
        return x, x.sum(0, keepdim=True)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Draws as it is read, in an order that is drawn."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Noisy()[index] for index in torch.randperm(SAMPLES).tolist())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script, when it saves and when it is killed, in steps."""

    workers: int = 2
    data: type = Noisy
    save_every: int = 3
    killed_at: int = 14
    scaled: bool = False
    several: bool = False
    reads: Callable[..., Iterator[tuple[Tensor, Tensor]]] = field(default=lambda *given: one_loader(*given))
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "held back": Case(options={"compression": "topk:0.2,memory=error_feedback"}),
    "random": Case(options={"compression": "qsgd_maxnorm"}),
    "alone": Case(workers=1, scaled=True),
    "stream": Case(data=Stream),
    "two loaders saved with their last batches": Case(
        save_every=STEPS, killed_at=2 * STEPS + 2, reads=lambda *given: two_loaders(*given)
    ),
    "two loaders one after the other": Case(reads=lambda *given: two_phases(*given)),
    "rows that the script draws": Case(reads=lambda *given: drawn_rows(*given)),
    "dense": Case(),
    "saved with the last batch of an epoch": Case(save_every=STEPS, killed_at=2 * STEPS + 2),
    "several optimizers": Case(several=True, options={"compression": "topk:0.2,memory=error_feedback"}),
    "alone with a stream": Case(workers=1, data=Stream),
    "two loaders side by side": Case(reads=lambda *given: two_loaders(*given)),
    "two streams": Case(data=Stream, reads=lambda *given: two_loaders(*given)),
    "rows that it draws alone": Case(workers=1, reads=lambda *given: drawn_rows(*given)),
}


Extra: TypeAlias = dict[str, Any]


def loader_of(case: Case, run: Session) -> DataLoader[tuple[Tensor, Tensor]]:
    data = case.data()
    return run.loader(DataLoader(data, batch_size=BATCH, shuffle=not isinstance(data, IterableDataset)))


def one_loader(case: Case, run: Session, extra: Extra) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of every epoch that is left, as scripts read them."""
    loader = loader_of(case, run)
    for _ in range(run.resume(extra), EPOCHS):
        yield from loader
        with torch.no_grad():  # all samples, on every worker
            assert sum(len(x) for x, _ in loader) == SAMPLES
        extra["epochs"].step()


def two_loaders(case: Case, run: Session, extra: Extra) -> Iterator[tuple[Tensor, Tensor]]:
    """Labelled and unlabelled ones, for example."""
    first, second = loader_of(case, run), loader_of(case, run)
    for _ in range(run.resume(extra), EPOCHS):
        for (x, y), (other, its) in zip(first, second, strict=False):
            yield torch.cat([x, other]), torch.cat([y, its])
        extra["epochs"].step()


def two_phases(case: Case, run: Session, extra: Extra) -> Iterator[tuple[Tensor, Tensor]]:
    """Pretraining, for example, and what comes behind it; its loader is made only then."""
    loader = loader_of(case, run)
    for _ in range(run.resume(extra), 1):
        yield from loader
        extra["epochs"].step()
    loader = loader_of(case, run)
    for _ in range(loader.first_epoch, EPOCHS - 1):  # type: ignore[attr-defined]  # a session's
        yield from loader
        extra["epochs"].step()


def drawn_rows(case: Case, run: Session, extra: Extra) -> Iterator[tuple[Tensor, Tensor]]:
    """As `get_batch` of small language models; what a worker computes depends on its own random numbers as well."""
    data = torch.linspace(0, 1, SAMPLES)
    for step in range(run.resume(extra), EPOCHS * STEPS):
        rows = run.split(torch.randint(SAMPLES, (BATCH,)))
        x = data[rows][:, None] + torch.randn(len(rows), 4)
        yield x, x.sum(1, keepdim=True)
        if step % STEPS == STEPS - 1:
            extra["epochs"].step()


def train(case: Case, folder: Path, *, dies: bool) -> dict[str, Any]:
    """What the script comes to; it kills its process on the way if it is to."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer, *others = optimizers = [
        torch.optim.AdamW(part.parameters(), lr=0.01) for part in ((model[:2], model[2:]) if case.several else (model,))
    ]
    cycle, epochs = OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * STEPS), StepLR(optimizer, 1)
    average = AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2, enabled=case.scaled)
    extra = {"cycle": cycle, "epochs": epochs, "average": average, "scaler": scaler}
    losses: list[float] = []
    plan = run_of(*(4, 2)[: case.workers], task="session", batch_policy="static")
    if "compression" in case.options:
        from hetopt.core.comm.compression_text import parse_compression

        plan = plan.model_copy(
            update={"compression": parse_compression(case.options["compression"], option="compression")}
        )
    given = optimizers if others else optimizer
    with session(model, given, spec=plan, folder=folder) as run:
        for x, y in case.reads(case, run, extra):
            for one in optimizers:
                one.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(scaler.scale(loss))
            for one in optimizers:
                scaler.step(one)
            scaler.update()
            average.update_parameters(model)
            cycle.step()
            losses.append(float(loss.detach()))
            step = int(average.n_averaged.item())
            if step % case.save_every == 0:
                run.checkpoint(extra)
            if dies and step == case.killed_at:
                os._exit(9)
    kept = [*model.state_dict().values(), *average.state_dict().values()]
    return {
        "state": torch.cat([one.detach().double().flatten() for one in kept]),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "scale": scaler.get_scale(),
        "epochs": epochs.last_epoch,
        "losses": losses,
        "drawn": [float(torch.rand(())), random.random(), float(np.random.rand())],
    }


def child(case: Case, folder: Path, rank: int, out: Path, store: Path, *, dies: bool) -> None:
    """One worker."""
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.workers))
        if case.workers > 1:
            group = dist.FileStore(str(store), case.workers)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=case.workers)
        torch.save(train(case, folder, dies=dies), out)
    except HetoptError as error:
        out.with_suffix(".txt").write_text(str(error))
    except Exception:
        out.with_suffix(".txt").write_text(traceback.format_exc())
    os._exit(0)


def run(case: Case, folder: Path, label: str, run_folder: Path, *, dies: bool = False) -> None:
    """All workers of a script, to their end."""
    pids = []
    for rank in range(case.workers):
        pid = os.fork()
        if pid == 0:
            child(case, run_folder, rank, folder / f"{label}-{rank}.pt", folder / f"store-{label}", dies=dies)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def main() -> None:
    torch.set_num_threads(1)
    train(CASES["alone"], Path(sys.argv[1]) / "first", dies=False)  # what it imports would take each child seconds
    gc.freeze()  # so that collections do not copy in each child what it shares with this process
    for name in sys.argv[2:] or CASES:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        run(CASES[name], folder, "whole", folder / "whole")
        run(CASES[name], folder, "killed", folder / "cut", dies=True)
        if name == "held back":
            shutil.copytree(folder / "cut", folder / "cut for one")
            run(replace(CASES[name], workers=1), folder, "fewer", folder / "cut for one")
        run(CASES[name], folder, "resumed", folder / "cut")


if __name__ == "__main__":
    main()
