"""A script's own training loop on several unequal workers.

    with session(model, optimizer) as run:
        loader = run.loader(loader)
        for epoch in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                run.backward(criterion(model(inputs), targets))
                optimizer.step()

torchrun starts the script once a worker; started alone, it is a run of one worker that computes, bit for bit, what the
script did before. The batch size of the loader stays that of the whole cluster, so that learning rates, schedules and
the number of steps stay right whatever the cluster is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.agreement import Store, gather_texts, sum_numbers
from hetopt.trainer.checkpoints.fingerprint import parameters_sha256
from hetopt.trainer.evaluation import average_buffers
from hetopt.trainer.exchange.stats import ExchangeStats
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.session.batches import Part, ShareTable, full_batch
from hetopt.trainer.session.denominators import Weight
from hetopt.trainer.session.exchange import SessionExchange
from hetopt.trainer.session.gradient import GradientSum, Scaler, check_parameters, named_parameters
from hetopt.trainer.session.loaders import OwnLoader, SlicedLoader
from hetopt.trainer.session.local import LocalTraining, gradient_energy, make_local
from hetopt.trainer.session.loss import LossWatch
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.record import SessionRecord
from hetopt.trainer.session.sharing import Sharing
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, make_stopwatch

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])

_SEED_STRIDE = 7919


class Session:
    """One worker's side of a run; made by `session`.

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
        self._named = named_parameters(model, optimizer)
        self.device = check_parameters(self._named)
        self._trains_alone = plan.spec.is_local
        self._local: LocalTraining | None = None  # from the loader on
        self._exchange: SessionExchange | None = None
        self._sum: GradientSum | None = None
        # One worker that sends everything has nothing to do, and the script's own numbers stay what they were.
        if not self._trains_alone and (world_size > 1 or plan.spec.compression.name != "identity"):
            shapes = [tuple(parameter.shape) for _, parameter in self._named]
            self._exchange = SessionExchange(plan.spec, shapes, device=self.device, store=store, steps=steps)
            self._sum = GradientSum(self._named, self._exchange, world_size=world_size)
        self._loss = LossWatch(
            model, rank, world_size, accumulate=accumulate, accepted=accepted, is_local=self._trains_alone
        )
        self._own_weight: float | None = None  # of the last loss that was looked at
        self._stopwatch = make_stopwatch(self.device)
        self._record = SessionRecord(
            folder if rank == 0 else None, plan=plan, model=model, device=self.device, world_size=world_size
        )
        self._sharing: Sharing | None = None
        self._part: Part | None = None
        self._taken = (0,) * world_size  # samples of the step under way, of each worker
        self._begun = self._stopwatch.mark()
        self._computed: Mark | None = None
        self._energy: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._backwards = self._batches = 0
        self._is_summed = False
        self._is_open = True
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        if world_size > 1:
            self._begin_alike()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.rank == 0

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
        if not isinstance(loader, DataLoader):
            raise BadInput(
                f"The loader is a {type(loader).__name__}, and only a torch.utils.data.DataLoader can be shared out.",
                hint="put the samples into a dataset and give that to a DataLoader",
            )
        if self.world_size == 1:
            self._share_alone(loader)
            return OwnLoader(loader, self._ask, self._begin_batch, run=self)  # type: ignore[return-value]  # as a loader
        size = full_batch(loader)
        minimum = least_share(self._model, size, self.world_size)
        table = ShareTable(self._plan.shares(size, minimum=minimum), minimum=minimum)
        sliced = SlicedLoader(
            loader, self.rank, table, asked=self._ask, begun=self._begin_part, ended=self._end_epoch, run=self
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

    def backward(self, loss: Tensor, *, weight: Weight | Tensor | None = None) -> None:
        """``loss.backward()``, and then the gradients of all workers in ``.grad``: clip them or step as in the script.

        With ``accumulate=k`` gradients are exchanged at every k-th call; until then they are put aside. Workers that
        train for themselves (``sync``) keep their own.

        What the loss is a mean over (samples, tokens, class weights), or that it is a sum, is read off its operators.

        Args:
            loss: of this worker's part, a scalar; scaled where a GradScaler is used.
            weight: what the loss is a mean over here, if operators do not tell; ``"sum"``: those of parts add up.

        Raises:
            BadInput: the loss is no scalar, the samples did not come from `loader`, or the workers' gradients do not
                make that of the batch, as far as anybody can tell.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        self._own_weight = self._loss.backward(loss, weight, self._present_part())
        self._backwards += 1
        self._note_loss(loss, self._own_weight)
        if self._backwards < self._accumulate:
            if self._sum is not None:
                self._sum.put_aside(self._own_weight)
            return
        self._sync(self._own_weight)

    def sync(self, *, weight: Weight | Tensor | None = None) -> None:
        """Sum the gradients of all workers now; for loops that call ``loss.backward()`` themselves, before clipping.

        Args:
            weight: what the loss was a mean over on this worker (samples, tokens), or ``"sum"`` (see `backward`); None:
                what `backward` found.

        Raises:
            BadInput: there is no weight, and `backward` has not seen the loss.
        """
        self._sync(self._loss.weight_of(self._own_weight, weight, self._present_part()))

    def _sync(self, own_weight: float) -> None:
        self._own_weight, self._backwards = None, 0
        self._is_summed = True
        self._computed = self._stopwatch.mark()
        if self._trains_alone:
            if self._plan.spec.sync.name == "selsync":
                scale = 1.0 if self._scaler is None else self._scaler.get_scale()
                self._energy = gradient_energy([parameter for _, parameter in self._named], scale)
        elif self._sum is None:
            self._tell(self._trace(None))
        else:
            look = self._sharing is not None and self._sharing.ends_period
            self._tell(self._trace(self._sum.sum(own_weight, self._scaler, look=look)))

    def averaged(self) -> AbstractContextManager[None]:
        """The model is the average of all workers' inside, to evaluate or save it in the middle of an epoch.

        All workers must enter together. Between epochs it is so anyway, and without ``sync`` always.
        """
        return nullcontext() if self._local is None else self._local.averaged()

    def mean(self, value: Tensor | float, samples: int | None = None) -> float:
        """The mean of a figure over all workers, weighted by samples; for logging.

        Args:
            value: of this worker's samples.
            samples: how many those are; None: its part of the present batch.
        """
        weight = float(samples if samples is not None else self._own_samples)
        total, weights = sum_numbers([float(value) * weight, weight], self.world_size)
        return total / weights if weights else float("nan")

    def close(self) -> None:
        """Leave the other workers; the end of the ``with`` block.

        Raises:
            RunFailed: the workers' models differ.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._hook.remove()
        self._loss.close()
        try:
            if self._local is not None:
                self._end_local_step()
                self._local.end()
            digests = gather_texts(parameters_sha256(self._model), self.world_size)
            if len(set(digests)) > 1:
                raise RunFailed(
                    "the workers' models differ at the end of the session.",
                    hint="change parameters through the optimizer alone, and the same way on every worker",
                )
            self._record.end(digests[0])
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The others cannot be asked any more: they learn of it as their collective fails.
        self._is_open = False
        self._loss.close()
        self._hook.remove()
        self._leave()

    def _begin_alike(self) -> None:
        """Every worker begins with rank 0's model, and draws its own random numbers from here on."""
        with torch.no_grad():
            for tensor in [*self._model.parameters(), *self._model.buffers()]:
                staged = tensor.detach().cpu().contiguous()
                dist.broadcast(staged, src=0)
                tensor.copy_(staged)
        if self.rank:
            torch.manual_seed(torch.initial_seed() + _SEED_STRIDE * self.rank)

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
        if self._local is not None:
            if is_first or self._batches >= self._accumulate:
                self._end_local_step()
            if is_first:
                self._local.resume()
        if is_first and self._sharing is not None:
            self._sharing.resume()
        if not any(self._taken):
            self._begun = self._stopwatch.mark()

    def _begin_batch(self, samples: int) -> None:
        self._begin_part(Part(samples=samples, batch=samples, shares=(samples,)))

    def _begin_part(self, part: Part) -> None:
        self._part = part
        self._loss.begin_batch()
        self._is_summed = False
        self._batches += 1
        self._taken = tuple(before + now for before, now in zip(self._taken, part.shares, strict=True))

    def _end_epoch(self) -> None:
        """Running statistics of BatchNorm come from each worker's own samples: now of all."""
        if self._local is not None:
            self._end_local_step()
            self._local.pause()
            return
        shares = self.shares
        average_buffers(self._model, shares[self.rank] / sum(shares), self.world_size)

    def _present_part(self) -> Part | None:
        """Of the batch that the script was given last; None: it is alone, and was given none."""
        if self._part is None and self.world_size > 1:
            raise BadInput(
                "A gradient came before any batch of this session's loader.",
                hint="iterate over `run.loader(loader)` instead of the loader",
            )
        return self._part

    @property
    def _own_samples(self) -> int:
        return 0 if self._part is None else self._part.samples

    def _note_loss(self, loss: Tensor, weight: float) -> None:
        """As a sum over samples: over those of all workers it is the batch's loss times its samples."""
        if weight and self._part is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._loss_sum = self._loss_sum + loss.detach().double() * (weight * self._part.batch / scale)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Whatever the script did not exchange by now would be lost to the others."""
        if not self._is_summed or (self._sum is not None and self._sum.is_waiting):
            self.sync()
        if self._sum is not None:
            self._sum.check_unused()

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
            begun=self._begun,
            computed=now if self._computed is None else self._computed,
            summed=now,
            micro_batches=self._accumulate,
            way="" if stats is None or self._exchange is None else self._exchange.way,
            exchange=stats,
            # A gradient that a GradScaler did not apply was not finite.
            gradient_energy=math.inf if self._energy is None and self._local is not None else self._energy,
        )

    def _tell(self, trace: StepTrace) -> None:
        """One more step: every so many the workers tell each other what they were like, and share anew."""
        sharing, part, samples = self._sharing, self._part, sum(self._taken)
        self._computed = self._energy = None
        self._taken, self._batches = (0,) * self.world_size, 0
        if sharing is None or part is None:
            return
        self._loss_sum = torch.zeros_like(self._loss_sum)
        told = sharing.after(trace, part, samples=samples)
        if told is not None:
            self._record.tell(told, {} if self._local is None else self._local.event())
