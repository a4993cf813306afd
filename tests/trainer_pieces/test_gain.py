"""What other ratios would have kept, which is never in the way of the exchange."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.comm.topk import kept_energies
from hetopt.trainer.comm.vectors import energy

from .contracts import GRADIENTS

RATIOS = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0)


def exact(flat: torch.Tensor, counts: list[int]) -> list[float]:
    squares = flat.double().square().sort(descending=True).values.cumsum(0)
    return [float(squares[count - 1]) for count in counts]


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("numel", [1, 1000, 700_001])
def test_kept_energies_are_those_of_top_k(kind, numel):
    flat = GRADIENTS[kind](numel)
    counts = [kept_elements(numel, ratio) for ratio in RATIOS]
    whole = float(flat.double().square().sum())
    for found, expected in zip(kept_energies(flat, counts), exact(flat, counts), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6 * whole)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(2, 2000))
def test_energies_grow_with_the_ratio_and_at_least_as_fast_as_it(seed, numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).pow(3)
    counts = [kept_elements(numel, ratio) for ratio in RATIOS]
    found = kept_energies(flat, counts)
    assert all(one <= other for one, other in itertools.pairwise(found))
    assert found[-1] == pytest.approx(energy(flat), rel=1e-6)
    assert all(part >= count / numel * found[-1] * (1 - 1e-6) for part, count in zip(found, counts, strict=True))


@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1.0, 1e25])
def test_energy_is_that_of_double_precision_at_any_scale(scale):
    flat = scale * torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    assert energy(flat) == pytest.approx(float(flat.double().square().sum()), rel=1e-6)


def test_energy_of_nothing_and_of_nonsense():
    assert energy(torch.empty(0)) == 0.0
    assert math.isnan(energy(torch.tensor([1.0, math.nan])))
    assert energy(torch.tensor([1.0, math.inf])) == math.inf


@pytest.mark.parametrize(
    "compression", [Compression(), Compression(name="topk", ratio=0.01), Compression(name="qsgd_maxnorm")]
)
def test_looking_changes_nothing_that_is_exchanged(compression):
    one, two = Exchange(compression, 5000, seed=1), Exchange(compression, 5000, seed=1)
    for step in range(3):
        flat = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        other = flat.clone()
        plain, looked = one.run(flat), two.run(other, look_at=(0.01, 0.5, 1.0))
        assert torch.equal(flat, other)
        assert plain.look_energies == ()
        assert looked.energy == pytest.approx(looked.look_energies[-1])
        if compression.name == "topk":
            assert looked.kept_energy == pytest.approx(looked.look_energies[0], rel=1e-4)
            assert plain.kept_energy / plain.energy == looked.kept_energy / looked.energy < 1
        else:
            assert looked.kept_energy == looked.energy
