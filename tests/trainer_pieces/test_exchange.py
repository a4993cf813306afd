"""One exchange, alone: what is composed for which compression, what it costs, and what happens when it fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import chain
from hetopt.trainer.comm.elements import AllGather
from hetopt.trainer.comm.error_feedback import ErrorFeedback
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.topk import TopK

from . import exchange_program as program


def test_a_ratio_of_one_is_dense():
    flat = torch.randn(64, generator=torch.Generator().manual_seed(1))
    before, exchange = flat.clone(), Exchange(Compression(name="topk", ratio=1.0), 64)
    for _ in range(3):
        exchange.run(flat)
        assert torch.equal(flat, before)
    assert not exchange.state()["residual"].any()


def test_what_never_arrived_is_not_committed(monkeypatch):
    def lost(*_):
        raise ConnectionError

    exchange, residual = Exchange(Compression(name="topk", ratio=0.1), 100), ErrorFeedback(100)
    monkeypatch.setattr(Channel, "all_gather", lost)
    with pytest.raises(ConnectionError):
        exchange.run(torch.ones(100))
    with pytest.raises(ConnectionError):
        chain(residual, TopK(0.1), AllGather()).run(torch.ones(100), torch.empty(100), Channel(), 0)
    assert not exchange.state()["residual"].any()
    assert not residual.state()["residual"].any()


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        (Compression(name="gzip"), "no compressor called 'gzip'"),
        (Compression(name="identity", ratio=0.1), "the ratio of identity must be 1"),
    ],
)
def test_impossible_compressions_are_refused(compression, message):
    with pytest.raises(BadInput, match=message) as caught:
        Exchange(compression, 10)
    assert caught.value.hint


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000))
def test_weighted_gradients_of_any_split_sum_to_that_of_the_big_batch(shares, seed):
    samples, targets = program.data()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(program.SAMPLES, (sum(shares),), generator=generator)
    model = program.network()
    parts = [program.weighted_gradient(model, samples[c], targets[c], sum(shares)) for c in chosen.split(shares)]
    expected = program.weighted_gradient(
        program.network().double(), samples[chosen].double(), targets[chosen], len(chosen)
    )
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    assert (total.double() - expected).norm() <= 1e-6 * expected.norm()
