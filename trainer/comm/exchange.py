"""Sums of gradients over all workers: whole (`Exchange`) or in buckets under backward; and averages of parameters.

An exchange adds the residual, compresses, sums over all workers and keeps the new residual, through every change of
compression.

`average_parameters` weighs each worker by the samples it saw since all models were last alike. What travels is how far
a worker has come, not where it is: workers that have not moved keep the very bits that they
had, rounding is that of the small update and not of the parameter, and how far the workers have come apart can be told
from sums that do not cancel. So it can be rounded to a half, a quarter or an eighth of the bytes as gradients are, and
what rounding leaves goes with the next average.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from hetopt.core.comm.composition import AUTO, combine
from hetopt.core.comm.payload_bytes import Shapes, kept_elements
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import ALIKE, Residual, State, check_state
from hetopt.trainer.comm.methods import checked_for, make_chain, make_residual
from hetopt.trainer.comm.peers import Guard
from hetopt.trainer.comm.topk import Levels, kept_energies
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.sharding import held


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeStats:
    """Bytes and seconds that one exchange cost this worker, and the gradient energy (sum of squares) that it sent.

    Attributes:
        sent_bytes: payload that this worker handed over (the backend forwards more, see `hetopt.core.comm.cost`).
        compress_s: seconds of this worker's own work: adding the residual, compressing, adding up what arrived; looks
            left out.
        sync_s: seconds of the collective operations, with the wait for slower workers.
        energy: sum of squares of gradient and residual; None where there is no residual and no ratio was looked at.
        kept_energy: part of ``energy`` that is not left in the residual; of a selection, the energy of what was sent.
            None: unknown.
        look_energies: energies that the largest elements would have kept, at the ratios of ``look_at``; empty: none
            were asked for.
        level_gains: fractions of all workers' energy that candidate and floor would have kept; None: a step does not
            choose between them.
    """

    sent_bytes: int
    compress_s: float = 0.0
    sync_s: float = 0.0
    energy: float | None = None
    kept_energy: float | None = None
    look_energies: tuple[float, ...] = ()
    level_gains: tuple[float, float] | None = None


def summed(parts: Sequence[ExchangeStats]) -> ExchangeStats | None:
    """Return the stats of exchanges added up: bytes, seconds and energies; None: there are none.

    Energies are None if one of them is. One exchange is returned as it is; of several, looks and gains of levels are
    left out.
    """
    if len(parts) < 2:
        return next(iter(parts), None)

    def total(energies: Sequence[float | None]) -> float | None:
        known = [energy for energy in energies if energy is not None]
        return sum(known) if known and len(known) == len(energies) else None

    return ExchangeStats(
        sent_bytes=sum(part.sent_bytes for part in parts),
        compress_s=sum(part.compress_s for part in parts),
        sync_s=sum(part.sync_s for part in parts),
        energy=total([part.energy for part in parts]),
        kept_energy=total([part.kept_energy for part in parts]),
    )


_IN_USE = f"{ALIKE}compression"
_STEPS = f"{ALIKE}steps"
_HAS_RESIDUAL = f"{ALIKE}owes"

SENDS_ALL = ("identity", "bf16")
"""Names of compressions after which no residual is worth sending: bf16 leaves a part in 10^5 of a gradient's energy."""


class Exchange:
    """Compressed sum of gradients over all workers, with a residual that outlives changes of compression.

    The caller weights its local mean gradient by ``local_batch_size / global_batch_size`` first: then the sum is the
    gradient of one machine with the whole batch, and residuals are in units of that sum.

    The residual is that of the first compression, and others that do not name one go on with it: so a dense exchange
    between two sparsified ones sends the whole residual, and leaves nothing behind. What a compression itself carries
    from step to step (PowerSGD's factors) ends with its use.

    Args:
        first: the compression to begin with; what it leaves open is filled in by `composition.combine`.
        numel: elements of the flat gradient.
        device: device where the gradient lies; None: the CPU.
        clock: seconds.
        shapes: shapes of the parameters, in the order in which they lie in the gradient; None: not known, which
            compressions that work layer by layer refuse.
        seed: seed of all randomness, the same on every worker.
        store: store that all workers can reach, to find out who is missing when an exchange times out; None: nobody is
            named.
        group: process group that exchanges; None: all workers.
        first_step: number of the first step, which randomness depends on.

    Attributes:
        compression: compression in use now.
        has_residual: whether there may be a residual worth sending; the same on all workers.

    Raises:
        BadInput: unknown name, parts of the compression that do not go together, or one that needs ``shapes``.
    """

    def __init__(
        self,
        first: Compression,
        numel: int,
        *,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        shapes: Shapes | None = None,
        seed: int = 0,
        store: Store | None = None,
        group: dist.ProcessGroup | None = None,
        first_step: int = 0,
    ) -> None:
        self._group = group
        self._first = first
        self.numel = numel
        self._device = device
        self._clock = clock
        self._shapes = shapes
        self._seed = seed
        self._store = store
        self.residual = make_residual(first, numel, device=device)
        self._step = first_step
        self.has_residual = False
        self._begin(first)

    def use(self, compression: Compression) -> None:
        """Switch to another compression from the next step on, with the same residual; all workers must decide alike.

        Raises:
            BadInput: unknown name, parts that do not go together with this residual, or a compression that needs
                ``shapes``.
        """
        if compression.memory == AUTO:
            first = self._first
            memory = combine(first.name, memory=first.memory, collective=first.collective).memory
            compression = compression.model_copy(update={"memory": memory})
        if compression != self.compression:
            self._begin(compression)

    def run(self, flat: Tensor, look_at: Sequence[float] = (), *, channel: Channel | None = None) -> ExchangeStats:
        """Replace ``flat`` by all workers' compressed sum; measure the energy kept at ratios ``look_at``. All call it.

        If a collective fails, the residual is that of the step before, and ``flat`` holds nothing of use. A gradient
        without elements is left alone.

        Args:
            flat: 1-D fp32, this worker's weighted gradient; overwritten with the sum.
            look_at: ratios in (0, 1] to tell the kept energy at, which takes about a compression.
            channel: channel to the other workers, with no message yet; None: one of its own.

        Raises:
            BadInput: workers are about to exchange in different ways.
            RunFailed: another worker did not come in time (`HungPeer`).
            LostPeer: another worker left in the middle.
        """
        if flat.numel() == 0:
            return ExchangeStats(sent_bytes=0)
        residual = self.residual
        with self._guard:
            channel = channel or Channel(self._group, clock=self._clock, on=flat.device)
            begun = channel.now()
            prepared = residual.prepare(flat)
            there = None if not residual.kept() and not look_at else energy(prepared)
            looking = channel.now()
            counts = [kept_elements(self.numel, ratio) for ratio in look_at]
            looked = kept_energies(prepared, counts) if counts else ()
            looking_s = channel.now() - looking
            held_back = residual.commit(self._chain.run(prepared, flat, channel, self._step))
        sync_s = sum(message.time_s for message in channel.messages)
        stats = ExchangeStats(
            sent_bytes=sum(message.payload_bytes for message in channel.messages),
            compress_s=channel.now() - begun - sync_s - looking_s,
            sync_s=sync_s,
            energy=there,
            kept_energy=there if there is None or held_back is None else max(0.0, there - held_back),
            look_energies=looked,
            level_gains=self._chain.gains if isinstance(self._chain, Levels) else None,
        )
        self._step += 1
        self.has_residual = self.compression.name not in SENDS_ALL
        return stats

    def state(self) -> State:
        """Return a copy of the state for a checkpoint, by name: residual, compression in use, its state, steps done."""
        in_use = torch.frombuffer(bytearray(self.compression.model_dump_json().encode()), dtype=torch.uint8)
        return {
            **self.residual.state(),
            **{f"{ALIKE}{key}": value for key, value in self._chain.state().items()},
            _IN_USE: in_use,
            _STEPS: torch.tensor(self._step),
            _HAS_RESIDUAL: torch.tensor(self.has_residual),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `state` returned, or a residual alone.

        A residual alone leaves the compression in use and the number of steps as they are.

        Raises:
            BadInput: names or shapes differ from this exchange's, as of another residual or model.
        """
        rest = dict(state)
        if (in_use := rest.pop(_IN_USE, None)) is not None:
            self._begin(Compression.model_validate_json(bytes(in_use.tolist())))
        self._step = int(rest.pop(_STEPS, self._step))
        self.has_residual = bool(rest.pop(_HAS_RESIDUAL, True))
        carried = {key.removeprefix(ALIKE): rest.pop(key) for key in state if key in rest and key.startswith(ALIKE)}
        check_state(carried, self._chain.state())
        self._chain.load_state(carried)
        self.residual.load_state(rest)

    def _begin(self, compression: Compression) -> None:
        """Build chain and guard of a compression, without its old state; keep the residual. BadInput: as of `use`."""
        numel, shapes = self.numel, self._shapes
        chosen = checked_for(compression, shapes)
        self._chain = make_chain(compression, numel, shapes=shapes, seed=self._seed, device=self._device)
        layout = hashlib.sha256(repr((numel, [tuple(s) for s in shapes or ()], self._seed)).encode()).hexdigest()[:8]
        amount = f" {compression.ratio:g}" if chosen.method.by_ratio else ""
        self._guard = Guard(
            f"{chosen.name}{amount} by {chosen.collective} with {chosen.memory} ({numel} elements, {layout}) "
            f"{compression.model_dump_json(exclude={'name', 'ratio', 'collective', 'memory'})}",
            store=self._store,
            group=self._group,
        )
        self.compression = compression


def weights_by_samples(samples: Sequence[int], participants: Sequence[int] | None = None) -> tuple[float, ...]:
    """Return each worker's weight by rank: its samples over those of all ``participants``; others have weight 0.

    Where none of them has samples, they count alike.

    Args:
        samples: samples of every worker, by rank.
        participants: ranks that count; None: all.
    """
    counts = range(len(samples)) if participants is None else participants
    total = sum(samples[rank] for rank in counts)
    shares = {rank: samples[rank] / total if total else 1 / len(counts) for rank in counts}
    return tuple(shares.get(rank, 0.0) for rank in range(len(samples)))


def average_parameters(
    parameters: Tensor,
    base: Tensor,
    weight: float,
    channel: Channel,
    rounded: Exchange | None = None,
    *,
    exactly: bool = False,
    step: Callable[[Tensor], None] | None = None,
) -> float:
    """Overwrite ``parameters`` and ``base`` by all workers' weighted mean; return their relative spread. All call it.

    That is ``base + sum_i weight_i (x_i - base)``, the same bits on each.

    With ``step`` the averaged update is changed before it is added (`hetopt.trainer.sync.synchroniser`).

    A worker of weight 0 changes nothing, whatever it holds, even what is not finite.

    Args:
        parameters: 1-D fp32, this worker's parameters x_i; the result afterwards.
        base: parameters that all had after the last average, the same bits on each; the result afterwards, too.
        weight: weight of this worker, 0 or more; those of all sum to 1.
        channel: channel to the other workers.
        rounded: exchange that sums the first ``rounded.numel`` elements in fewer bytes; the running statistics behind
            them are sent in fp32. None: all elements are sent in fp32.
        exactly: whether to send all in fp32, with ``rounded``'s residual added, which stays as it is.
        step: changes the averaged update, in place, before it is added; None: it stays.

    Returns:
        How far the workers had come apart, the same on each: the root of ``sum_i weight_i |x_i - mean|^2`` over the
        norm of the result; that root alone where the result is zero.

    Raises:
        BadInput: workers are about to exchange in different ways (only with ``rounded``).
        HungPeer: another worker did not come in time (only with ``rounded``).
        LostPeer: another worker left in the middle (only with ``rounded``).
    """
    message = parameters.new_zeros(parameters.numel() + 1)
    if weight > 0:
        update = message[:-1]
        torch.sub(parameters, base, out=update)
        square = energy(update)
        update.mul_(weight)
        message[-1] = weight * square
    if rounded is None or exactly:
        owed = {} if rounded is None else rounded.residual.kept()  # by earlier averages; it stays owed
        if (residual := owed.get("residual")) is not None:
            message[: residual.numel()].add_(residual)
        channel.all_reduce(message)
    else:
        rounded.run(message[: rounded.numel], channel=channel)
        channel.all_reduce(message[rounded.numel :])
    update, spread = message[:-1], float(message[-1])
    spread = max(0.0, spread - energy(update))
    if step is not None:
        step(update)
    base.add_(update)
    parameters.copy_(base)
    norm = math.sqrt(energy(base))
    return math.sqrt(spread) / norm if norm > 0 else math.sqrt(spread)


Span = tuple[int, int]
"""First place of a parameter in the flat gradient, and the place behind its last."""


class DenseBuckets(Residual):
    """Uncompressed sum of a gradient's buckets over the workers, each begun while backward makes the rest.

    Args:
        guard: context manager around the wait, which names who is lost when the workers do not all come; None: nobody
            is named.
        group: process group that sums; None: the default one.
    """

    def __init__(
        self, guard: AbstractContextManager[None] | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._guard, self._group = guard or nullcontext(), group
        self._sent: list[dist.Work] = []

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
        """Begin to sum a bucket over all workers, in place, without waiting; all must do so in the same order.

        Args:
            parameters: not used.
            buffer: 1-D, the bucket's weighted gradients; holds the sum once `wait` has returned.
            last: not used.
        """
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None  # as for every asynchronous collective of a member of the group
        self._sent.append(work)

    def wait(self) -> None:
        """Wait until all buckets begun are summed.

        Raises:
            RuntimeError: a collective failed; with a `Guard`, one of its errors where the lost worker is known.
        """
        sent, self._sent = self._sent, []
        with self._guard:
            for work in sent:
                work.wait()


class BucketExchange:
    """Compressed sum of a gradient's buckets over the workers, one by one in a thread, while backward makes the rest.

    The residual belongs to parameters, not to buckets: DistributedDataParallel lays its buckets out anew after
    the first step, and a checkpoint may be resumed with other ones. In a checkpoint it has the form that a whole
    gradient's residual has, with the parameters in their order. What a compressor itself carries from step to step
    stays with the layout of the buckets.

    All workers must bring the same buckets in the same order, as DistributedDataParallel sees to. While a backward pass
    runs, collectives come from this thread, and must come from no other.

    Args:
        compression: one that may work on a part of the gradient, see `composition.Method.by_shape`.
        parameters: parameters of the model, in the order of the flat gradient; at least one, all on one device.
        clock: returns seconds.
        seed: seed of all randomness, the same on every worker.
        store: store for a roll call when an exchange times out; None: nobody is named.
        group: process group that exchanges; None: all workers.

    Raises:
        BadInput: unknown name, parts of the compression that do not go together, or one that works layer by layer.
    """

    def __init__(
        self,
        compression: Compression,
        parameters: Sequence[nn.Parameter],
        *,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
        store: Store | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._seed = seed
        self._spans: dict[int, Span] = {}
        numel = 0
        for parameter in parameters:
            first, numel = numel, numel + held(parameter).numel()
            self._spans[id(parameter)] = first, numel
        checked_for(compression, None)
        device = parameters[0].device
        self._make = partial(Exchange, compression, device=device, clock=clock, store=store, group=group)
        self._whole: State = make_residual(compression, numel, device=device).kept()
        self._buckets: dict[tuple[Span, ...], Exchange] = {}
        self._sent: list[Future[ExchangeStats]] = []
        self._step = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetopt-exchange")

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
        """Begin to replace a bucket by its compressed sum over all workers, without waiting.

        Args:
            parameters: parameters of the bucket, in the order of its elements.
            buffer: 1-D fp32, their gradients weighted by this worker's share of the batch; holds the sum once `wait`
                has returned.
            last: whether the step has no further bucket.
        """
        spans = tuple(self._spans[id(parameter)] for parameter in parameters)
        self._sent.append(self._thread.submit(self._exchange, spans, buffer, last))

    def wait(self) -> ExchangeStats | None:
        """Wait until all buckets begun are summed; return their stats, added up; None: no bucket was begun.

        Raises:
            BadInput: workers are about to exchange in different ways.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        sent, self._sent = self._sent, []
        return summed([bucket.result() for bucket in sent])

    def state(self) -> State:
        """Return a copy of the residual, [all parameters], for a checkpoint; not while a backward pass runs."""
        self._put_together()
        return {**{key: value.clone() for key, value in self._whole.items()}, _STEPS: torch.tensor(self._step)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residual that `state` returned; not while a backward pass runs.

        Raises:
            BadInput: names or shapes differ from this residual's, as of another compression or model.
        """
        steps = state.get(_STEPS, torch.tensor(0))
        check_state({**state, _STEPS: steps}, self.state())
        self._buckets.clear()
        self._step = int(steps)
        for key, value in self._whole.items():
            value.copy_(state[key])

    def _exchange(self, spans: tuple[Span, ...], buffer: Tensor, last: bool) -> ExchangeStats:
        """Sum a bucket over all workers, in place; a bucket of new spans takes over the residual of its elements."""
        bucket = self._buckets.get(spans)
        if bucket is None:  # in place of old ones that shared its parameters
            self._put_together()
            self._buckets = {key: old for key, old in self._buckets.items() if not set(key) & set(spans)}
            bucket = self._make(buffer.numel(), seed=self._seed + spans[0][0], first_step=self._step)
            residual = {key: torch.cat([value[i:j] for i, j in spans]) for key, value in self._whole.items()}
            bucket.residual.load_state(residual)
            self._buckets[spans] = bucket
        stats = bucket.run(buffer)
        self._step += last
        return stats

    def _put_together(self) -> None:
        """Copy the residuals of all buckets into the vectors of all parameters."""
        for spans, bucket in self._buckets.items():
            for key, value in bucket.residual.kept().items():
                for (start, stop), part in zip(spans, torch.split(value, [j - i for i, j in spans]), strict=True):
                    self._whole[key][start:stop] = part


BucketSum: TypeAlias = DenseBuckets | BucketExchange
"""Sums parts of a gradient while backward makes the rest; its state is what a checkpoint needs of it."""
