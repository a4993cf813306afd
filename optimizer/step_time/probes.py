"""Which configurations are worth measuring: those that would most reduce the uncertainty of all that is asked about.

Bayesian experimental design with average predictive variance (V-optimality; Chaloner and Verdinelli 1995) instead of
the parameters' determinant (Ernest's design): what matters is how well the asked-about steps are known, and a large
layout past a change of regime tells more about those than many small ones. A probe is chosen for its single row; one
launch serves all batch sizes of its layout, so no layout is named twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.optimizer.step_time.design_matrix import Array, Index
from hetopt.optimizer.step_time.physics import SHARED
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.prediction import Linearised
from hetopt.optimizer.step_time.priors import PRIORS
from hetopt.optimizer.step_time.residual_process import compute_covariance, exchange_covariance

MOST_ROWS = 1500
"""Rows that are weighed against each other; of more, an even choice."""

PROBE_STEPS = 30
"""That a probe takes, of which the first do not count."""

OF_COMPUTE = "how computing follows the batch size"
OF_LAYOUTS = "how communication differs between layouts"
OF_SOCKETS = "how GPUs beyond a processor's are joined"
OF_TYPES = "machine types and compressors that were not measured"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A configuration worth measuring.

    Attributes:
        row: its place among the queries.
        removed: share of the average variance, beyond run-to-run noise, that its measurement is expected to remove.
        variance: that average before it, of the log of (true / predicted).
        about: what it mostly tells.
        usd: what measuring it costs; absent where prices are not known.
    """

    row: int
    removed: float
    variance: float
    about: str
    usd: float | None


def suggest(model: Posterior, asked: Linearised, count: int, usd: Sequence[float | None]) -> tuple[Probe, ...]:
    """Return the ``count`` best probes among the asked rows, in order; fewer where there are fewer layouts.

    Where all prices are known, what a probe removes is divided by what it costs; an infinite price keeps a row from
    being measured, while its uncertainty counts.
    """
    every = np.unique(np.linspace(0, len(asked.rows) - 1, min(MOST_ROWS, len(asked.rows))).round().astype(np.intp))
    derivatives, covariance, parts = _joint(model, asked, every)
    shared = derivatives @ covariance
    between = shared @ derivatives.T
    noise = asked.noise[every]
    layout = asked.rows.layout[every]
    prices = [usd[row] for row in every.tolist()]
    priced = np.array([1.0 if price is None or None in prices else price for price in prices])
    before = float(np.trace(between))
    open_ = np.array([price is None or math.isfinite(price) for price in prices])
    # How full machines are joined has no derivative where computing hides it: where it is most, one of them is first.
    sockets = asked.sockets[every]
    unseen = all_sockets = float(sockets.sum())
    full_first = unseen > before and bool((open_ & (sockets > 0)).any())
    probes: list[Probe] = []
    while len(probes) < count and open_.any() and before > 0:
        gains = (between**2).sum(axis=0) / (np.diag(between) + noise)
        full = full_first and not probes
        best = int(np.argmax(np.where(open_ & (sockets > 0) if full else open_, gains / priced, -np.inf)))
        # What the measurement would take from each part of the variance, summed over the rows.
        update = shared[best] / np.sqrt(between[best, best] + noise[best])
        update_rows = derivatives * update
        removed = {
            name: float((update_rows[:, part].sum(axis=1) * (derivatives @ update)).sum()) for name, part in parts
        }
        about = OF_SOCKETS if full else max(removed, key=lambda name: removed[name])
        update_of_sockets = unseen if sockets[best] > 0 else 0.0
        probes.append(
            Probe(
                row=int(every[best]),
                removed=(float(gains[best]) + update_of_sockets) / (before + all_sockets),
                variance=(float(np.trace(between)) + unseen) / len(every),
                about=about,
                usd=None if None in prices else prices[best],
            )
        )
        unseen -= update_of_sockets
        covariance = covariance - np.outer(update, update)
        shared = derivatives @ covariance
        between = shared @ derivatives.T
        open_ = open_ & (layout != layout[best])
    return tuple(probes)


def _joint(model: Posterior, asked: Linearised, every: Index) -> tuple[Array, Array, list[tuple[str, slice]]]:
    """Return the rows' derivatives by all unknowns that they share, the covariance of these, and their names.

    Everything unknown: the parameters, what is left over at the queries' own points and layouts (known as far as the
    measured ones are near), and relatives and compressors that were not measured.
    """
    rows, here, latents = asked.rows, asked.steps, model.latents
    parameters, points = len(model.where), len(latents.points)
    kinds = asked.reference_points
    compute_weights, _ = latents.compute_at(kinds)
    exchange_weights, _ = latents.exchange_at(rows.layouts)
    weights = np.zeros((len(kinds) + len(rows.layouts), len(latents)))
    weights[: len(kinds), :points] = compute_weights
    weights[len(kinds) :, points:] = exchange_weights
    spread = latents.spread
    left = np.zeros((len(weights), len(weights)))
    left[: len(kinds), : len(kinds)] = compute_covariance(kinds, kinds, spread) - compute_weights @ compute_covariance(
        latents.points, kinds, spread
    )
    left[len(kinds) :, len(kinds) :] = exchange_covariance(
        rows.layouts, rows.layouts, spread
    ) - exchange_weights @ exchange_covariance(latents.layouts, rows.layouts, spread)
    transform = np.zeros((parameters + len(weights), len(model.mode)))
    transform[:parameters, :parameters] = np.eye(parameters)
    transform[parameters:, parameters:] = weights
    foreign = asked.foreign[every]
    size = len(transform) + foreign.shape[1]
    covariance = np.zeros((size, size))
    covariance[: len(transform), : len(transform)] = transform @ model.covariance @ transform.T
    covariance[parameters : len(transform), parameters : len(transform)] += left
    covariance[len(transform) :, len(transform) :] = np.eye(foreign.shape[1])

    derivatives = np.zeros((len(every), size))
    derivatives[:, :parameters] = asked.by_mode[every, :parameters]
    row = np.arange(len(every))
    derivatives[row, parameters + rows.group_point[here.slowest[every]]] = here.compute_share[every]
    derivatives[row, parameters + len(kinds) + rows.layout[every]] = here.exchange_share[every]
    derivatives[:, len(transform) :] = foreign
    parts = [(PRIORS[name].about, slice(index, index + 1)) for index, name in enumerate(SHARED)]
    where = model.where
    parts += [
        (PRIORS["fixed"].about, where.fixed),
        (PRIORS["per_sample"].about, where.per_sample),
        (PRIORS["link"].about, where.link),
        (PRIORS["compression"].about, where.compression),
        (OF_COMPUTE, slice(parameters, parameters + len(kinds))),
        (OF_LAYOUTS, slice(parameters + len(kinds), len(transform))),
        (OF_TYPES, slice(len(transform), size)),
    ]
    return derivatives, covariance, parts
