"""transformers' Trainer on unequal workers: `Trainer` in place of transformers' own.

    from hetopt.integrations.transformers import Trainer

    Trainer(model, TrainingArguments(...), train_dataset=data).train()

``per_device_train_batch_size`` times ``gradient_accumulation_steps`` is the batch of all workers together.
`WithSession` does the same for other trainers: ``class Ours(WithSession, SFTTrainer)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.core.paths import inside
from hetopt.integrations.accelerate import Accelerator, Loader, skip_first_batches
from hetopt.integrations.exchanging import of_leader, total
from hetopt.integrations.place import check_version, find_worker
from hetopt.integrations.wording import TRANSFORMERS
from hetopt.trainer.loss_reading import SAME, read_loss
from hetopt.trainer.session import Session
from hetopt.trainer.session.denominators import Weight

check_version("transformers", (5, 24), 6)

import transformers  # noqa: E402  # behind the sentence about its version

# Trainer skips what a checkpoint has done by this function, whatever its loader is.
transformers.trainer.skip_first_batches = skip_first_batches


class WithSession:
    """What a session adds to a transformers Trainer; to be named before it among the bases of a class.

    Args:
        args: of the Trainer.
        session: arguments of `hetopt.session`, such as ``compression``.
        kwargs: of the Trainer.

    Raises:
        BadInput: the TrainingArguments were made before this module was imported, or train on several processes by
            other means.
    """

    # What the Trainer has.
    args: Any
    accelerator: Any
    state: Any
    control: Any
    current_flos: float
    label_smoother: Any
    compute_loss_func: Any
    _get_num_items_in_batch: Any
    _tr_loss: Tensor
    _globalstep_last_logged: int
    _session_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: Any, session: Mapping[str, Any] = MappingProxyType({}), **kwargs: Any) -> None:
        self._session_options = session
        super().__init__(*args, **kwargs)

    @property
    def run(self) -> Session | None:
        """The session, while it trains."""
        run: Session | None = self.accelerator.run
        return run

    def loss_weight(self, loss: Tensor, samples: int, num_items_in_batch: Any) -> Weight | None:
        """How much a loss counts, as of ``run.backward``; None: it tells by itself.

        A sum that is divided by ``num_items_in_batch``, which is of all workers, adds up with the others.

        Args:
            loss: of this worker's part of a batch.
            samples: of the part.
            num_items_in_batch: of all parts of all batches of the step; None: they were not counted.
        """
        if num_items_in_batch is None:
            return None
        reading = read_loss(loss, samples)
        divided = math.isclose(reading.denominator, float(num_items_in_batch), rel_tol=SAME)
        return "sum" if reading.kind == "sum" and divided else None

    def _smoothed_weight(self, inputs: Any, num_items_in_batch: Any) -> Weight | None:
        """How much a loss counts whose labels transformers smooths; None: they are not, or it tells by itself.

        It adds what the targets and what all classes cost, the one divided by as many as there are labels, the other by
        so many times the classes: the graph tells two denominators.
        """
        is_own = type(self).compute_loss is not transformers.Trainer.compute_loss  # type: ignore[attr-defined]
        if self.label_smoother is None or self.compute_loss_func is not None or is_own or "labels" not in inputs:
            return None
        if num_items_in_batch is not None:
            return "sum"
        labels = inputs["labels"]
        return float((labels != self.label_smoother.ignore_index).sum()) if labels.dim() == 1 else None

    # What follows takes the place of methods of the Trainer.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the Trainer
        accelerator = self.accelerator
        accelerator.__class__ = Accelerator
        accelerator.session_options = {"accumulate": self.args.gradient_accumulation_steps, **self._session_options}
        accelerator.words = TRANSFORMERS
        accelerator.check_alone()
        if self.args.auto_find_batch_size and find_worker()[1] > 1:
            raise BadInput(
                "auto_find_batch_size tries batch sizes on one worker, and the others would not follow.",
                hint="leave it out, and choose per_device_train_batch_size",
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As of the Trainer, in a session of its own."""
        try:
            result = super().train(*args, **kwargs)  # type: ignore[misc]  # of the Trainer
        except BaseException as error:
            self.accelerator.leave(error)
            raise
        self.accelerator.leave()
        return result

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]  # of the Trainer
        if type(loader) is not Loader:
            raise BadInput(
                f"get_train_dataloader gave a {type(loader).__name__} that Accelerate did not prepare.",
                hint="return self.accelerator.prepare(loader)",
            )
        loader.gives = False  # a window of batches is read before the first of them is computed
        return loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        run, loader = self.run, self.accelerator._trains
        if run is None or run.world_size == 1:
            if loader is not None and loader.source is not None:
                loader.give_next(inputs)
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]  # of the Trainer
            return loss
        loader.give_next(inputs)

        smoothed = self._smoothed_weight(inputs, num_items_in_batch)

        def backward(loss: Tensor, **kwargs: Any) -> None:
            weight = self.loss_weight(loss, loader.part.rows, num_items_in_batch) if smoothed is None else smoothed
            Accelerator.backward(self.accelerator, loss, weight=weight, **kwargs)

        self.accelerator.backward = backward
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]  # of the Trainer
        finally:
            del self.accelerator.backward
        return loss * run.weight  # so that the workers' losses add up to that of the batch

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step, and what the losses of all workers are divided by: tokens, as a rule, of all parts."""
        batches, own = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of the Trainer
        run = self.run
        if run is None or run.world_size == 1 or own is None:
            return batches, own
        # A worker without samples of a batch computes some that do not count.
        loader = self.accelerator._trains
        mine = [batch for batch, part in zip(batches, loader.source.handing.waiting, strict=False) if part.samples]
        (told,) = total(run, [float(self._get_num_items_in_batch(mine, device) or 0)])
        return batches, own.new_tensor(told) if isinstance(own, Tensor) else type(own)(told)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._add_up()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._add_up()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _add_up(self) -> None:
        """The loss since the last log, and the operations, are those of all workers."""
        run = self.run
        if run is not None and run.world_size > 1:
            loss, flos = total(run, [float(self._tr_loss), float(self.current_flos)])
            self._tr_loss.fill_(loss)
            self.current_flos = flos

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As of the Trainer; every worker reads all, and takes worker 0's figures, so that all decide alike."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]  # of the Trainer
        run = self.run
        if run is not None and run.world_size > 1:
            names = [name for name, value in output.metrics.items() if isinstance(value, (int, float))]
            told = of_leader(run, [float(output.metrics[name]) for name in names])
            output.metrics.update(dict(zip(names, told, strict=True)))
        return output

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The others look for what the leader has saved."""
        with self._leader_first():
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    @contextmanager
    def _leader_first(self) -> Iterator[None]:
        run = self.run
        if run is not None and not run.is_leader:
            self.accelerator.wait_for_everyone()
        yield
        if run is not None and run.is_leader:
            self.accelerator.wait_for_everyone()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(self._own_folder(output_dir))  # type: ignore[misc]  # of the Trainer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint and self._own_folder(checkpoint))  # type: ignore[misc]  # of the Trainer

    def _own_folder(self, folder: str) -> str:
        """Of a checkpoint: where a worker keeps what is its own."""
        rank, _ = find_worker()
        return str(inside(Path(folder), f"worker-{rank}")) if rank else folder


class Trainer(WithSession, transformers.Trainer):  # type: ignore[misc]  # as of transformers, in a session
    """transformers' `Trainer`, which trains on the workers of a session."""
