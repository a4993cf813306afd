"""Lightning on unequal workers: a strategy for its Trainer.

    from hetopt.integrations.lightning import HetoptStrategy

    Trainer(strategy=HetoptStrategy(), max_epochs=3, accumulate_grad_batches=2).fit(module, loader)

Lightning is told that it is alone. The session begins with the training data; its batches are those of all workers
together. Evaluation data is read whole by every worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.integrations.exchanging import gather, told_by_leader, total
from hetopt.integrations.place import check_version, find_worker, stay_together, take_own_device
from hetopt.integrations.wording import LIGHTNING, in_words
from hetopt.trainer.session import Session, session

check_version("lightning", (2, 6), 3)

# Behind the sentence about its version.
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402


class _Early:
    """A loader that is asked for before there are optimizers, for the number of its batches; none is read.

    Args:
        loader: what it stands for.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _of_each(batch: Any, loaders: int) -> Sequence[Any]:
    """What each loader gave of a batch; None: it cannot be told apart."""
    if loaders == 1:
        return [batch]
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    return parts if len(parts) == loaders else [None] * loaders


class HetoptStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning has no types
    """Trains on the workers of a session, each of which has one device.

    Args:
        options: of `hetopt.session`, such as ``compression``.

    Attributes:
        run: the session, while it trains.
    """

    strategy_name = "hetopt"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        take_own_device(os.environ)
        self.run: Session | None = None
        self._trainer: Any = None
        self._options = options
        self._loaders: list[Any] = []
        self._is_stepping = False
        self._layer_sync: Any = None  # Lightning's, of Trainer(sync_batchnorm=True)
        # The leader alone logs and saves; the sampler, and how many steps there are, are those of one process.
        self.global_rank = self.local_rank = find_worker()[0]
        # As Lightning's own strategies do: loggers ask there whether they may write, and not the environment again.
        rank_zero_only.rank = self.global_rank

    @property
    def root_device(self) -> torch.device:
        """The one that the Trainer's accelerator drives."""
        kind = {"CUDAAccelerator": "cuda:0", "MPSAccelerator": "mps:0"}.get(type(self.accelerator).__name__, "cpu")
        return torch.device(kind)

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is the leader, which logs and saves."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether ``self.log(..., sync_dist=True)`` puts values together: of parts of a batch, in ``training_step``.

        Lightning asks this also before it makes a loader's sampler one of several processes.
        """
        return self._is_stepping and find_worker()[1] > 1

    @property
    def _is_training(self) -> bool:
        return self._trainer is not None and bool(self._trainer.training)

    def setup_environment(self) -> None:
        """Meet the other workers."""
        super().setup_environment()
        stay_together(self.root_device)

    def setup(self, trainer: Any) -> None:
        """As of Lightning, and then the loaders that were asked for before there were optimizers, as schedules do."""
        self._trainer = None
        super().setup(trainer)
        self._trainer = trainer
        loop = trainer.fit_loop
        if self._is_training and loop._combined_loader is not None:
            early = loop._combined_loader.flattened
            loop._combined_loader.flattened = [self.process_dataloader(one.loader) for one in early]
            iter(loop._data_fetcher)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share out a loader that trains."""
        if self._trainer is None:
            return _Early(dataloader)
        if not self._is_training:
            return dataloader
        if self.run is None:
            self.run = self._begin()
        loader = self.run.loader(dataloader)
        loader.handing.read_ahead()
        self._loaders.append(loader)
        return loader

    def _begin(self) -> Session:
        usual = {
            "accumulate": self._trainer.accumulate_grad_batches,
            "scaler": getattr(self.precision_plugin, "scaler", None),
            "batch_norm": "own" if self._layer_sync is None else "synchronized",
        }
        for one in self.lightning_module.modules():
            if hasattr(one, "distributed_available_fn"):
                # Of torchmetrics: what every worker has evaluated whole is not to be added up.
                one.distributed_available_fn = partial(self._adds_up, one.distributed_available_fn)
        return session(self.lightning_module, tuple(self.optimizers), **{**usual, **self._options})

    def _adds_up(self, is_available: Callable[[], bool]) -> bool:
        return self._is_training and is_available()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The batch that was read first is computed now."""
        reading = [one for one in self._loaders if one.handing.waiting] or self._loaders
        for loader, part in zip(reading, _of_each(batch, len(reading)), strict=True):
            loader.handing.give_next(part)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As of Lightning; what is logged inside is of a part of a batch."""
        self._is_stepping = True
        try:
            told = super().training_step(*args, **kwargs)
        finally:
            self._is_stepping = False
        if told is None and self.lightning_module.automatic_optimization and find_worker()[1] > 1:
            raise BadInput(
                "training_step gave None, which skips the batch, of which other workers have their parts.",
                hint="leave the samples out of the dataset, or give a loss of 0 for them",
            )
        return told

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As of Lightning, and then the gradients of all workers; modules with a ``backward`` of their own included."""
        if self.run is None:
            loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        run = self.run
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)

        def backward(
            gradient: None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
        ) -> None:
            del loss.backward  # the session calls torch's own
            with in_words(LIGHTNING):
                run.backward(loss, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            loss.backward = backward  # type: ignore[method-assign]

        loss.backward = backward  # type: ignore[method-assign]  # whoever calls it: Lightning or the module
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        del loss.backward
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum of all workers' values, or their mean: within a training step by samples, else by workers, as
        Lightning averages sums. Outside of training every worker has the value of all."""
        if self.run is None or self.run.world_size == 1 or not self._is_training:
            return tensor
        value = tensor if isinstance(tensor, Tensor) else torch.tensor(tensor)
        kind = str(reduce_op).rpartition(".")[2].lower()
        if kind in ("mean", "avg"):
            if self._is_stepping:
                told = [self.run.mean(one) for one in value.reshape(-1).tolist()]
            else:
                sums = total(self.run, value.reshape(-1).tolist())
                return torch.tensor(sums, device=value.device).reshape(value.shape) / self.run.world_size
        elif kind == "sum":
            told = total(self.run, value.reshape(-1).tolist())
        elif kind in ("max", "min"):
            rows = torch.stack(gather(self.run, value))
            return rows.amax(0) if kind == "max" else rows.amin(0)
        else:
            raise BadInput(f"Values are reduced by mean, sum, max or min, not by {kind}.", hint='use "mean"')
        return torch.tensor(told, dtype=value.dtype, device=value.device).reshape(value.shape)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all workers decide alike."""
        if self.run is None:
            return decision
        (votes,) = total(self.run, [float(decision)])
        return votes == self.run.world_size if all else votes > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers, which must be of one shape, stacked."""
        if self.run is None or self.run.world_size == 1 or not self._is_training:
            return tensor
        parts = gather(self.run, tensor)
        if sync_grads or any(one.shape != tensor.shape for one in parts):
            raise BadInput(
                "Workers have parts of different sizes of a batch, which cannot be stacked, nor trained through.",
                hint="log with sync_dist=True, which weighs by samples",
            )
        return torch.stack(parts)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Go on when all workers are here."""
        told_by_leader(self.run, None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Worker 0's path, number or text."""
        if isinstance(obj, Path):
            return Path(told_by_leader(self.run, str(obj)))
        return told_by_leader(self.run, obj)

    def on_exception(self, exception: BaseException) -> None:
        """The other workers are told."""
        self._leave(exception)

    def teardown(self) -> None:
        """The session ends."""
        self._leave(None)
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        run, self.run = self.run, None
        self._loaders.clear()
        if run is not None:
            run.__exit__(type(error) if error is not None else None, error, None)
