"""What a worker remembers of the gradient it has not sent yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hetopt.core.errors import BadInput
from hetopt.trainer.comm.payload import Payload

MemoryState = dict[str, torch.Tensor]

ALIKE = "alike."
"""Keys that begin so are the same for all workers: a new worker gets a copy, where others are handed on in parts."""


class Remembered(Protocol):
    """What has to be saved with a run."""

    def state(self) -> MemoryState:
        """A copy of what is remembered."""
        ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Remember what `state` gave.

        Raises:
            BadInput: the state belongs to another memory or to another model.
        """
        ...


class Memory(Remembered, Protocol):
    """Adds what was withheld before to a new gradient, and keeps what is withheld now."""

    def prepare(self, gradient: torch.Tensor) -> torch.Tensor:
        """The vector to compress. No side effects: candidates may be tried on it; valid until the next `prepare`.

        Args:
            gradient: the flat fp32 gradient, already weighted by the worker's share of the batch.
        """
        ...

    def commit(self, prepared: torch.Tensor, sent: Payload) -> float | None:
        """Remember ``prepared - sent``, where ``sent`` is exactly what the other workers received.

        Returns:
            The energy that this took away (see `Payload.subtract_from`); None where nothing is remembered.
        """
        ...


class NoMemory:
    """What is not sent is forgotten; right where everything is sent."""

    def prepare(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient itself."""
        return gradient

    def commit(self, prepared: torch.Tensor, sent: Payload) -> None:
        """Nothing to remember (see `Memory`)."""

    def state(self) -> MemoryState:
        """Empty."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Accept the empty state only (see `Memory`)."""
        check_state(state, {})


class ErrorFeedback:
    """Adds the residual of earlier steps to the gradient: ``residual <- (gradient + residual) - sent``.

    The residual starts at zero and is in units of the weighted sum over workers, so a sample keeps the weight of the
    step that computed it. Eight bytes a parameter: the residual, and the buffer it swaps places with.
    """

    def __init__(self, numel: int, *, device: torch.device | None = None) -> None:
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._prepared = torch.zeros_like(self._residual)

    def prepare(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient plus residual (see `Memory`)."""
        return torch.add(gradient, self._residual, out=self._prepared)

    def commit(self, prepared: torch.Tensor, sent: Payload) -> float:
        """Keep what was not sent (see `Memory`)."""
        if prepared is not self._prepared:
            self._prepared.copy_(prepared)
        kept = sent.subtract_from(self._prepared)
        self._residual, self._prepared = self._prepared, self._residual
        return kept

    def state(self) -> MemoryState:
        """``{"residual": ...}``, copied."""
        return {"residual": self._residual.clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a residual (see `Memory`)."""
        check_state(state, {"residual": self._residual})
        self._residual.copy_(state["residual"])


def redistribute(states: Sequence[MemoryState], workers: int) -> list[MemoryState]:
    """What each of ``workers`` workers should remember when those with ``states`` are replaced by them.

    Old worker i hands its memory to new worker ``i mod workers``; memories that meet add up, and additional workers
    start from zero. So the sum over workers, which is all that training can ever see, stays; and as many workers as
    before keep their memories unchanged. What all workers have alike (`ALIKE`) is copied.
    """
    if not states or workers < 1:
        raise ValueError(f"memories go from at least one worker to at least one, not from {len(states)} to {workers}")
    new = [
        {key: value.clone() if key.startswith(ALIKE) else torch.zeros_like(value) for key, value in states[0].items()}
        for _ in range(workers)
    ]
    for i, state in enumerate(states):
        for key, value in state.items():
            if not key.startswith(ALIKE):
                new[i % workers][key] += value
    return new


def check_state(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state that does not fit.

    Raises:
        BadInput: its keys or shapes are not those of ``expected``.
    """
    found = {key: tuple(value.shape) for key, value in state.items()}
    wanted = {key: tuple(value.shape) for key, value in expected.items()}
    if found != wanted:
        raise BadInput(
            f"The saved gradient memory holds {found or 'nothing'}, but this run needs {wanted or 'none'}.",
            hint="resume with the model and the compression that the checkpoint was written with",
        )
