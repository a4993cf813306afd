"""Compressors obey their contract; Top-k finds what `torch.topk` finds, and the others what they promise instead.

Residuals obey their contract; error feedback loses nothing, over steps and over a change of workers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.payload_bytes import kept_elements
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import (
    ALIKE,
    AllReduce,
    Chain,
    ErrorFeedback,
    Identity,
    MomentumCorrection,
    Residual,
    Turn,
    redistribute,
    take_momentum,
)
from hetopt.trainer.comm.methods import COMPRESSORS, Asked, checked_for
from hetopt.trainer.comm.quantisation import Packed, PackedAllGather, Quantised
from hetopt.trainer.comm.topk import (
    LOWER,
    RAISE,
    SAMPLE_SIZE,
    AllGather,
    Dgc,
    MsTopK,
    RandomElements,
    RedSync,
    Selection,
    TopK,
    largest_magnitudes,
)

from .contracts import GRADIENTS, CollectiveContract, CompressorContract, ResidualContract

ALONE = Turn(Channel())


def compressor(name, ratio=1.0):
    compression = Compression(name=name, ratio=ratio if METHODS[name].by_ratio else 1.0)
    return COMPRESSORS[name](Asked(compression=compression, chosen=checked_for(compression, None), numel=10))


def sends_elements(name):
    """Whether the registered method sends elements of the gradient as they are, each worker its own."""
    return not METHODS[name].by_shape and (isinstance(compressor(name), Selection) or name == "identity")


# Elements at least and at most, as factors of what the ratio allows; of all others exactly as many.
BOUNDS = {"dgc": (LOWER, RAISE), "redsync": (1.0, 2.0)}


def contract_of(name):
    class Contract(CompressorContract):
        LEAST, MOST = BOUNDS.get(name, (1.0, 1.0))
        NAME = name

        def make(self, ratio):
            return compressor(name, ratio)

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


class TestNoResidual(ResidualContract):
    def make(self):
        return Residual()


class TestErrorFeedback(ResidualContract):
    def make(self):
        return ErrorFeedback(self.NUMEL)


class TestMomentumCorrection(ResidualContract):
    def make(self):
        return MomentumCorrection(self.NUMEL, momentum=0.9)

    def test_velocity_and_what_is_unsent_follow_the_equations(self):
        """u <- m u + g; v <- v + u; both 0 where sent (arXiv 1712.01887), element by element in plain numbers."""
        residual, velocity, unsent = self.make(), [0.0] * self.NUMEL, [0.0] * self.NUMEL
        for gradient in self.gradients(20):
            velocity = [0.9 * u + g for u, g in zip(velocity, gradient.tolist(), strict=True)]
            unsent = [v + u for v, u in zip(unsent, velocity, strict=True)]
            prepared = residual.prepare(gradient)
            torch.testing.assert_close(prepared, torch.tensor(unsent), rtol=1e-5, atol=1e-5)
            payload = TopK(0.1).encode(prepared, ALONE)
            for index in payload.indices.tolist():
                velocity[index] = unsent[index] = 0.0
            residual.commit(payload)

    def test_gradients_are_clipped_before_they_are_accumulated(self):
        gradient = self.gradients(1)[0]
        clipped = MomentumCorrection(self.NUMEL, clip_norm=1.5).prepare(gradient)
        torch.testing.assert_close(clipped, gradient * 1.5 / gradient.norm())
        loose = MomentumCorrection(self.NUMEL, clip_norm=1000.0).prepare(gradient)
        assert torch.equal(loose, gradient)

    def test_an_optimizer_hands_its_momentum_over(self):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.8)
        dgc = Compression(name="dgc", ratio=0.1)
        assert take_momentum(dgc, optimizer).momentum == 0.8
        assert optimizer.param_groups[0]["momentum"] == 0.0
        for other in (torch.optim.SGD([weight], lr=0.1, momentum=0.8, nesterov=True), torch.optim.Adam([weight])):
            with pytest.raises(BadInput, match="twice"):
                take_momentum(dgc, other)


@pytest.mark.parametrize("compressor", [TopK(0.05), Identity()], ids=lambda c: type(c).__name__)
def test_all_that_was_sent_plus_the_residual_is_all_there_was(compressor):
    """Gradients in eighths add up without rounding in fp32, so the law holds to the last bit."""
    generator = torch.Generator().manual_seed(0)
    residual, received, total = ErrorFeedback(300), torch.zeros(300), torch.zeros(300)
    for _ in range(50):
        gradient = torch.randint(-40, 41, (300,), generator=generator) / 8
        prepared = residual.prepare(gradient)
        payload = compressor.encode(prepared, ALONE)
        payload.add_to(received)
        residual.commit(payload)
        total += gradient
        assert torch.equal(received + residual.state()["residual"], total)


@given(before=st.integers(1, 9), after=st.integers(1, 9), kept=st.sampled_from([("residual",), ("velocity", "unsent")]))
def test_a_change_of_workers_keeps_sums_and_copies_what_is_alike(before, after, kept):
    generator = torch.Generator().manual_seed(before)
    states = [
        {key: torch.randint(-64, 65, (20,), generator=generator) / 4 for key in kept}
        | {f"{ALIKE}step": torch.tensor(7)}
        for _ in range(before)
    ]
    moved = redistribute(states, after)
    assert [int(state[f"{ALIKE}step"]) for state in moved] == [7] * after
    for key in kept:
        assert torch.equal(sum(state[key] for state in moved), sum(state[key] for state in states))
        if before == after:
            assert all(torch.equal(old[key], new[key]) for old, new in zip(states, moved, strict=True))


# --- Collectives obey their contract when a worker is alone; `test_processes` runs them between real ones


class TestAllReduce(CollectiveContract):
    def make(self):
        return AllReduce()

    def compressor(self):
        return Identity()


class TestAllReduceOfCodes(TestAllReduce):
    def compressor(self):
        return Quantised(at_random=False)


class TestAllGather(CollectiveContract):
    def make(self):
        return AllGather()

    def compressor(self):
        return TopK(0.1)


class TestPaddedAllGather(TestAllGather):
    def make(self):
        return AllGather(same_size=False)


class TestPackedAllGather(CollectiveContract):
    def make(self):
        return PackedAllGather()

    def compressor(self):
        return Packed(bits=4, levels=7, at_random=True)


def test_a_chain_of_chosen_elements_sends_these_and_scales_them():
    flat, out = torch.arange(1.0, 9.0), torch.empty(8)
    Chain(Identity(), AllReduce(), choice=RandomElements(0.25).choose, scale=4.0, seed=1).run(flat, out, Channel(), 3)
    indices = RandomElements(0.25).choose(flat, Turn(Channel(), 3, 1)).long()
    expected = torch.zeros(8)
    expected[indices] = 4 * flat[indices]
    assert torch.equal(out, expected)
