"""The word-level LSTM language model of Zaremba, Sutskever & Vinyals 2014, dropout on non-recurrent connections.

Dropout draws from each worker's own generator, so with dropout the gradient of a batch depends on its split.
"""

from __future__ import annotations

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Embedding, stacked LSTM layers, and a linear layer to the vocabulary, all of one width.

    Embedding and output have the same shape, so they could share weights; as in the paper they do not. At width 1500
    and 10,000 words that makes 66,034,000 parameters, 264 MB of float32 (252 MiB): 66,022,000 plus the second bias
    vector that PyTorch gives each LSTM layer.
    """

    def __init__(self, *, vocabulary_size: int, width: int, layers: int, dropout: float, initial_range: float) -> None:
        """Draw all parameters uniformly from [-initial_range, initial_range]; ``dropout`` is the part dropped."""
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, dropout=dropout, batch_first=True)
        self.output = nn.Linear(width, vocabulary_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -initial_range, initial_range)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers [n, time] to logits [n, time, vocabulary]; the state before the first token is zero."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.output(self.dropout(hidden))
        return logits
