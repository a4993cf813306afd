"""How far a script is with its loader, and how to begin there anew in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from hetopt.trainer.session.random_state import RandomState, States

MadeT = TypeVar("MadeT")


class Resumed:
    """How random numbers stood at the checkpoint that a script goes on from, for whichever loader catches up first."""

    def __init__(self, now: Mapping[str, Any] | None) -> None:
        self._now = now

    def take(self) -> Mapping[str, Any] | None:
        """Once; from then on the script has drawn more."""
        now, self._now = self._now, None
        return now


class Progress:
    """Counts a loader's epochs and batches, and remembers how random numbers stood when the epoch began.

    To go on in the middle of an epoch, it begins again with the numbers it began with, so that its batches are drawn
    alike; those that were done are passed over. This catching up leaves random numbers as they were before it, for
    other loaders and the script draw from them too; the first loader that has caught up sets them to the checkpoint's.

    Args:
        loaders: the script's, and what reads in its place: their generators are random numbers, too.
        chance: random numbers that all workers draw alike, where there are several.

    Attributes:
        epoch: that the script is in, or was in last; -1: none yet.
        batches: of it that the script was given.
        is_within: whether it may be given more.
        done: batches of the epoch that comes which are passed over.
    """

    def __init__(self, *loaders: DataLoader[Any], chance: RandomState | None = None) -> None:
        parts = [part for one in loaders for part in (one, one.sampler, one.batch_sampler, _inner(one.batch_sampler))]
        found = [getattr(part, "generator", None) for part in parts]
        self._generators = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._chance = chance
        self.epoch, self.batches, self.done, self.is_within = -1, 0, 0, False
        self._start: dict[str, Any] = {}  # as the loop over the epoch began
        self._entered: dict[str, Any] = {}  # as its first batch was asked for, when samplers draw
        self._resumed: Resumed | None = None  # while it has to catch up
        self._before: dict[str, Any] = {}  # it did
        self._goes_on = self._has_begun = False

    @property
    def first_epoch(self) -> int:
        """The epoch to go on with, from 0."""
        return self.epoch + (not self.is_within)

    def begin(self, make: Callable[[], MadeT]) -> tuple[MadeT, dict[str, Any]]:
        """An epoch begins, which is to be read now.

        Args:
            make: begins to read.

        Returns:
            What that makes, and random numbers as they stood before, for `enter`.
        """
        if self._has_begun and self._goes_on:  # what is left of the epoch was not asked for: another begins
            self.done, self._goes_on, self._resumed = 0, False, None
        self._has_begun = True
        if not self._goes_on:
            start = self._now()
            return make(), start
        self._before = self._now()
        self._use(self._start)
        made = make()
        if self._resumed is not None:  # reader processes have their batches drawn at once
            self._use(self._before)
        return made, self._start

    def enter(self, start: dict[str, Any]) -> None:
        """The script asks for the first batch of an epoch.

        Args:
            start: what `begin` gave.
        """
        if not self._goes_on:
            self.epoch, self.batches = self.epoch + 1, self.done
            self._entered = self._now()
        elif self._resumed is not None:
            self._before = self._now()
            self._use(self._entered)
        self._start, self.is_within, self._goes_on = start, True, False

    def skip(self, batches: int) -> None:
        """The epoch that comes begins behind so many batches, with random numbers as they are."""
        self.done = batches

    def passes(self, number: int) -> bool:
        """Whether a batch of the epoch was done before; behind these, the script draws random numbers again.

        Args:
            number: from 0.
        """
        if number < self.done:
            return True
        if self._resumed is not None:
            self._use(self._resumed.take() or self._before)
        self.done, self._resumed = 0, None
        return False

    def give(self) -> None:
        """The script is given a batch."""
        self.batches += 1

    def end(self) -> None:
        """There are no more batches in the epoch."""
        self.passes(self.done)
        self.is_within = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values and tensors; of this worker alone."""
        place = {"epoch": self.epoch, "batches": self.batches, "is_within": self.is_within}
        return {**place, "start": self._start, "entered": self._entered, "now": self._now()}

    def resume(self, state: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on from what `state` gave.

        Args:
            state: that.
            resumed: of all loaders of the script.
        """
        self.epoch, self.batches, self.is_within = state["epoch"], state["batches"], state["is_within"]
        self._use(state["now"])
        if self.is_within:
            self._start, self._entered = dict(state["start"]), dict(state["entered"])
            self.done, self._goes_on, self._has_begun, self._resumed = self.batches, True, False, resumed

    def _now(self) -> dict[str, Any]:
        random = {"own": States.now().plain()} if self._chance is None else self._chance.kept()
        return {**random, "generators": [one.get_state() for one in self._generators]}

    def _use(self, kept: Mapping[str, Any]) -> None:
        if self._chance is not None and "common" in kept:
            self._chance.use(kept)
        else:
            States.of_plain(kept["own"]).use()
        for one, state in zip(self._generators, kept.get("generators", ()), strict=False):
            one.set_state(state)


def _inner(sampler: object) -> object:
    return getattr(sampler, "sampler", None)


class Remaining(Sampler[Any]):
    """The batches of an epoch that were not done before.

    Args:
        batches: of the whole epoch.
        progress: knows which were.
    """

    def __init__(self, batches: Any, progress: Progress) -> None:
        self._batches = batches
        self._progress = progress

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for number, batch in enumerate(self._batches):
            if not self._progress.passes(number):
                yield batch

    def __len__(self) -> int:
        return len(self._batches)
