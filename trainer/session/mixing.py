"""Whether a script's losses couple the samples of a batch (contrastive, in-batch negatives): asked once of each.

The outputs of the model that a loss is computed from have a row for each sample. If the loss is a mean or a sum over
samples, its derivative by one row does not depend on the others, so that the second derivatives across rows are zero.
Parts of a batch do not add up to the whole where they are not: every worker sees only its own samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Places: TypeAlias = Callable[[Tensor], tuple[int | None, Tensor] | None]
"""Which dimension of a tensor samples are in (None: it is of one), and the place of each in the batch."""

Found: TypeAlias = Literal["separate", "coupled", "unclear"]

_ROWS_APART = {
    *(f"{name}Backward0" for name in ("NllLoss", "NllLoss2D", "MseLoss", "BinaryCrossEntropyWithLogits", "SmoothL1Loss",
      "BinaryCrossEntropy", "HuberLoss", "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss", "Mean",
      "Sum", "Neg", "Exp", "Log", "Sigmoid", "Tanh", "Relu", "Softplus", "LogSigmoid", "Abs", "Pow", "Sqrt", "Sgn",
      "Clamp", "ClampMin", "ClampMax", "ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Slice",
      "Squeeze", "Transpose", "Permute", "Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "LogSoftmax", "Softmax",
      "Rsub")),
    "torch::autograd::AccumulateGrad",
    *(f"{name}Backward1" for name in ("Squeeze", "Mul", "Div", "Add", "Sub", "Rsub")),
}  # fmt: skip
"""Operators that keep rows apart as long as they take no two values that both depend on the model."""

_BENT = {
    f"{name}Backward0"
    for name in ("Exp", "Log", "Sigmoid", "Tanh", "Relu", "Softplus", "LogSigmoid", "Abs", "Pow", "Sqrt", "Sgn",
                 "Clamp", "ClampMin", "ClampMax", "Where")
}  # fmt: skip
"""Of those the ones that are not linear."""

_SOFTMAX = ("LogSoftmaxBackward0", "SoftmaxBackward0")
_TURNED = {"TransposeBackward0", "PermuteBackward0"}

NEGLIGIBLE = 1e-6
"""Of second derivatives, relative to those of the same rows: rounding."""


class Outputs:
    """Keeps what the modules of a model gave for a batch, whose losses are looked at.

    Args:
        model: of the script.
    """

    def __init__(self, model: nn.Module) -> None:
        self._given: list[Tensor] = []
        self._hooks = [module.register_forward_hook(self._keep) for module in _hookable(model)]

    def look(self, loss: Tensor, rows: int, places: Places = lambda one: None, lengths: Collection[int] = ()) -> Found:
        """Whether a loss couples samples, told before its backward pass.

        Args:
            loss: a scalar.
            rows: samples that it was computed of.
            places: where the samples of an output are, where that is known.
            lengths: that an output may have beside as many rows for each sample: of batches that were put together, or
                of nodes and tokens, which are nobody's more than another's.
        """
        made = [one for one in self._given if one.grad_fn is not None]
        given = [one for one in made if _samples_in(one, rows, places) is not None]
        found = couples(loss, given, rows, places)
        if found == "unclear" and not (given and _heads(loss, given, rows)[0]):
            others = [one for one in made if (dim := _long_dim(one)) is not None and one.shape[dim] in lengths]
            found = couples(loss, others, rows, _scattered) if others else found
        return found

    def close(self) -> None:
        """Remove the hooks and drop what they kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._given = [], []

    def _keep(self, module: nn.Module, arguments: object, output: object) -> None:
        if torch.is_grad_enabled():
            self._given += _tensors(output)


def couples(loss: Tensor, given: Sequence[Tensor], rows: int, places: Places = lambda one: None) -> Found:
    """Whether the second derivatives of a loss across rows are anything but zero.

    Args:
        loss: a scalar.
        given: outputs of modules with a row for each sample, or so many; those next to the loss count.
        rows: samples.
        places: where they are in an output, where that is known.
    """
    heads, tail = _heads(loss, given, rows)
    if rows < 2 or _is_plain(tail, rows):
        return "separate"
    if not heads:
        return "unclear"
    try:
        first = torch.autograd.grad(loss, heads, create_graph=True, retain_graph=True, allow_unused=True)
        of_half = [
            (own * _unalike(own)).sum()
            for head, one in zip(heads, first, strict=True)
            if one is not None and one.requires_grad
            for own, _ in [_halves(head, one, rows, places)]
        ]
        if not of_half:
            return "unclear" if _pairs(tail) else "separate"  # linear
        second = torch.autograd.grad(sum(of_half), heads, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    except RuntimeError:
        return "unclear"  # some operator cannot be differentiated twice
    own = across = 0.0
    for head, one in zip(heads, second, strict=True):
        if one is not None:
            mine, others = _halves(head, one, rows, places)
            own = max([own, *mine.abs().flatten().tolist()])
            across = max([across, *others.abs().flatten().tolist()])
    if across > NEGLIGIBLE * own:
        return "coupled"
    return "unclear" if own == 0 and _pairs(tail) else "separate"


def _unalike(like: Tensor) -> Tensor:
    """Weights that are not all alike, as the derivatives by all of a row's values may sum up to nothing.

    Nothing is drawn: the script's own random numbers stay what they are.
    """
    return (1.5 + torch.arange(like.numel(), device=like.device).cos()).to(like.dtype).view(like.shape)


def _halves(head: Tensor, derivative: Tensor, rows: int, places: Places) -> tuple[Tensor, Tensor]:
    """The part of a derivative that is of the first half of the samples, and the rest."""
    found = _samples_in(head, rows, places)
    assert found is not None
    dim, at = found
    is_first = (at < rows // 2).to(derivative.device)
    if dim is None:
        return (derivative, derivative[:0]) if is_first else (derivative[:0], derivative)
    each = (is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0])
    return derivative.index_select(dim, each[0]), derivative.index_select(dim, each[1])


def _samples_in(output: Tensor, rows: int, places: Places) -> tuple[int | None, Tensor] | None:
    """The dimension of an output in which the samples are, or, in the first, their tokens; the second one if sequences
    come first; and the place of each in the batch."""
    if (known := places(output)) is not None:
        return known
    sizes = output.shape[:2]
    exact = next((dim for dim, size in enumerate(sizes) if size == rows), None)
    if exact is None and (not sizes or sizes[0] % rows):
        return None
    dim = exact or 0
    return dim, torch.arange(rows).repeat_interleave(sizes[dim] // rows)


def _long_dim(output: Tensor) -> int | None:
    """The first, or the second if all rows are one."""
    return next((dim for dim, size in enumerate(output.shape[:2]) if size > 1), None)


def _scattered(output: Tensor) -> tuple[int | None, Tensor] | None:
    """Rows of which nobody knows whose they are: no two of them may meet, so that any half of them will do."""
    dim = _long_dim(output)
    if dim is None:
        return None
    return dim, (torch.arange(output.shape[dim], dtype=torch.float64) * _GOLDEN % 1 >= 1 / 2).long() * output.numel()


_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it are in either half of a turn in no order that rows have."""


def _pairs(tail: Sequence[Any]) -> bool:
    """Whether operators may bring rows together whose effect has no second derivative, as hinges on differences."""
    meets = spreads = False
    for node in tail:
        made = math.prod(node._input_metadata[0].shape)
        taken = [
            math.prod(one._input_metadata[at].shape)
            for one, at in node.next_functions
            if one is not None and not _is_parameter(one)
        ]
        meets |= len(taken) > 1 and made > 1
        spreads |= len(taken) > 1 and made > max(taken)
    reorders = any(node.name().rstrip("0123456789") in _REORDER for node in tail if not _is_layer(node))
    return spreads or (meets and reorders)


def _is_layer(node: Any) -> bool:
    """Whether rows are multiplied by a parameter."""
    return any(_is_parameter(one) for one, _ in node.next_functions)


def _is_parameter(node: Any) -> bool:
    """Whether a value is a parameter, perhaps transposed, as in the products of a gradient that a penalty is of."""
    while node is not None and node.name() in _MOVED:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


_MOVED = {f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "ReshapeAlias", "Unsqueeze", "ToCopy")}

_REORDER = {
    f"{name}Backward" for name in ("Index", "IndexSelect", "Gather", "Flip", "Roll", "Sort", "Topk", "Mm", "Cdist")
}


def _heads(loss: Tensor, given: Sequence[Tensor], rows: int) -> tuple[list[Tensor], list[Any]]:
    """The outputs that are next to a loss, and the operators between: of a model that has none with a row for each
    sample, as one of all nodes of a graph, those behind the samples that are taken of it."""
    heads, tail = _between(loss, {one.grad_fn: one for one in given}, lambda node: False)
    if heads:
        return heads, tail
    return _between(loss, {}, lambda node: node.name() in _TAKEN and list(node._input_metadata[0].shape[:1]) == [rows])


_TAKEN = {"IndexBackward0", "IndexSelectBackward0"}


def _between(
    loss: Tensor, by_node: Mapping[Any, Tensor], is_end: Callable[[Any], bool]
) -> tuple[list[Tensor], list[Any]]:
    """The outputs next to a loss, and the operators on the way to them and to other ends."""
    heads: dict[Any, Tensor] = {}
    tail: list[Any] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in by_node:
            heads[node] = by_node[node]
            continue
        if is_end(node):
            continue
        tail.append(node)
        waiting += [one for one, _ in node.next_functions]
    return list(heads.values()), tail


def _is_plain(tail: Sequence[Any], rows: int) -> bool:
    """Whether operators are known to keep rows apart. Two values may only be added, and once they are scalars."""
    turned = any(node.name() in _TURNED for node in tail)
    for node in tail:
        name = node.name()
        if name not in _ROWS_APART:
            return False
        is_scalar = not len(node._input_metadata[0].shape)
        if is_scalar and name in _BENT:  # a root of a mean is not the mean of roots
            return False
        inputs = sum(one is not None for one, _ in node.next_functions)
        if inputs > 1 and not (is_scalar and name.startswith(("Add", "Sub"))):
            return False
        if name in _SOFTMAX:
            shape, dim = node._saved_result.shape, node._saved_dim
            dim = dim if dim < 2**63 else dim - 2**64 + len(shape)
            if shape[dim] == rows or (dim == 0 and not turned) or (dim and not turned and shape[0] % rows):
                return False
    return True


def _hookable(model: nn.Module) -> Iterator[nn.Module]:
    """A model and its parts; of what is compiled only the whole, as hooks inside would compile it anew."""
    yield model
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return
    for one in model.children():
        yield from _hookable(one)


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.requires_grad and output.dim() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return [one for part in parts for one in _tensors(part)]
