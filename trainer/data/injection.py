"""Data injection, as SelSync (2307.07950) and ScaDLES (2301.08897) do it: who hands how many samples to whom, and how.

In a step ``ceil(alpha N)`` of the N workers give every other a copy of a part beta of the samples they have drawn. A
worker draws ``b / (1 + ceil(alpha N) beta)`` samples for a batch of b, so that what it computes stays about as much.
Samples travel as the bytes of their tensors, over the group that gradients take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.synchronization import Injection
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.fetch import Batch, each_tensor, leaves_of


@dataclass(frozen=True, kw_only=True)
class Handover:
    """One step's, in rank order.

    Attributes:
        drawn: samples that each worker draws itself.
        given: of them, what each gives to every other.
    """

    drawn: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """Samples that each worker has in the end."""
        total = sum(self.given)
        return tuple(own + total - gift for own, gift in zip(self.drawn, self.given, strict=True))


def drawn_samples(injection: Injection, shares: Sequence[int]) -> tuple[int, ...]:
    """How many samples each worker draws for its share; at least one, the same in every step."""
    factor = 1 + _givers(injection, len(shares)) * injection.samples
    return tuple(max(1, round(share / factor)) for share in shares)


def handover(injection: Injection, shares: Sequence[int], *, seed: int, position: int) -> Handover:
    """Who gives in the step that begins after ``position`` samples: drawn anew in each, the same on every rank."""
    workers = len(shares)
    drawn = drawn_samples(injection, shares)
    words = np.random.PCG64(np.random.SeedSequence((seed, 0x1217EC7, position))).random_raw(workers)
    givers = set(np.argsort(words, kind="stable")[: _givers(injection, workers)].tolist())
    given = (max(1, round(injection.samples * own)) if rank in givers else 0 for rank, own in enumerate(drawn))
    return Handover(drawn=drawn, given=tuple(given))


def _givers(injection: Injection, workers: int) -> int:
    return math.ceil(injection.workers * workers - 1e-9)


class Injector:
    """Mixes what this worker has drawn with what others give it."""

    def __init__(self, injection: Injection, *, seed: int, channel: Callable[[], Channel]) -> None:
        self._injection = injection
        self._seed = seed
        self._channel = channel
        self._layout: str | None = None
        self._samples = self._bytes = 0
        self._time_s = 0.0

    def drawn(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Samples that each worker draws itself."""
        return drawn_samples(self._injection, shares)

    def plan(self, shares: Sequence[int], position: int) -> Handover:
        """What happens in the step that begins after so many samples."""
        return handover(self._injection, shares, seed=self._seed, position=position)

    def mix(self, own: Batch, plan: Handover) -> Batch:
        """This worker's samples and, behind them, what it is given; every worker calls it with the same plan.

        Args:
            own: as many samples as the plan says, on the host.
            plan: of the step.

        Raises:
            BadInput: samples are not tensors, or those of other workers have another shape or type.
        """
        channel = self._channel()
        begun_s = channel.now()
        leaves = _tensors(own)
        self._check(leaves, channel.workers)
        parts = [[leaf] for leaf in leaves]
        sizes = [leaf[:1].nbytes for leaf in leaves]
        for giver, count in enumerate(plan.given):
            if not count:
                continue
            if giver == channel.rank:
                sent = torch.cat([_bytes(leaf[:count]) for leaf in leaves])
                channel.broadcast(sent, giver)
                continue
            received = torch.empty(count * sum(sizes), dtype=torch.uint8)
            channel.broadcast(received, giver)
            pieces = torch.split(received, [count * size for size in sizes])
            for part, leaf, piece in zip(parts, leaves, pieces, strict=True):
                part.append(piece.clone().view(leaf.dtype).view(count, *leaf.shape[1:]))
        others = sum(plan.given) * (channel.workers - 1)
        self._samples, self._bytes = self._samples + others, self._bytes + others * sum(sizes)
        self._time_s += channel.now() - begun_s
        mixed = iter([torch.cat(part) for part in parts])
        return each_tensor(own, lambda _: next(mixed))

    def event(self) -> Event:
        """What all workers together handed over since this was last asked for, and how long this one took for it."""
        if not self._samples:
            return {}
        told = {"samples": self._samples, "sent_bytes": self._bytes, "time_s": round(self._time_s, 6)}
        self._samples, self._bytes, self._time_s = 0, 0, 0.0
        return {"injection": told}

    def _check(self, leaves: Sequence[Tensor], workers: int) -> None:
        """Bytes can be told apart only where all samples look alike; the first step shows."""
        layout = " ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}" for leaf in leaves)
        if self._layout is None:
            seen = gather_texts(layout, workers)
            if len(set(seen)) > 1:
                raise BadInput(
                    f"data injection needs samples of one shape, got {' and '.join(sorted(set(seen)))}.",
                    hint="give all samples one shape, or train without injection",
                )
            self._layout = layout
        elif layout != self._layout:
            raise BadInput(
                f"data injection needs samples of one shape: they were {self._layout} before, and are {layout} now.",
                hint="give all samples one shape, or train without injection",
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def every_nth(batch: Batch, count: int, part: int) -> Batch:
    """One of ``count`` parts of a batch, as alike as can be: every so manieth sample."""
    return each_tensor(batch, lambda tensor: tensor[part::count])


def _tensors(batch: Batch) -> list[Tensor]:
    tensors = []
    for leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor):
            raise BadInput(
                f"data injection needs samples of tensors, got a {type(leaf).__name__}.",
                hint="make samples of tensors only",
            )
        tensors.append(leaf)
    return tensors
