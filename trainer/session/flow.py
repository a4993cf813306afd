"""The batches of a session: handed to the script, counted, and told of when a period is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import Store, gather_numbers
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.evaluation import average_buffers
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.session.alike import take_optimizer, take_parameters
from hetopt.trainer.session.batches import Part, ShareTable, full_batch
from hetopt.trainer.session.exchange import SessionExchange
from hetopt.trainer.session.gate import Gate
from hetopt.trainer.session.gradient import GradientSum, Scaler, check_parameters, named_parameters
from hetopt.trainer.session.handed import Handed, HandedOut, storages
from hetopt.trainer.session.inspection import inspect_loader
from hetopt.trainer.session.loaders import OwnLoader, SlicedLoader
from hetopt.trainer.session.local import LocalTraining, make_local
from hetopt.trainer.session.loss import LossWatch
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.random_state import RandomState
from hetopt.trainer.session.record import SessionRecord
from hetopt.trainer.session.registry import REGISTRY, Member
from hetopt.trainer.session.sharing import Sharing
from hetopt.trainer.session.turns import Deed
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, make_stopwatch

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])


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
        optimizer: Optimizer,
        *,
        plan: SessionPlan,
        rank: int,
        world_size: int,
        store: Store | None,
        accumulate: int,
        steps: int | None,
        scaler: Scaler | None,
        folder: Path | None,
        accepted: Sequence[str],
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
        named = named_parameters(optimizer, self._names)
        self.device = check_parameters(named)
        self._trains_alone = plan.spec.is_local
        self._local: LocalTraining | None = None  # from the loader on
        self._sum: GradientSum | None = None
        # One worker that sends everything has nothing to do, and the script's own numbers stay what they were.
        self._store, self._steps = store, steps
        if not self._trains_alone and (world_size > 1 or plan.spec.compression.name != "identity"):
            self._sum = GradientSum(named, self._make_exchange, world_size=world_size)
        self._loss = LossWatch(
            model, rank, world_size, accumulate=accumulate, accepted=accepted, is_local=self._trains_alone
        )
        self._own_weight: float | None = None  # of the last loss that was looked at
        self._stopwatch = make_stopwatch(self.device)
        self._record = SessionRecord(
            folder if rank == 0 else None, plan=plan, model=model, device=self.device, world_size=world_size
        )
        self._sharing: Sharing | None = None
        self._handed = HandedOut(weigh=world_size > 1)
        self._loaders = 0
        self._part: Part | None = None  # of the batch that was computed last
        self._taken = (0,) * world_size  # samples of the step under way, of each worker
        self._begun = self._stopwatch.mark()
        self._computed: Mark | None = None
        self._computed_s: float | None = None  # the same on the host's clock
        self._waited_s = 0.0  # for others, in backward passes of the step that were not its last
        self._energy: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._backwards = self._batches = 0
        self._is_summed = False
        self._is_open = True
        self._epoch_over: Sequence[int] | None = None  # its shares, while its last batch is not computed
        self._gate = Gate(model, optimizer, number=REGISTRY.next_number(), world_size=world_size, store=store)
        self._chance: RandomState | None = None
        if world_size > 1:
            take_parameters(model, optimizer)
            take_optimizer(optimizer, rank)
            self._chance = RandomState(rank)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full batch that each worker takes now, in rank order."""
        return () if self._sharing is None else self._sharing.shares

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
        self._loaders += 1
        begun = partial(self._begin_part, self._loaders)
        if self.world_size == 1:
            self._share_alone(loader)
            return OwnLoader(loader, self._ask, self._begin_batch, run=self)  # type: ignore[return-value]  # as a loader
        self._check_lengths(loader)
        size = full_batch(loader)
        minimum = least_share(self._model, size, self.world_size)
        table = ShareTable(self._plan.shares(size, minimum=minimum), minimum=minimum)
        assert self._chance is not None
        sliced = SlicedLoader(
            loader,
            self.rank,
            table,
            chance=self._chance,
            asked=self._ask,
            begun=begun,
            ended=self._end_data,
            together=lambda: self._gate.drawing(self._handed.newest),
            looks_ahead=self._accumulate > 1,
            run=self,
        )
        if self._trains_alone and self._local is None:
            self._local = make_local(
                self._plan.run_spec(table.newest),
                loader,
                self._model,
                self._optimizer,
                rank=self.rank,
                device=self.device,
                stopwatch=self._stopwatch,
            )
        self._sharing = self._share(table, sliced, minimum)
        self._record.begin(self._sharing.shares)
        return sliced  # type: ignore[return-value]  # as a loader

    @property
    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return named_parameters(self._optimizer, self._names)

    @property
    def _exchange(self) -> SessionExchange | None:
        return None if self._sum is None else self._sum.exchange

    def _make_exchange(self, shapes: Sequence[tuple[int, ...]], doubles: int) -> SessionExchange:
        return SessionExchange(
            self._plan.spec, shapes, doubles=doubles, device=self.device, store=self._store, steps=self._steps
        )

    def _check_lengths(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset):
            return
        self._gate.take(Deed.DRAW, self._handed.newest)
        lengths = [int(row[0]) for row in gather_numbers([len(loader.dataset)], self.world_size)]  # type: ignore[arg-type]  # no stream
        if len(set(lengths)) > 1:
            raise BadInput(
                f"The dataset has {' and '.join(map(str, lengths))} samples on workers 0 to {self.world_size - 1}.",
                hint="give every worker the whole dataset: the session shares out every batch",
            )

    def _share_alone(self, loader: DataLoader[Any]) -> None:
        """A worker that is alone takes all of every batch."""
        if self._sharing is None and loader.batch_size is not None:
            self._sharing = self._share(ShareTable((loader.batch_size,)), None, 1)
            self._record.begin(self._sharing.shares)

    def _share(self, table: ShareTable, loader: SlicedLoader | None, minimum: int) -> Sharing:
        return Sharing(
            self._plan,
            table,
            loader=loader,
            exchange=self._exchange,
            learning_rate=lambda: float(self._optimizer.param_groups[0]["lr"]),
            minimum=minimum,
            stopwatch=self._stopwatch,
        )

    def _ask(self, is_first: bool) -> None:
        """The script waits for a batch: the step before is over, and computing one begins with reading it."""
        if is_first:
            self._end_epoch()
        if self._local is not None:
            if is_first or self._batches >= self._accumulate:
                self._end_local_step()
            if is_first:
                self._local.resume()
        if is_first and self._sharing is not None:
            self._sharing.resume()
        if not any(self._taken):
            self._begun = self._stopwatch.mark()

    def _begin_batch(self, samples: int, batch: Any) -> None:
        part = Part(samples=samples, batch=samples, shares=(samples,))
        for one in self._listeners():
            one.take(Handed(part=part))

    def _begin_part(self, source: int, part: Part, batch: Any) -> None:
        for one in self._listeners():
            one.take(Handed(part=part, source=source, storages=storages(batch)))

    def _listeners(self) -> Sequence[Member]:
        """This session, and those that follow its batches."""
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Whether its batches are those of another session of this process."""
        return self._loaders == 0

    def take(self, handed: Handed) -> None:
        """The script was given a batch."""
        self._handed.give(handed)
        self._loss.begin_batch()
        self._batches += 1
        self._taken = tuple(before + now for before, now in zip(self._taken, handed.part.shares, strict=True))

    def _end_data(self) -> None:
        """There are no more batches in this epoch; the last may be still to be computed."""
        for one in self._listeners():
            one.end_epoch(self.shares)

    def end_epoch(self, shares: Sequence[int]) -> None:
        """An epoch is over as soon as its last batch is computed."""
        self._epoch_over = shares
        if self._handed.are_computed:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Running statistics of BatchNorm come from each worker's own samples: now of all."""
        if self._epoch_over is None:
            return
        shares, self._epoch_over = self._epoch_over, None
        self._gate.take(Deed.END_EPOCH, self._handed.newest)
        if self._local is not None:
            self._end_local_step()
            self._local.pause()
            return
        average_buffers(self._model, shares[self.rank] / sum(shares), self.world_size)

    @property
    def _own_samples(self) -> int:
        return 0 if self._part is None else self._part.samples

    def _end_local_step(self) -> None:
        """A step of workers that train for themselves is over; counted alike on all of them."""
        if self._local is None or not any(self._taken):
            return
        self._backwards = 0
        self._tell(self._local.after(self._trace(None), self._taken))

    def _trace(self, stats: ExchangeStats | None) -> StepTrace:
        """Of the step that was computed."""
        now = self._stopwatch.mark()
        return StepTrace(
            loss_sum=self._loss_sum,
            start=self._begun,
            backward_end=now if self._computed is None else self._computed,
            reduce_end=now,
            micro_batches=self._accumulate,
            waited_s=self._waited_s,
            way="" if stats is None or self._exchange is None else self._exchange.way,
            exchange=stats,
            # A gradient that a GradScaler did not apply was not finite.
            gradient_energy=math.inf if self._energy is None and self._local is not None else self._energy,
        )

    def _tell(self, trace: StepTrace) -> None:
        """One more step: every so many the workers tell each other what they were like, and share anew."""
        sharing, part, samples = self._sharing, self._part or self._handed.newest, sum(self._taken)
        self._computed = self._computed_s = self._energy = None
        self._waited_s = 0.0
        self._taken, self._batches = (0,) * self.world_size, 0
        if sharing is None or part is None:
            return
        self._loss_sum = torch.zeros_like(self._loss_sum)
        told = sharing.after(trace, part, samples=samples)
        if told is not None:
            self._record.tell(told, {} if self._local is None else self._local.event())
