"""Whether hooks and functions with a backward of their own leave a gradient proportional to its loss: asked of the
first loss where there are any.

    for one in model.parameters():
        one.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    class Straight(torch.autograd.Function):
        def backward(ctx, gradient):
            return gradient / gradient.norm()

They run in each worker's own backward pass. What masks or scales a gradient may stay; what clips, normalises or adds to
it makes parts of which the sum is not that of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetopt.trainer.session.graph import operators

_TIMES = 1024.0
"""A power of two, which rounds nothing; so much more than a clipped gradient is clipped."""

_ROUNDING = 1e-4


def has_hooks(model: nn.Module) -> bool:
    """Whether a script has put any on parameters or modules."""
    if any(one._backward_hooks for one in model.parameters()):
        return True
    return any(one._backward_hooks or one._backward_pre_hooks for one in model.modules())


def own_functions(loss: Tensor) -> list[Any]:
    """The operators of a loss whose backward a script or a library has written in Python."""
    written = [(node, getattr(node, "_forward_cls", None)) for node in operators(loss.grad_fn)]
    return [node for node, by in written if by is not None and not by.__module__.startswith(("torch.", "hetopt."))]


@contextmanager
def _restored(functions: list[Any]) -> Iterator[None]:
    """What these keep for backward is afterwards what it was: fused losses multiply it in place."""
    kept = [
        one
        for node in functions
        for one in (*node.saved_tensors, *vars(node).values())
        if isinstance(one, Tensor) and one.layout == torch.strided
    ]
    before = [one.detach().clone() for one in kept]
    try:
        yield
    finally:
        for one, was in zip(kept, before, strict=True):
            if not torch.equal(one, was):
                one.data.copy_(was)  # which says nothing of it, as in-place kernels do not


def bent_by_hooks(loss: Tensor, model: nn.Module, functions: list[Any]) -> str | None:
    """A parameter whose gradient is not so many times as large for so many times the loss; None: there is none.

    Hooks and functions run twice for it. Graphs that cannot be gone through so (reentrant checkpoints) are not asked.

    Args:
        loss: before its backward pass.
        model: whose parameters.
        functions: of the loss (see `own_functions`).
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    trained = [one for _, one in named]
    times = torch.full_like(loss, _TIMES)
    try:
        with _restored(functions):
            given = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            once = [None if one is None else one.clone() for one in given]
        with _restored(functions):
            often = torch.autograd.grad(loss, trained, times, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return None
    for (name, _), one, many in zip(named, once, often, strict=True):
        if one is None or many is None or one.layout != torch.strided:
            continue
        expected, found = _TIMES * one.double().norm(), many.double().norm()
        difference = (_TIMES * one.double() - many.double()).norm()
        if bool(torch.isfinite(found)) and bool(difference > _ROUNDING * torch.maximum(expected, found)):
            return name
    return None
