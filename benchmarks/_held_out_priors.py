"""Priors of the step model from other folders of step times alone, so that a folder is scored by what it never shaped.

Each of the other folders is fitted whole under flat priors. A parameter's prior is the random-effects mean of those
fits (DerSimonian and Laird 1986). Jobs on one cluster depend on each other, so their variance counts as seen between
clusters, and the flat prior's variance as one more cluster: two that are alike do not tell what a third is like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks._step_traces import Samples
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.physics import SHARED, Array
from hetopt.optimizer.step_time.posterior import Posterior, fit
from hetopt.optimizer.step_time.priors import PRIORS, Normal

# Shares are anywhere between nothing and all (`relief`, `host_sharing`). Messages inside a machine take 10 us over a
# switch to 10 ms through the sockets of a busy host, all buckets of a gradient together.
FLAT: Mapping[str, Normal] = {
    **PRIORS,
    **{
        name: replace(PRIORS[name], mean=mean, sd=sd)
        for name, (mean, sd) in {
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
        }.items()
    },
}


def fitted_whole(rows: Mapping[str, Samples], fixed: Mapping[str, Normal] | None = None) -> dict[str, Posterior]:
    """Return posteriors of all rows of each folder under flat priors, but for those that are ``fixed``."""
    return {
        folder: fit(observe(samples), priors={**FLAT, **(fixed or {})}, classes=()) for folder, samples in rows.items()
    }


def learned_priors(fits: Mapping[str, Posterior]) -> dict[str, Normal]:
    """Return priors of the step model by parameter, pooled over fits under `FLAT` by folder, ``JOB-CLUSTER``."""
    clusters = len({folder.split("-")[1] for folder in fits})
    priors = dict(PRIORS)
    for index, name in enumerate(SHARED):
        if FLAT[name] is not PRIORS[name]:
            modes = np.array([fit.mode[index] for fit in fits.values()])
            variances = np.array([fit.covariance[index, index] for fit in fits.values()])
            priors[name] = _pooled(modes, variances, FLAT[name], clusters)
    return priors


def _pooled(modes: Array, variances: Array, flat: Normal, clusters: int) -> Normal:
    """Return a parameter's prior from its posterior modes and variances by folder; ``flat`` if no folder tells it."""
    assert flat.mean is not None
    information = 1 / variances - flat.sd**-2
    informed = information >= 1e-3
    if not informed.any():
        return flat
    # What one folder's samples imply: its posterior without the flat prior.
    variance = 1 / information[informed]
    seen = variance * (modes / variances - flat.mean / flat.sd**2)[informed]
    between, middle, weights = flat.sd**2, flat.mean, np.ones(len(seen))
    for _ in range(50):
        weights = 1 / (variance + between)
        middle = float(weights @ seen / weights.sum())
        moments = max(float((weights**2) @ ((seen - middle) ** 2 - variance) / (weights**2).sum()), 0.0)
        between = (flat.sd**2 + (clusters - 1) * moments) / clusters
    precision, flat_precision = 1 / (between + 1 / float(weights.sum())), flat.sd**-2
    total = precision + flat_precision
    return replace(flat, mean=(middle * precision + flat.mean * flat_precision) / total, sd=float(total**-0.5))
