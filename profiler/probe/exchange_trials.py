"""Tries ways to exchange on the gradients of a pilot that itself sums them whole: what each loses of this job.

A way with a residual is followed until what it holds back has settled, and its gain is that of the last steps: the
residual is full of what was lost before, so that a gradient alone would promise too much. Of one that forgets, the sum
is held against the exact one. Weights move as in dense training all the while.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.payload_bytes import Shapes
from hetopt.core.events.probe_records import ExchangeTried
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.vectors import energy

SETTLED_STEPS, COUNTED_STEPS = 5, 2
"""Of a way with a residual. Pilots of small jobs have few steps, and there are many ways; what is lost by looking so
early is in docs/decisions/0061."""

FORGETTING_STEPS = 2
"""Of one without: nothing has to settle."""


class ExchangeTrials:
    """One way after the other, and each of them once in a pilot at most. Built and called by all ranks together.

    Args:
        ways: as people write them.
        shapes: of the parameters.
        device: where the gradient lies.
        seed: of what is drawn at random.
    """

    def __init__(self, ways: Sequence[str], shapes: Shapes, device: torch.device, seed: int) -> None:
        self._ways, self._shapes, self._device, self._seed = tuple(ways), tuple(shapes), device, seed
        self._numel = sum(torch.Size(shape).numel() for shape in shapes)
        self._next, self._pilot, self._ended = 0, 0, 0
        self._begin()

    def _begin(self) -> None:
        self._way = self._ways[self._next % len(self._ways)]
        self._exchange = self._make(self._way)
        self._exact = self._make("dense")
        self._taken = 0
        self._sums = [0.0] * 5

    def _make(self, way: str) -> Exchange:
        compression = parse_compression(way)
        return Exchange(compression, self._numel, device=self._device, shapes=self._shapes, seed=self._seed)

    def follow(self, local: Tensor, crew: ProbeGroup, *, pilot: int, step: int) -> ExchangeTried | None:
        """Exchange this worker's weighted gradient of one step; what was found, where that ends a trial.

        Args:
            local: left as it is.
            crew: of the workers.
            pilot: whose gradient it is.
            step: likewise.
        """
        if pilot != self._pilot:  # other weights
            self._pilot, self._ended = pilot, 0
            self._begin()
        if self._ended == len(self._ways):
            return None
        out = local.clone()
        stats = self._exchange.run(out)
        self._taken += 1
        if stats.energy is not None and stats.kept_energy is not None:
            if self._taken > SETTLED_STEPS:
                self._add(stats.kept_energy, stats.energy)
            if self._taken < SETTLED_STEPS + COUNTED_STEPS:
                return None
            kept, whole, *_ = crew.total(self._sums)
            found = {"gain": min(1.0, kept / whole)} if whole > 0 else {}
        else:
            whole_sum = local.clone()
            self._exact.run(whole_sum)
            self._add(0.0, energy(local), energy(out - whole_sum), float(out @ whole_sum), energy(whole_sum))
            if self._taken < FORGETTING_STEPS:
                return None
            _, own, error, along, exact = crew.total(self._sums)
            workers = crew.context.world_size  # all hold the same sums
            found = {"variance": error / workers / own, "signal": along / exact} if own > 0 and exact > 0 else {}
        way, self._next, self._ended = self._way, self._next + 1, self._ended + 1
        self._begin()
        if not found:
            return None
        return ExchangeTried(pilot=pilot, step=step, compression=way, workers=crew.context.world_size, **found)

    def _add(self, *values: float) -> None:
        for place, value in enumerate(values):
            self._sums[place] += value
