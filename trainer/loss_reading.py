"""What the autograd graph of a loss tells: a mean over how many, a sum, or something that no parts add up to.

The gradients of unequal parts of a batch add up to that of the batch only with the right weights, and these are the
denominators of the parts' means: samples, tokens that are not padding, class weights. A loss does not say what it was
divided by, but the operators that made it do: cross entropy keeps the total weight of its targets, a mean its number of
elements, a division its divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any
"""An operator of an autograd graph; torch does not name the types."""

Kind: TypeAlias = Literal["samples", "counted", "lengths", "sum", "constant", "unknown"]

Unread: TypeAlias = Literal["", "terms", "bent", "shape"]
"""Why a loss is unknown: its terms have different denominators, it is no mean or sum, or nobody knows of how much."""

SAME = 1e-4
"""Relative difference of two denominators in fp32 that are the same."""

FLOAT32 = 1e-6
"""Relative difference of two scalars in fp32 that are the same."""


@dataclass(frozen=True, kw_only=True)
class LossReading:
    """What a loss is.

    Attributes:
        kind: ``samples``: a mean over as many elements of each sample; ``counted``: a mean over elements that were
            chosen or weighted; ``lengths``: one over what there seems to be of other lengths than samples; ``sum``:
            none of these, or divided by a scalar of unknown meaning;
            ``constant``: it does not depend on the samples; ``unknown``: none of these, for the reason of ``problem``.
        denominator: of the mean; of a sum its divisor, or 1.
        factor: that scalars multiply it with; of several terms the largest.
        mixture: a figure of the factors of all terms, the same where they are.
        may_be_counted: whether the data may say what the denominator is: of a cross entropy, which leaves targets
            out, and of a sum that is divided by a tensor, or by a number that is as large as what it sums is many.
        has_constant: whether it has a term that does not depend on the samples.
        is_by_sample: whether it adds terms of one sample each, whatever these are.
        unread: of which kind the reason is.
        problem: half a sentence, about "the loss".
        terms: of a loss that adds several means or sums: what each of them is.
    """

    kind: Kind
    denominator: float = 1.0
    factor: float = 1.0
    mixture: float = 1.0
    may_be_counted: bool = False
    has_constant: bool = False
    is_by_sample: bool = False
    unread: Unread = ""
    problem: str = ""
    terms: tuple[TermReading, ...] = ()


class TermReading(NamedTuple):
    """One of the means and sums that a loss adds.

    Attributes:
        node: the operator that it comes from: what flows into it backward is the derivative by this term.
        reading: of it alone.
    """

    node: Node
    reading: LossReading


class _Tensor(float):
    """A divisor that is a tensor, so that the data may have been counted for it; other divisors are plain numbers."""


class _Unknown(Exception):  # no failure: what is not known is a result
    """The reason why a loss cannot be read."""

    def __init__(self, unread: Unread, problem: str) -> None:
        super().__init__(problem)
        self.unread: Unread = unread


@dataclass(frozen=True, kw_only=True)
class _Term:
    """A mean or a sum that a loss adds."""

    is_mean: bool
    denominator: float
    factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()
    is_counted: bool = False
    may_be_counted: bool = False
    summed: Node = None
    """The operator of a sum, which tells how many values it is of."""
    node: Node = None
    is_chosen: bool = False
    """Whether it is over what was taken by an index."""
    problem: _Unknown | None = None
    """Why it is not known how much it is of."""


class Beside(NamedTuple):
    """Another loader's batch.

    Attributes:
        weighs_alike: whether a mean over it weighs as one over this batch does.
        is_new: whether it was handed out since the last loss; an older one is meant where nothing else fits.
    """

    weighs_alike: bool
    is_new: bool


@dataclass
class _Terms:
    """What was found on the way down."""

    samples: int
    of_one: Container[Node] = ()
    beside: Mapping[int, Beside] = field(default_factory=dict)
    found: list[_Term] = field(default_factory=list)
    constants: int = 0
    is_by_sample: bool = False
    lengths: Collection[int] = ()
    parts: tuple[TermReading, ...] = ()


def read_loss(
    loss: Tensor,
    samples: int,
    of_one: Container[Node] = (),
    beside: Mapping[int, Beside] = MappingProxyType({}),
    lengths: Collection[int] = (),
) -> LossReading:
    """Read the graph of a scalar loss.

    Args:
        loss: before its backward pass.
        samples: of the batch that it is of.
        of_one: operators whose scalar results are known to be of one sample alone: their sum is one over samples.
        beside: samples of other loaders' batches that terms may be of.
        lengths: of what the batch has other than samples, put one after the other: nodes of graphs, packed tokens.
    """
    terms = _Terms(samples, of_one, beside, lengths=lengths)
    try:
        _walk(loss.grad_fn, terms)
        reading = _merged(terms)
    except _Unknown as reason:
        reading = LossReading(kind="unknown", unread=reason.unread, problem=str(reason))
    if terms.is_by_sample:
        return replace(reading, is_by_sample=True)
    return replace(reading, terms=terms.parts) if len(terms.parts) > 1 else reading


_SAME_VALUE = {"NegBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0",
               "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0",
               "ReshapeAliasBackward0", "ExpandBackward0",
               "UnsafeViewBackward0", "PermuteBackward0", "TransposeBackward0"}  # fmt: skip
"""Operators that leave a value as it is, but for its sign, type or shape."""

_SUMS_OF_TWO = {f"{name}Backward{number}" for name in ("Add", "Sub", "Rsub") for number in (0, 1)}

_BY_REDUCTION = {"MseLossBackward0", "BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0",
                 "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0"}  # fmt: skip
"""Losses that average over the elements of their input, or sum."""

_BY_ROWS = {"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
_CROSS_ENTROPY = {"NllLossBackward0", "NllLoss2DBackward0"}
_MEAN = 1
_SUM = 2
_OVER_DIMS = {"MeanBackward1", "SumBackward1"}
_SELECTED = {"IndexBackward0", "MaskedSelectBackward0"}


def _walk(root: Node, terms: _Terms) -> None:
    """Go down from a scalar to the reductions that it comes from."""
    waiting: list[tuple[Node, tuple[float, ...], tuple[float, ...]]] = [(root, (), ())]
    while waiting:
        node, factors, divisors = waiting.pop()
        name = _name(node)
        if node in terms.of_one:
            terms.found.append(_Term(is_mean=False, denominator=1.0, factors=factors, divisors=divisors, node=node))
            terms.is_by_sample = True
        elif name in _SUMS_OF_TWO:
            waiting += [(one, factors, divisors) for one in _inputs(node)]
        elif node is None:
            continue  # a number
        elif _is_constant(node) or _is_elementwise(node, tuple(node._input_metadata[0].shape)):
            terms.constants += 1
        elif name in _SAME_VALUE:
            waiting.append((_inputs(node)[0], factors, divisors))
        elif name == "DivBackward1" and _name(_value(_inputs(node)[0])) == "SumBackward0":
            # Torch's own losses divide by a number; what a script divides by is a tensor by then.
            mean = _Term(is_mean=True, denominator=float(node._saved_other))
            terms.found.append(replace(mean, factors=factors, divisors=divisors, node=node))
        elif name.startswith("DivBackward"):
            inner, scalar = _one_of(node, "divides by something that depends on the model and the samples")
            if inner is not _inputs(node)[0]:
                raise _Unknown("bent", "divides by a value that depends on the whole batch")
            waiting.append((inner, factors, divisors if scalar is None else (*divisors, scalar)))
        elif name.startswith("MulBackward"):
            inner, scalar = _one_of(node, "multiplies two values that both depend on the samples")
            waiting.append((inner, factors if scalar is None else (*factors, scalar), divisors))
        elif (listed := _listed(node, terms.samples)) is not None:
            share = 1 / len(listed) if name == "MeanBackward0" else 1.0
            waiting += [(one, (*factors, *own, share), divisors) for one, own in listed]
        elif name in _OVER_DIMS and math.prod(node._input_metadata[0].shape) == 1:
            term = _term(_over_dims, node, terms.samples)
            terms.found.append(replace(term, factors=factors, divisors=divisors))
        elif (read := _READERS.get(name)) is not None:
            term = _term(read, node, terms.samples)
            summed = node if factors or divisors else None
            terms.found.append(replace(term, factors=factors, divisors=divisors, summed=summed))
        else:
            called = name.rstrip("0123456789").removesuffix("Backward")
            raise _Unknown("bent", f"ends in {called}, which is no known mean or sum")


def _term(read: Callable[[Node, int], _Term], node: Node, samples: int) -> _Term:
    """A mean or a sum; where nobody knows of how much, that is left to those who may know that it is no matter."""
    try:
        return replace(read(node, samples), node=node, is_chosen=_chosen(node) is not None)
    except _Unknown as reason:
        if reason.unread != "shape":
            raise
        return _Term(is_mean=False, denominator=1.0, node=node, problem=reason)


_Listed: TypeAlias = list[tuple[Node, tuple[float, ...]]]
"""Losses, and what each is multiplied with."""


def _listed(node: Node, samples: int) -> _Listed | None:
    """The scalars that were stacked and then averaged or summed, each a loss; None: they are not, or one a sample."""
    if _name(node) not in ("MeanBackward0", "SumBackward0") or len(node._saved_self_sym_sizes) != 1:
        return None
    if node._saved_self_sym_sizes[0] % samples == 0:
        return None
    return _stacked(_inputs(node)[0], node._saved_self_sym_sizes[0])


def _stacked(node: Node, count: int) -> _Listed | None:
    """The scalars of a stack under one weight each, of numbers or of parameters; None: it is none."""
    name = _name(node)
    if name == "StackBackward0":
        return [(one, ()) for one in _inputs(node)]
    if not name.startswith(("Mul", "Div", "Add", "Sub")):
        return None
    left, right = _inputs(node)[0], next(iter(_inputs(node)[1:]), None)
    inner, other = (right, left) if left is None or _is_elementwise(left, (count,)) else (left, right)
    listed = None if inner is None else _stacked(inner, count)
    if listed is None or (name.startswith("Div") and inner is not left):
        return None
    if other is not None:
        of_parameters = _is_elementwise(other, (count,))
        added = [(other, ())] if name.startswith(("Add", "Sub")) else []
        return [*listed, *added] if of_parameters else None
    if name.startswith(("Add", "Sub")):
        return listed  # a number
    saved = getattr(node, "_saved_other" if inner is left else "_saved_self", None)
    if saved is None:
        return listed
    by = [float(saved)] * count if not isinstance(saved, Tensor) or saved.numel() == 1 else saved.flatten().tolist()
    by = [1 / one for one in by] if name.startswith("Div") and all(by) else by
    return [(one, (*own, its)) for (one, own), its in zip(listed, by, strict=True)] if len(by) == len(listed) else None


def _value(node: Node) -> Node:
    while _name(node) in _SAME_VALUE:
        node = _inputs(node)[0]
    return node


def _cross_entropy(node: Node, samples: int) -> _Term:
    if node._saved_reduction == _SUM:
        return _Term(is_mean=False, denominator=1.0)
    if node._saved_reduction != _MEAN:
        raise _Unknown("shape", "is not reduced to a scalar")
    total, targets = float(node._saved_total_weight), node._saved_target.numel()
    counted = node._saved_weight is not None or total != targets
    return _Term(is_mean=True, denominator=total, is_counted=counted, may_be_counted=True)


def _by_reduction(node: Node, samples: int) -> _Term:
    own = node._saved_self
    is_mean = node._saved_reduction == _MEAN
    return _Term(is_mean=is_mean, denominator=float(own.numel()) if is_mean else 1.0)


def _by_rows(node: Node, samples: int) -> _Term:
    own = node._saved_self
    is_mean = node._saved_reduction == _MEAN
    return _Term(is_mean=is_mean, denominator=float(len(own) if own.dim() > 1 else 1) if is_mean else 1.0)


def _mean(node: Node, samples: int) -> _Term:
    inner = _inputs(node)[0]
    count = float(node._saved_self_sym_numel)
    term = _inside(inner, samples)
    if not term.is_mean and term.denominator < 0:  # the samples were summed before: this is a mean over something else
        return _Term(is_mean=False, denominator=1.0)
    return _Term(is_mean=True, denominator=count * max(1.0, term.denominator), is_counted=_name(inner) in _SELECTED)


def _sum(node: Node, samples: int) -> _Term:
    sizes = node._saved_self_sym_sizes
    term = _inside(_inputs(node)[0], samples)
    taken = _chosen(node)
    if _name(taken) == "IndexBackward0" and taken._saved_self_sym_sizes[0] % samples == 0:  # of some of the samples
        return _Term(is_mean=False, denominator=1.0)
    if not term.is_mean and term.denominator > 0 and not any(size % samples == 0 for size in sizes):
        shape = " x ".join(map(str, sizes)) or "1"
        raise _Unknown("shape", f"is a sum over {shape} values, which are not those of {samples} samples")
    return term if term.is_mean else _Term(is_mean=False, denominator=1.0)


def _squared_norm(node: Node, samples: int) -> _Term:
    """A sum of squares, as scripts write it that penalise the embeddings of a batch: ``rows.norm(2).pow(2)``."""
    norm = _value(_inputs(node)[0])
    is_square = _name(norm) == "LinalgVectorNormBackward0" and float(node._saved_exponent) == norm._saved_ord == 2.0
    if not is_square or not any(size % samples == 0 for size in norm._saved_self.shape):
        raise _Unknown("bent", "ends in Pow, which is no known mean or sum")
    return _Term(is_mean=False, denominator=1.0)


def _over_dims(node: Node, samples: int) -> _Term:
    """A mean or sum over the dimensions that are left, by their numbers."""
    term = _inside(node, samples)
    if not term.is_mean and term.denominator > 0:
        shape = " x ".join(map(str, node._saved_self_sym_sizes))
        raise _Unknown("shape", f"ends in a mean or sum over {shape} values, which are not those of {samples} samples")
    return term if term.is_mean else _Term(is_mean=False, denominator=1.0)


def _inside(node: Node, samples: int) -> _Term:
    """Means and sums over some dimensions, before what is left is averaged or summed.

    Returns:
        A mean, if the samples are averaged here; a sum with denominator -1, if they are summed; else 1.
    """
    denominator = 1.0
    while node is not None:
        name = _name(node)
        if name in _OVER_DIMS:
            sizes = node._saved_self_sym_sizes
            dims = {dim if dim < len(sizes) else dim - 2**64 + len(sizes) for dim in node._saved_dim}
            over_samples = 0 in dims and sizes[0] % samples == 0
            if name == "MeanBackward1" and over_samples:
                return _Term(is_mean=True, denominator=math.prod(sizes[dim] for dim in dims) * denominator)
            if over_samples:
                return _Term(is_mean=False, denominator=-1.0)
        elif name not in _SAME_VALUE and not _is_scaled(node):
            break
        node = next(iter(_present(node)), None)
    return _Term(is_mean=False, denominator=denominator)


def _is_scaled(node: Node) -> bool:
    """Whether a tensor is multiplied with one number."""
    if not _name(node).startswith("MulBackward") or len(_present(node)) != 1:
        return False
    other = node._saved_other
    return not isinstance(other, Tensor) or other.dim() == 0


_READERS: dict[str, Callable[[Node, int], _Term]] = {
    **dict.fromkeys(_CROSS_ENTROPY, _cross_entropy),
    **dict.fromkeys(_BY_REDUCTION, _by_reduction),
    **dict.fromkeys(_BY_ROWS, _by_rows),
    "MeanBackward0": _mean,
    "SumBackward0": _sum,
    "PowBackward0": _squared_norm,
}


def _merged(terms: _Terms) -> LossReading:
    """One reading of all terms, if they have the same denominator."""
    if not terms.found:
        return LossReading(kind="constant", has_constant=True)
    # By itself a sum is a sum, also where it is divided by as many as another term is a mean over: by chance, perhaps.
    terms.parts = tuple(TermReading(one.node, _by_itself(one, terms)) for one in terms.found)
    counts = [one for one in terms.found if one.is_mean]
    readings = [_alone(one, terms, counts) for one in terms.found]
    if len(readings) == 1 and readings[0].factor == 1 and not terms.constants:
        return readings[0]
    if any(one.kind == "samples" for one in readings):
        # Each sample chose one; where a part has as many by chance, the others refuse.
        each = [one.kind == "counted" and one.denominator == terms.samples for one in readings]
        readings = [replace(one, kind="samples") if is_one else one for one, is_one in zip(readings, each, strict=True)]
    kinds = {one.kind for one in readings}
    first = readings[0]
    alike = len(kinds) == 1 and (
        first.kind == "samples" or all(_same(one.denominator, first.denominator) for one in readings)
    )
    if not alike:
        named = " and ".join(dict.fromkeys(_described(one) for one in readings))
        raise _Unknown("terms", f"adds terms of different denominators, {named}")
    # There may be as many terms as boxes: each factor counts once.
    factors = dict.fromkeys(one.factor for one in readings)
    return replace(
        max(readings, key=lambda one: one.denominator) if first.kind == "samples" else first,
        factor=max(abs(one.factor) for one in readings),
        mixture=math.fsum(one * (number + 1) for number, one in enumerate(factors)),
        may_be_counted=all(one.may_be_counted for one in readings),
        has_constant=terms.constants > 0,
    )


def _by_itself(term: _Term, terms: _Terms) -> LossReading:
    """What one term is, whatever the others are; it may be that nobody knows."""
    try:
        return _alone(term, terms, ())
    except _Unknown as reason:
        factor = math.prod(term.factors) / math.prod(term.divisors)
        return LossReading(kind="unknown", denominator=term.denominator, factor=factor, unread=reason.unread)


def _alone(term: _Term, terms: _Terms, means: Sequence[_Term]) -> LossReading:
    """What one term is. A sum that is divided by what another term is a mean over is a mean itself."""
    samples = terms.samples
    divisor = math.prod(term.divisors)
    factor = math.prod(term.factors)
    if term.problem is not None:
        raise term.problem
    if term.is_mean:
        is_of_lengths = any(term.denominator % length == 0 for length in terms.lengths)
        whole = term.denominator % samples == 0 and not term.is_counted
        others = [
            rows
            for rows, other in terms.beside.items()
            if term.denominator % rows == 0 and not term.is_counted and (not whole or (other.is_new and rows > samples))
        ]
        if others and not terms.beside[max(others)].weighs_alike:
            raise _Unknown(
                "shape",
                f"has a mean over {max(others)} samples of another loader's batch, of which this worker "
                "has another proportion",
            )
        whole = whole or bool(others)
        is_counted = term.is_counted or (term.is_chosen and not whole)
        if not whole and not is_counted and not is_of_lengths:
            raise _Unknown("shape", f"is a mean over {term.denominator:g} elements of {samples} samples")
        return LossReading(
            kind="samples" if whole else "counted" if is_counted else "lengths",
            denominator=term.denominator,
            factor=factor / divisor,
            may_be_counted=term.may_be_counted or term.is_chosen or is_of_lengths,
        )
    for mean in means:
        is_whole = mean.denominator % samples == 0 and not mean.is_counted
        if any(_same(mean.denominator, one) or (is_whole and _same(samples, one)) for one in term.divisors):
            alike = _alone(replace(mean, factors=(), divisors=()), terms, ())
            return replace(alike, factor=factor * alike.denominator / divisor)
    counts = [count for count in map(_one_over, term.factors) if count is not None]
    numbers = [*term.divisors, *(1 / one for one in term.factors if one and not isinstance(one, _Tensor))]
    counted = bool(counts) or any(isinstance(one, _Tensor) or _is_count(one, term.summed) for one in numbers)
    count = math.prod(counts)
    if term.divisors and divisor == 1 and _counted(term.summed) == 0:  # `max(1, n)` of none
        divisor = 0.0
    return LossReading(kind="sum", denominator=divisor * count, factor=factor * count, may_be_counted=counted)


def _chosen(node: Node) -> Node:
    """The index by which what is reduced was taken, perhaps made row by row of that; None: by none."""
    for _ in range(_DEEPEST):
        inner = _present(node)
        if not inner:
            return None
        node = inner[0]
        name = _name(node)
        if name in _SELECTED:
            return node
        if name not in _SAME_VALUE and name not in _ROW_BY_ROW:
            return None
    return None


def _one_over(factor: float) -> int | None:
    """What a tensor is one over, as a script computes it that multiplies with one over a count; None: no count.

    A plain number is a coefficient, and so is a half. Where counts are so large that any number is near one over some,
    nobody can tell.
    """
    if not isinstance(factor, _Tensor) or factor <= 10 * FLOAT32:
        return None
    count = round(1 / factor)
    return count if count > 2 and math.isclose(count * factor, 1.0, rel_tol=FLOAT32) else None


def _is_count(divisor: float, summed: Node) -> bool:
    """Whether a sum is of as many values, or under weights that add up to as much: a script may have counted them."""
    if divisor == 1:
        return False
    of_values = _name(summed) == "SumBackward0" and _same(math.prod(summed._saved_self_sym_sizes), divisor)
    return of_values or _same(_counted(summed), divisor)


def _counted(summed: Node) -> float:
    """What the weights of a sum add up to, or of how many values it is; NaN: nobody knows, or it is no sum."""
    name = _name(summed)
    if name in _CROSS_ENTROPY:
        return float(summed._saved_total_weight)
    if name in _BY_REDUCTION:
        return float(summed._saved_self.numel())
    if name != "SumBackward0":
        return math.nan
    inner = _value(_inputs(summed)[0])
    weights: Tensor | None = None
    if _name(inner).startswith("MulBackward") and len(_present(inner)) == 1:
        weights = inner._saved_other if _inputs(inner)[0] is not None else inner._saved_self
    elif _name(inner).startswith("WhereBackward"):
        weights = inner._saved_condition if _inputs(inner)[0] is not None else ~inner._saved_condition
    elif _name(inner).startswith("MaskedFillBackward"):
        weights = ~inner._saved_mask
    if isinstance(weights, Tensor) and weights.dim() > 0:
        return float(weights.sum())
    return float(math.prod(summed._saved_self_sym_sizes))


def _described(reading: LossReading) -> str:
    if reading.kind == "sum":
        return "a sum" if reading.denominator == 1 else f"a sum divided by {reading.denominator:g}"
    return f"a mean over {reading.denominator:g}"


def _is_constant(node: Node, depth: int = 0) -> bool:
    """Whether a scalar is made of parameters alone, as penalties on weights are."""
    name = _name(node)
    if name == _PARAMETER:
        return bool(node.variable.dim() == 0)
    if name in ("SumBackward0", "MeanBackward0"):
        return _is_elementwise(_inputs(node)[0], tuple(node._saved_self_sym_sizes))
    if name == "LinalgVectorNormBackward0":
        return _is_elementwise(_inputs(node)[0], tuple(node._saved_self.shape))
    inner = _present(node)
    if name in _TAKEN:
        return _is_elementwise(inner[0], tuple(node._saved_self_sym_sizes))
    return (
        bool(inner) and name in _ELEMENTWISE and depth < _DEEPEST and all(_is_constant(one, depth + 1) for one in inner)
    )


_ROW_BY_ROW = {f"{name}Backward{number}" for number in (0, 1) for name in
               ("LogSoftmax", "Softmax", "Slice", "Sub", "Mul", "Div", "Pow", "Abs", "Neg", "Exp", "Log", "Sqrt",
                "Sigmoid", "Relu", "Clamp", "ClampMin", "NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss",
                "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")}  # fmt: skip
"""They take what belongs to a row to what belongs to that row."""

_TAKEN = {"SelectBackward0", "IndexBackward0"}
"""They take one of several values."""

_PARAMETER = "torch::autograd::AccumulateGrad"
_DEEPEST = 50
_ELEMENTWISE = {f"{name}Backward{number}" for number in (0, 1) for name in
                ("Pow", "Abs", "Mul", "Div", "Add", "Sub", "Neg", "Exp", "Log", "Sqrt", "Softplus", "ToCopy", "Clone",
                 "Log1P", "Stack", "Softmax", "LogSoftmax", "Sigmoid", "Relu")}  # fmt: skip


def _is_elementwise(node: Node, shape: tuple[int, ...], depth: int = 0) -> bool:
    """Whether a tensor is made element by element of parameters of the same shape."""
    name = _name(node)
    if name == _PARAMETER:
        return tuple(node.variable.shape) == shape
    inner = [] if node is None or depth > _DEEPEST or name not in _ELEMENTWISE else _present(node)
    return bool(inner) and all(_is_elementwise(one, shape, depth + 1) for one in inner)


def _one_of(node: Node, otherwise: str) -> tuple[Node, float | None]:
    """The factor that depends on samples, and the value of the other one; None: it is made of parameters."""
    inputs = _inputs(node)
    if len(inputs) == 1:
        return inputs[0], _scalar(node._saved_other)
    left, right = inputs
    if left is not None and right is not None:
        if _is_constant(right):
            return left, None
        if _is_constant(left):
            return right, None
        raise _Unknown("bent", otherwise)
    known = node._saved_other if right is None else getattr(node, "_saved_self", None)
    if known is None:
        return (left if right is None else right), None
    return (left if right is None else right), _scalar(known)


def _scalar(saved: Tensor | float) -> float:
    """The value of a saved factor. Only a plain number leaves the type of another scalar as it is."""
    if not isinstance(saved, Tensor):
        return float(saved)
    other = torch.tensor(1, dtype=torch.float16 if saved.dtype.is_floating_point else torch.int8)
    is_number = saved.dim() == 0 and torch.result_type(other, saved) == other.dtype
    return float(saved) if is_number else _Tensor(saved)


def _same(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=SAME)


def _name(node: Node) -> str:
    return "" if node is None else str(node.name())


def _inputs(node: Node) -> list[Node]:
    return [one for one, _ in node.next_functions]


def _present(node: Node) -> list[Node]:
    return [one for one in _inputs(node) if one is not None]
