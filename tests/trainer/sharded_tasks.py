"""Tasks whose model the devices of a machine share: the language models of `tests.integrations.sharded_script`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Task, TaskData
from tests.integrations.sharded_script import LENGTH, WORDS, Block, Language


def _data(folder: Path | None) -> TaskData:
    tokens = torch.randint(WORDS, (107, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    pairs = TensorPairs(tokens[:, :-1], tokens[:, 1:])
    return TaskData(train=pairs, evaluation=TensorPairs(tokens[:19, :-1], tokens[:19, 1:]))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)


def _evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    summed = cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return {"loss": summed, "counted": torch.tensor(batch[1].numel())}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((each for each in model.parameters() if each.requires_grad), 0.1, momentum=0.9)


class Whole(torch.optim.SGD):
    """Keeps a plain tensor for every parameter, whatever the parameter is."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = torch.zeros(parameter.shape)


transformer = Task(
    name="transformer",
    model=partial(Language, "transformer"),
    data=_data,
    loss=_loss,
    optimizer=_optimizer,
    evaluate=_evaluate,
    batch_size=32,
    evaluation_batch_size=4,
    shard="full",
)
"""Some targets do not count, so that its loss is a mean over tokens."""

experts = replace(transformer, model=partial(Language, "experts"), shard="grads")
adapters = replace(transformer, model=partial(Language, "adapters"))
recomputed = replace(transformer, blocks=Block, checkpoint_activations=True)
fitting = replace(transformer, shard="auto")
adam = replace(transformer, optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3))
kept_whole = replace(transformer, optimizer=lambda model: Whole(model.parameters(), 0.1))
lone = replace(transformer, model=lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)))


def _tied() -> nn.Module:
    """Its blocks share a layer."""
    model = Language("transformer")
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    return model


tied = replace(transformer, model=_tied)
outside = replace(transformer, loss=lambda model, batch: model.words(batch[0]).mean())
"""Computes by a part of the model, whose shards nobody has gathered."""


class Normalised(Language):
    """Has running statistics, of which every device has all."""

    def __init__(self) -> None:
        super().__init__("transformer")
        self.statistics = nn.BatchNorm1d(LENGTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.statistics(self.words(tokens)).mean(-1, keepdim=True)


normalised = replace(transformer, model=Normalised)


class Wide(nn.Module):
    """Four blocks that hold most of its weights, and whose weights and activations weigh alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(64, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


wide = replace(transformer, model=Wide, optimizer=adam.optimizer, shard="none")
wide_recomputed = replace(wide, checkpoint_activations=True)
