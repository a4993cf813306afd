"""An exchange whose compression changes while the run goes on; what was held back is kept through every change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.trainer.exchange.composition import combine
from hetopt.trainer.exchange.exchange import make_exchange, make_memory
from hetopt.trainer.exchange.memory import ALIKE, MemoryState, Remembered
from hetopt.trainer.exchange.peers import Store
from hetopt.trainer.exchange.stats import ExchangeStats, LookingExchange
from hetopt.trainer.exchange.wire import Shapes
from hetopt.trainer.spec import Compression

_IN_USE = f"{ALIKE}compression"
_STEPS = f"{ALIKE}steps"


class SwitchingExchange:
    """Uses one compression after another with the same memory.

    The memory is that of the first compression. Others that do not name one use it as well: so the dense exchange
    between two thin ones sends all that was held back, and leaves nothing behind. What a compression itself carries
    from step to step (PowerSGD's factors) ends with its use.

    Args:
        first: the compression to begin with.
        numel, device, group, clock, shapes, seed, store: as of `make_exchange`.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """

    def __init__(
        self,
        first: Compression,
        numel: int,
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
        shapes: Shapes | None = None,
        seed: int = 0,
        store: Store | None = None,
    ) -> None:
        self._memory_name = combine(first.name, memory=first.memory, collective=first.collective).memory
        self._memory = make_memory(first, numel, device=device, group=group)
        self._steps = 0

        def make(compression: Compression, first_step: int) -> LookingExchange:
            return make_exchange(
                compression,
                numel,
                device=device,
                group=group,
                clock=clock,
                shapes=shapes,
                seed=seed,
                store=store,
                memory=self._memory,
                first_step=first_step,
            )

        self._make = make
        self._compression = first
        self._exchange = make(first, 0)

    @property
    def compression(self) -> Compression:
        """In use now."""
        return self._compression

    @property
    def memory(self) -> Remembered:
        """All that a checkpoint needs: what is held back, which compression is in use, and what that carries."""
        return self

    def use(self, compression: Compression) -> None:
        """Exchange like this from the next step on; all workers must decide the same.

        Raises:
            BadInput: it does not go with the memory.
        """
        if compression.memory == "auto":
            compression = compression.model_copy(update={"memory": self._memory_name})
        if compression != self._compression:
            self._exchange = self._make(compression, self._steps)
            self._compression = compression

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """The exchange's (see `LookingExchange`)."""
        stats = self._exchange.run(flat, look_at)
        self._steps += 1
        return stats

    def state(self) -> MemoryState:
        """See `memory`."""
        in_use = torch.frombuffer(bytearray(self._compression.model_dump_json().encode()), dtype=torch.uint8)
        return {**self._exchange.memory.state(), _IN_USE: in_use, _STEPS: torch.tensor(self._steps)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `memory`."""
        rest = {key: value for key, value in state.items() if key not in (_IN_USE, _STEPS)}
        if _IN_USE in state and _STEPS in state:
            self._steps = int(state[_STEPS])
            self._compression = Compression.model_validate_json(bytes(state[_IN_USE].tolist()))
            self._exchange = self._make(self._compression, self._steps)
        self._exchange.memory.load_state(rest)
