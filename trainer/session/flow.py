"""The script-driven front of the engine: batches are handed to the script, its steps counted, its periods concluded.

What a task's loop does (`hetopt.trainer.loop`), a session does where the script calls it: between two steps.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from hetopt.core.errors import BadInput
from hetopt.core.run_folder import STOP_FILE
from hetopt.core.script_rules import check_batch
from hetopt.trainer.agreement import Store, gather_numbers
from hetopt.trainer.announcement import announce
from hetopt.trainer.assembly import make_worker_pace
from hetopt.trainer.balance import Balance
from hetopt.trainer.checkpoints.saver import CheckpointSaver
from hetopt.trainer.comm.exchange import ExchangeStats, summed
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.engine import Engine
from hetopt.trainer.evaluation import average_buffers, has_averages
from hetopt.trainer.generators import Generators
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.policies.choose import choose_policy
from hetopt.trainer.session.alike import take_parameters
from hetopt.trainer.session.audit import LEAST_WORKERS, AuditRecord, Audits
from hetopt.trainer.session.batches import Part, ShareTable, Splits, declared_batch, drawn_by_first, full_batch
from hetopt.trainer.session.gradients import GradientSum, Scaler, check_parameters, named_parameters
from hetopt.trainer.session.inspection import inspect_loader
from hetopt.trainer.session.loaders import OwnLoader, SlicedLoader
from hetopt.trainer.session.local import Between, synchroniser_of
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.random_state import RandomState, States
from hetopt.trainer.session.record import add_sample, open_log
from hetopt.trainer.session.registry import REGISTRY, Member
from hetopt.trainer.session.resuming import Extra, Restored
from hetopt.trainer.session.several import Optimizers
from hetopt.trainer.session.stopping import Stopped
from hetopt.trainer.session.turns import Deed, Turns
from hetopt.trainer.session.whole_batch import WholeBatch
from hetopt.trainer.statistics import Period
from hetopt.trainer.steps.exchange_assembly import ExchangeMaker, can_overlap
from hetopt.trainer.steps.slowdown import Slowdown
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.step_config import ExchangeConfig
from hetopt.trainer.steps.stopwatch import Mark, make_stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])
Source: TypeAlias = SlicedLoader | OwnLoader | Splits
"""Of batches."""


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
        scaler: Scaler | None,
        folder: Path | None,
        audit: AuditRecord,
        synchronizes_norms: bool,
        leave: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._model = model
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._scaler = scaler
        self._plan = plan
        self._leave = leave
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = [named_parameters(one, self._names) for one in optimizer.each]
        for own in named:
            check_parameters(own)
        self.device = check_parameters(self._trained)
        self._trains_alone = plan.spec.is_local
        self._between: Between | None = None  # of workers that train for themselves, from the loader on
        self._sides = [Side(optimizer=one) for one in optimizer.each]
        # One worker that sends everything has nothing to do, and the script's own numbers stay what they were.
        self._store, self._steps = store, steps
        self._exchange = ExchangeConfig(
            compression=plan.spec.compression, dense_bytes=sum(one.nbytes for _, one in self._trained)
        )
        if not self._trains_alone and (world_size > 1 or plan.spec.compression.name != "identity"):
            # Parts of two gradients that backward makes at a time would be sent in different orders on the workers.
            overlaps = len(self._sides) == 1 and can_overlap(self.device, world_size)
            for side, own in zip(self._sides, named, strict=True):
                side.sum = GradientSum(own, self._make_exchange, world_size=world_size, overlaps=overlaps)
            self._exchange = self._exchange_of_all()
        self._stopwatch = make_stopwatch(self.device)
        self._run_dir = folder or Path()
        self._folder = folder
        self._events = open_log(folder if rank == 0 else None)
        self._saver: CheckpointSaver | None = None  # from the first checkpoint on
        self._has_announced = False
        self._engine: Engine | None = None  # from the loader on
        self._pace: Slowdown = Slowdown()
        self._table = ShareTable((1,) * world_size)
        self._sources: list[Source] = []  # of batches, in the order in which the script made them
        self._tables: list[ShareTable] = []  # of each
        self._splits: Splits | None = None  # of batches that the script draws itself
        self._varies = False  # whether batches are of no size that a loader declares
        self._seen = 0  # samples of all workers, in all steps
        self._audit = audit
        self._audits = world_size >= LEAST_WORKERS and audit.mode != "off" and not self._trains_alone
        self._newest: Part | None = None  # of the batch that the script was given last
        self._waiting: deque[Part] = deque()  # batches of a window of accumulation may be asked for at once
        self._is_computed = True  # whether all batches had a backward pass
        self._part: Part | None = None  # of the batch that was computed last
        self._taken = (0,) * world_size  # samples of the step under way, of each worker
        self._begun = self._stopwatch.mark()
        self._asked_s: float | None = None  # when the script began to wait for a batch, on the host's clock
        self._computed: Mark | None = None
        self._computed_s: float | None = None  # the same on the host's clock
        self._waited_s = 0.0  # for others, in backward passes of the step that were not its last
        self._energy: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._batches = 0
        self._is_within = False  # whether gradients were made since the last step of an optimizer
        self._stepped: set[int] = set()  # optimizers, since the last step was told
        self._stats: list[ExchangeStats] = []  # since then
        self._is_open = True
        self._restored: Restored | None = None  # a checkpoint, until all that gives batches is there again
        self._extra: Extra | None = None  # what the script goes on with besides, from when it has said so
        self._random: States | None = None  # as the step ended after which the script is to stop
        self._is_asked_to_stop = False  # once the next batch is asked for: the script has done then what ends a step
        self._epoch_over: Sequence[int] | None = None  # its shares, while its last batch is not computed
        self._gate = Turns(
            number=REGISTRY.next_number(),
            world_size=world_size,
            store=store,
            room=0 if REGISTRY.open else self._room,
        )
        self._chance: RandomState | None = None
        if world_size > 1:
            take_parameters(model, optimizer)
            self._chance = RandomState(rank)
        self._whole = WholeBatch(rank, self._gate.watched, audits=self._audits)
        if synchronizes_norms and world_size > 1:
            self._whole.synchronize(model.modules())

    @property
    def _room(self) -> int:
        """Float64 numbers of a message that carries all of a step's gradient, where one message can."""
        only = self._sides[0].sum if len(self._sides) == 1 else None
        return 0 if only is None else only.room

    def meet_another(self) -> None:
        """Another session begins: the messages of both have to be of one size."""
        self._gate.make_room(0)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full batch that each worker takes now, in rank order."""
        return () if self._engine is None else self._engine.balance.shares

    def loader(self, loader: LoaderT) -> LoaderT:
        """The script's training loader, as this worker sees it: its slice of every batch.

        A dataset is read by index in the order that the loader's sampler draws on rank 0. A stream (an iterable
        dataset) is read whole by every worker, and must give all of them the same samples in the same order.
        Functions that are given the loader alone find this session as its ``run``. Evaluation loaders need nothing:
        every worker may evaluate all, or rank 0 alone.

        Raises:
            BadInput: it is no DataLoader, makes no batches, or its batches are too small for so many workers.
        """
        inspect_loader(loader, self.world_size)
        assert isinstance(loader, DataLoader)
        self._varies |= declared_batch(loader) is None
        if self.world_size == 1:
            self._share_alone(loader)
            alone = OwnLoader(loader, self._ask, self._begin_alone, run=self)
            self._add(alone, self._table)
            self._go_on()
            return alone  # type: ignore[return-value]  # as a loader
        self._gate.take(Deed.DRAW, self._newest)
        self._check_lengths(loader)
        size = full_batch(loader, lambda numbers: self._gate.drawn_by_first(self._newest, numbers))
        minimum = least_share(self._model, size, self.world_size)
        balance = self._balance(self._plan.shares(size, minimum=minimum), minimum)
        table = ShareTable(balance.shares, minimum=minimum, audits=self._audits_of())
        assert self._chance is not None
        sliced = SlicedLoader(
            loader,
            self.rank,
            table,
            chance=self._chance,
            asked=self._ask,
            begun=self._begin_part,
            ended=self._end_data,
            first=lambda numbers: self._gate.drawn_by_first(self._newest, numbers),
            looks_ahead=self._accumulate > 1,
            run=self,
        )
        self._add(sliced, table)
        synchroniser = None if self._engine is None else self._engine.synchroniser
        if self._trains_alone and synchroniser is None:
            synchroniser = synchroniser_of(
                self._plan.run_spec(balance.shares),
                loader,
                self._model,
                self._optimizer.each[0],
                rank=self.rank,
                device=self.device,
                stopwatch=self._stopwatch,
            )
            self._between = Between(synchroniser, self._model)
        self._begin(balance, synchroniser)
        self._go_on()
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
            BadInput: it is neither, there are fewer samples than workers, or other numbers of them on some, or ``sync``
                is used.
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
        if self.world_size > 1:
            with self._gate.drawing(self._newest):
                batch = drawn_by_first(batch, self.world_size)
        size = batch if isinstance(batch, int) else len(batch)
        if not torch.is_grad_enabled():
            return slice(None) if isinstance(batch, int) else batch
        is_first = self._splits is None
        if self._splits is None:
            minimum = least_share(self._model, size, self.world_size)
            balance = self._balance(self._plan.shares(size, minimum=minimum), minimum)
            table = ShareTable(balance.shares, minimum=minimum, audits=self._audits_of())
            self._splits = Splits(table, self.rank)
            self._add(self._splits, table)
            self._begin(balance, None)
            self._go_on()
        self._ask(is_first)
        part, rows = self._splits.take(size)
        self._begin_part(part)
        return rows if isinstance(batch, int) else batch[rows]

    def _audits_of(self) -> Audits | None:
        """Return which batches of one more loader are audited."""
        if not self._audits:
            return None
        return Audits(accumulate=self._accumulate, largest=self._plan.spec.workers[0].max_local_batch_size)

    def _add(self, source: Source, table: ShareTable) -> None:
        """Batches come from there as well; local batch sizes are decided for the newest."""
        self._sources.append(source)
        self._tables.append(table)
        self._table = table

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

    def _check_lengths(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset):
            return
        lengths = [int(row[0]) for row in gather_numbers([len(loader.dataset)], self.world_size)]  # type: ignore[arg-type]  # no stream
        if len(set(lengths)) > 1:
            raise BadInput(
                f"The dataset has {' and '.join(map(str, lengths))} samples on workers 0 to {self.world_size - 1}.",
                hint="give every worker the whole dataset: the session shares out every batch",
            )

    def _share_alone(self, loader: DataLoader[Any]) -> None:
        """A worker that is alone takes all of every batch."""
        size = declared_batch(loader)
        if self._engine is None and size is not None:
            self._begin(self._balance((size,), 1), None)

    def _balance(self, shares: tuple[int, ...], minimum: int) -> Balance:
        spec = self._plan.run_spec(shares)
        return Balance(spec, choose_policy(spec, minimum=minimum), minimum=minimum)

    def _begin(self, balance: Balance, synchroniser: Synchronizer | None) -> None:
        """Periods begin, over the batches of one loader; those of another may have come before."""
        context = WorkerContext(
            spec=self._plan.run_spec(balance.shares),
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            run_dir=self._run_dir,
            events=self._events,
            stop_requested=(self._run_dir / STOP_FILE).exists,
            store=self._store,
        )
        before = self._engine
        self._engine = Engine(
            context=context,
            exchange=self._exchange,
            balance=balance,
            stopwatch=self._stopwatch,
            synchroniser=synchroniser,
            step=0 if before is None else before.step,
        )
        self._begin_period(self._engine)
        self._pace = make_worker_pace(context)

    def _announce(self, engine: Engine) -> None:
        """Training begins, with the first batch that is asked for."""
        self._has_announced = True
        with self._gate.drawing(self._newest):
            announce(engine.context, self._model, self._exchange, shares=engine.balance.shares, step=engine.step)
        self._events.write("training_started", step=engine.step)

    def _ask(self, is_first: bool) -> None:
        """The script waits for a batch: the step before is over, and computing one begins with reading it."""
        if self._engine is not None and not self._has_announced:
            self._announce(self._engine)
        if is_first:
            self._end_epoch()
        if self._is_asked_to_stop:
            self._save_before_end()
            raise Stopped
        if self._between is not None:
            if is_first or self._batches >= self._accumulate:
                self._end_local_step()
            if is_first:
                self._between.resume()
        if is_first and self._engine is not None:
            self._engine.log.resume()  # what the script did since the last batch is no part of a step
        if not any(self._taken):
            self._begun = self._stopwatch.mark()
        # Before the first batch of an epoch workers agree on all of them: that is no reading.
        self._asked_s = None if is_first else time.perf_counter()

    def _begin_alone(self, part: Part) -> None:
        self._varies |= part.shares != self.shares  # by its rows, which a collate function may make more of
        self._begin_part(part)

    def _begin_part(self, part: Part) -> None:
        for one in self._listeners():
            one.take(part)

    def _listeners(self) -> Sequence[Member]:
        """This session, and those that follow its batches."""
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Whether its batches are those of another session of this process."""
        return not self._sources

    @property
    def has_batches(self) -> bool:
        """Whether its loader, or another session's, has given a batch."""
        return self._newest is not None

    def has_summed(self, optimizer: Optimizer) -> bool:
        """Whether all there is of an optimizer's gradient went through `backward` or `sync`."""
        own = [side for side in self._sides if side.optimizer is optimizer] or self._sides
        return all(side.is_summed for side in own)

    def take(self, part: Part) -> None:
        """Note the part of a batch that the script is given."""
        self._newest = self._whole.part = part
        if part.is_audit:
            self._drawn_before = Generators.at(self.device)
        self._is_computed = False
        if self._accumulate == 1:
            self._waiting.clear()
        self._waiting.append(part)
        self._batches += 1
        is_first = not any(self._taken)
        self._taken = part.shares if is_first else tuple(map(operator.add, self._taken, part.shares))
        asked_s, self._asked_s = self._asked_s, None
        self._pace.begin(part.samples, read_s=0.0 if asked_s is None else time.perf_counter() - asked_s)

    def _draws(self) -> bool:
        """Return whether random numbers of torch were drawn since the audited batch was given."""
        now, before = Generators.at(self.device), self._drawn_before
        pairs = ((now.cpu_generator, before.cpu_generator), (now.cuda_generator, before.cuda_generator))
        return any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs)

    def _end_data(self) -> None:
        """There are no more batches in this epoch; the last may be still to be computed."""
        for one in self._listeners():
            one.end_epoch(self.shares)

    def end_epoch(self, shares: Sequence[int]) -> None:
        """An epoch is over as soon as its last batch is computed."""
        self._epoch_over = shares
        if self._is_computed:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Running statistics of BatchNorm come from each worker's own samples: now of all."""
        if self._epoch_over is None:
            return
        shares, self._epoch_over = self._epoch_over, None
        if self._between is None and not has_averages(self._model):
            return
        self._gate.take(Deed.END_EPOCH, self._newest)
        if self._between is not None:
            self._end_local_step()
            self._between.pause()
            return
        average_buffers(self._model, shares[self.rank] / sum(shares), self.world_size)

    def _end_local_step(self) -> None:
        """A step of workers that train for themselves is over; counted alike on all of them."""
        if self._between is None or not any(self._taken):
            return
        self._sides[0].backwards = 0
        self._tell(self._trace())

    def _trace(self) -> StepTrace:
        """Of the step that was computed."""
        now = self._stopwatch.mark()
        stats = self._stats[0] if len(self._stats) == 1 else summed(self._stats) if self._stats else None
        was_hidden = self._sides[0].sum is not None and self._sides[0].sum.was_hidden
        return StepTrace(
            loss_sum=self._loss_sum,
            start=self._begun,
            backward_end=now if self._computed is None else self._computed,
            reduce_end=now,
            micro_batches=self._accumulate,
            waited_s=self._waited_s,
            way="" if stats is None else self._exchange.way,
            exchange=stats,
            under_backward=stats is not None and was_hidden,
            # A gradient that a GradScaler did not apply was not finite.
            gradient_energy=math.inf if self._energy is None and self._between is not None else self._energy,
        )

    def _tell(self, trace: StepTrace) -> None:
        """One more step: every so many the workers tell each other what they were like, and decide alike."""
        engine, part, taken = self._engine, self._part or self._newest, self._taken
        self._computed = self._computed_s = self._energy = None
        self._waited_s = 0.0
        self._taken, self._batches = (0,) * self.world_size, 0
        self._stepped, self._stats = set(), []
        if engine is None or part is None:
            return
        if engine.step == 0 and self._plan.spec.script and not self._varies:
            check_batch(self._plan.spec, sum(taken))
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._seen += sum(taken)
        with self._gate.watched():
            # Steps over incomplete batches, over shares of before, and audits are not judged.
            engine.after(trace, taken, counts=part.shares == engine.balance.shares and not part.is_audit)
            if engine.is_over:
                self._conclude(engine)

    def _conclude(self, engine: Engine) -> None:
        """A period is over: what it was like, shares and exchange from now on, and the next period."""
        if engine.log.unread:
            saver = self._saver
            period = engine.read(engine.gather(**self._own_state))
            if saver is not None:
                saver.conclude([row.checkpoint_part for row in period.rows])
            place = max((int(row.drawn_epoch), int(row.drawn_batch)) for row in period.rows)
            epoch = max(0, place[0])
            self._write(engine, period)
            engine.steer(
                period,
                epoch=epoch + place[1] / self._epoch_batches,
                learning_rate=float(self._optimizer.param_groups[0]["lr"]),
                steps_left=None if self._steps is None else max(1, self._steps - engine.step),
            )
            if period.stop_wished:
                self._stop(engine)
            if engine.share(period, epoch):
                # No worker may have drawn a batch that it is to share in another way than the others.
                self._table.change(engine.balance.shares, since=place)
        self._begin_period(engine)

    @property
    def _own_state(self) -> dict[str, Any]:
        """What this worker's row tells besides its steps."""
        assert self._engine is not None
        return {
            "stop_wished": self._engine.context.stop_requested(),
            "pace_use": self._pace.use(),
            "drawn": self._drawn,
            "checkpoint_part": 0.0 if self._saver is None else self._saver.progress,
        }

    def _begin_period(self, engine: Engine) -> None:
        engine.begin(engine.period_steps(engine.context.spec.control_period_steps))

    def _stop(self, engine: Engine) -> None:
        """End here, or where the script can be resumed from: all workers have heard the wish.

        Raises:
            Stopped: the script saves nothing.
        """
        if self._extra is None:
            raise Stopped
        self._is_asked_to_stop = True
        self._random = States.now()

    def close(self) -> None:
        """Leave the other workers."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """There is one more of what gives batches: where a checkpoint had it, it goes on from there."""
        raise NotImplementedError

    def _save_before_end(self) -> None:
        """Save what training goes on from."""
        raise NotImplementedError

    def _tell_rest(self) -> None:
        """Steps since the last period are told of, too; all workers are here."""
        engine = self._engine
        if engine is not None and engine.log.unread:
            self._write(engine, engine.read(engine.gather(drawn=self._drawn)))

    def _write(self, engine: Engine, period: Period) -> None:
        if period.diverged:
            return
        engine.tell(period, epoch=self._passes, samples_seen=self._seen)
        if self._folder is not None and self.rank == 0 and engine.synchroniser is None:
            add_sample(self._folder, period, types=self._plan.types, compression=self._exchange.in_use)

    @property
    def _drawn(self) -> tuple[int, int]:
        """The next batch that this worker has not drawn."""
        return self._sources[-1].drawn if self._sources else (0, 0)

    @property
    def _passes(self) -> float:
        """Over the loader's data, as far as the script was given batches."""
        newest = self._sources[-1] if self._sources else None
        if newest is None or isinstance(newest, Splits) or newest.progress.epoch < 0:
            return 0.0
        progress = newest.progress
        return progress.epoch + (progress.batches / self._epoch_batches if progress.is_within else 1.0)

    @property
    def _epoch_batches(self) -> float:
        """Batches of an epoch; a stream's are not known."""
        newest = self._sources[-1] if self._sources else None
        try:
            return math.inf if newest is None or isinstance(newest, Splits) else len(newest) or math.inf
        except TypeError:
            return math.inf
