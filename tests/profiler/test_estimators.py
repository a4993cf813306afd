"""Laws of the other pure estimators: timings, the line through collectives, retained energy, memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.comm.cost import LinkSpeed, fit_alpha_beta
from hetopt.core.memory import fit_memory, memory_limit_bytes
from hetopt.profiler.probe.gradient import retained_energy
from hetopt.profiler.schedule import batch_ladder
from hetopt.trainer.policies.ratio.policy import gain_of

PAYLOADS = (4_096, 65_536, 1_048_576, 8_388_608)


@given(st.integers(1, 10_000), st.integers(1, 100_000))
def test_a_ladder_rises_and_stays_within_the_data(batch_size: int, dataset_size: int) -> None:
    ladder = batch_ladder(batch_size, dataset_size=dataset_size)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[0] >= 1
    assert ladder[-1] <= dataset_size


def test_a_ladder_brackets_the_tasks_batch_size() -> None:
    assert batch_ladder(64, dataset_size=50_000) == (4, 8, 16, 32, 64, 128, 256)
    assert batch_ladder(20, dataset_size=50_000) == (2, 5, 10, 20, 40, 80)


def time_of(line: LinkSpeed, payload_bytes: int) -> float:
    return line.latency_s + payload_bytes / line.bytes_per_s


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_line_planted_line_is_recovered(latency: float, bandwidth: float) -> None:
    line = fit_alpha_beta(PAYLOADS, [latency + size / bandwidth for size in PAYLOADS])
    for size in PAYLOADS:
        assert time_of(line, size) == pytest.approx(latency + size / bandwidth, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1), min_size=4, max_size=4))
def test_a_line_never_negative(times: list[float]) -> None:
    line = fit_alpha_beta(PAYLOADS, times)
    assert line.latency_s >= 0
    assert 0 < line.bytes_per_s < float("inf")
    assert all(time_of(line, size) > 0 for size in PAYLOADS)


def test_a_line_one_disturbed_timing_does_not_decide() -> None:
    payloads = (*PAYLOADS, 262_144, 2_097_152)
    times = [1e-4 + size / 1e9 for size in payloads]
    times[4] *= 5
    line = fit_alpha_beta(payloads, times)
    assert line.latency_s == pytest.approx(1e-4, rel=0.15)
    assert line.bytes_per_s == pytest.approx(1e9, rel=0.15)


vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60).filter(
    lambda v: any(abs(x) > 1e-3 for x in v)
)


@given(vectors)
def test_retained_energy_gain_rises_to_one_and_is_never_below_the_fraction_kept(values: list[float]) -> None:
    flat = torch.tensor(values)
    counts = range(1, len(values) + 1)
    energy = retained_energy(flat, counts)
    kept = [gain_of(part, energy[-1]) for part in energy]
    assert kept[-1] == 1
    assert all(low <= high + 1e-12 for low, high in pairwise(kept))
    assert all(value >= count / len(values) - 1e-9 for value, count in zip(kept, counts, strict=True))


@given(vectors, st.data())
def test_retained_energy_lost_energy_is_the_squared_error_of_the_mask(values: list[float], data: st.DataObject) -> None:
    flat = torch.tensor(values)
    count = data.draw(st.integers(1, len(values)))
    mask = torch.zeros_like(flat)
    mask[torch.topk(flat.abs(), count).indices] = 1
    kept, whole = retained_energy(flat, (count, len(values)))
    error = float(((flat - flat * mask).double() ** 2).sum())
    assert whole - kept == pytest.approx(error, abs=1e-6 * whole)


@given(st.integers(10**6, 10**9), st.integers(10**3, 10**7))
def test_memory_planted_line_and_largest_batch(fixed: int, per_sample: int) -> None:
    sizes = (1, 8, 64, 256)
    line = fit_memory(sizes, [fixed + per_sample * size for size in sizes])
    assert line.fixed_bytes == pytest.approx(fixed, rel=1e-3, abs=1e3)
    assert line.per_sample_bytes == pytest.approx(per_sample, rel=1e-3)
    limit = fixed + per_sample * 1_000.5
    assert line.largest_batch(limit) == pytest.approx(1_000, abs=1)


def test_memory_noise_never_makes_memory_shrink() -> None:
    line = fit_memory((8, 16), (1_000, 900))
    assert line.per_sample_bytes == 0
    assert line.largest_batch(10_000) is None
    assert line.largest_batch(500) == 0


@given(st.integers(1, 10**12), st.integers(1, 64), st.floats(0.1, 1))
def test_memory_limits_add_up_to_no_more_than_the_fraction(total: int, workers: int, fraction: float) -> None:
    limit = memory_limit_bytes(total * workers, workers=workers, fraction=fraction)
    assert limit * workers <= max(workers, total * workers * fraction)
