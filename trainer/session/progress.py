"""How far a script is with its loader, and how to begin there anew in another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hetopt.trainer.session.random_state import RandomState, States


class Progress:
    """Counts a loader's epochs and batches, and remembers how random numbers stood when the epoch began.

    To go on in the middle of an epoch, it begins again with the numbers it began with, so that its batches are drawn
    alike; those that were done are passed over, and then random numbers go on as they were.

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
        self._start: dict[str, Any] = {}
        self._after: dict[str, Any] | None = None
        self._goes_on = False

    def start(self) -> dict[str, Any]:
        """Random numbers as an epoch begins, which is to be read now; where some of it was done, set to those again."""
        if self._goes_on:
            self._use(self._start, alike=True)
        return self._now()

    def enter(self, start: dict[str, Any]) -> None:
        """The script asks for the first batch of an epoch.

        Args:
            start: what `start` gave.
        """
        if not self._goes_on:
            self.epoch, self.batches = self.epoch + 1, self.done
        self._start, self.is_within, self._goes_on = start, True, False

    def skip(self, batches: int) -> None:
        """The epoch that comes begins behind so many batches, with random numbers as they are."""
        self.done = batches

    def passes(self, number: int) -> bool:
        """Whether a batch of the epoch was done before; behind these, random numbers go on as they were.

        Args:
            number: from 0.
        """
        if number < self.done:
            return True
        if self._after is not None:
            # What workers draw alike, they draw as they read a stream: passing over does.
            self._use(self._after, alike=False)
        self.done, self._after = 0, None
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
        return {**place, "start": self._start, "now": self._now()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.epoch, self.batches, self.is_within = state["epoch"], state["batches"], state["is_within"]
        self._use(state["now"], alike=True)
        if self.is_within:
            self._start, self._after = dict(state["start"]), dict(state["now"])
            self.done, self._goes_on = self.batches, True

    def _now(self) -> dict[str, Any]:
        return {
            "own": States.now().plain(),
            "alike": None if self._chance is None else self._chance.alike.plain(),
            "generators": [one.get_state() for one in self._generators],
        }

    def _use(self, kept: Mapping[str, Any], *, alike: bool) -> None:
        States.of_plain(kept["own"]).use()
        for one, state in zip(self._generators, kept["generators"], strict=False):
            one.set_state(state)
        if alike and self._chance is not None and kept["alike"] is not None:
            self._chance.alike = States.of_plain(kept["alike"])


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
