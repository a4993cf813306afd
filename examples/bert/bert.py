"""BERT-base (Devlin et al. 2019) on a masked language model: words are hidden, the model says which they were.

    hetopt profile examples/bert/bert.py:task --data FOLDER -o bert-base.json

The profile that `hetopt recommend bert-base` plans from was measured so, on the validation text of WikiText-2. What is
particular here: every window hides the same number of words, so that the mean over a batch's samples is the mean over
its hidden words; and other words in every epoch, drawn from the epoch, the run's seed and the window's number alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.language import load_corpus

VOCABULARY, WIDTH, LAYERS, HEADS, WINDOW = 30_522, 768, 12, 12, 128
HIDDEN_WORDS = 19  # 15 % of a window, as in the paper
MASK = VOCABULARY - 1


class Bert(nn.Module):
    """BERT-base's encoder, with the head of its masked language model: 110 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(WINDOW, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.output.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return logits [n, hidden, words] at the places ``hidden`` [n, hidden] of ``tokens`` [n, window]."""
        states = self.encoder(self.norm(self.words(tokens) + self.places.weight))
        states = states.gather(1, hidden.unsqueeze(2).expand(-1, -1, WIDTH))
        logits: Tensor = self.output(self.head(states))
        return logits


class Masked:
    """Windows of a text with some of their words hidden."""

    def __init__(self, windows: Tensor, *, changes: bool) -> None:
        self.windows, self.changes = windows, changes
        self.epoch, self.seed = 0, 0

    def __len__(self) -> int:
        return len(self.windows)

    def set_epoch(self, epoch: int, seed: int, /) -> None:
        """Set the epoch and seed that determine which words are hidden; those of an evaluation never change."""
        if self.changes:
            self.epoch, self.seed = epoch, seed

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.gather([index]).items()}

    def gather(self, indices: Sequence[int], /) -> dict[str, Tensor]:
        """Return the windows of these indices: tokens, places of the hidden words, and the words themselves."""
        random = [np.random.default_rng((self.seed, self.epoch, int(index))) for index in indices]
        hidden = torch.as_tensor(np.stack([draw.permutation(WINDOW)[:HIDDEN_WORDS] for draw in random]))
        windows = self.windows[torch.as_tensor(indices)]
        return {"tokens": windows.scatter(1, hidden, MASK), "hidden": hidden, "words": windows.gather(1, hidden)}


def data(folder: Path | None) -> TaskData:
    """Return the windows of a folder's text (Penn Treebank, WikiText or any other)."""
    text = load_corpus(folder, vocabulary_size=VOCABULARY - 1, window=WINDOW)
    return TaskData(
        train=Masked(text.train.inputs, changes=True),
        evaluation=Masked(text.evaluation.inputs, changes=False),
        description=text.description,
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the hidden words, nats."""
    logits = model(batch["tokens"], batch["hidden"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the sum over samples of each sample's mean loss."""
    return {"loss": loss(model, batch).double() * len(batch["words"])}


task = Task(
    name="bert-base",
    model=Bert,
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01),
    batch_size=32,
    evaluate=evaluate,
    metrics=lambda sums, samples: {"loss": sums["loss"] / samples},
    target=Target(metric="loss", value=2.0, higher_is_better=False),
)
