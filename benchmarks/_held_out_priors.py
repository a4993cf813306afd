"""Priors of the step model taken from other data only, by rule, so that a folder is scored by what it never shaped.

Each of the other folders is fitted whole under flat priors. A parameter's prior is then the random-effects mean of
those fits (DerSimonian and Laird 1986). Jobs on one cluster are not independent of each other, so that what their
variance says counts as seen between clusters, and the flat prior's variance as one more cluster: two that are alike do
not tell what a third is like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.step_time.physics import SHARED
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.priors import PRIORS, Normal

SCALES = ("network", "rest")
"""Not a shape of the equations: the job's own scale, and what is left over."""

# Shares are anywhere between nothing and all (`relief`, `host_sharing`). Messages inside a machine take 10 us over a
# switch to 10 ms through the sockets of a busy host, all buckets of a gradient together.
_FLAT = {
    "contention": (-3.0, 2.0),
    "straggling": (-4.0, 1.5),
    "forward": (0.0, 2.0),
    "overlap": (1.0, 1.5),
    "host_ratio": (-0.7, 1.5),
    "relief": (0.5, 0.3),
    "host_latency": (-8.0, 2.0),
    "network_latency": (-9.0, 1.5),
    "host_sharing": (0.5, 0.5),
    "network_growth": (-3.0, 1.5),
}
FLAT: Mapping[str, Normal] = {
    **PRIORS,
    **{name: Normal(mean=mean, sd=sd, about=PRIORS[name].about) for name, (mean, sd) in _FLAT.items()},
}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    mean: float
    variance: float


def learned_priors(fits: Mapping[str, Posterior]) -> dict[str, Normal]:
    """Return priors from fits under `FLAT`, which are given by the name of their folder: job and cluster."""
    priors = dict(PRIORS)
    clusters = len({folder.split("-")[1] for folder in fits})
    for index, name in enumerate(SHARED):
        if name in SCALES:
            continue
        flat = FLAT[name]
        assert flat.mean is not None
        seen = [estimate for fit in fits.values() if (estimate := _alone(fit, index, flat.mean, flat.sd)) is not None]
        priors[name] = _pooled(seen, flat, clusters) if seen else flat
    return priors


def _alone(fit: Posterior, index: int, mean: float, sd: float) -> _Seen | None:
    """Return the mean and variance that one folder's samples imply: its posterior without the flat prior."""
    variance = float(fit.covariance[index, index])
    information = 1 / variance - 1 / sd**2
    if information < 1e-3:
        return None
    return _Seen(mean=(float(fit.mode[index]) / variance - mean / sd**2) / information, variance=1 / information)


def _pooled(seen: Sequence[_Seen], flat: Normal, clusters: int) -> Normal:
    means, variances = (
        np.array([estimate.mean for estimate in seen]),
        np.array([estimate.variance for estimate in seen]),
    )
    assert flat.mean is not None
    between, middle, weights = flat.sd**2, flat.mean, np.ones(len(seen))
    for _ in range(50):
        weights = 1 / (variances + between)
        middle = float(weights @ means / weights.sum())
        moments = max(float((weights**2) @ ((means - middle) ** 2 - variances) / (weights**2).sum()), 0.0)
        between = (flat.sd**2 + (clusters - 1) * moments) / clusters
    variance = between + 1 / float(weights.sum())
    precision, flat_precision = 1 / variance, flat.sd**-2
    total = precision + flat_precision
    return Normal(
        mean=(middle * precision + flat.mean * flat_precision) / total, sd=float(total**-0.5), about=flat.about
    )
