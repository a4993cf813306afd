"""Laws of the equations: what makes a step longer, what cannot make it shorter, and what it lies between."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.core.step_samples import Configuration
from hetopt.optimizer.step_time.physics import Coordinates, Kinds, Steps, exchange_of, make_rows, steps
from hetopt.optimizer.step_time.step_time import slower
from tests.step_model.planted import FIXED_S, PER_SAMPLE_S, TRUTH, configuration, truth_vector

LAYOUTS = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple)
BATCHES = st.integers(1, 4096)


def one(asked: Configuration, **changes: float) -> Steps:
    rows = make_rows([asked])
    vector = truth_vector(**changes)
    where = Coordinates(types=1, compressors=len(rows.compressors))
    if rows.compressors:
        vector = np.append(vector, math.log(0.004))
    return steps(vector, where, rows, Kinds.unshared(rows))


@given(layout=LAYOUTS, batch=BATCHES)
def test_a_step_lies_between_the_longer_part_and_their_sum(layout: tuple[int, ...], batch: int) -> None:
    found = one(configuration(layout, batch))
    step, compute, exchange = (float(np.exp(log[0])) for log in (found.log_step, found.log_compute, found.log_exchange))
    assert max(compute, exchange) <= step * (1 + 1e-9)
    assert step <= (compute + exchange) * (1 + 1e-9)


@given(
    layout=LAYOUTS,
    batch=BATCHES,
    more=st.integers(0, 500),
    name=st.sampled_from(["network", "network_latency", "contention", "straggling", "overlap"]),
)
def test_slower_parts_less_overlap_or_more_samples_never_make_a_step_shorter(
    layout: tuple[int, ...], batch: int, more: int, name: str
) -> None:
    worse = TRUTH[name] + (-0.7 if name == "overlap" else 0.7)
    now, then = one(configuration(layout, batch)), one(configuration(layout, batch + more), **{name: worse})
    assert then.log_step[0] >= now.log_step[0] - 1e-12
    assert one(configuration(layout, batch + more)).log_step[0] >= now.log_step[0]


@given(layout=LAYOUTS, data=st.data())
def test_the_order_of_the_nodes_does_not_matter(layout: tuple[int, ...], data: st.DataObject) -> None:
    shuffled = tuple(data.draw(st.permutations(layout)))
    assert one(configuration(shuffled)).log_step == pytest.approx(one(configuration(layout)).log_step)


def test_one_worker_only_computes() -> None:
    found = one(configuration((1,), 64))
    assert np.exp(found.log_step[0]) == pytest.approx(FIXED_S + 64 * PER_SAMPLE_S, rel=1e-6)
    assert found.exchange_share[0] == pytest.approx(0.0, abs=1e-6)


def test_the_worker_with_most_samples_decides() -> None:
    uneven = configuration((2, 1), (8, 96, 16))
    assert one(uneven).log_compute == pytest.approx(one(configuration((2, 1), (8, 96, 96))).log_compute)
    assert one(uneven).log_compute[0] > one(configuration((2, 1), 40)).log_compute[0]


def test_equal_halves_at_an_overlap_of_ten_take_seven_percent_more_than_one() -> None:
    """2^0.1, the value that the published exponent's upper end has."""
    asked = configuration((1, 1), 64)
    compute = float(np.exp(one(asked).log_compute[0]))
    base = one(asked, forward=-40.0, overlap=math.log(9.0), network_latency=-30.0, network_growth=-30.0)
    network = math.log(0.12) + math.log(compute) - float(base.log_exchange[0])
    found = one(
        asked, forward=-40.0, overlap=math.log(9.0), network_latency=-30.0, network_growth=-30.0, network=network
    )
    assert np.exp(found.log_step[0]) / compute == pytest.approx(2**0.1, rel=1e-6)


def test_a_third_node_relieves_links_that_are_slower_than_the_hosts_alone() -> None:
    def per_traffic(layout: tuple[int, ...], ratio: float) -> float:
        asked = configuration(layout)
        found = one(asked, host_ratio=ratio, network_growth=-30.0, network_latency=-30.0)
        return float(found.log_exchange[0]) - math.log(exchange_of(asked.workers, None).traffic)

    assert per_traffic((1, 1, 1), -1.0) == pytest.approx(per_traffic((1, 1), -1.0) - 0.2)
    assert per_traffic((1, 1, 1), 0.5) == pytest.approx(per_traffic((1, 1), 0.5))
    assert per_traffic((1, 1, 1), -9.0) == pytest.approx(per_traffic((1, 1), -9.0) - 0.4), "bounded"


@given(crowd=st.integers(2, 8), nodes=st.integers(1, 6), power=st.floats(0, 1))
def test_workers_that_share_a_hop_inside_their_node_wait_for_each_other(crowd: int, nodes: int, power: float) -> None:
    """Where the host is the bottleneck, an exchange takes (m / 2)^power times as long per byte and per message."""
    slow = {"host_ratio": 3.0, "host_latency": -3.0, "network_growth": -30.0}
    asked = configuration((crowd,) * nodes)
    apart, shared = (float(one(asked, **slow, host_sharing=p).log_exchange[0]) for p in (0.0, power))
    assert shared - apart == pytest.approx(power * math.log(crowd / 2), abs=1e-3)


@given(nodes=st.integers(2, 8), power=st.floats(0, 1))
def test_nodes_of_one_worker_have_nothing_inside_to_wait_for(nodes: int, power: float) -> None:
    asked = configuration((1,) * nodes)
    slow = one(asked, host_latency=-2.0, host_sharing=power)
    assert slow.log_exchange == pytest.approx(one(asked).log_exchange)


@given(one=st.floats(1e-9, 1e3), other=st.floats(1e-9, 1e3))
def test_the_slowest_hop_decides_and_equal_ones_take_a_fifth_more(one: float, other: float) -> None:
    largest = max(one, other)
    assert largest * (1 - 1e-9) <= float(slower(one, other)) <= 2**0.25 * largest * (1 + 1e-9)
    assert float(slower(one, one)) == pytest.approx(2**0.25 * one)
    assert float(slower(one, 0.0)) == pytest.approx(one)


def test_sending_less_exchanges_faster_and_waits_for_the_whole_gradient() -> None:
    dense, sparse = one(configuration((1, 1, 1))), one(configuration((1, 1, 1), topk=0.01))
    assert sparse.log_exchange[0] < dense.log_exchange[0]
    parts = np.exp(sparse.log_compute[0]) + np.exp(sparse.log_exchange[0]) + sparse.compress_s[0]
    assert np.exp(sparse.log_step[0]) == pytest.approx(parts)


def test_shares_are_derivatives() -> None:
    rows = make_rows([configuration((2, 2), 32), configuration((1, 1, 1), 64, topk=0.1)])
    where, kinds = Coordinates(types=1, compressors=1), Kinds.unshared(rows)
    vector = np.append(truth_vector(), math.log(0.004))
    here = steps(vector, where, rows, kinds)
    for share, moved in (
        (here.compute_share, steps(vector, where, rows, kinds, compute_rest=1e-6)),
        (here.exchange_share, steps(vector, where, rows, kinds, exchange_rest=1e-6)),
    ):
        assert (moved.log_step - here.log_step) / 1e-6 == pytest.approx(share, abs=1e-4)
