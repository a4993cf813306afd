"""Laws of the sample cursor: every sample once an epoch, whatever the shares, the workers and the interruptions."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, strategies as st

from hetopt.trainer.data.cursor import SampleCursor, permutation

GOLDEN_FIRST = [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9]
GOLDEN_SECOND = [0, 11, 6, 2, 1, 3, 7, 4, 10, 9, 8, 5]

share_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(st.integers(1, 40), st.integers(0, 2**40), st.lists(st.tuples(share_lists, st.booleans()), max_size=25))
def test_every_epoch_holds_every_sample_once(size, seed, steps):
    """Shares and workers change every step; now and then the run is interrupted and resumed from JSON."""
    cursor = SampleCursor(size, seed)
    stream = []
    for shares, interrupted in steps:
        if interrupted:
            cursor = cursor.at(json.loads(json.dumps(cursor.state())))
        position, epoch = cursor.position, cursor.epoch
        batch = cursor.take(shares)
        assert [len(batch.slice(rank)) for rank in range(len(shares))] == shares
        assert len(batch) == sum(shares)
        assert (batch.position, batch.epoch) == (position, epoch)
        stream += batch.samples.tolist()
    assert cursor.position == len(stream)
    assert cursor.epoch == len(stream) // size
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))
    tail = stream[len(stream) // size * size :]
    assert len(set(tail)) == len(tail)


@given(st.integers(1, 40), st.lists(share_lists, max_size=10), st.lists(share_lists, max_size=10))
def test_the_stream_does_not_depend_on_the_shares(size, one, other):
    def stream(steps):
        cursor = SampleCursor(size, 7)
        return [index for shares in steps for index in cursor.take(shares).samples.tolist()]

    first, second = stream(one), stream(other)
    common = min(len(first), len(second))
    assert first[:common] == second[:common]


def test_the_order_is_the_same_everywhere_and_forever():
    """A resumed run must find the order that it was started with, also after an upgrade of numpy."""
    assert permutation(12, 0, 0).tolist() == GOLDEN_FIRST
    assert permutation(12, 3, 1).tolist() == GOLDEN_SECOND


def test_shuffles_are_fair():
    """Position of one sample over many epochs is uniform: chi-squared with 9 degrees of freedom, p = 0.001."""
    counts = np.bincount(
        [int(np.flatnonzero(permutation(10, 1, epoch) == 4)[0]) for epoch in range(2000)], minlength=10
    )
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
