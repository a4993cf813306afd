"""Laws of partitions: what every worker sees of the data, and who hands what on.

Laws of the share solver: exact against brute force, indifferent to order, monotone, and clear when nothing fits.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from hetopt.core.batch_partition import (
    WorkerTime,
    largest_remainder,
    proportional_quotas,
    solve_shares,
)
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Injection, Partition
from hetopt.trainer.data.cursor import PartitionedCursor, make_parts
from hetopt.trainer.data.fetch import TensorPairs, labels_of
from hetopt.trainer.steps.local_batch import BatchReader, drawn_samples, given_samples
from hetopt.trainer.tasks.vision import ImageDataset

weights = st.lists(st.integers(1, 20), min_size=1, max_size=6)
RULES = ["shards", "seldp", "labels"]
READER = BatchReader(dataset=ImageDataset(torch.zeros(1, 3, 1, 1), torch.zeros(1)), device=torch.device("cpu"), seed=0)


def labels(size: int, kinds: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(size) % kinds)


def parts_of(name: str, size: int, shares: list[int], **options):
    partition = Partition(name=name, labels=options.pop("k", 2))
    return make_parts(partition, size=size, weights=shares, seed=3, labels=labels(size, 10), **options)


@pytest.mark.parametrize("name", RULES)
@given(shares=weights, turn=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_parts_are_disjoint_and_everyone_has_some(name, shares, turn):
    parts = parts_of(name, 500, shares)
    seen = [parts(worker, turn) for worker in range(len(shares))]
    together = np.concatenate(seen)
    assert all(len(part) for part in seen)
    assert len(set(together.tolist())) == len(together)
    if name in ("shards", "seldp"):
        assert len(together) == 500


@given(workers=st.integers(1, 7), size=st.integers(7, 90))
@settings(deadline=None)
def test_a_round_of_seldp_shows_every_worker_all_the_data_once(workers, size):
    parts = make_parts(Partition(name="seldp"), size=size, weights=[4] * workers, seed=1)
    for begin in (0, workers):
        for worker in range(workers):
            seen = np.concatenate([parts(worker, begin + turn) for turn in range(workers)])
            assert sorted(seen.tolist()) == list(range(size))


@given(shares=st.lists(st.integers(2, 20), min_size=2, max_size=5))
@settings(deadline=None, max_examples=30)
def test_parts_follow_the_shares_so_that_workers_finish_together(shares):
    for name in ("shards", "seldp"):
        parts = parts_of(name, 1000, shares)
        for worker, share in enumerate(shares):
            assert abs(len(parts(worker, 0)) - 1000 * share / sum(shares)) <= 1


@given(workers=st.integers(1, 12), each=st.integers(1, 10))
@settings(deadline=None)
def test_label_skew_gives_so_many_labels_and_every_sample_where_all_labels_have_an_owner(workers, each):
    known = labels(600, 10)
    parts = make_parts(Partition(name="labels", labels=each), size=600, weights=[1] * workers, seed=5, labels=known)
    seen = [parts(worker, 0) for worker in range(workers)]
    assert all(len(np.unique(known[part])) == each for part in seen)
    if workers * each >= 10:
        assert sum(map(len, seen)) == 600


def test_bad_partitions_are_refused_in_one_sentence():
    with pytest.raises(BadInput, match="must be at most the 10 of the data, got 11"):
        parts_of("labels", 100, [1, 1], k=11)
    with pytest.raises(BadInput, match=r"worker \d has none"):
        parts_of("shards", 3, [1, 1, 1, 1])
    known = np.array([0] + [1] * 99)
    with pytest.raises(BadInput, match=r"worker \d has none"):
        make_parts(Partition(name="labels"), size=100, weights=[1] * 4, seed=0, labels=known)


@given(shares=st.lists(st.integers(1, 9), min_size=1, max_size=4), steps=st.lists(st.integers(1, 3), max_size=30))
@settings(deadline=None, max_examples=40)
def test_a_cursor_shows_each_worker_its_stream_and_resumes_anywhere(shares, steps):
    parts = make_parts(Partition(name="seldp"), size=40, weights=shares, seed=1)
    cursor = PartitionedCursor(parts, 40, weights=shares)
    seen = [[] for _ in shares]
    for factor in steps:
        cursor = cursor.at(cursor.state())
        batch = cursor.take([factor * share for share in shares])
        for worker in range(len(shares)):
            seen[worker] += batch.slice(worker).tolist()
            pieces = READER.cut(batch, worker)
            assert [i for piece in pieces for i in piece.indices] == batch.slice(worker).tolist()
            for piece in pieces:
                assert set(piece.indices.tolist()) <= set(parts(worker, piece.epoch).tolist())
    for worker, stream in enumerate(seen):
        endless: list[int] = []
        turn = 0
        while len(endless) < len(stream):
            endless += parts(worker, turn).tolist()
            turn += 1
        assert stream == endless[: len(stream)]
    assert cursor.position == sum(map(len, seen))
    assert cursor.epoch == cursor.position // 40


def test_with_other_workers_everyone_begins_as_deep_as_its_weight_says():
    before = make_parts(Partition(name="shards"), size=100, weights=[1, 1], seed=0)
    cursor = PartitionedCursor(before, 100, weights=[1, 1])
    cursor.take([30, 30])
    after = make_parts(Partition(name="shards"), size=100, weights=[1, 2, 3], seed=0)
    resumed = PartitionedCursor(after, 100, weights=[1, 2, 3]).at(cursor.state())
    assert [resumed.state()[f"drawn_by_{worker}"] for worker in range(3)] == [10, 20, 30]


def test_labels_are_found_in_any_labelled_data():
    class Plain:
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int, /) -> object:
            return torch.zeros(3), index % 3

    class Told(Plain):
        targets = (5, 4, 3, 2, 1, 0, 9)

    assert labels_of(Plain()).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert labels_of(TensorPairs(torch.zeros(4, 2), torch.tensor([3, 1, 2, 0]))).tolist() == [3, 1, 2, 0]
    with pytest.raises(BadInput, match="have no labels: a target is a tensor of float32 with shape"):
        labels_of(TensorPairs(torch.zeros(4, 2), torch.zeros(4, 1)))


@given(
    shares=st.lists(st.integers(1, 64), min_size=2, max_size=10),
    alpha=st.floats(0.01, 1),
    beta=st.floats(0.01, 1),
    position=st.integers(0, 10**6),
)
def test_injection_keeps_batches_about_as_large(shares, alpha, beta, position):
    injection = Injection(workers=alpha, samples=beta)
    drawn = drawn_samples(injection, shares)
    given_ = given_samples(injection, drawn, seed=1, position=position)
    givers = math.ceil(alpha * len(shares) - 1e-9)
    assert sum(gift > 0 for gift in given_) == givers
    assert given_ == given_samples(injection, drawn, seed=1, position=position)
    assert all(gift <= own for gift, own in zip(given_, drawn, strict=True))
    if len(set(shares)) == 1 and shares[0] >= 32:
        # What a giver gives it does not receive: its batch is smaller by that, and everyone's by rounding.
        slack = 1 + givers * 0.5 + max(given_)
        held = [own + sum(given_) - gift for own, gift in zip(drawn, given_, strict=True)]
        assert all(abs(size - shares[0]) <= slack for size in held)


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
