"""The gradient noise scale: what the squared norms of unequal parts of one batch say about signal and noise.

Notation (McCandlish et al. 2018): ``G`` is the mean gradient over the data, ``V`` the trace of the covariance of one
sample's gradient. A mean over ``b`` independent samples has ``E|g|^2 = |G|^2 + V / b``. The simple noise scale
``V / |G|^2`` is the batch size, in samples, at which noise and signal are equally strong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDING = 1e-5
"""Relative error tolerated in squared norms: they are sums over many fp32 elements."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Both moments of the gradient.

    Attributes:
        gradient_variance: estimate of ``V``, the summed variance of one sample's gradient; never negative.
        gradient_square: estimate of ``|G|^2``. Unbiased, so that one noisy estimate may well be negative: clipping it
            before averaging would bias the average.
    """

    gradient_variance: float
    gradient_square: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gradient_variance) and math.isfinite(self.gradient_square)):
            raise ValueError("the moments of a gradient must be finite")
        if self.gradient_variance < 0:
            raise ValueError(f"gradient_variance cannot be negative, got {self.gradient_variance}")


def pooled_noise(groups: int, samples: int, weighted_square_norms: float, mean_square_norm: float) -> Moments:
    """Estimate both moments from one batch that was computed in groups of any sizes, by sums alone.

    With ``g_i`` the mean gradient of group ``i`` (``b_i`` samples) and ``g`` the mean over all ``B = sum b_i`` samples,

        V     = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1)
        |G|^2 = |g|^2 - V / B

    which is the between-group sum of squares of a one-way analysis of variance, hence exactly unbiased for any sizes
    (for equal ones it is the estimator of Pollux, Qiao et al. 2021). The formula for equal groups must not be used
    on unequal ones: with sizes 8, 16, 32, 96 it is 2.6 times too high. Each worker sends one scalar,
    ``sum_i b_i |g_i|^2`` over its groups.

    Args:
        groups: how many groups the batch was computed in, at least two.
        samples: samples of all groups together.
        weighted_square_norms: ``sum_i b_i |g_i|^2`` over all groups.
        mean_square_norm: ``|g|^2`` of the mean gradient over all samples.

    Raises:
        ValueError: fewer than two groups, an empty one, negative or non-finite norms, or a mean longer than its parts.
    """
    if groups < 2 or samples < groups:
        raise ValueError("noise is estimated from at least two groups of at least one sample")
    if not (0 <= weighted_square_norms < math.inf and 0 <= mean_square_norm < math.inf):
        raise ValueError("squared norms must be finite and not negative")
    between = weighted_square_norms - samples * mean_square_norm
    if between < -ROUNDING * weighted_square_norms:  # a mean is never longer than its parts are on average
        raise ValueError("the mean gradient is longer than its groups allow: were its parts weighted by their sizes?")
    variance = max(0.0, between) / (groups - 1)
    return Moments(gradient_variance=variance, gradient_square=mean_square_norm - variance / samples)


def noise_scale(moments: Moments) -> float | None:
    """``V / |G|^2`` in samples, or None while the signal cannot be told from the noise (``|G|^2 <= 0``)."""
    if moments.gradient_square <= 0:
        return None
    return moments.gradient_variance / moments.gradient_square


@dataclass(frozen=True, kw_only=True)
class SmoothedNoise:
    """Exponential moving averages of both moments, corrected for their start; the ratio is taken last.

    Averaging ratios instead is wrong by a third and more when single estimates of ``|G|^2`` are noisy.

    Attributes:
        decay: factor on the past for each new sample, in [0, 1).
        weight: total weight of the samples so far, in [0, 1): dividing by it removes the pull of the zero start.
    """

    decay: float = 0.9
    weight: float = 0.0
    variance_sum: float = 0.0
    square_sum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")

    def add(self, moments: Moments) -> SmoothedNoise:
        """The averages after one more sample."""
        fresh = 1 - self.decay
        return SmoothedNoise(
            decay=self.decay,
            weight=self.decay * self.weight + fresh,
            variance_sum=self.decay * self.variance_sum + fresh * moments.gradient_variance,
            square_sum=self.decay * self.square_sum + fresh * moments.gradient_square,
        )

    @property
    def moments(self) -> Moments:
        """The averages.

        Raises:
            ValueError: nothing was added yet.
        """
        if self.weight <= 0:
            raise ValueError("no noise sample has been added yet")
        return Moments(gradient_variance=self.variance_sum / self.weight, gradient_square=self.square_sum / self.weight)
