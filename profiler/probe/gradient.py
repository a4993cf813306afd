"""Looks at a worker's gradient between computing and exchanging it: what the noise and gain samples of a pilot need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import ErrorFeedback, State, Turn
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
        rising = dict(zip(order, accumulate((shares[i] for i in order), max), strict=True))
        return tuple(rising[i] for i in range(len(shares)))


def retained_energy(flat: Tensor, kept: Sequence[int]) -> tuple[float, ...]:
    """Energy ``sum of the k largest squares`` of ``flat`` for every ``k`` in ``kept``, in the order of ``kept``.

    One selection of the largest ``k`` and one cumulative sum in double precision serve every smaller ``k`` as well.
    Divided by the whole energy this is the compression gain of GraVAC (Tyagi and Swany 2023) and, as Top-k is an
    orthogonal projection, one minus the contraction that error-feedback theory speaks of.

    Args:
        flat: one-dimensional tensor of ``n`` elements, not empty.
        kept: how many elements are kept, each in ``1..n``.
    """
    elements, flat = flat.numel(), flat.detach()
    whole = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    largest = max((count for count in kept if count < elements), default=0)
    if largest == 0:
        return tuple(whole for _ in kept)
    prefix = torch.topk(flat.abs(), largest).values.to(torch.float64).square_().cumsum_(0)
    positions = torch.tensor([min(count, largest) - 1 for count in kept], device=flat.device)
    partial = prefix[positions].tolist()
    # Rounding may lift a prefix over the whole, which was summed in another order.
    return tuple(whole if count == elements else min(part, whole) for count, part in zip(kept, partial, strict=True))


def gain(kept_energy: float, whole_energy: float) -> float:
    """Kept energy as a fraction of the whole. Of a gradient that is zero nothing is lost: the gain is 1."""
    return 1.0 if whole_energy <= 0 else min(1.0, kept_energy / whole_energy)
