"""Compressors obey their contract, and Top-k finds exactly what `torch.topk` finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.trainer.exchange.identity import IdentityCompressor
from hetopt.trainer.exchange.topk import SAMPLE_SIZE, TopKCompressor, largest_magnitudes
from hetopt.trainer.exchange.wire import kept_elements

from .contracts import GRADIENTS, CompressorContract, MaskContract


class TestIdentity(CompressorContract):
    def make(self):
        return IdentityCompressor()


class TestIdentityMask(MaskContract):
    def make(self):
        return IdentityCompressor()


class TestTopK(CompressorContract):
    def make(self):
        return TopKCompressor()


class TestTopKMask(MaskContract):
    def make(self):
        return TopKCompressor()


LARGE = 4 * SAMPLE_SIZE + 13  # takes the sampled threshold at small k


def assert_same_magnitudes(flat, k):
    indices = largest_magnitudes(flat, k)
    assert indices.dtype == torch.int64
    assert len(indices) == k
    assert (indices.diff() > 0).all()
    ours = flat[indices].abs().sort(descending=True).values
    assert torch.equal(ours, torch.topk(flat.abs(), k).values)


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("k", [1, 2, 100, LARGE // 100, LARGE // 4, LARGE // 4 + 1, LARGE])
def test_selects_what_torch_selects(kind, k):
    assert_same_magnitudes(GRADIENTS[kind](LARGE), k)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 3), st.floats(1e-4, 0.2), st.integers(1, 200))
def test_selects_what_torch_selects_in_any_gradient(seed, power, ratio, period):
    """Layers repeat with a period, and powers make tails: both could mislead a sample."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(LARGE, generator=generator).pow(2 * power + 1)
    flat[::period] *= 100
    assert_same_magnitudes(flat, kept_elements(LARGE, ratio))


def test_a_sample_that_misleads_is_noticed():
    """All sampled places are larger than the rest: the threshold is too high, and everything is looked at after all."""
    places = torch.randint(LARGE, (SAMPLE_SIZE,), generator=torch.Generator().manual_seed(LARGE))
    flat = torch.rand(LARGE, generator=torch.Generator().manual_seed(1))
    flat[places] += 10.0
    assert_same_magnitudes(flat, LARGE // 4)


def test_not_a_number_is_sent_rather_than_hidden():
    for numel, k in ((LARGE, 100), (10, 3)):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(4))
        flat[7] = torch.nan
        assert 7 in largest_magnitudes(flat, k)


@pytest.mark.parametrize("k", [0, 11])
def test_as_many_as_there_are(k):
    with pytest.raises(ValueError, match="between 1 and 10"):
        largest_magnitudes(torch.zeros(10), k)


@pytest.mark.gpu
def test_selects_the_same_on_a_gpu():
    flat = GRADIENTS["heavy-tailed"](LARGE)
    assert torch.equal(largest_magnitudes(flat.cuda(), 1000).cpu(), largest_magnitudes(flat, 1000))
