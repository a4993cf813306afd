"""Runs a DDP script as it is on unequal workers: `unequal` gives shares, weighs gradients, and watches the steps.

Three things of torch are extended while a script runs: what a ``DataLoader`` reads batches by, what
``DistributedDataParallel`` does when it is made (a communication hook is registered) and when it is called (the batch
at hand is noted). The script's own process group, samplers, loop and checkpoints stay what they are.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, dataloader

from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import STOP_FILE
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.announcement import announce
from hetopt.trainer.assembly import make_worker_pace
from hetopt.trainer.balance import Balance
from hetopt.trainer.checkpoints.folder import leave_model
from hetopt.trainer.checkpoints.state import parameters_sha256
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.ddp.comm_hook import CommState, comm_hook
from hetopt.trainer.ddp.shares import UnequalBatches, rank_holder
from hetopt.trainer.engine import Engine
from hetopt.trainer.normalisation import least_share
from hetopt.trainer.policies.choose import choose_policy
from hetopt.trainer.session.batches import Part, ShareTable
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.record import add_sample
from hetopt.trainer.session.stopping import Stopped
from hetopt.trainer.steps.slowdown import FORWARD, Slowdown
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, make_stopwatch


class DdpRun:
    """One worker's side of a DDP script's run.

    Args:
        plan: shares, compression, policies; of the launch.
        run_dir: for the event log, which rank 0 writes.

    Attributes:
        rank: of this worker.
        world_size: workers.
        steps: that optimizers have made.
    """

    def __init__(self, plan: SessionPlan, run_dir: Path) -> None:
        self._plan, self._run_dir = plan, run_dir
        self.rank, self.world_size, self.steps = dist.get_rank(), dist.get_world_size(), 0
        self._modules: list[tuple[DistributedDataParallel, CommState]] = []
        self._events = EventLog(run_dir / EVENTS_FILE if self.rank == 0 else None)
        self._engine: Engine | None = None
        self._balance: Balance | None = None
        self._table: ShareTable | None = None
        self._pace = Slowdown()
        self._waiting: deque[Part] = deque()
        self._part: Part | None = None
        self._place = (0, 0)
        self._samples_seen = 0
        self._loss: Tensor | None = None

    # Shares (see `hetopt.trainer.ddp.shares.Sharer`).

    @property
    def is_training(self) -> bool:
        """Return whether the script trains: some DDP module is in training mode, and gradients are on."""
        return torch.is_grad_enabled() and any(ddp.module.training for ddp, _ in self._modules)

    def batch_of(self, batch_size: int) -> int:
        """Return the samples of a batch of all workers: those of the plan."""
        planned = self._plan.spec.global_batch_size
        return planned if self._plan.spec.script else batch_size * self.world_size

    def table(self, batch_size: int) -> ShareTable:
        """Return the shares of one more loader; local batch sizes are decided for the newest."""
        module, state = self._modules[-1]
        size = self.batch_of(batch_size)
        minimum = least_share(module, size, self.world_size)
        spec = self._plan.run_spec(self._plan.shares(size, minimum=minimum))
        self._balance = Balance(spec, choose_policy(spec, minimum=minimum), minimum=minimum)
        self._table = ShareTable(self._balance.shares, minimum=minimum)
        self._begin(spec, module, state)
        return self._table

    def drawn(self, place: tuple[int, int]) -> None:
        """Note the next batch that this worker has not drawn."""
        self._place = place

    def _begin(self, spec: RunSpec, module: torch.nn.Module, state: CommState) -> None:
        device = next(module.parameters()).device
        context = WorkerContext(
            spec=spec,
            rank=self.rank,
            world_size=self.world_size,
            device=device,
            run_dir=self._run_dir,
            events=self._events,
            stop_requested=(self._run_dir / STOP_FILE).exists,
        )
        assert self._balance is not None
        self._stopwatch = make_stopwatch(device)
        self._engine = Engine(
            context=context, exchange=state.exchange, balance=self._balance, stopwatch=self._stopwatch, step=self.steps
        )
        self._engine.begin(self._engine.period_steps(spec.control_period_steps))
        self._pace = make_worker_pace(context)
        self._begun: Mark = self._stopwatch.mark()
        self._computed: Mark | None = None
        announce(context, module, state.exchange, shares=self._balance.shares, step=self.steps)
        self._events.write("training_started", step=self.steps)

    # What the script does.

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Exchange the gradients of a DDP module from here on."""
        state = CommState(ddp, spec=self._plan.spec, reach=self._reach)
        self._modules.append((ddp, state))
        ddp.register_comm_hook(state, comm_hook)

    def give(self, part: Part) -> None:
        """Note a batch that a loader has given; some scripts ask for more than one ahead."""
        self._waiting.append(part)

    def forward(self, ddp: DistributedDataParallel, rows: int | None) -> None:
        """Take the batch that a training forward pass is of: the first that waits.

        A gradient that micro-batches under ``no_sync`` have left in ``.grad`` is weighed when the last is summed: by
        the weight of that one, so that the others' are brought to it here.

        Args:
            ddp: the module.
            rows: of its first input; None: not known.
        """
        if not self._waiting:
            return
        before, part = self._part, self._waiting.popleft()
        self._part = part
        self._pace.begin(part.samples)
        for module, state in self._modules:
            state.weight = part.weight
            if before is not None and before.weight != part.weight and part.weight:
                for parameter in module.parameters():
                    if parameter.grad is not None and not self._is_summed:
                        parameter.grad.mul_(before.weight / part.weight)
        self._is_summed = False

    _is_summed = True

    def _reach(self, done: float) -> None:
        """Note how far the backward pass is; where this worker is slowed down, wait until it would be."""
        if self._pace.waits:
            self._pace.reach(FORWARD + (1 - FORWARD) * done if done < 1 else 1.0)
        if done >= 1 and self._engine is not None:
            self._computed = self._stopwatch.mark()
            self._is_summed = True

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a backward pass, for the log."""
        if loss.dim() == 0:
            self._loss = loss.detach()

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step; every so many the workers tell each other what they were like, and decide alike.

        Raises:
            Stopped: somebody asked the run to end, on all workers between the same two steps.
        """
        engine, part, own = self._engine, self._part, {id(one) for ddp, _ in self._modules for one in ddp.parameters()}
        is_own = any(id(one) in own for group in optimizer.param_groups for one in group["params"])
        if engine is None or part is None or self._computed is None or not is_own:
            return  # before the first batch in shares, or one more optimizer of the same step
        self.steps += 1
        now = self._stopwatch.mark()
        _, state = self._modules[-1]
        loss = torch.zeros(()) if self._loss is None else self._loss.double()
        trace = StepTrace(
            loss_sum=loss * part.samples,
            start=self._begun,
            backward_end=self._computed,
            reduce_end=now,
            micro_batches=1,
            way=state.exchange.way,
            exchange=state.stats,
            under_backward=state.exchange.is_dense,
        )
        self._samples_seen += part.batch
        engine.after(trace, part.shares, counts=part.shares == engine.balance.shares)
        self._computed, self._loss = None, None
        if engine.is_over:
            self._conclude(engine, float(optimizer.param_groups[0]["lr"]))
        self._begun = self._stopwatch.mark()

    def _conclude(self, engine: Engine, learning_rate: float) -> None:
        if engine.log.unread:
            gathering = engine.gather(
                stop_wished=engine.context.stop_requested(), pace_use=self._pace.use(), drawn=self._place
            )
            period = engine.read(gathering)
            place = max((int(row.drawn_epoch), int(row.drawn_batch)) for row in period.rows)
            if not period.diverged:
                engine.tell(period, epoch=float(place[0]), samples_seen=self._samples_seen)
                if self.rank == 0:
                    _, state = self._modules[-1]
                    add_sample(self._run_dir, period, types=self._plan.types, compression=state.exchange.in_use)
            engine.steer(period, epoch=float(place[0]), learning_rate=learning_rate, steps_left=None)
            if period.stop_wished:
                raise Stopped
            if engine.share(period, place[0]) and self._table is not None:
                # No worker may have drawn a batch that it is to share in another way than the others.
                self._table.change(engine.balance.shares, since=place)
        engine.begin(engine.period_steps(engine.context.spec.control_period_steps))

    def close(self, *, stopped: bool) -> None:
        """End the log, and leave the model of the last DDP module where that of a task is; rank 0 does both.

        Args:
            stopped: whether somebody asked the run to end.
        """
        if self._engine is not None and self.rank == 0:
            module = self._modules[-1][0].module
            leave_model(self._run_dir, module, stopped=stopped, number=1)
            self._events.write("session_finished", step=self.steps, parameters_sha256=parameters_sha256(module))
        self._events.close()


@contextmanager
def unequal(plan: SessionPlan, run_dir: Path) -> Iterator[Callable[[], DdpRun | None]]:
    """Let a DDP script run on unequal workers inside; gives what returns its run, once a DDP module was made.

    Args:
        plan: of the launch.
        run_dir: of the launch.
    """
    runs: list[DdpRun] = []

    def made(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if dist.get_world_size(self.process_group) == len(plan.spec.workers) > 1:
            if not runs:
                runs.append(DdpRun(plan, run_dir))
            runs[0].attach(self)

    def called(self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        if runs and self.training and torch.is_grad_enabled():
            runs[0].forward(self, None)
        return forward(self, *inputs, **named)

    def index_sampler(self: DataLoader[Any]) -> Any:
        sampler = vars(self).get("_hetopt_batches")
        if sampler is None and runs and self.batch_sampler is not None and isinstance(_size_of(self), int):
            found = rank_holder(self.batch_sampler, runs[0].world_size)
            if found is not None:
                sampler = UnequalBatches(self.batch_sampler, _size_of(self), *found, runs[0])
                object.__setattr__(self, "_hetopt_batches", sampler)
        return sampler or of_loader.fget(self)

    def following(self: Any) -> Any:
        batch = follow(self)
        if runs and isinstance(self._index_sampler, UnequalBatches) and self._index_sampler.parts:
            runs[0].give(self._index_sampler.parts.popleft())
        return batch

    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        if runs and isinstance(tensors, Tensor):
            runs[0].note_loss(tensors)
        run_backward(tensors, *args, **options)

    def stepped(optimizer: Optimizer, args: Any, options: Any) -> None:
        if runs:
            runs[0].stepped(optimizer)

    init: Any = DistributedDataParallel.__init__
    forward: Any = DistributedDataParallel.forward
    follow: Any = dataloader._BaseDataLoaderIter.__next__
    of_loader: Any = DataLoader._index_sampler
    run_backward: Any = torch.autograd.backward
    with ExitStack() as undo:
        for owner, name, value in (
            (DistributedDataParallel, "__init__", functools.wraps(init)(made)),
            (DistributedDataParallel, "forward", functools.wraps(forward)(called)),
            (DataLoader, "_index_sampler", property(index_sampler)),
            (dataloader._BaseDataLoaderIter, "__next__", following),
            (torch.autograd, "backward", functools.wraps(run_backward)(backward)),
        ):
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        hook = register_optimizer_step_post_hook(stepped)
        undo.callback(hook.remove)
        try:
            yield lambda: runs[0] if runs else None
        except Stopped:
            for run in runs:
                run.close(stopped=True)
            raise
        for run in runs:
            run.close(stopped=False)


def _size_of(loader: DataLoader[Any]) -> Any:
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
