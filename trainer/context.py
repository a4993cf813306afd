"""What a worker knows of itself and its run (spec, rank, device, log, stop request), and random generators' states."""

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
    """One worker's context in a run: spec, rank, device, folder, event log, stop request, clock and the group's store.

    torch's default process group is initialised whenever ``world_size > 1``.

    Attributes:
        spec: spec of the run.
        rank: rank of this worker, from 0 on.
        world_size: number of workers.
        device: device of this worker.
        run_dir: folder of the run.
        events: the run's log, which rank 0 alone writes.
        stop_requested: returns True once somebody has asked the run to stop.
        store: through which the group met; None: nobody can be asked who is missing when the group falls apart.
        clock: returns seconds; only differences count.
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
        """True on rank 0, which writes events, checkpoints and results."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class Generators:
    """Saved states of torch's random generators: the CPU's and the worker's GPU's (None without a GPU).

    Attributes:
        cpu_generator: state of the CPU's generator, as `torch.get_rng_state` returns it.
        cuda_generator: state of the worker's GPU; None: it has none.
    """

    cpu_generator: Tensor
    cuda_generator: Tensor | None

    @staticmethod
    def at(device: torch.device) -> Generators:
        """Return the present states of torch's CPU generator and, if ``device`` is a GPU, of that GPU's generator."""
        return Generators(
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore_generators(self, device: torch.device) -> None:
        """Set torch's generators of CPU and ``device`` to these states; a GPU without a saved state keeps its own."""
        torch.set_rng_state(self.cpu_generator)
        if device.type == "cuda" and self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator, device)

    def has_drawn(self, device: torch.device) -> bool:
        """Return whether torch has drawn random numbers, on the CPU or the GPU ``device``, since these states."""
        now = Generators.at(device)
        pairs = ((now.cpu_generator, self.cpu_generator), (now.cuda_generator, self.cuda_generator))
        return any(
            current is not None and other is not None and not torch.equal(current, other) for current, other in pairs
        )


_WORDS = 625, 624
"""Of the states of Python's and NumPy's Mersenne twisters; four numbers more stand behind them."""


@dataclass
class States:
    """Saved states of the three generators that scripts draw from on the CPU: torch's, Python's and NumPy's.

    Attributes:
        torch: state of torch's CPU generator, uint8.
        python: state of Python's generator, as `random.getstate` returns it.
        numpy: state of NumPy's global generator, as `numpy.random.get_state` returns it.
    """

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """Return the present states of torch's CPU generator, Python's and NumPy's; draws nothing."""
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state())

    def vector(self) -> Tensor:
        """Return the states as one float64 vector, which checkpoints keep and workers send; `of` reads it."""
        _, words, gauss = self.python
        _, keys, place, has_gauss, cached = self.numpy
        rest = [float("nan") if gauss is None else gauss, place, has_gauss, cached]
        return torch.cat([torch.tensor([*words, *keys, *rest], dtype=torch.float64), self.torch.double()])

    @classmethod
    def of(cls, vector: Tensor) -> States:
        """Return the generator states in a float64 vector that `vector` made; nothing is set."""
        words, keys, rest, torch_state = torch.split(vector, [*_WORDS, 4, len(vector) - sum(_WORDS) - 4])
        gauss, place, has_gauss, cached = rest.tolist()
        python = (3, tuple(map(int, words.tolist())), None if gauss != gauss else gauss)
        numpy = ("MT19937", keys.numpy().astype(np.uint32), int(place), int(has_gauss), cached)
        return cls(torch=torch_state.byte(), python=python, numpy=numpy)

    def use(self) -> None:
        """Set torch's CPU generator, Python's and NumPy's to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
