"""Residuals obey their contract; error feedback loses nothing, over steps and over a change of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Identity, Turn
from hetopt.trainer.comm.error_feedback import (
    ALIKE,
    Clipped,
    ErrorFeedback,
    MomentumCorrection,
    NoResidual,
    hand_over_momentum,
    redistribute,
)
from hetopt.trainer.comm.topk import TopK

from .contracts import ResidualContract

ALONE = Turn(Channel())


class TestNoResidual(ResidualContract):
    def make(self):
        return NoResidual()


class TestErrorFeedback(ResidualContract):
    def make(self):
        return ErrorFeedback(self.NUMEL)

    def test_a_residual_of_another_model_is_refused(self):
        with pytest.raises(BadInput, match="residual"):
            self.make().load_state(ErrorFeedback(self.NUMEL + 1).state())

    def test_what_was_prepared_elsewhere_may_be_committed(self):
        residual = self.make()
        prepared = self.gradients(1)[0]
        residual.commit(prepared, self.first_half(prepared))
        half = self.NUMEL // 2
        assert torch.equal(residual.state()["residual"], torch.cat((torch.zeros(half), prepared[half:])))


class TestMomentumCorrection(ResidualContract):
    def make(self):
        return MomentumCorrection(self.NUMEL, momentum=0.9)

    def test_only_what_it_prepared_can_be_committed(self):
        residual, other = self.make(), self.gradients(1)[0]
        residual.prepare(other)
        with pytest.raises(ValueError, match="belongs"):
            residual.commit(other, self.first_half(other))

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
            residual.commit(prepared, payload)

    def test_without_momentum_it_is_error_feedback(self):
        one, two = MomentumCorrection(self.NUMEL, momentum=0.0), ErrorFeedback(self.NUMEL)
        for gradient in self.gradients(10):
            for residual in (one, two):
                prepared = residual.prepare(gradient)
                residual.commit(prepared, TopK(0.1).encode(prepared, ALONE))
            assert torch.equal(one.state()["unsent"], two.state()["residual"])

    @pytest.mark.parametrize("compressor", [TopK(1.0), Identity()], ids=lambda c: c.name)
    def test_where_everything_is_sent_it_is_momentum_sgd(self, compressor):
        residual, velocity = self.make(), torch.zeros(self.NUMEL)
        for gradient in self.gradients(10):
            velocity = 0.9 * velocity + gradient
            prepared = residual.prepare(gradient)
            torch.testing.assert_close(prepared, velocity)
            residual.commit(prepared, compressor.encode(prepared, ALONE))

    def test_gradients_are_clipped_before_they_are_accumulated(self):
        gradient = self.gradients(1)[0]
        clipped = Clipped(MomentumCorrection(self.NUMEL), 1.5).prepare(gradient)
        torch.testing.assert_close(clipped, gradient * 1.5 / gradient.norm())
        loose = Clipped(MomentumCorrection(self.NUMEL), 1000.0).prepare(gradient)
        assert torch.equal(loose, gradient)

    def test_an_optimizer_hands_its_momentum_over(self):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.8)
        assert hand_over_momentum(optimizer) == 0.8
        assert optimizer.param_groups[0]["momentum"] == 0.0
        for other in (torch.optim.SGD([weight], lr=0.1, momentum=0.8, nesterov=True), torch.optim.Adam([weight])):
            with pytest.raises(BadInput, match="twice"):
                hand_over_momentum(other)


@pytest.mark.parametrize("compressor", [TopK(0.05), Identity()], ids=lambda c: c.name)
def test_all_that_was_sent_plus_the_residual_is_all_there_was(compressor):
    """Gradients in eighths add up without rounding in fp32, so the law holds to the last bit."""
    generator = torch.Generator().manual_seed(0)
    residual, received, total = ErrorFeedback(300), torch.zeros(300), torch.zeros(300)
    for _ in range(50):
        gradient = torch.randint(-40, 41, (300,), generator=generator) / 8
        prepared = residual.prepare(gradient)
        payload = compressor.encode(prepared, ALONE)
        payload.add_to(received)
        residual.commit(prepared, payload)
        total += gradient
        assert torch.equal(received + residual.state()["residual"], total)


def test_a_dense_step_leaves_nothing_behind():
    residual = ErrorFeedback(40)
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(1))
    for compressor in (TopK(0.1), Identity()):
        prepared = residual.prepare(gradient)
        residual.commit(prepared, compressor.encode(prepared, ALONE))
    assert not residual.state()["residual"].any()


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_change_of_workers_keeps_the_sum(before, after):
    generator = torch.Generator().manual_seed(before)
    states = [{"residual": torch.randint(-64, 65, (20,), generator=generator) / 4} for _ in range(before)]
    moved = redistribute(states, after)
    assert len(moved) == after
    assert torch.equal(sum(s["residual"] for s in moved), sum(s["residual"] for s in states))
    if before == after:
        assert all(torch.equal(old["residual"], new["residual"]) for old, new in zip(states, moved, strict=True))


@given(st.integers(1, 6), st.integers(1, 6))
def test_both_parts_of_a_momentum_correction_are_handed_on_and_what_is_alike_is_copied(before, after):
    generator = torch.Generator().manual_seed(before)
    states = [
        {key: torch.randint(-64, 65, (20,), generator=generator) / 4 for key in ("velocity", "unsent")}
        | {f"{ALIKE}step": torch.tensor(7)}
        for _ in range(before)
    ]
    moved = redistribute(states, after)
    for key in ("velocity", "unsent"):
        assert torch.equal(sum(state[key] for state in moved), sum(state[key] for state in states))
    assert [int(state[f"{ALIKE}step"]) for state in moved] == [7] * after


def test_no_residual_has_nothing_to_redistribute():
    assert redistribute([NoResidual().state()] * 3, 2) == [{}, {}]
    with pytest.raises(ValueError, match="at least one"):
        redistribute([], 2)
