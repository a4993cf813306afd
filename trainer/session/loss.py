"""What a session learns of a script's loss: how much each worker's gradient counts, and whether parts can add up."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.inexact import BATCH_STATISTICS, WHOLE_BATCH
from hetopt.trainer.loss_reading import Beside, LossReading, read_loss
from hetopt.trainer.session.batch_norm import BatchNormNote
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.denominators import (
    DRAWS_HINT,
    EARLIER_HINT,
    NUMBERS_HINT,
    WEIGHT_HINT,
    Denominators,
    Row,
    Said,
    Weight,
    could_weigh_terms,
    draws_of_batch_differ,
    not_of_the_batch,
    numbers_differ,
)
from hetopt.trainer.session.given_numbers import NO_CUT
from hetopt.trainer.session.handed import Handed
from hetopt.trainer.session.hooks import bent_by_hooks, has_hooks, own_functions
from hetopt.trainer.session.kept import Kept
from hetopt.trainer.session.listening import Listener
from hetopt.trainer.session.mixing import Outputs
from hetopt.trainer.session.padding import Padding, PaddingWatch
from hetopt.trainer.session.row_statistics import RowStatistics
from hetopt.trainer.session.terms import Term, Terms
from hetopt.trainer.session.whole_batch import WholeBatch, depends_on_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Word:
    """What a worker tells the others of its loss, what is wrong with it as far as this worker knows, where samples met
    a number that may be its own, and where torch drew for the whole batch; the terms of the loss, and by what each is
    multiplied once the others have told theirs."""

    own: Row
    problem: BadInput | None = None
    met_at: str = ""
    drawn_at: str = ""
    terms: tuple[Term, ...] = ()
    factors: dict[Any, float] = field(default_factory=dict)


class LossWatch:
    """One worker's end. The losses of all workers are looked at in every backward pass.

    Args:
        model: of the script.
        rank: this worker's.
        world_size: workers; one has nobody to share a batch with.
        accumulate: backward passes of a step.
        accepted: what need not be exact (see `hetopt.trainer.inexact`).
        is_local: whether workers step by their own gradients: only whether the loss is a sum is asked then, once.
        whole: what there is of the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        world_size: int,
        *,
        accumulate: int,
        accepted: Sequence[str],
        is_local: bool,
        whole: WholeBatch,
    ) -> None:
        self._whole = whole
        self._rank = rank
        self._world_size = world_size
        self._denominators = Denominators(accumulate)
        self._terms = Terms(model, accumulate, rank, world_size)
        self._is_local = is_local
        self._is_sum: bool | None = None  # of workers that step by their own gradients; None: not asked yet
        self._model = model
        shares = world_size > 1 and not is_local
        self._asks_coupling = shares and WHOLE_BATCH not in accepted
        self._asks_statistics = shares and rank == 0 and BATCH_STATISTICS not in accepted and not whole.normalises
        self._outputs: Outputs | None = None
        self._statistics: RowStatistics | None = None  # for as long as the losses of a batch are asked
        self._asks_earlier = shares and WHOLE_BATCH not in accepted
        self._kept: Kept | None = None  # for as long as losses may depend on what the script keeps
        self._ended: list[Listener] = []  # not out of torch's way yet
        self._batches = 0
        self._turn, self._was_looked_at = 0, False  # losses that were followed by another batch
        self._number = 0  # losses of the present batch that were looked at
        self._met, self._asked = {0}, set[int]()  # numbers of losses in their batch: there are, asked of coupling
        self._is_by_sample = False  # whether losses were seen to add terms of one sample each
        self._batch_norm: BatchNormNote | None = None
        self._padding: PaddingWatch | None = None

    def begin_batch(self, handed: Handed) -> None:
        """The script gets a batch: from here on modules' outputs are kept, while there are losses to look at."""
        self._begin_earlier(handed)
        if self._number == 0 and any((self._outputs, self._batch_norm, self._statistics, self._padding)):
            return  # this one is asked for ahead: the loss of the one before is still to come
        self._end_batch()
        self._number = 0
        number, self._batches = self._batches, self._batches + 1
        is_new, rows = bool(self._met - self._asked), handed.part.rows
        if self._asks_coupling and is_new:
            self._outputs = Outputs(self._model)
        hears = is_new or is_heard(number) or self._is_by_sample
        if self._asks_coupling and hears and rows > 1 and Listener.can_listen(self._model):
            self._statistics = RowStatistics(rows, handed.storages, handed.singles, is_sure=not is_new)
            self._statistics.begin()
        if self._asks_statistics:
            self._batch_norm = BatchNormNote(self._model)
        if self._asks_coupling and handed.part.padding and Listener.can_listen(self._model):
            self._padding = PaddingWatch(self._model, handed.part.padding, rows)

    def _begin_earlier(self, handed: Handed) -> None:
        """Hear what becomes of one more batch."""
        self._turn, self._was_looked_at = self._turn + self._was_looked_at, False
        self._asks_earlier = self._asks_earlier and Listener.can_listen(self._model)
        if not (self._asks_earlier and is_heard(self._turn)):
            self._end_earlier()
            return
        if self._kept is None:
            self._kept = Kept(self._model, is_first=self._turn == 0)
            self._kept.begin()
        is_even = len(set(handed.part.shares)) == 1
        self._kept.take(handed.part.rows, handed.storages, handed.origins, is_even=is_even)

    def _end_earlier(self) -> None:
        if self._kept is not None:
            self._ended.append(self._kept)
            self._ended = _still_there(self._ended)
        self._kept = None

    def factor(self, loss: Tensor, weight: Weight | Tensor | None, part: Part | None) -> float:
        """On a loss that nobody but this worker steps by; all such workers ask.

        Raises:
            BadInput: nobody can tell whether it is a sum; on all workers.
        """
        return 1.0 if part is None or self._world_size == 1 else self._own_factor(loss, weight, part)

    def look(
        self,
        loss: Tensor,
        weight: Weight | Tensor | None,
        part: Part,
        beside: Mapping[int, Beside] = MappingProxyType({}),
    ) -> Word:
        """Look at a loss before its backward pass: what the others have to know of it.

        Args:
            loss: of this worker's part.
            weight: what the script says of it; None: nothing.
            part: of the batch.
            beside: see `HandedOut`.
        """
        rows = part.rows
        self._was_looked_at = True
        own, terms, unread = self._row(loss, weight, part, beside)
        problem = unread
        if self._whole.was_asked and depends_on_rows(loss):
            own = replace(own, is_gathered=True, value=float(loss.detach()))
        number, self._number = self._number, self._number + 1
        self._met.add(number)
        if not own.is_gathered and any((self._outputs, self._statistics)):
            is_new = self._outputs is not None and number not in self._asked
            found = "separate"
            if self._outputs is not None and is_new:
                places = (lambda one: None) if self._statistics is None else self._statistics.places
                found = self._outputs.look(loss, rows, places, _lengths(part, beside))
            self._asked |= {number} if is_new else set()
            place = None if self._statistics is None else self._statistics.problem(loss)
            if place is not None and own.said != Said.STATED_SUM:
                problem = _by_statistic(part, place)
                own = replace(own, said=Said.WHOLE_BATCH)
            elif found == "coupled" and own.said != Said.STATED_SUM:
                problem = _coupled(part)
                own = replace(own, said=Said.WHOLE_BATCH)
            elif is_new and (bent := self._bent(loss)) is not None:
                problem = _by_hook(bent)
                own = replace(own, said=Said.WHOLE_BATCH)
            elif found == "unclear" and weight is None and problem is None:
                problem = _unclear()
                own = replace(own, said=Said.UNKNOWN)
        if part.mixed_by and self._asks_coupling:
            problem = _by_collate(part.mixed_by)
            own = replace(own, said=Said.WHOLE_BATCH)
        elif self._padding is not None and (read := self._padding.read_by(loss)) is not None:
            problem = _by_padding(read)
            own = replace(own, said=Said.WHOLE_BATCH)
        earlier = None if self._kept is None else self._kept.problem(loss)
        if earlier is not None:
            problem = _of_earlier(part, earlier)
            own = replace(own, said=Said.EARLIER)
        mark, cut, met_at = (0.0, NO_CUT, "") if self._kept is None else self._kept.numbers.take()
        draws, drawn_at = (0.0, "") if self._kept is None else self._kept.drawn.take()
        if mark or cut.which or draws:
            own = replace(own, numbers_mark=mark, cut=cut, draws_mark=draws)
        if self._batch_norm is not None and not own.is_gathered:
            self._batch_norm.look(loss)
        if problem is unread:
            own = replace(own, terms=len(terms))
        return Word(own=own, problem=problem, met_at=met_at, drawn_at=drawn_at, terms=terms)

    def _bent(self, loss: Tensor) -> str | None:
        """The parameter whose gradient a hook or a function of the script changes in a way that parts do not add up;
        None: none."""
        functions = own_functions(loss)
        has_some = functions or has_hooks(self._model) or (self._kept is not None and self._kept.has_hook)
        exchanges = self._whole.was_asked or self._whole.normalises  # in the backward pass, which is gone through here
        return bent_by_hooks(loss, self._model, functions) if has_some and not exchanges else None

    def tell(self, part: Part) -> None:
        """The first backward pass is over: say what BatchNorm takes from exactness, once."""
        note, self._batch_norm, self._asks_statistics = self._batch_norm, None, False
        if note is not None and (text := note.text(part)):
            print(f"hetopt: {text}", file=sys.stderr, flush=True)

    def state(self, weight: Weight | Tensor, part: Part) -> Word:
        """What the others have to know of a loss that was not looked at.

        Raises:
            BadInput: it is no weight.
        """
        return Word(own=Row.stated(_number(weight), samples=part.samples, rows=part.rows))

    def weights(self, word: Word, told: list[list[float]]) -> list[float]:
        """What the workers' gradients are multiplied with before they are summed, in rank order.

        Args:
            word: of this worker.
            told: by all of them.

        Raises:
            BadInput: no weights make the sum the gradient of the batch, or nobody can tell; on all workers.
        """
        try:
            return self._denominators.weigh(told)
        except BadInput:
            if could_weigh_terms([Row.read(row) for row in told]):
                with suppress(BadInput):  # the first reason is the one that says what to do
                    weights, factors = self._terms.weigh(word.terms)
                    word.factors.update(factors)
                    return weights
            if word.problem is not None and word.own.samples:
                raise word.problem from None
            live = [row for row in map(Row.read, told) if row.samples]
            if draws_of_batch_differ(live):
                raise _by_draw(word.drawn_at) from None
            if numbers_differ(live):
                raise _by_number(word.met_at) from None
            raise

    def own_weight(self, known: float | None, word: Word | None, told: list[list[float]]) -> float:
        """How much a gradient counts that is in ``.grad`` already.

        Args:
            known: what the loss told as `backward` was called; None: it was not.
            word: what the script says of it; None: nothing.
            told: by all workers, where it says something.

        Raises:
            BadInput: nobody says.
        """
        if self._world_size == 1 or self._is_local:
            return 1.0
        if word is not None:
            return self.weights(word, told)[self._rank]
        if known is None:
            raise BadInput(
                "The gradients come from a loss that the session has not seen, so how much each worker's counts cannot "
                "be told.",
                hint="call run.backward(loss) instead of loss.backward(), or run.sync(weight=n) after it, n being what "
                "the loss is a mean over (samples, tokens)",
            )
        return known

    def _own_factor(self, loss: Tensor, weight: Weight | Tensor | None, part: Part) -> float:
        """0, if a worker's samples are another's; a sum over some of the samples is multiplied up to one over the whole
        batch, as parameters are averaged by samples."""
        if self._is_sum is None:
            word = self.look(loss, weight, part)
            rows = [Row.read(numbers) for numbers in gather_numbers(word.own.numbers(), self._world_size)]
            if word.problem is not None and word.own.samples:
                raise word.problem
            said = {row.said for row in rows if row.samples}
            if said <= {Said.SUM, Said.STATED_SUM} or Said.UNKNOWN in said:
                self._is_sum = self._denominators.weights(rows) == [float(row.samples > 0) for row in rows]
            else:
                self._is_sum = False
        if part.samples == 0:
            return 0.0
        return part.batch / part.samples if self._is_sum else 1.0

    def note_total(self, total: float) -> None:
        """What all workers have counted together."""
        self._denominators.note_total(total)
        self._terms.note_total(total)

    @property
    def may_weigh_terms(self) -> bool:
        """Whether terms of the present loss may have to be weighed, on all workers: before its backward pass."""
        return self._terms.are_weighed or self._batches <= _HEARD

    def changed_at(self, name: str) -> str | None:
        """The line where the script last changed the gradient of a parameter that was summed; None: unknown."""
        return None if self._kept is None else self._kept.changed.get(name)

    def note_summed(self) -> None:
        """What is in ``.grad`` is of all workers."""
        if self._kept is not None:
            self._kept.summed()

    def close(self) -> None:
        """Look at nothing any more."""
        self._end_batch()
        self._end_earlier()

    def _end_batch(self) -> None:
        for one in (self._outputs, self._batch_norm, self._padding):
            if one is not None:
                one.close()
        if self._statistics is not None:
            self._ended.append(self._statistics)
        self._ended = _still_there(self._ended)
        self._outputs = self._batch_norm = self._statistics = self._padding = None

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What torch is called with inside is not the script's doing."""
        listeners = [one for one in (self._statistics, self._kept) if one is not None and one.is_listening]
        for one in listeners:
            one.is_listening = False
        try:
            yield
        finally:
            for one in listeners:
                one.is_listening = one in (self._statistics, self._kept)

    def _row(
        self, loss: Tensor, weight: Weight | Tensor | None, part: Part, beside: Mapping[int, Beside]
    ) -> tuple[Row, tuple[Term, ...], BadInput | None]:
        """What a loss is, its terms where they may have to be weighed, and why nobody can tell."""
        rows = part.rows
        if weight is not None:
            try:
                return Row.stated(_number(weight), samples=part.samples, rows=rows), (), None
            except BadInput as error:
                return Row(samples=part.samples, rows=rows, said=Said.UNKNOWN), (), error
        of_one = {} if self._statistics is None else self._statistics.of_one
        reading: LossReading = read_loss(loss, rows, of_one, beside, part.lengths)
        self._is_by_sample |= reading.is_by_sample
        terms: tuple[Term, ...] = ()
        if len(reading.terms) > 1 and self.may_weigh_terms:
            values = {} if self._kept is None else self._kept.values
            terms = self._terms.of(reading, samples=part.samples, rows=rows, values=values)
        own = Row.of(reading, samples=part.samples, rows=rows)
        return own, terms, _unknown(reading) if reading.kind == "unknown" else None


def is_heard(number: int) -> bool:
    """Whether it is asked of the losses of a batch whether samples meet: of the first three and, as scripts have phases
    (a warm-up without mixup), of three from the 256th, 1,024th, 4,096th ... on.

    What lasts three times as long as all before is met. From each power of two on, a session's step of ResNet-20 took
    1.09 times that of DistributedDataParallel in its first hundred steps, where it takes 1.0 without.

    Args:
        number: of the batch, from 0.
    """
    power = number.bit_length() - 1
    return number < _HEARD or (power >= _AGAIN and power % 2 == 0 and number - (1 << power) < _HEARD)


def _lengths(part: Part, beside: Mapping[int, Beside]) -> set[int]:
    """Of what a model may be given of a batch and those of other loaders together, a few views of each."""
    lengths = {0}
    for rows in {part.rows, *beside}:
        lengths = {length + views * rows for length in lengths for views in range(_MOST_VIEWS + 1)}
    return {*lengths, *part.lengths}


_MOST_VIEWS = 4

_HEARD = 3
"""Batches at a time: what is kept from the second on is in the third's loss."""

_AGAIN = 8
"""The power of two from which on they are heard again."""


def _still_there(ended: list[Listener]) -> list[Listener]:
    """Those that the script has put something above; the others are out of torch's way."""
    return [one for one in reversed(ended) if not one.end()][::-1]


def _number(weight: Weight | Tensor) -> Weight:
    return float(weight) if isinstance(weight, Tensor) else weight


def _unknown(reading: LossReading) -> BadInput:
    hint = {"terms": TERMS_HINT, "bent": NOT_A_MEAN_HINT}.get(reading.unread, WEIGHT_HINT)
    return BadInput(f"How much each worker's gradient counts cannot be told: the loss {reading.problem}.", hint=hint)


NOT_A_MEAN_HINT = (
    "a function of a mean (its absolute value, root or logarithm, a limit to it, a product or quotient of two) is not "
    "the mean of those of parts, whatever the weight: compute it of the outputs of all workers, "
    f"outputs = run.gather(outputs); where it is a mean or a sum all the same, {WEIGHT_HINT}"
)
"""What is right for losses that only look like means."""


TERMS_HINT = (
    "call run.backward for each term, with weight=n where it is a mean over n chosen ones, and retain_graph=True but "
    "for the last; or run.backward(loss, weight=n) if all of them are means over the same n"
)
"""What works where terms have denominators of their own."""


def _unclear() -> BadInput:
    return BadInput(
        "The loss comes of operators of which nobody can tell whether they compare the samples of a batch with each "
        "other.",
        hint="if it does (the hardest of the batch, distances between samples), compute it of the features of all "
        f"workers, features = run.gather(features); if it does not, {WEIGHT_HINT}",
    )


def _by_statistic(part: Part, place: str) -> BadInput:
    return not_of_the_batch(
        "A statistic over the samples (a mean, a gradient) comes back to each of them, or they meet others, or some "
        f"are chosen among them, at {place}, and this worker has {part.samples} of {part.batch}",
        "compute that of the samples of all workers, whole = run.gather(rows), or before the batch is shared out",
    )


def _by_number(place: str) -> BadInput:
    return BadInput(
        f"The samples meet a number at {place or 'some line'} that is another one on each worker, as each has drawn it "
        "or computed it of its own share: the gradients of parts are not the gradient of the batch.",
        hint=NUMBERS_HINT,
    )


def _by_draw(place: str) -> BadInput:
    return BadInput(
        f"What torch draws at {place or 'some line'} is one for the whole batch (a coin, a size, an order, noise), and "
        "each worker draws another: the gradients of parts are not the gradient of the batch.",
        hint=DRAWS_HINT,
    )


def _by_padding(read: Padding) -> BadInput:
    return not_of_the_batch(
        f"The loss depends on how long samples are padded (one of {read.needed} to {read.length}) by {read.by}, and "
        "each worker pads to the longest of its own",
        "leave padding out by a mask or by packing, or pad all samples to one length in the collate function",
    )


def _by_collate(name: str) -> BadInput:
    return not_of_the_batch(
        f"The loader's collate function {name} brings samples of a batch together (mixup, negatives, a statistic), and "
        "each worker has its own samples alone",
        "do that in the loop with the samples of all workers, whole = run.gather(rows)",
    )


def _by_hook(name: str) -> BadInput:
    return not_of_the_batch(
        f"A hook, or a torch.autograd.Function in its backward, changes the gradient of {name} by more than a factor "
        "(clips, normalises or adds to it), of each worker's samples alone",
        "change .grad after run.backward(loss), where it is of all workers, and before optimizer.step()",
    )


def _of_earlier(part: Part, what: str) -> BadInput:
    return BadInput(
        f"The loss depends on samples of an earlier batch, by {what}, and of those this worker had its own alone, as "
        f"of this one {part.samples} of {part.batch}: the gradients of parts are not the gradient of the batch.",
        hint=EARLIER_HINT,
    )


def _coupled(part: Part) -> BadInput:
    return not_of_the_batch(
        "The loss of a sample depends on the other samples of its batch, as contrastive losses do, and this worker has "
        f"{part.samples} of {part.batch}",
        "compute it of the features of all workers, features = run.gather(features), and call run.backward(loss)",
    )
