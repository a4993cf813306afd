"""Laws of what is known of the network, and of step times: lines, corrections, and what shows a change."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, strategies as st

from benchmarks._published_collectives import dense, gathered, time_s
from hetopt.core.comm.cost import LinkSpeed, Operation, trainer_algorithm
from hetopt.core.comm.options import make_option
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Message
from hetopt.trainer.comm.network import Network
from hetopt.trainer.policies.ratio.auto import StepTimes

WORKERS, SIZES = 4, (256, 30_000, 1e6, 4e6)

links = st.builds(
    LinkSpeed,
    latency_s=st.floats(-5, -2).map(lambda exponent: 10**exponent),
    bytes_per_s=st.floats(6, 10).map(lambda exponent: 10**exponent),
)


def timed(primitive, size, link, *, members=WORKERS, factor=1.0):
    operation = Operation(primitive=primitive, payload_bytes=size, members=members)
    return Message(
        primitive=primitive, payload_bytes=size, time_s=factor * time_s([operation], link, algorithms=trainer_algorithm)
    )


def network(link, slower=()):
    factors = dict(slower)
    primitives = ("all_reduce", "all_gather", "broadcast")
    return Network.of([timed(p, size, link, factor=factors.get(p, 1.0)) for p in primitives for size in SIZES], WORKERS)


@given(link=links, factor=st.floats(0.5, 3))
def test_timings_of_lines_are_found_and_every_exchange_is_priced(link, factor):
    found = network(link, {"broadcast": factor})
    for exchange in (dense(2e5, WORKERS), gathered(9e4, WORKERS), dense(100, 2)):
        assert found.expected_s(exchange) == pytest.approx(
            time_s(exchange, link, algorithms=trainer_algorithm), rel=0.02
        )
    shared = [Operation(primitive="broadcast", payload_bytes=5e4, members=WORKERS)]
    assert found.expected_s(shared) == pytest.approx(
        factor * time_s(shared, link, algorithms=trainer_algorithm), rel=0.02
    )


LINK = LinkSpeed(latency_s=1e-3, bytes_per_s=1e7)
DENSE, THIN = (
    make_option(
        Compression(name=name, ratio=ratio, collective=collective), numel=10**6, workers=WORKERS, compress_s=0.0
    )
    for name, collective, ratio in (("identity", "all_reduce", 1.0), ("topk", "all_gather", 0.01))
)


def test_what_was_timed_counts_and_corrects_what_was_not():
    known, times = network(LINK), StepTimes()
    before_s = times.step_s(THIN, known)
    for _ in range(3):
        times = times.after(DENSE, known, step_s=0.1 + 3 * known.exchange_s(DENSE), compute_s=0.1, steps=5)
    assert times.step_s(DENSE, known) == pytest.approx(0.1 + 3 * known.exchange_s(DENSE))
    assert 0.1 + before_s < times.step_s(THIN, known) < 0.1 + 3 * before_s


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("factor", [0.4, 4.0])
def test_noise_is_no_change_and_a_change_is_seen_within_a_few_periods(noise, factor):
    known, times, draws, forgotten = network(LINK), StepTimes(), random.Random(1), []
    for number in range(1012):
        before, step_s = times.steps, (1.0 if number < 1000 else factor) * math.exp(draws.gauss(0, noise))
        times = times.after(DENSE, known, step_s=step_s, compute_s=0.1, steps=5)
        forgotten += [number] if times.steps < before else []
    assert len(forgotten) <= 3
    assert 1001 <= forgotten[-1] < 1012, "one period alone is no change"
    assert times.step_s(DENSE, known) == pytest.approx(factor, rel=0.05 + 0.5 * noise)
