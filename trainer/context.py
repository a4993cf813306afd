"""What a worker process knows about itself and the run: its rank, device, pace, event log and the wish to stop.

And where torch's random sequences of it stand.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from hetopt.core.events.log import EventLog
from hetopt.core.run_spec import RunSpec, WorkerSpec


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """One worker's place in the run. The default process group is initialised whenever ``world_size > 1``.

    ``store`` is what the group met through; absent: nobody can be asked who is missing when the group falls apart.
    """

    spec: RunSpec
    rank: int
    world_size: int
    device: torch.device
    run_dir: Path
    events: EventLog
    stop_requested: Callable[[], bool]
    store: Store | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def worker(self) -> WorkerSpec:
        """This worker's part of the spec."""
        return self.spec.workers[self.rank]

    @property
    def is_leader(self) -> bool:
        """Rank 0 writes events, checkpoints and results."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class Generators:
    """States of torch's random generators: the CPU's, and the GPU's of a worker that has one."""

    cpu_generator: Tensor
    cuda_generator: Tensor | None

    @staticmethod
    def at(device: torch.device) -> Generators:
        """Return the present states of the random generators of the CPU and of a device."""
        return Generators(
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore_generators(self, device: torch.device) -> None:
        """Continue the random sequences; a device that the state does not know keeps its own."""
        torch.set_rng_state(self.cpu_generator)
        if device.type == "cuda" and self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator, device)

    def has_drawn(self, device: torch.device) -> bool:
        """Return whether random numbers of torch were drawn since these states were taken."""
        now = Generators.at(device)
        pairs = ((now.cpu_generator, self.cpu_generator), (now.cuda_generator, self.cuda_generator))
        return any(
            current is not None and other is not None and not torch.equal(current, other) for current, other in pairs
        )


_WORDS = 625, 624
"""Of the states of Python's and NumPy's Mersenne twisters; four numbers more stand behind them."""


@dataclass
class States:
    """The states of the three generators that scripts draw from: torch's, Python's and NumPy's."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """Return the present states of torch's, Python's and NumPy's generators."""
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state())

    def vector(self) -> Tensor:
        """Return the states as float64 numbers, which checkpoints keep and workers send."""
        _, words, gauss = self.python
        _, keys, place, has_gauss, cached = self.numpy
        rest = [float("nan") if gauss is None else gauss, place, has_gauss, cached]
        return torch.cat([torch.tensor([*words, *keys, *rest], dtype=torch.float64), self.torch.double()])

    @classmethod
    def of(cls, vector: Tensor) -> States:
        """Return the states that `vector` gave."""
        words, keys, rest, torch_state = torch.split(vector, [*_WORDS, 4, len(vector) - sum(_WORDS) - 4])
        gauss, place, has_gauss, cached = rest.tolist()
        python = (3, tuple(map(int, words.tolist())), None if gauss != gauss else gauss)
        numpy = ("MT19937", keys.numpy().astype(np.uint32), int(place), int(has_gauss), cached)
        return cls(torch=torch_state.byte(), python=python, numpy=numpy)

    def use(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
