"""Laws of the other pure estimators: timings, the line through collectives, retained energy, memory.

Laws of the gradient noise estimators, the published closed forms, and the trap of equal-batch formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.comm.cost import LinkSpeed, fit_alpha_beta
from hetopt.core.memory import fit_memory, memory_limit_bytes
from hetopt.core.training_laws import (
    Moments,
    distance,
    noise_scale,
    pooled_noise,
    smoothed,
)
from hetopt.profiler.probe.gradient import SAMPLED_ELEMENTS, retained_energy, sample_of
from hetopt.profiler.schedule import batch_ladder
from hetopt.trainer.policies.ratio.policy import gain_of

PAYLOADS = (4_096, 65_536, 1_048_576, 8_388_608)


@given(st.integers(1, 10_000), st.integers(1, 100_000))
def test_a_ladder_rises_and_stays_within_the_data(batch_size: int, dataset_size: int) -> None:
    ladder = batch_ladder(batch_size, dataset_size=dataset_size)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[0] >= 1
    assert ladder[-1] <= dataset_size


def test_a_ladder_brackets_the_tasks_batch_size() -> None:
    assert batch_ladder(64, dataset_size=50_000) == (4, 8, 16, 32, 64, 128, 256)
    assert batch_ladder(20, dataset_size=50_000) == (2, 5, 10, 20, 40, 80)


def time_of(line: LinkSpeed, payload_bytes: int) -> float:
    return line.latency_s + payload_bytes / line.bytes_per_s


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_line_planted_line_is_recovered(latency: float, bandwidth: float) -> None:
    line = fit_alpha_beta(PAYLOADS, [latency + size / bandwidth for size in PAYLOADS])
    for size in PAYLOADS:
        assert time_of(line, size) == pytest.approx(latency + size / bandwidth, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1), min_size=4, max_size=4))
def test_a_line_never_negative(times: list[float]) -> None:
    line = fit_alpha_beta(PAYLOADS, times)
    assert line.latency_s >= 0
    assert 0 < line.bytes_per_s < float("inf")
    assert all(time_of(line, size) > 0 for size in PAYLOADS)


def test_a_line_one_disturbed_timing_does_not_decide() -> None:
    payloads = (*PAYLOADS, 262_144, 2_097_152)
    times = [1e-4 + size / 1e9 for size in payloads]
    times[4] *= 5
    line = fit_alpha_beta(payloads, times)
    assert line.latency_s == pytest.approx(1e-4, rel=0.15)
    assert line.bytes_per_s == pytest.approx(1e9, rel=0.15)


vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60).filter(
    lambda v: any(abs(x) > 1e-3 for x in v)
)


@given(vectors)
def test_retained_energy_gain_rises_to_one_and_is_never_below_the_fraction_kept(values: list[float]) -> None:
    flat = torch.tensor(values)
    counts = range(1, len(values) + 1)
    energy = retained_energy(flat, counts)
    kept = [gain_of(part, energy[-1]) for part in energy]
    assert kept[-1] == 1
    assert all(low <= high + 1e-12 for low, high in pairwise(kept))
    assert all(value >= count / len(values) - 1e-9 for value, count in zip(kept, counts, strict=True))


@given(vectors, st.data())
def test_retained_energy_lost_energy_is_the_squared_error_of_the_mask(values: list[float], data: st.DataObject) -> None:
    flat = torch.tensor(values)
    count = data.draw(st.integers(1, len(values)))
    mask = torch.zeros_like(flat)
    mask[torch.topk(flat.abs(), count).indices] = 1
    kept, whole = retained_energy(flat, (count, len(values)))
    error = float(((flat - flat * mask).double() ** 2).sum())
    assert whole - kept == pytest.approx(error, abs=1e-6 * whole)


@pytest.mark.parametrize("elements", [1, SAMPLED_ELEMENTS, SAMPLED_ELEMENTS + 1])
def test_a_sample_of_a_gradient_is_the_whole_or_as_large_as_is_allowed(elements: int) -> None:
    assert len(torch.arange(elements)[sample_of(elements, torch.device("cpu"))]) == min(elements, SAMPLED_ELEMENTS)


@given(st.integers(10**6, 10**9), st.integers(10**3, 10**7))
def test_memory_planted_line_and_largest_batch(fixed: int, per_sample: int) -> None:
    sizes = (1, 8, 64, 256)
    line = fit_memory(sizes, [fixed + per_sample * size for size in sizes])
    assert line.fixed_bytes == pytest.approx(fixed, rel=1e-3, abs=1e3)
    assert line.per_sample_bytes == pytest.approx(per_sample, rel=1e-3)
    limit = fixed + per_sample * 1_000.5
    assert line.largest_batch(limit) == pytest.approx(1_000, abs=1)


def test_memory_noise_never_makes_memory_shrink() -> None:
    line = fit_memory((8, 16), (1_000, 900))
    assert line.per_sample_bytes == 0
    assert line.largest_batch(10_000) is None
    assert line.largest_batch(500) == 0


@given(st.integers(1, 10**12), st.integers(1, 64), st.floats(0.1, 1))
def test_memory_limits_add_up_to_no_more_than_the_fraction(total: int, workers: int, fraction: float) -> None:
    limit = memory_limit_bytes(total * workers, workers=workers, fraction=fraction)
    assert limit * workers <= max(workers, total * workers * fraction)


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
