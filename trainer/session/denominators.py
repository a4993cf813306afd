"""How much each worker's gradient counts: by the denominators of the workers' losses, gathered in every backward pass.

Every worker says what its loss is: a mean over so many samples, tokens or weights, or a sum. If all of them say the
same, the weights follow that make the sum of the workers' gradients the gradient of the whole batch. If they do not, or
nobody can tell, all workers refuse with the same sentence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

from hetopt.core.errors import BadInput
from hetopt.trainer.inexact import WHOLE_BATCH
from hetopt.trainer.loss_reading import SAME, LossReading
from hetopt.trainer.session.drawn import draws_differ
from hetopt.trainer.session.given_numbers import NO_CUT, Cut, differ

Weight: TypeAlias = float | Literal["sum"]
"""What a script says of its loss: what it is a mean over, or that it is a sum."""

WEIGHT_HINT = (
    "pass run.backward(loss, weight=n), n being what this worker's loss is a mean over (samples, tokens, weights), or "
    'weight="sum" if it is a sum'
)


_ACCEPT = f'; or accept the difference: session(..., accept_inexact=("{WHOLE_BATCH}",))'

EARLIER_HINT = (
    "keep what is of the samples of all workers: run.gather(rows.detach()) in place of rows, where it is written"
    f"{_ACCEPT}"
)
"""What works where a script keeps something of its samples."""

NUMBERS_HINT = (
    "compute it of the samples of all workers, by run.gather(rows), run.total(count) or run.mean(value); divide a sum "
    "by it rather than each sample; share out indices that are drawn, rows = run.split(indices); state what the loss "
    f"is a mean over where it is right, run.backward(loss, weight=n){_ACCEPT}"
)
"""What works where samples meet a number that each worker has computed of its own."""

DRAWS_HINT = (
    "draw it by random or numpy.random, which all workers draw alike in the loop, or by a torch.Generator of its own "
    f"that is seeded alike; where it is a library's (layerdrop, stochastic depth by batch), turn that off{_ACCEPT}"
)
"""What works where torch draws something for the whole batch."""

_OTHERS_HINT = f"its own message says where, and what to do{_ACCEPT}"


def not_of_the_batch(what: str, remedy: str) -> BadInput:
    """The refusal of what parts of a batch do not add up to.

    Args:
        what: is wrong, as half a sentence.
        remedy: what to do, beside to accept the difference.
    """
    return BadInput(f"{what}: the gradients of parts are not the gradient of the batch.", hint=remedy + _ACCEPT)


_GATHERED_HINT = "gather the same features on all workers, and call run.backward for each loss on all of them"

_MOST_TOTALS = 64


class Said(IntEnum):
    """What a worker knows of its loss."""

    STATED = 0
    STATED_SUM = 1
    SAMPLES = 2
    COUNTED = 3
    SUM = 4
    CONSTANT = 5
    UNKNOWN = 6
    WHOLE_BATCH = 7
    EARLIER = 8
    LENGTHS = 9


_MEANS = {Said.SAMPLES, Said.COUNTED, Said.LENGTHS}

_BY_KIND = {
    "samples": Said.SAMPLES,
    "counted": Said.COUNTED,
    "lengths": Said.LENGTHS,
    "sum": Said.SUM,
    "constant": Said.CONSTANT,
    "unknown": Said.UNKNOWN,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One worker's loss; numbers alone, as they travel.

    Attributes:
        samples: that count, of this worker.
        rows: that it computed; more only where none count.
        said: what the loss is.
        denominator: of the loss.
        factor: on it; of several terms the largest.
        mixture: of all terms' factors.
        may_be_counted: whether the data may say what its denominator is.
        has_constant: whether it has a term that is the same on all workers.
        is_gathered: whether it was computed of rows of all workers.
        value: of the loss, where it was.
        numbers_mark: of numbers from outside torch that its samples met (see `GivenNumbers`).
        cut: by what they were told apart there.
        draws_mark: of what torch has drawn for the whole batch (see `Drawn`).
        terms: means and sums that it adds, where these could be weighed by themselves (see `Terms`); 0: they could not.
    """

    samples: int
    rows: int
    said: Said
    denominator: float = 1.0
    factor: float = 1.0
    mixture: float = 1.0
    may_be_counted: bool = False
    has_constant: bool = False
    is_gathered: bool = False
    value: float = 0.0
    numbers_mark: float = 0.0
    cut: Cut = NO_CUT
    draws_mark: float = 0.0
    terms: int = 0

    @classmethod
    def of(cls, reading: LossReading, *, samples: int, rows: int) -> Row:
        """From what the graph tells."""
        return cls(
            samples=samples,
            rows=rows,
            said=_BY_KIND[reading.kind],
            denominator=reading.denominator,
            factor=reading.factor,
            mixture=reading.mixture,
            may_be_counted=reading.may_be_counted,
            has_constant=reading.has_constant,
        )

    @classmethod
    def stated(cls, weight: Weight, *, samples: int, rows: int) -> Row:
        """From what the script says.

        Raises:
            BadInput: that is no weight.
        """
        if isinstance(weight, str):
            if weight != "sum":
                raise BadInput(f'`weight` must be a number or "sum", got {weight!r}.', hint=WEIGHT_HINT)
            return cls(samples=samples, rows=rows, said=Said.STATED_SUM)
        value = float(weight)
        if not 0 <= value < math.inf:
            raise BadInput(f"`weight` must be at least 0 and finite, got {value}.", hint=WEIGHT_HINT)
        return cls(samples=samples, rows=rows, said=Said.STATED, denominator=value)

    def numbers(self) -> list[float]:
        """The row as numbers, which workers can gather."""
        return [
            float(self.samples),
            float(self.rows),
            float(self.said),
            self.denominator,
            self.factor,
            self.mixture,
            float(self.may_be_counted),
            float(self.has_constant),
            float(self.is_gathered),
            self.value,
            self.numbers_mark,
            *map(float, self.cut),
            self.draws_mark,
            float(self.terms),
        ]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> Row:
        """The row that `numbers` wrote, whatever comes behind it."""
        samples, rows, said, denominator, factor, mixture, counted, constant, gathered, value, mark, *rest = numbers
        return cls(
            samples=int(samples),
            rows=int(rows),
            said=Said(int(said)),
            denominator=denominator,
            factor=factor,
            mixture=mixture,
            may_be_counted=bool(counted),
            has_constant=bool(constant),
            is_gathered=bool(gathered),
            value=value,
            numbers_mark=mark,
            cut=Cut(int(rest[0]), *rest[1:4]),
            draws_mark=rest[4],
            terms=int(rest[5]),
        )


class Denominators:
    """Weighs workers' gradients, backward pass by backward pass; the same on every worker.

    Args:
        accumulate: backward passes of a step: a sum that is divided by it is a sum.
    """

    def __init__(self, accumulate: int = 1) -> None:
        self._constants = {1.0, float(accumulate)}
        self._passes = float(accumulate)
        self._divides_by_counts = False  # whether sums were seen to be divided by what each worker counts
        self._leaves_out = False  # whether a loss was seen to leave elements out
        self._totals: deque[float] = deque(maxlen=_MOST_TOTALS)
        self._newest: tuple[list[list[float]], list[float]] | None = None  # what the workers said, and their weights

    def note_total(self, total: float) -> None:
        """All workers have added up what they count: a sum that is divided by it is one of all of them."""
        self._totals.append(total)
        self._newest = None

    def weigh(self, told: list[list[float]]) -> list[float]:
        """What each worker's gradient is multiplied with before all are summed; most steps are as the one before.

        Args:
            told: the rows as numbers, of all workers.

        Raises:
            BadInput: no weights give the gradient of the whole batch, or nobody can tell which.
        """
        if self._newest is None or self._newest[0] != told:
            self._newest = told, self.weights([Row.read(numbers) for numbers in told])
        return self._newest[1]

    def weights(self, rows: Sequence[Row]) -> list[float]:
        """The same of rows.

        Raises:
            BadInput: no weights give the gradient of the whole batch, or nobody can tell which.
        """
        live = [row for row in rows if row.samples]
        if len(live) <= 1:  # the whole batch is one worker's
            return [float(row.samples > 0) for row in rows]
        said = {row.said for row in live}
        if Said.EARLIER in said:
            who = next(number for number, row in enumerate(rows) if row.samples and row.said == Said.EARLIER)
            raise BadInput(f"The loss of worker {who} depends on its samples of an earlier batch.", hint=EARLIER_HINT)
        if draws_of_batch_differ(live):
            raise BadInput(
                "The workers draw other random numbers for the whole batch than each other.", hint=DRAWS_HINT
            )
        if len({row.is_gathered for row in live}) > 1:
            raise BadInput("The loss is of gathered rows (run.gather) on some workers alone.", hint=_GATHERED_HINT)
        if live[0].is_gathered and _are_one([row.value for row in live]):
            if Said.STATED_SUM in said:
                raise BadInput(
                    'Every worker\'s loss is that of the whole batch already, and weight="sum" would add them up.',
                    hint="leave out the weight: run.backward(loss)",
                )
            return shares([float(row.samples) for row in rows])
        if said <= {*_MEANS, Said.SUM} and numbers_differ(live):
            raise BadInput("The samples of the workers meet other numbers than each other's.", hint=NUMBERS_HINT)
        if said == {Said.STATED}:
            return shares([row.denominator if row.samples else 0.0 for row in rows])
        if said == {Said.STATED_SUM}:
            return [float(row.samples > 0) for row in rows]
        if said & {Said.STATED, Said.STATED_SUM}:
            raise BadInput("Some workers state the weight of their loss and others do not.", hint=WEIGHT_HINT)
        for bad in (Said.WHOLE_BATCH, Said.UNKNOWN):
            if bad in said:
                who = next(number for number, row in enumerate(rows) if row.samples and row.said == bad)
                if bad == Said.WHOLE_BATCH:
                    raise BadInput(
                        f"The loss of samples of worker {who} depends on others of its share.", hint=_OTHERS_HINT
                    )
                raise BadInput(f"Worker {who} cannot tell how its loss depends on its samples.", hint=WEIGHT_HINT)
        if said == {Said.CONSTANT}:
            return shares([float(row.samples) for row in rows])
        if not (said <= _MEANS or said == {Said.SUM}):
            raise BadInput("The workers' losses are not of one kind.", hint=WEIGHT_HINT)
        if said == {Said.SUM} and _are_reciprocals(live):
            return shares([float(row.samples) for row in rows])
        if not all_same([row.factor for row in live]) or not all_same([row.mixture for row in live]):
            raise BadInput(
                f"The loss is multiplied by {_listed([row.factor for row in live])} on the workers, which is taken for "
                "no weight.",
                hint=f"leave that factor out, or {WEIGHT_HINT}",
            )
        if said == {Said.SUM}:
            return self._of_sums(rows, live)
        return self._of_means(rows, live, said)

    def _of_means(self, rows: Sequence[Row], live: Sequence[Row], said: set[Said]) -> list[float]:
        if said == {Said.SAMPLES}:
            if all_same([row.denominator / row.rows for row in live]):
                return shares([float(row.samples) for row in rows])
            if not (self._leaves_out and all(row.may_be_counted for row in live)):
                counts = _listed([row.denominator for row in live])
                raise BadInput(
                    f"The loss is a mean over {counts} elements of {_listed([row.samples for row in live])} samples on "
                    "the workers, and nobody can tell whether they contain padding.",
                    hint=f"leave padding out of the mean (ignore_index), or {WEIGHT_HINT}",
                )
        if Said.LENGTHS in said and all_same([row.denominator for row in live]):
            raise BadInput(
                f"The loss is a mean over {live[0].denominator:g} elements on every worker, of "
                f"{_listed([row.samples for row in live])} samples.",
                hint=WEIGHT_HINT,
            )
        self._leaves_out = True
        if not all(row.said in (Said.COUNTED, Said.LENGTHS) or row.may_be_counted for row in live):
            raise BadInput("The workers' losses are not of one kind.", hint=WEIGHT_HINT)
        return shares([row.denominator if row.samples else 0.0 for row in rows])

    def _of_sums(self, rows: Sequence[Row], live: Sequence[Row]) -> list[float]:
        """Divided by nothing, by the samples, by a number that stays, or by what each worker counts."""
        divisors = [row.denominator for row in live]
        if not any(divisors):  # sums of nothing
            return shares([float(row.samples) for row in rows])
        totals = (total * by for total in self._totals for by in (1.0, self._passes))
        of_all = all_same(divisors) and any(math.isclose(divisors[0], one, rel_tol=SAME) for one in totals)
        if of_all and not any(row.has_constant for row in live):
            return [float(row.samples > 0) for row in rows]
        if all(math.isclose(row.denominator, row.rows, rel_tol=SAME) for row in live):
            return shares([float(row.samples) for row in rows])
        constants = {*self._constants, float(sum(row.samples for row in live))}
        # Where it is as large on one worker alone as what that one counts, it is a constant.
        is_known = not all(row.may_be_counted for row in live) and any(
            math.isclose(divisors[0], one, rel_tol=SAME) for one in constants
        )
        if not all_same(divisors) or (self._divides_by_counts and not is_known and divisors[0] != 1):
            self._divides_by_counts = True
            return shares([row.denominator if row.samples else 0.0 for row in rows])
        if not is_known:
            by = divisors[0] / live[0].factor
            raise BadInput(
                f"The loss is a sum divided by {by:g} on every worker: a number that stays, or what each of them "
                "counted.",
                hint=f"divide by what all workers counted, run.total(n), or {WEIGHT_HINT}",
            )
        if any(row.has_constant for row in live):
            raise BadInput(
                "The loss adds a sum over samples and a term that does not depend on them.",
                hint="give each a run.backward of its own, or divide the sum by the number of samples",
            )
        self._constants.add(divisors[0])  # the batch may be smaller at the end of an epoch, and the number the same
        return [float(row.samples > 0) for row in rows]


def numbers_differ(live: Sequence[Row]) -> bool:
    """Whether samples met numbers from outside torch that are each worker's own."""
    return differ([row.numbers_mark for row in live], [row.cut for row in live])


def could_weigh_terms(rows: Sequence[Row]) -> bool:
    """Whether nothing but the denominators of terms can be wrong with a loss, and all workers have as many terms, also
    those whose samples do not count: all of them tell theirs."""
    counts, live = {row.terms for row in rows}, [row for row in rows if row.samples]
    known = {*_MEANS, Said.SUM, Said.UNKNOWN}
    return (
        len(counts) == 1
        and min(counts) > 1
        and {row.said for row in live} <= known
        and not any(row.is_gathered for row in live)
        and not numbers_differ(live)
        and not draws_of_batch_differ(live)
    )


def draws_of_batch_differ(live: Sequence[Row]) -> bool:
    """Whether torch has drawn for the whole batch, and something else on each worker."""
    return draws_differ([row.draws_mark for row in live], [row.rows for row in live])


def _are_reciprocals(live: Sequence[Row]) -> bool:
    """Whether sums are multiplied with one over the samples, which divides by them."""
    divided = [row.factor * row.rows for row in live]
    if all_same([row.rows for row in live]):  # else a coefficient could be meant
        return math.isclose(divided[0], 1.0, rel_tol=SAME) and live[0].rows > 2
    return all_same(divided) and all_same([row.denominator for row in live])


def shares(values: Sequence[float]) -> list[float]:
    """Of each value in the sum of all."""
    total = math.fsum(values)
    return [value / total for value in values] if total else [0.0 for _ in values]


def _are_one(losses: Sequence[float]) -> bool:
    """Whether they are the same loss, computed on every worker."""
    return all_same(losses) or all(math.isnan(one) for one in losses)


def all_same(values: Sequence[float]) -> bool:
    """Whether values are the same but for rounding."""
    return all(math.isclose(value, values[0], rel_tol=SAME) for value in values)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values[:-1]) + f" and {values[-1]:g}"
