"""Carries samples between workers: as the bytes of their tensors, over the group that gradients take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.synchronization import Injection
from hetopt.trainer.agreement import gather_texts
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.data.injection import Handover, drawn_samples, handover


class Injector:
    """Mixes what this worker has drawn with what others give it.

    Args:
        injection: who gives how much.
        seed: of the run.
        channel: makes one, to the other workers.
    """

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
        leaves = list(_leaves(own))
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
        return _rebuilt(own, mixed)

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


def _leaves(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _leaves(value)
    else:
        raise BadInput(
            f"data injection needs samples of tensors, got a {type(batch).__name__}.",
            hint="make samples of tensors only",
        )


def _rebuilt(like: Batch, leaves: Iterator[Tensor]) -> Batch:
    """The nesting of ``like`` with other tensors."""
    if isinstance(like, Tensor):
        return next(leaves)
    if isinstance(like, dict):
        return {key: _rebuilt(value, leaves) for key, value in like.items()}
    made = [_rebuilt(value, leaves) for value in like]
    rebuilt: Batch = getattr(like, "_make", type(like))(made)
    return rebuilt


def concatenated(batches: Sequence[Batch]) -> Batch:
    """Batches one after the other, as one."""
    if len(batches) == 1:
        return batches[0]
    rows = zip(*(_leaves(batch) for batch in batches), strict=True)
    return _rebuilt(batches[0], iter([torch.cat(row) for row in rows]))


def every_nth(batch: Batch, count: int, part: int) -> Batch:
    """One of ``count`` parts of a batch, as alike as can be: every so manieth sample."""
    return _rebuilt(batch, iter([leaf[part::count] for leaf in _leaves(batch)]))
