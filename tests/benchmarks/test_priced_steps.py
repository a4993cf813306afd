"""What steps cost by the bytes that were sent, and what counting alone achieves on a text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import sync
from benchmarks._contenders import MODELS
from benchmarks._counted_text import counted_perplexity
from benchmarks._paired_runs import PairedRuns
from benchmarks._priced_steps import PricedRun, PricedStep, priced

JOB = MODELS["convnet"].job


def step(sent_bytes, *, steps=1, name="topk", collective="all_gather", compress_s=0.0):
    exchange = {
        "way": name, "compressor": name, "collective": collective, "sent_bytes": sent_bytes, "dense_bytes": 1000.0,
        "compress_s": compress_s,
    }  # fmt: skip
    return {"event": "step", "steps": steps, "compute_s": [1.0, 2.0], "exchange": exchange}


def evaluated(at, accuracy):
    return {"event": "evaluated", "step": at, "metrics": {"accuracy": accuracy}}


@given(st.floats(0.1, 50), st.integers(2, 16))
def test_a_gather_moves_what_the_law_says(rate, workers):
    """A tenth with its indices is a fifth of the bytes, which N - 1 others receive."""
    [stretch] = priced([step(200.0)], JOB, workers).stretches
    assert stretch.at(rate) == pytest.approx(1 + rate * 0.2 * workers / 2)


def test_everything_is_summed_whatever_the_selection_is_called():
    [thin, whole] = priced([step(200.0), step(1012.0)], JOB, 4).stretches
    assert (thin.traffic, whole.traffic) == pytest.approx((0.4, 1.012))


@given(st.floats(0, 100))
def test_dense_gradients_travel_under_backward(rate):
    [stretch] = priced([step(1000.0, name="identity", collective="all_reduce")], JOB, 4).stretches
    assert max(1, rate) <= stretch.at(rate) <= 1 + rate
    assert stretch.at(0) == pytest.approx(1)


def test_a_workers_own_part_is_that_of_its_own_computation():
    """As a machine that is twice as slow takes twice as long for both."""
    log = [step(200.0, compress_s=own) for own in (0.1, 0.2, 9.0)]
    assert [stretch.own for stretch in priced(log, JOB, 4).stretches] == [0.1] * 3


def test_times_to_evaluations_add_up():
    log = [step(0.0, steps=3), evaluated(2, 0.1), evaluated(3, 0.2), step(250.0, steps=2), evaluated(5, 0.4)]
    times, qualities = zip(*priced(log, JOB, 4).over(2.0), strict=True)
    assert times == pytest.approx((2.0, 3.0, 7.0))
    assert qualities == (0.1, 0.2, 0.4)


def run(traffic, qualities):
    stretch = PricedStep(steps=len(qualities), traffic=traffic, own=0.0, hidden=False)
    return PricedRun(stretches=(stretch,), evaluations=tuple(enumerate(qualities, 1)), sent_share=traffic)


def test_speed_ups_are_pairs_of_equal_seeds_and_none_where_one_seed_fails():
    found = PairedRuns(model=MODELS["convnet"], base="dense")
    rising = [0.1 * k for k in range(1, 10)]
    found.runs = {
        "dense": [run(1.0, rising), run(1.0, rising)],
        "thin": [run(0.0, rising), run(0.0, rising)],
        "fails": [run(0.0, rising), run(0.0, [0.1] * 9)],
    }
    assert found.speed_ups("thin", "dense", 4.0) == pytest.approx([5.0, 5.0])
    assert found.speed_ups("fails", "dense", 4.0) == []
    assert found.told("fails", 4.0) == "1 of 2 get there"


def test_what_seeds_are_apart_is_the_tolerance():
    found = PairedRuns(model=MODELS["convnet"], base="dense")
    found.runs = {"dense": [run(1.0, [0.5] * 5), run(1.0, [0.6] * 5)]}
    assert (found.tolerance, found.target()) == pytest.approx((0.1, 0.45))
    found.runs = {"dense": [run(1.0, [0.5] * 5)]}
    assert found.target() == pytest.approx(0.495)


def test_what_the_base_still_gains_is_told():
    found = PairedRuns(model=MODELS["convnet"], base="dense")
    found.runs = {"dense": [run(1.0, [0.5, 0.6, 0.62]), run(1.0, [0.5, 0.6, 0.6])]}
    assert found.still_gains == pytest.approx(0.01)
    found.runs = {"dense": [run(1.0, [0.5])]}
    assert found.still_gains == 0, "a single evaluation shows no gain"


def test_no_sibling_has_left_the_comparison_of_averages():
    assert set(sync.TASKS) == set(MODELS)


def test_beside_a_rival_that_ends_with_less_its_own_end_is_the_target():
    """And in equal steps it is bytes alone that count."""
    found = PairedRuns(model=MODELS["convnet"], base="dense")
    found.runs = {"dense": [run(1.0, [0.3, 0.6, 0.6, 0.6])], "thin": [run(0.0, [0.1, 0.3, 0.3, 0.3])]}
    assert found.speed_ups("thin", "dense", 4.0) == []
    assert found.target("thin") == pytest.approx(0.295)
    assert found.speed_ups("dense", "thin", 4.0) != []
    assert found.of_equal_steps("thin", "dense", 4.0) == pytest.approx([5.0])


def test_counts_of_a_text_of_chance_know_its_entropy():
    draw = torch.Generator().manual_seed(0)
    train, evaluation = (torch.randint(8, (20_000,), generator=draw) for _ in range(2))
    assert counted_perplexity(train, evaluation, symbols=8, order=1) == pytest.approx(8, rel=0.01)
    assert counted_perplexity(train, evaluation, symbols=8, order=2) == pytest.approx(8, rel=0.02)


def test_counts_of_two_know_a_text_in_which_each_follows_from_the_one_before():
    text = torch.arange(5000) % 7
    assert counted_perplexity(text, text, symbols=7, order=1) == pytest.approx(7, rel=0.01)
    assert counted_perplexity(text, text, symbols=7, order=2) < 1.05


@given(st.integers(2, 4))
def test_chances_of_all_symbols_are_one(order):
    """So no order can cheat: the mean chance of each symbol, weighed as if each came equally often."""
    train = torch.randint(3, (200,), generator=torch.Generator().manual_seed(order))
    texts = [torch.tensor([*history, last]) for history in [(0, 1, 2)[: order - 1]] for last in range(3)]
    chances = [1 / counted_perplexity(train, text, symbols=3, order=order) for text in texts]
    assert math.isclose(sum(chances), 1, rel_tol=1e-6)
