"""Where a session meets its script: batches are handed to it, backward passes and optimizer steps are followed.

What a task's loop does (`hetopt.trainer.loop`), a session does where the script calls it. Gradients are those of all
workers before an optimizer steps, and between two steps periods are concluded.
"""

from __future__ import annotations

import math
import operator
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import check_script_batch
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import gather_numbers, take_parameters
from hetopt.trainer.checkpoints.folder import SharedState
from hetopt.trainer.comm.exchange import ExchangeStats, summed
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.context import Generators, States
from hetopt.trainer.ddp.comm_hook import ShardedState
from hetopt.trainer.engine import parameters_of
from hetopt.trainer.script.batches import (
    LEAST_WORKERS,
    REGISTRY,
    AuditRecord,
    Audits,
    Part,
    ShareTable,
    Stopped,
    draw_by_rank,
)
from hetopt.trainer.script.periods import Periods
from hetopt.trainer.session.gradients import GradientSum, check_parameters, named_parameters
from hetopt.trainer.session.guards import check_replicas, inspect_loader, replica_marks
from hetopt.trainer.session.loaders import SessionLoader, Splits
from hetopt.trainer.session.turns import StepMessages
from hetopt.trainer.session.weights import Counts, Weight
from hetopt.trainer.session.whole_batch import WholeBatch
from hetopt.trainer.sharding import Shards, is_sharded, reshard
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig, can_overlap, make_exchange
from hetopt.trainer.steps.stopwatch import FORWARD, Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer, make_synchroniser
from hetopt.trainer.task import average_buffers, float_buffers

CHECKED_STEPS = 20
"""Number of an optimizer's steps between comparisons of the replicas; of the first, steps 1, 2, 4, 8 and 16 are
compared."""

_RIDES = 1
"""Marks the word of a worker whose gradient travels with it."""

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])


@dataclass(kw_only=True, eq=False)
class Side:
    """One optimizer of a session, with the sum of its gradients, and its backward passes and steps so far.

    Attributes:
        optimizer: of the script.
        sum: sums its parameters' gradients over workers; None: gradients stay this worker's, or are summed elsewhere.
        is_trained: whether any of its parameters requires gradients, at the moment.
        backwards: number of backward passes that made gradients of its parameters since it stepped.
        is_summed: whether ``.grad`` holds the gradients of all workers.
        steps: number of steps that it has made.
    """

    optimizer: Optimizer
    sum: GradientSum | None = None
    is_trained: bool = True
    backwards: int = 0
    is_summed: bool = False
    steps: int = 0


class Flow:
    """The base of `Session`, which hands out a script's batches in parts, and sums gradients before optimizers step.

    Attributes:
        rank: of this worker.
        world_size: workers.
        device: where the parameters are.
        accumulate: backward passes of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        spec: RunSpec,
        rank: int,
        world_size: int,
        store: Store | None,
        accumulate: int,
        steps: int | None,
        scaler: GradScaler | None,
        folder: Path | None,
        audit: AuditRecord,
        synchronizes_norms: bool,
        shards: Shards,
        leave: Callable[[], None],
    ) -> None:
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self._model, self._spec = model, spec
        self._scaler, self._steps, self._folder, self._leave = scaler, steps, folder, leave
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sides = [Side(optimizer=optimizer) for optimizer in optimizers]
        named = [named_parameters(optimizer, self._names) for optimizer in optimizers]
        for parameters in (*named, self._trained):
            self.device = check_parameters(parameters)
        self._trains_alone, self._devices = spec.is_local and world_size > 1, shards.devices
        self._is_joint = not self._trains_alone and (world_size > 1 or spec.compression.name != "identity")
        # One worker that sends everything has nothing to do, and the script's own numbers stay what they were.
        self._exchange = ExchangeConfig(
            compression=spec.compression, dense_bytes=sum(parameter.nbytes for _, parameter in self._trained)
        )
        self._sharded: ShardedState | None = None
        if shards.devices > 1:  # gradients are summed as backward makes them
            self._sharded = ShardedState(model, spec=spec, replicas=shards.counterparts, reach=self._reach)
            self._exchange = self._sharded.exchange
        elif self._is_joint:
            # Parts of two gradients that backward makes at a time would be sent in different orders on the workers.
            overlaps = len(self._sides) == 1 and can_overlap(self.device, world_size)
            for side, parameters in zip(self._sides, named, strict=True):
                side.sum = GradientSum(
                    parameters,
                    partial(make_exchange, spec, spec.compression, device=self.device, store=store),
                    world_size=world_size,
                    overlaps=overlaps,
                    watched=lambda: self._gate,
                )
            self._exchange = self._exchange_of_all()
        only = self._sides[0].sum if len(self._sides) == 1 else None
        self._sources: list[SessionLoader | Splits] = []  # of batches, in the order in which the script made them
        self._splits: Splits | None = None  # of batches that the script draws itself
        self._varies = False  # whether the newest batches are of no size that a loader declares
        self._audit = audit
        self._audits = (
            world_size >= LEAST_WORKERS
            and audit.mode != "off"
            and self._is_joint
            and self._sharded is None
            and spec.batch_policy != "uniform"  # whose shares stay equal
        )
        self._tells_batches: bool | None = None  # whether a step is of the batches given for it; None: none was made
        # What brings together workers that train for themselves, from the first batch on; between epochs the model is
        # the average of all of them.
        self._between: Synchronizer | None = None
        self._paused = ExitStack()
        self._newest: Part | None = None  # of the batch that the script was given last
        self._waiting: deque[Part] = deque()  # batches of a window of accumulation may be asked for at once
        self._part: Part | None = None  # of the batch that was computed last
        self._asked_s: float | None = None  # when the script began to wait for a batch, on the host's clock
        self._is_within = False  # whether gradients were made since the last step of an optimizer
        self._restored: SharedState | None = None  # until all that gave batches does so again
        self._restored_sources: list[Any] = []
        self._extra: Mapping[str, Any] | None = None  # what the script goes on with besides, from when it has said so
        self._random: States | None = None  # as the step ended after which the script is to stop
        self._is_epoch_over = False  # while the last batch of it is not computed
        REGISTRY.enter(self)
        self._gate = StepMessages(
            number=REGISTRY.begun,
            rank=rank,
            world_size=world_size,
            store=store,
            room=0 if only is None else only.room,  # numbers of a gradient that a message can carry
        )
        self._periods = Periods(spec, rank, world_size, folder, store=store, watched=lambda: self._gate)
        every = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        known = set(map(id, model.parameters()))
        self._others = [parameter for parameter in every if id(parameter) not in known]  # which only optimizers know
        if world_size > 1:
            take_parameters(
                tensor
                for tensor in (*model.parameters(), *model.buffers(), *every)
                if not is_sharded([tensor])  # whose values were taken before
            )
            draw_by_rank(rank)
        self._whole = WholeBatch(rank, lambda: self._gate, audits=self._audits)
        if synchronizes_norms and world_size > 1:
            self._whole.synchronize(model.modules())
        self._begin_step_of_all()
        self._stepping: Optimizer | None = None  # of the session
        # Of the loss that was computed last: what it is of, what those of all workers are, and how much it counts.
        self._loss_counts, self._totals, self._weight = Counts(), Counts(), 1.0
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _begin_step_of_all(self) -> None:
        """Reset the sums of a step: samples, loss, communication and waiting."""
        self._taken, self._batches = (0,) * self.world_size, 0  # samples of each worker
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._stepped: set[int] = set()  # optimizers
        self._stats: list[ExchangeStats] = []
        self._waited_s = 0.0  # for others, before the last backward pass ended
        self._energy: float | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full batch that each worker takes now, in rank order."""
        return self._periods.shares

    def loader(self, loader: LoaderT) -> LoaderT:
        """Return a loader like the script's that yields this worker's slice of each batch; every worker iterates alike.

        A dataset is read by index in the order that the loader's sampler draws, as rank 0 would. A stream (an iterable
        dataset) is read whole by every worker, and must give all of them the same samples in the same order. Functions
        that are given the loader alone find this session as its ``run``. Evaluation loaders need nothing: every worker
        may evaluate all, or rank 0 alone. This one gives all samples, too, inside ``torch.no_grad()`` and after the
        session. A worker without a share of a batch gets a few rows that do not count.

        Args:
            loader: the script's DataLoader, whose batch size is that of all workers together; it is not changed.

        Raises:
            BadInput: ``loader`` is no plain DataLoader or makes no batches, its sampler is of one rank, or the
                checkpoint that was resumed is of a script that got its batches in another way.
        """
        sliced = SessionLoader(inspect_loader(loader, self.world_size), self)
        self._add(sliced)
        return sliced  # type: ignore[return-value]  # as a loader

    @overload
    def split(self, batch: int) -> slice: ...
    @overload
    def split(self, batch: Tensor) -> Tensor: ...
    def split(self, batch: int | Tensor) -> slice | Tensor:
        """Return this worker's rows of ``batch``, drawn by the script (a number: their slice); every worker calls it.

            rows = run.split(torch.randint(len(data) - length, (batch_size,)))
            inputs = torch.stack([data[row : row + length] for row in rows])

        What rank 0 drew counts, as workers draw other random numbers; of a number of samples the slice is of a batch
        that all workers have alike. Each call is a batch, shared out and counted as those of a loader are. Inside
        ``torch.no_grad()`` nothing is shared out or counted, and every worker gets all rows: to evaluate alike.

        Args:
            batch: of all workers: a tensor whose first dimension stands for the samples, or how many samples there are.

        Raises:
            BadInput: ``batch`` is neither, there are fewer samples than workers, or ``sync`` is used.
            RunFailed: the workers gave other numbers of samples, or are at different points of the script.
            Stopped: somebody asked the run to end, and the last step is done.
        """
        if self._trains_alone:
            raise BadInput(
                "run.split shares out batches of workers that sum gradients, and these train for themselves.",
                hint="leave out sync, or give the data to a DataLoader and that to run.loader",
            )
        if not isinstance(batch, int | Tensor):
            raise BadInput(
                f"run.split was given a {type(batch).__name__}, and shares out a tensor or a number of samples.",
                hint="draw indices as a tensor: rows = run.split(torch.randint(len(samples), (batch_size,)))",
            )
        shape = (batch,) if isinstance(batch, int) else tuple(batch.shape)
        with self.meeting(zlib.crc32(repr((type(batch).__name__, shape)).encode())):
            if isinstance(batch, Tensor) and self.world_size > 1:
                drawn = batch.detach().cpu().contiguous()
                dist.broadcast(drawn, src=0)
                batch = drawn.to(batch.device)
        if not torch.is_grad_enabled():
            return slice(None) if isinstance(batch, int) else batch
        if self._splits is None:
            self._splits = Splits(self)
            self._add(self._splits)
        self.ask(is_first=not self._splits.drawn[1])
        part, rows = self._splits.take(shape[0])
        self.begin_part(part)
        return rows if isinstance(batch, int) else batch[rows]

    @contextmanager
    def meeting(self, mark: int = 0) -> Iterator[None]:
        """Wait until all workers enter this block, with equal ``mark``; a worker lost inside it is named in the error.

        Args:
            mark: checksum of the arguments that have to be equal on all workers; 0: there are none.

        Raises:
            RunFailed: the workers are at different points of the script, have different marks, or one is gone.
        """
        self._gate.take("began to draw batches", self._newest, mark=mark)
        with self._gate:
            yield

    def _add(self, source: SessionLoader | Splits) -> None:
        """Register a source of batches, and resume it from a checkpoint."""
        self._sources.append(source)
        self._resume_sources(len(self._sources) - 1)

    def _resume_sources(self, first: int) -> None:
        """Resume sources of batches, from index ``first`` on, where a checkpoint had them.

        BadInput: the kinds differ.
        """
        for source, kept in zip(self._sources[first:], self._restored_sources[first:], strict=False):
            if set(kept) != set(source.state()):
                raise BadInput(
                    "The script of the checkpoint got its batches in another way.",
                    hint="make its loaders in the order in which they were made, or begin anew in another folder",
                )
            source.resume(kept)

    def share_out(self, source: SessionLoader | Splits, size: int, entries: Any, *, varies: bool) -> ShareTable:
        """Return the table of local batch sizes of a new loader or of `split`, on which control periods begin anew.

        All workers must call it.

        Args:
            source: of the batches.
            size: samples of a full batch of all workers.
            entries: of the table in a checkpoint; None: there is none.
            varies: whether ``size`` is only that of the first batch, as the loader declares none.

        Raises:
            BadInput: there are fewer samples than workers, or the sync counts passes over data whose length is not
                known.
        """
        self._varies, self._shared = varies, source
        before, restored = self._periods.engine, self._restored
        table = self._periods.begin(
            size,
            self._model,
            self._exchange,
            device=self.device,
            step=before.step if before is not None else 0 if restored is None else restored.step,
            keep=(size,) if self.world_size == 1 else (),
            audits=self._audits_of_steps() if self._tells_batches else None,
            synchroniser=self._synchroniser if self._trains_alone else None,
        )
        engine = self._periods.engine
        assert engine is not None
        if restored is not None:
            if sum(restored.shares) == size:
                engine.balance.resume(policy=restored.policy, shares=restored.shares, state=restored.controller)
            if self._sources.index(source) + 1 >= len(self._restored_sources):
                self._restored = None
                engine.exchange.resume(restored.steering)
        if entries and tuple(entries[-1][1]) == engine.balance.shares:
            table.resume(entries)
        return table

    def _audits_of_steps(self) -> Audits:
        return Audits(accumulate=self.accumulate, largest=self._spec.workers[0].max_local_batch_size)

    def _begin_audits(self) -> None:
        """After the first step, begin audits if no more batches were read than the step has; else there are none.

        Of a loop that reads ahead, or adds up losses of several batches, nobody can tell which batch a gradient is of.
        """
        if not self._audits or self._tells_batches is not None:
            return
        self._tells_batches = self._batches <= self.accumulate
        if self._tells_batches and self._periods.table is not None:
            self._periods.table.audits = self._audits_of_steps()

    def _synchroniser(self, spec: RunSpec, stopwatch: Stopwatch) -> Synchronizer:
        """Return the synchronizer that averages the models of local SGD workers.

        Raises:
            BadInput: rounds are counted in epochs, and nobody knows how long those are.
        """
        dataset: Any = self._shared.dataset  # type: ignore[union-attr]  # of a loader: `split` is refused
        is_stream = isinstance(dataset, IterableDataset)
        if is_stream and spec.sync.name == "fedavg":
            raise BadInput(
                "The rounds of fedavg are counted in passes over the data, and a stream does not say how long one is.",
                hint="use sync='local-sgd(8)', which counts steps",
            )
        self._between = self._between or make_synchroniser(
            spec,
            self._model,
            self._sides[0].optimizer,
            device=self.device,
            clock=time.perf_counter,
            stopwatch=stopwatch,
            dataset_size=1 if is_stream else len(dataset),
        )
        assert self._between is not None
        return self._between

    @property
    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [named for side in self._sides for named in named_parameters(side.optimizer, self._names)]

    def _exchange_of_all(self) -> ExchangeConfig:
        """Return the exchange of gradients that all optimizers have in common."""
        every = [side.sum.exchange for side in self._sides if side.sum is not None]
        return (
            every[0]
            if len(every) == 1
            else replace(every[0], dense_bytes=sum(exchange.dense_bytes for exchange in every))
        )

    def ask(self, is_first: bool) -> None:
        """Note that the script asks for a batch, perhaps an epoch's first: end the last step or the run; time the next.

        Args:
            is_first: whether it is the first of an epoch; models or buffers are averaged before, if that is due.

        Raises:
            Stopped: somebody asked the run to end; a checkpoint was saved before, if the script saves any.
            BadInput: the script's batches are not of the plan's size, which the first step shows.
        """
        engine = self._periods.engine
        if is_first:
            self._end_epoch()
        if self._random is not None:  # the script has done by now what ends a step
            self._save_before_end()
            raise Stopped
        if self._between is not None:
            if is_first or self._batches >= self.accumulate:
                self._end_local_step()
            if is_first:
                self._paused.close()
        if engine is not None:
            if is_first:
                engine.log.resume()  # what the script did since the last batch is no part of a step
            if not any(self._taken):
                self._periods.begun, self._periods.computed = self._periods.stopwatch.mark(), None
                self._gate.waited_s = self._whole.waited_s = 0.0
        # Before the first batch of an epoch workers agree on all of them: that is no reading.
        self._asked_s = None if is_first else time.perf_counter()

    def begin_part(self, part: Part) -> None:
        """Record which samples of a batch this worker computes now, and start timing them.

        ``part`` is computed by the next backward pass that has none yet: several batches may be given before.
        """
        self._newest = self._whole.part = part
        if part.is_audit:
            self._drawn_before = Generators.at(self.device)
        if self.accumulate == 1:
            self._waiting.clear()
        self._waiting.append(part)
        self._batches += 1
        self._taken = tuple(map(operator.add, self._taken, part.shares))
        asked_s, self._asked_s = self._asked_s, None
        self._periods.pace.begin(part.samples, read_s=0.0 if asked_s is None else time.perf_counter() - asked_s)
        self._periods.drawn = self._shared.drawn

    def end_data(self) -> None:
        """Note that the epoch has no more batches, so that models or buffers are averaged once its last is computed."""
        self._is_epoch_over = self.world_size > 1
        if not self._waiting:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Average the models of local SGD workers, or the running statistics of BatchNorm, at the end of an epoch."""
        if not self._is_epoch_over:
            return
        self._is_epoch_over = False
        if self._between is None and not float_buffers(self._model):
            return
        self._gate.take("came to the end of its data", self._newest)
        if self._between is not None:
            self._end_local_step()
            self._paused.enter_context(self._between.averaged())
        else:
            average_buffers(self._model, self.shares[self.rank] / sum(self.shares), self.world_size)

    def _end_local_step(self) -> None:
        """Count a step of local SGD workers; all workers count alike."""
        if any(self._taken):
            self._sides[0].backwards = 0
            self._end_step()

    def _end_step(self) -> None:
        """Count a step; at the end of a control period, exchange statistics and decide on the next with all workers.

        Raises:
            Stopped: somebody asked the run to end, and the script saves nothing.
            BadInput: the first step's batch is not of the plan's size.
        """
        periods, part, taken = self._periods, self._part or self._newest, self._taken
        if periods.engine is not None and part is not None:
            first = self._sides[0].sum
            if periods.engine.step == 0 and self._spec.script and not self._varies:
                check_script_batch(self._spec, sum(taken))
            periods.samples_seen += sum(taken)
            with self._gate:
                # Steps over incomplete batches, over shares of before, and audits are not judged.
                stops = periods.after(
                    taken,
                    loss_sum=self._loss_sum * sum(taken),
                    stats=summed(self._stats),
                    hidden=self._sharded is not None or (first is not None and first.was_hidden),
                    waited_s=self._waited_s,
                    # A gradient that a GradScaler did not apply was not finite.
                    energy=math.inf if self._energy is None and self._between is not None else self._energy,
                    norms=None if first is None else first.norms.take(taken[self.rank]),
                    counts=part.shares == self.shares and not part.is_audit,
                    learning_rate=float(self._sides[0].optimizer.param_groups[0]["lr"]),
                    epoch=lambda: self._shared.passes,
                    steps_left=None if self._steps is None else max(1, self._steps - periods.engine.step - 1),
                )
            if stops and self._extra is None:
                raise Stopped
            self._random = States.now() if stops else self._random
        self._begin_audits()
        self._begin_step_of_all()

    def _save_before_end(self) -> None:
        """Save a checkpoint before the run stops."""
        raise NotImplementedError

    def backward(
        self, loss: Tensor, *, weight: Weight | None = None, gradient: Tensor | None = None, **options: Any
    ) -> None:
        """Run ``loss.backward()``, and leave the whole batch's gradient in ``.grad``; every worker must call it.

        Clip it or step as before.

        With ``accumulate=k`` gradients are exchanged at every k-th call, and at the last batch of an epoch; until then
        ``.grad`` holds what this worker has so far. Workers that train for themselves (``sync``) keep their own.

        A worker's loss counts by its samples of the batch; that of one cross entropy by its targets.

        Args:
            loss: of this worker's part, a scalar; scaled where a GradScaler is used.
            weight: what this worker's loss is a mean over (tokens, boxes), a count; or ``"sum"``: the losses of the
                workers' parts add up to that of the batch. None: the targets that a cross entropy counted, else the
                samples of this worker.
            gradient: as of ``Tensor.backward``; a scalar, by which the loss is multiplied. None: 1.
            options: ``retain_graph``, ``create_graph`` and ``inputs``, as of ``Tensor.backward``.

        Raises:
            BadInput: the loss is no scalar, the weight is negative or not finite or of another kind than the others',
                no batch came from `loader` or `split` yet, or the batches are not of the plan's size.
            RunFailed: the workers are at different points of the script, one is gone, or an audit found a difference at
                which the run is to stop.
            Stopped: somebody asked the run to end, and the script neither saves nor resumes checkpoints.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        loss = loss if gradient is None else loss * gradient.detach()
        part = self._take_part()
        for side in self._sides:
            self._follow(side)
        if part is not None and self._is_joint:
            self._backward_jointly(loss, part, weight, options)
            return
        is_shared = part is not None and self.world_size > 1
        if is_shared and part is not None and isinstance(weight, str) and part.samples:
            loss = loss * (part.batch / part.samples)
        torch.autograd.backward(loss, **options)
        self._note_computed()
        self._complete(loss, part.weight if is_shared and part is not None else 1.0, part, self._sides)

    def _backward_jointly(self, loss: Tensor, part: Part, weight: Weight | None, options: dict[str, Any]) -> None:
        """Run the backward pass, and sum complete gradients: inside this worker's message, under backward, or after it.

        The gradients of a sharded model are summed as they are made, so that its loss is weighted before.

        The message is sent before backward where gradients, or rows of the whole batch, travel meanwhile; after it
        where it carries the gradient, or tells which of several optimizers' parameters got one. ``weight`` None: the
        loss counts as the session sees from its batch.
        """
        gate, whole, sides = self._gate, self._whole, self._sides
        self._loss_counts = self._counts(part, loss, weight)
        is_complete = len(sides) == 1 and self._completes(sides[0], part) and not part.is_audit
        only = sides[0].sum if is_complete else None
        rides = (
            only is not None
            and sides[0].backwards == 0
            and only.is_clear
            and not whole.groups
            and 0 < only.room <= gate.room
        )
        if whole.groups or (len(sides) == 1 and not rides):
            gate.begin("summed gradients", self._newest, self._loss_counts)
        if whole.groups:
            whole.weight = self._weigh() if self._sharded is None else 1.0
        if only is not None and not rides:
            only.expect(self._weigh, self._reach)
        try:
            if self._sharded is None:
                torch.autograd.backward(loss, **options)
            else:
                with gate:
                    weighted = loss * self._weigh()
                    self._stats += self._sharded.backward(weighted, sums=self._completes(sides[0], part), **options)
        finally:
            whole.weight = None
        self._note_computed()
        begun_s = time.perf_counter()
        if rides and only is not None:
            only.pack(gate.load[: only.room], self._loss_counts.factor)
            gate.begin("summed gradients", self._newest, self._loss_counts, mark=_RIDES)
        elif len(sides) > 1:
            has_gradient = [float(side.is_trained and side.sum is not None and side.sum.is_made) for side in sides]
            gate.begin("summed gradients", self._newest, [*self._loss_counts, *has_gradient])
        own_weight, totals, reached = self._weigh(), self._totals, sides
        if rides and only is not None and not totals.is_mixed:  # else weighed by what all have: their samples
            only.unpack(gate.loaded[: only.room], totals.total, time.perf_counter() - begun_s)
        if len(sides) > 1:
            workers = gate.finish()[len(self._loss_counts) :]
            reached = [side for side, number in zip(sides, workers, strict=False) if number]
        self._complete(loss, own_weight, part, reached)

    def _counts(self, part: Part, loss: Tensor | None, weight: Weight | None) -> Counts:
        """Return the counts of this worker's loss; in an audit those of the parts add up to the batch's."""
        return Counts() if part.is_audit and self.rank == 0 else Counts.of(part.samples, loss, weight)

    def _weigh(self) -> float:
        """Return the weight of this worker's loss in the batch's, once all workers have sent their counts."""
        self._totals, part = Counts(*self._gate.finish()[: len(self._loss_counts)]), self._part
        is_whole = part is not None and part.is_audit and self.rank == 0
        self._weight = 1.0 if is_whole else self._loss_counts.weight(self._totals)
        return self._weight

    def _complete(self, loss: Tensor, own_weight: float, part: Part | None, reached: Sequence[Side]) -> None:
        """Sum the gradients that a backward pass completed, and hold the others with the weight ``own_weight``.

        Each loss costs the exchange of what its step needs: of a generator's loss also the discriminator's part, unless
        its parameters are frozen meanwhile or left out (``inputs``), as it is what ``.grad`` has then.

        Args:
            loss: of this worker's part.
            own_weight: of that loss in the batch's.
            part: of the batch.
            reached: optimizers of whose parameters gradients were made, on any worker.
        """
        self._note_loss(loss, own_weight)
        ready = [side for side in reached if self._completes(side, part)]
        for side in self._sides:
            side.backwards += side in reached
            if side.sum is not None and side.is_trained and side not in ready:
                side.sum.hold(own_weight) if side in reached else side.sum.put_back()
        if ready:
            self._sum_sides(ready, own_weight, part)

    def _sum_sides(
        self, sides: Sequence[Side], own_weight: float, part: Part | None, held: Sequence[Side] = ()
    ) -> None:
        """Sum the gradients of optimizers over all workers into ``.grad``, or audit them; count the step; all call it.

        Args:
            sides: optimizers, in the order in which all workers sum them.
            own_weight: of this worker's last loss in the batch's.
            part: of the batch; None: there is none. Where it is an audit's, the leader's gradient is the one used.
            held: those of ``sides`` whose gradients are weighted already.

        Raises:
            RunFailed: an audit found a difference at which the run is to stop.
        """
        engine = self._periods.engine
        if self._periods.computed is None and engine is not None:
            self._periods.computed = self._periods.stopwatch.mark()
        look_at = () if engine is None else engine.look_at
        for side in sides:
            side.is_summed = True
            if side.sum is None:
                continue
            if side in held:
                side.sum.begin(wants_norms=self._wants_norms)
            if part is not None and part.is_audit:
                draws = self._drawn_before.has_drawn(self.device)  # since the audited batch was given
                with self._gate:
                    result = side.sum.audit(own_weight, is_leader=self.rank == 0, draws=draws)
                self._audit.tell(result, self._gate.step + 1, self._periods.events)
            else:
                side.sum.sum(0.0 if side in held else own_weight, self._scaler, look_at=look_at)
            self._stats += [] if side.sum.stats is None else [side.sum.stats]
        self._end_sum()

    @property
    def _wants_norms(self) -> bool:
        return self._periods.engine is not None and self._periods.engine.wants_norms and len(self._sides) == 1

    def _completes(self, side: Side, part: Part | None) -> bool:
        """Return whether one more backward pass completes a step of an optimizer."""
        return side.backwards + 1 >= self.accumulate or (part is not None and part.is_last)

    def _follow(self, side: Side) -> None:
        """Take over the parameters that an optimizer trains now, and move their ``.grad`` aside before a backward pass.

        Nothing is moved where nothing is summed, or where all of them are frozen and there are other optimizers.

        Raises:
            RunFailed: they have changed, and compression keeps a residual of the old ones.
        """
        if side.sum is None:
            return
        named = named_parameters(side.optimizer, self._names)
        side.is_trained = bool(named) or len(self._sides) == 1
        if not side.is_trained:  # frozen, as a discriminator while its generator learns
            return
        if side.sum.follow(named):
            self._exchange = self._exchange_of_all()
            self._gate.trained = sum(parameter.numel() for _, parameter in self._trained)
            if self._periods.engine is not None:
                self._periods.engine.exchange = self._exchange
        is_audit = self._part is not None and self._part.is_audit
        side.sum.begin((self.world_size - 1 if self.rank else 1) if is_audit else None, wants_norms=self._wants_norms)

    def _reach(self, done: float) -> None:
        """Wait, on an emulated slower worker, until it would have computed the fraction ``done`` of the gradient."""
        self._periods.pace.reach(FORWARD + (1 - FORWARD) * done)

    def _note_computed(self) -> None:
        """Mark the end of this worker's computation: what follows until the sum is waiting for others."""
        self._periods.pace.reach(1.0)
        self._waited_s = self._gate.waited_s + self._whole.waited_s
        if self._periods.engine is not None:
            self._periods.computed = self._periods.stopwatch.mark()

    def sync(self, *, weight: Weight | None = None) -> None:
        """Sum ``.grad`` over all workers, in place, after the script's own ``loss.backward()``; all must call it.

        For loops that clip gradients; else a step of the optimizer sums them. With ``sync`` of the session gradients
        stay each worker's own.

        Args:
            weight: what the loss was a mean over on this worker, or ``"sum"`` (see `backward`); None: its samples.

        Raises:
            BadInput: the model is sharded, no batch came from `loader` or `split` yet, or the weight cannot be used.
            RunFailed: the workers are at different points of the script, or one is gone.
            Stopped: somebody asked the run to end, and the script neither saves nor resumes checkpoints.
        """
        self._sync(self._sides, weight)

    def _sync(self, sides: Sequence[Side], weight: Weight | None = None) -> None:
        """Sum gradients that a script's own ``loss.backward()`` made, or that are held; every worker must call it.

        ``weight`` as of `_backward_jointly`.

        Raises:
            BadInput: the model is sharded, or no batch came from this session's loader yet.
        """
        if self._sharded is not None:
            raise BadInput(
                "The gradients of a sharded model were made before anybody knew how much each worker's loss counts.",
                hint="call run.backward(loss) in place of loss.backward()",
            )
        held = [side for side in sides if side.sum is not None and side.sum.is_pending]
        part, own_weight = self._part if len(held) == len(sides) else self._take_part(), 0.0
        if part is not None and self._is_joint:
            self._loss_counts = self._counts(part, None, weight)
            self._gate.begin("summed gradients", self._newest, self._loss_counts)
            own_weight = self._weigh()
        self._sum_sides(sides, own_weight, part, held)

    def _end_sum(self) -> None:
        """Count a step whose gradients are summed, once all optimizers' are; in local SGD only measure its energy."""
        if self._trains_alone:
            self._sides[0].backwards = 0
            if self._spec.sync.name == "selsync":
                scale = 1.0 if self._scaler is None else self._scaler.get_scale()
                gradients = [
                    parameter.grad.detach().reshape(-1).float()
                    for _, parameter in self._trained
                    if parameter.grad is not None
                ]
                self._energy = sum(map(energy, gradients)) / scale**2
        elif any(self._taken) or len(self._stepped) == len(self._sides):  # else one more loss of the same step
            self._gate.step += 1
            self._end_step()

    def _take_part(self) -> Part | None:
        """Return this worker's part of the batch that the loss is of; None for a single worker without a batch.

        Raises:
            BadInput: no batch came from this session's loader yet, and there are several workers.
        """
        self._part = self._waiting.popleft() if self._waiting else self._newest
        if self._part is None and self.world_size > 1:
            raise BadInput(
                "A gradient came before any batch of this session's loader.",
                hint="iterate over `run.loader(loader)` instead of the loader",
            )
        return self._part

    def _note_loss(self, loss: Tensor, weight: float) -> None:
        """Add a loss, weighted by this worker's part of it, to the step's, whose gradient is stepped by."""
        self._is_within = True
        part, weight = self._part, self._loss_weight(weight)
        if weight and part is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._loss_sum.add_(loss.detach(), alpha=weight / scale)

    def _loss_weight(self, weight: float) -> float:
        """Return the weight of this worker's loss in the batch's: in an audit 1 for the leader and 0 for others."""
        return float(self.rank == 0) if self._part is not None and self._part.is_audit else weight

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        """Sum gradients that the script has not exchanged yet, before an optimizer steps; compare replicas at times.

        Returns:
            Other arguments of the step, with a closure of all workers; None: they stay.

        Raises:
            BadInput: the optimizer is in no session: it would step by the gradient of this worker's samples alone.
            RunFailed: replicas differ.
        """
        side = next((candidate for candidate in self._sides if candidate.optimizer is optimizer), None)
        if side is None:
            self._before_inner_step(optimizer)
            return None
        self._stepping = optimizer
        closure = options.get("closure") or next(iter(arguments[1:]), None)
        if self._is_joint and closure is not None:
            return arguments[:1], {**options, "closure": self._together(side, closure)}
        self._begin_step(side)
        side.steps += 1
        is_early = side.steps < CHECKED_STEPS and side.steps & (side.steps - 1) == 0
        if self._is_joint and (is_early or side.steps % CHECKED_STEPS == 0):
            marks = replica_marks(named_parameters(side.optimizer, self._names), side.optimizer)
            self._gate.take("called optimizer.step()", self._newest, mark=len(marks))
            check_replicas(marks, self._gate.step, self.world_size, self._devices)
        return None

    def _before_inner_step(self, optimizer: Optimizer) -> None:
        """Sum gradients ahead of an optimizer inside one of the session's (SAM's) that steps on its own.

        Raises:
            BadInput: it has parameters that no optimizer of the session has, and there are several workers.
        """
        if self._stepping is not None:
            return
        stepped = set(map(id, parameters_of(optimizer)))
        for side in self._sides:
            parameters = set(map(id, parameters_of(side.optimizer)))
            if parameters & stepped:
                self._begin_step(side)
                self._stepped.add(id(side.optimizer))
            stepped -= parameters
        if self.world_size > 1 and stepped:
            raise BadInput(
                f"An optimizer ({type(optimizer).__name__}) steps that is in no session, by gradients of this worker's "
                "samples alone.",
                hint="give the session all models and optimizers, and call run.backward for each loss: "
                "with session((G, D), (optimizer_g, optimizer_d)) as run: ... run.backward(loss_g)",
            )

    def _begin_step(self, side: Side) -> None:
        """Give an optimizer the gradient of all workers to step by.

        Sums gradients first where the session has not: every worker must call it then.
        """
        side.backwards, self._is_within = 0, False
        if self._sharded is not None:
            reshard(self._model)  # what an evaluation has gathered would not follow the step
        is_held = side.sum is not None and side.sum.is_pending
        if not side.is_summed or is_held:
            self._sync([side])
        side.is_summed = False

    def _together(self, side: Side, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure for an optimizer (LBFGS) that makes the gradient and returns the loss of all workers.

        All must call it. Where the script's closure returns None, so does this one.
        """

        def together(*arguments: Any, **options: Any) -> Any:
            """Call the script's closure, sum its gradient unless it has done so, and return all workers' loss.

            None where the closure returns none. Every worker must call it.
            """
            before, side.is_summed = side.is_summed, False
            loss = closure(*arguments, **options)
            if not side.is_summed and not (before and loss is None):
                self._sync([side])
            side.backwards, side.is_summed, self._is_within = 0, False, False
            if loss is None:
                return None
            value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            total = sum(row[0] for row in gather_numbers([value * self._loss_weight(self._weight)], self.world_size))
            return loss.detach().new_tensor(total) if isinstance(loss, Tensor) else total

        return together

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Note that an optimizer of the session has stepped.

        After an epoch's last step average what is averaged then.
        """
        if optimizer is self._stepping:
            self._stepping = None
            self._stepped.add(id(optimizer))
            if not self._waiting:
                self._end_epoch()
