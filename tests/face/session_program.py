"""One worker of a crew that trains the same little scripts as one machine: ``session_program.py RANK WORLD FOLDER``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec, parse_sync
from hetopt.trainer.comm import network as network_measurement
from hetopt.trainer.session import Session, session

SAMPLES, FEATURES, BATCH = 101, 6, 16
"""A prime number of samples: the last batch of an epoch has five, and with three workers somebody gets one."""

EPOCHS, LEARNING_EPOCHS = 2, 3
"""Of a script that is compared, and of one that is to have learned."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True).tanh()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a person's script looks like."""

    groups: bool = False
    accumulate: int = 1
    own_backward: bool = False
    drop_last: bool = False
    wide_weight_decay: float = 0.0
    loss_scale: float | None = None


SCRIPTS = {
    "plain": Script(),
    "groups, no rest": Script(groups=True, wide_weight_decay=0.1, drop_last=True),
    "own backward, scaled": Script(own_backward=True, loss_scale=2.0**8),
    "accumulated": Script(accumulate=2),
}
"""Traits that have nothing to do with each other share a script; `tests/trainer/cases` has more forms."""


def train(script: Script, wrap: Callable[..., Session] | None, epochs: int = EPOCHS) -> tuple[list[float], Tensor]:
    """The losses of the steps, over all workers, and the parameters at the end; ``wrap`` None: the script as it was."""
    torch.manual_seed(0)
    model = network()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}] if script.groups else parameters
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=script.wide_weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = DataLoader(
        Points(),
        batch_size=BATCH,
        shuffle=True,
        drop_last=script.drop_last,
    )
    losses = []
    scaler = torch.amp.GradScaler("cpu", init_scale=script.loss_scale or 1.0, enabled=script.loss_scale is not None)
    options = {"accumulate": script.accumulate, "scaler": scaler if script.loss_scale else None}
    with nullcontext() if wrap is None else wrap(model, optimizer, **options) as run:
        loader = loader if run is None else run.loader(loader)
        for _ in range(epochs):
            for number, (inputs, targets) in enumerate(loader):
                if number % script.accumulate == 0:
                    optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                scaled = scaler.scale(loss / script.accumulate)
                if run is None or script.own_backward:
                    scaled.backward()
                else:
                    run.backward(scaled)
                if run is not None and script.own_backward:
                    run.sync(weight=len(inputs))
                if (number + 1) % script.accumulate == 0 or number + 1 == len(loader):
                    scaler.step(optimizer)
                    scaler.update()
                losses.append(float(loss.detach()) if run is None else run.mean(loss.detach()))
            schedule.step()
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def unequal(world_size: int) -> RunSpec:
    """Shares of 9, 4 and 3."""
    workers = tuple(
        WorkerSpec(host=f"h{rank}", type="local", local_batch_size=share)
        for rank, share in enumerate((9, 4, 3)[:world_size])
    )
    return RunSpec(task="session", workers=workers, batch_policy="static", stop=StopRule(max_steps=1))


EXCHANGES = ("topk:3x,memory=error_feedback", "bf16", "powersgd,rank=1", "topk:0.1", "dgc:0.1")
"""What gradients are sent by, as `hetopt launch` has it."""

ALONE = (
    "local-sgd(4)",
    "selsync(auto,share=0.3,window=3)",
    "fedavg(0.5,1)",
)
"""Of workers that train for themselves."""


def decided(folder: Path, epochs: int, **options: object) -> Tensor:
    """Parameters after some epochs of six steps in which the exchange was decided on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 2_000), nn.Tanh(), nn.Linear(2_000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with session(model, optimizer, folder=folder, **options) as run:
        loader = run.loader(DataLoader(Points(), batch_size=BATCH, shuffle=True, drop_last=True))
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                run.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sharing(folder: Path, rank: int) -> tuple[int, ...]:
    """Shares after some steps of which the last worker computes each sample four times as long."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with session(model, optimizer, folder=folder) as run:
        loader = run.loader(DataLoader(Points(), batch_size=48, shuffle=True))
        for _ in range(24):
            for inputs, targets in loader:
                optimizer.zero_grad()
                time.sleep(0.0006 * len(inputs) * (4 if rank == 2 else 1))
                run.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
        return run.shares


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    network_measurement.MOST_REPEATS = network_measurement.LEAST_REPEATS  # no law looks at it
    spec = unequal(world_size)
    results: dict[str, object] = {}
    for name, script in SCRIPTS.items():
        results[name] = train(script, lambda *a, **k: session(*a, spec=spec, **k))
    for name in EXCHANGES:
        results[name] = train(Script(), partial(session, compression=name, policy="static"), LEARNING_EPOCHS)
    for name in ("local-sgd(1)", "selsync(0,vote_lag=0)"):
        shares = unequal(world_size).model_copy(update={"sync": parse_sync(name)})
        results[name] = train(Script(drop_last=True), lambda *a, s=shares, **k: session(*a, spec=s, **k))
    for name in ALONE:
        results[name] = train(Script(), partial(session, sync=name, policy="static"), LEARNING_EPOCHS)
    skipping = Script(loss_scale=2.0**127, own_backward=True, accumulate=2)
    results["skipped alone"] = train(skipping, partial(session, sync="local-sgd(3)"), LEARNING_EPOCHS)
    results["auto"] = decided(folder / "auto", 3, compression="auto", policy="static", steps=18)
    warming = {"compression": Compression(name="topk", ratio=0.01), "ratio_policy": "warm_up"}
    steered = spec.model_copy(update={**warming, "collective_policy": "cheapest"})
    results["warm_up"] = decided(folder / "warm_up", 8, spec=steered)
    # The first steps overflow on some workers, or all.
    overflowing = Script(loss_scale=2.0**127)
    results["overflow"] = train(overflowing, partial(session, compression="topk:0.5", policy="static"), LEARNING_EPOCHS)
    results["shares"] = sharing(folder / "record", rank)
    torch.save(results, folder / f"results-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
