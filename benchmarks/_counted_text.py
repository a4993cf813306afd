"""What counting alone achieves on a text: perplexities of n-grams, which a language model has to beat to have learned.

Absolute discounting, interpolated with the next shorter counts (Ney, Essen and Kneser 1994, without their continuation
counts): ``p_n(w | h) = max(c(h w) - D, 0) / c(h) + D types(h) / c(h) p_(n-1)(w | h')``, and ``p_n = p_(n-1)`` where
``h`` was never seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DISCOUNT = 0.75
"""The usual one."""

UNIGRAM_COUNT = 0.1
"""Added to every symbol's count, so that none is impossible."""


def counted_perplexity(train: Tensor, evaluation: Tensor, *, symbols: int, order: int) -> float:
    """Perplexity on one row of symbols of counts of ``order`` in a row in another; ``symbols ** order`` must fit."""
    counts = torch.bincount(_keys(train, symbols, 1), minlength=symbols).double() + UNIGRAM_COUNT
    chance = (counts / counts.sum()).view(1, symbols)
    for length in range(2, order + 1):
        counts = torch.bincount(_keys(train, symbols, length), minlength=symbols**length).double().view(-1, symbols)
        seen = counts.sum(1, keepdim=True)
        shorter = chance.repeat(len(counts) // len(chance), 1)
        left = (counts - DISCOUNT).clamp(min=0) + DISCOUNT * (counts > 0).sum(1, keepdim=True) * shorter
        chance = torch.where(seen > 0, left / seen.clamp(min=1), shorter)
    return math.exp(-float(chance.view(-1)[_keys(evaluation, symbols, order)].log().mean()))


def _keys(text: Tensor, symbols: int, length: int) -> Tensor:
    """Each run of so many symbols as one number."""
    count = len(text) - length + 1
    keys = torch.zeros(count, dtype=torch.int64)
    for place in range(length):
        keys = keys * symbols + text[place : place + count]
    return keys
