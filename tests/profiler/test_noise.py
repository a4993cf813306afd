"""Laws of the gradient noise estimators, the published closed forms, and the trap of equal-batch formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.convergence import progress_weighted_noise_scale
from hetopt.core.gradient_noise import (
    Moments,
    SmoothedNoise,
    noise_scale,
    pooled_noise,
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


def test_the_equal_batch_formula_is_two_and_a_half_times_too_high_on_unequal_groups(simulated) -> None:
    squares, mean_squares, truth = simulated
    n, total = len(SIZES), sum(SIZES)
    wrong_variance = (squares.mean(axis=1) - mean_squares) / (n / total - 1 / total)
    wrong_square = mean_squares - wrong_variance / total
    expected = 200 * (np.mean([1 / size for size in SIZES]) - 1 / total) / (n / total - 1 / total)
    assert expected == pytest.approx(513.9, abs=0.1)
    assert wrong_variance.mean() == pytest.approx(expected, rel=0.005)
    assert wrong_square.mean() == pytest.approx(truth + (200 - expected) / total, abs=0.01)
    assert truth + (200 - expected) / total == pytest.approx(-0.217, abs=0.001)


@given(st.integers(2, 8), st.integers(1, 64), st.integers(0, 10_000))
def test_equal_groups_give_the_pollux_estimator(count: int, size: int, seed: int) -> None:
    groups = group_gradients((size,) * count, seed)
    mean = groups.mean(axis=0)
    mean_square, average_square = float(mean @ mean), float((groups**2).sum(axis=1).mean())
    moments = estimate((size,) * count, groups)
    assert moments.gradient_square == pytest.approx((count * mean_square - average_square) / (count - 1), abs=1e-9)
    variance = count * size * (average_square - mean_square) / (count - 1)
    assert moments.gradient_variance == pytest.approx(variance, abs=1e-8)


@given(batches, st.integers(0, 10_000), st.randoms())
def test_order_of_groups_does_not_matter(sizes: list[int], seed: int, random) -> None:
    groups = group_gradients(tuple(sizes), seed)
    order = list(range(len(sizes)))
    random.shuffle(order)
    one, other = estimate(tuple(sizes), groups), estimate(tuple(sizes[i] for i in order), groups[order])
    assert other.gradient_variance == pytest.approx(one.gradient_variance, rel=1e-9, abs=1e-9)
    assert other.gradient_square == pytest.approx(one.gradient_square, rel=1e-9, abs=1e-9)


@given(batches, st.integers(0, 10_000), st.floats(0.01, 100))
def test_scaling_gradients_scales_both_moments_by_the_square(sizes: list[int], seed: int, factor: float) -> None:
    groups = group_gradients(tuple(sizes), seed)
    one, scaled = estimate(tuple(sizes), groups), estimate(tuple(sizes), groups * factor)
    assert scaled.gradient_variance == pytest.approx(one.gradient_variance * factor**2, rel=1e-6, abs=1e-9)
    assert scaled.gradient_square == pytest.approx(one.gradient_square * factor**2, rel=1e-6, abs=1e-9)


def test_merging_two_groups_keeps_the_expectation(simulated) -> None:
    """Three groups, the first two merged: another estimator of the same moments from the same samples."""
    rng = np.random.default_rng(3)
    truth = np.full(50, 0.2)
    fine, merged = [], []
    for _ in range(4_000):
        groups = truth + rng.normal(size=(4, 50)) / np.sqrt(SIZES)[:, None]
        joined = np.vstack([np.average(groups[:2], axis=0, weights=SIZES[:2]), groups[2:]])
        fine.append(estimate(SIZES, groups).gradient_variance)
        merged.append(estimate((SIZES[0] + SIZES[1], *SIZES[2:]), joined).gradient_variance)
    assert np.mean(fine) == pytest.approx(50, rel=0.01)
    assert np.mean(merged) == pytest.approx(50, rel=0.01)


def test_identical_groups_have_no_noise() -> None:
    moments = estimate_noise((3, 5), (4.0, 4.0), 4.0)
    assert moments == Moments(gradient_variance=0, gradient_square=4)
    assert noise_scale(moments) == 0


def test_noise_scale_is_absent_while_the_signal_drowns() -> None:
    assert noise_scale(Moments(gradient_variance=3, gradient_square=-0.1)) is None
    assert noise_scale(Moments(gradient_variance=3, gradient_square=0)) is None
    assert noise_scale(Moments(gradient_variance=6, gradient_square=2)) == 3


@pytest.mark.parametrize(
    ("sizes", "squares", "mean"),
    [
        ((8,), (1.0,), 1.0),
        ((8, 8), (1.0,), 1.0),
        ((8, 0), (1.0, 1.0), 1.0),
        ((8, 8), (1.0, math.nan), 1.0),
        ((8, 8), (1.0, -1.0), 1.0),
        ((8, 8), (1.0, 1.0), 2.0),  # no mean is longer than its parts
    ],
)
def test_the_impossible_is_refused(sizes: tuple[int, ...], squares: tuple[float, ...], mean: float) -> None:
    with pytest.raises(ValueError, match=r"group|sample|norms"):
        estimate_noise(sizes, squares, mean)


def test_ratio_of_smoothed_moments_finds_the_noise_that_the_mean_of_ratios_misses() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=DIMENSIONS) * 0.1
    true_scale = 1_800 / float(truth @ truth)
    smoothed = SmoothedNoise(decay=0.9995)
    ratios = []
    for _ in range(6_000):
        noise = rng.normal(size=(4, DIMENSIONS)) * math.sqrt(1_800 / DIMENSIONS) / np.sqrt(SIZES)[:, None]
        moments = estimate(SIZES, truth + noise)
        ratios.append(moments.gradient_variance / moments.gradient_square)
        smoothed = smoothed.add(moments)
    found = noise_scale(smoothed.moments)
    assert found == pytest.approx(true_scale, rel=0.05)
    assert abs(np.mean(ratios) / true_scale - 1) > 0.2


@given(st.floats(0, 0.99), st.integers(1, 20))
def test_smoothing_a_constant_returns_it_from_the_first_sample(decay: float, count: int) -> None:
    smoothed = SmoothedNoise(decay=decay)
    for _ in range(count):
        smoothed = smoothed.add(Moments(gradient_variance=5, gradient_square=-2))
    assert smoothed.moments.gradient_variance == pytest.approx(5)
    assert smoothed.moments.gradient_square == pytest.approx(-2)


def test_an_empty_average_and_a_bad_decay_are_refused() -> None:
    with pytest.raises(ValueError, match="no noise sample"):
        _ = SmoothedNoise().moments
    with pytest.raises(ValueError, match="decay"):
        SmoothedNoise(decay=1.0)


scales = st.lists(st.floats(1, 1e5), min_size=1, max_size=8)


@given(scales, st.integers(1, 10**6))
def test_progress_weighted_average_lies_between_harmonic_and_arithmetic_mean(values: list[float], batch: int) -> None:
    average = progress_weighted_noise_scale(values, [1] * len(values), batch)
    harmonic = len(values) / sum(1 / value for value in values)
    assert harmonic * (1 - 1e-9) <= average <= sum(values) / len(values) * (1 + 1e-9)


def test_progress_weighted_average_has_both_limits() -> None:
    values, steps = [10.0, 1_000.0], [1.0, 3.0]
    assert progress_weighted_noise_scale([v * 1e9 for v in values], steps, 1) == pytest.approx(
        4e9 / (1 / 10 + 3 / 1_000)
    )
    assert progress_weighted_noise_scale(values, steps, 10**9) == pytest.approx((10 + 3_000) / 4, rel=1e-5)
    with pytest.raises(ValueError, match="average needs"):
        progress_weighted_noise_scale([], [], 1)
