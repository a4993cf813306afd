"""How the learning rate follows the global batch: the usual rules, and the gain that the gradient's noise allows."""

from __future__ import annotations

import math

from hetopt.core.profile import LearningRateRule


def learning_rate_scale(rule: LearningRateRule, batch_size: int, tuned_batch_size: int) -> float:
    """The factor on a learning rate that was tuned at ``tuned_batch_size``, for steps of ``batch_size`` samples.

    - ``none``: 1.
    - ``linear``: in proportion (Goyal et al. 2017, arXiv 1706.02677, with warm-up). As many samples move the parameters
      as far, as long as steps are small and noise dominates.
    - ``sqrt``: by the square root (Krizhevsky 2014, arXiv 1404.5997). The variance of the sum of steps stays the same.
    """
    _check(batch_size, tuned_batch_size)
    match rule:
        case "none":
            return 1.0
        case "linear":
            return batch_size / tuned_batch_size
        case "sqrt":
            return math.sqrt(batch_size / tuned_batch_size)


def adascale_gain(noise_scale: float, batch_size: int, tuned_batch_size: int) -> float:
    """How many steps at the tuned batch size one step at ``batch_size`` is worth (AdaScale, Johnson et al. 2020).

    The paper's gain (arXiv 2007.05105) is the expected squared gradient at the tuned batch size B0 over that at B. Both
    are ``|G|^2 (1 + phi / batch)`` with the noise scale ``phi = tr(Sigma) / |G|^2``, in samples (McCandlish et al.
    2018, arXiv 1812.06162):

        r = (1 + phi / B0) / (1 + phi / B).

    For B >= B0 it lies between 1 (no noise: larger batches teach nothing) and B / B0 (all noise: the linear rule); for
    B < B0 between B / B0 and 1, by the same argument with the roles exchanged.

    Args:
        noise_scale: phi, in samples; may be infinite.
        batch_size: B, samples.
        tuned_batch_size: B0, samples.

    Raises:
        ValueError: the noise scale is negative or NaN, or a batch has no samples.
    """
    _check(batch_size, tuned_batch_size)
    if not noise_scale >= 0:
        raise ValueError(f"a noise scale is not negative, unlike {noise_scale}")
    if math.isinf(noise_scale):
        return batch_size / tuned_batch_size
    return (1 + noise_scale / tuned_batch_size) / (1 + noise_scale / batch_size)


def _check(batch_size: int, tuned_batch_size: int) -> None:
    if batch_size < 1 or tuned_batch_size < 1:
        raise ValueError(f"batches have at least one sample, not {batch_size} and {tuned_batch_size}")
