"""Laws of training: learning rate by batch size, gradient noise, and the extra steps that compression costs.

``G`` is the mean gradient over the data, ``V`` the trace of the covariance of one sample's gradient. A mean over ``b``
independent samples has ``E|g|^2 = |G|^2 + V / b`` (McCandlish et al. 2018); the noise scale ``V / |G|^2`` is the batch
size, in samples, at which noise and signal are equally strong. Groups of samples give an estimate (`pooled_noise`),
which is averaged over steps (`NoiseCurve`).

Gradients that are held back cost steps by one law, for planning and training. Once gains have settled, a step sends as
much energy as is new in it, if gradients are mostly noise; so what is held back has 1 / gain - 1 times the energy of a
gradient, and the root of that is how far the model is from where dense training would have it, in steps. Analyses of
error feedback bound the cost by a term that grows with this distance (Karimireddy et al. 2019). How quickly the
gradient turns over it, ``a``, depends on the task: 0.11 to 0.14 for a small ResNet on CIFAR-10 from 10x to 1000x, 0.03
and less for an LSTM on WikiText-2 (batches of 128 images and of 40 windows, four workers, first 400 steps). Longer runs
cost the ResNet more: after 625 steps at 3 % it was where dense training is after about 400. Training measures ``a``
(`hetopt.trainer.policies.ratio.auto`); planning has the prior, and the pilots.

Before gains have settled a step delivers less than is new, until ``1 / gain - 1`` gradients are held back
(`backlog_after`): as many steps are missing at the end, which of a short run is most.

Rounding at random holds nothing back, and adds noise instead:

    S = S(B) (1 + c e) / s        e = q (Bn + B / n) / (Bn + B)

``q`` is the energy that rounding adds to the sum over that of the n workers' gradients, ``E|Q(g) - g|^2 / |g|^2``, and
``e``, with ``Bn = V / |G|^2``, that energy over the summed gradient's own. Where the learning rate is as high as the
noise allows, ``c`` is 1 (the best step is shorter by as much); where it is far below, noise costs next to nothing.
``s`` is what is left of the sum in its own direction, below 1 where elements are clipped before they are rounded.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pydantic import NonNegativeFloat, NonNegativeInt

from hetopt.core.artifact import Record
from hetopt.core.profile import LearningRateRule


def learning_rate_scale(rule: LearningRateRule, batch_size: int, tuned_batch_size: int) -> float:
    """Return the factor on a learning rate tuned at ``tuned_batch_size`` samples, for steps of ``batch_size`` samples.

    - ``none``: 1.
    - ``linear``: in proportion (Goyal et al. 2017, arXiv 1706.02677, with warm-up). As many samples move the parameters
      as far, as long as steps are small and noise dominates.
    - ``sqrt``: by the square root (Krizhevsky 2014, arXiv 1404.5997). The variance of the sum of steps stays the same.

    Args:
        rule: name of the rule.
        batch_size: samples of a step.
        tuned_batch_size: samples of a step at which the learning rate was tuned.
    """
    times = batch_size / tuned_batch_size
    return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[rule]


@dataclass(frozen=True, kw_only=True)
class Moments:
    """An estimate of the gradient: summed variance of one sample's gradient, and squared norm of the mean one.

    Attributes:
        gradient_variance: estimate of ``V``, the summed variance of one sample's gradient; never negative.
        gradient_square: estimate of ``|G|^2``. Unbiased, so that one noisy estimate may well be negative: clipping it
            before averaging would bias the average.
    """

    gradient_variance: float
    gradient_square: float


def pooled_noise(groups: int, samples: int, weighted_square_norms: float, mean_square_norm: float) -> Moments:
    """Estimate gradient variance and squared norm from one batch computed in two or more groups of any sizes.

    With ``g_i`` the mean gradient of group ``i`` (``b_i`` samples) and ``g`` the mean over all ``B = sum b_i`` samples,

        V     = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1)
        |G|^2 = |g|^2 - V / B

    which is the between-group sum of squares of a one-way analysis of variance, hence exactly unbiased for any sizes
    (for equal ones it is the estimator of Pollux, Qiao et al. 2021). The formula for equal groups must not be used
    on unequal ones: with sizes 8, 16, 32, 96 it is 2.6 times too high. Each worker sends one scalar,
    ``sum_i b_i |g_i|^2`` over its groups.

    Args:
        groups: number of groups that the batch was computed in, at least two.
        samples: number of samples of all groups together.
        weighted_square_norms: ``sum_i b_i |g_i|^2`` over all groups.
        mean_square_norm: ``|g|^2`` of the mean gradient over all samples.
    """
    # A mean is never longer than its parts are on average.
    variance = max(0.0, weighted_square_norms - samples * mean_square_norm) / (groups - 1)
    return Moments(gradient_variance=variance, gradient_square=mean_square_norm - variance / samples)


def noise_scale(moments: Moments) -> float | None:
    """Return the gradient noise scale ``V / |G|^2`` in samples; None: the estimate of ``|G|^2`` is not positive."""
    return None if moments.gradient_square <= 0 else moments.gradient_variance / moments.gradient_square


def step_worth(moments: Moments, batch_size: float, reference_batch_size: float) -> float:
    """Return how many steps of ``reference_batch_size`` samples one step of ``batch_size`` samples is worth.

        r = (V / B0 + |G|^2) / (V / B + |G|^2)

    the gain of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105), which is also the factor on the learning rate. A
    larger batch has 1 to the ratio of both sizes; where neither noise nor gradient shows, it is 1.

    Args:
        moments: noise and length of the gradient.
        batch_size: B, samples of the step.
        reference_batch_size: B0, samples of the steps that are counted.
    """
    square = max(0.0, moments.gradient_square)
    squares = [moments.gradient_variance / size + square for size in (reference_batch_size, batch_size)]
    return squares[0] / squares[1] if squares[1] > 0 else 1.0


KAPPA = 2.0
"""Critical batch size over noise scale. Theory says one, to the order of magnitude (McCandlish et al. 2018).

Over public logs (Pollux artifact; the noise averaged over progress, steps of larger batch sizes from the smallest one's
run) the least mean error is at 1.6 for BERT, 1.9 for ResNet-18 on CIFAR-10 and 8 for a recommender, 2.0 for all three,
and 1.9 to 2.7 where one is left out (`benchmarks.convergence` predicts each job with the others'). Planning takes it
for the middle of a wide prior.
"""

FEWEST_NOISE_SAMPLES = 3
"""Number of noise samples below which nothing is concluded from a curve of noise: training has just begun, or has begun
anew."""

_LEAST_WEIGHT = 0.1
"""Of the newest sample in the moving average of a curve, which is over about the last twenty. With 0.05 and 0.2 runs
under `critical` take the same time within 1 % on two jobs, with 0.2 they take 3 to 5 % less on a third (six seeds)."""

_SMALLEST_MOMENT, _LARGEST_MOMENT = 1e-60, 1e60


class NoiseCurve(Record):
    """The gradient noise of a run as it goes on: a moving average of variance and squared norm, and its error.

    The n-th sample weighs ``2 / (n + 1)`` until that is `_LEAST_WEIGHT`: an average over about the last half of a young
    run, as noise grows from next to nothing while a model learns its first steps. Gradients become shorter by orders of
    magnitude, so moments are taken relative to what came before them: else old ones would outweigh the new, and the
    decline would look like an error.

    Attributes:
        samples: number of noise estimates that were added.
        level: level of ``V + |G|^2`` in the last samples; 0 before the first.
        means: means of ``V``, ``|G|^2`` and their squares, weighted, over the level at their time.
        focus: sum of the squared weights: one over the number of samples that an equal average would be of.
    """

    samples: NonNegativeInt = 0
    level: NonNegativeFloat = 0.0
    means: tuple[float, ...] = (0.0,) * 4
    focus: NonNegativeFloat = 0.0

    def add(self, moments: Moments) -> "NoiseCurve":
        """Return a curve with one more noise estimate; the same where that is zero or absurd, as of a diverging run."""
        both = moments.gradient_variance, moments.gradient_square
        size = sum(map(abs, both))
        level = self.level or size
        if not _SMALLEST_MOMENT < level <= size / _SMALLEST_MOMENT or not size < _LARGEST_MOMENT:
            return self
        relative = [each / level for each in both]
        fresh, weight = (*relative, *(each * each for each in relative)), max(_LEAST_WEIGHT, 2 / (self.samples + 2))
        return NoiseCurve(
            samples=self.samples + 1,
            level=level + weight * (size - level),
            means=tuple(old + weight * (new - old) for old, new in zip(self.means, fresh, strict=True)),
            focus=(1 - weight) ** 2 * self.focus + weight**2,
        )

    @property
    def recent(self) -> Moments:
        """The average of variance and squared norm, at the present level; zeros before the first sample.

        A ratio is taken of these averages, as a mean of ratios would be wrong.
        """
        return Moments(gradient_variance=self.level * self.means[0], gradient_square=self.level * self.means[1])

    @property
    def likely(self) -> Moments | None:
        """The average with a squared norm no less than its error; None: under 3 samples, or no noise shows in them.

        A mean gradient that is lost in noise may be as long as the error of its square, and no longer.
        """
        if self.samples < FEWEST_NOISE_SAMPLES:
            return None
        variance, square, *squares = self.means
        width = 1 + 1.5 / (self.samples - 1)  # about Student's, of few samples
        spreads = (max(0.0, each - mean * mean) for each, mean in zip(squares, (variance, square), strict=True))
        errors = [width * math.sqrt(spread * self.focus / (1 - self.focus)) for spread in spreads]
        if variance <= 1.645 * errors[0]:  # standard errors, of which one in twenty noises that are none has more
            return None
        return replace(self.recent, gradient_square=self.level * max(square, errors[1]))


def smoothed(moments: Iterable[Moments]) -> Iterator[Moments]:
    """Yield, after each of a run's noise estimates, the moving average over about the last twenty."""
    curve = NoiseCurve()
    for one_step in moments:
        curve = curve.add(one_step)
        yield curve.recent


COEFFICIENT = 0.12
"""Prior of ``a``, a task's sensitivity to stale gradients: the upper of what was measured on two tasks, and so an
assumption about any other."""

COEFFICIENT_SD = 0.15
"""Standard deviation of the prior of ``a``: the next task may be three times as sensitive, or not at all."""

CAUTIOUS_COEFFICIENT = 0.37
"""Upper end of the 90 % interval of ``a``: what training acts by until it has seen better. Where a learning rate is as
high as dense training bears, late gradients may cost the run."""

MOST_LOST = 0.1
"""Steps, as a part of dense training's, that compression may cost where the number of steps is fixed: nothing makes up
for what was not learned in them."""

LEAST_GAIN = 0.05
"""Retained gradient energy below which nothing is planned or used, whatever it promises: the law was never seen to hold
there."""


NOISE_COEFFICIENT = 0.05
"""Prior of ``c``, what a rounding's noise costs in steps: above what two tasks showed at their own learning rates, 0.02
to 0.04."""

NOISE_COEFFICIENT_SD = 0.15
"""Standard deviation of the prior of ``c``: the next task may be trained closer to the highest learning rate that it
bears."""


def distance(gain: float) -> float:
    """Return how many steps a model lags behind dense training where steps keep ``gain`` (0, 1] of the energy."""
    return math.sqrt(1 / gain - 1)


def backlog_after(before: float, gain: float, steps: float) -> float:
    """Return the residual's energy, in gradients' energies, ``steps`` after it was ``before``, each keeping ``gain``.

    A step keeps the share ``1 - gain`` of what was held back and of one gradient that comes anew; energies add up,
    for gradients are mostly noise.

    Args:
        before: residual's energy at the beginning, over that of a gradient.
        gain: part of the energy that each step sends, in (0, 1].
        steps: number of steps; fractions are allowed.
    """
    settled = distance(gain) ** 2
    return settled + (before - settled) * float((1 - gain) ** steps)


def step_inflation(gain: float, coefficient: float = COEFFICIENT) -> float:
    """Return the factor, at least 1, on the steps of dense training where ``gain`` of the gradient's energy is kept.

    Args:
        gain: retained gradient energy, in (0, 1].
        coefficient: ``a``, the task's sensitivity to stale gradients, not negative.
    """
    return 1 + coefficient * distance(gain)
