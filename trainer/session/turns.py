"""Checks that all workers are at the same point of the script: each tells what it is about to do before it does it.

A worker that skipped a batch, left the loop or took another branch would otherwise add its gradient to that of another
batch, or wait for ever. Its word is a message of one size, whatever it is about to do, so that those who are about to
do different things learn of it: the word, a few numbers that are summed, and room for a gradient that is small: such a
step has no other message.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetopt.core.errors import RunFailed
from hetopt.trainer.comm.peers import Guard, LostPeer, workers
from hetopt.trainer.failure import OthersFailed
from hetopt.trainer.script.batches import Part

Action: TypeAlias = Literal[
    "ended with an error",
    "ended its session",
    "summed gradients",
    "began to draw batches",
    "came to the end of its data",
    "called run.mean",
    "averaged models",
    "called run.checkpoint",
    "called run.resume",
    "called run.gather",
    "called run.total",
    "called optimizer.step()",
]
"""What a worker is about to do with the others."""

ACTIONS = get_args(Action)

MOST_NUMBERS = 64
"""Number of values in a message that are summed over the workers, besides a gradient."""

_FIELDS = ("session", "action", "step", "epoch", "batch", "mark", "trained")

_HINT = "leave a loop, or skip a batch, on all workers or on none: decide by a figure they share, run.mean(...)"
_GOODBYE_S = 5.0


class Disagreement(RunFailed):
    """The error that the workers are at different points of the script; all of them raise it."""


class WorkerFailed(Disagreement, OthersFailed):
    """The error that the others raise because one worker has ended with an error, which that worker explains itself."""


class StepMessages(Guard):
    """The messages by which workers check that they are at the same point of the script, and sum a few numbers.

    Every worker must make one, with equal arguments but ``rank``; a single worker checks nothing. As a context manager
    around communication, the object names a worker that is lost inside.

    Args:
        number: number of the session in this process, from 1.
        rank: rank of this worker.
        world_size: number of workers.
        store: store that they met through, for a roll call when a worker does not come; None: no roll call.
        room: float64 values of a gradient that every message can carry; 0: none.

    Attributes:
        load: [room] gradient that the next message carries.
        loaded: [room] the sum over workers of what their last messages carried.
        waited_s: seconds of this step in which this worker waited for the others' messages.
        step: number of steps done.
        trained: number of elements of the parameters that are trained.
        number: number of the session in this process, from 1.
    """

    def __init__(self, *, number: int, rank: int, world_size: int, store: Store | None, room: int = 0) -> None:
        self.number, self.step, self.trained = number, 0, 0
        self._rank, self._world_size = rank, world_size
        super().__init__(f"session, room for a gradient of {8 * room} bytes in each message", store=store)
        self._work: dist.Work | None = None
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True
        self.room, self.waited_s, self._totals = room, 0.0, list[float]()
        sizes = [len(_FIELDS), MOST_NUMBERS, room]
        with self:  # the others become known while nothing can go wrong yet
            self._sent = torch.zeros(world_size, sum(sizes), dtype=torch.float64)
        self._received, self._sums = torch.zeros_like(self._sent), torch.zeros(sum(sizes[1:]), dtype=torch.float64)
        self._head, self.load = self._sent[0, : sum(sizes[:2])], self._sent[0, sum(sizes[:2]) :]
        self._words, self._numbers = torch.split(self._received, [sizes[0], sum(sizes[1:])], 1)
        self.loaded = self._sums[MOST_NUMBERS:]

    def begin(self, action: Action, part: Part | None, numbers: Sequence[float] = (), *, mark: int = 0) -> None:
        """Send all workers the ``action`` that this one is about to do, and numbers to sum; `finish` waits for theirs.

        A message under way is finished first.

        Args:
            action: what this worker is about to do.
            part: part of the batch that the script was given last; None: there was none.
            numbers: numbers that are summed over the workers, at most 64.
            mark: checksum of the arguments that have to be equal on all workers; 0: there are none.

        Raises:
            RunFailed: the workers' messages before this one differ, or a worker is gone.
        """
        self.finish()
        if self._world_size == 1:
            self._totals = list(numbers)
            return
        place, mark_of_part = ((0, 0), 0) if part is None else (part.place, part.mark)
        step = self.step + (
            action != "called optimizer.step()"
        )  # an optimizer steps by a gradient that was counted already
        word = (self.number, ACTIONS.index(action), step, *place, mark_of_part ^ mark, self.trained)
        rest = [0.0] * (MOST_NUMBERS - len(numbers))
        self._head.copy_(torch.tensor([*word, *numbers, *rest], dtype=torch.float64))
        self._sent[1:].copy_(self._sent[0])
        with self:
            # The tensors are those of every step: what `dist.all_to_all_single` checks takes longer than to send them.
            self._work = dist.group.WORLD.alltoall_base(  # type: ignore[union-attr]
                self._received.view(-1), self._sent.view(-1), [], [], self._options
            )

    def finish(self) -> list[float]:
        """Wait for all workers' messages; return 64 sums, zeros behind; raise if actions differ or a worker is gone.

        Returns:
            As many as a message has, 64: the sums, and zeros behind them; of a single worker its numbers alone. Without
            a message under way those of the last one.

        Raises:
            RunFailed: workers are about to do different things, or one is gone; all of them raise it.
        """
        work, self._work = self._work, None
        if work is not None:
            begun_s = time.perf_counter()
            with self:
                work.wait()
            self.waited_s += time.perf_counter() - begun_s
            words = self._words.tolist()
            if any(word != words[0] for word in words):
                raise disagreement(words)
            torch.sum(self._numbers, 0, out=self._sums)
            self._totals = self._sums[:MOST_NUMBERS].tolist()
        return self._totals

    def take(self, action: Action, part: Part | None, numbers: Sequence[float] = (), *, mark: int = 0) -> list[float]:
        """Send ``action`` and numbers, wait for all workers', and return the sums (see `begin` and `finish`).

        Args:
            action: name of what this worker is about to do.
            part: its part of the batch at hand; None: there is none.
            numbers: numbers to be summed over the workers; as many on all of them.
            mark: fingerprint of what all must have alike, see `begin`; 0: nothing.

        Raises:
            RunFailed: workers are about to do different things, or one is gone; all of them raise it.
        """
        self.begin(action, part, numbers, mark=mark)
        return self.finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave as `Guard`, with the step in the error of a lost worker.

        Raises:
            OthersFailed: another worker left in the middle.
        """
        try:
            super().__exit__(kind, error, trace)
        except LostPeer as lost:
            raise OthersFailed(
                f"{str(lost)[:200]}, at step {self.step + 1}.", hint="see what that worker printed"
            ) from lost

    def fail(self, part: Part | None) -> None:
        """Tell the other workers, if they listen, that this one ends with an error; raise nothing if they do not.

        It waits up to 5 s for them. ``part`` is that of the batch that the script was given last; None: there was none.
        """
        with suppress(RuntimeError, RunFailed):  # nobody listens: they learn of it as the connection breaks
            self.begin("ended with an error", part)
            if self._work is not None:
                self._work.wait(datetime.timedelta(seconds=_GOODBYE_S))


def disagreement(words: Sequence[Sequence[float]]) -> Disagreement:
    """Return, not raise, the error that names the workers at another point of the script than the others.

    Args:
        words: [workers][7] the heads of the messages (session, action, step, epoch, batch, mark, elements trained), in
            rank order; not all alike.

    Returns:
        A `WorkerFailed` if one has ended with an error, else a `Disagreement` that says what differs.
    """
    turns = [dict(zip(_FIELDS, map(int, word), strict=True)) for word in words]

    def deed(rank: int) -> str:
        """Return a rank's action with step, batch and epoch, in words."""
        turn = turns[rank]
        at = f"batch {turn['batch'] + 1} of epoch {turn['epoch'] + 1}"
        return f"{ACTIONS[turn['action']]} at step {turn['step']} ({at})"

    keys = [tuple(turn.values()) for turn in turns]
    usual = Counter(keys).most_common(1)[0][0]
    ended = [rank for rank, turn in enumerate(turns) if ACTIONS[turn["action"]].startswith("ended")]
    strays = ended[:1] or [rank for rank, key in enumerate(keys) if key != usual]
    divergent, other = turns[strays[0]], next(rank for rank in range(len(turns)) if rank not in strays)
    if ACTIONS[divergent["action"]] == "ended with an error":
        return WorkerFailed(
            f"{workers(strays)} ended with an error at step {divergent['step']}.",
            hint=f"see what {workers(strays)} printed",
        )
    if any(turn["trained"] != divergent["trained"] for turn in turns) and not ended:
        return Disagreement(
            f"{workers(strays)} trains other parameters than worker {other} at step {divergent['step']}.",
            hint="change requires_grad on all workers at the same step",
        )
    if deed(strays[0]) == deed(other):
        return Disagreement(
            f"{workers(strays)} read other samples than worker {other}, or called the session with other arguments: "
            f"{deed(strays[0])}.",
            hint="an iterable dataset gives all workers the same samples in the same order: leave out its splitting by "
            "rank, and seed its shuffling alike; call run.log and run.mean alike on all workers",
        )
    return Disagreement(f"{workers(strays)} {deed(strays[0])} while worker {other} {deed(other)}.", hint=_HINT)
