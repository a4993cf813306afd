"""Twins: what a trial says of their losses, and that training them changes nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from hetopt.core.training_laws import MOST_LOST
from hetopt.trainer.policies.ratio.auto import CHUNK_STEPS, HARMFUL, LEAST_DROP, MOST_STEPS, PairedTrial

CHUNKS = MOST_STEPS // CHUNK_STEPS


def said(whole, thin, samples=(8,)):
    """What a trial says of these losses by chunk, and after how many."""
    trial = PairedTrial(ratio=0.001)
    for chunk, pair in enumerate(zip(whole, thin, strict=True), start=1):
        verdict = trial.after([[*pair, size] for size in samples])
        if verdict is not None:
            return verdict.says, chunk
    return None, CHUNKS


def falling(drop):
    return [10.0 - drop * chunk for chunk in range(CHUNKS)]


FLAT = [2.3] * CHUNKS


@pytest.mark.parametrize(
    ("whole", "thin", "verdict"),
    [
        (falling(1.0), falling(1.0), ("harmless", 2)),
        # As soon as something was learned.
        (falling(0.2), falling(0.2), ("harmless", 1 + math.ceil(LEAST_DROP * 10 / 0.2 - 1e-9))),
        (falling(1.0), [10.0] * CHUNKS, ("harmful", 2)),
        # It drifts away before anything was learned.
        (FLAT, [2.3 + 0.05 * chunk for chunk in range(CHUNKS)], ("harmful", 2)),
        (FLAT, FLAT, ("undecided", CHUNKS)),
        (falling(1.0), [10.0, math.nan, math.nan] + [9.0] * (CHUNKS - 3), ("harmful", 2)),
        (falling(1.0), [10.0, math.inf, math.inf] + [9.0] * (CHUNKS - 3), ("harmful", 2)),
    ],
)
def test_what_a_twins_losses_say(whole, thin, verdict):
    assert said(whole, thin) == verdict


def test_a_worker_without_memory_for_two_more_models_says_no():
    trial = PairedTrial(ratio=0.01)
    rows = [[5.0, 5.0, 8.0], [math.nan, math.nan, 8.0]]
    assert trial.after(rows) is None
    verdict = trial.after(rows)
    assert verdict is not None
    assert verdict.says == "harmful"


@given(
    drops=st.lists(st.floats(-0.2, 1.0), min_size=CHUNKS, max_size=CHUNKS),
    lags=st.lists(st.floats(-1.0, 1.0), min_size=CHUNKS, max_size=CHUNKS),
    scale=st.floats(0.1, 100),
)
def test_units_of_the_loss_do_not_matter_and_it_always_ends(drops, lags, scale):
    whole = [10.0 - sum(drops[:chunk]) for chunk in range(CHUNKS)]
    thin = [one + lag for one, lag in zip(whole, lags, strict=True)]
    said_of = said(whole, thin)
    assert said_of[0] in ("harmless", "harmful", "undecided")
    scaled = said([scale * one for one in whole], [scale * one for one in thin])
    near = min(
        abs((t - w) - part * max(whole[0] - w, LEAST_DROP * 10))
        for w, t in zip(whole, thin, strict=True)
        for part in (MOST_LOST, HARMFUL)
    )
    if near > 1e-6 and min(abs(whole[0] - w - LEAST_DROP * 10) for w in whole) > 1e-6:
        assert scaled == said_of


@given(losses=st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=3, max_size=3))
def test_workers_count_by_their_samples(losses):
    """A worker of 30 samples is three of 10 with its losses."""
    one, many = PairedTrial(ratio=0.01), PairedTrial(ratio=0.01)
    for whole, thin in losses:
        one.after([[whole, thin, 30.0], [5.0, 5.0, 10.0]])
        many.after([[whole, thin, 10.0]] * 3 + [[5.0, 5.0, 10.0]])
    assert one.whole == pytest.approx(many.whole)
    assert one.thin == pytest.approx(many.thin)
