"""Tasks that tests train: tiny, and able to record what was read and to cost a set time a sample."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData

TRAINING_SAMPLES = 101
EVALUATION_SAMPLES = 37
FEATURES = 6


class TracedPairs(TensorPairs):
    """Tells with every batch which samples it is made of."""

    def gather(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor, Tensor]:
        return *super().gather(indices), torch.as_tensor(indices)


def _pairs(kind: type[TensorPairs], samples: int, seed: int) -> TensorPairs:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return kind(inputs, inputs.sum(dim=1, keepdim=True).tanh())


def _data(folder: Path | None) -> TaskData:
    return TaskData(
        train=_pairs(TracedPairs, TRAINING_SAMPLES, 1), evaluation=_pairs(TensorPairs, EVALUATION_SAMPLES, 2)
    )


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def _model_with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))


_computed = itertools.count()


def _run_out_of_memory(samples: int) -> None:
    """As a GPU would, over more than $TOY_MEMORY_SAMPLES samples, after $TOY_MEMORY_AFTER micro-batches."""
    limit = os.environ.get("TOY_MEMORY_SAMPLES")
    if limit and next(_computed) >= int(os.environ.get("TOY_MEMORY_AFTER") or 0) and samples > int(limit):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _wide_model() -> nn.Module:
    """1.3 MB of gradient: more than one bucket."""
    return nn.Sequential(
        nn.Linear(FEATURES, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 1)
    )


class Unused(nn.Module):
    """Half of its parameters take part in no step."""

    def __init__(self) -> None:
        super().__init__()
        self.used = _model()
        self.unused = _model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Appends the samples as a line to $TOY_RECORD; each costs $TOY_SAMPLE_S of this thread and sleeps $TOY_WAIT_S."""
    inputs, targets, indices = batch
    outputs = model(inputs)
    _run_out_of_memory(len(indices))
    record = os.environ.get("TOY_RECORD")
    if record:
        with open(record, "a", encoding="utf-8") as stream:
            stream.write(" ".join(str(index) for index in indices.tolist()) + "\n")
    time.sleep(float(os.environ.get("TOY_WAIT_S", "0")) * len(indices))
    until_s = time.thread_time() + float(os.environ.get("TOY_SAMPLE_S", "0")) * len(indices)
    while time.thread_time() < until_s:
        pass
    return nn.functional.mse_loss(outputs, targets)


def mean_of_chosen(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Over the samples with a positive target."""
    inputs, targets, _ = batch
    return (model(inputs) - targets).square()[targets > 0].mean()


def sum_of_chosen(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same as a sum, and how many there are."""
    inputs, targets, _ = batch
    return (model(inputs) - targets).square()[targets > 0].sum(), (targets > 0).sum()


def _evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    fingerprints = os.environ.get("TOY_FINGERPRINTS")
    if fingerprints:
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.state_dict().values()))
        with open(fingerprints, "a", encoding="utf-8") as stream:
            stream.write(digest.hexdigest() + "\n")
    inputs, targets = batch
    return {"square": (model(inputs) - targets).square().sum()}


def _task(model=_model, target: float = 0.0) -> Task:
    return Task(
        name="toy",
        model=model,
        data=_data,
        loss=_loss,
        optimizer=lambda network: torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
        evaluate=_evaluate,
        metrics=lambda sums, count: {"mse": sums["square"] / count},
        target=Target(metric="mse", value=target, higher_is_better=False),
        batch_size=16,
    )


def plain() -> Task:
    return _task()


def _only_rank_0() -> bool:
    return Path(os.environ["TOY_RECORD"]).name.startswith("0")


def drifting_rate() -> Task:
    """Its schedule is another one on the first worker, from the second epoch on."""
    return replace(_task(), schedule=lambda epoch: 0.5 if epoch > 1 and _only_rank_0() else 1.0)


def drifting_model() -> Task:
    """The first worker changes a parameter behind the optimizer's back."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if _only_rank_0():
            with torch.no_grad():
                model[0].bias += 1e-4
        return _loss(model, batch)

    return replace(_task(), loss=loss)


def sparse(is_sparse: bool = True) -> Task:
    """An embedding whose gradients are sparse, as it is built."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.out(self.rows(inputs.abs().mul(4).long().clamp(max=8)).mean(1))

    return _task(Rows)


def rows() -> Task:
    """The same with dense gradients."""
    return sparse(is_sparse=False)


def easy() -> Task:
    """Reaches its target soon."""
    return _task(target=0.05)


def with_buffers() -> Task:
    return _task(_model_with_buffers)


def partly_unused() -> Task:
    return _task(Unused)


def wide() -> Task:
    """Large enough to be sent under backward."""
    return _task(_wide_model)
