"""Looks at a worker's gradient between computing and exchanging it: what the noise and gain samples of a pilot need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.profiler.compression import gain, monotone, retained_energy
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import State, Turn
from hetopt.trainer.comm.error_feedback import ErrorFeedback
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats
from hetopt.trainer.comm.topk import TopK

NOTHING_SENT = ExchangeStats(sent_bytes=0, compress_s=0.0, sync_s=0.0)


class HeldExchange:
    """Keeps the local gradient back until it is released, so that it can be looked at, or be made of several groups.

    Between the step and `release`, ``local`` is the step's own flat buffer: what is written to it is what will be
    exchanged.
    """

    def __init__(self, exchange: Exchange, elements: int, device: torch.device) -> None:
        self._exchange = exchange
        self.local = torch.zeros(elements, device=device)

    def state(self) -> State:
        """The inner exchange's."""
        return self._exchange.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inner exchange's."""
        self._exchange.load_state(state)

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Keep the gradient; nobody looks at gains here."""
        self.local = flat
        return NOTHING_SENT

    def release(self) -> Tensor:
        """Exchange the gradient that was kept; the sum over all workers."""
        self._exchange.run(self.local)
        return self.local


class ResidualGains:
    """Follows the residual that error feedback would have at several ratios while training itself sends everything.

    Top-k then keeps a fraction of gradient *plus residual*, which is less than of the gradient alone: the residual is
    full of what was small. A gain at a given ratio is measured on the residual of the nearest followed ratio. The
    weights move as in dense training, so this is what a compressed run sees at its start; later the two may part.

    Args:
        ratios: where gains are wanted.
        followed: ratios whose residuals are followed.
        elements: length of the flat gradient.
        device: where it lies.
    """

    def __init__(self, ratios: Sequence[float], followed: Sequence[float], elements: int, device: torch.device) -> None:
        self._ratios = tuple(ratios)
        self._residuals = {ratio: ErrorFeedback(elements, device=device) for ratio in followed}
        self._nearest = [min(followed, key=lambda f: abs(math.log(f / ratio))) for ratio in ratios]
        self._elements = elements

    def follow(self, local: Tensor) -> None:
        """Take this worker's weighted gradient of one step into the residuals."""
        for ratio, residual in self._residuals.items():
            prepared = residual.prepare(local)
            residual.commit(prepared, TopK(ratio).encode(prepared, Turn(Channel())))

    def measure(self, local: Tensor, crew: ProbeGroup) -> tuple[float, ...]:
        """Gains over all workers at every ratio, had this gradient been sent; the residuals are left alone."""
        kept, whole = [0.0] * len(self._ratios), [0.0] * len(self._ratios)
        for followed, residual in self._residuals.items():
            places = [i for i, nearest in enumerate(self._nearest) if nearest == followed]
            counts = [kept_elements(self._elements, self._ratios[i]) for i in places]
            *energies, all_of_it = retained_energy(residual.prepare(local), [*counts, self._elements])
            for i, energy in zip(places, energies, strict=True):
                kept[i], whole[i] = energy, all_of_it
        totals = crew.total([*kept, *whole])
        shares = [gain(*pair) for pair in zip(totals[: len(kept)], totals[len(kept) :], strict=True)]
        # Gains at neighbouring ratios come from different residuals and may cross by a little.
        order = sorted(range(len(shares)), key=lambda i: self._ratios[i])
        rising = dict(zip(order, monotone([shares[i] for i in order]), strict=True))
        return tuple(rising[i] for i in range(len(shares)))
