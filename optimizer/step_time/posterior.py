"""Bayesian fit of the step model to measured steps: the most probable parameters, and how well they are known.

Maximum a posteriori by Levenberg and Marquardt, with Laplace's approximation around it (MacKay 1992). Noise is
Student's t, so that a disturbed run is discounted instead of followed; its scale is the cluster's, learned with the
rest. Parameters that the samples do not identify stay at their prior, and keep its width. `Shape` has those that a
job's steps share on all machines in natural units, to price many clusters at once or one run on known hosts.

Own code because its steps use what the problem is: rows touch one point and one layout each, and noise depends on what
is learned. `scipy.optimize.minimize` comes to the same peaks (a test looks whether it finds higher ones) in 50 to 200
times the time, 3 to 13 seconds a fit, and `least_squares` takes neither such noise nor a Gaussian process as prior.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from hetopt.core.comm.cost import UNDER_BACKWARD, last_bucket_share
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.step_time.observed import Channel, Observed, channels, median_s
from hetopt.optimizer.step_time.physics import FARTHEST_RATIO, SHARED, Array, Coordinates
from hetopt.optimizer.step_time.priors import (
    FIXED_SD,
    LINK_CLASSES,
    PRIORS,
    SCALE_ROWS,
    SPREAD,
    TAIL,
    Latents,
    Normal,
    Spread,
)
from hetopt.optimizer.step_time.step_time import NO_OVERLAP, Overlap

STARTS: tuple[Mapping[str, float], ...] = ({"forward": -0.8}, {"forward": 2.0})
"""Hidden and unhidden exchange are two hills: samples of few layouts do not always lead over."""

FIXED_SHARE = 0.19
"""Of a step on one GPU, the part that no sample takes: how throughput follows the batch size over the public
measurements that `gpu_transfer` is fitted to (0.19, by job 0.16 more or less)."""

FIXED_SHARE_SD = 1.15
"""Of the logs of both parts: a step of four times the samples is then as uncertain as it is there."""

SLOWEST_MESSAGE_S = 10e-3
"""Inside a node, in at most 95 of 100 machines: from 10 us over a link to 10 ms through sockets of a busy host is what
is believed before anything is measured."""

_LATENCY = SHARED.index("host_latency")

MOST_ITERATIONS = 40
MOST_TRIES = 4
MOST_SCALINGS = 3
LONGEST_STRIDE = 1.5
ENOUGH = 0.01
"""Of log likelihood: what is still to be gained then moves no prediction."""


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Fitted parameters and residuals of the step model, with their covariance.

    Attributes:
        observed: measured steps that the model was fitted to.
        where: positions of the parameters in ``mode``.
        latents: points and layouts whose residuals are fitted.
        mode: the most probable parameters, then residuals at the points and at the layouts of ``latents``.
        covariance: covariance matrix of ``mode``.
        prior_mean, prior_sd: prior of each parameter.
        compression_mean, compression_sd: prior of the log of what a compressor takes that was not measured.
        log_evidence: log of the probability of the samples under the priors, by Laplace's approximation.
    """

    observed: Observed
    where: Coordinates
    latents: Latents
    mode: Array
    covariance: Array
    prior_mean: Array
    prior_sd: Array
    compression_mean: float
    compression_sd: float
    log_evidence: float

    @property
    def parameters(self) -> Array:
        """Posterior mode of the parameters alone, in the order of ``where``."""
        return self.mode[: len(self.where)]

    def learned(self, name: str) -> float:
        """Return the part, 0 to 1, of a shared parameter's prior variance that the samples removed."""
        index = SHARED.index(name)
        return 1 - min(1.0, float(self.covariance[index, index]) / float(self.prior_sd[index]) ** 2)

    @cached_property
    def slowest_message_s(self) -> float:
        """The longest seconds of a message inside a node that the samples allow, whatever the prior.

        At most `SLOWEST_MESSAGE_S`. By profile likelihood (Venzon and Moolgavkar 1988): everything else is fitted anew
        at each latency, until the samples are less likely by half a squared normal quantile. The covariance overstates
        it where messages take next to nothing at the mode.
        """
        log_s, most, fall = float(self.mode[_LATENCY]), math.log(SLOWEST_MESSAGE_S), Z90**2 / 2
        here = _with_latency(self, log_s, self.mode)
        least = here.loss
        while log_s < most:
            slower = min(most, log_s + math.log(2))
            there = _with_latency(self, slower, here.mode)
            least = min(least, there.loss)
            if there.loss - least > fall:
                part = max(0.0, fall - (here.loss - least)) / (there.loss - here.loss)
                return math.exp(log_s + part * (slower - log_s))
            log_s, here = slower, there
        return SLOWEST_MESSAGE_S


def fit(
    observed: Observed,
    *,
    priors: Mapping[str, Normal] = PRIORS,
    classes: Sequence[Mapping[str, Normal]] = LINK_CLASSES,
    spread: Spread = SPREAD,
) -> Posterior:
    """Fit the step model to measured steps under each class of links, and return the fit with the most evidence.

    Args:
        observed: measured steps.
        priors: prior of each parameter, by its name.
        classes: each replaces some of ``priors`` by those of one kind of links inside a machine. Where no machine had
            two workers, several classes cannot be told apart, and only ``priors`` are used.
        spread: deviations of residuals and noise to begin with.
    """
    if len(classes) > 1 and (observed.rows.crowd <= 1).all():
        classes = ()
    fits = [_fit(observed, {**priors, **links}, spread) for links in classes or ({},)]
    return max(fits, key=lambda posterior: posterior.log_evidence)


def _fit(observed: Observed, priors: Mapping[str, Normal], spread: Spread) -> Posterior:
    """Fit the step model to measured steps under given priors, and the scales of noise and residuals with it."""
    rows = observed.rows
    where = Coordinates(types=len(rows.types), compressors=len(rows.compressors))
    mean, sd = _priors(observed, where, priors)
    among = partial(_problem, observed, where, mean, sd)
    compute_noise = exchange_noise = layouts = 1.0
    # First the parameters alone, everything left over being noise: quick, and it tells which hill is the higher.
    alone = among(Latents.at(rows.points, rows.layouts, spread.as_noise))
    starts = STARTS if np.isfinite(observed.log_step).any() else ({},)  # who measured no exchange sees one hill
    foot = min(
        (_climb(alone, _start(alone, start), free=len(where)) for start in starts),
        key=lambda peak: peak.loss,
    )
    problem = among(Latents.at(rows.points, rows.layouts, spread, _first_doubt(foot, len(rows.layouts), spread)))
    best = _climb(problem, foot.mode)
    for _ in range(MOST_SCALINGS):
        covariance = _covariance(problem, best)
        factors = (*_noise_factors(problem, best, covariance), _layout_factor(problem, best, covariance))
        compute_noise, exchange_noise = compute_noise * factors[0], exchange_noise * factors[1]
        layouts *= factors[2]
        scaled = spread.scaled(compute=compute_noise, exchange=exchange_noise, layouts=layouts)
        problem = among(Latents.at(rows.points, rows.layouts, scaled, _doubt(problem, best, covariance)))
        best = _climb(problem, best.mode)
        if max(abs(math.log(factor)) for factor in factors) < 0.05:
            break
    covariance = _covariance(problem, best)
    return Posterior(
        observed=observed,
        where=where,
        latents=problem.latents,
        mode=best.mode,
        covariance=covariance,
        log_evidence=(np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(problem.precision)[1]) / 2 - best.loss,
        prior_mean=mean,
        prior_sd=sd,
        compression_mean=_scales(observed)["compression"],
        compression_sd=priors["compression"].sd,
    )


def _with_latency(model: Posterior, log_s: float, start: Array) -> _Peak:
    """Return the peak nearest to ``start`` with the log latency inside a node held at ``log_s``."""
    mean, sd, mode = model.prior_mean.copy(), model.prior_sd.copy(), start.copy()
    mean[_LATENCY], sd[_LATENCY], mode[_LATENCY] = log_s, FIXED_SD, log_s
    return _climb(_problem(model.observed, model.where, mean, sd, model.latents), mode)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Samples, and the mean and precision of the prior of parameters, then of residuals at points and layouts."""

    observed: Observed
    where: Coordinates
    latents: Latents
    mean: Array
    precision: Array


@dataclass(frozen=True, kw_only=True)
class _Peak:
    """Values of parameters and residuals, their loss, and the samples linearised there; a peak after `_climb`."""

    mode: Array
    loss: float
    channels: tuple[Channel, ...]


def _priors(observed: Observed, where: Coordinates, priors: Mapping[str, Normal]) -> tuple[Array, Array]:
    """Return the prior mean and standard deviation of each parameter, in the order of ``where``.

    Of types measured at one batch size alone, fixed time is a share of the step (see `_one_batch_size`).
    """
    scale = _scales(observed)
    names = [*SHARED]
    for name, count in (
        ("fixed", where.types),
        ("per_sample", where.types),
        ("link", where.types),
        ("compression", where.compressors),
    ):
        names += [name] * count
    means = [scale[name] if (mean := priors[name].mean) is None else mean for name in names]
    sds = [priors[name].sd for name in names]
    sds[where.link.start] = FIXED_SD
    middles, deviations = np.array(means), np.array(sds)
    for index, (log_compute, log_batch) in _one_batch_size(observed).items():
        middles[where.fixed.start + index] = log_compute + math.log(FIXED_SHARE)
        middles[where.per_sample.start + index] = log_compute + math.log(1 - FIXED_SHARE) - log_batch
        deviations[[where.fixed.start + index, where.per_sample.start + index]] = FIXED_SHARE_SD
    return middles, deviations


def _one_batch_size(observed: Observed) -> dict[int, tuple[float, float]]:
    """Return (log seconds of computing, log batch size) by index of each type measured at one size by lone workers.

    Such steps do not tell fixed time from that of samples; public measurements of other jobs (`FIXED_SHARE`) do.
    """
    rows = observed.rows
    alone = rows.workers[rows.group_row] == 1
    computing = np.where(np.isfinite(observed.log_compute), observed.log_compute, observed.log_step)[rows.group_row]
    by_type = {}
    for index in range(len(rows.types)):
        of_type = rows.group_type == index
        if (
            of_type.any()
            and alone[of_type].all()
            and np.ptp(rows.group_batch[of_type]) == 0
            and np.isfinite(computing[of_type]).all()
        ):
            by_type[index] = statistics.median(computing[of_type].tolist()), float(np.log(rows.group_batch[of_type][0]))
    return by_type


def _scales(observed: Observed) -> dict[str, float]:
    """Return the prior means, logs of seconds, of the parameters that scale with the job, by fractions of its step."""
    compute_s = median_s(observed.log_compute, observed.log_step)
    step_s = median_s(observed.log_step, observed.log_compute)
    return {
        "network": math.log(step_s / 3),
        "fixed": math.log(compute_s / 4),
        "per_sample": math.log(compute_s / 2 / observed.typical_batch),
        "compression": math.log(compute_s / 5),
    }


def _problem(observed: Observed, where: Coordinates, mean: Array, sd: Array, latents: Latents) -> _Problem:
    """Return the samples with their prior: ``mean`` and ``sd`` of parameters, then that of the residuals."""
    parameters, points = len(where), len(latents.points)
    size = parameters + len(latents)
    precision = np.zeros((size, size))
    precision[:parameters, :parameters] = np.diag(sd**-2.0)
    precision[parameters : parameters + points, parameters : parameters + points] = latents.compute_inverse
    precision[parameters + points :, parameters + points :] = latents.exchange_inverse
    middle = np.concatenate([mean, np.zeros(len(latents))])
    return _Problem(observed=observed, where=where, latents=latents, mean=middle, precision=precision)


def _start(problem: _Problem, where: Mapping[str, float]) -> Array:
    """Return the prior mean of everything that is fitted, with some shared parameters at given values."""
    start = problem.mean.copy()
    for name, value in where.items():
        start[SHARED.index(name)] = value
    return start


def _normal(problem: _Problem, channels: tuple[Channel, ...]) -> tuple[Array, Array]:
    """Return the precision matrix of the linearised problem, and the samples' gradient of the log likelihood."""
    parameters, points, layouts = len(problem.where), len(problem.latents.points), len(problem.latents.layouts)
    matrix, gradient = problem.precision.copy(), np.zeros(len(problem.mean))
    of_points, of_layouts = slice(parameters, parameters + points), slice(parameters + points, None)
    for channel in channels:
        weight = channel.weight
        by_parameter, pulled = channel.derivatives(), weight * channel.residual
        matrix[:parameters, :parameters] += by_parameter.T @ (by_parameter * weight[:, None])
        gradient[:parameters] += by_parameter.T @ pulled
        for places, index, count, by in (
            (of_points, channel.point, points, channel.by_compute),
            (of_layouts, channel.layout, layouts, channel.by_exchange),
        ):
            cross = np.zeros((count, parameters))
            np.add.at(cross, index, by_parameter * (weight * by)[:, None])
            matrix[places, :parameters] += cross
            matrix[:parameters, places] += cross.T
            matrix[places, places] += np.diag(np.bincount(index, weight * by**2, count))
            gradient[places] += np.bincount(index, pulled * by, count)
        both = np.zeros((points, layouts))
        np.add.at(both, (channel.point, channel.layout), weight * channel.by_compute * channel.by_exchange)
        matrix[of_points, of_layouts] += both
        matrix[of_layouts, of_points] += both.T
    return matrix, gradient


def _climb(problem: _Problem, mode: Array, free: int | None = None) -> _Peak:
    """Climb to the nearest peak by Levenberg's damped Gauss-Newton, from ``mode``, and return it.

    The climb ends where a step gains little, or after `MOST_ITERATIONS`.

    Args:
        problem: samples and prior.
        mode: mode to begin at; not changed.
        free: how many leading entries of ``mode`` move; None: all.
    """
    parameters = len(problem.where)
    here, damping = _peak(problem, mode), 1e-2
    for _ in range(MOST_ITERATIONS):
        matrix, gradient = _normal(problem, here.channels)
        gradient -= problem.precision @ (here.mode - problem.mean)
        for _ in range(MOST_TRIES):
            damped = matrix[:free, :free] + damping * np.diag(np.diag(matrix)[:free])
            stride = np.zeros(len(gradient))
            stride[:free] = np.linalg.solve(damped, gradient[:free])
            stride[:parameters] = np.clip(stride[:parameters], -LONGEST_STRIDE, LONGEST_STRIDE)
            if float(gradient @ stride) < ENOUGH:
                return here
            there = _peak(problem, here.mode + stride)
            if there.loss < here.loss:
                break
            damping *= 10
        else:
            return here
        gained, here, damping = here.loss - there.loss, there, max(damping / 10, 1e-6)
        if gained < ENOUGH:
            return here
    return here


def _peak(problem: _Problem, mode: Array) -> _Peak:
    """Return ``mode`` with its loss (minus the log posterior) and the samples linearised there."""
    linearised = channels(problem.observed, problem.where, problem.latents, mode)
    away = mode - problem.mean
    loss = sum(channel.loss for channel in linearised) + 0.5 * float(away @ problem.precision @ away)
    return _Peak(mode=mode, loss=loss, channels=linearised)


def _covariance(problem: _Problem, peak: _Peak) -> Array:
    return np.asarray(np.linalg.inv(_normal(problem, peak.channels)[0]), dtype=np.float64)


def _first_doubt(foot: _Peak, layouts: int, spread: Spread) -> Array:
    """Return `Latents.doubt`, [layouts], by the residual that a layout's rows share at a fit of parameters alone.

    A climb that begins without it follows a congested launch, and then finds nothing odd in that.
    """
    channel = foot.channels[0]
    precision = channel.by_exchange**2 / channel.variance
    known = np.bincount(channel.layout, precision, layouts) + 1 / (spread.exchange**2 + spread.layout**2)
    pulled = channel.residual * channel.by_exchange / channel.variance
    common = np.bincount(channel.layout, pulled, layouts) / known
    squares = np.maximum(common**2 - spread.exchange**2, spread.layout**2)
    return np.asarray((TAIL + squares / spread.layout**2) / (TAIL + 1))


def _doubt(problem: _Problem, peak: _Peak, covariance: Array) -> Array:
    """Return `Latents.doubt`, [layouts]: the expectation step of Student's t for each layout's own residual."""
    latents, count = problem.latents, len(problem.latents.layouts)
    apart = latents.doubt * latents.spread.layout**2
    weights = apart[:, None] * latents.exchange_inverse
    variance = apart * (1 - np.diag(weights)) + ((weights @ covariance[-count:, -count:]) * weights).sum(axis=1)
    squares = (weights @ peak.mode[-count:]) ** 2 + np.maximum(variance, 0.0)
    return np.asarray((TAIL + squares / latents.spread.layout**2) / (TAIL + 1))


def _layout_factor(problem: _Problem, peak: _Peak, covariance: Array) -> float:
    """Return the factor on the prior scatter of layouts' exchanges, shrunk to 1 by `SCALE_ROWS` layouts.

    The step of expectation maximisation for the scale of a Gaussian process (Dempster et al. 1977). Rows of one layout
    say nothing of it, however many they are and however alike: they share what sets the layout apart.
    """
    count = len(problem.latents.layouts)
    left, inverse = peak.mode[-count:], problem.latents.exchange_inverse
    squares = float(left @ inverse @ left) + float((inverse * covariance[-count:, -count:]).sum())
    return math.sqrt((SCALE_ROWS + squares) / (SCALE_ROWS + count))


def _noise_factors(problem: _Problem, peak: _Peak, covariance: Array) -> tuple[float, float]:
    """Return the factors on the prior noise of computing and exchanging, each shrunk to 1 by `SCALE_ROWS` rows.

    Both are 1 where no whole step was measured. Squared residuals are capped at nine (three deviations), divided by the
    degrees of freedom that the fit left, and split between both factors by their parts of the row's variance.
    """
    sizes = len(problem.where), len(problem.latents.points), len(problem.latents.layouts)
    if not np.isfinite(problem.observed.log_step).any():
        return 1.0, 1.0
    channel = peak.channels[0]
    derivatives = channel.dense(*sizes)
    leverage = ((derivatives @ covariance) * derivatives).sum(axis=1) * channel.weight
    left = np.clip(1 - leverage, 0.05, 1.0)
    squares = np.minimum(channel.residual**2 / channel.variance, 9.0)
    exchanging = (problem.latents.spread.noise_exchange * channel.by_exchange) ** 2 / channel.variance
    compute, exchange = (
        math.sqrt((SCALE_ROWS + float(part @ squares)) / (SCALE_ROWS + float(part @ left)))
        for part in (1 - exchanging, exchanging)
    )
    return compute, exchange


@dataclass(frozen=True, kw_only=True)
class Known:
    """Estimate with its standard deviation: of its log, or of the logit of a share, unless said otherwise."""

    value: float
    sd: float


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Parameters that a job's steps share on all machines, such as jitter, contention, overlap and network growth.

    Attributes:
        straggling: relative standard deviation of a worker's single steps.
        contention: how much slower a worker of a full machine is than one alone.
        forward: share of the computation that is over before an exchange can begin.
        power: how well the rest hides the exchange; its ``sd`` is that of ln (power - 1).
        network_growth: what each doubling of workers adds to the bytes' time between machines, as a fraction.
        host_sharing: power of (workers / 2) by which a hop inside a machine slows as all exchange; ``sd`` is its own.
        relief: bandwidth between three or more machines over that between two.
        gradient_bytes: bytes of a dense exchange.
    """

    straggling: Known
    contention: Known
    forward: Known
    power: Known
    network_growth: Known
    host_sharing: Known
    relief: Known
    gradient_bytes: float

    @classmethod
    def of(cls, posterior: Posterior, gradient_bytes: float) -> Shape:
        """Return the shape of a job's steps from a fitted step model; ``gradient_bytes``: of its dense exchange."""
        mode: dict[str, float] = dict(zip(SHARED, posterior.mode[: len(SHARED)].tolist(), strict=True))

        def sd(name: str) -> float:
            index = SHARED.index(name)
            return math.sqrt(float(posterior.covariance[index, index]))

        def positive(name: str) -> Known:
            return Known(value=math.exp(mode[name]), sd=sd(name))

        ratio = min(0.0, max(FARTHEST_RATIO, mode["host_ratio"]))
        return cls(
            straggling=positive("straggling"),
            contention=positive("contention"),
            forward=Known(value=1 / (1 + math.exp(-mode["forward"])), sd=sd("forward")),
            power=Known(value=1 + math.exp(mode["overlap"]), sd=sd("overlap")),
            network_growth=positive("network_growth"),
            host_sharing=Known(value=mode["host_sharing"], sd=sd("host_sharing")),
            relief=Known(
                value=math.exp(-mode["rest"] - mode["relief"] * ratio),
                sd=math.hypot(sd("rest"), ratio * sd("relief")),
            ),
            gradient_bytes=gradient_bytes,
        )

    def crowded(self, workers: int) -> float:
        """Return a worker's compute time among ``workers`` workers on its machine, relative to being alone there."""
        return 1 + self.contention.value * (1 - 1 / workers)

    def crowded_log_sd(self, workers: int) -> float:
        """Return the standard deviation of the log of `crowded`, by workers on the machine."""
        return self.contention.sd * (1 - 1 / self.crowded(workers))

    def overlap(self, compressor: str) -> Overlap:
        """Return how computing hides a compressor's exchange: `NO_OVERLAP` unless the exchange runs under backward."""
        if compressor not in UNDER_BACKWARD:
            return NO_OVERLAP
        return Overlap(forward=self.forward.value, power=self.power.value, last=last_bucket_share(self.gradient_bytes))
