"""Data injection, as SelSync (2307.07950) and ScaDLES (2301.08897) do it: who hands how many samples to whom, and how.

In a step ``ceil(alpha N)`` of the N workers give every other a copy of a part beta of the samples they have drawn. A
worker draws ``b / (1 + ceil(alpha N) beta)`` samples for a batch of b, so that what it computes stays about as much.
Samples travel as the bytes of their tensors, over the group that gradients take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hetopt.core.batch_partition import first_shares
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec
from hetopt.core.synchronization import Injection
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.fetch import Batch, each_tensor


def drawn_samples(injection: Injection, shares: Sequence[int]) -> tuple[int, ...]:
    """Return how many samples each worker draws for its share; at least one, the same in every step."""
    factor = 1 + _givers(injection, len(shares)) * injection.samples
    return tuple(max(1, round(share / factor)) for share in shares)


def given_samples(injection: Injection, drawn: Sequence[int], *, seed: int, position: int) -> tuple[int, ...]:
    """Return how many of the samples that it has drawn each worker gives to every other, alike on every rank.

    Args:
        injection: how many workers give how much.
        drawn: samples of each worker.
        seed: of the run.
        position: samples that were drawn before this step; who gives is drawn anew in each.
    """
    words = np.random.PCG64(np.random.SeedSequence((seed, 0x1217EC7, position))).random_raw(len(drawn))
    givers = set(np.argsort(words, kind="stable")[: _givers(injection, len(drawn))].tolist())
    return tuple(max(1, round(injection.samples * own)) if rank in givers else 0 for rank, own in enumerate(drawn))


def samples_of_step(spec: RunSpec) -> int:
    """Return how many samples all workers together draw in the first step; they may hold copies of some besides."""
    if spec.injection is None or len(spec.workers) == 1:
        return spec.global_batch_size
    return sum(drawn_samples(spec.injection, first_shares(spec)))


def _givers(injection: Injection, workers: int) -> int:
    return math.ceil(injection.workers * workers - 1e-9)


class Injector:
    """Mixes what this worker has drawn with what others give it."""

    def __init__(self, injection: Injection, seed: int) -> None:
        self.injection = injection
        self._seed = seed
        self._channel = Channel()
        self._layout: str | None = None
        self._samples = 0

    def mix(self, own: Sequence[Batch], drawn: Sequence[int], position: int) -> tuple[Batch, tuple[int, ...]]:
        """Return this worker's samples with those that it is given behind them, and how many each worker then holds.

        Args:
            own: micro-batches of what this worker has drawn, on the host.
            drawn: samples of each worker.
            position: as of `given_samples`.

        Raises:
            BadInput: samples are not tensors, or those of other workers have another shape or type.
        """
        channel = self._channel
        given = given_samples(self.injection, drawn, seed=self._seed, position=position)
        leaves = [torch.cat(column) for column in zip(*map(_tensors, own), strict=True)]
        self._check(leaves)
        parts = [[leaf] for leaf in leaves]
        sizes = [leaf[0].nbytes for leaf in leaves]
        for giver, count in enumerate(given):
            if not count:
                continue
            if giver == channel.rank:
                channel.broadcast(torch.cat([leaf[:count].flatten().view(torch.uint8) for leaf in leaves]), giver)
                continue
            received = torch.empty(count * sum(sizes), dtype=torch.uint8)
            channel.broadcast(received, giver)
            pieces = torch.split(received, [count * size for size in sizes])
            for part, leaf, piece in zip(parts, leaves, pieces, strict=True):
                part.append(piece.clone().view(leaf.dtype).view(count, *leaf.shape[1:]))
        self._samples += sum(given) * (channel.workers - 1)
        mixed = iter([torch.cat(part) for part in parts])
        held = tuple(count + sum(given) - gift for count, gift in zip(drawn, given, strict=True))
        return each_tensor(own[0], lambda _: next(mixed)), held

    def event(self) -> Event:
        """Return what all workers together handed over since this was last asked for, and how long it took this one."""
        told = {
            "samples": self._samples,
            "sent_bytes": sum(message.payload_bytes for message in self._channel.messages)
            * (self._channel.workers - 1),
            "time_s": round(sum(message.time_s for message in self._channel.messages), 6),
        }
        self._samples, self._channel.messages = 0, []
        return {"injection": told}

    def _check(self, leaves: Sequence[Tensor]) -> None:
        """Bytes can be told apart only where all samples look alike: the first step asks all workers."""
        layout = " ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}" for leaf in leaves)
        seen = {self._layout, layout} if self._layout else set(gather_texts(layout, self._channel.workers))
        if len(seen) > 1:
            raise BadInput(
                f"data injection needs samples of one shape, got {' and '.join(sorted(seen))}.",
                hint="give all samples one shape, or train without injection",
            )
        self._layout = layout


def _tensors(batch: Batch) -> list[Tensor]:
    leaves = tree_leaves(batch)
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
    if others:
        raise BadInput(
            f"data injection needs samples of tensors, got a {' and a '.join(sorted(others))}.",
            hint="make samples of tensors only",
        )
    return cast(list[Tensor], leaves)
