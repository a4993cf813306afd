"""What a run whose workers train for themselves needs of whoever brings their models together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from pydantic import ValidationError

from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.trainer.steps.step import StepTrace


class Synchronizer(Protocol):
    """Asked after every step, on every rank, in the same order as everything else that workers do together."""

    def after(self, step: int, trace: StepTrace, samples: Sequence[int]) -> StepTrace:
        """This worker's optimizer has done step number ``step``: bring the models together, if it is time to.

        Args:
            step: from 1.
            trace: of the step.
            samples: of the step, of each worker, in rank order.

        Returns:
            The trace, with what was sent and how long that took.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """The model is the average of all workers' inside, and this worker's again afterwards. May be nested."""
        ...

    def event(self, step: int) -> Event:
        """What to write of the steps up to this one that were not told of yet."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this worker: tensors and plain values."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` gave.

        Raises:
            BadInput: it is damaged, or of another model.
        """
        ...


@contextmanager
def own_state() -> Iterator[None]:
    """What a checkpoint kept of this worker is read inside.

    Raises:
        BadInput: it is damaged, or of another model.
    """
    try:
        yield
    except (ValidationError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            "the checkpoint's state of a local SGD worker is damaged.", hint="use an older checkpoint"
        ) from None
