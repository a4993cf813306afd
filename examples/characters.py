"""A character model of your own: an LSTM that learns to write like the descriptions of scikit-learn's data sets.

    hetopt profile examples/characters.py:task -o characters.json

What is particular here: text. It is cut into windows of one length, so that a mean over samples is a mean over
characters, whatever the split. Another text: --data FOLDER with a file text.txt.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn import datasets
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.recipes import language_model, sgd

WINDOW = 32
CHARACTERS = 128


class CharacterLstm(nn.Module):
    """[n, time] characters -> [n, time, characters] logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.next = nn.Linear(64, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next characters, [n, time, characters]."""
        hidden, _ = self.lstm(self.embedding(characters))
        return self.next(hidden)


def text(folder: Path | None) -> str:
    """Return the text that is learned, in ASCII."""
    if folder is not None:
        return (folder / "text.txt").read_text(encoding="ascii", errors="replace")
    loaders = (datasets.load_diabetes, datasets.load_digits, datasets.load_iris, datasets.load_wine)
    return "".join(load().DESCR for load in (*loaders, datasets.load_breast_cancer))


def data(folder: Path | None) -> TaskData:
    """Return windows of 32 characters with those that follow; the last tenth of the text is for evaluation."""
    codes = torch.tensor([min(ord(character), CHARACTERS - 1) for character in text(folder)])
    windows = (len(codes) - 1) // WINDOW
    inputs = codes[: windows * WINDOW].view(windows, WINDOW)
    following = codes[1 : windows * WINDOW + 1].view(windows, WINDOW)
    trained = windows - windows // 10
    return TaskData(
        train=TensorPairs(inputs[:trained], following[:trained]),
        evaluation=TensorPairs(inputs[trained:], following[trained:]),
    )


task: Task = language_model(
    name="characters",
    model=CharacterLstm,
    data=data,
    optimizer=sgd(1.0, max_gradient_norm=1.0),
    target=Target(metric="perplexity", value=12.0, higher_is_better=False),
    batch_size=32,
)
