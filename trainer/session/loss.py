"""What a session learns of a script's loss: how much each worker's gradient counts, and whether parts can add up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.inexact import BATCH_STATISTICS, WHOLE_BATCH
from hetopt.trainer.loss_reading import LossReading, read_loss
from hetopt.trainer.session.batch_norm import BatchNormNote
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.denominators import WEIGHT_HINT, Denominators, Row, Said, Weight
from hetopt.trainer.session.mixing import Outputs
from hetopt.trainer.session.whole_batch import WholeBatch, depends_on_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """One worker's word on its loss, on its way to the others."""

    own: Row
    problem: BadInput | None
    gathering: Gathering


class LossWatch:
    """One worker's end. The losses of all workers are looked at in every backward pass, which hides what that takes.

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
        self._is_local = is_local
        self._is_sum: bool | None = None  # of workers that step by their own gradients; None: not asked yet
        self._model = model
        shares = world_size > 1 and not is_local
        self._asks_coupling = shares and WHOLE_BATCH not in accepted
        self._asks_statistics = shares and rank == 0 and BATCH_STATISTICS not in accepted and not whole.normalises
        self._outputs: Outputs | None = None
        self._number = 0  # losses of the present batch that were looked at
        self._met, self._asked = {0}, set[int]()  # numbers of losses in their batch: there are, asked of coupling
        self._batch_norm: BatchNormNote | None = None

    def begin_batch(self) -> None:
        """The script gets a batch: from here on modules' outputs are kept, while there are losses to look at."""
        if self._number == 0 and (self._outputs is not None or self._batch_norm is not None):
            return  # this one is asked for ahead: the loss of the one before is still to come
        self.close()
        self._number = 0
        if self._asks_coupling and self._met - self._asked:
            self._outputs = Outputs(self._model)
        if self._asks_statistics:
            self._batch_norm = BatchNormNote(self._model)

    def backward(
        self,
        loss: Tensor,
        weight: Weight | Tensor | None,
        part: Part | None,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        met: Callable[[], None] = lambda: None,
        expect: Callable[[Callable[[], float]], None] = lambda weigh: None,
        computed: Callable[[], None] = lambda: None,
    ) -> float:
        """Backward, while the workers tell each other what their losses are; how much this worker's gradient counts.

        Args:
            loss: of this worker's part.
            weight: what the script says of it; None: nothing.
            part: of the batch.
            options: of ``Tensor.backward``.
            met: called before the others' word is waited for: they are at the same point.
            expect: called before backward with what tells, to who asks already while it runs.
            computed: called after backward.

        Raises:
            BadInput: nobody can tell; on all workers.
        """
        if part is None or self._world_size == 1:
            _backward(loss, options)
            return 1.0
        if self._is_local:
            factor = self.own_factor(loss, weight, part)
            _backward(loss if factor == 1 else factor * loss, options)
            return part.weight
        pending = self.begin(loss, weight, part)
        note, self._batch_norm, self._asks_statistics = self._batch_norm, None, False
        if note is not None and not pending.own.is_gathered:
            note.look(loss)

        @cache
        def weigh() -> float:
            met()
            return self.weights(pending)[self._rank]

        expect(weigh)
        with self._whole.backward(weigh):
            _backward(loss, options)
        computed()
        if note is not None and (text := note.text(part)):
            print(f"hetopt: {text}", file=sys.stderr, flush=True)
        return weigh()

    def weight_of(self, own: float | None, weight: Weight | Tensor | None, part: Part | None) -> float:
        """How much a gradient counts that is in ``.grad`` already.

        Args:
            own: what `backward` said; None: it was not called.
            weight: what the script says; None: nothing.
            part: of the batch.

        Raises:
            BadInput: nobody says.
        """
        if part is None or self._world_size == 1 or self._is_local:
            return 1.0
        if weight is not None:
            return self.weights(self.state(weight, part))[self._rank]
        if own is None:
            raise BadInput(
                "The gradients come from a loss that the session has not seen, so how much each worker's counts cannot "
                "be told.",
                hint="call run.backward(loss) instead of loss.backward(), or run.sync(weight=n) after it, n being what "
                "the loss is a mean over (samples, tokens)",
            )
        return own

    def begin(self, loss: Tensor, weight: Weight | Tensor | None, part: Part) -> Pending:
        """Look at a loss before its backward pass, and tell the others.

        Args:
            loss: of this worker's part.
            weight: what the script says of it; None: nothing.
            part: of the batch.
        """
        rows = part.rows
        problem: BadInput | None = None
        try:
            own = self._row(loss, weight, part, rows)
        except BadInput as error:
            own, problem = Row(samples=part.samples, rows=rows, said=Said.UNKNOWN), error
        if self._whole.was_asked and depends_on_rows(loss):
            own = replace(own, is_gathered=True, value=float(loss.detach()))
        number, self._number = self._number, self._number + 1
        self._met.add(number)
        if problem is None and self._outputs is not None and not own.is_gathered and number not in self._asked:
            found = self._outputs.look(loss, rows)
            self._asked.add(number)
            if found == "coupled" and own.said != Said.STATED_SUM:
                problem = _coupled(part)
                own = replace(own, said=Said.WHOLE_BATCH)
            elif found == "unclear" and weight is None:
                problem = _unknown("comes of operators of which nobody can tell whether they couple samples")
                own = replace(own, said=Said.UNKNOWN)
        return Pending(own=own, problem=problem, gathering=Gathering(own.numbers(), self._world_size))

    def weights(self, pending: Pending) -> list[float]:
        """What the workers' gradients are multiplied with before they are summed, in rank order.

        Raises:
            BadInput: no weights make the sum the gradient of the batch, or nobody can tell; on all workers.
        """
        rows = [Row.read(numbers) for numbers in pending.gathering.wait()]
        try:
            return self._denominators.weights(rows)
        except BadInput:
            if pending.problem is not None and pending.own.samples:
                raise pending.problem from None
            raise

    def state(self, weight: Weight | Tensor, part: Part) -> Pending:
        """Tell the others what a loss was a mean over that was not looked at.

        Raises:
            BadInput: it is no weight.
        """
        own = Row.stated(_number(weight), samples=part.samples, rows=part.rows)
        return Pending(own=own, problem=None, gathering=Gathering(own.numbers(), self._world_size))

    def own_factor(self, loss: Tensor, weight: Weight | Tensor | None, part: Part) -> float:
        """On the loss of a worker that steps by its own gradient: 0, if its samples are another worker's; a sum over
        some of the samples is multiplied up to one over the whole batch, as parameters are averaged by samples.

        Raises:
            BadInput: nobody can tell whether the loss is a sum; on all workers.
        """
        if self._is_sum is None:
            pending = self.begin(loss, weight, part)
            rows = [Row.read(numbers) for numbers in pending.gathering.wait()]
            if pending.problem is not None and pending.own.samples:
                raise pending.problem
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

    def close(self) -> None:
        """Look at nothing any more."""
        for one in (self._outputs, self._batch_norm):
            if one is not None:
                one.close()
        self._outputs = self._batch_norm = None

    def _row(self, loss: Tensor, weight: Weight | Tensor | None, part: Part, rows: int) -> Row:
        if weight is not None:
            return Row.stated(_number(weight), samples=part.samples, rows=rows)
        reading: LossReading = read_loss(loss, rows)
        if reading.kind == "unknown":
            raise _unknown(reading.problem)
        return Row.of(reading, samples=part.samples, rows=rows)


def _backward(loss: Tensor, options: Mapping[str, Any]) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's gap


def _number(weight: Weight | Tensor) -> Weight:
    return float(weight) if isinstance(weight, Tensor) else weight


def _unknown(problem: str) -> BadInput:
    return BadInput(f"How much each worker's gradient counts cannot be told: the loss {problem}.", hint=WEIGHT_HINT)


def _coupled(part: Part) -> BadInput:
    return BadInput(
        "The loss of a sample depends on the other samples of its batch, as contrastive losses do, and this worker has "
        f"{part.samples} of {part.batch}: the gradients of parts are not the gradient of the batch.",
        hint="compute it of the features of all workers, features = run.gather(features), and call run.backward(loss); "
        f'or accept the difference: session(..., accept_inexact=("{WHOLE_BATCH}",))',
    )
