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
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.records import ExchangeTried
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.vectors import energy

SETTLED_STEPS, COUNTED_STEPS = 12, 4
"""Of a way with a residual, where all ways are followed at once; what it holds back needs about 1 / gain steps."""

HURRIED_STEPS = 5
"""In place of the first, where they are followed one by one: pilots have few steps, and there are many ways. Gains are
then too good, by up to a factor of three (PowerSGD of rank 4 on digits: 0.39 for 0.14)."""

TOGETHER_ELEMENTS = 4_000_000
"""Of a gradient, up to which they are: each holds three copies of it."""

FORGETTING_STEPS = 2
"""Of a way without a residual: nothing has to settle."""


class ExchangeTrials:
    """Each way once, all at once or one after the other. What a pilot has no time for begins anew in the next.

    Built and called by all ranks together.
    """

    def __init__(self, ways: Sequence[str], shapes: Shapes, device: torch.device, seed: int) -> None:
        self._ways, self._shapes, self._device, self._seed = list(ways), tuple(shapes), device, seed
        self._numel = sum(torch.Size(shape).numel() for shape in shapes)
        self._together = len(self._ways) if self._numel <= TOGETHER_ELEMENTS else 1
        self._pilot = 0
        self._open: list[_Trial] = []

    def follow(self, local: Tensor, crew: ProbeGroup, *, pilot: int, step: int) -> tuple[ExchangeTried, ...]:
        """Exchange this worker's weighted gradient of one step; what was found by the trials that this ends."""
        if pilot != self._pilot:  # other weights
            self._pilot, self._open = pilot, [self._trial(trial.way) for trial in self._open]
        while len(self._open) < self._together and self._ways:
            self._open.append(self._trial(self._ways.pop(0)))
        for trial in self._open:
            trial.take(local)
        ended = [trial for trial in self._open if trial.is_over]
        self._open = [trial for trial in self._open if not trial.is_over]
        found = [(trial.way, trial.found(crew)) for trial in ended]
        workers = crew.context.world_size
        return tuple(
            ExchangeTried(pilot=pilot, step=step, compression=way, workers=workers, **told)
            for way, told in found
            if told
        )

    def _trial(self, way: str) -> _Trial:
        settled = SETTLED_STEPS if self._together > 1 else HURRIED_STEPS
        return _Trial(way, self._exchange(way), self._exchange("dense"), settled)

    def _exchange(self, way: str) -> Exchange:
        compression = parse_compression(way)
        return Exchange(compression, self._numel, device=self._device, shapes=self._shapes, seed=self._seed)


class _Trial:
    """One way, from an empty residual on."""

    def __init__(self, way: str, exchange: Exchange, exact: Exchange, settled: int) -> None:
        self.way, self._exchange, self._exact, self._settled = way, exchange, exact, settled
        self._holds_back = False
        self._taken = 0
        self._sums = [0.0] * 5

    @property
    def is_over(self) -> bool:
        """Whether enough is known of it."""
        return self._taken >= (self._settled + COUNTED_STEPS if self._holds_back else FORGETTING_STEPS)

    def take(self, local: Tensor) -> None:
        """The gradient of one more step."""
        out = local.clone()
        stats = self._exchange.run(out)
        self._taken += 1
        self._holds_back = stats.kept_energy is not None and stats.energy is not None
        if stats.kept_energy is not None and stats.energy is not None:
            if self._taken > self._settled:
                self._add(stats.kept_energy, stats.energy)
            return
        whole = local.clone()
        self._exact.run(whole)
        self._add(0.0, energy(local), energy(out - whole), float(out @ whole), energy(whole))

    def found(self, crew: ProbeGroup) -> dict[str, float]:
        """Gain, or variance and signal, over all workers; empty where the gradient was zero."""
        kept, own, error, along, exact = crew.total(self._sums)
        if own <= 0:
            return {}
        if self._holds_back:
            return {"gain": min(1.0, kept / own)}
        # All workers hold the same sums.
        return {"variance": error / crew.context.world_size / own, "signal": along / exact} if exact > 0 else {}

    def _add(self, *values: float) -> None:
        for place, value in enumerate(values):
            self._sums[place] += value
