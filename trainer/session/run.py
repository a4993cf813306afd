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

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import Tensor

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import sum_numbers
from hetopt.trainer.checkpoints.fingerprint import parameters_sha256
from hetopt.trainer.session.alike import check_parameters_alike
from hetopt.trainer.session.flow import Stopped
from hetopt.trainer.session.inspection import explain_script_error
from hetopt.trainer.session.registry import REGISTRY
from hetopt.trainer.session.summing import GradientFlow
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

    def mean(self, value: Tensor | float, samples: int | None = None) -> float:
        """The mean of a figure over all workers, weighted by samples; for logging.

        Args:
            value: of this worker's samples.
            samples: how many those are; None: its part of the present batch.
        """
        part = self._handed.present
        weight = float(samples if samples is not None else 0 if part is None else part.samples)
        self._gate.take(Deed.MEAN, self._handed.newest)
        total, weights = sum_numbers([float(value) * weight, weight], self.world_size)
        return total / weights if weights else float("nan")

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
            if self._between is not None:
                self._end_local_step()
                self._between.end()
            self._tell_rest()
            check_parameters_alike(list(self._model.named_parameters()), None, self._gate.step, self.world_size)
            step = 0 if self._engine is None else self._engine.step
            self._events.write("session_finished", step=step, parameters_sha256=parameters_sha256(self._model))
            self._events.close()
        finally:
            self._leave()

    def _shut(self) -> None:
        self._is_open = False
        REGISTRY.leave(self)
        self._loss.close()
        if self._sum is not None:
            self._sum.close()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._shut()
        if isinstance(error, Stopped):  # all workers are here
            self._events.close()
            self._leave()
            return
        explain_script_error(error)
        try:
            if not isinstance(error, (Disagreement, RunFailed)):
                self._gate.fail(self._handed.newest)
        finally:
            self._leave()
