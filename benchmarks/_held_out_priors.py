"""Priors of the step model taken from other data only, by rule, so that a folder is scored by what it never shaped.

Each of the other folders is fitted whole under flat priors. A parameter's prior is then the random-effects mean of
those fits (DerSimonian and Laird 1986), with their spread, widened by half because few folders are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.step_time.physics import SHARED
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.priors import PRIORS, Normal

WIDENED = 1.5
SCALES = ("network", "rest")
"""Not a shape of the equations: the job's own scale, and what is left over."""

_FLAT = {
    "contention": (-3.0, 2.0),
    "straggling": (-4.0, 1.5),
    "forward": (0.0, 2.0),
    "overlap": (1.0, 1.5),
    "host_ratio": (-0.7, 1.5),
    "relief": (0.0, 0.5),
    "host_latency": (-10.4, 1.5),
    "network_latency": (-9.0, 1.5),
    "host_growth": (-3.0, 1.5),
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


def learned_priors(fits: Sequence[Posterior]) -> dict[str, Normal]:
    """Priors from fits under `FLAT`."""
    found = dict(PRIORS)
    for index, name in enumerate(SHARED):
        if name in SCALES:
            continue
        flat = FLAT[name]
        assert flat.mean is not None
        seen = [one for fit in fits if (one := _alone(fit, index, flat.mean, flat.sd)) is not None]
        found[name] = _pooled(seen, flat) if seen else flat
    return found


def _alone(fit: Posterior, index: int, mean: float, sd: float) -> _Seen | None:
    """What the samples of one folder say by themselves: its posterior with the flat prior taken out again."""
    variance = float(fit.covariance[index, index])
    information = 1 / variance - 1 / sd**2
    if information < 1e-3:
        return None
    return _Seen(mean=(float(fit.mode[index]) / variance - mean / sd**2) / information, variance=1 / information)


def _pooled(seen: Sequence[_Seen], flat: Normal) -> Normal:
    means, variances = np.array([one.mean for one in seen]), np.array([one.variance for one in seen])
    between, middle, weights = 0.01, 0.0, np.ones(len(seen))
    for _ in range(50):
        weights = 1 / (variances + between)
        middle = float(weights @ means / weights.sum())
        between = max(float((weights**2) @ ((means - middle) ** 2 - variances) / (weights**2).sum()), 0.0004)
    spread = WIDENED * float(np.sqrt(between + 1 / weights.sum()))
    assert flat.mean is not None
    precision, flat_precision = spread**-2, flat.sd**-2
    total = precision + flat_precision
    return Normal(
        mean=(middle * precision + flat.mean * flat_precision) / total, sd=float(total**-0.5), about=flat.about
    )
