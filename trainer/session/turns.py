"""Whether all workers are at the same point of the script: each says what it is about to do before it does it.

A worker that skipped a batch, left the loop or took another branch would otherwise add its gradient to that of another
batch, or wait for ever. Its word is a message of one size, whatever it is about to do, so that those who are about to
do different things learn of it. The message has room for a few numbers, and for a gradient that is small: such a step
has no other message. A larger gradient comes after the word, which travels while backward runs.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.peers import Guard, LostPeer, workers
from hetopt.trainer.failure import OthersFailed
from hetopt.trainer.session.batches import Part


class Deed(IntEnum):
    """What a worker is about to do with the others."""

    FAIL = 0
    CLOSE = 1
    SUM = 2
    DRAW = 3
    END_EPOCH = 4
    MEAN = 5
    AVERAGE = 6
    SAVE = 7
    RESUME = 8
    GATHER = 9
    TOTAL = 10
    TOGETHER = 11
    STEP = 12


_WORDS = {
    Deed.FAIL: "ended with an error",
    Deed.CLOSE: "ended its session",
    Deed.SUM: "summed gradients",
    Deed.DRAW: "began to draw batches",
    Deed.END_EPOCH: "came to the end of its data",
    Deed.MEAN: "called run.mean",
    Deed.AVERAGE: "averaged models",
    Deed.SAVE: "called run.checkpoint",
    Deed.RESUME: "called run.resume",
    Deed.GATHER: "called run.gather",
    Deed.TOTAL: "called run.total",
    Deed.TOGETHER: "entered run.together",
    Deed.STEP: "called optimizer.step()",
}

MOST_TOLD = 64
"""Numbers that a message has room for besides what a worker is about to do."""

_FIELDS = ("session", "deed", "step", "epoch", "batch", "samples", "trained", "told")
_WORD = len(_FIELDS)
_TOLD = _FIELDS.index("told")
_HEAD = _WORD + 1 + MOST_TOLD

_HINT = "leave a loop, or skip a batch, on all workers or on none: decide by a figure they share, run.mean(...)"
_GOODBYE_S = 5.0


class Disagreement(RunFailed):
    """The workers are at different points of the script, as all of them know now."""


class WorkerFailed(Disagreement, OthersFailed):
    """A worker ends with an error, as the others know from it."""


class Turns:
    """One worker's side. Alone, there is nobody to hear.

    Args:
        number: of the session in this process.
        world_size: workers.
        store: that they met through, for a roll call when somebody does not come.
        room: float64 numbers of a gradient that every message can carry.

    Attributes:
        load: [room] what the next message carries.
        step: steps done.
        trained: elements of the parameters that are trained.
    """

    def __init__(self, *, number: int, world_size: int, store: Store | None, room: int = 0) -> None:
        self.number, self.step, self.trained = number, 0, 0
        self._world_size = world_size
        self._guard = Guard(f"session, room for a gradient of {8 * room} bytes in each message", store=store)
        self._pending: Pending | None = None
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True
        self.load = torch.empty(0, dtype=torch.float64)
        if world_size > 1:
            with self._guard.watch():  # the others become known while nothing can go wrong yet
                pass
            self._make_room(room)

    def make_room(self, room: int) -> None:
        """Carry so many numbers of a gradient from the next message on; on all workers."""
        if self._world_size > 1 and room != len(self.load):
            self._make_room(room)

    def _make_room(self, room: int) -> None:
        self._sent = torch.zeros(self._world_size, _HEAD + room, dtype=torch.float64)
        self._received = torch.zeros_like(self._sent)
        self._head = self._sent[0, :_HEAD].numpy()
        self._flat = self._received.view(-1), self._sent.view(-1)
        self.load, self._loads = self._sent[0, _HEAD:], self._received[:, _HEAD:]

    def begin(
        self, deed: Deed, part: Part | None, told: Sequence[float] = (), *, loaded: bool = False
    ) -> Pending | None:
        """Say what this worker is about to do; `finish` is before it does.

        Args:
            deed: what.
            part: of the batch that the script was given last.
            told: numbers for the others.
            loaded: whether the load is for them.
        """
        if self._world_size == 1:
            return None
        before, self._pending = self._pending, None
        if before is not None:
            before.wait()
        place, mark = ((0, 0), 0) if part is None else (part.place, part.mark)
        step = self.step + (deed is not Deed.STEP)  # an optimizer steps by a gradient that was counted already
        word = [float(one) for one in (self.number, deed, step, *place, mark, self.trained, len(told))]
        self._head[: _WORD + 1 + len(told)] = [*word, loaded, *told]
        self._sent[1:].copy_(self._sent[0])
        with self.watched():
            # The tensors are those of every step: what `dist.all_to_all_single` checks takes longer than to send them.
            work = dist.group.WORLD.alltoall_base(*self._flat, [], [], self._options)  # type: ignore[union-attr]
        self._pending = Pending(word, work, self._received, self._loads, self.watched())
        return self._pending

    def finish(self, pending: Pending | None) -> tuple[list[list[float]], Tensor | None]:
        """Return what all workers told, in rank order, and [workers, room] what they carried; None: some nothing.

        Raises:
            RunFailed: they are about to do something else, or one is gone; all of them raise it.
        """
        return ([], None) if pending is None else pending.wait()

    def take(self, deed: Deed, part: Part | None, told: Sequence[float] = ()) -> list[list[float]]:
        """Say it, wait for the others' word, and return what all workers told."""
        return [list(told)] if self._world_size == 1 else self.finish(self.begin(deed, part, told))[0]

    @contextmanager
    def drawing(self, part: Part | None) -> Iterator[None]:
        """Let the workers agree on batches inside."""
        self.take(Deed.DRAW, part)
        with self.watched():
            yield

    def drawn_by_first(self, part: Part | None, numbers: Sequence[int]) -> list[int]:
        """Return what rank 0 has drawn; all workers ask.

        Args:
            part: of the batch that the script was given last.
            numbers: of rank 0; of the others none.
        """
        if self._world_size == 1:
            return list(numbers)
        count = int(self.take(Deed.DRAW, part, [len(numbers)])[0][0])
        told = torch.tensor(numbers, dtype=torch.int64) if numbers else torch.empty(count, dtype=torch.int64)
        with self.watched():
            dist.broadcast(told, src=0)
        return told.tolist()

    def watched(self) -> AbstractContextManager[None]:
        """Name a worker that is lost while all workers do the same inside.

        Raises:
            RunFailed: one is.
        """
        return nullcontext() if self._world_size == 1 else _named_loss(self._guard, self.step + 1)

    def fail(self, part: Part | None) -> None:
        """Tell the others, if they listen, that this worker ends with an error."""
        before, self._pending = self._pending, None
        try:
            if before is not None:
                before.work.wait(datetime.timedelta(seconds=_GOODBYE_S))
            pending = self.begin(Deed.FAIL, part)
            if pending is not None:
                pending.work.wait(datetime.timedelta(seconds=_GOODBYE_S))
        except (RuntimeError, RunFailed):
            return  # nobody listens: they learn of it as the connection breaks


class Pending:
    """The word of all workers, on its way.

    Args:
        own: of this worker, as numbers.
        work: brings them.
        received: [workers, numbers] where they come to.
        loads: [workers, room] the gradients that come with them.
        watched: names who does not come.
    """

    def __init__(
        self,
        own: list[float],
        work: dist.Work,
        received: Tensor,
        loads: Tensor,
        watched: AbstractContextManager[None],
    ) -> None:
        self._own, self.work, self._received, self._loads, self._watched = own, work, received, loads, watched
        self._heard: tuple[list[list[float]], Tensor | None] | None = None

    def wait(self) -> tuple[list[list[float]], Tensor | None]:
        """Wait for it (see `Turns.finish`)."""
        if self._heard is None:
            with self._watched:
                self.work.wait()
            heads = self._received[:, : _WORD + 1 + int(self._own[_TOLD])].tolist()
            words = [head[:_WORD] for head in heads]
            if any(word != words[0] for word in words):
                raise disagreement(words)
            carried = all(head[_WORD] for head in heads)
            self._heard = [head[_WORD + 1 :] for head in heads], self._loads if carried else None
        return self._heard


@contextmanager
def _named_loss(guard: Guard, step: int) -> Iterator[None]:
    try:
        with guard.watch():
            yield
    except LostPeer as lost:
        raise OthersFailed(f"{str(lost)[:200]}, at step {step}.", hint="see what that worker printed") from lost


def disagreement(words: Sequence[Sequence[float]]) -> Disagreement:
    """Return who does something else than the others, in a sentence.

    Args:
        words: of all workers, in rank order; not all alike.
    """
    turns = [dict(zip(_FIELDS, map(int, word), strict=True)) for word in words]

    def said(rank: int) -> str:
        turn = turns[rank]
        at = f"batch {turn['batch'] + 1} of epoch {turn['epoch'] + 1}"
        return f"{_WORDS[Deed(turn['deed'])]} at step {turn['step']} ({at})"

    failed = [rank for rank, turn in enumerate(turns) if turn["deed"] == Deed.FAIL]
    if failed:
        who = workers(failed)
        return WorkerFailed(
            f"{who} ended with an error at step {turns[failed[0]]['step']}.", hint=f"see what {who} printed"
        )
    if len({(turn["deed"], turn["step"], turn["epoch"], turn["batch"]) for turn in turns}) == 1:
        others = [rank for rank, turn in enumerate(turns) if turn != turns[0]]
        if len({turn["trained"] for turn in turns}) > 1:
            return Disagreement(
                f"{workers(others)} trains other parameters than worker 0 at step {turns[0]['step']}.",
                hint="change requires_grad on all workers at the same step",
            )
        return Disagreement(
            f"{workers(others)} read other samples than worker 0, or called the session with other arguments: "
            f"{said(others[0])}.",
            hint="an iterable dataset gives all workers the same samples in the same order: leave out its splitting by "
            "rank, and seed its shuffling alike; call run.log and run.mean alike on all workers",
        )
    closed = [rank for rank, turn in enumerate(turns) if turn["deed"] == Deed.CLOSE]
    keys = [tuple(turn.values()) for turn in turns]
    usual = Counter(keys).most_common(1)[0][0]
    ones = closed or [rank for rank, key in enumerate(keys) if key != usual]
    other = next(rank for rank in range(len(turns)) if rank not in ones)
    return Disagreement(f"{workers(ones)} {said(ones[0])} while worker {other} {said(other)}.", hint=_HINT)
