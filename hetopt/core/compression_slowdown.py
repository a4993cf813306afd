"""How many more steps a goal takes when compression holds part of the gradient back: one law for planning and training.

    S(B, gain) = S(B) (1 + a sqrt(1 / gain - 1))

Once gains have settled, a step sends as much energy as is new in it, if gradients are mostly noise; so what is held
back has 1 / gain - 1 times the energy of a gradient, and the root of that is how far the model is from where dense
training would have it, in steps. Analyses of error feedback bound what that costs by a term that grows with this
distance (Karimireddy et al. 2019). How quickly the gradient turns over it, ``a``, depends on the task: 0.11 to 0.14 for
a small ResNet on CIFAR-10 from 10x to 1000x, 0.03 and less for an LSTM on WikiText-2 (batches of 128 images and of 40
windows, four workers, first 400 steps; where residuals are much younger than the run, its loss lags as the law says).
Longer runs cost the ResNet more than that: after 625 steps at 3 % it was where dense training is after about 400.
Training finds out which kind of task it has (`hetopt.trainer.policies.ratio.paired_trial`); planning has the prior, and
the pilots.

Before gains have settled a step delivers less than is new, until ``1 / gain - 1`` gradients are held back
(`backlog_steps`). So many steps are missing at the end, however long the run was: of a short one that is most.

What is rounded at random and forgotten holds nothing back, and adds noise instead:

    S = S(B) (1 + c e) / s        e = q (Bn + B / n) / (Bn + B)

``q`` is the energy that rounding adds to the sum over that of the n workers' gradients, ``E|Q(g) - g|^2 / |g|^2``.
With ``E|g|^2 = |G|^2 + V / b`` of a worker's gradient and ``Bn = V / |G|^2``, ``e`` is that energy over the summed
gradient's own. Where the learning rate is as high as the noise allows, ``c`` is 1 (McCandlish et al. 2018: the best
step is shorter by as much); where it is far below, noise costs next to nothing. ``s`` is what is left of the sum in its
own direction, below 1 where elements are clipped before they are rounded (TernGrad).

Standard library only.
"""

from __future__ import annotations

import math

COEFFICIENT = 0.12
"""Prior of ``a``: the upper of what was measured on two tasks, and so an assumption about any other."""

COEFFICIENT_SD = 0.15
"""Its standard deviation: the next task may be three times as sensitive, or not at all."""

CAUTIOUS_COEFFICIENT = 0.37
"""The upper end of the 90 % interval: what training acts by until it has seen better. Where a learning rate is as high
as dense training bears, late gradients may cost the run."""

MOST_LOST = 0.1
"""Steps more than dense training that compression may cost where the number of steps is fixed: nothing makes up for
what was not learned in them."""

LEAST_GAIN = 0.05
"""Below which nothing is planned or used, whatever it promises: the law was never seen to hold there."""


NOISE_COEFFICIENT = 0.05
"""Prior of ``c``: above what two tasks showed at their own learning rates, 0.02 to 0.04."""

NOISE_COEFFICIENT_SD = 0.15
"""Its standard deviation: the next task may be trained closer to the highest learning rate that it bears."""


def distance(gain: float) -> float:
    """How far what is held back has left the model behind, in steps.

    Raises:
        ValueError: a gain outside (0, 1].
    """
    if not 0 < gain <= 1:
        raise ValueError(f"a gain is in (0, 1], not {gain}")
    return math.sqrt(1 / gain - 1)


def backlog_steps(gain: float) -> float:
    """Steps' worth of gradient that is held back once this gain has settled."""
    return distance(gain) ** 2


def backlog_after(before: float, gain: float, steps: float) -> float:
    """The same after so many steps that kept ``gain``, where it was ``before``.

    A step keeps the share ``1 - gain`` of what was held back and of one gradient that comes anew; energies add up,
    for gradients are mostly noise.
    """
    settled = backlog_steps(gain)
    return settled + (before - settled) * float((1 - gain) ** steps)


def step_inflation(gain: float, coefficient: float = COEFFICIENT) -> float:
    """Steps at this gain over steps of dense training, at least 1.

    Args:
        gain: retained gradient energy, in (0, 1].
        coefficient: ``a``.
    """
    if not 0 <= coefficient < math.inf:
        raise ValueError(f"the coefficient is finite and not negative, not {coefficient}")
    return 1 + coefficient * distance(gain)


def least_gain(inflation: float, coefficient: float) -> float:
    """The gain at which `step_inflation` is ``inflation``: less gain costs more. 1 where nothing may be lost."""
    if not inflation >= 1:
        raise ValueError(f"steps are never fewer than without compression: {inflation}")
    if coefficient == 0:
        return LEAST_GAIN
    return max(LEAST_GAIN, 1 / (1 + ((inflation - 1) / coefficient) ** 2))


def added_noise(variance: float, *, noise_scale: float | None, batch_size: float, workers: int) -> float:
    """``e``: energy that rounding adds to the summed gradient, over the energy of that. No more than ``variance``.

    Args:
        variance: ``q`` of one worker's gradient, at least 0.
        noise_scale: ``Bn`` in samples; None: not known, and then the gradient counts as all noise.
        batch_size: ``B``, samples of all workers.
        workers: ``n``, with equal parts of the batch.
    """
    if not (0 <= variance < math.inf and batch_size > 0 and workers >= 1):
        raise ValueError(f"variance, batch size and workers cannot be {variance}, {batch_size}, {workers}")
    if noise_scale is None:
        return variance
    return variance * (noise_scale + batch_size / workers) / (noise_scale + batch_size)


def noise_inflation(noise: float, signal: float = 1.0) -> float:
    """Steps with gradients that were rounded and forgotten over steps of dense training, at least 1.

    Args:
        noise: ``e`` of `added_noise`.
        signal: ``s``, in (0, 1].
    """
    if not (0 <= noise < math.inf and 0 < signal <= 1):
        raise ValueError(f"noise and signal cannot be {noise} and {signal}")
    return (1 + NOISE_COEFFICIENT * noise) / signal
