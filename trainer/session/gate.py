"""Before the workers of a session do anything together: they are at the same point, and have the same to go on from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.trainer.agreement import Store
from hetopt.trainer.likeness import options_mark, structure_mark
from hetopt.trainer.script_lines import exits
from hetopt.trainer.session.alike import name_options, name_structure
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.turns import (
    TOGETHER,
    Deed,
    Disagreement,
    Heard,
    OptionsDiffer,
    Pending,
    StructureDiffers,
    Turn,
    Turns,
)

_NO_LOAD = torch.empty(0, dtype=torch.float64)


class Gate:
    """One worker's side. Alone, it is always open. ``number`` tells the sessions of a process apart.

    Args:
        model: of the session.
        optimizer: likewise.
        number: of the session in this process.
        world_size: workers.
        store: that they met through.
        room: float64 numbers' worth of gradient that travels with each word.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        number: int,
        world_size: int,
        store: Store | None,
        room: int = 0,
    ) -> None:
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._optimizer = optimizer
        self.number = number
        self._world_size = world_size
        self._turns = Turns(world_size=world_size, store=store, room=room) if world_size > 1 else None
        self._step = 0
        self._options: tuple[list[Any], float] = ([], 0.0)  # of the optimizer, and their mark

    @property
    def load(self) -> Tensor:
        """[room] what of the gradient travels with the next word; none where a worker is alone."""
        return _NO_LOAD if self._turns is None else self._turns.load

    def make_room(self, room: int) -> None:
        """For so many float64 numbers' worth of gradient, from the next word on; on all workers."""
        if self._turns is not None and room != len(self._turns.load):
            self._turns.make_room(room)

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
        turns = self._turns
        return None if turns is None else turns.begin(self._turn(deed, part, len(told)), told, loaded=loaded)

    def finish(self, pending: Pending | None) -> Heard:
        """Wait for the others' word; a worker that is alone hears nothing.

        Raises:
            RunFailed: they are about to do something else, or have other options or parameters; all raise it.
        """
        if pending is None:
            return Heard(told=[])
        step = self._step + 1
        try:
            return pending.wait()
        except OptionsDiffer:
            raise name_options(self._optimizer, step, self._world_size) from None
        except StructureDiffers:
            raise name_structure(self._optimizer, self._names, step, self._world_size) from None
        except Disagreement as error:
            if error.hint == TOGETHER and (places := exits(sys.argv[0] if sys.argv else "")):
                error.hint = f"{TOGETHER}; this script leaves or skips at {places}"
            raise

    def take(self, deed: Deed, part: Part | None, told: Sequence[float] = ()) -> list[list[float]]:
        """Say it, and wait for the others' word (see `finish`); what all workers tell."""
        return [list(told)] if self._turns is None else self.finish(self.begin(deed, part, told)).told

    @contextmanager
    def drawing(self, part: Part | None) -> Iterator[None]:
        """The workers agree on batches inside."""
        if self._turns is None:
            yield
            return
        self.take(Deed.DRAW, part)
        with self._turns.watch(self._step + 1):
            yield

    def drawn_by_first(self, part: Part | None, numbers: Sequence[int]) -> list[int]:
        """What rank 0 has drawn; all workers ask.

        Args:
            part: of the batch that the script was given last.
            numbers: of rank 0, below 2^53; of the others none.
        """
        if self._turns is None:
            return list(numbers)
        load = self._turns.load
        fits = len(numbers) <= len(load)
        if fits:
            load[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        heard = self.finish(self.begin(Deed.DRAW, part, [len(numbers)], loaded=fits))
        count = int(heard.told[0][0])
        if heard.loads is not None:
            return [int(one) for one in heard.loads[0, :count].tolist()]
        told = torch.empty(count, dtype=torch.int64)
        if numbers:
            told = torch.tensor(numbers, dtype=torch.int64)
        with self._turns.watch(self._step + 1):
            dist.broadcast(told, src=0)
        return told.tolist()

    def watched(self) -> AbstractContextManager[None]:
        """All workers do the same inside, as they know already: one that is lost meanwhile is named.

        Raises:
            RunFailed: one is.
        """
        return nullcontext() if self._turns is None else self._turns.watch(self._step)

    def fail(self, part: Part | None) -> None:
        """This worker ends with an error: the others learn of it at their next turn."""
        if self._turns is not None:
            self._turns.fail(self._turn(Deed.FAIL, part))

    def summed(self) -> None:
        """Count one more step whose gradients were summed."""
        self._step += 1

    def go_on(self, step: int) -> None:
        """So many steps were done before."""
        self._step = step

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._step

    def _turn(self, deed: Deed, part: Part | None, told: int = 0) -> Turn:
        return Turn(
            session=self.number,
            deed=deed,
            step=self._step + (deed is not Deed.STEP),  # by a gradient that was summed already
            place=(0, 0) if part is None else part.place,
            samples=0 if part is None else part.mark,
            structure=structure_mark(self._optimizer),
            told=told,
            options=self._options_mark(),
        )

    def _options_mark(self) -> float:
        """Of the optimizer's options, most of which stay for many steps."""
        now = [value for group in self._optimizer.param_groups for key, value in group.items() if key != "params"]
        if any(isinstance(value, Tensor) for value in now):  # which changes in place
            return options_mark(self._optimizer)
        if now != self._options[0]:
            self._options = now, options_mark(self._optimizer)
        return self._options[1]
