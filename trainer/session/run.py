"""`session`: a script's own training loop on several unequal workers.

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

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

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
from hetopt.trainer.session.batches import Part, ShareTable, full_batch
from hetopt.trainer.session.gradient import GradientSum, Scaler
from hetopt.trainer.session.joining import find_place, join
from hetopt.trainer.session.loaders import OwnLoader, SlicedLoader
from hetopt.trainer.session.plan import SessionPlan, make_plan
from hetopt.trainer.session.record import SessionRecord
from hetopt.trainer.session.sharing import Sharing, least_share
from hetopt.trainer.spec import BatchPolicy, Compression, RunSpec
from hetopt.trainer.step import StepTrace
from hetopt.trainer.stopwatch import make_stopwatch

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
        scaler: Scaler | None,
        folder: Path | None,
        leave: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._model = model
        self._accumulate = accumulate
        self._scaler = scaler
        self._plan = plan
        self._leave = leave
        # Alone and uncompressed there is nothing to do, and the script's own numbers stay what they were.
        self._is_alone = world_size == 1 and plan.compression.name == "identity"
        self._sum = GradientSum(
            _named(model, optimizer), compression=plan.compression, world_size=world_size, store=store
        )
        self.device = self._sum.device
        self._stopwatch = make_stopwatch(self.device)
        self._record = SessionRecord(
            folder if rank == 0 else None, plan=plan, model=model, device=self.device, world_size=world_size
        )
        self._sharing: Sharing | None = None
        self._part: Part | None = None
        self._begun = self._stopwatch.mark()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._backwards = 0
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
        self._sharing = Sharing(self._plan, table, loader=sliced, minimum=minimum, stopwatch=self._stopwatch)
        self._record.begin(self._sharing.shares)
        return sliced  # type: ignore[return-value]  # as a loader

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, and then the gradients of all workers in ``.grad``: clip them or step as in the script.

        With ``accumulate=k`` gradients are exchanged at every k-th call; until then they are put aside.

        Args:
            loss: mean over the samples of this worker's part, a scalar; scaled where a GradScaler is used.

        Raises:
            BadInput: the loss is no scalar, or the samples did not come from `loader`.
        """
        if loss.dim() != 0:
            raise BadInput(
                f"The loss has shape {tuple(loss.shape)}; it must be a scalar.",
                hint="return the mean over the samples of the batch",
            )
        loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
        self._backwards += 1
        self._note_loss(loss)
        if self._backwards < self._accumulate:
            if not self._is_alone:
                self._sum.put_aside(self._weight)
            return
        self.sync()

    def sync(self) -> None:
        """Sum the gradients of all workers now; for loops that call ``loss.backward()`` themselves, before clipping."""
        self._backwards = 0
        self._is_summed = True
        if self._is_alone:
            self._tell(self._stopwatch.mark(), None)
            return
        computed = self._stopwatch.mark()
        stats = self._sum.sum(self._weight, self._scaler)
        self._tell(computed, stats)

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
        try:
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
            table = ShareTable((loader.batch_size,))
            self._sharing = Sharing(self._plan, table, loader=None, minimum=1, stopwatch=self._stopwatch)
            self._record.begin(self._sharing.shares)

    def _ask(self, is_first: bool) -> None:
        """The script waits for a batch: computing one begins with reading it."""
        if is_first and self._sharing is not None:
            self._sharing.resume()
        if self._backwards == 0:
            self._begun = self._stopwatch.mark()

    def _begin_batch(self, samples: int) -> None:
        self._begin_part(Part(samples=samples, batch=samples, shares=(samples,)))

    def _begin_part(self, part: Part) -> None:
        self._part = part
        self._is_summed = False

    def _end_epoch(self) -> None:
        """Running statistics of BatchNorm come from each worker's own samples: now of all."""
        shares = self.shares
        average_buffers(self._model, shares[self.rank] / sum(shares), self.world_size)

    @property
    def _weight(self) -> float:
        if self._part is None:
            if self.world_size > 1:
                raise BadInput(
                    "A gradient came before any batch of this session's loader.",
                    hint="iterate over `run.loader(loader)` instead of the loader",
                )
            return 1.0
        return self._part.weight

    @property
    def _own_samples(self) -> int:
        return 0 if self._part is None else self._part.samples

    def _note_loss(self, loss: Tensor) -> None:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._loss_sum = self._loss_sum + loss.detach().double() * (self._own_samples / scale)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Whatever the script did not exchange by now would be lost to the others."""
        if not self._is_summed or self._sum.is_waiting:
            self.sync()
        if not self._is_alone:
            self._sum.check_unused()

    def _tell(self, computed: Any, stats: ExchangeStats | None) -> None:
        """One more step: every so many the workers tell each other what they were like, and share anew."""
        sharing, part = self._sharing, self._part
        if sharing is None or part is None:
            return
        trace = StepTrace(
            loss_sum=self._loss_sum,
            begun=self._begun,
            computed=computed,
            summed=self._stopwatch.mark(),
            micro_batches=self._accumulate,
            way=self._plan.way,
            exchange=stats,
        )
        self._loss_sum = torch.zeros_like(self._loss_sum)
        told = sharing.after(trace, part, dense_bytes=self._sum.dense_bytes)
        if told is not None:
            self._record.tell(told, self._plan)


def session(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    compression: Compression | str = "identity",
    accumulate: int = 1,
    scaler: Scaler | None = None,
    policy: BatchPolicy = "model",
    synchronisation: Literal["bsp"] = "bsp",
    spec: RunSpec | Path | str | None = None,
    folder: Path | str | None = None,
    timeout_s: float = 300.0,
) -> Session:
    """Join the other workers of a script that torchrun started; alone, change nothing.

    Args:
        model: on its device, before it is trained; other workers take rank 0's parameters.
        optimizer: of any kind, with any parameter groups.
        compression: of the gradient: a name, ``name:ratio`` such as ``"topk:0.01"``, or the record.
        accumulate: backward passes of a step.
        scaler: the GradScaler of the script, where gradients are compressed; else it needs nothing.
        policy: how batches are shared while training goes on (see `hetopt.trainer.control.choose`).
        synchronisation: ``bsp``: all workers sum their gradients at every step.
        spec: what `hetopt export` wrote for this run (its shares, compression and policy then count); absent: the
            file that the variable HETOPT_SPEC names, or equal shares.
        folder: for the event log, which `hetopt status` reads, and step times for `hetopt profile --from-samples`.
        timeout_s: a worker that is later than this is lost.

    Raises:
        BadInput: something cannot be used, or does not fit the number of workers.
    """
    if accumulate < 1:
        raise BadInput(f"accumulate must be 1 or more, not {accumulate}.", hint="leave it out where every batch steps")
    if synchronisation != "bsp":
        raise BadInput(
            f"A session synchronises by 'bsp' alone, not {synchronisation!r}.",
            hint="write the loop as a Task to train with another synchronisation",
        )
    rank, world_size = find_place(os.environ)
    plan = make_plan(
        world_size, compression=compression, policy=policy, spec=spec or os.environ.get("HETOPT_SPEC") or None
    )
    store, leave = join(model, rank, world_size, timeout_s)
    return Session(
        model,
        optimizer,
        plan=plan,
        rank=rank,
        world_size=world_size,
        store=store,
        accumulate=accumulate,
        scaler=scaler,
        folder=None if folder is None else Path(folder),
        leave=leave,
    )


def _named(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters by their names in the model, in the order of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        (names.get(id(parameter), f"number {index} of the optimizer"), parameter)
        for index, parameter in enumerate(listed)
        if parameter.requires_grad
    ]
