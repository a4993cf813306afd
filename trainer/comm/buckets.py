"""Sums a gradient bucket by bucket while the backward pass still makes the rest of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetopt.core.comm.composition import combine
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.compressor import Residual, Resumable, State
from hetopt.trainer.comm.error_feedback import ALIKE, NoResidual, check_state
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, summed
from hetopt.trainer.comm.methods import make_chain, make_residual
from hetopt.trainer.comm.peers import Guard

_STEP = f"{ALIKE}step"

Span = tuple[int, int]
"""Where a parameter begins in the flat gradient, and where it ends."""


class BucketSum(Resumable, Protocol):
    """Sums buckets over all workers, in the order in which they come; that order is the same on all workers."""

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
        """Begin to replace a bucket by its sum over all workers (see `BucketExchange.sum_bucket`)."""

    def wait(self) -> ExchangeStats | None:
        """Return what the buckets cost once all that have begun are summed; None where they are summed as they are."""


class DenseBuckets(NoResidual):
    """Sums buckets as they are.

    Args:
        guard: names who is lost when the workers do not all come.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._sent: list[dist.Work] = []

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
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

    The residual belongs to parameters, not to buckets: DistributedDataParallel lays its buckets out anew after
    the first step, and a checkpoint may be resumed with other ones. In a checkpoint it has the form that a whole
    gradient's residual has, with the parameters in their order.

    All workers must bring the same buckets in the same order, as DistributedDataParallel sees to.

    Args:
        compression: one that may work on a part of the gradient, see `composition.Method.by_bucket`.
        parameters: of the model, in the order of the flat gradient.
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
        parameters: Sequence[nn.Parameter],
        *,
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
        self._compression = compression
        self._group = group
        self._clock = clock
        self._seed = seed
        self._store = store
        self._starts: dict[int, int] = {}
        numel = 0
        for parameter in parameters:
            self._starts[id(parameter)] = numel
            numel += parameter.numel()
        device = parameters[0].device
        self._whole: State = make_residual(compression, numel, device=device, group=group).state()
        links = make_chain(compression, numel, seed=seed, device=device, group=group)
        if links.state():
            raise BadInput(
                f"{chosen.name} by {chosen.collective} carries more from step to step than buckets can.",
                hint="exchange the whole gradient after the backward pass, or name the collective",
            )
        self._random = links.counts_steps
        self._buckets: dict[tuple[Span, ...], _Bucket] = {}
        self._stats: list[ExchangeStats] = []
        self._sent: list[torch.futures.Future[Tensor]] = []
        self._step = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetopt-exchange")

    def sum_bucket(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> torch.futures.Future[Tensor]:
        """Begin to replace a bucket by its sum over all workers; the future holds the same buffer.

        Args:
            parameters: of the bucket, in the order of its elements.
            buffer: 1-D fp32, their gradients weighted by this worker's share of the batch.
            last: whether the step has no further bucket.
        """
        promise: torch.futures.Future[Tensor] = torch.futures.Future()

        def keep(done: Future[Tensor]) -> None:
            error = done.exception()
            if error is None:
                promise.set_result(done.result())
            else:
                promise.set_exception(error)  # type: ignore[arg-type]  # torch declares a result where it takes an error

        spans = tuple(self._span(parameter) for parameter in parameters)
        self._thread.submit(self._exchange, spans, buffer, last).add_done_callback(keep)
        return promise

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
        """Begin to compress and sum a bucket (see `sum_bucket`)."""
        self._sent.append(self.sum_bucket(parameters, buffer, last=last))

    def wait(self) -> ExchangeStats:
        """Return what the buckets cost, once all are summed (see `BucketSum`)."""
        sent, self._sent = self._sent, []
        for promise in sent:
            promise.wait()
        return self.take_stats()

    def take_stats(self) -> ExchangeStats:
        """The sum over all buckets since the last call. Not while a backward pass runs."""
        taken, self._stats = self._stats, []
        return summed(taken)

    def state(self) -> State:
        """What a checkpoint needs: a copy of the residual, in the order of the parameters. Not while backward runs."""
        self._put_together(list(self._buckets))
        state = {key: value.clone() for key, value in self._whole.items()}
        return {**state, _STEP: torch.tensor(self._step)} if self._random else state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Remember what `state` gave.

        Raises:
            BadInput: the state belongs to another residual or to another model.
        """
        check_state(state, self.state())
        self._buckets.clear()
        self._step = int(state.get(_STEP, torch.tensor(0)))
        for key, value in self._whole.items():
            value.copy_(state[key])

    def _exchange(self, spans: tuple[Span, ...], buffer: Tensor, last: bool) -> Tensor:
        bucket = self._buckets.get(spans) or self._new_bucket(spans, buffer)
        self._stats.append(bucket.exchange.run(buffer))
        if last:
            self._step += 1
        return buffer

    def _new_bucket(self, spans: tuple[Span, ...], buffer: Tensor) -> _Bucket:
        """A bucket that was never seen: the layout has changed, and those that have shared its parameters are gone."""
        self._put_together([key for key in self._buckets if set(key) & set(spans)], forget=True)
        numel, device = buffer.numel(), buffer.device
        residual = make_residual(self._compression, numel, device=device, group=self._group)
        residual.load_state({key: torch.cat([value[i:j] for i, j in spans]) for key, value in self._whole.items()})
        exchange = Exchange(
            self._compression,
            numel,
            device=device,
            group=self._group,
            clock=self._clock,
            seed=self._seed + spans[0][0],
            store=self._store,
            residual=residual,
            first_step=self._step,
        )
        self._buckets[spans] = bucket = _Bucket(residual=residual, exchange=exchange)
        return bucket

    def _put_together(self, keys: list[tuple[Span, ...]], *, forget: bool = False) -> None:
        """Copy what buckets remember to where the parameters have it."""
        for spans in keys:
            state = self._buckets[spans].residual.state()
            for key, value in state.items():
                for (start, stop), part in zip(spans, torch.split(value, [j - i for i, j in spans]), strict=True):
                    self._whole[key][start:stop] = part
            if forget:
                del self._buckets[spans]

    def _span(self, parameter: Tensor) -> Span:
        start = self._starts[id(parameter)]
        return start, start + parameter.numel()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bucket:
    """A part of the gradient with its residual."""

    residual: Residual
    exchange: Exchange
