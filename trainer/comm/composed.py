"""One exchange of gradients, composed: remember, compress, sum over all workers, and keep what was not sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.trainer.comm.aggregation import Aggregation
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.energy import energy
from hetopt.trainer.comm.error_feedback import ALIKE, Memory, MemoryState, NoMemory, check_state
from hetopt.trainer.comm.gain import kept_energies
from hetopt.trainer.comm.payload import Payload
from hetopt.trainer.comm.stats import ExchangeStats

_STEP = f"{ALIKE}step"


class Exchange:
    """A memory and an aggregation that fit together.

    The caller weights its local mean gradient by ``local_batch_size / global_batch_size`` first: then the sum is the
    gradient of one machine with the whole batch, and residuals are in units of that sum.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        aggregation: Aggregation,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
        first_step: int = 0,
    ) -> None:
        self._memory = memory
        self._aggregation = aggregation
        self._carried = _Carried(memory, aggregation, first_step)
        self._carries = aggregation.counts_steps or bool(aggregation.state())
        self._group = group
        self._clock = clock

    @property
    def memory(self) -> Memory:
        """What has not been sent yet; part of a checkpoint, with what the aggregation carries from step to step."""
        return self._carried if self._carries else self._memory

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Replace the weighted local gradient (1-D fp32) by the sum over all workers, in place (see `LookingExchange`).

        If a collective fails, nothing has been committed and the residual is that of the step before. A gradient
        without elements is left alone.
        """
        if flat.numel() == 0:
            return ExchangeStats(sent_bytes=0, compress_s=0.0, sync_s=0.0)
        channel = Channel(self._group, clock=self._clock, on=flat.device)
        begun = channel.now()
        prepared = self._memory.prepare(flat)
        holds_back = not isinstance(self._memory, NoMemory)
        there = energy(prepared) if holds_back or look_at else None
        looked, looking_s = _look(prepared, look_at, channel)
        sent = self._aggregation.run(prepared, flat, channel, self._carried.step)
        kept = self._memory.commit(prepared, sent)
        self._carried.step += 1
        sync_s = sum(message.time_s for message in channel.messages)
        return ExchangeStats(
            sent_bytes=sum(message.payload_bytes for message in channel.messages),
            compress_s=channel.now() - begun - sync_s - looking_s,
            sync_s=sync_s,
            messages=tuple(channel.messages),
            energy=there,
            kept_energy=there if kept is None else kept,
            look_energies=looked,
        )


def _look(prepared: Tensor, ratios: Sequence[float], channel: Channel) -> tuple[tuple[float, ...], float]:
    """Kept energies at the ratios, and how long it took to find them."""
    if not ratios:
        return (), 0.0
    begun = channel.now()
    looked = kept_energies(prepared, [kept_elements(prepared.numel(), ratio) for ratio in ratios])
    return looked, channel.now() - begun


class _Carried:
    """A memory together with what the aggregation carries from step to step: one state, saved and resumed as one."""

    def __init__(self, memory: Memory, aggregation: Aggregation, step: int) -> None:
        self._memory = memory
        self._aggregation = aggregation
        self.step = step

    def prepare(self, gradient: Tensor) -> Tensor:
        """The memory's."""
        return self._memory.prepare(gradient)

    def commit(self, prepared: Tensor, sent: Payload) -> float | None:
        """The memory's."""
        return self._memory.commit(prepared, sent)

    def state(self) -> MemoryState:
        """Both, and the step."""
        carried = {f"{ALIKE}{key}": value for key, value in self._aggregation.state().items()}
        return {**self._memory.state(), **carried, _STEP: torch.tensor(self.step)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Both, and the step (see `Memory`)."""
        check_state(state, self.state())
        self._memory.load_state({key: value for key, value in state.items() if not key.startswith(ALIKE)})
        alike = {key.removeprefix(ALIKE): value for key, value in state.items() if key.startswith(ALIKE)}
        self.step = int(alike.pop("step"))
        self._aggregation.load_state(alike)
