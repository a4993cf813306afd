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

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from torch import Tensor

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_folder import RUN_VARIABLE
from hetopt.trainer.agreement import gather_numbers, sum_numbers
from hetopt.trainer.checkpoints.fingerprint import parameters_sha256
from hetopt.trainer.checkpoints.folder import CheckpointFolder, Found, leave_model
from hetopt.trainer.checkpoints.saver import CheckpointSaver
from hetopt.trainer.checkpoints.state import SharedState, run_digest
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.hierarchical import HierarchicalExchange
from hetopt.trainer.engine import Engine
from hetopt.trainer.session.alike import check_parameters_alike
from hetopt.trainer.session.flow import Stopped
from hetopt.trainer.session.inspection import explain_script_error
from hetopt.trainer.session.loaders import OwnLoader, SlicedLoader
from hetopt.trainer.session.registry import REGISTRY
from hetopt.trainer.session.resuming import Extra, own_state, restore, script_state
from hetopt.trainer.session.summing import GradientFlow
from hetopt.trainer.session.trackers import Tracker, give
from hetopt.trainer.session.turns import Deed, Disagreement


class Session(GradientFlow):
    """One worker's side of a run; made by `session`.

    Attributes:
        rank: of this worker.
        world_size: workers.
        device: where the parameters are.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.rank == 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model is the average of all workers' inside, to evaluate or save it in the middle of an epoch.

        All workers must enter together. Between epochs it is so anyway, and without ``sync`` always.
        """
        synchroniser = None if self._engine is None else self._engine.synchroniser
        if synchroniser is None:
            yield
            return
        self._gate.take(Deed.AVERAGE, self._handed.newest)
        with synchroniser.averaged():
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """All workers do inside what they say to each other themselves, by ``torch.distributed``.

        Empty, it is a barrier. A worker that is elsewhere, or lost, is named.

        Raises:
            RunFailed: one is.
        """
        self._gate.take(Deed.TOGETHER, self._handed.newest)
        with self._gate.watched():
            yield

    def mean(self, value: Tensor | float, samples: int | None = None) -> float:
        """The mean of a figure over all workers, weighted by samples; for logging.

        Args:
            value: of this worker's samples.
            samples: how many those are; None: its part of the present batch.
        """
        return self._means([float(value)], samples)[0]

    def log(
        self,
        figures: Mapping[str, Tensor | float],
        *,
        to: Tracker | None = None,
        step: int | None = None,
        samples: int | None = None,
    ) -> dict[str, float]:
        """The means of figures over all workers (see `mean`), which the leader gives to an experiment tracker.

        Args:
            figures: of this worker's samples, by name; all workers have the same.
            to: a tracker: a run of W&B, the module ``mlflow``, TensorBoard's ``SummaryWriter``, a logger of Lightning,
                or a function of figures and step. The leader's is used, and the others may give None.
            step: that they are of; None: of the session.
            samples: how many those are; None: its part of the present batch.

        Returns:
            The means, the same on all workers.

        Raises:
            BadInput: the tracker takes no figures, or the workers' figures have other names.
        """
        names = ", ".join(figures)
        self._gate.take(Deed.MEAN, self._handed.newest)
        marks = gather_numbers([zlib.crc32(names.encode())], self.world_size)
        if any(mark != marks[0] for mark in marks):
            raise BadInput(
                f"The workers log other figures than each other; this one has {names or 'none'}.",
                hint="log the same names on all workers, in the same order",
            )
        told = dict(zip(figures, self._means([float(one) for one in figures.values()], samples), strict=True))
        if to is not None and self.is_leader:
            done = 0 if self._engine is None else self._engine.step
            give(to, told, done if step is None else step)
        return told

    def _means(self, values: Sequence[float], samples: int | None) -> list[float]:
        part = self._handed.present
        weight = float(samples if samples is not None else 0 if part is None else part.samples)
        self._gate.take(Deed.MEAN, self._handed.newest)
        # A worker without samples may have computed anything of none.
        *totals, weights = sum_numbers([*(one * weight if weight else 0.0 for one in values), weight], self.world_size)
        return [total / weights if weights else float("nan") for total in totals]

    def total(self, value: Tensor | float) -> float:
        """The sum of a count over all workers, to divide a sum by: of tokens, boxes or whatever a batch has many of.

            items = run.total(sum(int((labels != -100).sum()) for _, labels in window))
            for inputs, labels in window:
                run.backward(cross_entropy(model(inputs), labels, reduction="sum") / items)

        Args:
            value: of this worker's part; where it has none of the batch at hand, nothing is added.
        """
        part = self._handed.newest
        own = 0.0 if part is not None and part.samples == 0 else float(value)
        if self.world_size == 1:
            return own
        self._gate.take(Deed.TOTAL, part)
        (total,) = sum_numbers([own], self.world_size)
        self._loss.note_total(total)
        return total

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all workers in the order of the whole batch: features for a loss that depends on all of them.

            image, text = run.gather(image_encoder(images)), run.gather(text_encoder(texts))
            run.backward(contrastive_loss(image, text))

        Gradients go back to the worker whose row it is, and are those of the loss of the whole batch; it does not
        matter whether each worker computes that, or the part of it that is of its own samples. All workers call it.

        Args:
            rows: one for each sample of this worker's part, in their order; of any shape and type besides.

        Raises:
            BadInput: there are more or fewer, no batch came from `loader` yet, or workers train for themselves.
        """
        if self.world_size == 1:
            return rows
        if self._trains_alone:
            raise BadInput("run.gather joins the samples of workers that train for themselves.", hint="leave out sync")
        self._gate.take(Deed.GATHER, self._handed.newest)
        part = self._handed.present
        if part is None:
            raise BadInput("run.gather was called before any batch of this session's loader.", hint="see `run.loader`")
        self._whole.open()
        return self._whole.rows(rows, part)

    def checkpoint(self, extra: Extra = MappingProxyType({})) -> None:
        """Save all that training goes on from after an interruption, between two steps; all workers call it alike.

        Training waits for a copy alone. The newest checkpoint that is whole counts: in ``folder/checkpoint``.

        Args:
            extra: what the script has besides model and optimizer and would go on with: schedulers, a GradScaler, an
                average of parameters; by names, which `resume` is given again.

        Raises:
            BadInput: the session has no folder or no loader, or its workers train for themselves.
            RunFailed: a step is under way, or the checkpoint before could not be written.
        """
        engine, reads = self._recoverable("run.checkpoint")
        self._extra = extra
        if not self._is_between_steps:
            raise RunFailed(
                f"run.checkpoint was called in the middle of step {engine.step + 1}.",
                hint="call it after optimizer.step(), before the next batch is asked for",
            )
        self._gate.take(Deed.SAVE, self._handed.newest)
        saver, begun_s = self._save_by(engine), engine.context.clock()
        if saver.begun_step == engine.step:
            return
        with self._gate.watched():
            saver.finish()
        shared = SharedState(
            digest=run_digest(engine.context.spec),
            step=engine.step,
            training_s=0.0,
            shares=engine.balance.shares,
            model=self._model.state_dict(),
            optimizer=self._optimizer.state_dict(),
            cursor={"samples_seen": self._seen, "steps": self._gate.step},
            policy=engine.context.spec.batch_policy,
            controller=engine.balance.state(),
            steering=None if engine.exchange.steering is None else engine.exchange.steering.state(),
            loss_scale=None,
            learning_rate=None,
            memory_bounds=(),
            target_reached=False,
            script={**script_state(self._model, self._optimizer, extra), "table": self._table.state()},
        )
        own = own_state(self._model, self._memory(), self.device)
        own = replace(own, script={**(own.script or {}), "progress": reads.progress.state()})
        saver.begin(shared, own, digest=shared.digest, begun_s=begun_s)

    def resume(self, extra: Extra = MappingProxyType({})) -> int:
        """Go on from the newest checkpoint in the session's folder, if there is one; after `loader`, on all workers.

            for epoch in range(run.resume({"schedule": schedule}), epochs):
                for inputs, targets in loader:

        In the middle of an epoch the loader gives the batches that are left of it. With the same number of workers and
        local batch sizes, training goes on bit by bit as if nothing had happened, but for random numbers that reader
        processes of the loader draw. Other workers than before share what was held back.

        Args:
            extra: as of `checkpoint`, under the same names.

        Returns:
            The epoch to go on with, from 0.

        Raises:
            BadInput: the session has no folder or no loader, its workers train for themselves, or the checkpoint is
                damaged or of another script.
        """
        engine, reads = self._recoverable("run.resume")
        self._extra = extra
        self._gate.take(Deed.RESUME, self._handed.newest)
        spec, folder = engine.context.spec, CheckpointFolder(engine.context.run_dir)
        found = folder.newest(run_digest(spec)) if self.is_leader else Found(step=None)
        for torn in found.torn:
            self._events.write("checkpoint_skipped", step=torn.step, reason=torn.reason)
        step = int(gather_numbers([-1 if found.step is None else found.step], self.world_size)[0][0])
        if step < 0:
            return 0
        shared = folder.load_shared(step)
        then = len(shared.shares)
        own = folder.load_own(step, self.rank, workers_then=then, workers_now=self.world_size)
        restore(self._model, self._optimizer, extra, shared, own, self.device)
        self._remember(own.memory)
        engine.exchange.resume(shared.steering)
        engine.balance.resume(policy=shared.policy, shares=shared.shares, state=shared.controller)
        kept, mine = shared.script or {}, own.script or {}
        if engine.balance.shares == shared.shares:
            self._table.resume(kept["table"])
        engine.step, self._seen = step, shared.cursor["samples_seen"]
        self._gate.go_on(shared.cursor["steps"])
        reads.resume(mine["progress"])
        engine.begin(engine.period_steps(spec.control_period_steps))
        return reads.progress.epoch + (not reads.progress.is_within)

    @property
    def _is_between_steps(self) -> bool:
        """Whether all that the script was given is computed, and in the parameters."""
        is_waiting = any(side.sum is not None and side.sum.is_waiting for side in self._sides)
        return not (self._is_within or is_waiting) and self._handed.are_computed

    def _save_before_end(self) -> None:
        """See `BatchFlow`; a script that asks for batches ahead ends without."""
        if self._extra is not None and self._is_between_steps:
            self.checkpoint(self._extra)

    def _memory(self) -> State:
        """What was held back of the gradients; of several optimizers, each name ends with the number of one."""
        memory: State = {}
        for number, exchange in enumerate(self._exchanges):
            memory |= {self._kept_as(key, number): value for key, value in exchange.state().items()}
        return memory

    def _remember(self, memory: State) -> None:
        for number, exchange in enumerate(self._exchanges):
            tail = self._kept_as("", number)
            exchange.load_state({key.removesuffix(tail): one for key, one in memory.items() if key.endswith(tail)})

    def _kept_as(self, key: str, number: int) -> str:
        return key if len(self._sides) == 1 else f"{key}#{number}"

    @property
    def _exchanges(self) -> list[Exchange | HierarchicalExchange]:
        made = [side.sum.exchange.exchange for side in self._sides if side.sum is not None]
        return [one for one in made if one is not None]

    def _recoverable(self, what: str) -> tuple[Engine, SlicedLoader | OwnLoader]:
        """The engine and the loader, where there is all that checkpoints need."""
        if self._folder is None:
            raise BadInput(f"{what} needs a folder to save to.", hint="begin with session(..., folder='run')")
        if self._trains_alone:
            raise BadInput(
                f"{what} cannot save workers that train for themselves.", hint="leave out sync, or run it as a task"
            )
        if self._engine is None or self._reads is None or self._loaders != 1:
            raise BadInput(
                f"{what} needs one loader of the session, and there are {self._loaders}.",
                hint="call it after `loader = run.loader(loader)`",
            )
        return self._engine, self._reads

    def _save_by(self, engine: Engine) -> CheckpointSaver:
        if self._saver is None:
            self._saver = CheckpointSaver(
                engine.context.run_dir,
                rank=self.rank,
                world_size=self.world_size,
                events=self._events,
                clock=engine.context.clock,
                host=engine.context.worker.host,
            )
        return self._saver

    def close(self) -> None:
        """Leave the other workers; the end of the ``with`` block.

        Raises:
            RunFailed: the workers' models differ.
        """
        if not self._is_open:
            return
        self._shut()
        try:
            self._gate.take(Deed.CLOSE, self._handed.newest)
            self._end_epoch()
            if self._saver is not None:
                self._saver.finish()
            if self._between is not None:
                self._end_local_step()
                self._between.end()
            self._tell_rest()
            check_parameters_alike(list(self._model.named_parameters()), None, self._gate.step, self.world_size)
            step = 0 if self._engine is None else self._engine.step
            self._leave_model(stopped=False)
            self._events.write("session_finished", step=step, parameters_sha256=parameters_sha256(self._model))
            self._events.close()
        finally:
            self._part_from_others()

    def _leave_model(self, *, stopped: bool) -> None:
        """Where hetopt launched the script, its model is found as that of a task is."""
        launched = os.environ.get(RUN_VARIABLE)
        if launched and self.is_leader and self._folder == Path(launched):
            leave_model(self._folder, self._model, stopped=stopped, number=self._gate.number)

    def _part_from_others(self) -> None:
        self._whole.close()
        if self._saver is not None:
            self._saver.close()
        self._leave()

    def _shut(self) -> None:
        self._is_open = False
        REGISTRY.leave(self)
        self._loss.close()
        for side in self._sides:
            if side.sum is not None:
                side.sum.close()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()  # the others are told, where they do not end as well
            return
        self._shut()
        if isinstance(error, Stopped):  # all workers are here
            if self._saver is not None:
                self._saver.finish()
            self._leave_model(stopped=True)
            self._events.close()
            self._part_from_others()
            return
        explain_script_error(error)
        try:
            if not isinstance(error, (Disagreement, RunFailed)):
                self._gate.fail(self._handed.newest)
        finally:
            self._part_from_others()
