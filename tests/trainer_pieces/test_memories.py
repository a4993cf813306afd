"""Memories obey their contract; error feedback loses nothing, over steps and over a change of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetopt.profiler.errors import BadInput
from hetopt.trainer.exchange.identity import IdentityCompressor
from hetopt.trainer.exchange.memory import ErrorFeedback, NoMemory, redistribute
from hetopt.trainer.exchange.topk import TopKCompressor

from .contracts import MemoryContract


class TestNoMemory(MemoryContract):
    def make(self):
        return NoMemory()


class TestErrorFeedback(MemoryContract):
    def make(self):
        return ErrorFeedback(self.NUMEL)

    def test_a_residual_of_another_model_is_refused(self):
        with pytest.raises(BadInput, match="residual"):
            self.make().load_state(ErrorFeedback(self.NUMEL + 1).state())

    def test_what_was_prepared_elsewhere_may_be_committed(self):
        memory = self.make()
        prepared = self.gradients(1)[0]
        memory.commit(prepared, self.first_half(prepared))
        half = self.NUMEL // 2
        assert torch.equal(memory.state()["residual"], torch.cat((torch.zeros(half), prepared[half:])))


@pytest.mark.parametrize("compressor", [TopKCompressor(), IdentityCompressor()], ids=lambda c: c.name)
def test_all_that_was_sent_plus_the_residual_is_all_there_was(compressor):
    """Gradients in eighths add up without rounding in fp32, so the law holds to the last bit."""
    generator = torch.Generator().manual_seed(0)
    memory, received, total = ErrorFeedback(300), torch.zeros(300), torch.zeros(300)
    for _ in range(50):
        gradient = torch.randint(-40, 41, (300,), generator=generator) / 8
        prepared = memory.prepare(gradient)
        payload = compressor.compress(prepared, 0.05, None)
        payload.add_to(received)
        memory.commit(prepared, payload)
        total += gradient
        assert torch.equal(received + memory.state()["residual"], total)


def test_a_dense_step_leaves_nothing_behind():
    memory = ErrorFeedback(40)
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(1))
    for compressor in (TopKCompressor(), IdentityCompressor()):
        prepared = memory.prepare(gradient)
        memory.commit(prepared, compressor.compress(prepared, 0.1, None))
    assert not memory.state()["residual"].any()


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_change_of_workers_keeps_the_sum(before, after):
    generator = torch.Generator().manual_seed(before)
    states = [{"residual": torch.randint(-64, 65, (20,), generator=generator) / 4} for _ in range(before)]
    moved = redistribute(states, after)
    assert len(moved) == after
    assert torch.equal(sum(s["residual"] for s in moved), sum(s["residual"] for s in states))
    if before == after:
        assert all(torch.equal(old["residual"], new["residual"]) for old, new in zip(states, moved, strict=True))


def test_no_memory_has_nothing_to_redistribute():
    assert redistribute([NoMemory().state()] * 3, 2) == [{}, {}]
    with pytest.raises(ValueError, match="at least one"):
        redistribute([], 2)
