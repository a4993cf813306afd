"""What an exchange achieves is read off the gradients: exactly in the mean, and whatever the noise on them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.profiler.inflation import distance
from hetopt.trainer.control.ratio.slowdown import LARGEST, Slowdown
from hetopt.trainer.exchange.memory import ErrorFeedback
from hetopt.trainer.exchange.progress import Progress
from hetopt.trainer.exchange.progress_probe import ProgressProbe, product, sketch
from hetopt.trainer.exchange.topk import TopKCompressor

from .thread_group import ThreadGroup


@pytest.mark.parametrize("numel", [1, 7, 1024, 5000, 300_000, 1_000_000])
def test_products_of_sketches_are_products_of_vectors_in_the_mean(numel):
    generator = torch.Generator().manual_seed(numel)
    one = torch.randn(numel, generator=generator)
    other = one + torch.randn(numel, generator=generator)
    seeds = 20
    found = [float(sketch(one, seed=seed) @ sketch(other, seed=seed)) for seed in range(seeds)]
    spread = math.sqrt(2 / 1024 / seeds) * float(one.norm() * other.norm())
    assert sum(found) / seeds == pytest.approx(product(one, other), abs=5 * spread + 1e-5)


def test_a_sketch_of_a_short_vector_tells_its_length_exactly():
    """No two elements share a place."""
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert float(sketch(flat, seed=9).square().sum()) == pytest.approx(float(flat.square().sum()), rel=1e-5)


def test_sketches_add_up():
    one, other = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(sketch(one, seed=4) + sketch(other, seed=4), sketch(one + other, seed=4), atol=1e-4)


def measured(workers, held, signal, steps, *, numel=4000, ratio=0.02, noise=1.0):
    """Sums over steps of both terms, of workers that see a gradient which turns by an angle of ``signal`` a step.

    ``held``: gradients go through Top-k and error feedback; else they are sent as they are.
    """
    plane = torch.linalg.qr(torch.randn(numel, 2, generator=torch.Generator().manual_seed(0)))[0] * 8

    group = ThreadGroup(workers)

    def work(rank):
        channel = group.channel(rank)
        generator = torch.Generator().manual_seed(100 + rank)
        memory, totals = ErrorFeedback(numel), [0.0, 0.0]
        for step in range(steps):
            angle = signal * step
            gradient = plane[:, 0] * math.cos(angle) + plane[:, 1] * math.sin(angle)
            gradient = (gradient + noise * torch.randn(numel, generator=generator)) / workers
            probe = ProgressProbe(gradient, channel, seed=step)
            prepared = memory.prepare(gradient)
            sent = TopKCompressor().compress(prepared, ratio if held else 1.0, None)
            total = sum(channel.all_gather(sent.dense()))
            found = probe.after(total, sent)
            memory.commit(prepared, sent)
            if step >= steps // 2:
                totals[0] += found.achieved
                totals[1] += found.dense
        return totals

    with ThreadPoolExecutor(workers) as pool:
        rows = list(pool.map(work, range(workers)))
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


@pytest.mark.parametrize("workers", [2, 4])
def test_sending_everything_achieves_everything(workers):
    achieved, dense = measured(workers, held=False, signal=0.0, steps=12, noise=0.2)
    assert achieved / dense == pytest.approx(1, abs=0.1)


def test_what_comes_late_is_no_loss_while_the_gradient_stays():
    """Gain is a few percent, and all that is held back arrives in the end."""
    achieved, dense = measured(3, held=True, signal=0.0, steps=240)
    assert achieved / dense == pytest.approx(1, abs=0.2)


def test_what_comes_late_is_lost_where_the_gradient_turns():
    achieved, dense = measured(3, held=True, signal=0.2, steps=240)
    assert achieved / dense < 0.6


@given(st.floats(0.01, 1))
def test_nothing_is_lost_where_everything_is_kept(gain):
    assert distance(1.0) == 0
    assert distance(gain) >= distance(min(1.0, gain * 1.1))


@given(st.floats(0.0, 0.6), st.lists(st.floats(0.02, 0.95), min_size=12, max_size=12), st.floats(0.01, 0.5))
def test_the_law_is_learned_from_looks(true, gains, prior):
    state, known = Slowdown(), [Slowdown().coefficient(prior)]
    assert known == [pytest.approx(prior)]
    for gain in gains * 3:
        state = state.seen(gain, Progress(achieved=5.0 / (1 + true * distance(gain)), dense=5.0), prior=prior)
        known.append(state.coefficient(prior))
    assert state.coefficient(prior) == pytest.approx(true, abs=0.02 + 0.05 * true)
    assert 0 <= state.coefficient_sd(prior) <= Slowdown().coefficient_sd(prior)


def test_noise_averages_out():
    generator, state = torch.Generator().manual_seed(5), Slowdown()
    for _ in range(60):
        dense, achieved = 4 + 1.5 * torch.randn(2, generator=generator)
        state = state.seen(0.2, Progress(achieved=float(achieved) / 1.3, dense=float(dense)), prior=0.5)
    assert state.coefficient(0.5) == pytest.approx(0.15, abs=0.12)
    assert state.coefficient_sd(0.5) < 0.2


def test_a_look_that_is_nothing_but_noise_says_nothing():
    state = Slowdown()
    assert state.seen(0.5, Progress(achieved=1.0, dense=-1.0), prior=0.5) == state
    wild = state.seen(0.5, Progress(achieved=-9.0, dense=1.0), prior=0.5)
    assert 0 <= wild.coefficient(0.5) <= LARGEST


def test_a_guess_of_nothing_is_still_a_guess():
    assert Slowdown().coefficient(0.0) == 0 < Slowdown().coefficient_sd(0.0)
