"""How a script's gradients are summed: by a communication hook of DistributedDataParallel (DDP), or between shards.

    state = hetopt.CommState(ddp, compression="topk:0.01,memory=error_feedback")
    ddp.register_comm_hook(state, hetopt.comm_hook)

DDP sums gradients in buckets under backward. A hook gets each bucket and returns a future of what takes its place: here
the mean over all workers, as DDP takes it, compressed if asked for. Under ``hetopt launch`` a worker's loss counts by
its share of the batch before backward begins (see `hetopt.trainer.ddp.script`). In an audit step the leader's gradient
takes the place of the mean, and the hook notes how far the sum of the others' is from it (`session.audit`).

**Modules of DistributedDataParallel** are kept until their process ends (`keep_modules`): torch 2.13 may hang where one
is deleted after its process group, as at the end of a script's `main`: it waits, with the
interpreter's lock, for a thread of gloo's that asks for that lock.

**Sharded models** (`ShardedState`). A script calls torch's ``fully_shard`` over all of its workers. Here the devices of
a machine hold one replica, and each device sums the gradient of its own shard with its counterparts on the other
machines: by torch's hook for that (`FSDPModule.set_all_reduce_hook`), compressed if the plan says so. Of D devices,
device i has n_i of a batch's B samples. FSDP takes the mean over the devices of a replica and the hook the mean over
replicas, so the loss L_i counts

    D n_i / B     so that the mean of all is that of one machine,   sum_i (n_i / B) dL_i

as under DDP (`hetopt.trainer.ddp.script`). A mesh of two dimensions is the script's own choice and stays, as do its
checkpoints, its clipping and its policies of precision.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not know it
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hetopt.core.comm.composition import METHODS
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import why_shares_differ
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.comm.exchange import (
    BucketExchange,
    BucketSum,
    DenseBuckets,
    Exchange,
    ExchangeStats,
    summed,
)
from hetopt.trainer.comm.vectors import GradientNorms
from hetopt.trainer.script.batches import ROUNDING, Audit, AuditRecord, make_spec
from hetopt.trainer.sharding import held
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig, make_exchange
from hetopt.trainer.steps.step import all_finite
from hetopt.trainer.task import normalises_apart


class GradientState:
    """Base of a script's gradient exchange: settings, audits and statistics; used for one worker, which sends nothing.

    Args:
        exchange: settings of how gradients travel.

    Attributes:
        weight: factor on this worker's gradient, or ``"sum"``; None: its share of the batch (see `CommState`).
        record: settings and results of audits; None: there are no audits.
        is_audit: whether the step at hand is an audit, on all workers.
        differences: sums over earlier audits, see `AuditResult.of`; empty: no audit yet.
        waited_s: seconds of a step spent waiting for other workers before the last part of the gradient was sent.
        norms: squared norms of a step's gradient, where they are wanted.
        stats: costs of the last step's exchanges, until `take_stats` takes them.
    """

    def __init__(self, exchange: ExchangeConfig) -> None:
        self.exchange = exchange
        self.stats: list[ExchangeStats] = []
        self.weight: float | str | None = None
        self.record: AuditRecord | None = None
        self.is_audit = False
        self.norms = GradientNorms()
        self.differences: list[Tensor] = []
        self.waited_s = 0.0

    def take_stats(self) -> ExchangeStats | None:
        """Return the cost of the exchanges since the last call, added up, and forget it; None: there was none."""
        taken, self.stats = self.stats, []
        return summed(taken)

    @property
    def is_under_backward(self) -> bool:
        """True where gradients travel while the backward pass goes on."""
        return self.exchange.is_dense

    def audited(self) -> tuple[Tensor, float] | None:
        """Return the gradient difference [elements] and norm of the audit of the last backward pass.

        Here always None.
        """
        return None

    def ended(self) -> None:
        """Note that a backward pass has ended; does nothing but for a sharded model."""


_KEPT: list[DistributedDataParallel] = []


@functools.cache
def keep_modules() -> None:
    """Keep every DistributedDataParallel module that is made from here on alive until the process ends.

    Changes ``DistributedDataParallel.__init__`` in this process for good; a second call does nothing.
    """
    init: Any = DistributedDataParallel.__init__

    @functools.wraps(init)
    def kept(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        _KEPT.append(self)

    DistributedDataParallel.__init__ = kept  # type: ignore[method-assign]  # torch has no hook for it


SUM = "sum"
_FLOAT32 = torch.float32


class WholeSum:
    """Compressed sum of a whole gradient over the workers, at once when its last bucket is made.

    The buckets' elements are exchanged in the order of the parameters, whatever the buckets are.

    Args:
        exchange: sums the whole gradient.
        parameters: parameters of the gradient, in the order in which their gradients are exchanged; fp32.
    """

    def __init__(self, exchange: Exchange, parameters: Sequence[nn.Parameter]) -> None:
        self._exchange, self._parameters = exchange, parameters
        self._pieces: dict[int, Tensor] = {}  # by parameter

    def begin(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> None:
        """Keep a bucket, 1-D, whose elements are the gradients of ``parameters``, until the others are made.

        Args:
            parameters: parameters of the bucket, in the order of its elements.
            buffer: 1-D fp32, their weighted gradients; holds the sum once `wait` has returned.
            last: not used.
        """
        pieces = torch.split(buffer, [parameter.numel() for parameter in parameters])
        self._pieces |= zip(map(id, parameters), pieces, strict=True)

    def wait(self) -> ExchangeStats | None:
        """Replace all buckets, in place, by their sum over all workers; return its cost.

        Every bucket must have begun. Where the gradient is not finite on some worker, all buckets are filled with
        infinity, no residual is kept, and None is returned.

        Raises:
            BadInput: workers are about to exchange in different ways.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        gradients = [self._pieces[id(parameter)] for parameter in self._parameters]
        flat, stats, self._pieces = torch.cat(gradients), None, {}
        if all_finite(flat):
            stats = self._exchange.run(flat)
        else:  # a scaled loss has overflown: nothing of it may stay in a residual, and the scaler skips the step
            flat.fill_(torch.inf)
        for piece, part in zip(gradients, torch.split(flat, [piece.numel() for piece in gradients]), strict=True):
            piece.copy_(part)
        return stats


class CommState(GradientState):
    """The state of hetopt's communication hook for one DDP module: compression, and weight of this worker's gradient.

    Args:
        ddp: the module whose hook this is for.
        compression: record of a compression, or a text as `parse_compression` reads it; not used where ``spec`` is
            given.
        weight: of this worker's gradient: None for its share of the batch (1 / workers where no plan shares it out);
            ``"sum"`` for 1 / workers whatever the shares are, where the script divides its loss by a count of the whole
            batch and multiplies it by the workers, as it must under DDP; or a number, which adds up to 1 over all.
        audit: what happens under ``hetopt launch`` where an audit step finds that shares differ from one machine: the
            log says so (``"warn"``), the run ends (``"stop"``), or there are no audits (``"off"``).
        audit_tolerance: relative distance of the two gradients that is accepted.
        spec: run spec whose compression counts, where a plan says how gradients travel; None: ``compression`` counts.
        reach: told how much of the gradient is made (1 = all), before that part is sent.

    Attributes:
        exchange: exchange of gradients.
        weight: as the argument; may be set before each backward pass.
        record: settings and results of audits.
        is_audit: whether the step at hand is an audit, on all workers.
        differences: sums over earlier audits, see `hetopt.trainer.script.batches.AuditResult`.

    Raises:
        BadInput: the compression is not known, parts of it do not go together, ``weight`` is another text than "sum",
            or ``audit`` or ``audit_tolerance`` is impossible.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        compression: Compression | str = "identity",
        *,
        weight: float | str | None = None,
        audit: Audit = "warn",
        audit_tolerance: float = ROUNDING,
        spec: RunSpec | None = None,
        reach: Callable[[float], None] = lambda done: None,
    ) -> None:
        if isinstance(weight, str) and weight != SUM:
            raise BadInput(f"weight must be None, {SUM!r} or a number, got {weight!r}.")
        self._workers = dist.get_world_size(ddp.process_group)
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        if spec is None:
            spec = make_spec(self._workers, compression=compression, policy="static", sync="bsp", spec=None)
        self.adopt(spec, reach)
        super().__init__(self.exchange)
        self.weight = weight
        why = why_shares_differ(is_ddp=True, normalises=normalises_apart(ddp))
        self.record: AuditRecord = AuditRecord(mode=audit, tolerance=audit_tolerance, hint=why)
        self._apart: dict[int, Tensor] = {}  # by parameter
        self._squares = 0.0

    def adopt(self, spec: RunSpec, reach: Callable[[float], None]) -> None:
        """Set up the exchange anew by a run's spec, before its first step; ``reach`` is told the fraction that is made.

        See the arguments of the class.

        Args:
            spec: run spec; its compression, policies and seed count.
            reach: called with the fraction of the gradient that is made (1 = all), before that part is sent.

        Raises:
            BadInput: the compression does not suit the model, or its parts do not go together.
        """
        device, self.dtype = self._parameters[0].device, self._parameters[0].dtype
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self.exchange = make_exchange(spec, spec.compression, shapes, device)
        by_bucket = self.exchange.steering is None and not METHODS[spec.compression.name].by_shape
        self._sums: BucketSum | WholeSum
        if self.exchange.is_dense or any(parameter.dtype != _FLOAT32 for parameter in self._parameters):
            self._sums = DenseBuckets()
        elif by_bucket or self.exchange.exchange is None:
            self._sums = BucketExchange(spec.compression, self._parameters, seed=spec.seed)
        else:
            self._sums = WholeSum(self.exchange.exchange, self._parameters)
        self._devices = [device] if device.type != "cpu" else None
        self._reach = reach
        self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        self._elements = sum(parameter.numel() for parameter in self._parameters)
        self._ready_elements = 0

    def reduce(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Return a future of a gradient bucket's weighted sum over all workers, in place of the bucket's content.

        The last bucket of a pass waits until all are summed; no future is done before. In an audit the future is done
        at once, and its value is the leader's gradient.

        Args:
            bucket: gradients that DistributedDataParallel has just made; overwritten.

        Raises:
            BadInput: workers are about to exchange in different ways.
            HungPeer: another worker did not come in time.
            LostPeer: another worker left in the middle.
        """
        buffer, is_last = bucket.buffer(), bucket.is_last()
        self._ready_elements = buffer.numel() + (0 if bucket.index() == 0 else self._ready_elements)
        self._reach(1.0 if is_last else min(1.0, self._ready_elements / self._elements))
        buffer.mul_(self.weight if isinstance(self.weight, int | float) else 1 / self._workers)
        promise: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        if self.is_audit:
            self._audit(bucket)
            promise.set_result(buffer)
            return promise
        self.norms.add_own([buffer], first=bucket.index() == 0)
        self._sums.begin(bucket.parameters(), buffer, last=is_last)
        self._waiting.append((buffer, promise))
        if is_last:
            stats, waiting, self._waiting = self._sums.wait(), self._waiting, []
            if isinstance(self._sums, DenseBuckets):
                stats = ExchangeStats(sent_bytes=self.exchange.dense_bytes)
            self.stats = [] if stats is None else [stats]
            for total, future in waiting:
                self.norms.add_summed([total])
                future.set_result(total)
        return promise

    def _audit(self, bucket: GradBucket) -> None:
        """Put the leader's gradient into a bucket, and note its difference from the sum of the others'.

        Every worker must call it; two whole buckets are sent.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        parts = torch.zeros_like(buffer) if dist.get_rank() == 0 else buffer.clone()
        dist.all_reduce(parts)
        dist.broadcast(buffer, 0)
        self._squares += float(buffer.double().square().sum())
        pieces = torch.split((buffer - parts).cpu(), [parameter.numel() for parameter in parameters])
        self._apart |= zip(map(id, parameters), pieces, strict=True)
        self.stats = [ExchangeStats(sent_bytes=2 * self.exchange.dense_bytes)]

    def audited(self) -> tuple[Tensor, float] | None:
        """Return and forget the leader's gradient minus the shares' sum, [elements], and the norm of the leader's.

        Returns:
            Both, on the CPU; None: the backward pass that ended exchanged no audited gradient.
        """
        apart, squares, self._apart, self._squares = self._apart, self._squares, {}, 0.0
        pieces = [apart[id(parameter)] for parameter in self._parameters if id(parameter) in apart]
        return (torch.cat(pieces), math.sqrt(squares)) if pieces else None

    @property
    def is_under_backward(self) -> bool:
        """True where gradients travel during the backward pass, so unless all are compressed at once at its end."""
        return not isinstance(self._sums, WholeSum)


def comm_hook(state: CommState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a future of a gradient bucket summed over all workers, weighted and compressed as ``state`` says.

    For ``DistributedDataParallel.register_comm_hook(state, hetopt.comm_hook)``.

    Args:
        state: state of the module whose hook this is.
        bucket: gradients, 1-D; overwritten.

    Returns:
        A future of the sum, in the bucket's own tensor.
    """
    return state.reduce(bucket)


def part_of(memory: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of ``memory`` whose keys end in ``#name``, without that ending: what one exchange kept."""
    tail = f"#{name}"
    return {key.removesuffix(tail): tensor for key, tensor in memory.items() if key.endswith(tail)}


class ShardedState(GradientState):
    """The state of a sharded model's gradient exchange: each device averages its shard of the gradient over replicas.

    Args:
        module: outermost module that was sharded.
        spec: spec of the run.
        replicas: process group of the devices that hold the same shard as this one; None: the script's own mesh sums
            everything.
        reach: called with the fraction of the gradient that is made (1 = all), before that part is sent.

    Attributes:
        dtype: type of the parameters.
        sums: whether the gradient is averaged over replicas here.
        exchanges: exchange of each part of the model that had a gradient, by the part's name.
        memory: what exchanges held back before an interruption, see `part_of`; each takes its own as it begins.
    """

    def __init__(
        self, module: nn.Module, *, spec: RunSpec, replicas: dist.ProcessGroup | None, reach: Callable[[float], None]
    ) -> None:
        self._spec, self._reach, self._module = spec, reach, module
        self._replicas = replicas
        self.sums = replicas is not None and replicas.size() > 1
        parameters = [held(parameter) for parameter in module.parameters() if parameter.requires_grad]
        exchange = ExchangeConfig(
            compression=spec.compression, dense_bytes=4 * sum(parameter.numel() for parameter in parameters)
        )
        super().__init__(exchange)
        self.dtype = next(module.parameters()).dtype
        self.exchanges: dict[str, Exchange] = {}
        self.memory: Mapping[str, Tensor] = {}
        self._parts = self._parts_before = 0
        if self.sums:
            for name, part in module.named_modules():
                if isinstance(part, FSDPModule):
                    part.set_all_reduce_hook(partial(self._sum, name))

    def ended(self) -> None:
        """Note that a backward pass has ended, and tell ``reach`` so where parts of the model had no gradient."""
        if self._parts and self._parts != self._parts_before:
            self._reach(1.0)
        self._parts, self._parts_before = 0, self._parts or self._parts_before

    def backward(self, loss: Tensor, *, sums: bool, **options: Any) -> list[ExchangeStats]:
        """Run the backward pass of a loss times its weight in that of the batch, and return the costs of its exchange.

        FSDP takes the mean over the devices of a replica, and the exchange the mean over replicas.

        Args:
            loss: loss of this device's samples, times its weight in the batch.
            sums: whether gradients are summed now, with those of passes before; else each device keeps its own.
            options: further arguments of `torch.autograd.backward`.

        Returns:
            Costs of the exchange, one entry; empty: nothing was exchanged.
        """
        self._module.set_requires_gradient_sync(sums)  # type: ignore[operator]  # of an FSDPModule
        torch.autograd.backward(loss * dist.get_world_size(), **options)
        self.ended()
        stats = self.take_stats()
        return [] if stats is None else [stats]

    def _sum(self, name: str, shard: Tensor) -> None:
        """Replace the gradient of a part's shard, 1-D, in place, by its mean over the replicas; all must call it.

        Where the gradient is not finite on some replica, the shard is filled with infinity and no residual changes.
        """
        assert self._replicas is not None
        self._parts += 1
        done = min(1.0, self._parts / self._parts_before) if self._parts_before else 0.0
        if done:
            self._reach(done)
        flat, group = shard.float(), self._replicas  # the same tensor, where it is in single precision
        flat.div_(group.size())
        if name not in self.exchanges:
            seed = self._spec.seed + len(self.exchanges)
            exchange = Exchange(self._spec.compression, flat.numel(), device=flat.device, seed=seed, group=group)
            if before := part_of(self.memory, name):
                exchange.load_state(before)
            self.exchanges[name] = exchange
        if self.exchange.is_dense or all_finite(flat, group):
            stats = self.exchanges[name].run(flat)
            self.stats.append(stats)
            self.waited_s += stats.sync_s if done < 1 else 0.0
        else:  # a scaled loss has overflown: nothing of it may stay in a residual, and the scaler skips the step
            flat.fill_(torch.inf)
        if flat is not shard:
            shard.copy_(flat)
