"""A transformer of your own, in the form that model hubs use: its forward pass takes labels and returns the loss.

    hetopt profile examples/transformer.py:task -o transformer.json

Any such model is a plain ``nn.Module`` to hetopt: the task's loss calls it and takes ``output.loss``. What is
particular here: several named inputs in a batch, and an embedding that is tied to the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.task import Target, Task, TaskData

CONTEXT, CHARACTERS, WIDTH = 32, 128, 64


@dataclass
class Output:
    """The loss and logits of a forward pass."""

    loss: Tensor | None
    logits: Tensor


class SmallTransformer(nn.Module):
    """Two causal layers (Vaswani et al. 2017), normalised before attention, with the embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, CHARACTERS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return logits [n, time, characters], and the mean loss where labels [n, time] are given."""
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        hidden = self.layers(self.embedding(input_ids) + self.position, mask=mask, is_causal=True)
        logits = self.output(hidden)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss, logits=logits)


class Windows:
    """Every stretch of ``CONTEXT`` characters of a text, as a batch with names."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.gather([index]).items()}

    def gather(self, indices: Sequence[int], /) -> dict[str, Tensor]:
        """Return the windows of these indices."""
        starts = torch.as_tensor(indices).unsqueeze(1) * CONTEXT + torch.arange(CONTEXT)
        return {"input_ids": self.codes[starts], "labels": self.codes[starts + 1]}


def data(folder: Path | None) -> TaskData:
    """Return the descriptions of scikit-learn's data sets as text windows; the last tenth is for evaluation."""
    loaders = (datasets.load_diabetes, datasets.load_digits, datasets.load_iris, datasets.load_wine)
    written = "".join(load().DESCR for load in (*loaders, datasets.load_breast_cancer))
    codes = torch.tensor([min(ord(character), CHARACTERS - 1) for character in written])
    trained = len(codes) * 9 // 10
    return TaskData(train=Windows(codes[:trained]), evaluation=Windows(codes[trained:]))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    return model(**batch).loss


def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the sums over samples of each sample's mean loss."""
    return {"loss": model(**batch).loss.double() * len(batch["labels"])}


task = Task(
    name="transformer",
    model=SmallTransformer,
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.003),
    batch_size=32,
    evaluate=evaluate,
    metrics=lambda sums, samples: {"loss": sums["loss"] / samples},
    target=Target(metric="loss", value=2.6, higher_is_better=False),
)
