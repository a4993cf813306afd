"""The peak of a worker's tensors: exact where it was counted, growing with the samples, and never above its limit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hetopt.core.memory import MOST_DOUBLINGS, Blocks, ExchangeMemory, StepMemory, TrainingMemory
from hetopt.profiler.collect import joined

sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def memories(draw: st.DrawFn) -> TrainingMemory:
    kept = [draw(st.integers(1, 10**9)) for _ in range(4)]
    steps, computing, updating = [], 1, 0
    for samples in draw(sizes):
        computing += draw(st.integers(0, 10**8))
        updating += draw(st.integers(0, 10**6))
        steps.append(StepMemory(samples=samples, computing_bytes=computing, updating_bytes=updating))
    return TrainingMemory(
        parameter_bytes=kept[0],
        buffer_bytes=kept[1],
        gradient_bytes=kept[2],
        optimizer_bytes=kept[3],
        steps=tuple(steps),
    )


@given(memories(), st.integers(0, 10**9))
def test_the_peak_is_exact_where_it_was_counted(memory: TrainingMemory, exchange: int) -> None:
    for step in memory.steps:
        most = max(step.computing_bytes, step.updating_bytes)
        predicted = memory.peak_bytes(step.samples, ExchangeMemory(kept_bytes=exchange))
        assert predicted == pytest.approx(memory.kept_bytes + exchange + most, rel=1e-12)


@given(memories(), st.integers(1, 10**4), st.integers(1, 10**4))
def test_more_samples_never_take_less(memory: TrainingMemory, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert memory.peak_bytes(few) <= memory.peak_bytes(many) * (1 + 1e-9)
    assert memory.peak_bytes(few) >= memory.kept_bytes


@given(memories(), st.integers(1, 10**11), st.integers(0, 10**9))
def test_the_largest_micro_batch_fits_and_the_next_does_not(memory: TrainingMemory, limit: int, exchange: int) -> None:
    largest = memory.largest_micro_batch(limit, ExchangeMemory(kept_bytes=exchange))
    if largest is None:
        assert memory.peak_bytes(2 ** (MOST_DOUBLINGS - 1), ExchangeMemory(kept_bytes=exchange)) <= limit
    else:
        assert memory.peak_bytes(largest + 1, ExchangeMemory(kept_bytes=exchange)) > limit
        assert largest == 0 or memory.peak_bytes(largest, ExchangeMemory(kept_bytes=exchange)) <= limit


def test_it_goes_on_with_the_slope_of_the_last_sizes() -> None:
    """Few samples take what the gradients take for a moment; from eight on every sample adds a thousand bytes."""
    steps = tuple(
        StepMemory(samples=n, computing_bytes=max(8000, 1000 * n), updating_bytes=0) for n in (1, 4, 8, 16, 32)
    )
    memory = TrainingMemory(parameter_bytes=100, buffer_bytes=0, gradient_bytes=100, optimizer_bytes=0, steps=steps)
    assert memory.peak_bytes(2) == 200 + 8000
    assert memory.peak_bytes(24) == 200 + 24_000
    assert memory.peak_bytes(4096) == pytest.approx(200 + 4_096_000)


@given(memories(), memories())
def test_joined_counts_hold_what_each_counted(one: TrainingMemory, other: TrainingMemory) -> None:
    both = joined([one, other])
    assert [step.samples for step in both.steps] == sorted({step.samples for step in one.steps + other.steps})
    for part in (one, other):
        assert both.kept_bytes >= part.kept_bytes
        for step in part.steps:
            (same,) = [each for each in both.steps if each.samples == step.samples]
            assert same.computing_bytes >= step.computing_bytes


@given(memories(), st.integers(1, 10**9), st.integers(0, 10**9))
def test_what_backward_made_anew_is_there_while_a_copy_is_exchanged(
    memory: TrainingMemory, fresh: int, taken: int
) -> None:
    """It is part of what computing takes: only an exchange that takes something, too, can make the peak."""
    session = memory.model_copy(update={"fresh_bytes": fresh})
    exchange = ExchangeMemory(taken_bytes=taken)
    alone, together = memory.peak_bytes(1), session.peak_bytes(1, exchange)
    assert session.peak_bytes(1) == alone
    assert together == (max(alone, memory.kept_bytes + fresh + taken) if taken else alone)


@given(memories(), st.integers(1, 99), st.floats(0.01, 1), st.booleans())
def test_devices_that_share_a_replica_hold_parts_and_more_of_them_no_more(
    memory: TrainingMemory, count: int, share: float, again: bool
) -> None:
    blocks = Blocks(number=count, share=share / count, weight_bytes=memory.parameter_bytes)
    one, two, eight = (memory.shared(blocks, devices, regathers=again) for devices in (1, 2, 8))
    assert one == memory
    assert two.kept_bytes - memory.buffer_bytes == pytest.approx((memory.kept_bytes - memory.buffer_bytes) / 2, abs=3)
    arriving = memory.parameter_bytes * (2 if again else 1 + 1 / count) + 2 * memory.gradient_bytes
    for step in memory.steps:
        held = two.peak_bytes(step.samples)
        assert eight.peak_bytes(step.samples) <= held + 3
        assert held <= memory.peak_bytes(step.samples) + arriving


@given(memories(), st.integers(2, 99), st.integers(1, 8))
def test_who_keeps_less_from_forward_to_backward_holds_no_more(
    memory: TrainingMemory, count: int, devices: int
) -> None:
    blocks = Blocks(number=count, share=1 / count, weight_bytes=memory.parameter_bytes)
    kept = memory.shared(blocks, devices, regathers=False)
    freed = memory.shared(blocks, devices)
    again = memory.shared(blocks, devices, recomputes=True)
    for step in memory.steps:
        assert again.peak_bytes(step.samples) <= freed.peak_bytes(step.samples) + 2
        assert freed.peak_bytes(step.samples) <= kept.peak_bytes(step.samples) + 2
