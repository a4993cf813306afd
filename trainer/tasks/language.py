"""The bundled language-model task: the small LSTM of Zaremba et al. 2014, on Penn Treebank, WikiText or plain text.

The paper sums the loss over the 35 tokens of a window where we average, so its learning rate 1.0 and gradient norm 5
are 35 and 5/35 here; 20 and 0.25 are the customary round values on that scale.

Words are what stands between spaces; every line ends with ``<eos>``. A sample is one window of consecutive tokens and
the token that follows each of them. The state of the model starts at zero in every window: shares of workers change
between steps and samples are shuffled, so no worker holds the state of the text before its windows. Perplexity is
therefore a little higher than where state is carried along a continuous text, as in the papers.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.core.paths import decoded, opened_file
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData
from hetopt.trainer.tasks.recipes import epoch_decay, language_model, sgd

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"

_FOLDERS = (".", "simple-examples/data", "wikitext-2", "wikitext-103")
_NAMINGS = ("ptb.{}.txt", "wiki.{}.tokens", "wiki.{}.txt", "{}.txt", "{}.tokens")
_HINT = (
    "Give a folder with ptb.train.txt and ptb.valid.txt (Penn Treebank prepared by T. Mikolov, simple-examples.tgz), "
    "wiki.train.tokens and wiki.valid.tokens (WikiText), or train.txt and valid.txt (any text)."
)


def find_corpus(folder: Path | None) -> tuple[Path, Path]:
    """Return the text files to train and evaluate on: train and valid; else train and test; else valid and test.

    The folder itself and the usual subfolders of Penn Treebank and WikiText are searched.

    Args:
        folder: folder of the data; None: none was given, which is refused.

    Raises:
        BadInput: no folder is given, or it has no such pair.
    """
    if folder is None:
        raise BadInput("a language model needs a data folder.", hint=f"give `data`. {_HINT}")
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        for inside, naming in itertools.product(_FOLDERS, _NAMINGS):
            train = folder / inside / naming.format(first)
            evaluation = folder / inside / naming.format(second)
            if train.is_file() and evaluation.is_file():
                return train, evaluation
    raise BadInput(f"There is no pair of text files to train and evaluate on in {folder}.", hint=_HINT)


def load_corpus(folder: Path | None, *, vocabulary_size: int, window: int) -> TaskData:
    """Return the text in ``folder`` as samples of ``window`` tokens, of at most ``vocabulary_size`` different words.

    A tail shorter than a window is left out. The vocabulary is ``<unk>``, ``<eos>`` and the most frequent words of the
    training file. Its size is the task's and not the file's, so that the model is the same whatever it reads.
    Perplexities with a cut vocabulary are not comparable with those of the whole one.

    Args:
        folder: folder of the data; None: none was given, which is refused.
        vocabulary_size: most words that are told apart; the others are ``<unk>``.
        window: tokens of a sample.

    Raises:
        BadInput: no folder is given, files are missing, are not UTF-8 text, or hold less than one window.
    """
    train_file, evaluation_file = find_corpus(folder)
    counts = Counter(word for line in _lines(train_file) for word in line)
    vocabulary = build_vocabulary(counts, vocabulary_size)
    train = windows(encode(train_file, vocabulary), window, source=train_file)
    evaluation = windows(encode(evaluation_file, vocabulary), window, source=evaluation_file)
    description = (
        f"{len(train):,} windows of {window} tokens from {train_file} to train, {len(evaluation):,} from "
        f"{evaluation_file.name} to evaluate, vocabulary {len(vocabulary):,} of {len(counts | _SPECIAL):,} words"
    )
    return TaskData(train=train, evaluation=evaluation, description=description)


def build_vocabulary(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """Return words' numbers: ``<unk>`` 0, ``<eos>`` 1, then by frequency (ties by alphabet), ``size`` at most.

    Args:
        counts: how often each word occurs.
        size: most words of the vocabulary; the first two are there in any case.
    """
    by_frequency = sorted(counts.keys() - _SPECIAL.keys(), key=lambda word: (-counts[word], word))
    kept = [*_SPECIAL, *by_frequency[: max(0, size - len(_SPECIAL))]]
    return {word: number for number, word in enumerate(kept)}


def encode(path: Path, vocabulary: Mapping[str, int]) -> Tensor:
    """Return a UTF-8 text file as token numbers, 1-D int64, with ``<eos>`` at the end of each line.

    Words that are not in the vocabulary become ``<unk>``.

    Raises:
        BadInput: the file cannot be read, or is not UTF-8 text.
    """
    unknown = vocabulary[UNKNOWN]
    tokens = array("i")
    for line in _lines(path):
        tokens.extend(vocabulary.get(word, unknown) for word in line)
    return torch.from_numpy(np.array(tokens, dtype=np.int64))


def windows(tokens: Tensor, window: int, *, source: Path) -> TensorPairs:
    """Return samples cut from 1-D tokens: inputs [n, window], and targets [n, window] one token further on.

    Args:
        tokens: token numbers of the text, 1-D.
        window: tokens of a sample.
        source: file that they are of, for the error.

    Raises:
        BadInput: there are too few tokens for one window and the token after it.
    """
    count = (len(tokens) - 1) // window
    if count < 1:
        raise BadInput(
            f"{source} has {len(tokens)} tokens, too few for one window of {window} and the token after it.",
            hint="Give a longer text.",
        )
    return TensorPairs(tokens[: count * window].view(count, window), tokens[1 : count * window + 1].view(count, window))


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield each line's words, and the end of the line; BadInput: the file cannot be read, or is not UTF-8."""
    with opened_file(path) as stream:
        for line in stream:
            yield [*decoded(line, origin=str(path)).split(), END_OF_LINE]


_SPECIAL = Counter({UNKNOWN: 1, END_OF_LINE: 1})


VOCABULARY_SIZE = 10_000
"""Words of the whole vocabulary of the prepared Penn Treebank; larger corpora are cut to it."""

WINDOW = 35


def lstm_small() -> Task:
    """Return the task `lstm-small`, which a laptop can train: an LSTM with two layers of 200, 4.7 million parameters.

    The paper reports a validation perplexity of 120.7 on Penn Treebank with state carried between windows.
    """
    return language_model(
        name="lstm-small",
        model=partial(
            LSTMLanguageModel, vocabulary_size=VOCABULARY_SIZE, width=200, layers=2, dropout=0.0, initial_range=0.1
        ),
        data=partial(load_corpus, vocabulary_size=VOCABULARY_SIZE, window=WINDOW),
        optimizer=sgd(20.0, momentum=0.0, max_gradient_norm=0.25),
        schedule=epoch_decay(after=4, factor=0.5),
        usual_epochs=13,
        target=Target(metric="perplexity", value=150.0, higher_is_better=False),
        batch_size=20,
    )


class LSTMLanguageModel(nn.Module):
    """A language model of an embedding, stacked LSTM layers, and a linear layer to the vocabulary, all of one width.

    Embedding and output have the same shape, so they could share weights; as in the paper they do not. At width 1500
    and 10,000 words that makes 66,034,000 parameters, 264 MB of float32 (252 MiB): 66,022,000 plus the second bias
    vector that PyTorch gives each LSTM layer.

    Args:
        vocabulary_size: number of token numbers.
        width: size of embedding and hidden state.
        layers: number of LSTM layers.
        dropout: probability by which embeddings, outputs of layers and the last hidden state are dropped.
        initial_range: largest magnitude of a parameter at first; all are drawn uniformly.
    """

    def __init__(self, *, vocabulary_size: int, width: int, layers: int, dropout: float, initial_range: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, dropout=dropout, batch_first=True)
        self.output = nn.Linear(width, vocabulary_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -initial_range, initial_range)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [n, time, vocabulary] of token numbers [n, time]; the state before the first token is zero."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.output(self.dropout(hidden))
        return logits
