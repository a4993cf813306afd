"""Losses that add means over different numbers: each term is weighed by itself.

    loss = cross_entropy(classes, labels) + cross_entropy(words, targets, ignore_index=-100)

The gradient of the batch is  sum_t sum_i w_ti dL_ti  over the terms t and workers i: a mean over samples counts by
these, one over words by those. One weight for each worker's gradient cannot do that, but a factor on what flows back
into each term can. A term that is the same on all workers (of boundary points that all of them compute) counts as a
penalty on parameters does: by whatever weights add up to one.

Which term is which has to be known: by the operators that it comes from and their parameters. Terms that are alike in
that (of classes, in a loop) may be others on each worker, and so are weighed only where it is no matter which they are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.loss_reading import FLOAT32, LossReading
from hetopt.trainer.session.denominators import Denominators, Row, Said, all_same, shares
from hetopt.trainer.session.graph import operators

_NODES = 100
"""Operators next to a term that it is known by."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one worker knows of a term.

    Attributes:
        node: its operator.
        row: as if it were the loss.
        mark: of the operators and parameters that it comes from.
        value: of it; NaN: nobody has heard.
    """

    node: Any
    row: Row
    mark: float
    value: float


class Terms:
    """One worker's end; all find alike.

    Args:
        model: of the script.
        accumulate: backward passes of a step.
        rank: this worker's.
        world_size: workers.

    Attributes:
        are_weighed: whether any loss had terms that had to be weighed by themselves.
    """

    def __init__(self, model: nn.Module, accumulate: int, rank: int, world_size: int) -> None:
        self._model, self._accumulate = model, accumulate
        self._rank, self._world_size = rank, world_size
        self._denominators: dict[float, Denominators] = {}  # by a term's mark
        self._totals: list[float] = []
        self._constant: dict[float, bool] = {}  # whether a term was seen to be the same on all workers, by its mark
        self.are_weighed = False

    def note_total(self, total: float) -> None:
        """What all workers have counted together."""
        self._totals.append(total)
        for one in self._denominators.values():
            one.note_total(total)

    def of(self, reading: LossReading, *, samples: int, rows: int, values: Mapping[Any, Tensor]) -> tuple[Term, ...]:
        """The terms of a loss; none where it has one alone.

        Args:
            reading: of the loss.
            samples: of this worker.
            rows: that it computed.
            values: of scalars, by their operators.
        """
        numbers = {id(one): place for place, one in enumerate(self._model.parameters())}
        return tuple(
            Term(
                node=node,
                row=Row.of(own, samples=samples, rows=rows),
                mark=_mark(node, numbers),
                value=float(values[node].detach()) if node in values else math.nan,
            )
            for node, own in reading.terms
        )

    def weigh(self, terms: Sequence[Term]) -> tuple[list[float], dict[Any, float]]:
        """Ask all workers, who have as many terms.

        Returns:
            The weights of the workers' gradients, and by what the derivatives by this worker's terms are multiplied.

        Raises:
            BadInput: no weights make some term that of the whole batch; on all workers.
        """
        return self.combine(terms, gather_numbers(told_of(terms), self._world_size))

    def combine(self, terms: Sequence[Term], told: Sequence[Sequence[float]]) -> tuple[list[float], dict[Any, float]]:
        """The same of what all workers have told (see `told_of`), in rank order."""
        width = len(told[0]) // len(terms)
        base = shares([float(Row.read(own[2:width]).samples) for own in told])
        marks = [term.mark for term in terms]
        found: dict[Any, list[float]] = {}
        for number, term in enumerate(terms):
            each = [own[number * width : (number + 1) * width] for own in told]
            is_alone = marks.count(term.mark) == 1
            weights = self._weights(each, base, is_alone=is_alone)
            if found.setdefault(term.node, weights) != weights:
                raise BadInput("A term counts in two ways.")
        self.are_weighed = True
        own = base[self._rank]
        return base, {node: weights[self._rank] / own if own else 1.0 for node, weights in found.items()}

    def _weights(self, each: Sequence[Sequence[float]], base: list[float], *, is_alone: bool) -> list[float]:
        """Of one term, of which all workers have told."""
        rows = [Row.read(one[2:]) for one in each]
        live = [(one[0], one[1], row) for one, row in zip(each, rows, strict=True) if row.samples]
        mark = live[0][0]
        if any(other != mark for other, _, _ in live):
            raise BadInput("The workers' losses add different terms.")
        said = {row.said for _, _, row in live}
        are_even = said == {Said.SAMPLES} and all_same([row.denominator / row.rows for _, _, row in live])
        may_be_constant = said <= {Said.SAMPLES, Said.LENGTHS, Said.SUM, Said.UNKNOWN} and not are_even
        are_alike = all_same([row.denominator for *_, row in live]) and all_same([row.factor for *_, row in live])
        if may_be_constant and are_alike:
            values = [value for _, value, _ in live]
            if not any(values):
                return base  # of nothing, and no gradient
            if not any(map(math.isnan, values)):
                self._constant[mark] = all(math.isclose(one, values[0], rel_tol=FLOAT32) for one in values)
            if self._constant.get(mark):
                return base
            if Said.SUM in said and mark not in self._constant:
                raise BadInput("Nobody has heard whether a sum is that of all workers.")
        if not is_alone and not are_even:
            raise BadInput("Several terms of the loss are alike.")
        if mark not in self._denominators:
            self._denominators[mark] = Denominators(self._accumulate)
            for total in self._totals:
                self._denominators[mark].note_total(total)
        return self._denominators[mark].weights(rows)


def told_of(terms: Sequence[Term]) -> list[float]:
    """What a worker tells of its terms, as numbers."""
    return [one for term in terms for one in (term.mark, term.value, *term.row.numbers())]


@contextmanager
def multiplied(factors: Mapping[Any, float]) -> Iterator[None]:
    """Backward passes inside multiply the derivatives by some terms.

    Args:
        factors: by the terms' operators.
    """

    def by(factor: float) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        return lambda given: tuple(factor * one for one in given)

    handles = [node.register_prehook(by(factor)) for node, factor in factors.items() if factor != 1]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(root: Any, numbers: Mapping[int, int]) -> float:
    """A checksum of the operators next to a term, and of the parameters among them."""
    told = list[str]()
    for node in islice(operators(root), _NODES):
        variable = getattr(node, "variable", None)
        reduction = getattr(node, "_saved_reduction", "")
        told.append(f"{node.name()} {reduction}" if variable is None else f"parameter {numbers.get(id(variable))}")
    return float(zlib.crc32(" ".join(told).encode()))
