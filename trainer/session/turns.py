"""Whether all workers are at the same point of the script: each says what it is about to do before it does it.

A worker that skipped a batch, left the loop or took another branch would otherwise add its gradient to that of another
batch, or wait for ever. The word travels while backward runs, so that it costs next to nothing.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

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
}

_TOGETHER = "leave a loop, or skip a batch, on all workers or on none: decide by a figure they share, run.mean(...)"
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
        options: fingerprint of the optimizer's options.
    """

    session: int
    deed: Deed
    step: int
    place: Place = (0, 0)
    samples: int = 0
    structure: int = 0
    options: float = 0.0

    def to_list(self) -> list[float]:
        """The turn as numbers, which workers can gather."""
        return [
            float(one)
            for one in (self.session, self.deed, self.step, *self.place, self.samples, self.structure, self.options)
        ]

    @classmethod
    def from_list(cls, row: Sequence[float]) -> Turn:
        """The turn that `to_list` wrote."""
        session, deed, step, epoch, batch, samples, structure = (int(one) for one in row[:-1])
        return cls(
            session=session,
            deed=Deed(deed),
            step=step,
            place=(epoch, batch),
            samples=samples,
            structure=structure,
            options=row[-1],
        )


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
    """

    def __init__(self, *, world_size: int, store: Store | None) -> None:
        self._world_size = world_size
        self._guard = Guard("session", store=store)
        with self._guard.watch():  # the others become known while nothing can go wrong yet
            pass

    def begin(self, turn: Turn) -> Pending:
        """Say what this worker is about to do; `Pending.wait` is before it does."""
        return Pending(turn, self._guard, self._world_size)

    def take(self, turn: Turn) -> None:
        """Say it, and wait for the others' word.

        Raises:
            Disagreement: they are about to do something else; all of them raise it.
            RunFailed: one of them is gone.
        """
        self.begin(turn).wait()

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Collectives inside that fail for want of a worker become one sentence with the step.

        Raises:
            RunFailed: one does.
        """
        with _lost_at(step, self._guard):
            yield

    def fail(self, turn: Turn) -> None:
        """This worker ends with an error: tell the others if they listen."""
        try:
            pending = self.begin(turn)
            if pending.work is not None:
                pending.work.wait(datetime.timedelta(seconds=_GOODBYE_S))
        except (RuntimeError, RunFailed):
            return  # nobody listens: they learn of it as the connection breaks


class Pending:
    """The word of all workers, on its way."""

    def __init__(self, own: Turn, guard: Guard, world_size: int) -> None:
        self._own = own
        self._guard = guard
        self.work: dist.Work | None = None
        if world_size > 1:
            row = torch.tensor(own.to_list(), dtype=torch.float64)
            self._rows = torch.empty(world_size * len(row), dtype=torch.float64)
            with _lost_at(own.step, guard):
                self.work = dist.all_to_all_single(self._rows, row.repeat(world_size), async_op=True)

    def wait(self) -> None:
        """Wait for it: all workers are about to do the same.

        Raises:
            Disagreement: they are not; all of them raise it.
            RunFailed: one of them is gone.
        """
        if self.work is None:
            return
        with _lost_at(self._own.step, self._guard):
            self.work.wait()
        rows = self._rows.view(-1, len(self._own.to_list()))
        if not torch.allclose(rows, rows[0], rtol=CLOSE, atol=0):
            raise disagreement([Turn.from_list(row) for row in rows.tolist()])


@contextmanager
def _lost_at(step: int, guard: Guard) -> Iterator[None]:
    """Collectives inside that fail for want of a worker become one sentence with the step."""
    try:
        with guard.watch():
            yield
    except LostPeer as error:
        raise OthersFailed(f"{str(error)[:200]}, at step {step}.", hint="see what that worker printed") from error


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
            hint=_TOGETHER,
        )
    found = split([turn.place for turn in turns]) or split([turn.step for turn in turns])
    if found is not None:
        who, one, other = found
        mine, its = turns[other], turns[one]
        return Disagreement(
            f"{who} summed gradients of {_at(its.place)} as step {its.step}, and worker {other} those of "
            f"{_at(mine.place)} as step {mine.step}: a batch or a step was skipped on some workers alone.",
            hint=_TOGETHER,
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
    who, _, other = split([turn.options for turn in turns]) or ("a worker", 0, 0)
    return OptionsDiffer(f"{who} has other options of the optimizer than worker {other} at step {step}.")


def _at(place: Place) -> str:
    return f"batch {place[1] + 1} of epoch {place[0] + 1}"
