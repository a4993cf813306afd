"""Sums the elements that all workers have agreed on, and nothing else: once indices are shared, values add up."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hetopt.trainer.comm.aggregation import Aggregation, Carries
from hetopt.trainer.comm.blocks import Workspace
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.error_feedback import MemoryState
from hetopt.trainer.comm.payload import DensePayload, Payload, SparsePayload


class IndexChoice(Carries, Protocol):
    """Says which elements are exchanged in this step."""

    def choose(self, prepared: Tensor, channel: Channel, step: int) -> Tensor:
        """Distinct int32 indices, the same on every worker, as many in every step."""
        ...


class IndexedSum:
    """Exchanges the values at chosen indices through another aggregation; all other elements of the sum are zero.

    Args:
        choice: of the indices.
        values: how the values at them are summed.
        scale: of what is sent: the inverse of the chance to be chosen, where nothing remembers what was not.
    """

    counts_steps = True

    def __init__(self, *, choice: IndexChoice, values: Aggregation, scale: float = 1.0) -> None:
        self._choice = choice
        self._values = values
        self._scale = scale
        self._workspace = Workspace()

    def run(self, prepared: Tensor, out: Tensor, channel: Channel, step: int) -> Payload:
        """Choose, sum the values (see `Aggregation`)."""
        indices = self._choice.choose(prepared, channel, step)
        values = prepared.index_select(0, indices)
        if self._scale != 1.0:
            values.mul_(self._scale)
        summed = self._workspace.take("summed", values.numel(), torch.float32, values.device)
        sent = self._values.run(values, summed, channel, step)
        out.zero_().index_add_(0, indices, summed)
        return SparsePayload(
            indices=indices,
            values=values if isinstance(sent, DensePayload) else sent.dense(),
            numel=prepared.numel(),
        )

    def state(self) -> MemoryState:
        """The choice's; values are summed anew in every step."""
        return self._choice.state()

    def load_state(self, state: MemoryState) -> None:
        """The choice's."""
        self._choice.load_state(state)
