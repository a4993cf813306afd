"""Whether all workers are at the same point of the script: each says what it is about to do before it does it.

A worker that skipped a batch, left the loop or took another branch would otherwise add its gradient to that of another
batch, or wait for ever. Its word is a message of one size, whatever it is about to do, so that those who are about to
do different things learn of it. The message has room for a few numbers, and for a gradient that is small: such a step
has no other message. A larger gradient comes after the word, which travels while backward runs.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.peers import Guard, LostPeer, workers
from hetopt.trainer.failure import OthersFailed
from hetopt.trainer.likeness import CLOSE
from hetopt.trainer.session.batches import Place


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

TOGETHER = "leave a loop, or skip a batch, on all workers or on none: decide by a figure they share, run.mean(...)"
"""What to do where some workers are elsewhere in the script."""

_GOODBYE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a worker is about to do.

    Attributes:
        session: number of the session in the process.
        deed: what.
        step: of the session, from 1 on.
        place: of the batch that the script was given last.
        samples: fingerprint of the samples of that batch, where every worker reads them for itself; 0: not known.
        structure: fingerprint of which parameters are trained.
        told: how many numbers the worker tells with it.
        options: fingerprint of the optimizer's options.
    """

    session: int
    deed: Deed
    step: int
    place: Place = (0, 0)
    samples: int = 0
    structure: int = 0
    told: int = 0
    options: float = 0.0

    def to_list(self) -> list[float]:
        """The turn as numbers, which workers can gather."""
        own = (self.session, self.deed, self.step, *self.place, self.samples, self.structure, self.told, self.options)
        return [float(one) for one in own]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> Turn:
        """The turn that `to_list` wrote."""
        session, deed, step, epoch, batch, samples, structure, told = (int(one) for one in row[:-1])
        return cls(
            session=session,
            deed=Deed(deed),
            step=step,
            place=(epoch, batch),
            samples=samples,
            structure=structure,
            told=told,
            options=row[-1],
        )


_WORD = len(fields(Turn)) + 1  # as numbers: a place is two
_TOLD = _WORD - 2  # place of Turn.told
_HEAD = _WORD + 1 + MOST_TOLD


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What the workers said, in rank order, who are about to do the same.

    Attributes:
        told: their numbers.
        loads: [workers, room] what each message carried; None: those of some carried nothing.
    """

    told: list[list[float]]
    loads: Tensor | None = None


class Disagreement(RunFailed):
    """The workers are at different points of the script, as all of them know now."""


class WorkerFailed(Disagreement, OthersFailed):
    """A worker ends with an error, as the others know from it."""


class StructureDiffers(Disagreement):
    """Some workers train other parameters than others."""


class OptionsDiffer(Disagreement):
    """The optimizers' options are not the same on all workers."""


class Turns:
    """One worker's end.

    Args:
        world_size: workers.
        store: that they met through, for a roll call when somebody does not come.
        room: float64 numbers that every message can carry.

    Attributes:
        load: [room] what the next message carries.
    """

    def __init__(self, *, world_size: int, store: Store | None, room: int = 0) -> None:
        self._world_size = world_size
        self._guard = Guard(f"session, room for a gradient of {8 * room} bytes in each message", store=store)
        with self._guard.watch():  # the others become known while nothing can go wrong yet
            pass
        self._pending: Pending | None = None
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True
        self.make_room(room)

    def make_room(self, room: int) -> None:
        """Messages have so much room from the next one on; on all workers."""
        self._sent = torch.zeros(self._world_size, _HEAD + room, dtype=torch.float64)
        self._received = torch.zeros_like(self._sent)
        self._head: npt.NDArray[np.float64] = self._sent[0, :_HEAD].numpy()
        self._own, self._others = self._sent[0], self._sent[1:]
        self._flat = self._received.view(-1), self._sent.view(-1)
        self.load, self._loads = self._sent[0, _HEAD:], self._received[:, _HEAD:]

    def begin(self, turn: Turn, told: Sequence[float] = (), *, loaded: bool = False) -> Pending:
        """Say what this worker is about to do; `Pending.wait` is before it does, and before it says anything else.

        Args:
            turn: that.
            told: as many numbers as ``turn.told``.
            loaded: whether the others need the load if all of them are about to do this.
        """
        before, self._pending = self._pending, None
        if before is not None:
            before.wait()
        word = turn.to_list()
        self._head[: _WORD + 1 + len(told)] = [*word, loaded, *told]
        self._others.copy_(self._own)
        watched = Watched(turn.step, self._guard)
        with watched:
            # The tensors are those of every step: what `dist.all_to_all_single` checks takes longer than to send them.
            work = dist.group.WORLD.alltoall_base(*self._flat, [], [], self._options)  # type: ignore[union-attr]
        self._pending = Pending(word, work, self._received, self._loads, watched)
        return self._pending

    def take(self, turn: Turn) -> None:
        """Say it, and wait for the others' word.

        Raises:
            Disagreement: they are about to do something else; all of them raise it.
            RunFailed: one of them is gone.
        """
        self.begin(turn).wait()

    def watch(self, step: int) -> Watched:
        """Collectives inside that fail for want of a worker become one sentence with the step.

        Raises:
            RunFailed: one does.
        """
        return Watched(step, self._guard)

    def fail(self, turn: Turn) -> None:
        """This worker ends with an error: tell the others if they listen."""
        before, self._pending = self._pending, None
        try:
            if before is not None:
                before.work.wait(datetime.timedelta(seconds=_GOODBYE_S))
            self.begin(turn).work.wait(datetime.timedelta(seconds=_GOODBYE_S))
        except (RuntimeError, RunFailed):
            return  # nobody listens: they learn of it as the connection breaks


class Pending:
    """The word of all workers, on its way.

    Args:
        own: of this worker, as numbers.
        work: brings them.
        received: [workers, numbers] where they come to.
        loads: [workers, room] likewise.
        watched: names who does not come.
    """

    def __init__(self, own: list[float], work: dist.Work, received: Tensor, loads: Tensor, watched: Watched) -> None:
        self._own = own
        self.work = work
        self._received = received
        self._loads = loads
        self._watched = watched
        self._heard: Heard | None = None

    def wait(self) -> Heard:
        """Wait for it: all workers are about to do the same.

        Raises:
            Disagreement: they are not; all of them raise it.
            RunFailed: one of them is gone.
        """
        if self._heard is not None:
            return self._heard
        with self._watched:
            self.work.wait()
        last = _WORD + 1 + int(self._own[_TOLD])
        heads = self._received[:, :last].tolist()
        words = [head[:_WORD] for head in heads]
        first = words[0]  # compared with on all workers, so that they find alike
        if any(word != first and not _alike(word, first) for word in words):
            raise disagreement([Turn.from_list(word) for word in words])
        carried = all(head[_WORD] for head in heads)
        self._heard = Heard(told=[head[_WORD + 1 :] for head in heads], loads=self._loads if carried else None)
        return self._heard


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two words are the same, but for the last bits of the options."""
    return one[:-1] == other[:-1] and math.isclose(one[-1], other[-1], rel_tol=CLOSE)


class Watched:
    """Collectives inside that fail for want of a worker become one sentence with the step."""

    def __init__(self, step: int, guard: Guard) -> None:
        self._step = step
        self._watch = guard.watch()

    def __enter__(self) -> None:
        self._watch.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._watch.__exit__(kind, error, trace)
        except LostPeer as lost:
            raise OthersFailed(
                f"{str(lost)[:200]}, at step {self._step}.", hint="see what that worker printed"
            ) from lost


def disagreement(turns: Sequence[Turn]) -> Disagreement:
    """Who does something else than the others, in a sentence.

    Args:
        turns: of all workers, in rank order; not all alike.
    """

    def split(values: Sequence[object]) -> tuple[str, int, int] | None:
        """Those that differ from most workers, the first of them, and one of the others."""
        if len(set(values)) == 1:
            return None
        usual = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(values) if value != usual]
        return workers(others), others[0], values.index(usual)

    failed = [rank for rank, turn in enumerate(turns) if turn.deed is Deed.FAIL]
    if failed:
        return WorkerFailed(
            f"{workers(failed)} ended with an error at step {turns[failed[0]].step}.",
            hint=f"see what {workers(failed)} printed",
        )
    found = split([(turn.session, turn.deed) for turn in turns])
    if found is not None:
        who, one, other = found
        closed = [rank for rank, turn in enumerate(turns) if turn.deed is Deed.CLOSE]
        if closed:
            who, one = workers(closed), closed[0]
            other = next(rank for rank in range(len(turns)) if rank not in closed)
        mine, its = turns[other], turns[one]
        session = f" of session {its.session}" if its.session != mine.session else ""
        return Disagreement(
            f"{who} {_WORDS[its.deed]}{session} at step {its.step} ({_at(its.place)}) while worker {other} "
            f"{_WORDS[mine.deed]} at step {mine.step} ({_at(mine.place)}).",
            hint=TOGETHER,
        )
    found = split([turn.place for turn in turns]) or split([turn.step for turn in turns])
    if found is not None:
        who, one, other = found
        mine, its = turns[other], turns[one]
        return Disagreement(
            f"{who} summed gradients of {_at(its.place)} as step {its.step}, and worker {other} those of "
            f"{_at(mine.place)} as step {mine.step}: a batch or a step was skipped on some workers alone.",
            hint=TOGETHER,
        )
    found = split([turn.samples for turn in turns])
    if found is not None:
        who, one, other = found
        return Disagreement(
            f"{who} read other samples than worker {other} at step {turns[one].step} ({_at(turns[one].place)}): the "
            "iterable dataset does not give all workers the same samples in the same order.",
            hint="leave out its splitting by rank, and seed its shuffling alike: the session shares out every batch",
        )
    step = turns[0].step
    found = split([turn.structure for turn in turns])
    if found is not None:
        return StructureDiffers(f"{found[0]} trains other parameters than worker {found[2]} at step {step}.")
    found = split([turn.told for turn in turns])
    if found is not None:
        return Disagreement(
            f"{found[0]} {_WORDS[turns[0].deed]} at step {step} by another call than worker {found[2]}, or with other "
            "arguments.",
            hint="call the session alike on all workers: run.backward for the loss, run.sync and run.log with the same",
        )
    who, _, other = split([turn.options for turn in turns]) or ("a worker", 0, 0)
    return OptionsDiffer(f"{who} has other options of the optimizer than worker {other} at step {step}.")


def _at(place: Place) -> str:
    return f"batch {place[1] + 1} of epoch {place[0] + 1}"
