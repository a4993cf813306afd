"""Accelerate on unequal workers: `Accelerator` in place of Accelerate's own.

    from hetopt.integrations.accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

The session begins when a model and its optimizer are prepared, and shares out the first loader that was. All others are
read whole by every worker, so that evaluation gives every worker the figures of one machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hetopt.core.errors import BadInput
from hetopt.integrations.exchanging import gather, total
from hetopt.integrations.place import alone, check_version, find_worker, stay_together, take_own_device
from hetopt.integrations.wording import ACCELERATE, Words, in_words
from hetopt.trainer.session import Session, session
from hetopt.trainer.session.denominators import Weight
from hetopt.trainer.session.leaving import leave_at_exit

check_version("accelerate", (1, 15), 2)

import accelerate  # noqa: E402  # behind the sentence about its version
from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402


def _alone(begin: Callable[..., None]) -> Callable[..., None]:
    """Accelerate's state of a process that is one of several, as it is told: alone, with the rank that it has."""

    @wraps(begin)
    def begin_alone(self: Any, *args: Any, **options: Any) -> None:
        rank, workers = find_worker()
        if workers == 1 or PartialState._shared_state:
            begin(self, *args, **options)
            return
        take_own_device(os.environ)
        with alone():
            begin(self, *args, **options)
        # The leader alone logs and saves.
        self.process_index = self.local_process_index = rank

    return begin_alone


PartialState.__init__ = _alone(PartialState.__init__)


class Loader:
    """A loader as Accelerate prepared it; where it is shared out, a batch counts as given when it is yielded.

    Args:
        prepared: by Accelerate.

    Attributes:
        source: what the session reads, where this loader trains.
        gives: whether a batch counts as given when it is yielded; else `give_next` says so.
        part: of the batch that was given last.
    """

    _is_accelerate_prepared = True

    def __init__(self, prepared: Any) -> None:
        self.prepared = prepared
        self.source: Any = None
        self.gives = True
        self.part: Any = None

    def share(self, run: Session) -> None:
        """Read this worker's part of every batch from here on."""
        self.source = run.loader(self.prepared.base_dataloader)
        self.source.handing.read_ahead()
        self.prepared.base_dataloader = self.source

    def give_next(self, batch: Any) -> None:
        """The batch that was yielded first and was not given yet is computed now."""
        self.part = self.source.handing.give_next(batch)

    def skip(self, batches: int) -> None:
        """Begin the epoch that comes behind so many batches."""
        self.source.progress.skip(batches)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # as Accelerate's loaders say it, for what asks whether they are loaders
        return DataLoader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.prepared:
            if self.source is not None and self.gives:
                self.give_next(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.prepared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prepared, name)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's `Accelerator`, which trains on the workers of a session.

    Args:
        args: of Accelerate's.
        session: arguments of `hetopt.session`, such as ``compression``.
        kwargs: of Accelerate's.

    Attributes:
        run: the session, once a model and an optimizer are prepared.
        words: in which it refuses.

    Raises:
        BadInput: Accelerate has begun as one of several processes already, or is to split the model.
    """

    run: Session | None = None
    session_options: Mapping[str, Any] = MappingProxyType({})
    words: Words = ACCELERATE
    _trains: Loader | None = None

    def __init__(self, *args: Any, session: Mapping[str, Any] = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.session_options = session
        self.check_alone()

    def check_alone(self) -> None:
        """Refuse what trains on several processes by other means than the session.

        Raises:
            BadInput: something does.
        """
        if find_worker()[1] == 1:
            return
        if self.num_processes > 1:
            raise BadInput(
                "Accelerate had joined the other processes before hetopt.integrations was imported.",
                hint="import it at the top of the script, before an Accelerator or TrainingArguments is made",
            )
        kind = str(self.distributed_type).rpartition(".")[2]
        if kind != "NO":
            raise BadInput(
                f"Accelerate is to train by {kind}, and every worker of a session trains the whole model.",
                hint="leave its plugin and its configuration out",
            )
        self.dataloader_config.dispatch_batches = False  # every worker reads for itself

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As of Accelerate; the first one is what the session shares out."""
        if isinstance(data_loader, Loader):
            return data_loader
        loader = Loader(super().prepare_data_loader(data_loader, *args, **kwargs))
        if self._trains is None:
            self._trains = loader
            if self.run is not None:
                loader.share(self.run)
        return loader

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As of Accelerate; with a model and an optimizer the session begins, and after its end with others."""
        known = len(self._models) + len(self._optimizers)
        prepared = super().prepare(*args, **kwargs)
        is_new = len(self._models) + len(self._optimizers) > known
        if self.run is None and is_new and self._models and self._optimizers:
            self._begin()
        return prepared

    def _begin(self) -> None:
        stay_together(self.device)
        models = tuple(self.unwrap_model(one) for one in self._models)
        optimizers = tuple(one.optimizer for one in self._optimizers)
        options = {"accumulate": self.gradient_accumulation_steps, "scaler": self.scaler, **self.session_options}
        self.run = session(models[0] if len(models) == 1 else models, optimizers, **options)
        if self._trains is not None:
            self._trains.share(self.run)
        leave_at_exit()

    def backward(self, loss: Tensor, *, weight: Weight | Tensor | None = None, **kwargs: Any) -> None:
        """As of Accelerate, and then the gradients of all workers.

        Args:
            loss: of this worker's part of the batch.
            weight: as of ``run.backward``, where the loss does not tell.
            kwargs: of ``Tensor.backward``.

        Raises:
            BadInput: as of ``run.backward``.
        """
        if self.run is None:
            super().backward(loss, **kwargs)
            return
        read, trains = self.gradient_state.active_dataloader, self._trains
        if self.run.world_size > 1 and read and trains and read is not trains.prepared and trains.part is None:
            raise BadInput(
                "The loop trains on another loader than the one that is shared out, the first that was prepared.",
                hint="prepare the loader that trains before those that evaluate",
            )
        loss = loss / self.gradient_accumulation_steps
        with in_words(self.words):
            self.run.backward(loss if self.scaler is None else self.scaler.scale(loss), weight=weight, **kwargs)

    @property
    def _is_sharing(self) -> bool:
        """Whether what is computed now is a part of a batch."""
        if self.run is None or self.run.world_size == 1 or self._trains is None:
            return False
        return self.gradient_state.active_dataloader is self._trains.prepared

    def gather(self, tensor: Any) -> Any:
        """The rows of all workers, in the order of the batch; outside of training every worker has all of them."""
        if not self._is_sharing:
            return super().gather(tensor)
        return recursively_apply(self._rows, tensor, error_on_other_type=True)

    def _rows(self, tensor: Tensor) -> Tensor:
        assert self.run is not None
        assert self._trains is not None
        rows = tensor.reshape(-1) if tensor.dim() == 0 else tensor
        # A worker without samples of the batch computes some that do not count.
        return torch.cat(gather(self.run, rows if self._trains.part.samples else rows[:0]))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum of all workers' values, or their mean by samples; outside of training every worker has it."""
        if not self._is_sharing or reduction == "none":
            return super().reduce(tensor, reduction, scale)
        if reduction not in ("sum", "mean"):
            raise BadInput(f'`reduction` must be "sum", "mean" or "none", got {reduction!r}.', hint='use "sum"')
        return recursively_apply(lambda one: self._reduced(one, reduction), tensor, error_on_other_type=True)

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        assert self.run is not None
        assert self._trains is not None
        part = self._trains.part
        share = part.weight if reduction == "mean" else float(part.samples > 0)
        told = total(self.run, [float(one) * share for one in tensor.reshape(-1).tolist()])
        return torch.tensor(told, dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)

    def wait_for_everyone(self) -> None:
        """Go on when all workers are here."""
        if self.run is not None:
            with self.run.together():
                return
        super().wait_for_everyone()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As of Accelerate; the loader that trains is given back itself, and skips once."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """As of Accelerate; the session ends."""
        self.leave()
        self._trains = None
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As of Accelerate; the session ends."""
        self.leave()
        super().end_training()

    def leave(self, error: BaseException | None = None) -> None:
        """End the session; with an error, the other workers are told."""
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(type(error) if error is not None else None, error, None)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Accelerate's function of this name, which would read a loader that is shared out past its session."""
    if type(dataloader) is Loader and dataloader.source is not None:
        dataloader.skip(num_batches)
        return dataloader
    inner = dataloader.prepared if type(dataloader) is Loader else dataloader
    return accelerate.skip_first_batches(inner, num_batches)
