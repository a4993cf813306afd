"""Step times of configurations that were never run, the parts of their variance, and which are worth measuring next.

Bayesian experimental design with average predictive variance (V-optimality; Chaloner and Verdinelli 1995) instead of
the parameters' determinant (Ernest's design): what matters is how well the asked-about steps are known, and a large
layout past a change of regime tells more about those than many small ones. A probe is chosen for its single row; one
launch serves all batch sizes of its layout, so no layout is named twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetopt.core.step_samples import IN_PRECISION, Configuration
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.step_time.observed import evaluate, noise_variance
from hetopt.optimizer.step_time.physics import SHARED, Array, Coordinates, Index, Kinds, Rows, Steps, make_rows
from hetopt.optimizer.step_time.posterior import SLOWEST_MESSAGE_S, Posterior
from hetopt.optimizer.step_time.priors import PRIORS, Point, compute_covariance, exchange_covariance
from hetopt.optimizer.step_time.tiers import LEARNED, Kinship


@dataclass(frozen=True, kw_only=True)
class Linearised:
    """Predicted steps, a row each, with their derivatives by all unknowns, and their variances.

    Attributes:
        reference_points: `Rows.points`, with measured types in place of their relatives.
        by_mode: derivatives of the log step by `Posterior.mode`, [rows, mode].
        foreign: derivatives by what was not measured, times its standard deviation, [rows, ...]: computation and links
            of each type that is only related to a measured one, then each new compressor.
        above, below: variance of the log of (true / predicted) towards longer steps, and towards shorter ones.
        noise: part of ``above`` and of ``below`` by which one run differs from another.
    """

    rows: Rows
    steps: Steps
    reference_points: tuple[Point, ...]
    by_mode: Array
    foreign: Array
    above: Array
    below: Array
    noise: Array


def predict(
    model: Posterior,
    configurations: Sequence[Configuration],
    kin: Sequence[Kinship],
    switched: Collection[str] = (),
) -> Linearised:
    """Return the predicted log step seconds of configurations, at least one, with derivatives and variances.

    Args:
        model: the fitted step model.
        configurations: what to predict.
        kin: relation to a measured type of each type that ``model`` lacks, in the order of first appearance.
        switched: names of types whose GPUs a switch joins.

    Raises:
        BadInput: an exchange of a configuration cannot be predicted, see `physics.exchange_of`.
    """
    measured = model.observed.rows
    rows = make_rows(configurations, measured.types)
    new = [name for name in rows.compressors if name not in measured.compressors]
    where = Coordinates(types=model.where.types, compressors=model.where.compressors + len(new))
    vector = np.concatenate([model.parameters, np.full(len(new), model.compression_mean)])
    kinds = _kinds(measured, rows, new, kin)
    points = [(int(kinds.reference[type_]), log_batch) for type_, log_batch in rows.points]
    compute_weights, compute_left = model.latents.compute_at(points)
    exchange_weights, exchange_left = model.latents.exchange_at(rows.layouts)
    parameters, known_points = len(model.where), len(model.latents.points)
    beside = _beside_the_line(rows, len(measured.types), kin)

    def at(mode: Array, more: Array | float = 0.0) -> tuple[Steps, Callable[[str], Array]]:
        return evaluate(
            np.concatenate([mode[:parameters], vector[parameters:]]),
            where,
            rows,
            kinds,
            compute_rest=(compute_weights @ mode[parameters : parameters + known_points])[rows.group_point] + beside,
            exchange_rest=(exchange_weights @ mode[parameters + known_points :])[rows.layout] + more,
        )

    here, by_parameter = at(model.mode)
    derivatives = by_parameter("log_step")
    point = rows.group_point[here.slowest]
    by_mode = np.concatenate(
        [
            derivatives[:, :parameters],
            compute_weights[point] * here.compute_share[:, None],
            exchange_weights[rows.layout] * here.exchange_share[:, None],
        ],
        axis=1,
    )
    foreign = _foreign(rows, here, len(measured.types), kin)
    compressed = derivatives[:, parameters:] * model.compression_sd
    # Evaluated at its end as it is, because computing may hide the exchange that was measured altogether.
    unseen = _unseen_sockets(measured, rows, kinds, switched)
    longest_s = min(SLOWEST_MESSAGE_S, THROUGH_THE_HOST * model.slowest_message_s) if unseen.any() else 0.0
    more_s = np.where(unseen, longest_s * rows.messages, 0.0)
    across = at(model.mode, np.log1p(more_s / np.exp(here.log_exchange)))[0].log_step
    longer, shorter = _from_parameters(model, by_mode, lambda mode: at(mode)[0].log_step)
    noise = noise_variance(here, model.latents.spread)
    unmeasured = (
        here.compute_share**2 * compute_left[point]
        + here.exchange_share**2 * exchange_left[rows.layout]
        + (foreign**2).sum(axis=1)
        + (compressed**2).sum(axis=1)
        + noise
    )
    sockets = ((across - here.log_step) / Z90) ** 2
    return Linearised(
        rows=rows,
        steps=here,
        reference_points=tuple(points),
        by_mode=by_mode,
        foreign=np.concatenate([foreign, compressed], axis=1),
        above=longer + sockets + unmeasured,
        below=shorter + unmeasured,
        noise=noise,
    )


SOCKET = 4
"""GPUs that one processor joins. Where no switch joins all GPUs of a machine, an exchange crosses from the fifth on
between processors, or goes through the host's memory."""

THROUGH_THE_HOST = 4.0
"""How many times as long a message may then take as the longest that samples of a socket allow: it is copied into the
host's memory and out of it, which twice as many share."""


def _unseen_sockets(measured: Rows, rows: Rows, kinds: Kinds, switched: Collection[str]) -> NDArray[np.bool_]:
    """Return for each row whether a type has more than `SOCKET` GPUs on a machine, without a switch, unmeasured so."""
    seen = np.zeros(len(measured.types), dtype=np.bool_)
    seen[measured.group_type[measured.group_crowd > SOCKET]] = True
    joined = np.array([name.partition(IN_PRECISION)[0] in switched for name in rows.types])
    known = seen[kinds.reference] | joined
    unseen = np.zeros(len(rows), dtype=np.bool_)
    unseen[rows.group_row[(rows.group_crowd > SOCKET) & ~known[rows.group_type]]] = True
    return unseen


FAR = ("network", "host_ratio", "host_latency", "host_sharing", "network_latency")
"""Parameters of links, which samples of one node, of few workers or of much computing leave wide open."""


def _from_parameters(model: Posterior, by_mode: Array, log_step: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return the variance of log steps towards longer and towards shorter ones by the fit's uncertainty, [rows] each.

    Linear around the mode, except along parameters of links in `FAR` that the samples taught little about: an exchange
    that hides behind computing has next to no derivative, and yet a network ten times slower would show. There the
    ends of the 90 % range are evaluated, with correlated parameters following.
    """
    covariance, here = model.covariance.copy(), log_step(model.mode)
    above, below = np.zeros(len(here)), np.zeros(len(here))
    for name in FAR:
        if model.learned(name) < LEARNED:
            index = SHARED.index(name)
            stride = covariance[:, index] / np.sqrt(covariance[index, index])
            ends = [(log_step(model.mode + deviations * stride) - here) / Z90 for deviations in (-Z90, Z90)]
            above += np.maximum(np.maximum(*ends), 0.0) ** 2
            below += np.minimum(np.minimum(*ends), 0.0) ** 2
            covariance -= np.outer(stride, stride)
    linear = ((by_mode @ covariance) * by_mode).sum(axis=1)
    return linear + above, linear + below


def _foreign(rows: Rows, here: Steps, measured_types: int, kin: Sequence[Kinship]) -> Array:
    """Return log steps' derivatives by computation and links of types that were not measured, [rows, 2 x len(kin)].

    Each is times the standard deviation in ``kin``, and 0 where a row does not use the type.
    """
    slowest = rows.group_type[here.slowest]
    columns = np.zeros((len(rows), 2 * len(kin)))
    for index, relative in enumerate(kin):
        computing = here.compute_share * (slowest == measured_types + index)
        columns[:, 2 * index] = computing * relative.log_sd
        columns[:, 2 * index + 1] = (
            here.exchange_share * relative.link_log_sd * rows.has_type[:, measured_types + index]
        )
    return columns


def _beside_the_line(rows: Rows, measured_types: int, kin: Sequence[Kinship]) -> Array:
    """Return the log factor on the computation of each of `Rows`' groups by `Kinship.by_batch`; 0 without one."""
    beside = np.zeros(len(rows.group_type))
    for index, relative in enumerate(kin):
        if relative.by_batch is not None:
            groups = rows.group_type == measured_types + index
            beside[groups] = relative.by_batch.log_factor(rows.group_batch[groups])
    return beside


def _kinds(measured: Rows, rows: Rows, new: Sequence[str], kin: Sequence[Kinship]) -> Kinds:
    """Return which parameters types and compressors use: measured types their own, others those of ``kin``, scaled."""
    none = np.zeros(len(measured.types))
    compressors = [*measured.compressors, *new]
    return Kinds(
        reference=np.concatenate([np.arange(len(measured.types)), [k.reference for k in kin]]).astype(np.intp),
        fixed=np.concatenate([none, [k.fixed for k in kin]]),
        per_sample=np.concatenate([none, [k.per_sample for k in kin]]),
        link=np.concatenate([none, [k.link for k in kin]]),
        compressor=np.array([compressors.index(name) for name in rows.compressors], dtype=np.intp),
    )


MOST_ROWS = 1500
"""Rows that are weighed against each other; of more, an even choice."""

PROBE_STEPS = 30
"""That a probe takes, of which the first do not count."""

OF_COMPUTE = "how computing follows the batch size"
OF_LAYOUTS = "how communication differs between layouts"
OF_TYPES = "machine types and compressors that were not measured"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Configuration worth measuring: the uncertainty that it would remove, about what, and its price.

    Attributes:
        row: index among the configurations that were asked about.
        removed: share of the mean variance, beyond run-to-run noise, that measuring this is expected to remove.
        variance: mean variance of the log of (true / predicted) over the configurations, before this probe.
        about: parameter or residual that the measurement mostly tells, in words.
        usd: price of the measurement; None: not known.
    """

    row: int
    removed: float
    variance: float
    about: str
    usd: float | None


def suggest(model: Posterior, asked: Linearised, count: int, usd: Sequence[float | None]) -> tuple[Probe, ...]:
    """Return up to ``count`` probes of the rows in ``asked``, best first, one a layout; empty: nothing to learn.

    Where all prices are known, a probe's gain is divided by its price.

    Args:
        model: the fitted step model.
        asked: predictions of the configurations.
        count: most probes.
        usd: price of each row; None: not known, and then no row's price counts. Infinite: the row is no candidate, but
            its variance counts.
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
    probes: list[Probe] = []
    while len(probes) < count and open_.any() and before > 0:
        gains = (between**2).sum(axis=0) / (np.diag(between) + noise)
        best = int(np.argmax(np.where(open_, gains / priced, -np.inf)))
        # What the measurement would take from each part of the variance, summed over the rows.
        update = shared[best] / np.sqrt(between[best, best] + noise[best])
        update_rows = derivatives * update
        removed = {
            name: float((update_rows[:, part].sum(axis=1) * (derivatives @ update)).sum()) for name, part in parts
        }
        probes.append(
            Probe(
                row=int(every[best]),
                removed=float(gains[best]) / before,
                variance=float(np.trace(between)) / len(every),
                about=max(removed, key=lambda name: removed[name]),
                usd=None if None in prices else prices[best],
            )
        )
        covariance = covariance - np.outer(update, update)
        shared = derivatives @ covariance
        between = shared @ derivatives.T
        open_ = open_ & (layout != layout[best])
    return tuple(probes)


def _joint(model: Posterior, asked: Linearised, every: Index) -> tuple[Array, Array, list[tuple[str, slice]]]:
    """Return the rows' derivatives by all unknowns, these unknowns' covariance, and names with slices of them.

    Unknown are the parameters, residuals at the rows' own points and layouts, and types and compressors that were not
    measured. ``every`` has the indices of the rows.
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
