"""A script's own training loop on several unequal workers.

    with session(model, optimizer) as run:
        loader = run.loader(loader)
        for epoch in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                run.backward(criterion(model(inputs), targets))
                optimizer.step()

torchrun starts the script once a worker; started alone and without compression, it is a run of one worker that
computes, bit for bit, what the script did before. The batch size of the loader stays that of the whole cluster, so
that learning rates, schedules and the number of steps stay right whatever the cluster is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_folder import OUTPUT_FOLDER, OUTPUT_VARIABLE, RUN_VARIABLE
from hetopt.trainer.checkpoints.folder import (
    CheckpointFolder,
    CheckpointSaver,
    RankState,
    SharedState,
    parameters_sha256,
    run_digest,
    unsaved,
    write_model,
)
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.context import Generators, States
from hetopt.trainer.ddp.comm_hook import part_of
from hetopt.trainer.script.batches import REGISTRY, Stopped
from hetopt.trainer.session.flow import Flow, Side
from hetopt.trainer.session.guards import check_replicas, replica_marks
from hetopt.trainer.session.loaders import Splits
from hetopt.trainer.session.turns import MOST_NUMBERS, Disagreement
from hetopt.trainer.sharding import cut_states, gathered
from hetopt.trainer.sync.synchroniser import ModelVector

_PLAIN = (Tensor, bool, int, float, str, type(None))

Extra = Mapping[str, Any]
"""Things that a script has besides model and optimizer (a scheduler, a GradScaler), by name; each with a state
dictionary."""


class Session(Flow):
    """The handle of a script on its run, made by `session`: loaders, backward passes, means over workers, checkpoints.

    As a context it closes the session at its end. Where the block ends by an exception the others are told, and nothing
    is saved but the unfinished model of a run that was asked to stop.

    Attributes:
        rank: rank of this worker.
        world_size: number of workers.
        device: device where the parameters are.
        accumulate: backward passes of a step.
    """

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which prints and saves."""
        return self.rank == 0

    @property
    def outputs(self) -> Path:
        """The folder for the script's own files (pictures, tables, a tokenizer), which the leader writes.

        Made if missing.

        They come back from wherever the script is launched: it is that of the run, also named by ``HETOPT_OUTPUT``.
        Without a launch it is ``outputs`` in the session's folder, or in the present one.
        """
        folder = Path(os.environ.get(OUTPUT_VARIABLE) or (self._folder or Path()) / OUTPUT_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Make the model all workers' average inside, then put it back, in local SGD; else do nothing. All enter it.

        To evaluate or save it there. Between epochs it is the average anyway, and without ``sync`` always.

        Raises:
            RunFailed: the workers are at different points of the script, or one is gone.
        """
        if self._between is not None:
            self._gate.take("averaged models", self._newest)
        with nullcontext() if self._between is None else self._between.averaged():
            yield

    def mean(self, value: Tensor | float, samples: int | None = None) -> float:
        """Return the mean of a figure over all workers, weighted by samples, for logging; every worker must call it.

        Args:
            value: a number, or a tensor of one, that is a mean over this worker's samples.
            samples: number of samples that ``value`` is of; None: its part of the present batch.

        Returns:
            The mean, the same on all workers; NaN where no worker has samples.

        Raises:
            RunFailed: the workers are at different points of the script, or one is gone.
        """
        return self._means([_figure(value)], samples)[0]

    def log(
        self,
        figures: Mapping[str, Tensor | float],
        *,
        to: Callable[[dict[str, float], int], object] | None = None,
        step: int | None = None,
        samples: int | None = None,
    ) -> dict[str, float]:
        """Return figures' means over all workers, by name; rank 0 calls ``to`` with them and a step. All must call it.

            run.log({"loss": loss}, to=wandb.log)

        Args:
            figures: figures of this worker's samples, by name; all workers have the same.
            to: is called with the means and a step, on the leader alone: ``wandb.log``, ``mlflow.log_metrics``,
                ``logger.log_metrics`` of Lightning. None: nothing is; on other workers it does not count.
            step: number that ``to`` is given; None: the steps done in the session.
            samples: number of samples that the figures are of; None: its part of the present batch.

        Returns:
            The means, the same on all workers; NaN where no worker has samples.

        Raises:
            RunFailed: the workers' figures have other names, or they are at different points of the script.
        """
        mark = zlib.crc32(", ".join(figures).encode())
        means = self._means([_figure(figure) for figure in figures.values()], samples, mark)
        averages = dict(zip(figures, means, strict=True))
        if to is not None and self.is_leader:
            done = 0 if self._periods.engine is None else self._periods.engine.step
            to(averages, done if step is None else step)
        return averages

    def _means(self, values: Sequence[float], samples: int | None, mark: int = 0) -> list[float]:
        """Return values' means over all workers, weighted by samples; NaN where nobody has samples; all must call it.

        Args:
            values: figures of this worker.
            samples: number of samples that they are of; None: this worker's in the newest batch, 0 before any.
            mark: checksum that must be equal on all workers.
        """
        part, means = self._newest, list[float]()
        weight = float(samples if samples is not None else 0 if part is None else part.samples)
        if part is not None and part.is_audit and self.rank:  # the leader's figure is of the whole batch
            weight = 0.0
        # A worker without samples may have computed anything of none.
        weighted = [value * weight if weight else 0.0 for value in values]
        for first in range(0, len(weighted), MOST_NUMBERS - 1):
            some = weighted[first : first + MOST_NUMBERS - 1]
            weights, *totals = self._gate.take("called run.mean", part, [weight, *some], mark=mark)
            means += [total / weights if weights else float("nan") for total in totals[: len(some)]]
        return means

    def total(self, value: Tensor | float) -> float:
        """Return the sum over workers of a count (tokens, boxes), to divide summed losses by; all must call it.

            items = run.total(sum(int((labels != -100).sum()) for _, labels in window))
            for inputs, labels in window:
                run.backward(cross_entropy(model(inputs), labels, reduction="sum") / items, weight="sum")

        Args:
            value: value of this worker's part; where it has none of the batch at hand, nothing is added.

        Raises:
            RunFailed: the workers are at different points of the script, or one is gone.
        """
        part = self._newest
        counts = part is None or (part.samples > 0 and (not part.is_audit or self.is_leader))
        return self._gate.take("called run.total", part, [_figure(value) if counts else 0.0])[0]

    def gather(self, rows: Tensor) -> Tensor:
        """Return all workers' rows, [batch, ...] in its order, for a loss across samples; every worker must call it.

            image, text = run.gather(image_encoder(images)), run.gather(text_encoder(texts))
            run.backward(contrastive_loss(image, text))

        Gradients go back to the worker whose row it is, and are those of the loss of the whole batch; it does not
        matter whether each worker computes that, or the part of it that is of its own samples. A single worker gets
        ``rows`` back. The first call opens a process group.

        Args:
            rows: one for each sample of this worker's part, in their order; of any shape and type besides.

        Raises:
            BadInput: there are more or fewer rows than samples, no batch came from `loader` yet, or workers train for
                themselves. In the script's own ``loss.backward()``: `backward` has to be called instead.
            RunFailed: the workers are at different points of the script, or one is gone.
        """
        if self.world_size == 1:
            return rows
        if self._trains_alone:
            raise BadInput("run.gather joins the samples of workers that train for themselves.", hint="leave out sync")
        self._gate.take("called run.gather", self._newest)
        part = self._newest
        if part is None:
            raise BadInput("run.gather was called before any batch of this session's loader.", hint="see `run.loader`")
        self._whole.open()
        return self._whole.rows(rows, part)

    def checkpoint(self, extra: Extra = MappingProxyType({})) -> None:
        """Save a checkpoint in the session's folder while training goes on; all call it alike, between two steps.

        Training waits for a copy alone, and for an earlier checkpoint that is still being written; a second call after
        the same step does nothing. The newest checkpoint that is
        whole counts: in ``folder/checkpoint``. From the first call on, a run that is asked to stop saves one more
        before it ends.

        Args:
            extra: what the script has besides model and optimizer and would go on with: schedulers, a GradScaler, an
                average of parameters; by names, which `resume` is given again.

        Raises:
            BadInput: the session has no folder or gave no batch yet, its workers train for themselves, or something in
                ``extra`` has no state dictionary or one with more than tensors and plain values.
            RunFailed: a step is under way, or the workers are at different points of the script.
        """
        self._check_recoverable("run.checkpoint")
        engine = self._periods.engine
        check_extra(extra)
        if engine is None:
            raise BadInput(
                "run.checkpoint was called before there was a batch of the session.",
                hint="call it after `loader = run.loader(loader)`, in the loop over it",
            )
        self._extra = extra
        if not self._is_between_steps:
            raise RunFailed(
                f"run.checkpoint was called in the middle of step {engine.step + 1}.",
                hint="call it after optimizer.step(), before the next batch is asked for",
            )
        self._gate.take("called run.checkpoint", self._newest)
        if self._periods.saver is None:
            self._periods.saver = CheckpointSaver(engine.context)
        saver, begun_s = self._periods.saver, engine.context.clock()
        if saver.begun_step == engine.step:
            return
        with self._gate:
            saver.finish()
        updates = {str(number): side.optimizer.state_dict() for number, side in enumerate(self._sides)}
        model, updates = gathered((self._model.state_dict(), updates), keep=self.is_leader)
        shared = SharedState(
            digest=run_digest(engine.context.spec),
            step=engine.step,
            training_s=0.0,
            shares=engine.balance.shares,
            model=model,
            optimizer=updates,
            cursor={"samples_seen": self._periods.samples_seen, "steps": self._gate.step},
            policy=engine.context.spec.batch_policy,
            controller=engine.balance.state(),
            steering=None if engine.exchange.steering is None else engine.exchange.steering.state(),
            loss_scale=None,
            memory_bounds=(),
            target_reached=False,
            script=script_state(self._others, extra),
        )
        memory = {
            f"{key}#{name}": value
            for name, exchange in self._exchanges.items()
            for key, value in exchange.state().items()
        }
        script = {
            "random": States.now().vector(),
            "buffers": {name: buffer.detach() for name, buffer in self._model.named_buffers()},
            "sources": [source.state() for source in self._sources],
        }
        rank_state = RankState(memory=memory, script=script, **vars(Generators.at(self.device)))
        saver.begin(shared, rank_state, begun_s=begun_s)

    def resume(self, extra: Extra = MappingProxyType({})) -> int:
        """Restore the newest checkpoint; return the epoch (without loaders: step) to go on with, 0: none; all call it.

        Just before the loop:

            for epoch in range(run.resume({"schedule": schedule}), epochs):
                for inputs, targets in loader:

            for step in range(run.resume(), steps):
                rows = run.split(torch.randint(len(data), (batch_size,)))

        In the middle of an epoch a loader gives the batches that are left of it; of several, each knows the epoch that
        it goes on with: ``range(loader.first_epoch, epochs)``. With the same number of workers and
        local batch sizes, training goes on bit by bit as if nothing had happened, but for random numbers that reader
        processes of the loader draw. Other workers than before share what was held back.

        Args:
            extra: as of `checkpoint`, under the same names.

        Returns:
            The epoch of the first loader to go on with, from 0; of a script without loaders the step. 0: no checkpoint.

        Raises:
            BadInput: the session has no folder, its workers train for themselves, something in ``extra`` has no state
                dictionary, no checkpoint is whole, or the checkpoint is of another script, run or set of ``extra``
                names.
            RunFailed: the workers are at different points of the script, or one is gone.
        """
        folder = CheckpointFolder(self._check_recoverable("run.resume"))
        check_extra(extra)
        self._extra = extra
        self._gate.take("called run.resume", self._newest)
        newest = folder.load_newest(
            run_digest(self._spec), self.rank, self.world_size, self._periods.events, in_parts=self._devices > 1
        )
        if newest is None:
            return 0
        shared, rank_state = newest
        restore(self._model, self._sides, self._others, extra, shared, rank_state, self.device)
        if self._sharded is not None:
            self._sharded.memory = rank_state.memory
        for name, exchange in self._exchanges.items():
            exchange.load_state(part_of(rank_state.memory, name))
        self._periods.samples_seen, self._gate.step = shared.cursor["samples_seen"], shared.cursor["steps"]
        self._restored, self._restored_sources = shared, (rank_state.script or {})["sources"]
        self._resume_sources(0)
        first = self._restored_sources[0]
        return int(first["epoch"] + (not first["is_within"]) if "epoch" in first else shared.step)

    @property
    def _is_between_steps(self) -> bool:
        """Return whether all given batches are computed, and applied to the parameters."""
        is_pending = any(side.sum is not None and side.sum.is_pending for side in self._sides)
        return not (self._is_within or is_pending or self._waiting)

    def _save_before_end(self) -> None:
        """Save a checkpoint before the run stops; not if the script has asked for batches ahead."""
        if self._extra is not None and self._is_between_steps:
            if self._random is not None and isinstance(self._sources[-1], Splits):
                self._random.use()  # the script has drawn a batch that it will not compute
            self.checkpoint(self._extra)

    @property
    def _exchanges(self) -> dict[str, Exchange]:
        """Return the exchanges of the optimizers by their number, or of a sharded model by its parts."""
        exchanges = (side.sum.exchange.exchange for side in self._sides if side.sum is not None)
        named = {str(number): exchange for number, exchange in enumerate(filter(None, exchanges))}
        return named if self._sharded is None else self._sharded.exchanges

    def _check_recoverable(self, what: str) -> Path:
        """Return the folder to save checkpoints to.

        Raises:
            BadInput: there is none, or workers train for themselves.
        """
        if self._folder is None:
            raise BadInput(f"{what} needs a folder to save to.", hint="begin with session(..., folder='run')")
        if self._trains_alone:
            raise BadInput(
                f"{what} cannot save workers that train for themselves.", hint="leave out sync, or run it as a task"
            )
        return self._folder

    def close(self) -> None:
        """End the session: compare and save the model, and leave the worker group; all call it; again: do nothing.

        The end of the ``with`` block does so. The model is written only where hetopt launched the script. Hooks are
        removed, and in local SGD the model becomes all workers' average.

        Raises:
            RunFailed: the workers' models differ, they are at different points of the script, or the disk refuses the
                model.
        """
        if self not in REGISTRY.open:
            return
        self._shut()
        try:
            named = list(self._model.named_parameters())
            self._gate.take("ended its session", self._newest, mark=len(named))
            self._end_epoch()
            if self._periods.saver is not None:
                self._periods.saver.finish()
            if self._between is not None:
                self._end_local_step()
                vector = ModelVector(self._model)
                with self._between.averaged():
                    average = vector.read()
                self._paused.close()
                vector.write(average)
            engine = self._periods.engine
            if engine is not None:
                self._periods.finish(self._shared.passes)
            check_replicas(replica_marks(named), self._gate.step, self.world_size, self._devices)
            state = self._write_model(stopped=False)
            step, epoch = (0, 0.0) if engine is None else (engine.step, self._shared.passes)
            self._periods.events.write(
                "session_finished",
                step=step,
                epoch=epoch,
                parameters_sha256=parameters_sha256(named if self._sharded is None else state.items()),
            )
            self._periods.events.close()
        finally:
            self._part_from_others()

    def _write_model(self, *, stopped: bool) -> dict[str, Any]:
        """Write the trained model into the run's folder, as a task's run does, where hetopt launched the script.

        Returns:
            Its state, of a sharded model whole on the leader alone.

        Raises:
            RunFailed: the disk refuses it.
        """
        state: dict[str, Any] = gathered(self._model.state_dict(), keep=self.is_leader)
        if (
            self.is_leader
            and self._folder is not None
            and self._folder == Path(os.environ.get(RUN_VARIABLE, os.devnull))
        ):
            write_model(self._folder, state, stopped=stopped, number=self._gate.number)
        return state

    def _part_from_others(self) -> None:
        """Release what the session opened: groups, the writer of checkpoints and the process group."""
        self._whole.close()
        if self._periods.saver is not None:
            self._periods.saver.close()
        self._leave()

    def _shut(self) -> None:
        """Close the session in this process: remove its hooks, so that steps are the script's own again.

        Nothing is said to other workers.
        """
        REGISTRY.open = ()
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
        """Close the session, or, after an error, end it in this process and tell the other workers.

        After `Stopped` the model is written.

        Raises:
            RunFailed: after `Stopped`, the last checkpoint could not be written.
        """
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()  # the others are told, where they do not end as well
            return
        self._shut()
        problem = None
        try:
            if isinstance(error, Stopped):  # all workers are here
                problem = None if self._periods.saver is None else self._periods.saver.finish()
                self._write_model(stopped=True)
                self._periods.events.close()
            elif not isinstance(error, (Disagreement, RunFailed)):
                self._gate.fail(self._newest)
        finally:
            self._part_from_others()
        if problem is not None:
            raise unsaved(problem) from None


def _figure(value: Tensor | float) -> float:
    """Return a number of a tensor or a float; a loss may have its graph."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def check_extra(extra: Extra) -> None:
    """Raise BadInput if something in a script's ``extra`` has no ``state_dict`` and ``load_state_dict``.

    Raises:
        BadInput: it has not; the message names it.
    """
    for name, holder in extra.items():
        if not (hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")):
            raise BadInput(
                f"`extra` has {name} of type {type(holder).__name__}, which cannot be restored in place: it has no "
                "state_dict and load_state_dict.",
                hint="keep it in a small object that has both, as docs/your-own-code.md shows for a best value",
            )


def script_state(others: Sequence[nn.Parameter], extra: Extra) -> dict[str, Any]:
    """Return the states of ``extra``, and of parameters outside the model, for a checkpoint's common part.

    Args:
        others: parameters that the optimizers have and the model has not.
        extra: what the script has besides, by name.

    Raises:
        BadInput: a state holds something else than tensors and plain values.
    """
    states = {name: holder.state_dict() for name, holder in extra.items()}
    for name, state in states.items():
        strange = next((leaf for leaf in tree_leaves(state) if not isinstance(leaf, _PLAIN)), None)
        if strange is not None:
            raise BadInput(
                f"The state of {name} holds something of type {type(strange).__name__}; checkpoints hold tensors and "
                "plain values.",
                hint="leave it out of `extra`, or give its state_dict numbers, texts, lists and tensors",
            )
    return {"extra": states, "others": [parameter.detach() for parameter in others]}


def restore(
    model: nn.Module,
    sides: Sequence[Side],
    others: Sequence[nn.Parameter],
    extra: Extra,
    shared: SharedState,
    rank_state: RankState,
    device: torch.device,
) -> None:
    """Load a checkpoint into a script's model, optimizers, other parameters, ``extra`` and random generators, in place.

    Args:
        model: model of the script.
        sides: its optimizers.
        others: parameters that its optimizers have and the model has not.
        extra: what the script has besides, by name.
        shared: the checkpoint's state of all workers.
        rank_state: its state of this worker.
        device: device of this worker.

    Raises:
        BadInput: the checkpoint has other names as ``extra``, or does not fit the script's model, optimizers or
            ``extra``; some of them may have been loaded by then.
    """
    kept, script = shared.script or {}, rank_state.script or {}
    if set(kept["extra"]) != set(extra):
        saved, given = (", ".join(sorted(names)) or "nothing" for names in (kept["extra"], extra))
        raise BadInput(
            f"The checkpoint of step {shared.step} has {saved} as `extra`, and run.resume was given {given}.",
            hint="give run.checkpoint and run.resume the same names",
        )
    try:
        for number, side in enumerate(sides):
            weights, updates = cut_states(model, side.optimizer, shared.model, shared.optimizer[str(number)])
            side.optimizer.load_state_dict(updates)
            model.load_state_dict(weights)
        for name, holder in extra.items():
            holder.load_state_dict(kept["extra"][name])
        with torch.no_grad():
            for parameter, value in zip(others, kept["others"], strict=True):
                parameter.copy_(value)
            for name, buffer in model.named_buffers():
                buffer.copy_(script["buffers"][name])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"The checkpoint of step {shared.step} does not fit the script's model, optimizer or `extra`.",
            hint="resume the script that it was saved by, or begin anew in another folder",
        ) from None
    rank_state.restore_generators(device)
    States.of(script["random"]).use()
