"""A fingerprint of a model: what replicas compare."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def parameters_sha256(model: nn.Module) -> str:
    """A fingerprint of all parameters: equal only when they are bit-identical."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
