"""Control periods of a script's steps, after each of which workers gather their figures and decide alike.

A session and a script with DistributedDataParallel drive the same engine: each step is told to it, and every so many
steps the workers gather a row each, write an event and a sample to plan from, and decide on shares and exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import STOP_FILE
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.trainer.checkpoints.folder import CheckpointSaver
from hetopt.trainer.comm.exchange import ExchangeStats
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.engine import Balance, Engine, announce
from hetopt.trainer.policies.policy import KeepShares, choose_policy
from hetopt.trainer.script.batches import Audits, Place, Shares, ShareTable, with_batch, with_shares
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.period import Period
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Mark, Slowdown, Stopwatch
from hetopt.trainer.sync.synchroniser import Synchronizer
from hetopt.trainer.task import least_share
from hetopt.trainer.training import make_worker_pace

STEPS_FILE = "steps.jsonl"


class Periods:
    """The control periods of a script on one worker, which log its steps and decide on shares and exchange.

    Args:
        spec: run spec: shares, compression, policies.
        rank: of this worker.
        world_size: number of workers.
        folder: folder for the event log and step times, which rank 0 writes and makes; None: nothing is written.
        store: store that the workers met through; None: nobody is named when one is lost.
        watched: returns a context manager around what all workers do together.

    Attributes:
        events: event log; on other ranks than 0, and without a folder, it writes nothing.
        engine: counter of steps that gathers figures; None: no batch was shared out yet.
        table: shares of the batches that were shared out last; None: none was.
        pace: waits that make this worker as slow as its spec says.
        saver: writer of checkpoints; None: this run saves none.
        begun: mark of the time when the step under way began.
        computed: mark of the time when this worker's gradient was there; None: it is not yet.
        drawn: epoch and number of the next batch that this worker has not drawn.
        samples_seen: samples of all workers, in all steps.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank: int,
        world_size: int,
        folder: Path | None,
        *,
        store: Store | None = None,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._spec, self._rank, self._world_size = spec, rank, world_size
        self._folder, self._store, self._watched = folder, store, watched
        if folder is not None and rank == 0:
            with suppress(OSError):  # the log says which file cannot be written
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.events = EventLog(folder / EVENTS_FILE if folder is not None and rank == 0 else None)
        self.engine: Engine | None = None
        self.table: ShareTable | None = None
        self.pace: Slowdown = Slowdown()
        self.saver: CheckpointSaver | None = None
        self.computed: Mark | None = None
        self.drawn: Place = (0, 0)
        self.samples_seen = 0
        self._has_diverged = False

    def begin(
        self,
        size: int,
        model: nn.Module,
        exchange: ExchangeConfig,
        *,
        device: torch.device,
        step: int = 0,
        keep: Shares = (),
        audits: Audits | None = None,
        synchroniser: Callable[[RunSpec, Stopwatch], Synchronizer] | None = None,
    ) -> ShareTable:
        """Begin control periods on a new source of batches, and return its table of shares; all must call it.

        The first call logs the head of the run.

        Args:
            size: number of samples of a batch of all workers.
            model: model that is trained.
            exchange: settings of how its gradients travel.
            device: device of the model.
            step: number of steps done before.
            keep: shares that nobody changes, in rank order; empty: those of the plan, as its policy changes them.
            audits: rule for which batches are computed twice; None: no batch is.
            synchroniser: returns what averages the models of local SGD; None: workers sum gradients.

        Raises:
            BadInput: there are fewer samples than workers, they do not fit into the workers' memory, or the batch
                policy does not suit the run.
        """
        minimum = 1 if keep else least_share(model, size, self._world_size)
        spec = with_shares(self._spec, keep) if keep else with_batch(self._spec, size, minimum=minimum)
        balance = Balance(spec, KeepShares() if keep else choose_policy(spec, minimum=minimum), minimum=minimum)
        run_dir, before = self._folder or Path(), self.engine
        context = WorkerContext(
            spec=spec,
            rank=self._rank,
            world_size=self._world_size,
            device=device,
            run_dir=run_dir,
            events=self.events,
            stop_requested=(run_dir / STOP_FILE).exists,
            store=self._store,
        )
        if before is None:
            self.stopwatch = Stopwatch(device)
            self.begun = self.stopwatch.mark()
            with self._watched():
                announce(context, model, exchange, shares=balance.shares_of_step, step=step)
            self.events.write("training_started", step=step)
        self.engine = engine = Engine(
            context=context,
            exchange=exchange,
            balance=balance,
            stopwatch=self.stopwatch,
            synchroniser=None if synchroniser is None else synchroniser(spec, self.stopwatch),
            step=step,
        )
        engine.begin(engine.period_steps(spec.control_period_steps))
        self.pace = make_worker_pace(context)
        self.table = ShareTable(balance.shares, minimum=minimum, audits=audits)
        return self.table

    @property
    def shares(self) -> Shares:
        """Samples of a full batch that each worker takes now, in rank order; empty: no batch was shared out yet."""
        return () if self.engine is None else self.engine.balance.shares

    def after(
        self,
        samples: Shares,
        *,
        loss_sum: Tensor,
        stats: ExchangeStats | None,
        hidden: bool,
        waited_s: float = 0.0,
        energy: float | None = None,
        norms: tuple[float, ...] | None = None,
        counts: bool,
        learning_rate: float,
        epoch: Callable[[], float],
        steps_left: int | None = None,
    ) -> bool:
        """Log a step that ends now, and decide at a control period's end; return whether the run is to stop.

        All workers must call it.

        Args:
            samples: samples of the step of every worker, in rank order.
            loss_sum: sum of this worker's losses over its samples, float64.
            stats: cost of the exchange; None: there was no exchange.
            hidden: whether the exchange was under backward.
            waited_s: seconds spent waiting for other workers before this worker's gradient was there.
            energy: squared norm of this worker's gradient, in local SGD; None: not measured.
            norms: squared norms of the gradient, see `GradientNorms.take`; None: they were not wanted.
            counts: whether the step is like others; if not, its times are left out.
            learning_rate: learning rate of the first parameter group.
            epoch: returns the passes over the data.
            steps_left: steps until the script ends; None: not known.

        Returns:
            Whether somebody asked the run to stop, as all workers know; False within a control period.

        Raises:
            RunFailed: a worker did not answer in time.
            OSError: the disk refuses the line of step times.
        """
        engine, now, computed, self.computed = self.engine, self.stopwatch.mark(), self.computed, None
        assert engine is not None
        trace = StepTrace(
            loss_sum=loss_sum,
            start=self.begun,
            backward_end=now if computed is None else computed,
            reduce_end=now,
            waited_s=waited_s,
            way="" if stats is None else engine.exchange.way,
            exchange=stats,
            under_backward=stats is not None and hidden,
            gradient_energy=energy,
            norms=norms,
        )
        engine.after(trace, samples, counts=counts)
        if not engine.is_over:
            return False
        stops = False
        if engine.log.unread:
            period = engine.read(
                engine.gather(
                    stop_wished=engine.context.stop_requested(),
                    pace_use=self.pace.use(),
                    drawn_epoch=self.drawn[0],
                    drawn_batch=self.drawn[1],
                    checkpoint_part=0.0 if self.saver is None else self.saver.progress,
                )
            )
            if self.saver is not None:
                self.saver.conclude([row.checkpoint_part for row in period.rows])
            place = max((int(row.drawn_epoch), int(row.drawn_batch)) for row in period.rows)
            passes = epoch()
            self._write(engine, period, passes)
            engine.steer(period, epoch=passes, learning_rate=learning_rate, steps_left=steps_left)
            stops = period.stop_wished
            if engine.share(period, max(0, place[0])) and self.table is not None:
                # No worker may have drawn a batch that it is to share in another way than the others.
                self.table.change(engine.balance.shares, since=place)
        engine.begin(engine.period_steps(engine.context.spec.control_period_steps))
        return stops

    def finish(self, epoch: float) -> None:
        """Log the steps since the last control period, after ``epoch`` passes over the data; all must call it.

        Without such steps nothing is done.
        """
        if self.engine is not None and self.engine.log.unread:
            self._write(self.engine, self.engine.read(self.engine.gather()), epoch)

    def _write(self, engine: Engine, period: Period, epoch: float) -> None:
        """Log a period and, on rank 0, its step times; of a loss that is not finite that alone, once.

        OSError: the disk refuses.
        """
        if period.diverged:
            if not self._has_diverged:
                self._has_diverged = True
                self.events.write(
                    "loss_diverged",
                    step=engine.step,
                    reason=f"the loss is {period.loss} in the last {period.steps} steps; where one process trains "
                    f"well, one of the shares {', '.join(map(str, period.local_batch_sizes))} may have nothing that "
                    "its mean counts: a session's run.backward(loss, weight=count) mends that",
                )
            return
        engine.tell(period, epoch=epoch, samples_seen=self.samples_seen)
        if self._folder is not None and self._rank == 0 and engine.synchroniser is None:
            _add_sample(
                self._folder,
                period,
                types=[worker.type for worker in self._spec.workers],
                compression=engine.exchange.in_use,
            )


def _add_sample(folder: Path, period: Period, *, types: Sequence[str], compression: Compression) -> None:
    """Append a period as a line that `hetopt profile --from-samples` reads: one machine a worker.

    Args:
        folder: folder of the session.
        period: period whose steps exchanged gradients: others would teach that exchanges take no time.
        types: machine type of each worker, in rank order.
        compression: compression in use.

    Raises:
        OSError: the disk refuses.
    """
    compute_s = max(row.compute_s for row in period.rows)
    step_time_s = max(period.step_time_s, compute_s)
    sync_s = min(row.exchange_s for row in period.rows)
    sample = {
        "nodes": [{"type": name, "workers": 1} for name in types],
        "local_batch_size": list(period.samples),
        "compression": {"name": compression.name, "ratio": compression.ratio},
        "step_time_s": round(step_time_s, 7),
        "sync_time_s": round(min(sync_s, step_time_s), 7),
    }
    with (folder / STEPS_FILE).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(sample, allow_nan=False) + "\n")
