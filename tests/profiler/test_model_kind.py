"""What most of a model is made of, told from its modules."""

from __future__ import annotations

import pytest
from torch import nn

from hetopt.profiler.probe.facts import model_kind


class OwnAttention(nn.Module):
    """As most models write it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)


CONVOLUTION = nn.Conv2d(8, 16, 3)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("convolution", nn.Sequential(CONVOLUTION, nn.BatchNorm2d(16), nn.ReLU(), nn.Linear(16, 4096))),
        ("transformer", nn.TransformerEncoderLayer(16, 2, 32)),
        ("transformer", nn.Sequential(nn.Conv2d(3, 16, 4), nn.Embedding(4096, 16), OwnAttention(), nn.Linear(16, 64))),
        # Attention over the features of a convolutional backbone.
        ("convolution", nn.Sequential(nn.Conv2d(64, 64, 3), OwnAttention())),
        ("recurrent", nn.Sequential(nn.Embedding(64, 16), nn.LSTM(16, 16), nn.Linear(16, 64))),
        ("embedding", nn.Sequential(nn.Embedding(4096, 16), nn.Linear(32, 16), nn.Linear(16, 1))),
        (None, nn.Sequential(nn.Embedding(4, 16), nn.Linear(16, 16), nn.Linear(16, 1))),
        (None, nn.ReLU()),
    ],
)
def test_the_kind_follows_from_the_modules(kind: str | None, model: nn.Module) -> None:
    assert model_kind(model.modules()) == kind
