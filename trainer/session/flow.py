"""The script-driven front of the engine: batches are handed to the script, its steps counted, its periods concluded.

What a task's loop does (`hetopt.trainer.loop`), a session does where the script calls it: between two steps.
"""

from __future__ import annotations

import math
import operator
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import check_batch
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import Store
from hetopt.trainer.checkpoints.state import SharedState
from hetopt.trainer.comm.exchange import ExchangeStats, summed
from hetopt.trainer.evaluation import average_buffers, has_averages
from hetopt.trainer.generators import Generators
from hetopt.trainer.session.alike import Optimizers, take_parameters
from hetopt.trainer.session.audit import LEAST_WORKERS, AuditRecord, Audits
from hetopt.trainer.session.batches import Part, ShareTable
from hetopt.trainer.session.gradients import GradientSum, check_parameters, named_parameters
from hetopt.trainer.session.inspection import inspect_loader
from hetopt.trainer.session.loaders import SessionLoader, Splits
from hetopt.trainer.session.local import Between, synchroniser_of
from hetopt.trainer.session.periods import Periods
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.random_state import States, draw_by_rank
from hetopt.trainer.session.registry import REGISTRY, Stopped
from hetopt.trainer.session.resuming import Extra
from hetopt.trainer.session.turns import Deed, Turns
from hetopt.trainer.session.whole_batch import WholeBatch
from hetopt.trainer.steps.exchange_assembly import ExchangeMaker, can_overlap
from hetopt.trainer.steps.step_config import ExchangeConfig
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])


@dataclass(kw_only=True, eq=False)
class Side:
    """One optimizer of a session.

    Attributes:
        optimizer: of the script.
        sum: of its parameters' gradients; None: they stay this worker's.
        is_trained: whether any of its parameters is, at the moment.
        backwards: passes that made gradients of them since it stepped.
        is_summed: whether their gradients are those of all workers.
        steps: that it has made.
    """

    optimizer: Optimizer
    sum: GradientSum | None = None
    is_trained: bool = True
    backwards: int = 0
    is_summed: bool = False
    steps: int = 0


class BatchFlow:
    """What a session knows of its script: the model, and which batches it was given.

    Attributes:
        rank: of this worker.
        world_size: workers.
        device: where the parameters are.
        accumulate: backward passes of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        plan: SessionPlan,
        rank: int,
        world_size: int,
        store: Store | None,
        accumulate: int,
        steps: int | None,
        scaler: GradScaler | None,
        folder: Path | None,
        audit: AuditRecord,
        synchronizes_norms: bool,
        leave: Callable[[], None],
    ) -> None:
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self._model, self._optimizer, self._plan, self._store = model, optimizer, plan, store
        self._scaler, self._steps, self._folder, self._leave = scaler, steps, folder, leave
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = [named_parameters(one, self._names) for one in optimizer.each]
        for own in named:
            check_parameters(own)
        self.device = check_parameters(self._trained)
        self._trains_alone = plan.spec.is_local
        self._sides = [Side(optimizer=one) for one in optimizer.each]
        # One worker that sends everything has nothing to do, and the script's own numbers stay what they were.
        self._exchange = ExchangeConfig(
            compression=plan.spec.compression, dense_bytes=sum(one.nbytes for _, one in self._trained)
        )
        if not self._trains_alone and (world_size > 1 or plan.spec.compression.name != "identity"):
            # Parts of two gradients that backward makes at a time would be sent in different orders on the workers.
            overlaps = len(self._sides) == 1 and can_overlap(self.device, world_size)
            for side, own in zip(self._sides, named, strict=True):
                side.sum = GradientSum(own, self._make_exchange, world_size=world_size, overlaps=overlaps)
            self._exchange = self._exchange_of_all()
        self._sources: list[SessionLoader | Splits] = []  # of batches, in the order in which the script made them
        self._splits: Splits | None = None  # of batches that the script draws itself
        self._varies = False  # whether the newest batches are of no size that a loader declares
        self._audit = audit
        self._audits = world_size >= LEAST_WORKERS and audit.mode != "off" and not self._trains_alone
        self._between: Between | None = None  # of workers that train for themselves, from the first batch on
        self._newest: Part | None = None  # of the batch that the script was given last
        self._waiting: deque[Part] = deque()  # batches of a window of accumulation may be asked for at once
        self._is_computed = True  # whether all batches had a backward pass
        self._part: Part | None = None  # of the batch that was computed last
        self._asked_s: float | None = None  # when the script began to wait for a batch, on the host's clock
        self._computed_s: float | None = None  # when a backward pass ended, on the host's clock
        self._is_within = False  # whether gradients were made since the last step of an optimizer
        self._begin_step_of_all()
        self._restored: SharedState | None = None  # until all that gave batches does so again
        self._restored_sources: list[Any] = []
        self._extra: Extra | None = None  # what the script goes on with besides, from when it has said so
        self._random: States | None = None  # as the step ended after which the script is to stop
        self._is_epoch_over = False  # while the last batch of it is not computed
        REGISTRY.enter(self)
        self._gate = Turns(number=REGISTRY.begun, rank=rank, world_size=world_size, store=store, room=self._room)
        self._periods = Periods(plan, rank, world_size, folder, store=store, watched=self._gate.watched)
        if world_size > 1:
            take_parameters(model, optimizer)
            draw_by_rank(rank)
        self._whole = WholeBatch(rank, self._gate.watched, audits=self._audits)
        if synchronizes_norms and world_size > 1:
            self._whole.synchronize(model.modules())

    @property
    def _room(self) -> int:
        """Numbers of a message that carries all of a step's gradient, where one message can."""
        only = self._sides[0].sum if len(self._sides) == 1 else None
        return 0 if only is None else only.room

    def _begin_step_of_all(self) -> None:
        """Forget what the step was like that is over."""
        self._taken, self._batches = (0,) * self.world_size, 0  # samples of each worker
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._stepped: set[int] = set()  # optimizers
        self._stats: list[ExchangeStats] = []
        self._waited_s = 0.0  # for others, in backward passes that were not the last
        self._energy: float | None = None

    def close(self) -> None:
        """Leave the other workers."""
        raise NotImplementedError

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full batch that each worker takes now, in rank order."""
        return self._periods.shares

    @property
    def looks_ahead(self) -> bool:
        """Whether a batch of a stream has to tell whether it is the last."""
        return self.accumulate > 1

    def loader(self, loader: LoaderT) -> LoaderT:
        """The script's training loader, as this worker sees it: its slice of every batch.

        A dataset is read by index in the order that the loader's sampler draws, as rank 0 would. A stream (an iterable
        dataset) is read whole by every worker, and must give all of them the same samples in the same order.
        Functions that are given the loader alone find this session as its ``run``. Evaluation loaders need nothing:
        every worker may evaluate all, or rank 0 alone.

        Raises:
            BadInput: it is no DataLoader, or makes no batches.
        """
        inspect_loader(loader, self.world_size)
        assert isinstance(loader, DataLoader)
        sliced = SessionLoader(loader, self)
        self._add(sliced)
        return sliced  # type: ignore[return-value]  # as a loader

    @overload
    def split(self, batch: int) -> slice: ...
    @overload
    def split(self, batch: Tensor) -> Tensor: ...
    def split(self, batch: int | Tensor) -> slice | Tensor:
        """This worker's rows of a batch that the script draws itself, where there is no DataLoader to share out.

            rows = run.split(torch.randint(len(data) - length, (batch_size,)))
            inputs = torch.stack([data[row : row + length] for row in rows])

        What rank 0 drew counts, as workers draw other random numbers; of a number of samples, the slice of them: of a
        batch that all workers have alike. Each call is a batch, shared out and counted as those of a loader are. Inside
        ``torch.no_grad()`` it is none, and every worker gets all rows: to evaluate alike.

        Args:
            batch: of all workers: what stands for its samples, along the first dimension, or how many there are.

        Raises:
            BadInput: it is neither, there are fewer samples than workers, or ``sync`` is used.
            RunFailed: there are other numbers of samples on some workers.
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
        with self.drawing(zlib.crc32(repr((type(batch).__name__, shape)).encode())):
            if isinstance(batch, Tensor) and self.world_size > 1:
                drawn = batch.detach().cpu().contiguous()
                dist.broadcast(drawn, src=0)
                batch = drawn.to(batch.device)
        size = shape[0]
        if not torch.is_grad_enabled():
            return slice(None) if isinstance(batch, int) else batch
        is_first = self._splits is None
        if self._splits is None:
            self._splits = Splits(self)
            self._add(self._splits)
        self.ask(is_first)
        part, rows = self._splits.take(size)
        self.begin_part(part)
        return rows if isinstance(batch, int) else batch[rows]

    @contextmanager
    def drawing(self, mark: int = 0) -> Iterator[None]:
        """Let the workers agree on batches inside; on what all of them do that with, there is a mark."""
        self._gate.take(Deed.DRAW, self._newest, mark=mark)
        with self._gate.watched():
            yield

    def _add(self, source: SessionLoader | Splits) -> None:
        """Take batches from there as well."""
        self._sources.append(source)
        if self._restored is not None:
            self._resume_source(len(self._sources) - 1)

    def _resume_source(self, index: int) -> None:
        """Go on with a source of batches where a checkpoint had it."""
        for kept in self._restored_sources[index : index + 1]:
            if set(kept) != set(self._sources[index].state()):
                raise BadInput(
                    "The script of the checkpoint got its batches in another way.",
                    hint="make its loaders in the order in which they were made, or begin anew in another folder",
                )
            self._sources[index].resume(kept)

    def share_out(self, source: SessionLoader | Splits, size: int, entries: Any, *, varies: bool) -> ShareTable:
        """Return the shares of batches from somewhere else than before; periods are over those from here on.

        Args:
            source: of them.
            size: samples of a full batch.
            entries: of the shares that a checkpoint had; None: none.
            varies: whether the size is only that of the first.
        """
        self._varies, self._shared = varies, source
        before, restored = self._periods.engine, self._restored
        largest = self._plan.spec.workers[0].max_local_batch_size
        table = self._periods.begin(
            size,
            self._model,
            self._exchange,
            device=self.device,
            step=before.step if before is not None else 0 if restored is None else restored.step,
            keep=(size,) if self.world_size == 1 else (),
            audits=Audits(accumulate=self.accumulate, largest=largest) if self._audits else None,
            synchroniser=self._synchroniser if self._trains_alone and self.world_size > 1 else None,
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

    def _synchroniser(self, spec: RunSpec, stopwatch: Stopwatch) -> Synchronizer:
        if self._between is None:
            synchroniser = synchroniser_of(
                spec,
                self._shared,
                self._model,
                self._optimizer.each[0],
                device=self.device,
                stopwatch=stopwatch,
            )
            self._between = Between(synchroniser, self._model)
        return self._between.synchroniser

    @property
    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [named for one in self._optimizer.each for named in named_parameters(one, self._names)]

    def _exchange_of_all(self) -> ExchangeConfig:
        """How gradients travel: alike for all optimizers."""
        every = [side.sum.exchange for side in self._sides if side.sum is not None]
        return every[0] if len(every) == 1 else replace(every[0], dense_bytes=sum(one.dense_bytes for one in every))

    def _make_exchange(self, shapes: Sequence[tuple[int, ...]]) -> ExchangeConfig:
        spec = self._plan.spec
        return ExchangeMaker(
            spec=spec, compression=spec.compression, shapes=list(shapes), device=self.device, store=self._store
        ).make()

    def ask(self, is_first: bool) -> None:
        """The script waits for a batch: the step before is over, and computing one begins with reading it.

        Args:
            is_first: whether it is the first of an epoch.

        Raises:
            Stopped: somebody asked the run to end.
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
                self._between.resume()
        if engine is not None:
            if is_first:
                engine.log.resume()  # what the script did since the last batch is no part of a step
            if not any(self._taken):
                self._periods.begun = self._periods.stopwatch.mark()
        # Before the first batch of an epoch workers agree on all of them: that is no reading.
        self._asked_s = None if is_first else time.perf_counter()

    def begin_part(self, part: Part) -> None:
        """Note the part of a batch that the script is given."""
        self._newest = self._whole.part = part
        if part.is_audit:
            self._drawn_before = Generators.at(self.device)
        self._is_computed = False
        if self.accumulate == 1:
            self._waiting.clear()
        self._waiting.append(part)
        self._batches += 1
        self._taken = tuple(map(operator.add, self._taken, part.shares))
        asked_s, self._asked_s = self._asked_s, None
        self._periods.pace.begin(part.samples, read_s=0.0 if asked_s is None else time.perf_counter() - asked_s)
        self._periods.drawn = self._shared.drawn

    def _draws(self) -> bool:
        """Return whether random numbers of torch were drawn since the audited batch was given."""
        now, before = Generators.at(self.device), self._drawn_before
        pairs = ((now.cpu_generator, before.cpu_generator), (now.cuda_generator, before.cuda_generator))
        return any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs)

    def end_data(self) -> None:
        """There are no more batches in this epoch, which is over as soon as its last batch is computed."""
        self._is_epoch_over = self.world_size > 1
        if self._is_computed:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Running statistics of BatchNorm come from each worker's own samples: now of all."""
        if not self._is_epoch_over:
            return
        self._is_epoch_over = False
        if self._between is None and not has_averages(self._model):
            return
        self._gate.take(Deed.END_EPOCH, self._newest)
        if self._between is not None:
            self._end_local_step()
            self._between.pause()
        else:
            average_buffers(self._model, self.shares[self.rank] / sum(self.shares), self.world_size)

    def _end_local_step(self) -> None:
        """A step of workers that train for themselves is over; counted alike on all of them."""
        if any(self._taken):
            self._sides[0].backwards = 0
            self._end_step()

    def _end_step(self) -> None:
        """One more step: every so many the workers tell each other what they were like, and decide alike.

        Raises:
            Stopped: somebody asked the run to end, and the script saves nothing.
        """
        periods, part, taken = self._periods, self._part or self._newest, self._taken
        if periods.engine is not None and part is not None:
            first = self._sides[0].sum
            trace = periods.trace(
                self._loss_sum,
                self._stats[0] if len(self._stats) == 1 else summed(self._stats) if self._stats else None,
                hidden=first is not None and first.was_hidden,
                micro_batches=self.accumulate,
                waited_s=self._waited_s,
                # A gradient that a GradScaler did not apply was not finite.
                energy=math.inf if self._energy is None and self._between is not None else self._energy,
            )
            if periods.engine.step == 0 and self._plan.spec.script and not self._varies:
                check_batch(self._plan.spec, sum(taken))
            periods.samples_seen += sum(taken)
            with self._gate.watched():
                # Steps over incomplete batches, over shares of before, and audits are not judged.
                stops = periods.after(
                    trace,
                    taken,
                    counts=part.shares == self.shares and not part.is_audit,
                    learning_rate=float(self._optimizer.param_groups[0]["lr"]),
                    epoch=lambda: self._shared.passes,
                    steps_left=None if self._steps is None else max(1, self._steps - periods.engine.step - 1),
                )
            if stops and self._extra is None:
                raise Stopped
            self._random = States.now() if stops else self._random
        self._computed_s = None
        self._begin_step_of_all()

    def _save_before_end(self) -> None:
        """Save what training goes on from."""
        raise NotImplementedError
