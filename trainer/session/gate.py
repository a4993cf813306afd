"""Before the workers of a session do anything together: they are at the same point, and have the same to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hetopt.trainer.agreement import Store
from hetopt.trainer.likeness import options_mark, structure_mark
from hetopt.trainer.session.alike import check_parameters_alike, name_options, name_structure
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.turns import Deed, OptionsDiffer, Pending, StructureDiffers, Turn, Turns

CHECKED_STEPS = 20
"""Steps between comparisons of all parameters."""


class Gate:
    """One worker's side. Alone, it is always open. ``number`` tells the sessions of a process apart.

    Args:
        model: of the session.
        optimizer: likewise.
        number: of the session in this process.
        world_size: workers.
        store: that they met through.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, *, number: int, world_size: int, store: Store | None
    ) -> None:
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._optimizer = optimizer
        self.number = number
        self._world_size = world_size
        self._turns = Turns(world_size=world_size, store=store) if world_size > 1 else None
        self._step = 0

    def begin(self, deed: Deed, part: Part | None) -> Pending | None:
        """Say what this worker is about to do; `finish` is before it does.

        Args:
            deed: what.
            part: of the batch that the script was given last.
        """
        return None if self._turns is None else self._turns.begin(self._turn(deed, part))

    def finish(self, pending: Pending | None) -> None:
        """Wait for the others' word.

        Raises:
            RunFailed: they are about to do something else, or have other options or parameters; all raise it.
        """
        if pending is None:
            return
        step = self._step + 1
        try:
            pending.wait()
        except OptionsDiffer:
            raise name_options(self._optimizer, step, self._world_size) from None
        except StructureDiffers:
            raise name_structure(self._optimizer, self._names, step, self._world_size) from None

    def take(self, deed: Deed, part: Part | None) -> None:
        """Say it, and wait for the others' word (see `finish`)."""
        self.finish(self.begin(deed, part))

    @contextmanager
    def drawing(self, part: Part | None) -> Iterator[None]:
        """The workers agree on batches inside."""
        if self._turns is None:
            yield
            return
        self.take(Deed.DRAW, part)
        with self._turns.watch(self._step + 1):
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """All workers do the same inside, as they know already: one that is lost meanwhile is named.

        Raises:
            RunFailed: one is.
        """
        if self._turns is None:
            yield
            return
        with self._turns.watch(self._step):
            yield

    def fail(self, part: Part | None) -> None:
        """This worker ends with an error: the others learn of it at their next turn."""
        if self._turns is not None:
            self._turns.fail(self._turn(Deed.FAIL, part))

    def compare(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Every so many steps: the parameters, and what the optimizer knows of them, are the same everywhere.

        Raises:
            RunFailed: they are not; all workers raise it.
        """
        if self._world_size > 1 and self._step and self._step % CHECKED_STEPS == 0:
            check_parameters_alike(named, self._optimizer, self._step, self._world_size)

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

    def _turn(self, deed: Deed, part: Part | None) -> Turn:
        return Turn(
            session=self.number,
            deed=deed,
            step=self._step + 1,
            place=(0, 0) if part is None else part.place,
            samples=0 if part is None else part.mark,
            structure=structure_mark(self._optimizer),
            options=options_mark(self._optimizer),
        )
