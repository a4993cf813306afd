"""Compressors obey their contract; Top-k finds what `torch.topk` finds, and the others what they promise instead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Turn
from hetopt.trainer.comm.methods import COMPRESSORS, make_compressor
from hetopt.trainer.comm.topk import (
    LOWER,
    RAISE,
    SAMPLE_SIZE,
    Dgc,
    MsTopK,
    RedSync,
    Selection,
    largest_magnitudes,
)

from .contracts import GRADIENTS, CompressorContract

ALONE = Turn(Channel())


def sends_elements(name):
    """Whether the registered method sends elements of the gradient as they are, each worker its own."""
    if METHODS[name].by_shape:
        return False
    return isinstance(make_compressor(Compression(name=name), 10), Selection) or name == "identity"


# Elements at least and at most, as factors of what the ratio allows; of all others exactly as many.
BOUNDS = {"dgc": (LOWER, RAISE), "redsync": (1.0, 2.0)}


def contract_of(name):
    class Contract(CompressorContract):
        LEAST, MOST = BOUNDS.get(name, (1.0, 1.0))
        NAME = name

        def make(self, ratio):
            return make_compressor(Compression(name=name, ratio=ratio if METHODS[name].by_ratio else 1.0), 10)

    return Contract


# Whatever the registry holds obeys the contract.
globals().update({f"Test_{name}": contract_of(name) for name in COMPRESSORS if sends_elements(name)})


def test_the_contract_is_asked_of_every_selection():
    asked = {name.removeprefix("Test_") for name in globals() if name.startswith("Test_")}
    assert asked == {"identity", "topk", "mstopk", "dgc", "redsync"}


@pytest.mark.parametrize("kind", [Dgc, RedSync, MsTopK], ids=lambda kind: kind.__name__)
def test_threshold_searches_send_the_largest(kind):
    """What a threshold lets pass is at least as large as all that it does not (MSTopk: but for what fills up)."""
    gradient = GRADIENTS["heavy-tailed"](200_003)
    payload, rest = kind(0.01).encode(gradient, ALONE), gradient.clone()
    payload.add_to(rest, -1)
    magnitudes = payload.values.abs().sort().values
    filled = len(magnitudes) // 1000 if kind is MsTopK else 0
    assert magnitudes[filled] >= rest.abs().max()


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


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 3), st.floats(1e-4, 0.2), st.integers(1, 200))
def test_selects_what_torch_selects_in_any_gradient(seed, power, ratio, period):
    """Layers repeat with a period, and powers make tails: both could mislead a sample."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(LARGE, generator=generator).pow(2 * power + 1)
    flat[::period] *= 100
    assert_same_magnitudes(flat, kept_elements(LARGE, ratio))


@pytest.mark.gpu
def test_selects_the_same_on_a_gpu():
    flat = GRADIENTS["heavy-tailed"](LARGE)
    assert torch.equal(largest_magnitudes(flat.cuda(), 1000).cpu(), largest_magnitudes(flat, 1000))
