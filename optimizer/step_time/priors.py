"""Priors of the step model: a normal one for each parameter, and Gaussian processes for residuals of the equations.

The shapes (overlap, contention, growth) were read off fits to six public sets of step times (two clusters of GPUs,
three jobs; Pollux, OSDI 2021, and Sia, SOSP 2023), rounded, and widened to about twice their spread over the sets;
links inside a node (``host_latency``, ``host_sharing``) off eight, those of a third cluster among them; `LINK_CLASSES`
tell them apart.
`benchmarks.prediction` scores each set with priors taken from the others alone. Once one layout of three or more nodes
is measured, moving any mean by its own deviation, or halving or doubling any `Spread`, changes the mean of the medians
by less than half a point. Before that, four priors stand for what nobody measured: ``relief`` (at most 4.5 points when
moved so), ``rest`` (2), ``network_latency`` (2) and ``network_growth`` (1.5).

The Gaussian processes (Rasmussen and Williams 2006) stand inside the equations, of computing by batch size and of
exchanging by layout: an excess of computing at one batch size holds wherever that size is used, and shows in a step
only as far as it computes. Scikit-learn's are fitted to observations of their own and do not serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hetopt.optimizer.step_time.physics import PITCH, Array, Layout
from hetopt.optimizer.step_time.step_time import expected_maximum


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal prior of a parameter of the step model, with a phrase on what the parameter is about.

    Attributes:
        mean: mean of the parameter; None: taken from the scale of the measurements.
        sd: standard deviation, in the units of the parameter (mostly logs).
        about: meaning of the parameter, as an explanation shows it.
    """

    mean: float | None
    sd: float
    about: str


PRIORS: Mapping[str, Normal] = MappingProxyType(
    {
        "contention": Normal(mean=-2.5, sd=1.0, about="how much workers of one node slow each other"),
        "straggling": Normal(mean=-4.0, sd=0.7, about="jitter of single steps of a worker"),
        "forward": Normal(mean=-0.8, sd=1.2, about="the part of a step before the backward pass"),
        "overlap": Normal(mean=1.3, sd=0.8, about="how well communication overlaps with computation"),
        "network": Normal(mean=None, sd=2.5, about="bandwidth between workers"),
        "host_ratio": Normal(mean=-0.8, sd=1.0, about="bandwidth inside a node against between two"),
        "relief": Normal(mean=0.25, sd=0.1, about="what a third node does for the network of two"),
        "rest": Normal(mean=0.0, sd=0.08, about="bandwidth between three or more nodes"),
        "host_latency": Normal(mean=math.log(300e-6), sd=1.5, about="latency inside a node"),
        "network_latency": Normal(mean=math.log(120e-6), sd=0.8, about="latency between nodes"),
        "host_sharing": Normal(mean=0.2, sd=0.3, about="how far workers of one node share the links inside it"),
        "network_growth": Normal(mean=-2.8, sd=0.6, about="what each doubling of workers adds between nodes"),
        "fixed": Normal(mean=None, sd=2.5, about="time a step that no sample takes"),
        "per_sample": Normal(mean=None, sd=2.5, about="time a sample"),
        "link": Normal(mean=0.0, sd=0.4, about="bandwidth of a machine type against the others"),
        "compression": Normal(mean=None, sd=1.2, about="time to compress"),
    }
)


def _links(*, sharing: tuple[float, float], latency: tuple[float, float]) -> Mapping[str, Normal]:
    moments = {"host_sharing": sharing, "host_latency": (math.log(latency[0]), latency[1])}
    return {name: replace(PRIORS[name], mean=mean, sd=sd) for name, (mean, sd) in moments.items()}


OWN_LINKS = _links(sharing=(0.0, 0.1), latency=(30e-6, 1.0))
"""Where each GPU of a machine has a link of its own: a switch, or the slots of one processor."""

THROUGH_THE_HOST = _links(sharing=(0.6, 0.3), latency=(300e-6, 1.5))
"""Where exchanges inside a machine go through its memory or its processors, which all its workers share."""

LINK_CLASSES = (OWN_LINKS, THROUGH_THE_HOST)
"""What is believed of links inside a machine, in place of `PRIORS`, which stand between the two: samples decide by the
evidence of each (MacKay 1992). Without them the median error with whole clusters held out is 0.7, 1.4 and 1.2 points
larger with none, one and three probes (`benchmarks.prediction`, whose part *terms* prints the gain of each term of
the equations). A wider second class (sharing 0.5, 0.6 or 1.0, each 0.5 more or less) has less evidence than this one
where it holds."""

SWITCHED: Mapping[str, Normal] = MappingProxyType({"contention": replace(PRIORS["contention"], mean=-3.1)})
"""Instead, where a switch joins the GPUs of each type that was measured: eight of them take 1.065 times as long as one,
the median over 14 public jobs, each by its own (`benchmarks.transfer`, which scores a job by what the others tell)."""

FIXED_SD = 1e-3
"""A parameter with such a prior stays where it is: the first type's links, with which those of others are compared."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the step model's residuals and noise, in logs, and the distances of their correlation.

    Attributes:
        compute: deviation of a worker's computation at one batch size from the line (caches, kernels).
        compute_length: distance in log batch size over which that residual changes.
        exchange: deviation of a layout's exchange from the equations.
        exchange_length: distance in logs of nodes, workers and crowd over which that residual changes.
        other_regime: correlation between layouts on one, two, or more nodes.
        other_exchange: correlation between compressors.
        layout: deviation of each layout's exchange by itself: which machines it got.
        noise_compute, noise_exchange: noise of a single measurement, as far as it computes or exchanges.
        of_compute: noise of computation read off ``step - sync``, which exchanging at the same time slows.
        of_exchange: noise of an exchange that was timed by itself.
    """

    compute: float = 0.06
    compute_length: float = 1.5
    exchange: float = 0.12
    exchange_length: float = 1.5
    other_regime: float = 0.5
    other_exchange: float = 0.7
    layout: float = 0.06
    noise_compute: float = 0.02
    noise_exchange: float = 0.10
    of_compute: float = 0.2
    of_exchange: float = 0.25

    @property
    def as_noise(self) -> Spread:
        """The spread with all residuals of the equations taken for noise."""
        return replace(
            self,
            noise_compute=math.hypot(self.noise_compute, self.compute),
            noise_exchange=math.hypot(self.noise_exchange, self.exchange, self.layout),
        )

    def scaled(self, *, compute: float, exchange: float, layouts: float) -> Spread:
        """Return a copy with some deviations multiplied; ``compute`` itself, the job's own, stays.

        Args:
            compute: factor on ``noise_compute``.
            exchange: factor on ``noise_exchange``.
            layouts: factor on ``exchange`` and ``layout``.
        """
        return replace(
            self,
            exchange=self.exchange * layouts,
            layout=self.layout * layouts,
            noise_compute=self.noise_compute * compute,
            noise_exchange=self.noise_exchange * exchange,
        )


SPREAD = Spread()

SCALE_ROWS = 20.0
"""The prior of a cluster's noise, in rows that it is worth; and of how far its layouts differ, in layouts."""

TAIL = 4.0
"""Degrees of freedom of the noise, and of what sets a layout apart (Student's t): neither a disturbed run nor a launch
on congested machines must bend the model. Where the layout that hetopt probed first is ten times as slow, the median
error of the others is 5 to 34 % on the public sets, with normal layouts 100 to 608 % (`benchmarks.prediction`). One
that is three times as slow is still followed, as it may be a regime that the small layouts do not show."""


def switched_contention() -> float:
    """Return the prior of how much GPUs that a switch joins slow each other, as a fraction of compute time."""
    contention = SWITCHED["contention"].mean
    assert contention is not None
    return math.exp(contention)


def beside_others(gpus: int) -> float:
    """Return a step's time on each of ``gpus`` GPUs that a switch joins, relative to one alone; without exchange."""
    straggling = PRIORS["straggling"].mean
    assert straggling is not None
    crowded = 1 + switched_contention() * (1 - 1 / gpus)
    return crowded * (1 + math.exp(straggling) * float(expected_maximum(gpus)))


JITTER = 1e-6
"""Relative, so that the matrices of near points can be inverted."""

Point = tuple[int, int]
"""A machine type, by its number among the model's, and the log of a local batch size, see `Rows.points`."""


def compute_covariance(left: Sequence[Point], right: Sequence[Point], spread: Spread) -> Array:
    """Return the prior covariance of residuals of log computation, [left, right]; types are independent.

    Within a type it is ``spread.compute**2 * exp(-d**2 / 2)`` at ``d`` lengths of log batch size apart.
    """
    a, b = np.array(left, dtype=np.float64).reshape(-1, 2), np.array(right, dtype=np.float64).reshape(-1, 2)
    distance = (a[:, 1][:, None] - b[:, 1][None]) * math.log(2) / PITCH / spread.compute_length
    same_type = a[:, 0][:, None] == b[:, 0][None]
    return np.asarray(spread.compute**2 * np.exp(-0.5 * distance**2) * same_type, dtype=np.float64)


def exchange_covariance(left: Sequence[Layout], right: Sequence[Layout], spread: Spread) -> Array:
    """Return the prior covariance of residuals of log exchange, [left, right], each layout's own part included.

    Near layouts are alike, less so in another regime (one, two or more machines) or through another compressor.
    """
    a, b = (np.array([layout.coordinates for layout in side]).reshape(-1, 3) for side in (left, right))
    square = (((a[:, None, :] - b[None, :, :]) / spread.exchange_length) ** 2).sum(axis=2)
    regimes = [np.array([min(len(layout.machines), 3) for layout in side]) for side in (left, right)]
    regime = np.where(regimes[0][:, None] == regimes[1][None], 1.0, spread.other_regime)
    numbers: dict[object, int] = {}
    kinds = [
        np.array([numbers.setdefault(layout.exchange, len(numbers)) for layout in side], dtype=np.intp)
        for side in (left, right)
    ]
    kind = np.where(kinds[0][:, None] == kinds[1][None], 1.0, spread.other_exchange)
    covariance = spread.exchange**2 * np.exp(-0.5 * square) * regime * kind
    place = {layout: index for index, layout in enumerate(right)}
    for index, layout in enumerate(left):
        if layout in place:
            covariance[index, place[layout]] += spread.layout**2
    return np.asarray(covariance, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Measured points and layouts, and the inverse prior covariances of the equations' residuals there.

    Attributes:
        points: machine types with batch sizes at which computation has residuals.
        layouts: layouts at which exchange has residuals.
        spread: deviations and lengths of the residuals.
        doubt: factor on the variance ``spread.layout ** 2`` of each layout's own residual; large for odd launches.
        compute_inverse, exchange_inverse: inverse covariances, [points, points] and [layouts, layouts].
    """

    points: tuple[Point, ...]
    layouts: tuple[Layout, ...]
    spread: Spread
    doubt: Array
    compute_inverse: Array
    exchange_inverse: Array

    @classmethod
    def at(
        cls, points: Sequence[Point], layouts: Sequence[Layout], spread: Spread, doubt: Array | None = None
    ) -> Latents:
        """Return the prior of the residuals at these points and layouts, before any measurement.

        Args:
            points: machine types with batch sizes at which computation has residuals.
            layouts: layouts at which exchange has residuals.
            spread: standard deviations and lengths of the residuals.
            doubt: as the attribute; None: 1 for all layouts.
        """
        doubt = np.ones(len(layouts)) if doubt is None else doubt
        compute = compute_covariance(points, points, spread)
        exchange = exchange_covariance(layouts, layouts, spread) + np.diag((doubt - 1) * spread.layout**2)
        return cls(
            doubt=doubt,
            points=tuple(points),
            layouts=tuple(layouts),
            spread=spread,
            compute_inverse=_inverse(compute),
            exchange_inverse=_inverse(exchange),
        )

    def __len__(self) -> int:
        return len(self.points) + len(self.layouts)

    def compute_at(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Return weights, [points, known], by which known residuals predict others, and variances left, [points]."""
        cross = compute_covariance(points, self.points, self.spread)
        weights = cross @ self.compute_inverse
        return weights, np.maximum(self.spread.compute**2 - (weights * cross).sum(axis=1), 0.0)

    def exchange_at(self, layouts: Sequence[Layout]) -> tuple[Array, Array]:
        """Return weights, [layouts, known], by which known residuals predict others, and variances left, [layouts]."""
        cross = exchange_covariance(layouts, self.layouts, self.spread)
        weights = cross @ self.exchange_inverse
        prior = self.spread.exchange**2 + self.spread.layout**2
        return weights, np.maximum(prior - (weights * cross).sum(axis=1), 0.0)


def _inverse(covariance: Array) -> Array:
    """Return the inverse of a covariance matrix, after adding `JITTER` times its first entry to the diagonal."""
    size = len(covariance)
    scale = float(covariance[0, 0]) if size else 0.0
    return np.asarray(np.linalg.inv(covariance + JITTER * scale * np.eye(size)), dtype=np.float64)
