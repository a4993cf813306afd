"""Laws of payloads that are chosen by what they keep: the candidate, its floor, or everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.methods import make_chain, make_residual

from .thread_group import Crew

NUMEL = 2000
SELECTIONS = ["topk", "mstopk", "dgc", "redsync"]


def in_levels(name, least_gain, *, ratio=0.01, floor_ratio=0.1):
    memory = "error_feedback" if name == "dgc" else "auto"
    return Compression(name=name, ratio=ratio, floor_ratio=floor_ratio, least_gain=least_gain, memory=memory)


def crew(compression, workers=3):
    return Crew(workers, lambda: (make_residual(compression, NUMEL), make_chain(compression, NUMEL, seed=3)))


def gradients(workers, step, tail=1.0):
    """With a few large elements, or with many alike: ``tail`` is the exponent of the magnitudes."""
    generator = torch.Generator().manual_seed(100 * step + workers)
    return [torch.randn(NUMEL, generator=generator).abs() ** tail * (1 + rank) for rank in range(workers)]


@pytest.mark.parametrize("name", SELECTIONS)
@given(least_gain=st.floats(0.001, 1.2), tail=st.floats(0.5, 8))
@settings(max_examples=8, deadline=None)
def test_nothing_is_lost_workers_agree_and_what_is_sent_keeps_enough(name, least_gain, tail):
    group = crew(in_levels(name, least_gain))
    received = brought = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        mine = gradients(3, step, tail)
        there = sum(float((r.prepare(g) ** 2).sum()) for r, g in zip(group.residuals, mine, strict=True))
        brought = brought + sum(gradient.double() for gradient in mine)
        first, *others = group.exchange(mine)
        assert all(torch.equal(first, other) for other in others)
        received = received + first.double()
        scale = max(1.0, float(brought.abs().max()))
        torch.testing.assert_close(received + group.held_back(), brought, rtol=0, atol=1e-5 * scale)
        left = sum(float((r.state()["residual"] ** 2).sum()) for r in group.residuals)
        assert left <= (1 - min(1.0, least_gain)) * there * (1 + 1e-4) + 1e-6 * there


def kinds_sent(name, least_gain, tail):
    group = crew(in_levels(name, least_gain))
    sent = []
    for step in range(3):
        group.exchange(gradients(3, step, tail))
        sent.append(group.sent_bytes[0])
    return sent


@pytest.mark.parametrize("name", ["topk", "dgc", "redsync"])
def test_each_level_is_sent_where_it_keeps_enough(name):
    """A gradient with a long tail fits into the candidate; one of alike elements needs everything."""
    dense = 4 * NUMEL
    assert max(kinds_sent(name, 0.01, 8)) < 0.1 * dense, "the candidate, a hundredth of the elements"
    floor = kinds_sent(name, 0.6, 3)[0]
    assert 0.1 * dense < floor < 0.5 * dense, "the floor, a tenth with its indices"
    assert min(kinds_sent(name, 0.9, 0.1)) > dense
    assert min(kinds_sent(name, 1.5, 8)) > dense, "nothing keeps more than everything"


def test_a_nan_is_sent_to_all():
    group, mine = crew(in_levels("topk", 0.5)), gradients(3, 0)
    mine[1][7] = torch.nan
    assert all(out[7].isnan() for out in group.exchange(mine))


def test_an_exchange_tells_what_both_would_have_kept():
    exchange = Exchange(in_levels("topk", 0.5), NUMEL)
    flat = gradients(1, 0, 4)[0]
    square = flat.double().square().sort(descending=True).values
    stats = exchange.run(flat.clone())
    expected = (float(square[:20].sum() / square.sum()), float(square[:200].sum() / square.sum()))
    assert stats.level_gains == pytest.approx(expected, rel=1e-4)
    assert stats.kept_energy / stats.energy == pytest.approx(
        expected[0] if expected[0] >= 0.5 else expected[1], rel=1e-4
    )
