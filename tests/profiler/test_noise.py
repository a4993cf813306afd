"""Laws of the gradient noise estimators, the published closed forms, and the trap of equal-batch formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.core.training_laws import (
    Moments,
    distance,
    noise_scale,
    pooled_noise,
    smoothed,
)

SIZES = (8, 16, 32, 96)
DIMENSIONS = 200


def estimate_noise(sizes: Sequence[int], squares: Sequence[float], mean_square: float) -> Moments:
    """By the squared norm of each group's mean gradient."""
    weighted = math.fsum(size * square for size, square in zip(sizes, squares, strict=False))
    return pooled_noise(min(len(sizes), len(squares)), sum(sizes) if min(sizes) > 0 else 0, weighted, mean_square)


batches = st.lists(st.integers(1, 50), min_size=2, max_size=6)


def group_gradients(sizes: tuple[int, ...], seed: int, dimensions: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=dimensions)
    return np.stack([truth + rng.normal(size=dimensions) / math.sqrt(size) for size in sizes])


def estimate(sizes: tuple[int, ...], groups: np.ndarray) -> Moments:
    mean = np.average(groups, axis=0, weights=sizes)
    return estimate_noise(sizes, [float(g @ g) for g in groups], float(mean @ mean))


@pytest.fixture(scope="module")
def simulated() -> tuple[np.ndarray, np.ndarray, float]:
    """Per repeat: the squared norms of the four groups, that of the mean, and the true |G|^2."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=DIMENSIONS) * 0.1
    sizes = np.array(SIZES, dtype=float)
    squares, mean_squares = [], []
    for _ in range(20):
        noise = rng.normal(size=(1_000, len(SIZES), DIMENSIONS)) / np.sqrt(sizes)[:, None]
        groups = truth + noise
        mean = np.einsum("rgd,g->rd", groups, sizes / sizes.sum())
        squares.append((groups**2).sum(axis=2))
        mean_squares.append((mean**2).sum(axis=1))
    return np.concatenate(squares), np.concatenate(mean_squares), float(truth @ truth)


def test_pooled_estimator_is_unbiased_for_unequal_groups_with_the_theoretical_spread(simulated) -> None:
    squares, mean_squares, truth = simulated
    assert truth == pytest.approx(1.848, abs=5e-4)
    moments = [estimate_noise(SIZES, list(row), mean) for row, mean in zip(squares, mean_squares, strict=True)]
    variance = np.array([m.gradient_variance for m in moments])
    square = np.array([m.gradient_square for m in moments])
    assert variance.mean() == pytest.approx(200, abs=0.35)
    assert variance.std() == pytest.approx(math.sqrt(2 * DIMENSIONS / 3) * 1.0, rel=0.02)  # 11.55
    assert square.mean() == pytest.approx(truth, abs=0.008)
    assert square.std() == pytest.approx(0.268, rel=0.02)


@given(st.integers(2, 8), st.integers(1, 64), st.integers(0, 10_000))
def test_equal_groups_give_the_pollux_estimator(count: int, size: int, seed: int) -> None:
    groups = group_gradients((size,) * count, seed)
    mean = groups.mean(axis=0)
    mean_square, average_square = float(mean @ mean), float((groups**2).sum(axis=1).mean())
    moments = estimate((size,) * count, groups)
    assert moments.gradient_square == pytest.approx((count * mean_square - average_square) / (count - 1), abs=1e-9)
    variance = count * size * (average_square - mean_square) / (count - 1)
    assert moments.gradient_variance == pytest.approx(variance, abs=1e-8)


@given(batches, st.integers(0, 10_000), st.floats(0.01, 100), st.randoms())
def test_moments_have_no_order_of_groups_and_scale_by_the_square(
    sizes: list[int], seed: int, factor: float, random
) -> None:
    groups = group_gradients(tuple(sizes), seed)
    order = list(range(len(sizes)))
    random.shuffle(order)
    one, scaled = estimate(tuple(sizes), groups), estimate(tuple(sizes[i] for i in order), groups[order] * factor)
    assert scaled.gradient_variance == pytest.approx(one.gradient_variance * factor**2, rel=1e-6, abs=1e-9)
    assert scaled.gradient_square == pytest.approx(one.gradient_square * factor**2, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("variance", "square", "scale"), [(3, -0.1, None), (3, 0, None), (6, 2, 3)])
def test_noise_scale_is_absent_while_the_signal_drowns(variance: float, square: float, scale: float | None) -> None:
    assert noise_scale(Moments(gradient_variance=variance, gradient_square=square)) == scale


def test_smoothing_a_constant_returns_it_from_the_first_sample() -> None:
    for average in smoothed(Moments(gradient_variance=5, gradient_square=-2) for _ in range(20)):
        assert average.gradient_variance == pytest.approx(5)
        assert average.gradient_square == pytest.approx(-2)


# --- The law of what compression costs: nothing where all is kept, and never less where less is


@given(st.floats(0.01, 1))
def test_the_less_is_kept_the_further_the_model_is_behind(gain: float) -> None:
    assert distance(1.0) == 0
    assert distance(gain) >= distance(min(1.0, gain * 1.1))
