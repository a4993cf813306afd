"""Elements chosen without looking at them, the same on every worker because all draw from the same seed."""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.aggregation import Stateless, shared_generator
from hetopt.trainer.comm.channel import Channel

_ROTATION = -1  # the step that offsets of a rotation are drawn for; no exchange has it


class RandomElements(Stateless):
    """k of n elements at random, without replacement; each is as likely as any other, k / n.

    The vector is cut into k strata whose sizes differ by one at most, each gives one element, and the whole is turned
    by a random number of places so that members of small strata have no advantage. Drawing is then O(k); a permutation
    of n indices would cost more than the exchange it is for.

    Args:
        ratio: fraction of the elements.
        seed: the same on every worker.
    """

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._seed = seed

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """Drawn anew for each step (see `IndexChoice`)."""
        numel = prepared.numel()
        starts, sizes = strata(numel, kept_elements(numel, self._ratio))
        generator = shared_generator(self._seed, step)
        places = starts + (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        turn = torch.randint(numel, (1,), generator=generator)
        return ((places + turn) % numel).to(device=prepared.device, dtype=torch.int32)


class RotatingElements(Stateless):
    """k of n elements in turn: every element comes once in each ``ceil(n / k)`` steps or one less, at a random time.

    Without replacement over steps, as Global Random-k of arXiv 2109.12497 consumes a permutation, but without keeping
    one: each of k strata is walked through from a random place.

    Args:
        ratio: fraction of the elements.
        seed: the same on every worker.
    """

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._seed = seed

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """The next element of each stratum (see `IndexChoice`)."""
        numel = prepared.numel()
        starts, sizes = strata(numel, kept_elements(numel, self._ratio))
        generator = shared_generator(self._seed, _ROTATION)
        first = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * sizes).long()
        return (starts + (first + step) % sizes).to(device=prepared.device, dtype=torch.int32)


def strata(numel: int, count: int) -> tuple[Tensor, Tensor]:
    """Where ``count`` neighbouring strata of ``numel`` elements start, and their sizes, int64."""
    bounds = torch.arange(count + 1) * numel // count
    return bounds[:-1], bounds.diff()
