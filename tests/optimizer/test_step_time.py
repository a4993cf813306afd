"""Laws of one step: between maximum and sum, monotone in everything that is a burden."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.batch_partition import WorkerTime
from hetopt.core.comm.payload_bytes import Collective
from hetopt.optimizer.step_time.step_time import Breakdown, expected_maximum, step_time
from tests.collective_time import collective_time_s

workers = st.lists(
    st.tuples(st.floats(0, 1), st.floats(1e-6, 0.1), st.integers(1, 500)).map(
        lambda t: (WorkerTime(fixed_s=t[0], per_sample_s=t[1]), t[2])
    ),
    min_size=1,
    max_size=6,
)
collectives: st.SearchStrategy[Collective] = st.sampled_from(["all_reduce", "all_gather"])
payloads = st.floats(0, 1e9)
latencies = st.floats(0, 0.1)
bandwidths = st.floats(1e6, 1e11)


def _step(
    team: list[tuple[WorkerTime, int]], collective: Collective, payload: float, latency: float, bandwidth: float
) -> Breakdown:
    return step_time(
        [worker.time_s(samples) for worker, samples in team],
        exchange_s=collective_time_s(collective, payload, len(team), latency, bandwidth),
    )


@given(workers, collectives, payloads, latencies, bandwidths)
def test_a_step_is_the_slowest_worker_plus_the_exchange(
    team: list[tuple[WorkerTime, int]], collective: Collective, payload: float, latency: float, bandwidth: float
) -> None:
    step = _step(team, collective, payload, latency, bandwidth)
    slowest = max(worker.time_s(samples) for worker, samples in team)
    assert step.compute_s == slowest
    assert 0 <= step.waiting_s <= slowest
    assert step.step_time_s == pytest.approx(step.compute_s + step.communication_s)
    if len(team) == 1:
        assert step.communication_s == 0


@given(workers, collectives, payloads, latencies, bandwidths, st.floats(1, 10))
def test_no_burden_makes_a_step_quicker(
    team: list[tuple[WorkerTime, int]],
    collective: Collective,
    payload: float,
    latency: float,
    bandwidth: float,
    more: float,
) -> None:
    before = _step(team, collective, payload, latency, bandwidth).step_time_s
    bigger = [(worker, math.ceil(samples * more)) for worker, samples in team]
    for after in (
        _step(team, collective, payload * more, latency, bandwidth),
        _step(team, collective, payload, latency * more, bandwidth),
        _step(team, collective, payload, latency, bandwidth / more),
        _step(bigger, collective, payload, latency, bandwidth),
    ):
        assert after.step_time_s >= before * (1 - 1e-12)
    # Adding up in another order may differ in the last bit.
    assert _step(team[::-1], collective, payload, latency, bandwidth).step_time_s == pytest.approx(before)


@given(collectives, payloads, st.integers(1, 64), latencies, bandwidths)
def test_collective_time_is_linear_in_latency_and_slowness(
    collective: Collective, payload: float, count: int, latency: float, bandwidth: float
) -> None:
    messages = collective_time_s(collective, 0.0, count, 1.0, 1.0)
    traffic = collective_time_s(collective, payload, count, 0.0, 1.0)
    expected = collective_time_s(collective, payload, count, latency, bandwidth)
    assert messages * latency + traffic / bandwidth == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (4, 1.03), (8, 1.42), (16, 1.77), (64, 2.34), (256, 2.83)],
)
def test_expected_maximum_of_normals(count: int, expected: float) -> None:
    assert expected_maximum(count) == pytest.approx(expected, abs=0.005)
