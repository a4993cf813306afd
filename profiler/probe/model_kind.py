"""What most of a model is made of, by its modules: that tells how its steps follow the rates of a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hetopt.core.step_samples import ModelKind

CONVOLUTIONS = (nn.modules.conv._ConvNd,)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
ATTENTION = ("attention", "attn", "transformer")
"""In the name of a module's class: attention is written anew in most models."""


def model_kind(modules: Iterable[nn.Module]) -> ModelKind | None:
    """The kind of a model; None where its modules do not tell.

    A recurrent module makes it recurrent, and attention (by the names of modules) a transformer unless most weights
    beside tables are of convolutions. Without either, convolutions make it convolutional, and tables with most of the
    weights an embedding model.
    """
    every = list(modules)
    weights = {
        id(one): one.numel() for module in every for one in module.parameters(recurse=False) if one.requires_grad
    }
    convolutional = _of(every, CONVOLUTIONS)
    embedded = _of(every, EMBEDDINGS)
    if any(isinstance(module, RECURRENT) for module in every):
        return "recurrent"
    attends = any(word in type(module).__name__.lower() for module in every for word in ATTENTION)
    if attends and 2 * convolutional <= sum(weights.values()) - embedded:
        return "transformer"
    if convolutional:
        return "convolution"
    return "embedding" if 2 * embedded > sum(weights.values()) else None


def _of(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> int:
    """Weights of some kinds of module, shared ones once."""
    own = {
        id(one): one.numel()
        for module in modules
        if isinstance(module, kinds)
        for one in module.parameters(recurse=False)
    }
    return sum(own.values())
