"""Laws of the share solver: exact against brute force, indifferent to order, monotone, and clear when nothing fits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, strategies as st

from hetopt.core.batch_partition import (
    WorkerTime,
    largest_remainder,
    proportional_quotas,
    solve_shares,
)
from hetopt.core.errors import BadInput

# Multiples of a sixteenth are exact in binary, so ties are real ties and comparisons need no tolerance.
exact_times = st.integers(0, 40).map(lambda n: n / 16)
exact_slopes = st.integers(1, 24).map(lambda n: n / 16)
real_times = st.floats(0, 10)
real_slopes = st.floats(1e-6, 10)


@st.composite
def workers(draw, times=exact_times, slopes=exact_slopes, largest=8):
    low = draw(st.integers(0, 2))
    high = draw(st.none() | st.integers(low, largest))
    return WorkerTime(
        fixed_s=draw(times),
        per_sample_s=draw(slopes),
        floor_s=draw(times),
        min_samples=low,
        max_samples=high,
    )


def splits(total, bounds):
    """Every way to split ``total`` within (low, high) bounds."""
    if not bounds:
        if total == 0:
            yield ()
        return
    (low, high), rest = bounds[0], bounds[1:]
    for first in range(low, min(high, total) + 1):
        for others in splits(total - first, rest):
            yield (first, *others)


def bounds_of(cluster, total):
    return [(w.min_samples, total if w.max_samples is None else w.max_samples) for w in cluster]


def slowest_s(cluster, sizes):
    return max(worker.time_s(size) for worker, size in zip(cluster, sizes, strict=True))


def feasible(cluster, total):
    bounds = bounds_of(cluster, total)
    assume(sum(low for low, _ in bounds) <= total <= sum(high for _, high in bounds))


def assert_legal(cluster, sizes, total):
    assert sum(sizes) == total
    for (low, high), size in zip(bounds_of(cluster, total), sizes, strict=True):
        assert low <= size <= high


exact = st.lists(workers(), min_size=1, max_size=4)
real = st.lists(workers(times=real_times, slopes=real_slopes), min_size=1, max_size=3)


@pytest.mark.parametrize(("clusters", "rounding"), [(exact, 0.0), (real, 1e-12)], ids=["exact", "real"])
@given(data=st.data(), total=st.integers(1, 14))
def test_no_integer_split_is_faster(clusters, rounding, data, total):
    cluster = data.draw(clusters)
    feasible(cluster, total)
    shares = solve_shares(cluster, total)
    assert_legal(cluster, shares.local_batch_sizes, total)
    assert shares.compute_s == pytest.approx(slowest_s(cluster, shares.local_batch_sizes), rel=rounding, abs=0)
    best = min(slowest_s(cluster, sizes) for sizes in splits(total, bounds_of(cluster, total)))
    assert shares.compute_s == pytest.approx(best, rel=rounding, abs=0)


@given(st.lists(st.tuples(workers(), st.integers(1, 6)), min_size=1, max_size=4), st.integers(1, 60))
def test_the_order_of_workers_does_not_matter(groups, total):
    flat = [worker for worker, count in groups for _ in range(count)]
    feasible(flat, total)
    shares, other = solve_shares(flat, total), solve_shares(flat[::-1], total)
    assert other.compute_s == shares.compute_s
    assert sorted(zip(map(repr, flat[::-1]), other.local_batch_sizes, strict=True)) == sorted(
        zip(map(repr, flat), shares.local_batch_sizes, strict=True)
    )


def cluster(fixed, slopes, **bounds):
    return [WorkerTime(fixed_s=a, per_sample_s=c, **bounds) for a, c in zip(fixed, slopes, strict=True)]


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (1, "must be at least 4 for 2 workers, got 1"),
        (11, "must be at most 10 to fit into the memory of 2 workers, got 11"),
    ],
)
def test_impossible_batches_name_the_bound(total, message):
    pair = cluster((0, 0), (1, 1), min_samples=2, max_samples=5)
    with pytest.raises(BadInput, match=message) as caught:
        solve_shares(pair, total)
    assert caught.value.hint


@st.composite
def apportionments(draw):
    count = draw(st.integers(1, 6))
    weights = draw(st.lists(st.floats(1e-3, 1e3), min_size=count, max_size=count))
    low = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    high = [draw(st.none() | st.integers(lowest, 60)) for lowest in low]
    least = sum(low)
    most = 200 if None in high else sum(h for h in high if h is not None)
    return weights, draw(st.integers(least, max(least, most))), low, high


@given(apportionments())
def test_apportionment_fills_exactly_and_stays_near_its_quotas(case):
    weights, total, low, high = case
    parts = largest_remainder(weights, total, minimum=low, maximum=high)
    quotas = proportional_quotas(weights, total, minimum=low, maximum=high)
    assert sum(parts) == total
    assert sum(quotas) == pytest.approx(total, rel=1e-9)
    for part, quota, lowest, highest in zip(parts, quotas, low, high, strict=True):
        assert lowest <= part
        assert highest is None or part <= highest
        assert abs(part - quota) < 1 + 1e-6
    inside = [
        quota / weight
        for weight, quota, lowest, highest in zip(weights, quotas, low, high, strict=True)
        if lowest < quota and (highest is None or quota < highest)
    ]
    assert all(x == pytest.approx(y, rel=1e-6) for x, y in itertools.pairwise(inside))
