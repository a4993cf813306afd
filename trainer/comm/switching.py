"""An exchange whose compression changes while the run goes on; what was held back is kept through every change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.composition import AUTO, NONE, combine
from hetopt.core.comm.payload_bytes import Shapes
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.error_feedback import ALIKE, Memory, MemoryState, NoMemory, Remembered
from hetopt.trainer.comm.exchange import make_exchange, make_memory
from hetopt.trainer.comm.stats import ExchangeStats, LookingExchange

_IN_USE = f"{ALIKE}compression"
_STEPS = f"{ALIKE}steps"
_OWES = f"{ALIKE}owes"
_FORGETS = f"{ALIKE}forgets"

FORGOTTEN = "bf16"
"""The compression whose rounding is not worth remembering."""


class SwitchingExchange:
    """Uses one compression after another with the same memory.

    The memory is that of the first compression. Others that do not name one use it as well: so the dense exchange
    between two thin ones sends all that was held back, and leaves nothing behind. What a compression itself carries
    from step to step (PowerSGD's factors) ends with its use.

    bf16 only begins so. Once its first step has sent what others held back, its rounding is forgotten as it is where a
    run asks for bf16: it leaves a part in 10^5 of a gradient's energy, and remembering that takes as long as rounding.
    What the memory still holds then, that step's rounding, waits for the next compression. Whoever asks for a memory by
    name (``forgets=False``) keeps it.

    Args:
        first: the compression to begin with.
        numel, device, group, clock, shapes, seed, store: as of `make_exchange`.
        forgets: whether bf16 among others does.

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
        forgets: bool = True,
    ) -> None:
        self._first = first
        self._forgets = forgets
        self._memory = make_memory(first, numel, device=device, group=group)
        self._steps = 0
        self._owes = False

        def make(compression: Compression, first_step: int, memory: Memory | None = None) -> LookingExchange:
            return make_exchange(
                compression,
                numel,
                device=device,
                group=group,
                clock=clock,
                shapes=shapes,
                seed=seed,
                store=store,
                memory=memory or self._memory,
                first_step=first_step,
            )

        self._make = make
        self._compression = first
        self._exchange = make(first, 0)
        self._forgetful: LookingExchange | None = None  # the same without its memory, once that may be

    @property
    def compression(self) -> Compression:
        """In use now."""
        return self._compression

    @property
    def owes(self) -> bool:
        """Whether something may be held back; the same on all workers."""
        return self._owes

    @property
    def memory(self) -> Remembered:
        """All that a checkpoint needs: what is held back, which compression is in use, and what that carries."""
        return self

    def use(self, compression: Compression) -> None:
        """Exchange like this from the next step on; all workers must decide the same.

        Raises:
            BadInput: it does not go with the memory.
        """
        compression = with_memory(compression, self._first)
        if compression != self._compression:
            self._exchange = self._make(compression, self._steps)
            self._compression = compression
            self._forgetful = None

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """The exchange's (see `LookingExchange`)."""
        if self._forgetful is not None and not look_at:
            stats = self._forgetful.run(flat)
        else:
            stats = self._exchange.run(flat, look_at)
            if self._compression.name == FORGOTTEN and self._forgets:
                self._forget()
        self._steps += 1
        self._owes = self._compression.name != "identity"
        return stats

    def _forget(self) -> None:
        if self._forgetful is None:
            plain = self._compression.model_copy(update={"memory": NONE})
            self._forgetful = self._make(plain, self._steps, NoMemory())

    def lend(self) -> MemoryState:
        """What is held back, for an exchange that keeps it from here on, until it is `returned`."""
        state = self._memory.state()
        self._memory.load_state({key: torch.zeros_like(value) for key, value in state.items()})
        self._owes = False
        return state

    def returned(self, state: MemoryState) -> None:
        """Go on with what somebody else held back."""
        self._memory.load_state(state)
        self._owes = True

    def state(self) -> MemoryState:
        """See `memory`."""
        in_use = torch.frombuffer(bytearray(self._compression.model_dump_json().encode()), dtype=torch.uint8)
        own = {_IN_USE: in_use, _STEPS: torch.tensor(self._steps), _OWES: torch.tensor(self._owes)}
        own[_FORGETS] = torch.tensor(self._forgetful is not None)
        return {**self._exchange.memory.state(), **own}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `memory`."""
        rest = {key: value for key, value in state.items() if key not in (_IN_USE, _STEPS, _OWES, _FORGETS)}
        self._owes = bool(state.get(_OWES, torch.tensor(True)))
        in_use = compression_in(state)
        if in_use is not None and _STEPS in state:
            self._steps = int(state[_STEPS])
            self._compression = in_use
            self._exchange = self._make(self._compression, self._steps)
        self._forgetful = None
        if in_use is not None and bool(state.get(_FORGETS, torch.tensor(False))):
            self._forget()
        self._exchange.memory.load_state(rest)


def with_memory(compression: Compression, first: Compression) -> Compression:
    """The compression with the memory that a run has which began with another one, unless it names its own."""
    if compression.memory != AUTO:
        return compression
    memory = combine(first.name, memory=first.memory, collective=first.collective).memory
    return compression.model_copy(update={"memory": memory})


def compression_in(state: Mapping[str, Tensor]) -> Compression | None:
    """The compression that was in use when an exchange gave this state; None where it does not say."""
    written = state.get(_IN_USE)
    return None if written is None else Compression.model_validate_json(bytes(written.tolist()))
