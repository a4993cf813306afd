"""Sums a gradient bucket by bucket while the backward pass still makes the rest of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.composition import combine
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.compressor import Resumable, State
from hetopt.trainer.comm.error_feedback import ALIKE, NoResidual, check_state
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, summed
from hetopt.trainer.comm.methods import make_chain
from hetopt.trainer.comm.peers import Guard

Span = tuple[int, int]
"""Where a bucket begins in the flat gradient, and where it ends."""


class BucketSum(Resumable, Protocol):
    """Sums buckets over all workers, in the order in which they come; that order is the same on all workers."""

    def begin(self, bucket: int, buffer: Tensor) -> None:
        """Begin to replace a bucket by its sum over all workers.

        Args:
            bucket: its number, in the order in which buckets come.
            buffer: 1-D fp32, gradients weighted by this worker's share of the batch.
        """
        ...

    def wait(self) -> ExchangeStats | None:
        """Return what the buckets cost once all that have begun are summed; None where they are summed as they are."""
        ...


class DenseBuckets(NoResidual):
    """Sums buckets as they are.

    Args:
        guard: names who is lost when the workers do not all come.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._sent: list[dist.Work] = []

    def begin(self, bucket: int, buffer: Tensor) -> None:
        """Begin to sum a bucket (see `BucketSum`)."""
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        self._sent.append(work)

    def wait(self) -> None:
        """Return when all buckets are summed (see `BucketSum`)."""
        sent, self._sent = self._sent, []
        with self._guard.watch():
            for work in sent:
                work.wait()


class BucketExchange:
    """Compresses and sums buckets of a gradient as they come, in a thread of its own, one after the other.

    Its state is that of an `Exchange` of the whole gradient: a checkpoint may be resumed with other buckets.

    Args:
        compression: one that may work on a part of the gradient, see `composition.Method.by_bucket`.
        spans: of the buckets, in the order in which they come, from the end of the gradient to its beginning.
        device: where the gradient lies.
        group: of workers; absent: the default group, or this process alone. Its collectives come from this thread
            while a backward pass runs, and must come from no other meanwhile.
        clock: seconds.
        seed: of all randomness, the same on every worker.
        store: for a roll call when an exchange times out.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """

    def __init__(
        self,
        compression: Compression,
        spans: Sequence[Span],
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
        store: Store | None = None,
    ) -> None:
        chosen = combine(compression.name, memory=compression.memory, collective=compression.collective)
        if not chosen.method.by_bucket:
            raise BadInput(
                f"{chosen.name} needs the whole gradient and cannot work on buckets of it.",
                hint="exchange the whole gradient after the backward pass",
            )
        if make_chain(compression, spans[0][1], seed=seed, device=device, group=group).state():
            raise BadInput(
                f"{chosen.name} by {chosen.collective} carries more from step to step than buckets can.",
                hint="exchange the whole gradient after the backward pass, or name the collective",
            )
        self._spans = spans
        self._exchanges = [
            Exchange(compression, stop - start, device=device, group=group, clock=clock, seed=seed + start, store=store)
            for start, stop in spans
        ]
        self._sent: list[Future[ExchangeStats]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetopt-exchange")

    def begin(self, bucket: int, buffer: Tensor) -> None:
        """Begin to compress and sum a bucket (see `BucketSum`)."""
        self._sent.append(self._thread.submit(self._exchanges[bucket].run, buffer))

    def wait(self) -> ExchangeStats:
        """Return the sum of what the buckets cost, once all are summed (see `BucketSum`)."""
        sent, self._sent = self._sent, []
        return summed([exchange.result() for exchange in sent])

    def state(self) -> State:
        """What a checkpoint needs, as a whole gradient's exchange gives it. Not while a backward pass runs."""
        return _together([exchange.state() for exchange in self._exchanges])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, or from a residual alone.

        Raises:
            BadInput: the state belongs to another residual or to another model.
        """
        check_state(_of_gradient(state), _of_gradient(self.state()))
        for exchange, (start, stop) in zip(self._exchanges, self._spans, strict=True):
            exchange.load_state({**state, **{key: value[start:stop] for key, value in _of_gradient(state).items()}})

    def lend(self) -> State:
        """The residual, for an exchange that keeps it from here on."""
        return _together([exchange.lend() for exchange in self._exchanges])


def _of_gradient(state: Mapping[str, Tensor]) -> State:
    """What has an element for each of the gradient's."""
    return {key: value for key, value in state.items() if not key.startswith(ALIKE)}


def _together(states: Sequence[State]) -> State:
    """The state of a whole gradient from those of its buckets, the last one first."""
    whole = {key: torch.cat([state[key] for state in reversed(states)]) for key in _of_gradient(states[0])}
    return {**states[0], **whole}
