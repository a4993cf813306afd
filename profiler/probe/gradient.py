"""Measurements on gradients before they are exchanged: energy that Top-k would retain, and losses of compressors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.payload_bytes import Shapes, kept_elements
from hetopt.core.profile import ExchangeTrial
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import ErrorFeedback, Turn
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.topk import TopK
from hetopt.trainer.comm.vectors import energy
from hetopt.trainer.policies.ratio.policy import gain_of

SAMPLED_ELEMENTS = 1 << 24
"""Most elements of a gradient that gains are measured on. Of a larger one so many are drawn: residuals of the whole
take 24 bytes an element, where training by AdamW takes 16. At two moments of the first steps, gains were off those of
the whole by at most 3.1 % (BERT-base, 109 million) and 5.0 % (an LSTM of 66 million, two seeds). Those of every n-th
element were off by 0.6 % and 13 %: n divided the LSTM's width."""


@lru_cache(maxsize=1)
def sample_of(elements: int, device: torch.device) -> slice | Tensor:
    """Return the places in a flat gradient of so many elements that gains are measured at: all, or some at random.

    They are drawn once, and at random: of every n-th, n may divide the width of a layer.
    """
    return (
        slice(None)
        if elements <= SAMPLED_ELEMENTS
        else torch.randint(
            elements, (SAMPLED_ELEMENTS,), generator=torch.Generator(device).manual_seed(0), device=device
        ).sort()[0]
    )


class ResidualGains:
    """Residuals that Top-k's error feedback would have at several ratios, while training sends dense gradients.

    Top-k retains less of gradient plus residual than of the gradient alone. A gain at a ratio is measured on the
    residual of the nearest followed ratio. Weights move as in dense training, so gains are those at the start of a
    compressed run.

    Args:
        ratios: fractions of the elements to measure gains at.
        followed: ratios whose residuals are kept, each as long as `sample_of` the gradient; at least one.
        elements: number of elements of the gradient.
        device: device where the gradient lies.
    """

    def __init__(self, ratios: Sequence[float], followed: Sequence[float], elements: int, device: torch.device) -> None:
        """Make an empty residual for each followed ratio, and find the nearest of these for each ratio."""
        self._ratios, self._sample = tuple(ratios), sample_of(elements, device)
        elements = min(elements, SAMPLED_ELEMENTS)
        self._residuals = {ratio: ErrorFeedback(elements, device=device) for ratio in followed}
        self._nearest = [min(followed, key=lambda f: abs(math.log(f / ratio))) for ratio in ratios]
        self._elements = elements

    def follow(self, local: Tensor) -> None:
        """Update the residuals by this worker's weighted flat gradient, [elements] fp32; call it in every step."""
        for ratio, residual in self._residuals.items():
            residual.commit(TopK(ratio).encode(residual.prepare(local[self._sample]), Turn(Channel())))

    def measure(self, local: Tensor, crew: ProbeGroup) -> tuple[float, ...]:
        """Return the share of energy that Top-k would retain of all workers' gradient plus residual; collective.

        The residuals are not changed.

        Args:
            local: this worker's weighted flat gradient, [elements] fp32.
            crew: all workers of the probe.

        Returns:
            A share, 0 to 1, for each ratio in the order given, never falling as ratios grow.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        kept, whole = [0.0] * len(self._ratios), [0.0] * len(self._ratios)
        for followed, residual in self._residuals.items():
            places = [i for i, nearest in enumerate(self._nearest) if nearest == followed]
            counts = [kept_elements(self._elements, self._ratios[i]) for i in places]
            *energies, all_of_it = retained_energy(residual.prepare(local[self._sample]), [*counts, self._elements])
            for i, largest in zip(places, energies, strict=True):
                kept[i], whole[i] = largest, all_of_it
        totals = crew.total([*kept, *whole])
        shares = [gain_of(*pair) for pair in zip(totals[: len(kept)], totals[len(kept) :], strict=True)]
        # Gains at neighbouring ratios come from different residuals and may cross by a little.
        order = sorted(range(len(shares)), key=lambda i: self._ratios[i])
        rising = dict(zip(order, accumulate((shares[i] for i in order), max), strict=True))
        return tuple(rising[i] for i in range(len(shares)))


def retained_energy(flat: Tensor, kept: Sequence[int]) -> tuple[float, ...]:
    """Return the sum of the k largest squares of ``flat`` for every ``k`` in ``kept``, in the order of ``kept``.

    Divided by the whole energy this is the compression gain of GraVAC (Tyagi and Swany 2023) and one minus the
    contraction of error-feedback theory.

    Args:
        flat: one-dimensional tensor of ``n`` elements, not empty.
        kept: how many elements are kept, each in ``1..n``.
    """
    elements, flat = flat.numel(), flat.detach()
    whole = energy(flat)
    largest = max((count for count in kept if count < elements), default=0)
    if largest == 0:
        return tuple(whole for _ in kept)
    prefix = torch.topk(flat.abs(), largest).values.to(torch.float64).square_().cumsum_(0)
    positions = torch.tensor([min(count, largest) - 1 for count in kept], device=flat.device)
    partial = prefix[positions].tolist()
    # Rounding may lift a prefix over the whole, which was summed in another order.
    return tuple(whole if count == elements else min(part, whole) for count, part in zip(kept, partial, strict=True))


SETTLED_STEPS, COUNTED_STEPS = 12, 4
"""Steps of a compression with a residual, before its gain is counted and while it is, where all compressions are
followed at once; the residual needs about 1 / gain steps to settle."""

HURRIED_STEPS = 5
"""Steps in place of `SETTLED_STEPS` where compressions are followed one by one: pilots have few steps, and there are
many of them. Gains are then too good, by up to a factor of three (PowerSGD of rank 4 on digits: 0.39 for 0.14)."""

TOGETHER_ELEMENTS = 4_000_000
"""Most elements of a gradient for which all compressions are followed at once: each holds three copies of it."""

FORGETTING_STEPS = 2
"""Steps of a compression without a residual: nothing has to settle."""


class ExchangeTrials:
    """Trials of compressors on a pilot's gradients, beside its dense training; built and called by all ranks together.

    A compressor with a residual runs until the residual has settled, and its gain is that of the last steps. The sum
    of one without is compared with the exact sum. A trial that a pilot does not finish begins anew in the next.

    Args:
        ways: compressions to try, as `parse_compression` reads them.
        shapes: shapes of the parameters, in the order of the gradient.
        device: device where the gradient lies.
        seed: seed of the compressors' random numbers.
    """

    def __init__(self, ways: Sequence[str], shapes: Shapes, device: torch.device, seed: int) -> None:
        """Line compressions up for trials: all at once, or one by one if the gradient exceeds `TOGETHER_ELEMENTS`."""
        self._ways, elements = list(ways), sum(torch.Size(shape).numel() for shape in shapes)
        self._make = partial(Exchange, numel=elements, device=device, shapes=tuple(shapes), seed=seed)
        self._together = len(self._ways) if elements <= TOGETHER_ELEMENTS else 1
        self._pilot = 0
        self._open: list[_Trial] = []

    def follow(self, local: Tensor, crew: ProbeGroup, *, pilot: int) -> tuple[ExchangeTrial, ...]:
        """Try compressors on this worker's gradient of one step; return the trials that ended; every rank calls it.

        Args:
            local: this worker's weighted flat gradient; not changed.
            crew: all workers of the probe.
            pilot: number of the pilot; when it changes, open trials begin anew.

        Returns:
            Trials that ended with this step, mostly none. A trial without a result, as of a zero gradient, is left out.

        Raises:
            ProbeStopped: any worker was asked to stop.
            BadInput: a compression is not known, or does not suit the job.
        """
        if pilot != self._pilot:  # other weights
            self._pilot, self._open = pilot, [self._trial(trial.way) for trial in self._open]
        while len(self._open) < self._together and self._ways:
            self._open.append(self._trial(self._ways.pop(0)))
        for trial in self._open:
            trial.take(local)
        ended = [trial for trial in self._open if trial.is_over]
        self._open = [trial for trial in self._open if not trial.is_over]
        results = [(trial.way, trial.result(crew)) for trial in ended]
        workers = crew.context.world_size
        return tuple(
            ExchangeTrial(compression=way, workers=workers, **measured)
            for way, measured in results
            if all(measured.get(name, 1) > 0 for name in ("gain", "signal")) and measured  # else nothing of it is left
        )

    def _trial(self, way: str) -> _Trial:
        settled = SETTLED_STEPS if self._together > 1 else HURRIED_STEPS
        return _Trial(way, self._make(parse_compression(way)), self._make(parse_compression("dense")), settled)


class _Trial:
    """Trial of one compression on a pilot's gradients, from an empty residual on."""

    def __init__(self, way: str, exchange: Exchange, exact: Exchange, settled: int) -> None:
        """Make a trial at its beginning.

        Args:
            way: compression, as `parse_compression` reads it.
            exchange: exchange by that compression.
            exact: dense exchange to compare with.
            settled: steps after which the residual has filled.
        """
        self.way, self._exchange, self._exact, self._settled = way, exchange, exact, settled
        self._holds_back = False
        self._taken = 0
        self._sums = [0.0] * 5

    @property
    def is_over(self) -> bool:
        """True once enough steps were tried: more with a residual than without."""
        return self._taken >= (self._settled + COUNTED_STEPS if self._holds_back else FORGETTING_STEPS)

    def take(self, local: Tensor) -> None:
        """Exchange the local gradient of one more step, and add up its energies; collective, the gradient is unchanged.

        Steps of a compressor with a residual count once the residual has settled.
        """
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

    def result(self, crew: ProbeGroup) -> dict[str, float]:
        """Return the gain, or the variance and signal, over all workers; empty where the gradient was zero; collective.

        Raises:
            ProbeStopped: any worker was asked to stop.
        """
        kept, local_energy, error, along, exact = crew.total(self._sums)
        if local_energy <= 0:
            return {}
        if self._holds_back:
            return {"gain": gain_of(kept, local_energy)}
        # All workers hold the same sums.
        return (
            {"variance": error / crew.context.world_size / local_energy, "signal": min(1.0, along / exact)}
            if exact > 0
            else {}
        )

    def _add(self, *values: float) -> None:
        self._sums = [total + value for total, value in zip_longest(self._sums, values, fillvalue=0.0)]
