"""Runs a DDP script as it is on unequal workers: `unequal` gives shares, weighs losses, and watches the steps.

Five things of torch are extended while a script runs: where ``init_process_group`` meets the others, what a
``DataLoader`` reads batches by, what ``DistributedDataParallel`` does when it is made and when it is called (the batch
at hand is noted, and a communication hook is registered unless the script has registered one), and where a backward
pass begins. DDP takes the mean of the gradients of W workers; of worker i, which has n_i of a batch's B samples, the
loss L_i counts

    W n_i / B     so that the mean is that of one machine,   sum_i (n_i / B) dL_i

from where backward begins: whatever mixes gradients of several workers on the way (SyncBatchNorm, gathered features,
micro-batches under ``no_sync``, a communication hook of the script's) mixes them by their weights. The script's own
process group, samplers, loop and checkpoints stay what they are. Accelerate, Lightning and transformers stand on the
same; of transformers one fact more is known, by what its ``Trainer`` divides a loss (see `_weighing`).

**Batches.** A script's sampler gives each rank its samples (``DistributedSampler``, or the batch sampler that
Accelerate makes). Asked for every rank in turn, it tells the batch of all of them; each worker takes its share of that.
So a shuffle, a seed, ``set_epoch`` and padding mean what they mean under torchrun, whatever the sampler is.
"""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import operator
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Sampler, dataloader

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import check_script_batch
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.checkpoints.folder import parameters_sha256, write_model
from hetopt.trainer.context import Generators, States
from hetopt.trainer.data.fetch import samples_in
from hetopt.trainer.ddp.comm_hook import (
    SUM,
    CommState,
    GradientState,
    ShardedState,
    comm_hook,
    keep_modules,
)
from hetopt.trainer.host.gate import group_store
from hetopt.trainer.script.batches import (
    LEAST_WORKERS,
    REGISTRY,
    AuditResult,
    Audits,
    Part,
    ShareTable,
    Stopped,
    own_items,
)
from hetopt.trainer.script.periods import Periods
from hetopt.trainer.sharding import REPLICA, SHARD, gathered, is_sharded, replica_mesh
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.stopwatch import FORWARD

_RANKS = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Names under which samplers know how many ranks there are, and which one they are for."""

_INNER = ("sampler", "batch_sampler")
_DEPTH = 3


def rank_holder(batch_sampler: object, world_size: int) -> tuple[list[str], str] | None:
    """Return the attributes that lead from a batch sampler to its rank's holder, and the rank's attribute there.

    None: within three levels nothing knows that there are ``world_size`` ranks, or there is a single one.

    Args:
        batch_sampler: batch sampler of a loader.
        world_size: number of ranks.
    """
    way: list[str] = []
    for _ in range(_DEPTH):
        for ranks, rank in _RANKS:
            if world_size > 1 and getattr(batch_sampler, ranks, None) == world_size and hasattr(batch_sampler, rank):
                return way, rank
        inner = next((name for name in _INNER if getattr(batch_sampler, name, None) is not None), None)
        if inner is None:
            return None
        way.append(inner)
        batch_sampler = getattr(batch_sampler, inner)
    return None


def _for_rank(batch_sampler: Any, way: Sequence[str], name: str, rank: int) -> Any:
    """Return a copy of a batch sampler, and of the samplers inside it, for another rank, with generators of its own.

    Args:
        batch_sampler: left as it is; data that its samplers hold is shared.
        way: attributes that lead to the rank's holder, as `rank_holder` returns them.
        name: attribute of the rank there.
        rank: of the copy.
    """
    copied = holder = copy.copy(batch_sampler)
    for depth in range(_DEPTH):
        if depth == len(way):
            setattr(holder, name, rank)
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            holder.generator = generator.clone_state()
        inner = next((field for field in _INNER if getattr(holder, field, None) is not None), None)
        if inner is None:
            break
        setattr(holder, inner, copy.copy(getattr(holder, inner)))
        holder = getattr(holder, inner)
    return copied


class UnequalBatches(Sampler[list[int]]):
    """A batch sampler that yields this worker's share of all ranks' batches; outside training, the rank's own batches.

    Its length is the number of batches of an epoch. Batches end an epoch short where the sampler drops none. To iterate
    raises what `DdpRun.table` raises.

    Args:
        batch_sampler: batch sampler of the script's loader.
        batch_size: samples of a batch on each rank, or of all ranks where the sampler splits batches (Accelerate's).
        way: attributes that lead to the holder of the rank, see `rank_holder`.
        name: attribute of the rank there, see `rank_holder`.
        sharer: run that decides on shares while training goes on.

    Attributes:
        parts: parts of the batches that were drawn and not given yet, in their order.
        is_trained_on: whether a training pass was over a batch of it: it is shared out from then on, though the model
            may be in evaluation mode as its loop begins.
    """

    def __init__(self, batch_sampler: Any, batch_size: int, way: Sequence[str], name: str, sharer: DdpRun) -> None:
        self._batches = batch_sampler
        self._way, self._name = way, name
        self._sharer = sharer
        is_split = getattr(batch_sampler, "split_batches", False)  # Accelerate's: the size is of all ranks together
        self._per_rank = batch_size // sharer.world_size if is_split else batch_size
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        self.parts: deque[Part] = deque()
        self.is_trained_on = False
        self._epoch = self._step = 0
        self._table: ShareTable | None = None
        self._order: States | None = None  # of the generators, from which the next epoch's order is drawn

    @property
    def _size(self) -> int:
        return self._sharer.batch_of(self._per_rank)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, each of as many samples of all ranks as the run trains with.

        While the script evaluates, a loader that was not trained on has those of its own rank.
        """
        batches, workers = len(self._batches), self._sharer.world_size
        if self._sharer.trains_model and not (self.is_trained_on or self._sharer.is_training):
            return batches
        if self._size == self._per_rank * workers:
            return batches
        samples = batches * self._per_rank * workers
        with suppress(AttributeError, TypeError):  # of a sampler's rank the last batch may be smaller
            samples = samples if self._drops_last else min(samples, len(self._batches.sampler) * workers)
        return samples // self._size if self._drops_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch: in unequal shares for training, as the sampler gives them otherwise.

        Parts that nobody has used are forgotten.
        """
        self.parts.clear()
        self._sharer.forget(self)
        trains = self._sharer.is_training or (self.is_trained_on and torch.is_grad_enabled())
        return self._shares() if trains else iter(self._batches)

    def _shares(self) -> Iterator[list[int]]:
        """Yield the dataset indices of this worker's share of each batch, and queue the share for the forward pass."""
        sharer = self._sharer
        if self._table is None:
            self._table = sharer.table(self._per_rank)
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number, batch in enumerate(self._of_all_ranks()):
            audits = self._table.audits
            self._step += audits is None or number % audits.accumulate == 0
            sharer.periods.drawn = (epoch, number + 1)  # shares may change from there on
            part = self._table.part(sharer.rank, len(batch), (epoch, number), self._step)
            self.parts.append(part)
            yield list(own_items(batch, part))

    def _of_all_ranks(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, of the plan's size; the last may be smaller.

        Before each rank's first batch, the global random generators are set back, so that all draw one order. They go
        on from there in the next epoch, whatever else draws: workers with unequal shares draw unlike amounts for
        augmentation and dropout, and would otherwise disagree about the order, and read samples twice or never.
        """
        this_rank, present = self._sharer.rank, States.now()
        samplers = [
            self._batches if rank == this_rank else _for_rank(self._batches, self._way, self._name, rank)
            for rank in range(self._sharer.world_size)
        ]
        each = []
        for sampler in samplers:
            (self._order or present).use()  # every rank of the script would draw the same order
            batches = iter(sampler)
            first = list(islice(batches, 1))  # which draws the order
            each.append(chain(first, batches))
        self._order = States.now()
        present.use()
        waiting: list[int] = []
        for ranks in zip_longest(*each, fillvalue=()):
            waiting += chain.from_iterable(ranks)
            while len(waiting) >= self._size:
                yield waiting[: self._size]
                waiting = waiting[self._size :]
        if waiting and not (self._drops_last and self._size != self._per_rank * self._sharer.world_size):
            yield waiting


class DdpRun:
    """One worker's run of a DDP script: its shares of batches, weights of losses, control periods and event log.

    Args:
        spec: run spec of the launch: shares, compression, policies.
        run_dir: folder for the event log, which rank 0 writes.
        rank: of this worker.
        world_size: number of workers.
        as_one: whether every step is an audit, so that the run trains as one machine would.

    Attributes:
        periods: control periods, which count its steps and decide on shares and exchange.
        steps: number of steps that optimizers have made.
        can_audit: whether a loss is of the samples of its worker alone, and not divided by what all workers count.
        scaled: what a GradScaler made of a loss last, and that loss; None: no scaler was used.
        divides: whether the Trainer of transformers divides its losses by what all workers count; None: not known.
    """

    def __init__(self, spec: RunSpec, run_dir: Path, rank: int, world_size: int, *, as_one: bool = False) -> None:
        self._spec, self._run_dir, self._as_one = spec, run_dir, as_one
        self.rank, self.world_size, self.steps = rank, world_size, 0
        self._modules: list[tuple[nn.Module, Any]] = []  # of DDP, and how their gradients travel
        self._hooked: dict[int, bool] = {}
        self._remarks: set[str] = set()
        self.periods = Periods(spec, rank, world_size, run_dir)
        self._waiting: deque[tuple[object, Part]] = deque()
        self._read: Counter[UnequalBatches] = Counter()  # batches of each loader that was trained on
        self._part: Part | None = None
        self._loss, self._taken = torch.zeros((), dtype=torch.float64), (0,) * world_size  # of the step under way
        self.scaled: tuple[Tensor, Tensor] | None = None
        self._state: CommState | None = None  # of the module that was called last
        self._computes_in = torch.float32
        self._is_within = False  # a backward pass
        self._draws = self._is_used = False  # whether no loader gave the batch at hand, and it had a backward pass
        self._batches = self._base = 0  # of the steps so far; samples on a rank of the first loader in shares
        self._is_audit: bool | None = None  # of the step's batches so far, all; None: the step has none yet
        self._drawn_before: Generators | None = None
        self._left: tuple[dict[str, Any], Iterable[tuple[str, Tensor]]] | None = None  # model and its parameters
        self.can_audit = True
        self.divides: bool | None = None

    # Shares (see `hetopt.trainer.ddp.script`).

    @property
    def trains_model(self) -> bool:
        """True from where the script has wrapped or sharded a model on; of a single worker from its first step on."""
        return bool(self._modules)

    @property
    def is_training(self) -> bool:
        """True while the script trains: some DDP module is in training mode, and gradients are on."""
        return torch.is_grad_enabled() and any(_inner(module).training for module, _ in self._modules)

    @property
    def is_ours(self) -> bool:
        """True where hetopt, and no other hook, exchanges the gradients of every DDP module."""
        return all(self._hooked.get(id(ddp), True) for ddp, _ in self._modules)

    def remark(self, sentence: str) -> None:
        """Print a sentence about the script to the standard error of rank 0, unless it was printed before."""
        if self.rank == 0 and sentence not in self._remarks:
            self._remarks.add(sentence)
            print(f"hetopt: {sentence}", file=sys.stderr, flush=True)

    def batch_of(self, batch_size: int) -> int:
        """Return the samples of a batch over all workers: ``batch_size`` on each, or for a script as the plan has it.

        The plan's batch is that of the first loader in shares. Loaders of other sizes keep their proportion to it.
        """
        planned = self._spec.global_batch_size // self._spec.batches_per_step * batch_size / (self._base or batch_size)
        return max(1, round(planned)) if self._spec.script else batch_size * self.world_size

    def table(self, batch_size: int) -> ShareTable:
        """Begin control periods on a new loader of ``batch_size`` samples a rank; return its table of shares.

        Args:
            batch_size: samples of a batch on each rank, as the script's loader has it.

        Raises:
            BadInput: there are fewer samples than workers, or every step is to be an audit and the script weighs or
                exchanges gradients itself.
        """
        self._base = self._base or batch_size
        return self._begin(self.batch_of(batch_size))

    def _begin(self, size: int, keep: tuple[int, ...] = ()) -> ShareTable:
        state, module = self._modules[-1][1], nn.ModuleList(ddp for ddp, _ in self._modules)
        return self.periods.begin(
            size, module, state.exchange, device=self._device, step=self.steps, keep=keep, audits=self._audits(keep)
        )

    @property
    def _device(self) -> torch.device:
        return next(self._modules[-1][0].parameters()).device

    def _audits(self, keep: tuple[int, ...]) -> Audits | None:
        """Return the rule for which batches the leader computes whole and the others in shares; None: none.

        Shares that have to be equal stay so in every step.

        Raises:
            BadInput: every step is to be an audit, and the script weighs or exchanges gradients itself.
        """
        spec, states, as_one = self._spec, [state for _, state in self._modules], self._as_one
        if not as_one and (keep or self.world_size < LEAST_WORKERS or spec.batch_policy == "uniform"):
            return None
        can_audit = self.is_ours and self.can_audit and all(state.weight is None for state in states)
        if as_one and not can_audit:
            raise BadInput(
                "No worker can compute the whole batch: the script weighs or exchanges gradients itself.",
                hint="`hetopt launch --no-check` leaves the comparison out",
            )
        if as_one:
            return Audits(every_step=True)
        is_off = any(state.record is None or state.record.mode == "off" for state in states)
        return (
            Audits(accumulate=spec.batches_per_step, largest=spec.workers[0].max_local_batch_size)
            if can_audit and not is_off
            else None
        )

    # What the script does.

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Register a DDP module, whose gradients hetopt exchanges from its first training pass on.

        Raises:
            BadInput: the plan has devices share the model, and DDP gives each all of it.
        """
        if self._spec.shard not in (None, "none"):
            raise BadInput(
                "The plan lets the devices of a machine share the model, and the script gives each of them all of it.",
                hint="call torch's `fully_shard` in place of DistributedDataParallel, or plan again",
            )
        self._modules.append((ddp, CommState(ddp, spec=self._spec, reach=self.reach)))

    def attach_sharded(self, module: nn.Module, replicas: dist.ProcessGroup | None) -> None:
        """Register a sharded module, whose gradients hetopt exchanges between replicas, in place of those inside it.

        Args:
            module: sharded module.
            replicas: the devices that hold the same shard as this one; None: the script's own mesh sums everything.
        """
        inside = set(module.modules())
        self._modules = [(other, state) for other, state in self._modules if other not in inside]
        state = ShardedState(module, spec=self._spec, replicas=replicas, reach=self.reach)
        self._modules.append((module, state))
        self._hooked[id(module)] = state.sums
        self.can_audit = False

    def before_forward(self, module: nn.Module, inputs: Any, named: Any) -> None:
        """Take the queued batch before a training pass of a sharded module; do nothing for one inside another.

        Args:
            module: module that is called.
            inputs: positional arguments of the module's call.
            named: keyword arguments of the module's call.

        Raises:
            BadInput: as of `forward`.
        """
        if module.training and torch.is_grad_enabled() and any(module is outer for outer, _ in self._modules):
            self.forward(module, samples_in((inputs, named)))

    def registered(self, ddp: DistributedDataParallel, state: object) -> None:
        """Note that the script registered a communication hook: hetopt's, or another, which replaces compression.

        Args:
            ddp: module whose hook was registered.
            state: state that the script registered with its hook; a `CommState` is given this run's compression.
        """
        self._hooked[id(ddp)] = isinstance(state, CommState)
        if isinstance(state, CommState):
            state.adopt(self._spec, self.reach)
            self._modules = [(module, state if module is ddp else other) for module, other in self._modules]
        else:
            self.remark(
                "the script registers a communication hook of its own, which is kept: the plan's compression is not "
                "used, and no step is audited."
            )

    def give(self, sampler: object, batch: object) -> None:
        """Queue this worker's part of a batch that a loader has just given the script, until a forward pass takes it.

        Args:
            sampler: sampler of the loader that gave the batch.
            batch: batch that the loader gave.
        """
        parts = sampler.parts if isinstance(sampler, UnequalBatches) else ()
        part = parts.popleft() if parts else self._equal_part(samples_in(batch))
        if part.is_audit:
            self._drawn_before = Generators.at(self._device)
        # What another loader gave in equal shares was for another purpose than training: nothing waits for it.
        self._waiting = deque(entry for entry in self._waiting if entry[0] is sampler or entry[1].step)
        self._waiting.append((sampler, part))

    def forget(self, loader: object) -> None:
        """Drop queued batches of a loader, given by its sampler, that were not computed: the script left its loop."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not loader)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap
    def forward(self, ddp: nn.Module, rows: int) -> None:
        """Take the first queued batch, which a training forward pass of ``ddp`` over ``rows`` samples now computes.

        Several passes may be over one batch while the next is read ahead: those keep it, where its rows tell. Where no
        loader gives batches, each that is followed by a backward pass counts as one in equal shares, and a remark says
        so.

        Args:
            ddp: module that is called.
            rows: samples of its first input; 0: not known.

        Raises:
            BadInput: every step is to be an audit and the script weighs or exchanges gradients itself.
        """
        self._state = next(state for module, state in self._modules if module is ddp)
        kind = self._device.type
        self._computes_in = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._state.dtype
        if isinstance(ddp, DistributedDataParallel) and id(ddp) not in self._hooked:
            ddp.register_comm_hook(self._state, comm_hook)
        before = self._part
        if self._waiting and (before is None or not before.rows == rows != self._waiting[0][1].rows):
            alike = (place for place, (_, part) in enumerate(self._waiting) if part.rows == rows)
            for _ in range(next(alike, 0)):  # batches that the script passed over
                self._waiting.popleft()
            sampler, part = self._waiting.popleft()
            self._draws = False
            if isinstance(sampler, UnequalBatches):
                sampler.is_trained_on = True
                self._read[sampler] += 1
            else:
                self.remark(
                    "a loader that the script trains on keeps equal shares: nothing in its sampler is of one rank."
                )
        elif before is None or self._is_used:
            part, self._draws = self._equal_part(rows), True
            self.remark("the script reads its batches through no DataLoader: shares stay equal.")
        else:
            return
        if self.periods.engine is None:
            self._begin(part.batch, part.shares)
        self._part, self._is_used, self._taken = part, False, tuple(map(operator.add, self._taken, part.shares))
        self.periods.samples_seen += part.batch
        self.periods.pace.begin(part.samples)
        self._batches += 1

    def _factor(self) -> float:
        """Return the factor on this worker's loss of the batch, and note whether the step is an audit so far.

        A step is an audit if all of its batches are. In another step the leader computes a batch that was to be audited
        alone: the others' factor is 0, and what they have left in ``.grad`` under ``no_sync`` is set to zero.
        """
        part = self._part
        if part is None or self._state is None:
            return 1.0
        weight = self._state.weight
        is_audit = part.is_audit and self.is_ours and weight is None
        if self._is_audit and not is_audit and self.rank:
            for module, _ in self._modules:
                module.zero_grad()
        self._is_audit = is_audit and self._is_audit is not False
        for _, state in self._modules:
            state.is_audit = self._is_audit
        if weight is not None:
            return float(part.samples > 0)
        is_leaders = part.is_audit and not self._is_audit and self.rank > 0
        return 0.0 if is_leaders else self.world_size * part.weight

    def _weight(self) -> float:
        """Return the weight of this worker's gradient in the workers' sum, 0 to 1; 0 before a batch."""
        part, weight = self._part, None if self._state is None else self._state.weight
        if weight is not None:
            return 1 / self.world_size if weight == SUM else float(weight)
        # The leader's loss is of the whole batch.
        return 0.0 if part is None or (part.is_audit and self.rank) else part.weight

    def _equal_part(self, rows: int) -> Part:
        """Return this worker's part of a batch that hetopt does not share out, equal on all workers."""
        samples = rows or max(1, self._spec.global_batch_size // self.world_size)
        return Part(samples=samples, batch=samples * self.world_size, shares=(samples,) * self.world_size)

    def weigh(self, weight: float | str | None) -> None:
        """Set the weight of this worker's gradients from here on: a factor, "sum", or None for its share."""
        for _, state in self._modules:
            state.weight = weight

    def reach(self, done: float) -> None:
        """Mark a fraction of backward, 0 to 1, as done; first sleep, if this worker is slowed down on purpose.

        A step counts only once 1 was reached.
        """
        self.periods.pace.reach(FORWARD + (1 - FORWARD) * done if done < 1 else 1.0)
        if done >= 1 and self.periods.engine is not None:
            self.periods.computed = self.periods.stopwatch.mark()
            self._is_audit = None

    @contextmanager
    def backward(self, tensors: Any, gradients: Any) -> Iterator[Any]:
        """Yield the gradients that a backward pass begins with, times the loss's weight; log the result of an audit.

        A backward pass inside another one changes nothing.

        Args:
            tensors: one or several tensors, whose derivatives are taken.
            gradients: gradients with respect to these, as of `torch.autograd.backward`; None: 1 for each.

        Raises:
            RunFailed: the pass was an audit, and the run is to stop at what it found.
        """
        if self._is_within:  # that of a checkpointed part of the model
            yield gradients
            return
        if isinstance(tensors, Tensor) and tensors.dim() == 0:
            loss = self.scaled[1] if self.scaled is not None and self.scaled[0] is tensors else tensors
            self._loss = self._loss + self._weight() * loss.detach().double()
        factor, self._is_within = self._factor(), True
        try:
            yield gradients if factor == 1 else _multiplied(factor, tensors, gradients)
        finally:
            self._is_within, self._is_used = False, self._draws
        if not self.is_ours:
            self.reach(1.0)
        for _, state in self._modules:
            state.ended()
        if self._drawn_before is not None:
            for _, state in self._modules:
                self._tell_audit(state, self._drawn_before.has_drawn(self._device))

    def _tell_audit(self, state: CommState, draws: bool) -> None:
        """Log the result of an audit, if the pass was one; all workers must call it.

        RunFailed: the run stops at the result.
        """
        audited = state.audited()
        if audited is None:
            return
        apart, norm = audited
        drawn = torch.tensor([float(draws)], device=self._device)
        dist.all_reduce(drawn)
        result = AuditResult.of(apart, norm, draws=bool(drawn), before=state.differences)
        state.record.tolerance = max(state.record.tolerance, ROUNDINGS * torch.finfo(self._computes_in).eps)
        state.record.tell(result, self.steps + 1, self.periods.events)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step; at a control period's end decide with all workers.

        A step of an optimizer without parameters of the run's modules, or before the first batch in shares, is not
        counted.

        Raises:
            Stopped: somebody asked the run to end, on all workers between the same two steps.
            BadInput: the script steps by another number of samples or batches than the plan.
        """
        periods, part, wrapped = (
            self.periods,
            self._part,
            {id(parameter) for ddp, _ in self._modules for parameter in ddp.parameters()},
        )
        is_own = any(id(parameter) in wrapped for group in optimizer.param_groups for parameter in group["params"])
        if part is None or periods.computed is None or not is_own:
            return  # before the first batch in shares, or one more optimizer of the same step
        self.steps += 1
        _, state = self._modules[-1]
        if self.steps == 1 and self._spec.script and part.step and self._batches != self._spec.batches_per_step:
            raise BadInput(
                f"The plan steps by {self._spec.global_batch_size:,} samples, and {Path(self._spec.script[0]).name} by "
                f"{sum(self._taken):,}: by {self._batches} batches of its loader, where it had "
                f"{self._spec.batches_per_step} in its profile.",
                hint="profile it with the arguments that it is launched with",
            )
        taken = self._taken if any(self._taken) else part.shares  # one more step of the same batch
        if self.steps == 2 and self._spec.script and not part.step and periods.samples_seen == 2 * sum(taken):
            check_script_batch(self._spec, sum(taken))  # of batches that hetopt does not cut, and that are of one size
        loss_sum = sum(taken) * self._loss
        self._loss, self._taken = torch.zeros_like(loss_sum), (0,) * self.world_size
        waited_s, state.waited_s = state.waited_s, 0.0
        stops = periods.after(
            taken,
            loss_sum=loss_sum,
            stats=state.take_stats(),
            hidden=state.is_under_backward,
            waited_s=waited_s,
            norms=state.norms.take(taken[self.rank]),
            counts=part.shares == periods.shares and not part.is_audit,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            epoch=self._passes,
        )
        if stops:
            raise Stopped
        periods.begun = periods.stopwatch.mark()
        if periods.engine is not None and len(self._modules) == 1:
            state.norms.ask(periods.engine.wants_norms)

    @property
    def shares_batches(self) -> bool:
        """True where a loader that the script trains on gives shares of its batches instead of whole ones."""
        return bool(self._read)

    @property
    def num_processes(self) -> int:
        """The batches of the script's own size in the newest step, such that over all steps their number is right.

        A scheduler of Accelerate steps so often: under plain torchrun each process has a batch of that size.
        """
        batch = self.batch_of(self._base)
        return self.steps * batch // self._base - (self.steps - 1) * batch // self._base

    def _passes(self) -> float:
        """Return the passes over the data of the loader that was trained on most."""
        passes = 0.0
        for loader, batches in self._read.items():
            with suppress(TypeError):  # a batch sampler of the script's that has no length
                passes = max(passes, batches / max(1, len(loader)))
        return passes

    def conclude(self) -> None:
        """Log the last steps and gather the model for `close`, while workers are connected; all must call it.

        Without a step, or a second time, nothing is done.
        """
        if self.periods.engine is not None and self._left is None:
            with suppress(RuntimeError):  # another worker has left: its last steps are not told
                self.periods.finish(self._passes())
            module, _ = self._modules[-1]
            state = gathered(_inner(module).state_dict(), keep=self.rank == 0)
            trained = state.items() if is_sharded(module.parameters()) else _inner(module).named_parameters()
            self._left = state, trained

    def close(self, *, stopped: bool) -> None:
        """Write the model of the last DDP module to the run's folder and end the log, on rank 0; all must call it.

        Without a step no model is written.

        Args:
            stopped: whether somebody asked the run to end.

        Raises:
            RunFailed: the disk is full or cannot be written.
        """
        self.conclude()
        if self._left is not None and self.rank == 0:
            state, parameters = self._left
            write_model(self._run_dir, state, stopped=stopped, number=1)
            mark = parameters_sha256(parameters)
            self.periods.events.write("session_finished", step=self.steps, epoch=self._passes(), parameters_sha256=mark)
        self.periods.events.close()


class LoneRun(DdpRun):
    """The run of a script on one worker: nothing is shared or exchanged, and the steps of its optimizer are logged.

    Arguments are as of `DdpRun`.
    """

    def forward(self, ddp: DistributedDataParallel, rows: int) -> None:
        """Do nothing: all of a batch is this worker's."""

    def give(self, sampler: object, batch: object) -> None:
        """Do nothing: the script keeps its own batches."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step and log it; the first one begins the log, without its time, which is not known.

        Steps of other optimizers than the first are not counted.

        Raises:
            Stopped: somebody asked the run to end.
        """
        samples = self._spec.global_batch_size
        if self._part is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            exchange = ExchangeConfig(
                compression=Compression(), dense_bytes=sum(parameter.nbytes for parameter in parameters)
            )
            self._modules, self.steps = [(_module_of(parameters), GradientState(exchange))], 1
            self._part = Part(samples=samples, batch=samples, shares=(samples,))
            self._begin(samples, (samples,))
            self._optimizer = optimizer
        elif optimizer is self._optimizer:
            self.reach(1.0)
            super().stepped(optimizer)
        else:
            return  # one more of the same step
        self.periods.samples_seen += samples
        self.periods.pace.begin(samples)


ROUNDINGS = 4
"""Multiple of the rounding of the numbers that a model computes in, by which two gradients of the same samples may lie
apart."""

_MEETING_TIMEOUT = datetime.timedelta(minutes=30)
"""For the workers of a group to come, as torch has it."""


def _module_of(parameters: Sequence[nn.Parameter]) -> nn.Module:
    """Return the smallest module that has all of some parameters; where there is none, a list of them."""
    wanted, having = {id(parameter) for parameter in parameters}, list[nn.Module]()
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and wanted <= {id(parameter) for parameter in thing.parameters()}:
            having.append(thing)
    return min(having, key=lambda module: len(list(module.modules())), default=nn.ParameterList(parameters))


@contextmanager
def unequal(spec: RunSpec, run_dir: Path, *, as_one: bool = False) -> Iterator[Callable[[], DdpRun | None]]:
    """Extend torch inside, so that a DDP script trains on unequal workers; yield a function that returns its run.

    That function returns None while the script has made no module of DistributedDataParallel, sharded none and, on one
    worker, made no step. At the end torch is as before, and the trained model is written; also where the script is
    stopped.

    Args:
        spec: run spec of the launch.
        run_dir: folder of the launch.
        as_one: whether the leader computes the whole of every batch, so that the run trains as one machine would.

    Raises:
        BadInput: the script shards its model over a part of the workers, or by another way than ``fully_shard``.
        RunFailed: the model cannot be written.
        Stopped: the run was asked to end; raised again once the model is written.
    """
    runs: list[DdpRun] = []
    workers = len(spec.workers)
    meshes: list[DeviceMesh] = []

    def begun() -> DdpRun:
        """Return the script's run; begin it where it has not begun."""
        if not runs:
            runs.append(DdpRun(spec, run_dir, dist.get_rank(), workers, as_one=as_one))
        return runs[0]

    def ask_trainer() -> None:
        """Extend the Trainer of transformers, if imported, to note how it divides losses; its steps are not audited."""
        if "transformers.trainer" in sys.modules:
            trainer = sys.modules["transformers.trainer"].Trainer
            if not hasattr(trainer.compute_loss, "__wrapped__"):
                _extend(undo, trainer, "compute_loss", partial(_weighing, runs))
            for run in runs:
                run.can_audit = False
        if "accelerate.scheduler" in sys.modules:
            _extend(undo, sys.modules["accelerate.scheduler"], "AcceleratorState", counted)

    def counted(state: Any) -> Any:
        """Return what tells schedulers of Accelerate how often to step: the run if it cuts batches, else the state."""
        return runs[0] if runs and runs[0].shares_batches else state()

    def attached(init: Any, self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        """Make a DDP module; attach it to the run, which the first one begins, if all workers, of several, share it."""
        init(self, *args, **options)
        if dist.get_world_size(self.process_group) == workers > 1:
            begun().attach(self)
        ask_trainer()

    def sharded(shard: Any, module: Any, *args: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
        """Shard a module over a mesh of each machine's devices, and attach it; with one worker, shard it as asked.

        Raises:
            BadInput: ``mesh`` has some of the workers only.
        """
        if not dist.is_initialized() or dist.get_world_size() != workers or workers == 1:
            return shard(module, *args, **({} if mesh is None else {"mesh": mesh}), **options)
        if mesh is not None and mesh.size() != workers:
            raise BadInput(
                f"The script shards its model over {mesh.size()} of {workers} workers: these cannot be weighed.",
                hint="call fully_shard without a mesh, or over all workers",
            )
        if mesh is None or mesh.ndim == 1:
            if not meshes:
                kind = (
                    str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
                    if mesh is None
                    else mesh.device_type
                )
                meshes.append(replica_mesh([worker.host for worker in spec.workers], kind))
            mesh = meshes[0][SHARD]
        done = shard(module, *args, mesh=mesh, **options)
        for part in module if isinstance(module, list | tuple) else [module]:
            begun().attach_sharded(part, meshes[0][REPLICA].get_group() if mesh.ndim == 1 else None)
            part.register_forward_pre_hook(runs[0].before_forward, with_kwargs=True)
        ask_trainer()
        return done

    def called(forward: Any, self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        """Call a module, after reporting the rows of its inputs to the run if the module trains."""
        if runs and self.module.training and torch.is_grad_enabled():
            runs[0].forward(self, samples_in((inputs, named)))
        return forward(self, *inputs, **named)

    def registered(register: Any, self: DistributedDataParallel, state: object, hook: Any) -> None:
        """Register a communication hook, and report the hook's state to the run."""
        register(self, state, hook)
        if runs:
            runs[0].registered(self, state)

    def index_sampler(self: DataLoader[Any]) -> Any:
        """Return the sampler of a loader's batches: in unequal shares where the rank that it draws for is known."""
        sampler = vars(self).get("_hetopt_batches")
        if sampler is None and self.batch_sampler is not None and isinstance(_size_of(self), int):
            has_met = dist.is_initialized() and dist.get_world_size() == workers and REGISTRY.begun == 0
            holder = rank_holder(self.batch_sampler, workers) if runs or has_met else None
            if holder is not None:  # whose length frameworks ask for before they wrap the model
                sampler = UnequalBatches(self.batch_sampler, _size_of(self), *holder, begun())
                object.__setattr__(self, "_hetopt_batches", sampler)
        return sampler or of_loader.fget(self)

    def following(follow: Any, self: Any) -> Any:
        """Return a loader's next batch, and queue its part for the forward pass."""
        batch = follow(self)
        if runs:
            runs[0].give(self._index_sampler, batch)
        return batch

    def scaled(scale: Any, self: GradScaler, outputs: Any) -> Any:
        """Return a loss scaled for fp16, and note the pair of scaled and plain loss in the run."""
        result = scale(self, outputs)
        for run in runs:
            run.scaled = (result, outputs)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap
    def backward(run: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        with runs[0].backward(tensors, grad_tensors) if runs else nullcontext(grad_tensors) as gradients:
            run(tensors, gradients, *args, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap
    def stepped(optimizer: Optimizer, args: Any, options: Any) -> None:
        """Count an optimizer's step; of a script of one worker begin the run; BadInput: another way of sharding."""
        if not runs and workers == 1 and REGISTRY.begun == 0:
            runs.append(LoneRun(spec, run_dir, 0, 1))
        if runs and (workers == 1 or runs[0].trains_model):
            runs[0].stepped(optimizer)
        elif workers > 1 and not REGISTRY.open:
            _refuse_other_ways(optimizer)

    def joined(
        join: Any, backend: str | None = None, init_method: str | None = None, *args: Any, **options: Any
    ) -> None:
        """Open the default group; by environment variables, in a store that no earlier attempt has written to."""
        by_environment = init_method in (None, "env://") and not args and options.get("store") is None
        if by_environment and "RANK" in os.environ:  # whoever starts again meets nothing of what was there before
            place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
            store = group_store(os.environ, place["rank"], options.get("timeout") or _MEETING_TIMEOUT)
            init_method, options = None, {**options, **place, "store": store}
        join(backend, init_method, *args, **options)

    def left(leave: Any, *args: Any, **options: Any) -> None:
        """Conclude the run, and destroy the process group."""
        for run in runs:
            run.conclude()
        leave(*args, **options)

    keep_modules()
    of_loader: Any = DataLoader._index_sampler
    with ExitStack() as undo:
        for owner, name, extension in (
            (DistributedDataParallel, "__init__", attached),
            (DistributedDataParallel, "forward", called),
            (DistributedDataParallel, "register_comm_hook", registered),
            (dataloader._BaseDataLoaderIter, "__next__", following),
            (torch.autograd, "backward", backward),
            (GradScaler, "scale", scaled),
            (dist, "init_process_group", joined),
            (dist, "destroy_process_group", left),
            (fsdp, "fully_shard", sharded),
        ):
            _extend(undo, owner, name, extension)
        undo.callback(setattr, DataLoader, "_index_sampler", of_loader)
        DataLoader._index_sampler = property(index_sampler)  # type: ignore[method-assign,assignment]
        hook = register_optimizer_step_post_hook(stepped)
        undo.callback(hook.remove)
        try:
            yield lambda: runs[0] if runs and runs[0].trains_model else None
        except Stopped:
            for run in runs:
                run.close(stopped=True)
            raise
        for run in runs:
            run.close(stopped=False)


def _inner(module: Any) -> Any:
    """Return the module inside DistributedDataParallel, or a sharded module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _size_of(loader: DataLoader[Any]) -> Any:
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def _multiplied(factor: float, tensors: Any, gradients: Any) -> list[Tensor | None]:
    """Return the gradients that a backward pass of some tensors begins with, times a factor.

    None stands for a tensor of several elements that was given no gradient: torch refuses it.
    """
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
    pairs = zip(roots, given if len(given) == len(roots) else (None,) * len(roots), strict=True)
    return [
        factor * gradient if gradient is not None else torch.full_like(root, factor) if root.numel() == 1 else None
        for root, gradient in pairs
    ]


def _weighing(
    runs: Sequence[DdpRun], compute_loss: Any, trainer: Any, *args: Any, num_items_in_batch: Any = None, **options: Any
) -> Any:
    """Compute a loss by `Trainer.compute_loss` of transformers, and note whether the Trainer made it a sum.

    ``average_tokens_across_devices`` divides a loss by the items that all workers have in the batch, and multiplies it
    by the workers, since DDP takes their mean: such gradients are added up, whatever the shares are. Models that are
    given the number of items and take a mean of their own all the same (BERT's classifiers) are told by the derivative
    of the first loss by that number: there is none.
    """
    takes = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func) and num_items_in_batch is not None
    items = num_items_in_batch
    if takes and torch.is_grad_enabled() and any(run.divides is None for run in runs):
        items = torch.as_tensor(items, dtype=torch.float32).clone().requires_grad_()
    result = compute_loss(trainer, *args, num_items_in_batch=items, **options)
    for run in runs:
        if items is not num_items_in_batch:
            run.divides = torch.autograd.grad(
                result if isinstance(result, Tensor) else result[0], items, retain_graph=True, allow_unused=True
            ) != (None,)
        run.weigh(SUM if takes and run.divides and trainer.args.average_tokens_across_devices else None)
    return result


def _extend(undo: ExitStack, owner: Any, name: str, extension: Callable[..., Any]) -> None:
    """Have a function do something besides, until it is undone.

    Args:
        undo: puts the function back as it ends.
        owner: of the function: a class or a module.
        name: of the function.
        extension: called in its place, with the function itself before its arguments.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def extended(*args: Any, **options: Any) -> Any:
        return extension(original, *args, **options)

    undo.callback(setattr, owner, name, original)
    setattr(owner, name, extended)


def _refuse_other_ways(optimizer: Optimizer) -> None:
    """Raise BadInput if parameters are sharded by FSDP1, a tensor mesh or DeepSpeed; otherwise do nothing."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    has_parts = is_sharded(parameters) or any(hasattr(parameter, "_is_flat_param") for parameter in parameters)
    if not has_parts and "deepspeed" not in sys.modules:
        return
    way = "FullyShardedDataParallel or a tensor mesh" if has_parts else "DeepSpeed"
    raise BadInput(
        f"The script shards its model over the workers by {way}, which `hetopt launch` cannot weigh.",
        hint="shard it by torch's fully_shard, or wrap it in DistributedDataParallel where it fits on one device",
    )
